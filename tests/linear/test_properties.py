"""What holds for any linear attention: chunks, splits and steps change nothing but rounding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.linear import contract, dispatch, reference
from tilewise.linear.cases import LinearCase
from tilewise.linear.dispatch import Kernel
from tilewise.linear.spec import Problem
from tilewise.linear.validate import prepare

CASES = st.builds(
    LinearCase, name=st.just("any"), batch=st.integers(1, 2), heads=st.just(4), heads_k=st.sampled_from([1, 2, 4]),
    n=st.integers(0, 70), d=st.integers(1, 9), d_v=st.integers(1, 9), dtype=st.just("float64"),
    decay=st.sampled_from([None, "head", "token"]), carried=st.booleans(),
    feature_map=st.sampled_from(["elu", "relu2", "exp"]), normalize=st.booleans(), scale=st.sampled_from([1.0, 0.3]),
)  # fmt: skip
HERE = [kernel for kernel in map(dispatch.kernel, ("numpy", "cpu")) if kernel.unavailable() is None]
# Kernels that are interpreted or compiled, in seconds: one case, which has all that matters here.
COMPILED = ("triton", "tilelang-c")
COMPILED_CASE = LinearCase(
    "compiled", batch=2, heads=4, heads_k=2, n=50, d=8, d_v=8, dtype="float32", decay="token", carried=True
)
QUICKLY = settings(max_examples=30, deadline=None, database=None, derandomize=True)


@pytest.mark.parametrize("kernel", HERE, ids=lambda kernel: kernel.name)
@QUICKLY
@given(CASES, st.integers(1, 80), st.integers(1, 80))
def test_the_size_of_chunks_does_not_matter(kernel: Kernel, case: LinearCase, one: int, other: int) -> None:
    problem = case.problem()
    pulled = contract.gradients_to_pull(problem)
    results = []
    for chunk in (one, other):
        done = kernel.forward(problem, chunk)
        grads = kernel.backward(problem, done, *pulled, chunk)
        results.append(contract.forward_results(done) | contract.backward_results(grads))
    for name, x in results[0].items():
        np.testing.assert_allclose(results[1][name], x, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("kernel", HERE, ids=lambda kernel: kernel.name)
@QUICKLY
@given(CASES, st.lists(st.integers(0, 70), max_size=4))
def test_a_state_carried_over_any_split_is_one_pass(kernel: Kernel, case: LinearCase, cuts: list[int]) -> None:
    problem = case.problem()
    whole, state, outs = kernel.forward(problem), problem.initial, []
    edges = [0, *sorted(min(cut, case.n) for cut in cuts), case.n]
    for begin, end in pairwise(edges):
        part = _part(case, begin, end, state)
        done = kernel.forward(part)
        outs.append(done.out)
        state = done.state
    np.testing.assert_allclose(np.concatenate(outs, axis=2), whole.out, rtol=1e-9, atol=1e-9)
    assert state is not None
    for x, want in zip(state, whole.state, strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-9, atol=1e-9)


@pytest.fixture
def compiled(request: pytest.FixtureRequest) -> Kernel:
    kernel = dispatch.kernel(request.param)
    if kernel.unavailable() is not None:
        pytest.skip(str(kernel.unavailable()))
    return kernel


@pytest.mark.parametrize(
    ("compiled", "backwards"),
    [("triton", True), ("tilelang-c", False), pytest.param("tilelang-c", True, marks=pytest.mark.slow)],
    indirect=["compiled"],
)
def test_the_size_of_chunks_does_not_matter_to_compiled_kernels(compiled: Kernel, backwards: bool) -> None:
    problem = COMPILED_CASE.problem()
    pulled = contract.gradients_to_pull(problem)
    results = []
    for chunk in (16, 64):
        done = compiled.forward(problem, chunk)
        results.append(contract.forward_results(done))
        if backwards:
            results[-1] |= contract.backward_results(compiled.backward(problem, done, *pulled, chunk))
    for name, x in results[0].items():
        np.testing.assert_allclose(results[1][name], x, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("compiled", COMPILED, indirect=True)
@pytest.mark.parametrize("cuts", [(17,), (0, 1, 16, 49)], ids=str)
def test_a_state_carried_over_a_split_is_one_pass_of_compiled_kernels(compiled: Kernel, cuts: tuple[int, ...]) -> None:
    problem = COMPILED_CASE.problem()
    whole, state, outs = compiled.forward(problem, 16), problem.initial, []
    for begin, end in pairwise([0, *cuts, COMPILED_CASE.n]):
        done = compiled.forward(_part(COMPILED_CASE, begin, end, state), 16)
        outs.append(done.out)
        state = done.state
    np.testing.assert_allclose(np.concatenate(outs, axis=2), whole.out, rtol=1e-4, atol=1e-5)
    for x, want in zip(state or (), whole.state, strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-4, atol=1e-5)


def _part(case: LinearCase, begin: int, end: int, state: tw.LinearState | None) -> Problem:
    """The rows from begin to end of a case's problem, after a state."""
    whole = case.problem()
    rows = {name: getattr(whole, name)[:, :, begin:end] for name in ("q", "k", "v")}
    decay = None if whole.decay is None else whole.decay[:, :, begin:end]
    return replace(whole, **rows, decay=decay, initial=state)


