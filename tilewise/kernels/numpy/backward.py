"""The backward pass in NumPy: weights are recomputed tile by tile from lse, so nothing of size N x N is kept.

With p the weights and delta = sum(d_out * out) - d_lse for each row:
    d_v = p^T d_out,  d_score = p * (d_out v^T - delta),  d_s = d_score * d score/d S,  d_q = d_s k,  d_k = d_s^T q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.derivative import ONE, score_slopes
from tilewise.expr import Expr, S
from tilewise.kernels.numpy.forward import Turns, load_turned, positions
from tilewise.kernels.numpy.ops import clamp, numpy_ops
from tilewise.rope import Rotation
from tilewise.schedule import Kind, Plan, plan
from tilewise.softmax import d_sinks, finite
from tilewise.spec import Attention, Grads, Partial, Shape, Tile
from tilewise.walking import evaluate


@dataclass(frozen=True, eq=False)
class _Head:
    """What one head of one sequence reads (as stored) and sums into (in the type computed with)."""

    b: int
    h: int
    q: Array
    k: Array
    v: Array
    d_out: Array
    lse: Array
    delta: Array
    d_q: Array
    d_k: Array
    d_v: Array
    turn_q: Rotation | None
    turn_k: Rotation | None


def backward(
    spec: Attention, q: Array, k: Array, v: Array, saved: Partial, d_out: Array, d_lse: Array | None, tile: Tile
) -> Grads:
    """Gradients of sum(out * d_out) + sum(lse * d_lse); extra memory is O(N)."""
    shape = Shape.of(spec, q, k, v)
    dtype = arrays.compute_dtype(shape.dtype)
    # 0 delta = sum(d_out * out) - d_lse, of out before it was rounded
    delta = np.empty(saved.lse.shape, dtype)
    for b, h in np.ndindex(shape.batch, shape.heads):
        out = arrays.widen(saved.out[b, h], dtype)
        if saved.remainder is not None:
            out = out + arrays.widen(saved.remainder[b, h], dtype)
        delta[b, h] = np.sum(arrays.widen(d_out[b, h], dtype) * out, axis=-1)
    if d_lse is not None:
        delta -= arrays.widen(d_lse, dtype)
    d_q, d_k, d_v = (np.zeros(x.shape, dtype) for x in (q, k, v))
    # Sums over whole heads or batches are kept in float64: a slope's gradient adds up N x N terms.
    d_arrays = {id(slot.array): np.zeros(tuple(slot.array.shape)) for slot in spec.wanted}
    slopes = score_slopes(spec)
    turns = Turns.made(spec, shape, dtype)
    for part, rows, cols in shape.sequences(spec.lengths):
        schedule = plan(spec, part, tile)
        for b, h in np.ndindex(part.batch, part.heads):
            hk = h // part.group
            head = _Head(
                b, h, q[b, h, rows], k[b, hk, cols], v[b, hk, cols], d_out[b, h, rows], saved.lse[b, h, rows],
                delta[b, h, rows], d_q[b, h, rows], d_k[b, hk, cols], d_v[b, hk, cols],
                *turns.of(b, rows, cols),
            )  # fmt: skip
            _one_head(spec, part, schedule, head, slopes, d_arrays)
    d_q, d_k = (x if turn is None else turn.back().turned(x) for x, turn in zip((d_q, d_k), turns, strict=True))
    return Grads(
        arrays.narrow(d_q, shape.dtype),
        arrays.narrow(d_k, shape.dtype),
        arrays.narrow(d_v, shape.dtype),
        None if spec.sinks is None else d_sinks(spec.sinks, saved.lse, delta),
        tuple(arrays.narrow(d_arrays[id(x.array)], arrays.dtype_name(x.array)) for x in spec.wanted),
    )


def _one_head(
    spec: Attention,
    shape: Shape,
    schedule: Plan,
    head: _Head,
    slopes: dict[Expr, Expr],
    d_arrays: dict[int, Array],
) -> None:
    """Add up the head's d_q, d_k, d_v and its part of d_arrays, a key tile at a time."""
    dtype = head.delta.dtype
    ops = numpy_ops(dtype)
    for j in range(schedule.grid[1]):
        cols = schedule.keys(j)
        # 1 load k, v
        k, v = load_turned(head.k, head.turn_k, cols, dtype), arrays.widen(head.v[cols], dtype)
        # for each q tile of the schedule:
        for i, kind in schedule.by_key.tiles(head.b, head.h, j):
            rows = schedule.queries(i)
            q = load_turned(head.q, head.turn_q, rows, dtype) * dtype.type(spec.scale)
            d_out = arrays.widen(head.d_out[rows], dtype)
            # 2 s = q @ k.T
            s = q @ k.T
            env = shape.env(head.b, head.h, positions(rows)[:, None], positions(cols))
            env["S"] = s
            # 3 score
            score = s if spec.score is None else np.broadcast_to(evaluate(spec.score, env, ops), s.shape)
            # 4 mask (PARTIAL tiles only)
            if kind == Kind.PARTIAL and spec.mask is not None:
                score = np.where(evaluate(spec.mask, env, ops), score, dtype.type(-np.inf))
            # 5 p, from the lse that forward saved
            p = np.exp(score - finite(head.lse[rows])[:, None])
            # 6 d_v, d_score, and what follows from it
            head.d_v[cols] += p.T @ d_out
            d_score = p * (d_out @ v.T - head.delta[rows][:, None])
            d_s = _times(d_score, slopes[S], env, ops)
            head.d_q[rows] += (d_s @ k) * dtype.type(spec.scale)
            head.d_k[cols] += d_s.T @ q
            for node, slope in slopes.items():
                if node is not S:
                    _scatter(d_arrays[id(node.payload.array)], node, _times(d_score, slope, env, ops), env, ops)


def _times(d_score: Array, slope: Expr, env: dict[str, Any], ops: Any) -> Array:
    """d_score * slope; a key of weight 0 passes nothing on, whatever its slope."""
    if slope is ONE:
        return d_score
    with np.errstate(invalid="ignore"):
        return np.where(d_score == 0, d_score, d_score * evaluate(slope, env, ops))


def _scatter(grad: Array, read: Expr, values: Array, env: dict[str, Any], ops: Any) -> None:
    """grad[index] += values, first summed over the rows or columns that no index depends on."""
    index = tuple(clamp(np.atleast_2d(evaluate(i, env, ops)), n) for i, n in zip(read.args, grad.shape, strict=True))
    for axis in (0, 1):
        if all(i.shape[axis] == 1 for i in index):
            values = values.sum(axis=axis, keepdims=True, dtype=grad.dtype)
    if not index:
        grad += values[0, 0]
    elif all(i.op in ("var", "const") for i in read.args):
        grad[index] += values  # no cell twice: plain variables are distinct positions
    else:
        np.add.at(grad, index, values)
