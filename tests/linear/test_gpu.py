"""Linear attention on a GPU: every case within the contract, long sequences beside the CPU's, the same bits again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.linear.cases_on_gpu import CASES as CASES_ON_GPU
from tilewise import arrays
from tilewise.contract import check_results, on_host
from tilewise.linear import contract, dispatch
from tilewise.linear.cases import CASES, LinearCase
from tilewise.linear.spec import Problem
from tilewise.linear.state import LinearState

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

SUPPORTED = [case for case in CASES if case.dtype != "float64"]
LONG = [
    LinearCase("long, bfloat16", n=3000, d=128, d_v=128, dtype="bfloat16", decay="head"),
    LinearCase("long, float16", n=3000, d=64, d_v=128, dtype="float16", decay="token", carried=True),
    LinearCase("long, float32", n=1500, d=96, d_v=80, heads=4, decay="token"),
    LinearCase("long, packed", lengths=(0, 1000, 1000, 1001, 3000), d=64, d_v=64, dtype="bfloat16", carried=True),
]


def _there(x: Any) -> Any:
    return None if x is None else arrays.as_tensor(np.ascontiguousarray(x)).cuda()


def _on_gpu(problem: Problem) -> Problem:
    initial = None if problem.initial is None else problem.initial.map(_there)
    rows = {name: _there(getattr(problem, name)) for name in ("q", "k", "v", "decay")}
    return replace(problem, **rows, initial=initial)


def _results(problem: Problem, d_out: Any, d_state: LinearState) -> dict[str, Any]:
    kernel = dispatch.kernel("triton")
    done = kernel.forward(problem)
    grads = kernel.backward(problem, done, d_out, d_state)
    return {**contract.forward_results(done), **contract.backward_results(grads)}


@pytest.mark.parametrize("case", [*SUPPORTED, *LONG], ids=lambda case: case.name)
def test_case(case: LinearCase) -> None:
    host = case.problem()
    d_out, d_state = contract.gradients_to_pull(host)
    got = _results(_on_gpu(host), _there(d_out), d_state.map(_there))
    check_results(contract.expected_of(host), {name: on_host(x.contiguous()) for name, x in got.items()})


@pytest.mark.parametrize("case", CASES_ON_GPU, ids=lambda case: case.name)
def test_rows_that_are_made_ready(case: LinearCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a large call, of whatever size; tests/linear/test_triton.py has the small ones."""
    from tilewise.linear.kernels.triton import call

    monkeypatch.setattr(call, "LARGE", 0)
    test_case(case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_same_bits_again(dtype: str) -> None:
    problem = LinearCase("any", 2, 8, 4, n=2000, d=64, d_v=64, dtype=dtype, decay="token").problem()
    pulled = contract.gradients_to_pull(problem)
    given = _on_gpu(problem), _there(pulled[0]), pulled[1].map(_there)
    first, second = _results(*given), _results(*given)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, of what its compiler imports
def test_training_and_auto() -> None:
    x = torch.randn(1, 4, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gate = torch.full((1, 4, 300), -0.1, device="cuda", requires_grad=True)
    step = torch.compile(
        lambda x, gate: tw.linear_attention(x, x, x, decay=gate).float().square().mean(), fullgraph=True
    )
    step(x, gate).backward()
    assert x.grad.isfinite().all() and gate.grad.isfinite().all()


def _at_an_odd_address(x: Any) -> Any:
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("n", [300, 5000])  # one segment, and several
def test_calls_like_ones_before_wherever_tensors_lie(n: int) -> None:
    for odd in (None, 0, 1, 2, None):
        given = [torch.randn(1, 4, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        given = [(_at_an_odd_address(x) if i == odd else x).requires_grad_() for i, x in enumerate(given)]
        out = tw.linear_attention(*given, kernel="triton")
        want, _ = tw.linear_attention(*given, kernel="triton", return_state=True)  # by the operator
        d_out = torch.randn_like(out)
        found, wanted = (torch.autograd.grad(x, given, d_out) for x in (out, want))
        for x, y in zip((out, *found), (want, *wanted), strict=True):
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)


def test_a_graph_of_a_call_like_ones_before() -> None:
    x = torch.randn(1, 4, 5000, 64, device="cuda", dtype=torch.bfloat16)
    tw.linear_attention(x, x, x, kernel="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.linear_attention(x, x, x, kernel="triton")
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, tw.linear_attention(x, x, x, kernel="triton"))
