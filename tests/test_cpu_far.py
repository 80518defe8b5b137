"""Operands that reach beyond 2^31 elements and 2^32 bytes: offsets are 64 bit wherever an array is read or written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.far import far, needs_addresses, room
from tilewise import dispatch
from tilewise.kernels.cpu import library, structs
from tilewise.kernels.cpu.marshal import Marshal
from tilewise.spec import Attention, Partial, Shape, Tile

pytestmark = needs_addresses
BATCH, HEADS, N, D = 2, 2, 9, 4
SYSTEMS = [name for name in ("cpu", "numpy") if dispatch.kernel(name).unavailable() is None]
AXES = {"batch": 0, "heads": 1, "rows": 2}


@pytest.fixture(params=SYSTEMS)
def kernel(request: pytest.FixtureRequest) -> str:
    return request.param


def numbers(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def assert_same(found: Any, expected: Any) -> None:
    """Sums may have another order: NumPy's have where numbers are apart."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def both(call: Callable[..., Any], axis: int, *given: np.ndarray) -> None:
    """The call on arrays that lie far apart, and on packed ones."""
    assert_same(call(*(far(x, axis) for x in given)), call(*given))


def attention_and_gradients(kernel: str, q: Any, k: Any, v: Any, d_out: Any, **options: Any) -> list[Any]:
    out, pullback = tw.attention_vjp(q, k, v, kernel=kernel, **options)
    grads = pullback(d_out)
    return [out, grads.q, grads.k, grads.v, *grads.arrays]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("axis", AXES)
def test_attention(kernel: str, axis: str, dtype: str) -> None:
    given = [numbers(BATCH, HEADS, N, D, dtype=dtype, seed=i) for i in range(4)]
    both(lambda *x: attention_and_gradients(kernel, *x, mask=tw.causal()), AXES[axis], *given)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_a_bias_and_its_gradient(kernel: str, axis: int) -> None:
    given = [numbers(BATCH, HEADS, N, D, seed=i) for i in range(4)]
    bias = numbers(BATCH, HEADS, N, N)

    def call(bias: Any) -> Any:
        return attention_and_gradients(kernel, *given, score=tw.bias(bias, grad=True))

    both(call, axis, bias)


@pytest.mark.parametrize("axis", [0, 3])
@pytest.mark.parametrize("dtype", ["bool", "float16"])
def test_a_mask(kernel: str, axis: int, dtype: str) -> None:
    given = [numbers(BATCH, HEADS, N, D, seed=i) for i in range(4)]
    mask = numbers(BATCH, HEADS, N, N) > 0
    held = mask if dtype == "bool" else np.where(mask, 0, -np.inf).astype(dtype)
    both(lambda held: attention_and_gradients(kernel, *given, mask=held), axis, held)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_ids_and_slopes(kernel: str, dtype: str) -> None:
    given = [numbers(BATCH, HEADS, N, D, seed=i) for i in range(4)]
    ids, slopes = np.array([0, 0, 0, 1, 1, 2, 2, 2, 3], dtype), numbers(HEADS)

    def call(ids: Any, slopes: Any) -> Any:
        return attention_and_gradients(kernel, *given, mask=tw.document(ids), score=tw.alibi(slopes, grad=True))

    both(call, 0, ids, slopes)


def test_an_index_that_is_clamped(kernel: str) -> None:
    given = [numbers(BATCH, HEADS, N, D, seed=i) for i in range(4)]
    both(lambda table: attention_and_gradients(kernel, *given, score=tw.relative(table, grad=True)), 0, numbers(5))


@pytest.mark.parametrize("axis", [0, 1])
def test_packed_sequences(kernel: str, axis: int) -> None:
    given = [numbers(N, HEADS, D, seed=i) for i in range(3)]
    lengths = [0, 4, 4, N]

    def call(q: Any, k: Any, v: Any) -> Any:
        return tw.attention_varlen(q, k, v, lengths, lengths, causal=True, kernel=kernel, return_lse=True)

    both(call, axis, *given)


def test_one_query(kernel: str) -> None:
    q, k, v = numbers(BATCH, HEADS, 1, D), numbers(BATCH, HEADS, N, D), numbers(BATCH, HEADS, N, D)
    expected = tw.attention(q, k, v, kernel=kernel)
    assert_same([tw.attention(q, far(k, 2), far(v, 2), kernel=kernel)], [expected])


@pytest.mark.parametrize("axis", AXES)
def test_linear_attention(kernel: str, axis: str) -> None:
    given = [numbers(BATCH, HEADS, N, D, seed=i) for i in range(4)]
    decay = -abs(numbers(BATCH, HEADS, N))

    def call(q: Any, k: Any, v: Any, d_out: Any, decay: Any) -> Any:
        out, state, pullback = tw.linear_attention_vjp(q, k, v, decay=decay, kernel=kernel)
        grads = pullback(d_out)
        return [out, *state, grads.q, grads.k, grads.v, grads.decay]

    both(call, AXES[axis], *given, decay)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("pages", [False, True])
def test_decoding(kernel: str, pages: bool, axis: str) -> None:
    size = (4, HEADS, 16, D) if pages else (BATCH, HEADS, 40, D)
    new, q = numbers(BATCH, HEADS, 21, D), numbers(BATCH, HEADS, 2, D, seed=1)

    def call(k: Any, v: Any) -> Any:
        cache = tw.PagedKVCache(k, v, BATCH) if pages else tw.KVCache(k, v)
        cache.append(new, new[..., ::-1].copy(), counts=[21, 17], kernel=kernel)
        return tw.decode(q, cache, causal=True, kernel=kernel, return_lse=True)

    both(call, AXES[axis], np.zeros(size, np.float32), np.zeros(size, np.float32))


def test_rope() -> None:
    x, positions = numbers(BATCH, HEADS, N, D), np.arange(N)[::-1].copy()
    both(lambda x, at: [tw.apply_rope(x, tw.Rope(), positions=at)], 0, x, np.stack([positions, positions]))


# -- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.skipif("cpu" not in SYSTEMS, reason="the native engine is not here")
@pytest.mark.parametrize("axis", AXES)
def test_the_engine_writes_far(axis: str) -> None:
    """Results that it is given room for, which the front always has packed."""
    q, k, v, d_out = (numbers(BATCH, HEADS, N, D, seed=i) for i in range(4))
    spec = Attention(0.5, tw.causal())
    expected = dispatch.kernel("cpu").forward(spec, q, k, v)
    grads = dispatch.kernel("cpu").backward(spec, q, k, v, expected, d_out)
    shape = Shape.of(spec, q, k, v)
    marshal = Marshal(spec, shape, Tile())
    out, *gradients = (room(q.shape, q.dtype, AXES[axis]) for _ in range(4))
    lse = np.empty(q.shape[:3], np.float32) if axis == "rows" else room(q.shape[:3], np.float32, AXES[axis])
    library.call("tilewise_forward", ctypes.byref(marshal.forward(q, k, v, Partial(out, lse))))
    assert_same([out, lse], expected)
    delta = np.zeros(lse.shape, np.float32)
    call = structs.BackwardCall(
        marshal.forward(q, k, v, Partial(out, lse), backward=True), marshal.array(d_out),
        *(marshal.output(x) for x in (delta, *gradients)), slope_at=-1,
    )  # fmt: skip
    library.call("tilewise_backward", ctypes.byref(call))
    assert_same(gradients, [grads.q, grads.k, grads.v])
