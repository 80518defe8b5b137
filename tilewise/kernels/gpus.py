"""What systems for GPUs ask of PyTorch, which is never imported here, and what Hopper's engines take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from tilewise.generations import GENERATIONS
from tilewise.spec import Attention, Shape

HALF = ("float16", "bfloat16")  # what wgmma multiplies
COPIED = 16  # bytes: addresses and steps that the copy engine (TMA) takes are multiples of it
SHARED = 227 << 10  # bytes of a block on Hopper
LEAST_ROOM = 48 << 10  # bytes of a block on any GPU
AMD_ROOM = 64 << 10  # bytes of a block; a few of AMD's GPUs have more
MOST_D = 256  # columns that registers of a warpgroup have room for
MOST_ROWS = 2**30  # which kernels count in 32 bits, and add tiles and distances to
MOST_IN_A_GRID = 65_535  # of its second and third number


def none_here() -> str | None:
    """Who has tensors on a GPU has imported PyTorch."""
    torch = sys.modules.get("torch")
    if torch is None:
        why = "is not installed" if find_spec("torch") is None else "is not imported in this process"
        return f"nothing is on a GPU: PyTorch {why}"
    return None if torch.cuda.is_available() else "PyTorch finds no GPU, or was built without CUDA"


def for_amd() -> str | None:
    """Why kernels for NVIDIA's GPUs do not run: PyTorch for AMD's calls them cuda devices, too."""
    if not _is_for_amd():
        return None
    built = f"PyTorch is built for AMD's GPUs (ROCm {sys.modules['torch'].version.hip})"
    return f"{built}, and it computes on NVIDIA's; kernel='triton' serves AMD's"


def _is_for_amd() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.version.hip is not None


def imagined(architecture: str) -> str:
    """The device name of a GPU that need not be there: systems answer for it as if all they need were installed."""
    return f"cuda:{architecture}"


def is_imagined(device: str) -> bool:
    return device.startswith(("cuda:sm_", "cuda:gfx"))


def architecture(device: str) -> str:
    """Of a GPU, as compilers name it: sm_90, gfx942."""
    if is_imagined(device):
        return device.partition(":")[2]
    if _is_for_amd():
        name: str = sys.modules["torch"].cuda.get_device_properties(device).gcnArchName
        return name.partition(":")[0]
    major, minor = capability(device)
    return f"sm_{major}{minor}"


def capability(device: str) -> tuple[int, int]:
    """Of a GPU of NVIDIA's."""
    if is_imagined(device):
        major, minor = divmod(int(device.removeprefix("cuda:sm_")), 10)
        return major, minor
    found: tuple[int, int] = sys.modules["torch"].cuda.get_device_capability(device)
    return found


def room(architecture: str) -> int | None:
    """Bytes of shared memory that a block may take; None where that is not known."""
    if architecture.startswith("gfx"):
        return AMD_ROOM
    known = GENERATIONS.get(architecture)
    return None if known is None else known.block


def elsewhere(shape: Shape) -> str | None:
    """Why the arrays are not where kernels for NVIDIA's GPUs are."""
    if not shape.device.startswith("cuda"):
        return f"it computes on NVIDIA GPUs and the arrays are on {shape.device}; move them with .cuda()"
    is_amd = shape.device.startswith("cuda:gfx") if is_imagined(shape.device) else _is_for_amd()
    if is_amd:
        return f"it computes on NVIDIA GPUs and {shape.device} is AMD's; kernel='triton' computes there"
    return None


def lying(shape: Shape, **operands: Any) -> Shape:
    """The shape of a call on tensors, told how they lie in a GPU's memory."""
    if not shape.device.startswith("cuda"):
        return shape
    reasons = (not_copied(name, x.data_ptr(), _bytes_of_steps(x)) for name, x in operands.items())
    return replace(shape, not_copied=next((reason for reason in reasons if reason is not None), None))


def _bytes_of_steps(x: Any) -> list[int]:
    """From row to row, head to head and batch to batch. That of a dimension of size 1 is never taken."""
    size = x.element_size()
    return [size * step for n, step in zip(x.shape[2::-1], x.stride()[2::-1], strict=True) if n > 1]


def too_long(shape: Shape) -> str | None:
    """Why a sequence is beyond what kernels count in 32 bits."""
    rows = max(shape.n_q, shape.n_k, shape.total_q, shape.total_k)
    if rows <= MOST_ROWS:
        return None
    return f"it counts up to {MOST_ROWS} rows, and there are {rows}; kernel='cpu' takes them, in main memory"


def too_many(shape: Shape, sequences: int = 0) -> str | None:
    """Why a kernel that has heads and batch indices as its grid's second and third number cannot be launched."""
    counts = {"heads": shape.heads, "batch indices": shape.batch, "packed sequences": sequences}
    for what, count in counts.items():
        if count > MOST_IN_A_GRID:
            return f"a launch has room for {MOST_IN_A_GRID} {what}, and there are {count}; pass fewer in a call"
    return None


def rounds_out(spec: Attention, shape: Shape) -> str | None:
    """Why a kernel that stores out in the type of q does not serve where parts of a result are merged first."""
    wanted = spec.out_dtype(shape.dtype)
    if shape.backward or wanted == shape.dtype:
        return None
    return f"it rounds out to {shape.dtype}, and parts of a result are merged in {wanted}; kernel='triton' keeps it"


def not_for_hopper(shape: Shape) -> str | None:
    """Why kernels of wgmma and TMA cannot compute calls of this shape."""
    if shape.dtype not in HALF:
        return f"it multiplies {' and '.join(HALF)}, and the arrays are {shape.dtype}"
    if max(shape.d, shape.d_v) > MOST_D or shape.d % 8 or shape.d_v % 8:
        taken = f"multiples of 8 up to {MOST_D}"
        return f"it takes head dimensions that are {taken}, and they are {shape.d} and {shape.d_v}"
    if shape.n_k == 0 or shape.n_q == 0:
        return "there is nothing to load"
    return None


def not_copied(name: str, address: int, steps: Sequence[int]) -> str | None:
    """Why the copy engine does not take an array. steps: in bytes, from row to row, head to head, batch to batch."""
    if address % COPIED:
        return f"{name} does not begin at a multiple of {COPIED} bytes"
    for step in steps:
        if step % COPIED or not 0 < step < 2**40:
            return f"{name} has rows, heads or batches {step} bytes apart; TMA takes positive multiples of {COPIED}"
    return None
