"""Linear attention by the native engine: every instruction set, any threads, chunks of any size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import tilewise as tw
from tilewise.contract import check_results
from tilewise.kernels.cpu import library
from tilewise.linear import contract, dispatch
from tilewise.linear.cases import CASES, LinearCase
from tilewise.linear.features import FEATURE_MAPS
from tilewise.linear.spec import Linear, Problem

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))
GATES = next(case for case in CASES if case.name == "gates, grouped heads")
SOME = [case for case in CASES if case.name in ("gates, grouped heads", "packed", "all of a sequence", "float64")]


@pytest.fixture
def the_best_again() -> Iterator[None]:
    yield
    library.use_isa(library.isas()[0])


@pytest.mark.usefixtures("the_best_again")
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_every_instruction_set(case: LinearCase) -> None:
    for isa in library.isas():
        library.use_isa(isa)
        contract.check(dispatch.kernel("cpu"), case.problem())


@pytest.mark.parametrize("chunk", [1, 7, 200])
def test_chunks_of_any_size(chunk: int) -> None:
    contract.check(dispatch.kernel("cpu"), replace(GATES, heads=2, d=300, d_v=3).problem(), chunk)


def test_threads_do_not_change_bits() -> None:
    problem, kernel, threads = GATES.problem(), dispatch.kernel("cpu"), tw.get_num_threads()
    pulled = contract.gradients_to_pull(problem)
    results = []
    for n in (1, 3):
        tw.set_num_threads(n)
        done = kernel.forward(problem)
        results.append(
            contract.forward_results(done) | contract.backward_results(kernel.backward(problem, done, *pulled))
        )
    tw.set_num_threads(threads)
    for name, x in results[0].items():
        np.testing.assert_array_equal(results[1][name], x, err_msg=name)


@pytest.mark.parametrize("lengths", [(0, 9), (-1, 8), (0, 5, 3, 8), (0, 2**63 - 1, -(2**63), 8)], ids=str)
def test_the_engine_takes_no_callers_word_for_lengths(lengths: tuple[int, ...]) -> None:
    """Whoever checked before: rows outside the arrays are neither read nor written."""
    q = np.ones((1, 2, 8, 16), np.float32)
    spec = Linear(FEATURE_MAPS["elu"], lengths=np.array(lengths))
    with pytest.raises(ValueError, match="lengths: expected sequences within the arrays"):
        dispatch.kernel("cpu").forward(Problem(spec, q, q, q))


def test_any_strides() -> None:
    """Heads side by side, as a projection leaves them, and rows of a larger array."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 50, 3, 24)).astype(np.float32)[..., :20].swapaxes(2, 3)
    want = tw.linear_attention(*map(np.ascontiguousarray, (q, k, v)), kernel="cpu")
    np.testing.assert_array_equal(tw.linear_attention(q, k, v, kernel="cpu"), want)


def test_states_of_any_strides() -> None:
    """In Fortran order, as a transposed state is: the state before the first key, and a gradient of the one after."""
    case = next(case for case in CASES if case.name == "decay by head")
    problem, kernel = case.problem(), dispatch.kernel("cpu")
    d_out, d_state = contract.gradients_to_pull(problem)
    given = replace(problem, initial=problem.initial.map(np.asfortranarray))  # type: ignore[union-attr]
    done = kernel.forward(given)
    grads = kernel.backward(given, done, d_out, d_state.map(np.asfortranarray))
    got = {**contract.forward_results(done), **contract.backward_results(grads)}
    check_results(contract.expected_of(problem), got)
