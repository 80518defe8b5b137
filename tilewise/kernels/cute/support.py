"""What the CuTe kernels can compute, wherever they run."""

from __future__ import annotations

from tilewise.kernels import gpus
from tilewise.kernels.cute.rungs import BACKWARD, BASIC, LADDER, Rung
from tilewise.spec import Attention, Shape

# Bytes that a block may take, by compute capability; of others the least is taken for granted.
SHARED_MEMORY = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10}
LEAST_SHARED_MEMORY = 99 << 10
DTYPES, OLDEST = BASIC.DTYPES, BASIC.oldest  # of the rung that takes the most
MOST_D = max(rung.MOST_D for rung in LADDER)


def unsupported(spec: Attention, shape: Shape, rung: Rung | None, capability: tuple[int, int]) -> str | None:
    """Why not this call, by any kernel, or by that one."""
    if spec.rope is not None:
        return "it has no rotary embedding; turn q and k first, with tw.apply_rope, or take kernel='triton'"
    reason = gpus.too_long(shape) or gpus.too_many(shape) or gpus.rounds_out(spec, shape)
    if reason is not None:
        return reason
    if shape.backward:
        return _not_differentiated(spec, shape, rung, capability)
    if rung is not None:
        return _refused(rung, shape, capability)
    reasons = {x.name: _refused(x, shape, capability) for x in LADDER}
    return None if None in reasons.values() else "; ".join(f"{name}: {told}" for name, told in reasons.items())


def _not_differentiated(spec: Attention, shape: Shape, rung: Rung | None, capability: tuple[int, int]) -> str | None:
    """Why there are no gradients. What BACKWARD takes, a kernel with gradients takes as well."""
    if rung is not None and not rung.differentiated:
        return "it has no backward pass; kernel='cute/forward_sm90' has one"
    if spec.wanted:
        return "its backward pass has no gradients of the arrays that a score reads; kernel='triton' has them"
    reason = _refused(BACKWARD, shape, capability)
    return None if reason is None else f"{BACKWARD.name}: {reason}; kernel='triton' has gradients, too"


def suited(shape: Shape, capability: tuple[int, int]) -> Rung:
    """The fastest kernel for a call that is supported: the last of the ladder that takes it."""
    return next(x for x in reversed(LADDER) if _refused(x, shape, capability) is None)


def _refused(rung: Rung, shape: Shape, capability: tuple[int, int]) -> str | None:
    if not rung.oldest <= capability <= rung.newest:
        wanted = f"{rung.oldest[0]}.{rung.oldest[1]}{'' if rung.oldest == rung.newest else ' or newer'}"
        return f"it is made for compute capability {wanted}, and {shape.device} has {capability[0]}.{capability[1]}"
    not_loaded = shape.not_copied if rung.maps and not shape.backward else None
    return rung.unsupported(shape) or not_loaded or no_room(rung.shared_bytes(shape), shape, capability)


def no_room(needed: int, shape: Shape, capability: tuple[int, int]) -> str | None:
    """Why a block with so many bytes in shared memory does not fit, or None."""
    room = SHARED_MEMORY.get(capability, LEAST_SHARED_MEMORY)
    if needed <= room:
        return None
    heads = f"heads of {shape.d} and {shape.d_v} in {shape.dtype}"
    return (
        f"{heads} take {needed} bytes of shared memory, and a block of {shape.device} has {room}; kernel='triton' fits"
    )
