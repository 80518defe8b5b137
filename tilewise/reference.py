"""Dense attention and its gradients, in float64: the oracle. No tiles, no cleverness, N x N memory.

`dtype` computes the same in another precision, and `store` rounds what such a computation would keep in half precision
(weights, outputs, gradients): the error that the contract allows a kernel is measured with these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.derivative import derivative
from tilewise.expr import Expr, S
from tilewise.kernels.numpy.ops import clamp, numpy_ops
from tilewise.rope import rotations
from tilewise.spec import Attention, Grads, Partial, Shape
from tilewise.walking import evaluate, evaluate_all, nodes

Store = Callable[[Array], Array]


def forward(
    spec: Attention, q: Any, k: Any, v: Any, dtype: npt.DTypeLike = np.float64, store: Store = lambda x: x
) -> Partial:
    """softmax(score(scale * q k^T), where the mask holds) v, on (batch, heads, n, d) arrays."""
    q, k, v = (arrays.widen(arrays.as_numpy(x), dtype) for x in (q, k, v))
    shape = Shape.of(spec, q, k, v)
    q, k = _turned(spec, shape, q, k, dtype, store)
    out, lse = np.zeros((*q.shape[:3], v.shape[3]), dtype), np.zeros(q.shape[:3], dtype)
    for part, rows, cols in shape.sequences(spec.lengths):
        score, _ = _scores(spec, part, q[:, :, rows], k[:, :, cols], dtype)
        p, lse[:, :, rows] = _softmax(spec, score)
        out[:, :, rows] = store(store(p) @ _per_query_head(v[:, :, cols], part))
    return Partial(out, lse)


def backward(
    spec: Attention,
    q: Any,
    k: Any,
    v: Any,
    d_out: Any,
    d_lse: Any = None,
    dtype: npt.DTypeLike = np.float64,
    store: Store = lambda x: x,
) -> Grads:
    """Gradients of sum(out * d_out) + sum(lse * d_lse). delta is made from out as it is stored, and from what storing
    it took, if the spec keeps that."""
    q, k, v, d_out = (arrays.widen(arrays.as_numpy(x), dtype) for x in (q, k, v, d_out))
    d_lse = np.zeros(q.shape[:3], dtype) if d_lse is None else arrays.widen(arrays.as_numpy(d_lse), dtype)
    shape = Shape.of(spec, q, k, v)
    q, k = _turned(spec, shape, q, k, dtype, store)
    d_q, d_k, d_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    d_sinks = None if spec.sinks is None else np.zeros(shape.heads, dtype)
    d_arrays = {id(slot.array): np.zeros(tuple(slot.array.shape), dtype) for slot in spec.wanted}
    for part, rows, cols in shape.sequences(spec.lengths):
        q_, k_, v_, g = (
            q[:, :, rows],
            _per_query_head(k[:, :, cols], part),
            _per_query_head(v[:, :, cols], part),
            d_out[:, :, rows],
        )
        score, values = _scores(spec, part, q_, k[:, :, cols], dtype)
        p, lse = _softmax(spec, score)
        if np.dtype(dtype).itemsize < 8:
            # Only out and lse cross from forward to backward: in a narrower type weights come from a rounded lse.
            p = np.exp(score - np.where(lse == -np.inf, 0, lse)[..., None]).astype(dtype)
        out = store(p) @ v_
        kept = store(out) + store(out - store(out)) if spec.keeps_remainder else store(out)
        delta = np.sum(g * kept, axis=-1) - d_lse[:, :, rows]
        d_score = p * (g @ v_.swapaxes(-1, -2) - delta[..., None])
        d_v[:, :, cols] += _per_key_head(store(p).swapaxes(-1, -2) @ g, part)
        d_s = store(d_score * _slope(spec.score, S, values, dtype))
        d_q[:, :, rows] = spec.scale * (d_s @ k_)
        d_k[:, :, cols] += _per_key_head(spec.scale * (d_s.swapaxes(-1, -2) @ q_), part)
        if d_sinks is not None:
            sink = _sink_column(spec, dtype)
            d_sinks -= np.sum(np.exp(sink - np.where(lse == -np.inf, 0, lse)) * delta, axis=(0, 2))
        for node in _wanted_loads(spec) if d_score.size else []:
            at = tuple(clamp(values[i], n) for i, n in zip(node.args, node.payload.array.shape, strict=True))
            contribution = d_score * _slope(spec.score, node, values, dtype)
            grad = d_arrays[id(node.payload.array)]
            if at:
                np.add.at(grad, tuple(np.broadcast_to(a, d_score.shape) for a in at), contribution)
            else:  # an array of no dimensions
                grad += contribution.sum()
    if spec.rope is not None:
        turn_q, turn_k = rotations(spec.rope, shape, spec.lengths, dtype)
        d_q, d_k = turn_q.back().turned(d_q), turn_k.back().turned(d_k)
    return Grads(store(d_q), store(d_k), store(d_v), d_sinks, tuple(d_arrays.values()))


def values(expr: Expr, env: Mapping[str, Any]) -> Array:
    """What an expression without S is at these places, in float32."""
    made: Array = np.asarray(evaluate(expr, env, numpy_ops(np.float32)))
    return made


def weights(spec: Attention, q: Any, k: Any, rows: Array) -> Array:
    """The weights of chosen query rows alone, (batch, heads, rows, keys), in the type of q or at least float32."""
    dtype = arrays.compute_dtype(arrays.dtype_name(q))
    q, k = (arrays.widen(arrays.as_numpy(x), dtype) for x in (q, k))
    shape = Shape.of(spec, q, k, k)
    q, k = _turned(spec, shape, q, k, dtype)
    score, _ = _scores(spec, shape, q[:, :, rows], k, dtype, rows)
    return _softmax(spec, score)[0]


def _turned(
    spec: Attention, shape: Shape, q: Array, k: Array, dtype: npt.DTypeLike, store: Store = lambda x: x
) -> tuple[Array, Array]:
    """q and k as their positions turn them."""
    if spec.rope is None:
        return q, k
    turn_q, turn_k = rotations(spec.rope, shape, spec.lengths, dtype)
    return store(turn_q.turned(q)), store(turn_k.turned(k))


def _scores(
    spec: Attention, shape: Shape, q: Array, k: Array, dtype: npt.DTypeLike, rows: Array | None = None
) -> tuple[Array, dict[Expr, Any]]:
    """Scores with -inf where masked, and the value of every node of the score's expression."""
    rows = np.arange(shape.n_q) if rows is None else rows
    batch, heads = np.arange(shape.batch)[:, None, None, None], np.arange(shape.heads)[:, None, None]
    env = shape.env(batch, heads, rows[:, None], np.arange(shape.n_k))
    s = env["S"] = np.asarray(spec.scale * (q @ _per_query_head(k, shape).swapaxes(-1, -2)), dtype)
    values: dict[Expr, Any] = {}
    ops = numpy_ops(dtype)
    if spec.score is not None and s.size:
        values = evaluate_all(spec.score, env, ops)
        s = np.broadcast_to(values[spec.score], s.shape).astype(dtype)
    if spec.mask is not None and s.size:
        s = np.where(evaluate(spec.mask, env, ops), s, np.asarray(-np.inf, dtype))
    return s, values


