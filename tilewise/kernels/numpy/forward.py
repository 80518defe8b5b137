"""The forward pass in NumPy: the text of which every other kernel is a translation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.rope import Rotation, rotations
from tilewise.schedule import Kind, Plan, plan
from tilewise.softmax import State
from tilewise.spec import Attention, Partial, Shape, Tile
from tilewise.walking import evaluate


@dataclass(frozen=True, eq=False)
class TileStep:
    """What one tile did, for those who watch: its place, its scores and weights, and the state after it."""

    batch: int
    head: int
    query_tile: int
    key_tile: int
    kind: Kind
    s: Array
    p: Array
    rescale: Array
    state: State


Watch = Callable[[TileStep], None]


def forward(spec: Attention, q: Array, k: Array, v: Array, tile: Tile, watch: Watch | None = None) -> Partial:
    """Attention on (batch, heads, n, d) arrays; extra memory is one tile's."""
    shape = Shape.of(spec, q, k, v)
    dtype = arrays.compute_dtype(shape.dtype)
    out = np.empty_like(q, shape=(*q.shape[:3], shape.d_v), dtype=dtype if spec.wide_out else q.dtype)
    remainder = np.empty_like(out) if spec.stores_remainder(shape.dtype) else None
    lse = np.empty(q.shape[:3], dtype)
    turns = Turns.made(spec, shape, dtype)
    for part, rows, cols in shape.sequences(spec.lengths):
        schedule = plan(spec, part, tile)
        for b, h in np.ndindex(part.batch, part.heads):
            hk = h // part.group
            head = _Head(
                b, h, q[b, h, rows], k[b, hk, cols], v[b, hk, cols], out[b, h, rows], lse[b, h, rows],
                None if remainder is None else remainder[b, h, rows], *turns.of(b, rows, cols),
            )  # fmt: skip
            _one_head(spec, part, schedule, head, watch)
    return Partial(out, lse, remainder)


@dataclass(frozen=True, eq=False)
class _Head:
    """One head of one sequence: q (n_q, d), k (n_k, d), v (n_k, d_v), out (n_q, d_v), lse (n_q,), the remainder of out
    if it is kept; what turns q, k."""

    b: int
    h: int
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    remainder: Array | None
    turn_q: Rotation | None
    turn_k: Rotation | None


def _one_head(spec: Attention, shape: Shape, schedule: Plan, head: _Head, watch: Watch | None) -> None:
    """Fill the head's out and lse, a query tile at a time."""
    dtype, stored = head.lse.dtype, arrays.dtype_name(head.out)
    ops = numpy_ops(dtype)
    sink = None if spec.sinks is None else arrays.widen(arrays.as_numpy(spec.sinks), dtype)[head.h]
    for i in range(schedule.grid[0]):
        rows = schedule.queries(i)
        # 1 load q
        q = load_turned(head.q, head.turn_q, rows, dtype) * dtype.type(spec.scale)
        state = State.init((len(q),), head.v.shape[1], dtype)
        # for each kv tile of the schedule:
        for j, kind in schedule.by_query.tiles(head.b, head.h, i):
            cols = schedule.keys(j)
            k, v = load_turned(head.k, head.turn_k, cols, dtype), arrays.widen(head.v[cols], dtype)
            # 2 s = q @ k.T
            s = q @ k.T
            env = shape.env(head.b, head.h, positions(rows)[:, None], positions(cols))
            # 3 score
            if spec.score is not None:
                s = np.broadcast_to(evaluate(spec.score, {**env, "S": s}, ops), s.shape)
            # 4 mask (PARTIAL tiles only)
            if kind == Kind.PARTIAL and spec.mask is not None:
                s = np.where(evaluate(spec.mask, env, ops), s, dtype.type(-np.inf))
            # 5 row_max, rescale, p, row_sum
            # 6 acc = acc * rescale + p @ v
            p, rescale = state.step(s, v)
            if watch is not None:
                watch(TileStep(head.b, head.h, i, j, kind, s, p, rescale, state))
        # 7 finish: acc / row_sum, lse
        done = state.finish(sink)
        head.out[rows], head.lse[rows] = arrays.narrow(done.out, stored), done.lse
        if head.remainder is not None:
            head.remainder[rows] = arrays.remainder(done.out, head.out[rows])


class Turns(NamedTuple):
    """What queries and keys are turned by as their tiles are loaded; None without a rotary embedding."""

    q: Rotation | None = None
    k: Rotation | None = None

    @classmethod
    def made(cls, spec: Attention, shape: Shape, dtype: np.dtype[Any]) -> Turns:
        return cls() if spec.rope is None else cls(*rotations(spec.rope, shape, spec.lengths, dtype))

    def of(self, b: int, rows: slice, cols: slice) -> Turns:
        """Of one batch index, and of one sequence's queries and keys."""
        if self.q is None or self.k is None:
            return self
        return Turns(self.q.of(b, rows), self.k.of(b, cols))


def load_turned(x: Array, turn: Rotation | None, rows: slice, dtype: np.dtype[Any]) -> Array:
    """Rows as numbers to compute with, turned by their positions if there is a rotary embedding."""
    tile = arrays.widen(x[rows], dtype)
    done: Array = tile if turn is None else turn.part(rows).turned(tile)
    return done


def positions(tile: slice) -> Array:
    return np.arange(tile.start, tile.stop)
