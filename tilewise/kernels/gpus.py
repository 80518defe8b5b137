"""What systems for GPUs ask of PyTorch, which is never imported here, and what Hopper's engines take."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tilewise.spec import Attention, Shape

HALF = ("float16", "bfloat16")  # what wgmma multiplies
COPIED = 16  # bytes: addresses and steps that the copy engine (TMA) takes are multiples of it
SHARED = 227 << 10  # bytes of a block on Hopper
MOST_D = 256  # columns that registers of a warpgroup have room for
MOST_ROWS = 2**30  # which kernels count in 32 bits, and add tiles and distances to


def none_here() -> str | None:
    """Who has tensors on a GPU has imported PyTorch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "nothing is on a GPU: PyTorch is not imported in this process"
    return None if torch.cuda.is_available() else "PyTorch finds no GPU, or was built without CUDA"


def capability(device: str) -> tuple[int, int]:
    found: tuple[int, int] = sys.modules["torch"].cuda.get_device_capability(device)
    return found


def elsewhere(shape: Shape) -> str | None:
    """Why the arrays are not where the kernels are."""
    if shape.device.startswith("cuda"):
        return None
    return f"it computes on NVIDIA GPUs and the arrays are on {shape.device}; move them with .cuda()"


def too_long(shape: Shape) -> str | None:
    """Why a sequence is beyond what kernels count in 32 bits."""
    rows = max(shape.n_q, shape.n_k, shape.total_q, shape.total_k)
    if rows <= MOST_ROWS:
        return None
    return f"it counts up to {MOST_ROWS} rows, and there are {rows}; kernel='cpu' takes them, in main memory"


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
