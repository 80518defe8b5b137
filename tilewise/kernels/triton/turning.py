"""The rotary embedding as kernels take it: angles of queries and keys, and how many pairs lie which way."""

from __future__ import annotations

from typing import Any

from tilewise.pytorch.rope import rotations_on
from tilewise.rope import Rotation
from tilewise.spec import Attention, Shape


def turning(spec: Attention, shape: Shape, q: Any) -> dict[str, Any]:
    """The arguments of kernels that load q and k; without an embedding no pairs, and nothing else."""
    if spec.rope is None:
        return {"turns": None, "PAIRS": 0, "INTERLEAVED": False}
    turns = tuple(map(as_argument, rotations_on(q.device, spec.rope, shape, spec.lengths)))
    return {"turns": turns, "PAIRS": spec.rope.pairs(shape.d), "INTERLEAVED": spec.rope.interleaved}


def as_argument(rotation: Rotation) -> tuple[Any, Any, int, int]:
    """cos and sin, and the steps from one batch index, and one row, to the next."""
    cos, sin = rotation.cos, rotation.sin
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:  # tables that a caller gave lie anyhow
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(2)
