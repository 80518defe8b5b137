"""Repeated training calls on a GPU in half precision: out goes to the backward pass in two halves."""

from __future__ import annotations

from typing import Any

import pytest

import tilewise as tw
from tests.cuda.fake_gpu import FakeGpu
from tests.remainder_problems import MOST, gradients, off, problem
from tilewise import arrays, dispatch
from tilewise.pytorch import repeat
from tilewise.validate import prepare

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("kernel", ["cuda/tiled", "cuda/forward_sm90"])
def test_repeated_training_calls(fake_gpu: FakeGpu, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(12, n=64, n_k=64)
    exact = gradients(given, causal=True)
    q, k, v, d_out = map(arrays.as_tensor, given)

    def call(q: Any) -> Any:
        return tw.attention(q, k, v, causal=True, kernel=kernel)

    q.requires_grad_()
    with monkeypatch.context() as once:
        for _ in range(2):
            (d_q,) = torch.autograd.grad(call(q), q, d_out)
            assert off(d_q, exact.q) < MOST
            once.setattr(repeat, "make_known", None)  # it is known
    with torch.no_grad():  # the same tensors, another call: nothing is kept
        assert torch.equal(call(q), call(q.detach()))


@pytest.mark.parametrize("kernel", ["cuda/tiled", "cuda/forward_sm90"])
def test_launches_say_whether_they_store_it(fake_gpu: FakeGpu, kernel: str) -> None:
    system = dispatch.kernel(kernel)
    assert isinstance(system, dispatch.Prepares)
    for dtype in ("bfloat16", "float32") if kernel == "cuda/tiled" else ("bfloat16",):
        q, k, v, _ = map(arrays.as_tensor, problem(1, dtype, n=64, n_k=64))
        spec = prepare(q, k, v).spec
        for each in (spec, spec.before_backward(dtype)):
            launch = system.prepared(each, q, k, v)
            assert launch is not None
            assert launch.keeps_remainder == each.keeps_remainder
