"""PyTorch's ways to a gradient in half precision: out goes to each of them in two halves, and to inference in one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tests.remainder_problems import HERE, MOST, gradients, off, problem
from tilewise import arrays, dispatch
from tilewise.contract import ROUNDING

PLAIN, WITH = "tilewise.attention.default", "tilewise.attention_with_remainder.default"


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Which of our forward operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [str(func)] if str(func) in (PLAIN, WITH) else []
        return func(*args, **(kwargs or {}))


def _tensors(scale: float = 12.0, dtype: str = "bfloat16") -> list[Any]:
    return [arrays.as_tensor(x) for x in problem(scale, dtype)]


def _attention(q: Any, k: Any, v: Any) -> Any:
    return tw.attention(q, k, v, causal=True)


def _by_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    def d_q(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        q = q.clone().requires_grad_()
        run(q, k, v).backward(d_out)
        return q.grad

    return d_q


def _twice(run: Callable[..., Any]) -> Callable[..., Any]:
    def d_q(*given: Any) -> Any:
        run(*given)
        return run(*given)

    return d_q


def _weighed(q: Any, k: Any, v: Any, d_out: Any) -> Any:
    return (_attention(q, k, v).float() * d_out).sum()


def _mapped(*given: Any) -> Any:
    """Each head an example, a gradient each."""
    parts = [x.transpose(0, 1).unsqueeze(1) for x in given]
    return torch.vmap(torch.func.grad(_weighed))(*parts).squeeze(1).transpose(0, 1)


def _of_mapped(*given: Any) -> Any:
    """The gradient of what was mapped."""
    *parts, d_out = (x.transpose(0, 1).unsqueeze(1) for x in given)

    def loss(q: Any) -> Any:
        return (torch.vmap(_attention)(q, *parts[1:]).float() * d_out).sum()

    return torch.func.grad(loss)(parts[0]).squeeze(1).transpose(0, 1)


def _autograd_of_mapped(*given: Any) -> Any:
    """The same by autograd, outside the transform."""
    q, *parts, d_out = (x.transpose(0, 1).unsqueeze(1) for x in given)
    q = q.clone().requires_grad_()
    torch.vmap(_attention)(q, *parts).backward(d_out)
    return q.grad.squeeze(1).transpose(0, 1)


def _by_sdpa(q: Any, k: Any, v: Any) -> Any:
    below = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return tw.scaled_dot_product_attention(q, k, v, attn_mask=below)


def _packed(q: Any, k: Any, v: Any) -> Any:
    lengths = torch.tensor([0, q.shape[2]])
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    return tw.attention_varlen(*rows, lengths, lengths, causal=True).transpose(0, 1)[None]


def _saved_by_pickle(q: Any, k: Any, v: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(pickle.dumps, pickle.loads):
        return _attention(q, k, v)


WAYS = {
    "backward": _by_backward(_attention),
    "again": _twice(_by_backward(_attention)),
    "attention_varlen": _by_backward(_packed),
    "scaled_dot_product_attention": _by_backward(_by_sdpa),
    "checkpoint": _by_backward(lambda *x: checkpoint(_attention, *x, use_reentrant=False)),
    "checkpoint, reentrant": _by_backward(lambda *x: checkpoint(_attention, *x, use_reentrant=True)),
    "saved elsewhere": _by_backward(_saved_by_pickle),
    "grad": torch.func.grad(_weighed),
    "vmap of grad": _mapped,
    "grad of vmap": _of_mapped,
    "vmap below autograd": _autograd_of_mapped,
}


@pytest.mark.parametrize("dtype", arrays.HALF_DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_gradient(way: str, dtype: str) -> None:
    given = _tensors(dtype=dtype)
    most = MOST * ROUNDING[dtype] / ROUNDING["bfloat16"]
    with _Watch() as watch:
        d_q = WAYS[way](*given)
    assert off(d_q, gradients(problem(12, dtype), causal=True).q) < most
    assert WITH in watch.seen
    assert PLAIN not in watch.seen or way == "checkpoint, reentrant"  # whose first pass is without gradients


@contextmanager
def _counting() -> Iterator[list[int]]:
    """Bytes that autograd keeps for a backward pass, storage by storage."""
    kept: dict[int, int] = {}
    counted: list[int] = []

    def keep(x: Any) -> Any:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield counted
    counted.append(sum(kept.values()))


@pytest.mark.parametrize("dtype", arrays.FLOAT_DTYPES)
def test_autograd_keeps_one_more_result(dtype: str) -> None:
    q, k, v, d_out = _tensors(dtype=dtype)
    q.requires_grad_()
    with _counting() as counted:
        _attention(q, k, v)
    results = d_out.nbytes * (2 if dtype in arrays.HALF_DTYPES else 1)
    lse = q.shape[1] * q.shape[2] * (8 if dtype == "float64" else 4)
    assert counted == [q.nbytes + k.nbytes + v.nbytes + results + lse]


def test_compiled() -> None:
    """The same bits, and the operators that a call without the compiler has."""
    given, seen = _tensors(), []

    def compiler(graph: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("tilewise"))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler)
    compiled = torch.compile(_attention, backend=backend, fullgraph=True)
    assert torch.equal(_by_backward(compiled)(*given), WAYS["backward"](*given))
    assert seen == [WITH, "tilewise.attention_backward.default"]
    compiled(*given[:3])
    assert seen[2:] == [PLAIN]
    torch._dynamo.reset()


def _without_gradients(q: Any, k: Any, v: Any) -> Any:
    with torch.no_grad():
        return _attention(q.requires_grad_(), k, v)


def _mapped_without_gradients(q: Any, k: Any, v: Any) -> None:
    with torch.no_grad():
        torch.vmap(_attention)(*(x.clone().requires_grad_() for x in (q, k, v)))


def _constant(q: Any, k: Any, v: Any) -> Any:
    """A part of what is differentiated that is not to be."""
    with torch.no_grad():
        found = _attention(q, k, v)
    return (found * q).sum()


INFERENCE = {
    "nothing requires a gradient": lambda q, k, v: _attention(q, k, v),
    "no_grad": _without_gradients,
    "vmap": lambda q, k, v: torch.vmap(_attention)(q, k, v),
    "vmap, no_grad": _mapped_without_gradients,
    "no_grad in grad": lambda q, k, v: torch.func.grad(_constant)(q, k, v),
    "float32": lambda q, k, v: _attention(*(x.float().requires_grad_() for x in (q, k, v))),
    "detached": lambda q, k, v: _attention(q.requires_grad_().detach(), k, v),
}


@pytest.mark.parametrize("way", INFERENCE)
def test_inference_asks_for_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in HERE:
        kind = type(dispatch.kernel(name))

        def watched(self: Any, spec: Any, *given: Any, forward: Any = kind.forward) -> Any:
            done = forward(self, spec, *given)
            asked.append((spec.keeps_remainder, done.remainder))
            return done

        monkeypatch.setattr(kind, "forward", watched)
    with _Watch() as watch:
        INFERENCE[way](*_tensors()[:3])
    assert set(watch.seen) == {PLAIN}
    assert set(asked) == {(False, None)}


def test_a_system_that_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code has been told that there are three results, whatever a kernel system can."""
    given = _tensors()
    kept = WAYS["backward"](*given)
    kind = type(dispatch.kernel(HERE[-1]))
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, spec, *x: forward(self, replace(spec, keeps_remainder=False), *x))
    exact = gradients(problem(12), causal=True).q
    d_q = WAYS["backward"](*given)
    assert off(kept, exact) < MOST < off(d_q, exact) < 1e-2
    torch._dynamo.reset()
    compiled = torch.compile(_attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(_by_backward(compiled)(*given), d_q)
    torch._dynamo.reset()


def _operands(dtype: Any = torch.bfloat16, transposed: bool = True) -> tuple[Any, ...]:
    q, k, v = (torch.randn(2, 5, 3, 8, dtype=dtype) for _ in range(3))
    if transposed:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return q, k, v, [], None, '{"kernel": "auto", "scale": 0.5}'


@pytest.mark.parametrize("transposed", [False, True])
def test_pytorchs_checks_of_the_operators(transposed: bool) -> None:
    operators, operands = torch.ops.tilewise, _operands(transposed=transposed)
    torch.library.opcheck(operators.attention_with_remainder.default, operands)
    out, lse, remainder = operators.attention_with_remainder(*operands)
    assert remainder.stride() == out.stride()
    backward = operators.attention_backward.default
    torch.library.opcheck(backward, (*operands, out, lse, torch.ones_like(out), None, [], remainder))


@pytest.mark.parametrize("sizes", [(2, 3, 1, 8), (1, 3, 2, 8), (2, 1, 3, 8), (2, 0, 3, 8), (1, 1, 1, 8)], ids=str)
def test_compiled_code_is_told_how_results_lie(sizes: tuple[int, ...]) -> None:
    """Where a size is 1 or 0 as well, and PyTorch may think of other strides. A batch of rows of heads side by side."""
    q = torch.zeros(sizes, dtype=torch.bfloat16).transpose(1, 2)
    others = [], None, '{"kernel": "auto", "scale": 0.5}'
    with FakeTensorMode() as fake:
        told = torch.ops.tilewise.attention_with_remainder(*(fake.from_tensor(q) for _ in "qkv"), *others)
    found = torch.ops.tilewise.attention_with_remainder(q, q, q, *others)
    assert [x.stride() for x in told] == [x.stride() for x in found]
    assert found[2].stride() == found[0].stride()


def test_the_operator_beneath_is_not_for_callers() -> None:
    q, *others = _operands()
    out, _, _ = torch.ops.tilewise.attention_with_remainder(q.requires_grad_(), *others)
    with pytest.raises(NotImplementedError, match="call tilewise::attention, which keeps the remainder"):
        out.sum().backward()


class _Launch:
    """One that was made ready, and writes down what it is launched with."""

    def __init__(self, keeps_remainder: bool) -> None:
        self.keeps_remainder = keeps_remainder
        self.addresses: list[int] = []

    def launch(self, addresses: list[int]) -> None:
        self.addresses = addresses


@pytest.mark.parametrize(("wanted", "has"), [(False, False), (True, False), (True, True)])
def test_launches_made_ready(wanted: bool, has: bool) -> None:
    """The remainder's address is the last, if the launch stores one; if none does, it is 0."""
    from tilewise.pytorch.ready import Ready

    q, table, sinks = torch.ones(1, 2, 3, 8).bfloat16(), torch.ones(4), torch.ones(2)
    launch = _Launch(has)
    rows = (1, 2, 3), (6, 3, 1)
    ready = Ready(launch, [0], (tuple(q.shape), q.stride()), rows, q.dtype, q.device, wanted)
    out, lse, *more = ready.run(q, q, q, sinks, [table])
    given = [q, q, q, out, lse, table, sinks, *(more if has else [])]
    assert launch.addresses == [x.data_ptr() for x in given]
    assert len(more) == wanted
    assert all((x.shape, x.stride(), x.dtype) == (out.shape, out.stride(), out.dtype) for x in more)
    assert has or not any(x.any() for x in more)
