"""The rotary embedding as kernels take it: angles of queries and keys, and how many pairs lie which way; and whether
arrays are turned before."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.kernels.triton.choices import Pass
from tilewise.kernels.triton.tuning import chosen
from tilewise.pytorch.rope import rotations_on
from tilewise.rope import Rotation
from tilewise.spec import Attention, Shape, Tile

_FEW = 2


def turns_before(
    spec: Attention, shape: Shape, tile: Tile | None, q: Any, always: bool = False
) -> tuple[Rotation, Rotation] | None:
    """What q and k are turned by before kernels begin, which then have no embedding; None where tiles are turned."""
    if spec.rope is None or (not always and few_tiles_turn_keys(spec, shape, tile)):
        return None
    return rotations_on(q.device, spec.rope, shape, spec.lengths)


def few_tiles_turn_keys(spec: Attention, shape: Shape, tile: Tile | None) -> bool:
    """Whether the keys of a sequence are read by so few tiles of queries that these turn them as they load them.

    Each of them turns all of the keys again, and loads them by pointers: the copy engine turns nothing. For many it
    takes less time to write turned arrays once and to load those; for few it takes more, and memory for a copy of k.
    """
    if spec.lengths is None:
        most = shape.n_q
    elif spec.batch_invariant:  # a short sequence is turned as beside a long one
        return False
    else:
        most = int(np.diff(spec.lengths.q).max(initial=0))
    return most <= _FEW * chosen(Pass.FORWARD, spec, shape, tile).tile.q


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
