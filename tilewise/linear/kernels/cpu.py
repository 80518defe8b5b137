"""Linear attention by the native engine (tilewise/kernels/cpu/engine/linear.h): threads over key heads and sequences.

It computes in float32, or float64 for such inputs; half precision is widened here, a copy of each array.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.kernels import host as attention_host
from tilewise.kernels.cpu import library, structs
from tilewise.kernels.cpu.marshal import Marshal
from tilewise.kernels.cpu.ops import bytecode
from tilewise.linear.features import slope
from tilewise.linear.kernels import host
from tilewise.linear.kernels.host import decay_gradient, initial_states, last_log_decay
from tilewise.linear.reference import extended_state, row_gradients, split
from tilewise.linear.spec import Done, LinearGrads, Problem
from tilewise.linear.state import LinearState
from tilewise.spec import Attention, Shape, Tile

CHUNK = 96  # rows: whole panels of every instruction set's micro-kernel, and what they multiply stays in cache


class Kernel:
    name = "cpu"

    def unavailable(self) -> str | None:
        return library.unavailable()

    def unsupported(self, shape: Shape) -> str | None:
        return attention_host.unsupported(shape)

    def forward(self, problem: Problem, chunk: int | None = None) -> Done:
        return host.run_forward(partial(forward, chunk=chunk or CHUNK), problem)

    def backward(
        self, problem: Problem, done: Done, d_out: Any, d_state: LinearState | None = None, chunk: int | None = None
    ) -> LinearGrads:
        return host.run_backward(partial(backward, chunk=chunk or CHUNK), problem, done, d_out, d_state)


class _LinearCall(Structure):
    """As in engine/linear_call.h."""

    _fields_ = [
        *((name, c_int32) for name in ("type", "causal", "normalize", "packed")),
        *((name, c_int64) for name in ("batch", "heads", "heads_k", "n", "d", "d_v", "chunk")),
        ("scale", c_double),
        *((name, structs.Array) for name in ("q", "k", "v", "out", "norm", "decay")),
        ("lengths", c_void_p),
        ("n_states", c_int64),
        ("states", c_void_p),
        ("feature", structs.Program),
        ("slope", structs.Program),
        ("feature_at", c_int32),
        ("slope_at", c_int32),
    ]  # fmt: skip


class _LinearBackwardCall(Structure):
    _fields_ = [
        ("forward", _LinearCall),
        *((name, structs.Array) for name in ("g", "d_q", "d_k", "d_v", "d_c")),
        ("d_states", c_void_p),
    ]


def forward(problem: Problem, chunk: int) -> Done:
    spec, shape = problem.spec, problem.shape
    dtype = arrays.compute_dtype(shape.dtype)
    out = np.empty((*problem.q.shape[:3], shape.d_v), dtype)
    norm = np.empty((shape.batch, shape.heads, shape.n_q if spec.normalize else 0), dtype)
    states = initial_states(problem, dtype)
    marshal, call = _call(problem, states, chunk)
    call.out, call.norm = marshal.output(out), marshal.output(norm)
    library.call("tilewise_linear_forward", ctypes.byref(call))
    stored = np.empty_like(problem.q, shape=out.shape)
    stored[...] = arrays.narrow(out, shape.dtype)
    return Done(stored, norm, LinearState(*split(states), last_log_decay(problem, dtype)))


def backward(problem: Problem, done: Done, d_out: Array, d_state: LinearState | None, chunk: int) -> LinearGrads:
    """Gradients of sum(out * d_out) + sum(state * d_state)."""
    shape = problem.shape
    dtype = arrays.compute_dtype(shape.dtype)
    ends = extended_state(done.state, dtype)
    d_states = np.zeros_like(ends) if d_state is None else extended_state(d_state, dtype)
    last = np.sum(d_states * ends, axis=(-2, -1))
    d_log = np.zeros(last.shape, dtype) if d_state is None else arrays.widen(d_state.log_decay, dtype)
    g = row_gradients(problem.spec, *(arrays.widen(x, dtype) for x in (d_out, done.out, done.norm)))
    d_q, d_k, d_v = (np.empty(x.shape, dtype) for x in (problem.q, problem.k, problem.v))
    d_c = np.zeros(problem.k.shape[:3], dtype)
    states = initial_states(problem, dtype) if problem.spec.causal else ends
    marshal, call = _call(problem, states, chunk)
    whole = _LinearBackwardCall(
        call, marshal.array(g), marshal.output(d_q), marshal.output(d_k), marshal.output(d_v), marshal.output(d_c),
        marshal.data(d_states),
    )  # fmt: skip
    library.call("tilewise_linear_backward", ctypes.byref(whole))
    for at, rows in problem.sequences():
        d_c[:, :, rows.stop - 1] += last[at] + d_log[at]
    initial = None if problem.initial is None else LinearState(*split(d_states), d_log)
    d_q, d_k, d_v = (arrays.narrow(x, shape.dtype) for x in (d_q, d_k, d_v))
    return LinearGrads(d_q, d_k, d_v, decay_gradient(problem, d_c), initial)


def _call(problem: Problem, states: Array, chunk: int) -> tuple[Marshal, _LinearCall]:
    """What both passes are told; `states` are changed in place."""
    spec, shape = problem.spec, problem.shape
    dtype = arrays.compute_dtype(shape.dtype)
    marshal = Marshal(Attention(spec.scale), shape, Tile())
    q, k, v = (marshal.array(arrays.widen(x, dtype)) for x in (problem.q, problem.k, problem.v))
    feature, of_slope = bytecode(spec.feature), bytecode(slope(spec.feature))
    lengths = None if spec.lengths is None else marshal.data(np.ascontiguousarray(spec.lengths, np.int64))
    call = _LinearCall(
        structs.TYPES.index(str(dtype)), spec.causal, spec.normalize, spec.lengths is not None,
        shape.batch, shape.heads, shape.heads_k, shape.n_q, shape.d, shape.d_v, chunk, spec.scale, q, k, v,
        lengths=lengths, n_states=problem.n_states, states=marshal.data(states),
        feature=marshal.program(feature), slope=marshal.program(of_slope), feature_at=feature.at, slope_at=of_slope.at,
    )  # fmt: skip
    if problem.decay is not None:
        logs = np.ascontiguousarray(arrays.widen(problem.decay, dtype))
        call.decay = marshal.array(logs)
    return marshal, call
