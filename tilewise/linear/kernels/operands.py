"""A problem's arrays as the tensors that kernels take, and what they leave as arrays of the caller's kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tilewise.kernels.tensors import as_tensor, like
from tilewise.linear.spec import Done, LinearGrads, Problem
from tilewise.linear.state import LinearState


def tensors_of(problem: Problem, rows: Callable[[Any], Any]) -> Problem:
    """rows: what makes a tensor lie as a kernel wants its rows."""
    return replace(
        problem, q=rows(as_tensor(problem.q)), k=rows(as_tensor(problem.k)), v=rows(as_tensor(problem.v)),
        decay=None if problem.decay is None else as_tensor(problem.decay),
        initial=None if problem.initial is None else problem.initial.map(as_tensor),
    )  # fmt: skip


def done_like(done: Done, problem: Problem) -> Done:
    return Done(like(done.out, problem.q), like(done.norm, problem.q), _state_like(done.state, problem.q))


def grads_like(grads: LinearGrads, problem: Problem) -> LinearGrads:
    """In the types of what they are gradients of."""
    d_q, d_k, d_v = (
        like(grad.to(as_tensor(x).dtype), x)
        for grad, x in ((grads.q, problem.q), (grads.k, problem.k), (grads.v, problem.v))
    )
    d_decay = None if grads.decay is None else like(grads.decay, problem.decay)
    initial = None if grads.initial_state is None else _state_like(grads.initial_state, problem.q)
    return LinearGrads(d_q, d_k, d_v, d_decay, initial)


def _state_like(state: LinearState, template: Any) -> LinearState:
    return state.map(lambda x: like(x, template))
