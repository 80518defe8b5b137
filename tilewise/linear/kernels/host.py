"""What kernel systems that work in main memory share: arrays of either library in, and the same out, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array, as_numpy, like
from tilewise.linear.reference import extended_state
from tilewise.linear.spec import Done, LinearGrads, Problem
from tilewise.linear.state import LinearState

Forward = Callable[[Problem], Done]
Backward = Callable[[Problem, Done, Any, "LinearState | None"], LinearGrads]


def run_forward(forward: Forward, problem: Problem) -> Done:
    """A forward pass on NumPy arrays, on arrays of the caller's library."""
    done, q = forward(_here(problem)), problem.q
    return Done(like(done.out, q), like(done.norm, q), done.state.map(lambda x: like(x, q)))


def run_backward(
    backward: Backward, problem: Problem, done: Done, d_out: Any, d_state: LinearState | None
) -> LinearGrads:
    """A backward pass on NumPy arrays, on arrays of the caller's library."""
    held = Done(as_numpy(done.out), as_numpy(done.norm), done.state.map(as_numpy))
    grads = backward(_here(problem), held, as_numpy(d_out), None if d_state is None else d_state.map(as_numpy))
    return LinearGrads(
        like(grads.q, problem.q), like(grads.k, problem.k), like(grads.v, problem.v),
        None if grads.decay is None else like(grads.decay, problem.decay),
        None if grads.initial_state is None else grads.initial_state.map(lambda x: like(x, problem.q)),
    )  # fmt: skip


def _here(problem: Problem) -> Problem:
    return replace(
        problem, q=as_numpy(problem.q), k=as_numpy(problem.k), v=as_numpy(problem.v),
        decay=None if problem.decay is None else as_numpy(problem.decay),
        initial=None if problem.initial is None else problem.initial.map(as_numpy),
    )  # fmt: skip


def initial_states(problem: Problem, dtype: np.dtype[Any]) -> Array:
    shape = problem.shape
    if problem.initial is None:
        return np.zeros((problem.n_states, shape.heads_k, shape.d, shape.d_v + 1), dtype)
    return extended_state(problem.initial, dtype)


def last_log_decay(problem: Problem, dtype: np.dtype[Any]) -> Array:
    log_decay = np.zeros((problem.n_states, problem.shape.heads_k), dtype)
    if problem.initial is not None:
        log_decay[...] = problem.initial.log_decay
    for at, rows in problem.sequences() if problem.decay is not None else ():
        log_decay[at] += arrays.widen(problem.decay[:, :, rows], dtype).sum(axis=-1)
    return log_decay


def decay_gradient(problem: Problem, d_c: Array) -> Array | None:
    """From gradients of cumulative sums to those of what was summed, in float64: a sequence's are added up."""
    if problem.decay is None:
        return None
    d_decay = np.zeros(d_c.shape)
    for _, rows in problem.sequences():
        d_decay[:, :, rows] = np.cumsum(d_c[:, :, rows][..., ::-1], axis=-1, dtype=np.float64)[..., ::-1]
    return arrays.narrow(d_decay, arrays.dtype_name(problem.decay))