def _softmax(spec: Attention, score: Array) -> tuple[Array, Array]:
    """Weights and lse; a row with no key has weights 0 and lse -inf."""
    sink = None if spec.sinks is None else _sink_column(spec, score.dtype)
    row_max = score.max(axis=-1, initial=-np.inf)
    row_max = row_max if sink is None else np.maximum(row_max, sink)
    shift = np.where(row_max == -np.inf, 0, row_max).astype(score.dtype)
    p = np.exp(score - shift[..., None])
    row_sum = p.sum(axis=-1) if sink is None else p.sum(axis=-1) + np.exp(sink - shift)
    safe = np.where(row_sum == 0, 1, row_sum).astype(score.dtype)
    return p / safe[..., None], np.where(row_sum == 0, -np.inf, shift + np.log(safe)).astype(score.dtype)


def _sink_column(spec: Attention, dtype: npt.DTypeLike) -> Array:
    return arrays.widen(arrays.as_numpy(spec.sinks), dtype)[:, None]


def _slope(score: Expr | None, wrt: Expr, values: dict[Expr, Any], dtype: npt.DTypeLike) -> Any:
    """d score / d wrt at every score; nothing flows where it is not finite, since such a key has weight 0."""
    if score is None:
        return np.asarray(1, dtype)
    env = {node.payload: value for node, value in values.items() if node.op == "var"}
    slope = evaluate(derivative(score, wrt), env, numpy_ops(dtype)) if values else np.asarray(0, dtype)
    return np.where(np.isfinite(slope), slope, 0).astype(dtype)


def _wanted_loads(spec: Attention) -> list[Expr]:
    wanted = {id(slot.array) for slot in spec.wanted}
    return [
        n
        for n in nodes(*([] if spec.score is None else [spec.score]))
        if n.op == "load" and id(n.payload.array) in wanted
    ]


def _per_query_head(x: Array, shape: Shape) -> Array:
    return np.repeat(x, shape.group, axis=1) if shape.group != 1 else x


def _per_key_head(x: Array, shape: Shape) -> Array:
    """The sum over the query heads that share a key head."""
    total: Array = x.reshape(x.shape[0], shape.heads_k, shape.group, *x.shape[2:]).sum(axis=2)
    return total
