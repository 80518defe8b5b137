"""Modules: what they compute is what PyTorch's own layers and the public functions do one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise import nn
from tilewise.kernels import gpus
from tilewise.kernels.cute import library, projected, projection
from tilewise.nn import MultiHeadAttention
from tilewise.pytorch.projection import unsupported


def one_by_one(module: MultiHeadAttention, x: torch.Tensor, rope: tw.Rope | None, **options: Any) -> torch.Tensor:
    """The same with a projection, a split, an embedding and an attention each on its own."""
    d, heads, heads_k = module.head_dim, module.heads, module.heads_k
    parts = module.qkv(x).split([heads * d, heads_k * d, heads_k * d], -1)
    q, k, v = (part.unflatten(-1, (-1, d)).transpose(1, 2) for part in parts)
    if rope is not None:
        q, k = tw.apply_rope(q, rope), tw.apply_rope(k, rope)
    done = tw.attention(q, k, v, sinks=module.sinks, **options)
    return module.out(done.transpose(1, 2).flatten(2))


VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window and softcap": {"mask": tw.causal() & tw.window(3), "score": tw.softcap(2.0)},
    "alibi": {"score": tw.alibi(4), "scale": 0.3},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rope", [None, tw.Rope(), tw.Rope(4, interleaved=True)], ids=["plain", "rope", "a part"])
def test_it_is_its_parts(variant: str, rope: tw.Rope | None) -> None:
    torch.manual_seed(0)
    module = MultiHeadAttention(24, 4, heads_k=2, rope=rope, sinks=variant == "causal", **VARIANTS[variant])
    x = torch.randn(2, 9, 24, requires_grad=True)
    made, want = module(x), one_by_one(module, x, rope, **VARIANTS[variant])
    assert torch.allclose(made, want, atol=1e-5)
    given = (x, *module.parameters())
    for one, other in zip(
        torch.autograd.grad(made.square().sum(), given), torch.autograd.grad(want.square().sum(), given), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-4)


def test_gradients_in_float64() -> None:
    module = MultiHeadAttention(6, 3, rope=tw.Rope(), causal=True, sinks=True, dtype=torch.float64)
    x = torch.randn(1, 4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, x)


def test_a_call_may_say_otherwise() -> None:
    module = MultiHeadAttention(16, 2, rope=tw.Rope(), causal=True)
    x, turns = torch.randn(2, 5, 16), tw.Rope(positions=torch.tensor([[4, 0, 1, 9, 2], [0, 1, 2, 3, 4]]))
    want = one_by_one(module, x, turns, causal=False)
    assert torch.allclose(module(x, rope=turns, causal=False), want, atol=1e-6)


def test_it_is_compiled_without_breaks() -> None:
    module = MultiHeadAttention(16, 2, rope=tw.Rope(), causal=True)
    x = torch.randn(2, 5, 16)
    assert torch.allclose(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x), atol=1e-6)


def test_half_precision_and_autocast() -> None:
    module = MultiHeadAttention(16, 2, rope=tw.Rope(), causal=True)
    x = torch.randn(2, 5, 16)
    want = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(module(x).float(), want, atol=0.03)
    assert torch.allclose(module.to(torch.bfloat16)(x.to(torch.bfloat16)).float(), want, atol=0.03)


def test_it_comes_back_from_its_state() -> None:
    one, other = (MultiHeadAttention(16, 2, sinks=True) for _ in range(2))
    other.load_state_dict(one.state_dict())
    x = torch.randn(1, 3, 16)
    assert torch.equal(one(x), other(x))
    assert set(one.state_dict()) == {"qkv.weight", "qkv.bias", "out.weight", "out.bias", "sinks"}


def test_printing_says_what_it_is() -> None:
    text = repr(MultiHeadAttention(16, 4, heads_k=2, rope=tw.Rope(), mask=tw.window(3), bias=False))
    assert "heads=4, heads_k=2, head_dim=4, rope=Rope(base=10000.0), mask=" in text


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="heads: expected a number that divides features, which is 16, got 3"):
        MultiHeadAttention(16, 3)
    with pytest.raises(ValueError, match="heads_k: expected a positive whole number, got 0"):
        MultiHeadAttention(16, 4, heads_k=0)
    with pytest.raises(ValueError, match="heads_k: expected a number that divides heads, which is 4, got 3"):
        MultiHeadAttention(16, 4, heads_k=3)
    with pytest.raises(ValueError, match="heads_k: expected a number that divides heads"):
        MultiHeadAttention(16, 4, heads_k=3, head_dim=5)
    with pytest.raises(TypeError, match="dropout: expected one of rope, causal, mask, score, scale"):
        MultiHeadAttention(16, 4)(torch.ones(1, 2, 16), dropout=0.1)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(1, 2, 12), ValueError, r"x: expected \(batch, n, 16\).*got shape \(1, 2, 12\)"),
        (torch.ones(2, 16), ValueError, r"x: expected \(batch, n, 16\).*got shape \(2, 16\)"),
        (torch.ones(1, 2, 16).numpy(), TypeError, "x: expected a PyTorch tensor, got ndarray; pass torch.as_tensor"),
        (torch.ones(1, 2, 16).half(), TypeError, r"x: expected torch.float32 .*, got torch.float16; .*x.to\(torch.fl"),
        (torch.ones(1, 2, 16, device="meta"), ValueError, r"x: expected a tensor on cpu .*x.to\('cpu'\) or module.to"),
    ],
)
def test_an_x_that_does_not_fit_is_named(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MultiHeadAttention(16, 4)(x)


def test_autocast_takes_x_of_another_type() -> None:
    """As the layers before it leave it."""
    module, x = MultiHeadAttention(16, 2, causal=True), torch.randn(2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x.bfloat16()), module(x))


@pytest.mark.parametrize("rope", [None, tw.Rope(), tw.Rope(4, interleaved=True)], ids=["plain", "rope", "a part"])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_words_that_come_one_by_one_give_the_same(rope: tw.Rope | None, paged: bool) -> None:
    """A prompt of 5 words and then four more, beside the whole sequence at once."""
    torch.manual_seed(1)
    module = MultiHeadAttention(24, 4, heads_k=2, rope=rope, causal=True, sinks=True)
    x = torch.randn(2, 9, 24)
    cache = module.new_cache(2, 16)
    if paged:
        like = torch.empty(2, 2, 1, 6)
        cache = tw.PagedKVCache.like(like, like, pages=4, page_size=16)
    with torch.no_grad():
        steps = [module(part, cache=cache) for part in x.split([5, 1, 1, 1, 1], 1)]
        assert torch.allclose(torch.cat(steps, 1), module(x), atol=1e-5)
    assert torch.as_tensor(cache.lengths).tolist() == [9, 9]
    with pytest.raises((ValueError, RuntimeError), match=r"gradient|no_grad"):
        module(x[:, :1], cache=cache)


# -- the projection behind attention, by the same kernel --------------------------------------------------------------


def test_one_kernel_computes_attention_and_projection_where_auto_may_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in, which tells what it is given."""
    given: list[Any] = []

    def stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w_o: torch.Tensor, **how: Any) -> torch.Tensor:
        given.append((w_o, how))
        return tw.attention(q, k, v, **how).transpose(1, 2).flatten(2) @ w_o

    module, x = MultiHeadAttention(16, 2, causal=True, sinks=True), torch.randn(2, 5, 16)
    want = module(x)
    monkeypatch.setattr(projection, "projected_if_it_pays", stand_in)
    monkeypatch.setattr(nn, "_are_numbers_alone", lambda q, out: True)
    assert torch.allclose(module(x), want, atol=1e-6) and len(given) == 1
    assert torch.equal(given[0][0], module.out.weight.T) and given[0][1].keys() == {"sinks", *module.options}
    module.kernel = "cpu"
    assert torch.allclose(module(x), want, atol=1e-6) and len(given) == 1, "another kernel was named"


