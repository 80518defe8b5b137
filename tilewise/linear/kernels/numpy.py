"""Linear attention in NumPy, a chunk of rows at a time: the text of which the other kernels are translations.

Within a chunk weights are a tile, as in attention; what came before it is in the state, and is never looked at again.
With D_ij = exp(c_i - c_j) for j <= i, c the chunk's cumulative decay and v extended by a column of ones:
    acc = (scale f_q f_k^T * D) v + exp(c) scale f_q state,   state = exp(c_end) state + (exp(c_end - c) f_k)^T v.
The backward pass goes through the chunks twice: forwards with the state, for d_q, and backwards with its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.kernels import host as attention_host
from tilewise.linear.features import slope
from tilewise.linear.kernels import host
from tilewise.linear.kernels.host import decay_gradient, initial_states, last_log_decay
from tilewise.linear.reference import extended_state, mapped, row_gradients, split, with_ones
from tilewise.linear.spec import Done, LinearGrads, Problem
from tilewise.linear.state import LinearState
from tilewise.spec import Shape

DEFAULT_CHUNK = 128


class Kernel:
    name = "numpy"

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, shape: Shape) -> str | None:
        return attention_host.unsupported(shape)

    def forward(self, problem: Problem, chunk: int | None = None) -> Done:
        return host.run_forward(partial(forward, chunk=chunk or DEFAULT_CHUNK), problem)

    def backward(
        self, problem: Problem, done: Done, d_out: Any, d_state: LinearState | None = None, chunk: int | None = None
    ) -> LinearGrads:
        return host.run_backward(partial(backward, chunk=chunk or DEFAULT_CHUNK), problem, done, d_out, d_state)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Some rows: f_q (batch, key heads, group, rows, d), scaled; f_k and v, with a group of one; decays (..., 1)."""

    rows: slice
    f_q: Array
    f_k: Array
    v: Array
    within: Array  # exp(c_i - c_j), 0 for later keys
    past: Array  # exp(c_i): what is left of the state from before
    end: Array  # exp(c_end - c_j): what is left of a key after the chunk

    @property
    def kept(self) -> Array:
        """What is left of the state after the chunk."""
        return self.past[..., -1:, :]

    def after(self, state: Array) -> Array:
        done: Array = self.kept * state + _T(self.f_k * self.end) @ self.v
        return done

    def before(self, d_state: Array, g: Array) -> Array:
        """The gradient of the state before, from that of the state after and from the rows'."""
        done: Array = self.kept * d_state + _over_group(_T(self.f_q * self.past) @ g)
        return done


def forward(problem: Problem, chunk: int) -> Done:
    """Extra memory is a chunk's, and a state."""
    spec, shape = problem.spec, problem.shape
    dtype = arrays.compute_dtype(shape.dtype)
    out = np.empty_like(problem.q, shape=(*problem.q.shape[:3], shape.d_v))
    norm = np.empty((shape.batch, shape.heads, shape.n_q if spec.normalize else 0), dtype)
    states = initial_states(problem, dtype)
    for at, rows in problem.sequences():
        state = states[at][:, :, None]
        if not spec.causal:  # every row sees the state after the last
            state = _after_all(problem, rows, chunk, state)
        for part in _chunks(problem, rows, chunk):
            acc = part.past * (part.f_q @ state)
            if spec.causal:
                acc += (part.f_q @ _T(part.f_k) * part.within) @ part.v
                state = part.after(state)
            values, sums = split(_ungrouped(acc))
            if spec.normalize:
                norm[:, :, part.rows] = sums
                values = np.where(sums == 0, 0, 1)[..., None] * values / np.where(sums == 0, 1, sums)[..., None]
            out[:, :, part.rows] = arrays.narrow(values.astype(dtype, copy=False), shape.dtype)
        states[at] = state[:, :, 0]
    return Done(out, norm, LinearState(*split(states), last_log_decay(problem, dtype)))