@QUICKLY
@given(CASES, st.integers(0, 70), st.integers(0, 70))
def test_states_combine_associatively(case: LinearCase, one: int, other: int) -> None:
    """A sequence in three parts, each from an empty state, joined from the left and from the right."""
    kernel = dispatch.kernel("numpy")
    edges = [0, *sorted((min(one, case.n), min(other, case.n))), case.n]
    a, b, c = (kernel.forward(_part(case, begin, end, None)).state for begin, end in pairwise(edges))
    whole = kernel.forward(_part(case, 0, case.n, None)).state
    for joined in (a.then(b).then(c), a.then(b.then(c))):
        for x, want in zip(joined, whole, strict=True):
            np.testing.assert_allclose(x, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", ["auto", "numpy", *COMPILED])
def test_decoding_step_by_step_is_the_full_pass(kernel: str) -> None:
    if kernel in COMPILED and dispatch.kernel(kernel).unavailable() is not None:
        pytest.skip(str(dispatch.kernel(kernel).unavailable()))
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, heads, 20, 8)).astype(np.float32) for heads in (4, 2, 2))
    decay = np.log(rng.uniform(0.7, 1.0, (2, 2, 20))).astype(np.float32)
    whole, end = tw.linear_attention(q, k, v, decay=decay, return_state=True, kernel=kernel)
    out, state = tw.linear_attention(
        q[:, :, :11], k[:, :, :11], v[:, :, :11], decay=decay[:, :, :11], return_state=True, kernel=kernel
    )
    steps = [out]
    for i in range(11, 20):
        at = (slice(None), slice(None), slice(i, i + 1))
        out, state = tw.linear_attention(
            q[at], k[at], v[at], decay=decay[at], initial_state=state, return_state=True, kernel=kernel
        )
        steps.append(out)
    np.testing.assert_allclose(np.concatenate(steps, axis=2), whole, rtol=1e-4, atol=1e-5)
    for x, want in zip(state, end, strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-5)


def test_exp_features_of_one_dimension_are_softmax() -> None:
    """exp(q) exp(k) = exp(q + k): the weights of keys are softmax(k), whatever q is."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 1, 12, d)) for d in (1, 1, 3))
    want = reference.forward(prepare(q, k, v, feature_map="exp", causal=False).problem).out
    weights = np.exp(k[0, 0, :, 0]) / np.exp(k[0, 0, :, 0]).sum()
    np.testing.assert_allclose(want[0, 0], np.broadcast_to(weights @ v[0, 0], (12, 3)), rtol=1e-12)
