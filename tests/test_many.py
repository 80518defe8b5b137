"""More heads or batch indices than the second and third number of a GPU's grid: right, or refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tilewise as tw
from tilewise import dispatch, validate
from tilewise.kernels.cute import support as cute
from tilewise.kernels.tilelang import support as tilelang
from tilewise.linear import dispatch as linear
from tilewise.linear.kernels.tilelang import refused
from tilewise.spec import Attention, Shape

torch = pytest.importorskip("torch")

MANY = 65_537  # 65,535 is the most of a grid's second and third number
LEADING = [(MANY, 1), (1, MANY)]  # batch, heads
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")


def operands(batch: int, heads: int, n: int, d: int, dtype: Any, device: str) -> list[Any]:
    made = torch.Generator(device).manual_seed(0)
    return [torch.randn(batch, heads, n, d, generator=made, device=device).to(dtype) for _ in range(4)]


def check(kernel: str, batch: int, heads: int, dtype: Any = torch.float32, d: int = 4, device: str = "cpu") -> None:
    """out and gradients beside PyTorch's, in float64; ALiBi's slopes differ from head to head."""
    if (reason := dispatch.kernel(kernel).unavailable()) is not None:
        pytest.skip(f"{kernel} cannot run on this machine: {reason}")
    q, k, v, d_out = operands(batch, heads, 3, d, dtype, device)
    slopes = torch.linspace(0.0, 1.0, heads, device=device)
    number = torch.arange(batch, dtype=torch.float32, device=device) / batch
    score = tw.S - tw.load(slopes, tw.H) * tw.K - tw.load(number, tw.B) * tw.K
    out, pullback = tw.attention_vjp(q, k, v, causal=True, score=score, kernel=kernel)
    grads = pullback(d_out)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    s = wide[0] @ wide[1].mT / d**0.5
    s = s - (slopes[:, None, None] + number[:, None, None, None]).double() * torch.arange(3, device=device)
    s = s.masked_fill(torch.ones(3, 3, dtype=torch.bool, device=device).triu(1), -torch.inf)
    exact = s.softmax(-1) @ wide[2]
    exact.backward(d_out.double())
    allowed = 1e-4 if dtype == torch.float32 else 4e-2
    for found, want in zip((out, grads.q, grads.k, grads.v), (exact, *(x.grad for x in wide)), strict=True):
        torch.testing.assert_close(found.double(), want, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("kernel", ["cpu", pytest.param("numpy", marks=pytest.mark.slow)])
def test_the_cpu_takes_as_many_as_there_are(kernel: str, leading: tuple[int, int]) -> None:
    check(kernel, *leading)


@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("kernel", ["triton", "triton/basic", "tilelang-c"])
def test_others_say_how_many_there_is_room_for(kernel: str, leading: tuple[int, int]) -> None:
    if (reason := dispatch.kernel(kernel).unavailable()) is not None:
        pytest.skip(f"{kernel} cannot run on this machine: {reason}")
    q, k, v, _ = operands(*leading, 1, 16, torch.float32, "cpu")
    with pytest.raises(tw.Unsupported, match=r"room for 65535 (heads|batch indices), and there are 65537; pass fewer"):
        tw.attention(q, k, v, kernel=kernel)


@pytest.mark.parametrize("leading", LEADING)
def test_kernels_that_only_a_gpu_has_say_it_too(leading: tuple[int, int]) -> None:
    batch, heads = leading
    shape = Shape(batch, heads, heads, 8, 8, 64, 64, "bfloat16")
    told = cute.unsupported(Attention(1.0), shape, None, (9, 0)), tilelang.unsupported(Attention(1.0), shape, "sm_90a")
    assert all(reason is not None and "room for 65535" in reason for reason in (*told, refused(shape)))


def test_decoding_says_it_too() -> None:
    if (reason := dispatch.kernel("triton").unavailable()) is not None:
        pytest.skip(f"triton cannot run on this machine: {reason}")
    cache = tw.KVCache(*torch.zeros(2, MANY, 1, 2, 16))
    with pytest.raises(tw.Unsupported, match="room for 65535 batch indices"):
        cache.append(*torch.zeros(2, MANY, 1, 1, 16), kernel="triton")
    with pytest.raises(tw.Unsupported, match="room for 65535 batch indices"):
        tw.decode(torch.zeros(MANY, 1, 1, 16), cache, kernel="triton")


def test_many_packed_sequences_whose_distances_are_summed() -> None:
    if (reason := dispatch.kernel("triton").unavailable()) is not None:
        pytest.skip(f"triton cannot run on this machine: {reason}")
    q, table, lengths = torch.zeros(MANY, 1, 16), torch.zeros(3, requires_grad=True), torch.arange(MANY + 1)
    call = validate.prepare_varlen(q, q, q, lengths, lengths, score=tw.relative(table, signed=True))
    system = dispatch.kernel("triton")
    assert system.unsupported(call.spec, call.shape) is None
    reason = system.unsupported(call.spec, replace(call.shape, backward=True))
    assert reason is not None and "room for 65535 packed sequences" in reason


@pytest.mark.parametrize("kernel", ["triton", "tilelang-c"])
def test_many_sequences_of_linear_attention(kernel: str) -> None:
    if (reason := linear.kernel(kernel).unavailable()) is not None:
        pytest.skip(f"{kernel} cannot run on this machine: {reason}")
    x = torch.zeros(MANY, 1, 16)
    with pytest.raises(tw.Unsupported, match=r"lengths: .* room for 65535.*there are 65537"):
        tw.linear_attention(x, x, x, lengths=torch.arange(MANY + 1), kernel=kernel)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS"
)  # by PyTorch, whose backward pass has a thread of its own
@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("kernel", ["cuda", "cuda/tiled", "cuda/forward_sm90", "cuda/unordered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: Any, kernel: str, leading: tuple[int, int]) -> None:
    try:
        check(kernel, *leading, dtype, 64, "cuda")
    except tw.Unsupported as refusal:
        assert dtype == torch.float32 and kernel in ("cuda/forward_sm90", "cuda/unordered"), refusal
