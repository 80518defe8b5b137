"""The two forms of the reference agree with each other, and its gradients with differences of its results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tilewise.arrays import Array
from tilewise.linear import contract, reference
from tilewise.linear.cases import CASES, LinearCase
from tilewise.linear.spec import Done, Problem

FLOAT64 = [replace(case, dtype="float64", n=min(case.n, 30)) for case in CASES if case.dtype == "float32"]
STEP = 1e-6


@pytest.mark.parametrize("case", FLOAT64, ids=lambda case: case.name)
def test_the_matrix_and_the_recurrence_agree(case: LinearCase) -> None:
    problem = case.problem()
    dense, stepwise = (contract.forward_results(run(problem)) for run in (reference.forward, reference.recurrent))
    for name, want in dense.items():
        np.testing.assert_allclose(stepwise[name], want, rtol=1e-11, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("case", FLOAT64, ids=lambda case: case.name)
def test_gradients_are_differences(case: LinearCase) -> None:
    problem = case.problem()
    d_out, d_state = contract.gradients_to_pull(problem)

    def loss(done: Done) -> float:
        parts = zip(done.state, d_state, strict=True)
        return float(np.sum(done.out * d_out) + sum(np.sum(x * d) for x, d in parts))

    grads = contract.backward_results(reference.backward(problem, d_out, d_state))
    for name, direction, moved in _moves(problem):
        up, down = (loss(reference.forward(moved(sign * STEP))) for sign in (1, -1))
        np.testing.assert_allclose(np.sum(grads[name] * direction), (up - down) / (2 * STEP), rtol=1e-5, atol=1e-5)


def _moves(problem: Problem) -> Iterator[tuple[str, Array, object]]:
    """Each array of a problem, a direction, and the problem with the array moved along it."""
    rng = np.random.default_rng(7)
    for name in ("q", "k", "v", "decay"):
        x = getattr(problem, name)
        if x is not None:
            along = rng.standard_normal(x.shape)
            yield f"d_{name}", along, lambda step, n=name, x=x, a=along: replace(problem, **{n: x + step * a})
    initial = problem.initial
    for name in ("kv", "z", "log_decay") if initial is not None else ():
        x = getattr(initial, name)
        along = rng.standard_normal(x.shape)
        yield (
            f"d_initial {name}", along,
            lambda step, n=name, x=x, a=along: replace(problem, initial=replace(initial, **{n: x + step * a})),
        )  # fmt: skip
