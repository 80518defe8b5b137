"""Which keys the last queries of a sequence see, told by their distance from its end: the same for every length."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from tilewise.expr import Expr
from tilewise.kernels.reads import depends_on_difference
from tilewise.schedule import Kind, plan
from tilewise.spec import Attention, Shape, Tile
from tilewise.walking import loads, remembered

_STEP = 16  # keys that are classified together
_KEYS, _LENGTH = frozenset(("K", "KP")), frozenset(("NK",))


class Reach(NamedTuple):
    """Key NK - i may count if i <= far, and counts for every query if near_full < i <= far_full."""

    far: int
    far_full: int
    near_full: int


def reach(spec: Attention, shape: Shape) -> Reach:
    """shape.n_k is the longest that a sequence can be."""
    if spec.mask is None:
        return Reach(shape.n_k, shape.n_k, 0)
    return remembered(spec.mask, ("reach", shape), lambda mask: _reach(mask, shape))


def _reach(mask: Expr, shape: Shape) -> Reach:
    """Of `a & b` each bounds the keys that count; one that reads arrays, or other positions than the distance from the
    end, is left to the kernel."""
    every = _conjuncts(mask)
    known = [x for x in every if not loads(x) and depends_on_difference(x, _KEYS, _LENGTH)]
    if not known:
        return Reach(shape.n_k, 0, 0)
    n_k = -(-shape.n_k // _STEP) * _STEP
    longest = replace(shape, n_k=n_k, total_k=n_k)
    runs = plan(Attention(1.0, reduce(lambda a, b: a & b, known)), longest, Tile(max(shape.n_q, 1), _STEP)).by_query
    first, last, kind = runs.table.T
    far = n_k - int(first.min(initial=n_k // _STEP)) * _STEP
    is_full = kind == Kind.FULL
    if len(known) < len(every) or runs.offsets.shape[:2] != (1, 1) or not is_full.any():
        return Reach(far, 0, 0)
    longest_run = int(np.argmax(np.where(is_full, last - first, 0)))
    return Reach(far, n_k - int(first[longest_run]) * _STEP, n_k - int(last[longest_run]) * _STEP)


def _conjuncts(mask: Expr) -> list[Expr]:
    if mask.op != "and":
        return [mask]
    return [x for arg in mask.args for x in _conjuncts(arg)]