def backward(problem: Problem, done: Done, d_out: Array, d_state: LinearState | None, chunk: int) -> LinearGrads:
    """Gradients of sum(out * d_out) + sum(state * d_state); extra memory is O(N)."""
    spec, shape = problem.spec, problem.shape
    dtype = arrays.compute_dtype(shape.dtype)
    g = row_gradients(spec, *(arrays.widen(x, dtype) for x in (d_out, done.out, done.norm)))
    g = _grouped(g, shape.heads_k)
    d_q, d_k, d_v = (np.zeros(x.shape, dtype) for x in (problem.q, problem.k, problem.v))
    d_c = np.zeros(problem.k.shape[:3], dtype)  # of the cumulative decay
    ends = extended_state(done.state, dtype)
    d_states = np.zeros_like(ends) if d_state is None else extended_state(d_state, dtype)
    last = np.sum(d_states * ends, axis=(-2, -1))
    d_log = np.zeros(last.shape, dtype) if d_state is None else arrays.widen(d_state.log_decay, dtype)
    states = initial_states(problem, dtype)
    for at, rows in problem.sequences():
        parts = partial(_chunks, problem, rows, chunk)
        state, d_after = states[at][:, :, None], d_states[at][:, :, None]
        if not spec.causal:
            state = ends[at][:, :, None]
            for part in parts():
                d_after = part.before(d_after, g[..., part.rows, :])
            d_states[at] = d_after[:, :, 0]
        for part in parts():
            g_ = g[..., part.rows, :]
            d_f_q = part.past * (g_ @ _T(state))
            if spec.causal:
                d_f_q += (g_ @ _T(part.v) * part.within) @ part.f_k
                state = part.after(state)
            d_c[:, :, part.rows] = np.sum(part.f_q * d_f_q, axis=(2, -1))
            d_q[:, :, part.rows] = spec.scale * _ungrouped(d_f_q)
        for part in parts(backwards=True):
            g_ = g[..., part.rows, :]
            d_f_k, d_ve = part.end * (part.v @ _T(d_after)), (part.f_k * part.end) @ d_after
            if spec.causal:
                d_f_k = d_f_k + _over_group(_T(g_ @ _T(part.v) * part.within) @ part.f_q)
                d_ve = d_ve + _over_group(_T(part.f_q @ _T(part.f_k) * part.within) @ g_)
                d_after = part.before(d_after, g_)
            d_c[:, :, part.rows] -= np.sum(part.f_k * d_f_k, axis=-1)[:, :, 0]
            d_k[:, :, part.rows], d_v[:, :, part.rows] = d_f_k[:, :, 0], d_ve[:, :, 0, :, :-1]
        d_states[at] = d_after[:, :, 0]
        d_c[:, :, rows.stop - 1] += last[at] + d_log[at]
    initial = None if problem.initial is None else LinearState(*split(d_states), d_log)
    d_q *= mapped(slope(spec.feature), arrays.widen(problem.q, dtype))
    d_k *= mapped(slope(spec.feature), arrays.widen(problem.k, dtype))
    d_q, d_k, d_v = (arrays.narrow(x, shape.dtype) for x in (d_q, d_k, d_v))
    return LinearGrads(d_q, d_k, d_v, decay_gradient(problem, d_c), initial)


def _chunks(problem: Problem, rows: slice, chunk: int, backwards: bool = False) -> Iterator[_Chunk]:
    spec, heads_k = problem.spec, problem.shape.heads_k
    dtype = arrays.compute_dtype(problem.shape.dtype)
    starts = range(rows.start, rows.stop, chunk)
    for start in reversed(starts) if backwards else starts:
        part = slice(start, min(start + chunk, rows.stop))
        q, k, v = (arrays.widen(x[:, :, part], dtype) for x in (problem.q, problem.k, problem.v))
        f_q, f_k = mapped(spec.feature, q) * dtype.type(spec.scale), mapped(spec.feature, k)
        yield _Chunk(part, _grouped(f_q, heads_k), f_k[:, :, None], with_ones(v)[:, :, None], *_decays(problem, part))


def _decays(problem: Problem, part: slice) -> tuple[Array, Array, Array]:
    dtype = arrays.compute_dtype(problem.shape.dtype)
    size = part.stop - part.start
    seen = np.tri(size, dtype=dtype)
    if problem.decay is None:
        ones = np.ones((size, 1), dtype)
        return seen, ones, ones
    c = np.cumsum(arrays.widen(problem.decay[:, :, None, part], dtype), axis=-1, dtype=dtype)
    within = np.exp(np.where(seen > 0, c[..., :, None] - c[..., None, :], -np.inf)).astype(dtype, copy=False)
    return within, np.exp(c)[..., None], np.exp(c[..., -1:] - c)[..., None]


def _after_all(problem: Problem, rows: slice, chunk: int, state: Array) -> Array:
    for part in _chunks(problem, rows, chunk):
        state = part.after(state)
    return state


def _T(x: Array) -> Array:  # noqa: N802 - a transpose
    turned: Array = x.swapaxes(-1, -2)
    return turned


def _grouped(x: Array, heads_k: int) -> Array:
    """(batch, heads, n, d) as (batch, key heads, group, n, d)."""
    return x.reshape(x.shape[0], heads_k, x.shape[1] // heads_k, *x.shape[2:])


def _ungrouped(x: Array) -> Array:
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _over_group(x: Array) -> Array:
    total: Array = x.sum(axis=2, keepdims=True)
    return total
