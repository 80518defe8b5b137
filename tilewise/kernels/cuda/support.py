"""What the CUDA kernels can compute, on a GPU or on the simulator."""

from __future__ import annotations

from collections.abc import Iterable

from tilewise.kernels import gpus, reads
from tilewise.kernels.cuda.backward_rungs import BACKWARD_SM90
from tilewise.kernels.cuda.rungs import Rung
from tilewise.kernels.cuda.structs import MAX_ARRAYS, MAX_RANK
from tilewise.kernels.cuda.sums import MOST_POSITIONS
from tilewise.spec import Attention, Shape

DTYPES = ("float32", "float16", "bfloat16")


def unsupported(spec: Attention, shape: Shape, rung: str | None = None) -> str | None:
    """Why not this call, by any kernel of the ladder, or by that one."""
    if shape.backward and rung == "naive":
        return "it has no backward pass; 'tiled' has one"
    if shape.backward and rung == "forward_sm90":
        reason = BACKWARD_SM90.unsupported(shape)
        if reason is not None:
            return f"of the backward pass, {reason}; 'tiled' has one for all"
    unread = reads.unsupported(spec) if shape.backward else None
    if unread is not None:
        return unread
    if spec.rope is not None:
        return "it has no rotary embedding; turn q and k first, with tw.apply_rope, or take kernel='triton'"
    if shape.dtype not in DTYPES:
        return f"it computes {', '.join(DTYPES)}, and the arrays are {shape.dtype}; kernel='cpu' takes them"
    if max(shape.total_q, shape.total_k, shape.n_q, shape.n_k) > MOST_POSITIONS:
        return f"it counts up to {MOST_POSITIONS} positions"
    if len(spec.loaded) > MAX_ARRAYS:
        return f"the variant reads {len(spec.loaded)} arrays; it takes up to {MAX_ARRAYS}"
    for slot in spec.loaded:
        if len(slot.array.shape) > MAX_RANK:
            return f"a loaded array has {len(slot.array.shape)} dimensions; it reads up to {MAX_RANK}"
    return None


def without_room(kernels: Iterable[Rung], spec: Attention, shape: Shape) -> str | None:
    """Why a block of the GPU cannot hold what these keep in shared memory."""
    room = gpus.room(gpus.architecture(shape.device))
    if room is None:
        return None
    for kernel in kernels:
        tile = kernel.fitting(kernel.default_tile(spec, shape), shape)
        taken = int(kernel.constants(tile, shape)["SHARED_BYTES"])
        if taken > room:
            return (
                f"{kernel.name} takes {taken >> 10} KiB of shared memory for heads of {shape.d} and {shape.d_v}, and a "
                f"block of {shape.device} has {room >> 10}; kernel='triton' takes smaller tiles"
            )
    return None
