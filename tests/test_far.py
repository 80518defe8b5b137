"""Operands that reach beyond 2^31 numbers and 2^32 bytes, by the kernels for GPUs: simulated, interpreted, on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.far import APART, far, needs_addresses
from tilewise import dispatch
from tilewise.kernels.cute import support as cute
from tilewise.kernels.tilelang import support as tilelang
from tilewise.linear import dispatch as linear
from tilewise.linear.kernels.tilelang import refused
from tilewise.spec import Attention, Shape

torch = pytest.importorskip("torch")

N, HEADS = 70, 2  # more than one tile
WIDE = {"float32": 16, "float16": 64}  # the head dimension: forward_sm90 takes halves of 64
SYSTEMS = ("cuda-sim/naive", "cuda-sim/tiled", "cuda-sim/forward_sm90", "triton/basic", "triton")
Spread = Callable[[Any, int], Any]


def numbers(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def spread(x: Any, axis: int) -> Any:
    """On main memory."""
    return torch.from_numpy(far(x.numpy(), axis))


def available(name: str, system: Any) -> None:
    reason = system.unavailable()
    if reason is not None:
        pytest.skip(f"{name} cannot run on this machine: {reason}")


def gradients(kernel: str, q: Any, k: Any, v: Any, d_out: Any, **options: Any) -> list[Any]:
    """out, and the gradients of systems that have any."""
    out, pullback = tw.attention_vjp(q, k, v, kernel=kernel, **options)
    if kernel in ("cuda-sim/naive", "cuda/naive", "triton/basic"):
        return [out]
    grads = pullback(d_out)
    return [out, grads.q, grads.k, grads.v, *grads.arrays]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def operands(kernel: str, device: str = "cpu") -> list[Any]:
    dtype = "float16" if any(name in kernel for name in ("sm90", "cute", "tilelang")) else "float32"
    return [numbers(2, HEADS, N, WIDE[dtype], dtype=dtype, seed=i).to(device) for i in range(4)]


# -- without a GPU ----------------------------------------------------------------------------------------------------


@needs_addresses
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kernel", SYSTEMS)
def test_attention(kernel: str, axis: int) -> None:
    available(kernel, dispatch.kernel(kernel))
    given = operands(kernel)
    n = 6 if kernel == "triton/basic" else N  # a program a query, each interpreted on its own
    given = [x[:, :, :n].clone() for x in given]
    expected = gradients(kernel, *given, mask=tw.causal())
    assert_same(gradients(kernel, *(spread(x, axis) for x in given), mask=tw.causal()), expected)


@needs_addresses
@pytest.mark.parametrize("axis", [0, 2, 3])
@pytest.mark.parametrize("kernel", ["cuda-sim/tiled", "cuda-sim/forward_sm90", "triton"])
def test_arrays_that_are_read(kernel: str, axis: int) -> None:
    available(kernel, dispatch.kernel(kernel))
    given, bias = operands(kernel), numbers(2, HEADS, N, N)
    ids = torch.arange(N, dtype=torch.int32) // 30

    def call(bias: Any, ids: Any) -> list[Any]:
        return gradients(kernel, *given, mask=tw.document(ids), score=tw.bias(bias))

    assert_same(call(spread(bias, axis), spread(ids, 0)), call(bias, ids))


@needs_addresses
@pytest.mark.parametrize("kernel", ["cuda-sim/tiled", "triton"])
def test_packed_sequences(kernel: str) -> None:
    available(kernel, dispatch.kernel(kernel))
    given, lengths = [numbers(N, HEADS, 16, seed=i) for i in range(3)], [0, 40, 40, N]

    def call(*given: Any) -> list[Any]:
        return [tw.attention_varlen(*given, lengths, lengths, causal=True, kernel=kernel)]

    assert_same(call(*(spread(x, 0) for x in given)), call(*given))


@needs_addresses
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("pages", [False, True])
def test_decoding(pages: bool, axis: int) -> None:
    available("triton", dispatch.kernel("triton"))
    size = (4, HEADS, 16, 16) if pages else (2, HEADS, 40, 16)
    new, q = numbers(2, HEADS, 21, 16), numbers(2, HEADS, 2, 16, seed=1)

    def call(spread: Spread) -> list[Any]:
        stored = [spread(torch.zeros(size), axis) for _ in range(2)]
        cache = tw.PagedKVCache(*stored, 2) if pages else tw.KVCache(*stored)
        cache.append(new, new.flip(3), counts=[21, 17], kernel="triton")
        return list(tw.decode(q, cache, causal=True, kernel="triton", return_lse=True))

    assert_same(call(spread), call(lambda x, axis: x))


@needs_addresses
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_linear_attention(axis: int) -> None:
    available("triton", linear.kernel("triton"))
    given = [numbers(2, HEADS, 40, 16, seed=i) for i in range(4)]

    def call(q: Any, k: Any, v: Any, d_out: Any) -> list[Any]:
        out, state, pullback = tw.linear_attention_vjp(q, k, v, kernel="triton")
        grads = pullback(d_out)
        return [out, *state, grads.q, grads.k, grads.v]

    assert_same(call(*(spread(x, axis) for x in given)), call(*given))


@pytest.mark.parametrize("kernel", ["cuda-sim/tiled", "triton", "triton/basic", "tilelang-c"])
def test_more_rows_than_32_bits_count(kernel: str) -> None:
    """One key that stands for 2^31 of them takes no memory, and positions beyond 32 bits would wrap."""
    available(kernel, dispatch.kernel(kernel))
    q, key = numbers(1, 1, 1, 16), numbers(1, 1, 1, 16)
    keys = key.expand(1, 1, 2**31 + 64, 16)
    with pytest.raises(tw.Unsupported, match="it counts up to"):
        tw.attention(q, keys, keys, kernel=kernel)


def test_more_rows_than_linear_kernels_count() -> None:
    available("triton", linear.kernel("triton"))
    rows = numbers(1, 1, 1, 16).expand(1, 1, 2**31 + 64, 16)
    with pytest.raises(tw.Unsupported, match="it counts up to 1073741824 rows, and there are 2147483712"):
        tw.linear_attention(rows, rows, rows, kernel="triton")


@pytest.mark.parametrize("n", [{"n_q": 2**31}, {"n_k": 2**31}, {"n_k": 1, "total_k": 2**30 + 1}])
def test_kernels_that_only_a_gpu_has_count_as_far(n: dict[str, int]) -> None:
    sizes = n.get("n_q", 1), n.get("n_k", 1)
    shape = Shape(1, 1, 1, *sizes, 64, 64, "bfloat16", total_k=n.get("total_k", -1))
    told = cute.unsupported(Attention(1.0), shape, None, (9, 0)), tilelang.unsupported(Attention(1.0), shape, "sm_90a")
    assert all(reason is not None and reason.startswith("it counts up to") for reason in (*told, refused(shape)))


# -- on one -----------------------------------------------------------------------------------------------------------

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")


@pytest.fixture(scope="module")
def buffer() -> Iterator[Any]:
    """5 GB of a GPU's memory, which the tests write some rows of."""
    yield torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()


