"""Linear attention on PyTorch tensors: autograd, opcheck, torch.compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402

import tilewise as tw  # noqa: E402
from tilewise.linear import contract  # noqa: E402
from tilewise.linear.cases import CASES, LinearCase  # noqa: E402
from tilewise.linear.pytorch import operator  # noqa: E402

OPERATORS = [LinearCase("plain", n=9, d=4, d_v=3), *(c for c in CASES if c.name in ("packed", "float16"))]
SAMPLE = {"n": 20, "d": 4, "d_v": 3, "carried": True, "decay": "token"}


def _operands(case: LinearCase, grad: bool = True) -> list[Any]:
    problem = case.problem()
    given = [problem.q, problem.k, problem.v, problem.decay, *(problem.initial or (None,) * 3)]
    tensors = [None if x is None else torch.tensor(np.ascontiguousarray(x)).requires_grad_(grad) for x in given]
    lengths = None if problem.spec.lengths is None else torch.tensor(problem.spec.lengths)
    return [*tensors, lengths, operator.encode(problem.spec, "numpy")]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck's own: it looks at tensors that are no leaves
@pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)
def test_opcheck(case: LinearCase) -> None:
    torch.library.opcheck(operator.linear_attention, _operands(case))
    plain = _operands(case, grad=False)
    done = operator.linear_attention(*plain)
    pulled = [torch.ones_like(done[0]), torch.ones_like(done[2]), None, None]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator.linear_attention_backward, [*plain, *done, *pulled], test_utils=tests)


@pytest.mark.parametrize("normalize", [True, False])
def test_gradcheck(normalize: bool) -> None:
    *tensors, lengths, spec = _operands(LinearCase("small", 1, 2, 1, dtype="float64", normalize=normalize, **SAMPLE))

    def run(*tensors: Any) -> Any:
        out, _, kv, z, log_decay = operator.linear_attention(*tensors, lengths, spec)
        return out, kv, z, log_decay

    torch.autograd.gradcheck(run, tensors, fast_mode=True)


def test_a_constant_decay_has_a_gradient() -> None:
    q, k, v = (torch.randn(2, 3, 20, 4, dtype=torch.float64) for _ in range(3))
    decay = torch.tensor([-0.1, -0.2, -0.3], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda decay: tw.linear_attention(q, k, v, decay=decay), (decay,), fast_mode=True)


def test_tensors_and_arrays_give_the_same() -> None:
    problem = LinearCase("any", **SAMPLE).problem()
    options = {"decay": problem.decay, "initial_state": problem.initial, "kernel": "numpy", "return_state": True}
    want = tw.linear_attention(problem.q, problem.k, problem.v, **options)
    state = tw.LinearState(*(torch.from_numpy(x) for x in problem.initial))
    options |= {"decay": torch.from_numpy(problem.decay), "initial_state": state}
    got = tw.linear_attention(*(torch.from_numpy(x) for x in (problem.q, problem.k, problem.v)), **options)
    np.testing.assert_array_equal(got[0].numpy(), want[0])
    np.testing.assert_array_equal(got[1].kv.numpy(), want[1].kv)


def test_vjp_of_tensors() -> None:
    q, k, v = (torch.randn(2, 3, 20, 4, requires_grad=True) for _ in range(3))
    tw.linear_attention(q, k, v, kernel="numpy").sum().backward()
    out, _, pullback = tw.linear_attention_vjp(q.detach(), k.detach(), v.detach(), kernel="numpy")
    torch.testing.assert_close(pullback(torch.ones_like(out)).k, k.grad)


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(1, 1, 5, 4, requires_grad=True)
    (d_x,) = torch.autograd.grad(tw.linear_attention(x, x, x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives alone"):
        d_x.sum().backward()


# PyTorch's own warnings, of what it imports for it.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_forward_mode_is_refused_and_not_dropped() -> None:
    x, gates = torch.randn(1, 2, 5, 4), torch.full((2,), -0.1)
    with forward_ad.dual_level():
        tw.linear_attention(x, x, x, decay=gates)
        for given in ({"q": forward_ad.make_dual(x, x)}, {"decay": forward_ad.make_dual(gates, gates)}):
            with pytest.raises(tw.Unsupported, match="forward mode"):
                tw.linear_attention(**{"q": x, "k": x, "v": x, "decay": gates, **given})


def test_errors_come_through() -> None:
    x = torch.randn(1, 1, 5, 4)
    with pytest.raises(ValueError, match="decay: expected logs"):
        tw.linear_attention(x, x, x, decay=torch.ones(1))
    with pytest.raises(TypeError, match="decay: expected a PyTorch tensor as q is, got a NumPy array"):
        tw.linear_attention(x, x, x, decay=-np.ones(1))
    with pytest.raises(tw.Unsupported, match="numpy: it works in main memory and the arrays are on meta"):
        tw.linear_attention(x.to("meta"), x.to("meta"), x.to("meta"))


def test_compile() -> None:
    """One graph, whatever the feature map, with gradients and a state that is carried on."""

    def layer(q: Any, k: Any, v: Any, decay: Any, state: Any) -> Any:
        first, state = tw.linear_attention(
            q, k, v, feature_map=tw.exp(tw.S * 0.5), decay=decay, initial_state=state, return_state=True
        )
        second, state = tw.linear_attention(q, k, first, initial_state=state, return_state=True)
        return second + tw.linear_attention(q, k, v, causal=False, feature_map="relu"), state.kv

    q, k, v = (torch.randn(2, 2, 12, 4, requires_grad=True) for _ in range(3))
    decay = torch.full((2,), -0.1, requires_grad=True)
    state = tw.LinearState(torch.rand(2, 2, 4, 4), torch.rand(2, 2, 4), torch.zeros(2, 2))
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        out, kv = run(q, k, v, decay, state)
        results.append((out, kv, *torch.autograd.grad(out.sum() + kv.sum(), (q, k, v, decay))))
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want)


def test_transforms_of_torch_func() -> None:
    x = torch.randn(3, 2, 2, 10, 4, dtype=torch.float64)
    decay = torch.full((2,), -0.1, dtype=torch.float64)

    def loss(x: Any) -> Any:
        return tw.linear_attention(x, x, x, decay=decay).square().sum()

    leaf = x.clone().requires_grad_()
    sum(loss(part) for part in leaf).backward()
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(x), leaf.grad)
    torch.testing.assert_close(torch.vmap(loss)(x).sum(), loss(x.flatten(0, 1)))


def test_lengths_that_change() -> None:
    compiled = torch.compile(lambda x: tw.linear_attention(x, x, x, decay=-0.1), fullgraph=True, backend="aot_eager")
    for n in (10, 20, 31):
        x = torch.randn(1, 2, n, 4)
        torch.testing.assert_close(compiled(x), tw.linear_attention(x, x, x, decay=-0.1))


def test_autocast_and_layout() -> None:
    x = torch.randn(2, 9, 3, 4).transpose(1, 2)  # heads side by side
    out = tw.linear_attention(x, x, x)
    assert out.stride() == x.stride()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tw.linear_attention(x, x, x).dtype == torch.bfloat16


def test_bfloat16_is_within_the_contract() -> None:
    problem = LinearCase("any", dtype="bfloat16", n=100).problem()
    expected = {e.what: e for e in contract.expected_of(problem)}
    q, k, v = (torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in (problem.q, problem.k, problem.v))
    expected["out"].check(tw.linear_attention(q, k, v))