def test_who_looks_on_gets_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    out, q = torch.nn.Linear(4, 4), SimpleNamespace(device=torch.device("cuda"))
    assert not nn._are_numbers_alone(q, out), "gradients are wanted"
    with torch.no_grad():
        assert nn._are_numbers_alone(q, out)
        assert not nn._are_numbers_alone(torch.zeros(1), out)
        assert not nn._are_numbers_alone(q, torch.nn.Sequential(out))
        with monkeypatch.context() as on_a_gpu:
            on_a_gpu.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
            assert not nn._are_numbers_alone(q, out)
        out.register_forward_hook(lambda *call: None)
        assert not nn._are_numbers_alone(q, out)


@pytest.mark.parametrize("reason", ["it does not pay", "there is no such kernel", "no kernel was built"])
def test_what_one_kernel_cannot_do_two_kernels_do(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(nn, "_are_numbers_alone", lambda q, out: True)
    monkeypatch.setattr(projected, "MOST_STEPS", 0 if reason == "it does not pay" else 100)
    monkeypatch.setattr(library, "not_installed", lambda: "it needs tvm_ffi" if "no such" in reason else None)
    monkeypatch.setattr(gpus, "elsewhere", lambda shape: None)
    monkeypatch.setattr(gpus, "capability", lambda device: (9, 0))
    monkeypatch.setattr(projection, "_is_built", lambda kernel, *where: bool(built.append(kernel)))
    module, x = MultiHeadAttention(16, 2, causal=True), torch.randn(2, 5, 16)
    with torch.no_grad():
        assert torch.equal(module(x), module.out(_attended(module, x)))
    assert [kernel.heads for kernel in built] == ([2] if reason == "no kernel was built" else [])


def _attended(module: MultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    q, k, v = tw.fused_qkv_projection(x, module.qkv.weight.T, module.qkv.bias, heads=module.heads)
    return tw.attention(q, k, v, causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("kernel", ["matmul", "triton"])
def test_gradients_of_q_k_and_v_are_joined_and_not_added_up(kernel: str) -> None:
    """Slices would each have a gradient as large as all three together."""
    if kernel == "triton" and (reason := unsupported("cpu", "float32")) is not None:
        pytest.skip(f"Triton's projection cannot run on this machine: {reason}")
    x, w = torch.randn(1, 5, 8, requires_grad=True), torch.randn(8, 32, requires_grad=True)
    parts = tw.fused_qkv_projection(x, w, heads=2, heads_k=1, kernel=kernel)
    assert [part.shape[1] for part in parts] == [2, 1, 1]
    made_by = {_first(part.grad_fn, "Transpose") for part in parts}
    assert len(made_by) == 1
    assert "Split" in type(made_by.pop()).__name__


def _first(node: Any, passed: str) -> Any:
    """What made a tensor, behind views of that kind."""
    while passed in type(node).__name__:
        node = node.next_functions[0][0]
    return node
