"""Linear attention in float64, twice: as the N x N matrix of weights, and as a state that takes a key at a time. The
oracle, with gradients of the first form. `dtype` and `store` are as in tilewise.reference.

v is extended by a column of ones, so that the last column of weights @ v is the sum of a row's weights, which it is
normalized by, and the last column of the state is z.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.expr import Expr
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.linear.features import slope
from tilewise.linear.spec import Done, Linear, LinearGrads, Problem
from tilewise.linear.state import LinearState
from tilewise.walking import evaluate

Store = Callable[[Array], Array]


def forward(problem: Problem, dtype: npt.DTypeLike = np.float64, store: Store = lambda x: x) -> Done:
    """out_i = sum_j w_ij v_j, over sum_j w_ij if normalized; w_ij = scale phi(q_i) . phi(k_j) exp(c_i - c_j)."""
    spec, given = problem.spec, _Wide(problem, dtype)
    acc = np.zeros((*given.q.shape[:3], given.v.shape[3]), dtype)
    states = given.initial.copy()
    for at, rows in problem.sequences():
        q, k, v, c = given.rows(rows)
        f_q, f_k = store(mapped(spec.feature, q)), store(mapped(spec.feature, k))
        past, end = _past_and_end(c)
        states[at] = (f_k * end).swapaxes(-1, -2) @ v + past[:, :, -1:] * given.initial[at]
        seen = given.initial[at] if spec.causal else states[at]
        acc[:, :, rows] = _per_query_head(past, f_q) * (spec.scale * f_q) @ _per_query_head(seen, f_q)
        if spec.causal:
            acc[:, :, rows] += store(_weights(spec, f_q, f_k, c)) @ _per_query_head(v, f_q)
    return _finished(problem, acc, states, given, store)


def recurrent(problem: Problem, dtype: npt.DTypeLike = np.float64) -> Done:
    """The same, a key at a time: state = exp(decay) state + phi(k)^T v, out = phi(q) state."""
    spec, given = problem.spec, _Wide(problem, dtype)
    acc = np.zeros((*given.q.shape[:3], given.v.shape[3]), dtype)
    states = given.initial.copy()
    for at, rows in problem.sequences():
        state = states[at]
        f_q, f_k = spec.scale * mapped(spec.feature, given.q), mapped(spec.feature, given.k)
        for i in range(rows.start, rows.stop):
            kept = np.exp(given.decay[:, :, i, None, None])
            state[...] = kept * state + f_k[:, :, i, :, None] * given.v[:, :, i, None]
            acc[:, :, i] = (f_q[:, :, i, None] @ _per_query_head(state, f_q))[:, :, 0]
        if not spec.causal:
            acc[:, :, rows] = f_q[:, :, rows] @ _per_query_head(state, f_q)
    return _finished(problem, acc, states, given, lambda x: x)


def backward(
    problem: Problem,
    d_out: Any,
    d_state: LinearState | None = None,
    dtype: npt.DTypeLike = np.float64,
    store: Store = lambda x: x,
) -> LinearGrads:
    """Gradients of sum(out * d_out) + sum(state * d_state)."""
    spec, given = problem.spec, _Wide(problem, dtype)
    done = forward(problem, dtype, store)
    g = row_gradients(spec, arrays.widen(arrays.as_numpy(d_out), dtype), done.out, done.norm)
    d_q, d_k, d_v, d_decay = (np.zeros_like(x) for x in (given.q, given.k, given.v, given.decay))
    d_end = np.zeros_like(given.initial) if d_state is None else extended_state(d_state, dtype)
    d_log = np.zeros(d_end.shape[:2], dtype) if d_state is None else arrays.widen(d_state.log_decay, dtype)
    d_initial, ends = d_end.copy(), extended_state(done.state, dtype)
    for at, rows in problem.sequences():
        q, k, v, c = given.rows(rows)
        f_q, f_k, g_ = store(mapped(spec.feature, q)), store(mapped(spec.feature, k)), g[:, :, rows]
        past, end = _past_and_end(c)
        past_q = _per_query_head(past, f_q)
        of_state = _per_key_head((past_q * spec.scale * f_q).swapaxes(-1, -2) @ g_, k)
        d_after = d_end[at] if spec.causal else d_end[at] + of_state
        d_f_q = past_q * (g_ @ _per_query_head(given.initial[at] if spec.causal else ends[at], f_q).swapaxes(-1, -2))
        d_f_k = end * (v @ d_after.swapaxes(-1, -2))
        d_ve = (f_k * end) @ d_after
        if spec.causal:
            w, by_key = _weights(spec, f_q, f_k, c), _per_query_head(v, f_q).swapaxes(-1, -2)
            d_w = store(_decays(c, f_q) * (g_ @ by_key))
            d_f_q = d_f_q + d_w @ _per_query_head(f_k, f_q)
            d_f_k = d_f_k + _per_key_head(d_w.swapaxes(-1, -2) @ (spec.scale * f_q), k)
            d_ve = d_ve + _per_key_head(store(w).swapaxes(-1, -2) @ g_, k)
        d_q[:, :, rows] = spec.scale * d_f_q * mapped(slope(spec.feature), q)
        d_k[:, :, rows] = d_f_k * mapped(slope(spec.feature), k)
        d_v[:, :, rows] = d_ve
        d_c = _per_key_head((spec.scale * f_q * d_f_q).sum(-1), k) - (f_k * d_f_k).sum(-1)
        d_c[..., -1] += (d_end[at] * ends[at]).sum((-2, -1)) + d_log[at]
        d_decay[:, :, rows] = np.cumsum(d_c[..., ::-1], axis=-1)[..., ::-1]
        d_initial[at] = past[:, :, -1:] * d_after + (of_state if spec.causal else 0)
    initial = None if problem.initial is None else LinearState(*split(d_initial), d_log)
    return LinearGrads(
        store(d_q), store(d_k), store(d_v[..., :-1]), None if problem.decay is None else d_decay, initial
    )


def mapped(feature: Expr, x: Array) -> Array:
    made: Array = np.broadcast_to(evaluate(feature, {"S": x}, numpy_ops(x.dtype)), x.shape).astype(x.dtype, copy=False)
    return made


def row_gradients(spec: Linear, d_out: Array, out: Array, norm: Array) -> Array:
    """The gradient of each row of weights @ (v, 1): of out's numerator, and of the sum that it is divided by."""
    if not spec.normalize:
        return np.concatenate([d_out, np.zeros_like(d_out[..., :1])], axis=-1)
    share = np.where(norm == 0, 0, 1 / np.where(norm == 0, 1, norm))[..., None].astype(d_out.dtype)
    delta = np.sum(d_out * out, axis=-1, keepdims=True)
    return np.concatenate([d_out * share, -delta * share], axis=-1)