def spread_in(buffer: Any, x: Any, axis: int, place: int, places: int) -> Any:
    """A copy of x in the buffer, spread along an axis. So many copies of one shape find a place beside each other."""
    room = buffer.view(x.dtype)
    block = -(-x.numel() // x.shape[axis] // 64) * 64  # of one index of the axis
    step = (room.numel() - places * block) // (x.shape[axis] - 1) // 64 * 64
    assert step >= places * block
    steps = list(torch.empty([size for i, size in enumerate(x.shape) if i != axis], device="meta").stride())
    steps.insert(axis, step)
    made = room.as_strided(x.shape, steps, place * block)
    last = sum((size - 1) * step for size, step in zip(made.shape, made.stride(), strict=True))
    assert last * x.element_size() > 2**32 and (last > APART or x.element_size() > 2)
    return made.copy_(x)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kernel", ["cuda", "cuda/tiled", "triton", "cute", "tilelang"])
def test_attention_on_a_gpu(buffer: Any, kernel: str, dtype: str, axis: int) -> None:
    available(kernel, dispatch.kernel(kernel))
    given = [numbers(2, HEADS, 200, 64, dtype=dtype, seed=i).to("cuda") for i in range(4)]
    try:
        expected = gradients(kernel, *given, mask=tw.causal())
    except tw.Unsupported as refusal:
        pytest.skip(str(refusal))
    apart = [spread_in(buffer, x, axis, i, 4) for i, x in enumerate(given)]
    assert_same(gradients(kernel, *apart, mask=tw.causal()), expected)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("kernel", ["cuda", "cuda/tiled", "triton"])
def test_arrays_that_are_read_on_a_gpu(buffer: Any, kernel: str, axis: int) -> None:
    available(kernel, dispatch.kernel(kernel))
    given = [numbers(2, HEADS, 200, 64, dtype="float16", seed=i).to("cuda") for i in range(4)]
    bias = numbers(2, HEADS, 200, 200, dtype="float16").to("cuda")
    expected = gradients(kernel, *given, mask=tw.causal(), score=tw.bias(bias))
    apart = spread_in(buffer, bias, axis, 0, 1)
    assert_same(gradients(kernel, *given, mask=tw.causal(), score=tw.bias(apart)), expected)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_decoding_on_a_gpu(buffer: Any, axis: int) -> None:
    available("triton", dispatch.kernel("triton"))
    new, q = numbers(2, HEADS, 300, 64, dtype="float16").cuda(), numbers(2, HEADS, 1, 64, dtype="float16").cuda()
    empty = torch.zeros(2, HEADS, 512, 64, dtype=torch.float16, device="cuda")

    def call(*stored: Any) -> list[Any]:
        cache = tw.KVCache(*stored)
        cache.append(new, new.flip(3), counts=[300, 17])
        return list(tw.decode(q, cache, causal=True, kernel="triton", return_lse=True))

    expected = call(empty.clone(), empty.clone())
    assert_same(call(*(spread_in(buffer, empty, axis, i, 2) for i in range(2))), expected)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kernel", ["triton", "tilelang"])
def test_linear_attention_on_a_gpu(buffer: Any, kernel: str, axis: int) -> None:
    available(kernel, linear.kernel(kernel))
    dtype = torch.bfloat16 if kernel == "tilelang" else torch.float32
    given = [numbers(2, HEADS, 200, 64, seed=i).to("cuda", dtype) for i in range(3)]

    def call(q: Any, k: Any, v: Any) -> list[Any]:
        out, state = tw.linear_attention(q, k, v, return_state=True, kernel=kernel)
        return [out, *state]

    try:
        expected = call(*given)
    except tw.Unsupported as refusal:
        pytest.skip(str(refusal))
    assert_same(call(*(spread_in(buffer, x, axis, i, 3) for i, x in enumerate(given))), expected)
