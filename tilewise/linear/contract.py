"""The numeric contract for linear attention: errors are held to twice those of the N x N form in the same precision."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.contract import ROUNDING, Expected, check_results, exact, expected, same_precision
from tilewise.linear import reference
from tilewise.linear.dispatch import Kernel
from tilewise.linear.spec import Done, LinearGrads, Problem
from tilewise.linear.state import LinearState


def check(kernel: Kernel, problem: Problem, chunk: int | None = None) -> dict[str, float]:
    """Every result and gradient of a problem is within the contract; returns the maximum error of each."""
    done = kernel.forward(problem, chunk)
    d_out, d_state = gradients_to_pull(problem)
    grads = kernel.backward(problem, done, d_out, d_state, chunk)
    return check_results(expected_of(problem), {**forward_results(done), **backward_results(grads)})


def expected_of(problem: Problem) -> list[Expected]:
    """What a problem's results and gradients should be."""
    dtype = problem.shape.dtype
    exactly, densely = ({"dtype": exact(dtype)}, same_precision(dtype))
    pulled = gradients_to_pull(problem)
    want, dense = (
        {
            **forward_results(reference.forward(problem, **how)),
            **backward_results(reference.backward(problem, *pulled, **how)),
        }
        for how in (exactly, densely)
    )
    wide = str(arrays.compute_dtype(dtype))
    stored = {name: dtype if name in ("out", "d_q", "d_k", "d_v") else wide for name in want}
    # States are sums over a sequence, in another order than the matrix has them. Logs of decays reach every later
    # weight, and their gradients are sums of differences.
    band = (16 if problem.decay is None else 64) * ROUNDING[wide]
    return [expected(name, stored[name], dtype, want[name], dense[name], band) for name in want]


def gradients_to_pull(problem: Problem, seed: int = 1) -> tuple[Array, LinearState]:
    """A random d_out and d_state."""
    rng, s = np.random.default_rng(seed), problem.shape
    wide, n = arrays.compute_dtype(s.dtype), problem.n_states
    d_out = arrays.narrow(rng.standard_normal((s.batch, s.heads, s.n_q, s.d_v)), s.dtype)
    shapes = (n, s.heads_k, s.d, s.d_v), (n, s.heads_k, s.d), (n, s.heads_k)
    return d_out, LinearState(*(rng.standard_normal(shape).astype(wide) for shape in shapes))


def forward_results(done: Done) -> dict[str, Any]:
    return {"out": done.out, "norm": done.norm, **_parts("state", done.state)}


def backward_results(grads: LinearGrads) -> dict[str, Any]:
    results = {"d_q": grads.q, "d_k": grads.k, "d_v": grads.v}
    if grads.decay is not None:
        results["d_decay"] = grads.decay
    return results if grads.initial_state is None else results | _parts("d_initial", grads.initial_state)


def _parts(name: str, state: LinearState) -> dict[str, Any]:
    return {f"{name} kv": state.kv, f"{name} z": state.z, f"{name} log_decay": state.log_decay}