def with_ones(v: Array) -> Array:
    return np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)


def extended_state(state: LinearState, dtype: npt.DTypeLike) -> Array:
    """kv with z as its last column, side by side however the caller's lie: the engine counts on it."""
    kv, z = (arrays.widen(arrays.as_numpy(x), dtype) for x in (state.kv, state.z))
    return np.ascontiguousarray(np.concatenate([kv, z[..., None]], axis=-1))


def split(extended: Array) -> tuple[Array, Array]:
    """The opposite: kv and z."""
    return extended[..., :-1], extended[..., -1]


class _Wide:
    """A problem's arrays as numbers to compute with; no decay is one of 0, no state one of 0."""

    def __init__(self, problem: Problem, dtype: npt.DTypeLike) -> None:
        self.q, self.k, v = (arrays.widen(arrays.as_numpy(x), dtype) for x in (problem.q, problem.k, problem.v))
        self.v = with_ones(v)
        none = np.zeros(self.k.shape[:3], dtype)
        self.decay = none if problem.decay is None else arrays.widen(arrays.as_numpy(problem.decay), dtype)
        n_states, heads = problem.n_states, self.k.shape[1]
        self.initial = np.zeros((n_states, heads, self.q.shape[3], self.v.shape[3]), dtype)
        self.log_decay = np.zeros((n_states, heads), dtype)
        if problem.initial is not None:
            self.initial = extended_state(problem.initial, dtype)
            self.log_decay = arrays.widen(arrays.as_numpy(problem.initial.log_decay), dtype)

    def rows(self, rows: slice) -> tuple[Array, Array, Array, Array]:
        """q, k, v of a sequence, and its cumulative decay."""
        return (
            self.q[:, :, rows], self.k[:, :, rows], self.v[:, :, rows],
            np.cumsum(self.decay[:, :, rows], axis=-1, dtype=self.decay.dtype),
        )  # fmt: skip


def _weights(spec: Linear, f_q: Array, f_k: Array, c: Array) -> Array:
    w: Array = spec.scale * (f_q @ _per_query_head(f_k, f_q).swapaxes(-1, -2)) * _decays(c, f_q)
    return w


def _decays(c: Array, f_q: Array) -> Array:
    """exp(c_i - c_j) where j is no later than i, else 0: (batch, heads, n, n)."""
    apart = np.where(np.tri(c.shape[-1], dtype=bool), c[..., :, None] - c[..., None, :], -np.inf)
    return _per_query_head(np.exp(apart), f_q)


def _past_and_end(c: Array) -> tuple[Array, Array]:
    """What is left of the initial state at each key, and of each key at the end."""
    return np.exp(c)[..., None], np.exp(c[..., -1:] - c)[..., None]


def _per_query_head(x: Array, q: Array) -> Array:
    return np.repeat(x, q.shape[1] // x.shape[1], axis=1)


def _per_key_head(x: Array, k: Array) -> Array:
    total: Array = x.reshape(x.shape[0], k.shape[1], x.shape[1] // k.shape[1], *x.shape[2:]).sum(axis=2)
    return total


def _finished(problem: Problem, acc: Array, states: Array, given: _Wide, store: Store) -> Done:
    out, norm = acc[..., :-1], acc[..., -1]
    if problem.spec.normalize:
        out = np.where(norm[..., None] == 0, 0, out / np.where(norm == 0, 1, norm)[..., None])
    else:
        norm = norm[..., :0]
    log_decay = given.log_decay.copy()
    for at, rows in problem.sequences():
        log_decay[at] += given.decay[:, :, rows].sum(axis=-1)
    return Done(store(out), norm, LinearState(*split(states), log_decay))
