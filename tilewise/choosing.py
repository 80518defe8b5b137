"""Which kernels `auto` tries for a call, fastest first: one table over architecture, type and purpose.

The first one that can compute the call is taken. What a kernel can compute it says itself (`unsupported`: sizes, how
arrays lie, the variant), so the table has none of that. Batch sizes and lengths never decide: the same call on more
sequences is served by the same kernel. Forward and backward are chosen apart, since only out and lse cross, and every
kernel keeps both within the numeric contract.

It names kernels and asks nothing of them: dispatch.py does.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import NamedTuple

HALF, FLOAT32 = "half precision", "float32"


class Purpose(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    DECODE = "decode"


class Row(NamedTuple):
    """group: of architectures. origin: how the order is known."""

    group: str
    types: tuple[str, ...]
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    decode: tuple[str, ...]
    origin: str

    def order(self, purpose: Purpose) -> tuple[str, ...]:
        return {Purpose.FORWARD: self.forward, Purpose.BACKWARD: self.backward, Purpose.DECODE: self.decode}[purpose]


BOTH = HALF, FLOAT32
MAIN_MEMORY, VOLTA, AMPERE, HOPPER, BLACKWELL, CDNA, RDNA = (
    "main memory", "Volta and Turing", "Ampere and Ada", "Hopper", "Blackwell", "AMD CDNA", "AMD RDNA",
)  # fmt: skip

_MEASURED = "measured on an H200"
_LIKE_HOPPER = "not measured there: as on Hopper, without Hopper's own kernels"

# Measured on an H200, n 2048, TFLOP/s forward / backward, where forward_sm90 does not serve. bfloat16: d 36 Triton
# 39 / 37, cuda/tiled 13 / 7; d 64 84 / 71 (391 / 360 without the host's time) and 22 / 11; d 320 68 / 6.4 and 11 / 6.1;
# rows that TMA refuses, d 64 causal, 37 / 41 and 16 / 9. cute/basic, d 64: 157. float32: d 64 cuda/tiled 20 / 12,
# Triton 8 / 6, cute/basic 22; d 128 18 / 12, 5 / 6 and 15; d 512 11 / 5 and 1 / 2. One query a sequence on 8192 keys,
# d 64: Triton, which splits the keys, 336 us in bfloat16 and 668 in float32; a forward pass of cuda 2317 and 2374.
#
# To measure a kernel of it again, beside PyTorch's: `tilewise bench --device cuda --kernel triton --n 2048 --batch 2
# --heads 16 --d 36,64,320 --dtype bfloat16,float32 --variants full,causal --backward`.
#
# In decoding "cuda" is the bare system: its forward pass reads each sequence where it lies, so that it picks its rung
# for each. CuTe's forward pass for Hopper is faster than Triton's, but its backward pass refuses an output gradient of
# another type than q, which only the call tells: so it comes last there.
TABLE = (
    Row(
        MAIN_MEMORY, BOTH,
        forward=("cpu", "numpy"),
        backward=("cpu", "numpy"),
        decode=("cpu", "numpy"),
        origin="measured on x86-64",
    ),
    Row(
        HOPPER, (HALF,),
        forward=("cuda/forward_sm90", "cute/forward_sm90", "triton", "cute/basic", "cuda/tiled"),
        backward=("cuda/forward_sm90", "triton", "cuda/tiled", "cute/forward_sm90"),
        decode=("triton", "cuda", "cute"),
        origin=_MEASURED,
    ),
    Row(
        HOPPER, (FLOAT32,),
        forward=("cuda/tiled", "cute/basic", "triton"),
        backward=("cuda/tiled", "triton"),
        decode=("triton", "cuda", "cute"),
        origin=_MEASURED,
    ),
    Row(
        AMPERE, (HALF,),
        forward=("triton", "cute/basic", "cuda/tiled"),
        backward=("triton", "cuda/tiled"),
        decode=("triton", "cuda", "cute"),
        origin=_LIKE_HOPPER,
    ),
    Row(
        AMPERE, (FLOAT32,),
        forward=("cuda/tiled", "cute/basic", "triton"),
        backward=("cuda/tiled", "triton"),
        decode=("triton", "cuda", "cute"),
        origin=_LIKE_HOPPER,
    ),
    Row(
        BLACKWELL, (HALF,),
        forward=("triton", "cute/basic", "cuda/tiled"),
        backward=("triton", "cuda/tiled"),
        decode=("triton", "cuda", "cute"),
        origin=_LIKE_HOPPER,
    ),
    Row(
        BLACKWELL, (FLOAT32,),
        forward=("cuda/tiled", "cute/basic", "triton"),
        backward=("cuda/tiled", "triton"),
        decode=("triton", "cuda", "cute"),
        origin=_LIKE_HOPPER,
    ),
    # Triton 3.9 compiles products for sm_75 without its tensor cores (no mma.sync), and its kernels spill kilobytes to
    # the stack. cuda/tiled has no tensor cores either, but is compiled for it without a spill (nvcc 13.0; Volta needs
    # CUDA 12). Triton still decodes: it splits the keys.
    Row(
        VOLTA, BOTH,
        forward=("cuda/tiled", "triton"),
        backward=("cuda/tiled", "triton"),
        decode=("triton", "cuda"),
        origin="compiled only: nobody has measured it; neither kernel uses tensor cores there",
    ),
    Row(
        CDNA, BOTH,
        forward=("triton",),
        backward=("triton",),
        decode=("triton",),
        origin="compiled only: nobody has run it there",
    ),
    Row(
        RDNA, BOTH,
        forward=("triton",),
        backward=("triton",),
        decode=("triton",),
        origin="compiled only: nobody has run it there",
    ),
)  # fmt: skip


@cache
def row_of(architecture: str, dtype: str) -> Row | None:
    """architecture: as compilers name it (sm_90, gfx942), or "cpu". None: nothing computes there."""
    kind = HALF if dtype in ("float16", "bfloat16") else FLOAT32  # of float64 kernels for GPUs say why they refuse it
    group = group_of(architecture)
    return next((row for row in TABLE if row.group == group and kind in row.types), None)


def order(architecture: str, dtype: str, purpose: Purpose) -> tuple[str, ...]:
    """The kernels to try, fastest first; none where the table knows nothing of the architecture."""
    row = row_of(architecture, dtype)
    return () if row is None else row.order(purpose)


@cache
def everywhere(purpose: Purpose) -> tuple[str, ...]:
    """All kernels that are tried on any architecture."""
    return tuple(dict.fromkeys(name for row in TABLE for name in row.order(purpose)))


def group_of(architecture: str) -> str | None:
    """A GPU of NVIDIA's that is newer than all that are known is taken for one of the newest."""
    if architecture == "cpu":
        return MAIN_MEMORY
    kind, number = architecture[:3], architecture[3:]
    if kind == "gfx":
        return CDNA if number.startswith("9") else RDNA
    if kind != "sm_" or not number.isdigit():
        return None
    return next((group for below, group in ((80, VOLTA), (90, AMPERE), (91, HOPPER)) if int(number) < below), BLACKWELL)


def slowness(name: str, architecture: str, dtype: str, purpose: Purpose) -> str | None:
    """What makes a kernel slow there, beside what the hardware could do; None: nothing that is known."""
    if name == "numpy":
        return "it computes in NumPy, with neither the engine's vector instructions nor its threads"
    if purpose is Purpose.DECODE:
        whole = name.startswith(("cuda", "cute"))
        return "it has no kernel for few queries: its forward pass leaves most of the GPU idle" if whole else None
    scalar = name == "cuda/tiled" or (name == "triton" and group_of(architecture) == VOLTA)
    if dtype in ("float16", "bfloat16") and scalar:
        return f"it multiplies without tensor cores, which {architecture} has"
    return None
