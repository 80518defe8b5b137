"""Rows that have nearly all their weight on one key, in half precision: as exact as what is stored allows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.cuda.test_ops import needs_compiler
from tilewise import arrays, reference, validate
from tilewise.arrays import Array
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel
from tilewise.spec import Partial, Tile
from tilewise.validate import Call

pytestmark = needs_compiler

TILE = Tile(128, 16)
RUNGS = ("naive", "tiled", "forward_sm90")
HALVES = ("bfloat16", "float16")
ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}  # half of what lies between two numbers, of the larger


def _call(q: Array, k: Array, v: Array, dtype: str, **options: object) -> Call:
    return validate.prepare(*(arrays.narrow(x, dtype) for x in (q, k, v)), **options)


def _scaled(
    scale: float, n: int = 256, d: int = 64, dtype: str = "bfloat16", n_q: int | None = None, causal: bool = True
) -> Call:
    """Normal numbers, and q times the scale."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 1, rows, d)) for rows in (n_q or n, n, n))
    return _call(scale * q, k, v, dtype, causal=causal)


def _wide(x: Array) -> Array:
    return arrays.widen(x, np.float64)


def _error(found: Array, exact: Array) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("first", [22.0, 27.0, 60.0])
@pytest.mark.parametrize("key", [5, 100, 120])
def test_a_row_of_one_key_has_its_value(key: int, first: float, dtype: str) -> None:
    """To the last bit, whichever way it is found: by speculation, early or late, or in the first tile."""
    rng = np.random.default_rng(2)
    q, k, v = np.zeros((1, 1, 128, 16)), np.zeros((1, 1, 128, 16)), rng.uniform(1, 2, (1, 1, 128, 16))
    q[..., 0], k[0, 0, key, 0] = (first + np.arange(128) / 19) * np.log(2), 1
    call = _call(q, k, v, dtype, scale=1.0)
    out = CudaSimKernel("forward_sm90").forward(call.spec, call.q, call.k, call.v, TILE).out
    np.testing.assert_array_equal(_wide(out)[0, 0], np.broadcast_to(_wide(call.v)[0, 0, key], (128, 16)))


def _with_every_maximum(call: Call, dtype: str) -> Array:
    """What narrowing leaves of an online softmax, whose tiles have weights as parts of the largest so far."""
    weights = reference.weights(call.spec, call.q, call.k, np.arange(call.shape.n_q))
    out, v, largest = np.zeros(call.q.shape), _wide(call.v), np.zeros((*call.q.shape[:-1], 1))
    for first in range(0, call.shape.n_k, 128):
        tile = weights[..., first : first + 128]
        largest = np.maximum(largest, tile.max(-1, keepdims=True))
        out += largest * (_wide(arrays.narrow(tile / largest, dtype)) @ v[..., first : first + 128, :])
    return _wide(arrays.narrow(out, dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [4.0, 12.0])
def test_out_is_nearly_as_good_as_with_every_maximum(scale: float, causal: bool, dtype: str) -> None:
    """Though speculation finds the heaviest weight late, and narrowing changes it: the sum that acc is divided by has
    it as it was multiplied, and where it is about half of its row, the rest is multiplied alike."""
    n, n_q = (512, 512) if causal else (4096, 256)
    call = _scaled(scale, n, dtype=dtype, n_q=n_q, causal=causal)
    exact = reference.forward(call.spec, call.q, call.k, call.v)
    done = CudaSimKernel("forward_sm90").forward(call.spec, call.q, call.k, call.v)
    assert _error(_wide(done.out), exact.out) < 1.095 * _error(_with_every_maximum(call, dtype), exact.out)
    np.testing.assert_allclose(done.lse, exact.lse, atol=2e-5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rung", RUNGS)
def test_out_and_its_remainder_are_out_to_twice_the_precision(rung: str, dtype: str) -> None:
    call, kernel = _scaled(4.0, n=150, d=48, dtype=dtype), CudaSimKernel(rung)
    done = kernel.forward(replace(call.spec, keeps_remainder=True), call.q, call.k, call.v)
    wide = _wide(kernel.forward(replace(call.spec, wide_out=True), call.q, call.k, call.v).out)
    least = 2.0**-25 if dtype == "float16" else 0  # half of its smallest number
    assert np.all(
        np.abs(_wide(done.out) + _wide(done.remainder) - wide) <= 2 * ROUNDING[dtype] ** 2 * np.abs(wide) + least
    )
    plain = kernel.forward(call.spec, call.q, call.k, call.v)
    assert plain.remainder is None
    np.testing.assert_array_equal(_wide(plain.out), _wide(done.out))


@pytest.mark.parametrize("rung", RUNGS)
def test_rows_without_keys_have_a_remainder_of_0(rung: str) -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((n, 2, 16)) for n in (100, 60, 60))
    x = [arrays.narrow(y, "bfloat16") for y in (q, k, v)]
    call = validate.prepare_varlen(*x, np.array([0, 40, 60, 100]), np.array([0, 30, 30, 60]), causal=True)
    done = CudaSimKernel(rung).forward(replace(call.spec, keeps_remainder=True), call.q, call.k, call.v)
    empty = np.isneginf(_wide(done.lse))
    assert empty.any()
    assert np.all(_wide(done.remainder)[empty] == 0)
    assert np.all(np.isfinite(_wide(done.remainder)))


def test_what_is_stored_as_it_is_computed_loses_nothing() -> None:
    rng = np.random.default_rng(4)
    call = validate.prepare(*(rng.standard_normal((1, 1, 20, 16)).astype(np.float32) for _ in range(3)))
    done = CudaSimKernel().forward(replace(call.spec, keeps_remainder=True), call.q, call.k, call.v)
    assert done.remainder is None


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rung", ["tiled", "forward_sm90", "unordered"])
def test_gradients_of_saturated_rows(rung: str, dtype: str) -> None:
    call, kernel = _scaled(12.0, dtype=dtype), CudaSimKernel(rung)
    d_out = arrays.narrow(np.random.default_rng(5).standard_normal(call.q.shape), dtype)
    done = kernel.forward(replace(call.spec, keeps_remainder=True), call.q, call.k, call.v)
    found = kernel.backward(call.spec, call.q, call.k, call.v, done, d_out)
    exact = reference.backward(call.spec, call.q, call.k, call.v, d_out)
    most = 3e-3 * ROUNDING[dtype] / ROUNDING["bfloat16"]
    for name in ("q", "k", "v"):
        assert _error(_wide(getattr(found, name)), getattr(exact, name)) < most
    rounded = kernel.backward(call.spec, call.q, call.k, call.v, Partial(done.out, done.lse), d_out)
    assert _error(_wide(rounded.q), exact.q) > 1.5 * most  # so it is the remainder that does it
    # Row by row, of those that have between 1/1000 and 1/10 of their weight beside one key.
    weights = reference.weights(call.spec, call.q, call.k, np.arange(call.shape.n_q))[0, 0]
    rest = 1 - weights.max(-1)
    rows = (rest > 1e-3) & (rest < 0.1)
    off = [np.linalg.norm((_wide(x.q) - exact.q)[0, 0, rows], axis=-1) for x in (found, rounded)]
    off = [x / np.linalg.norm(exact.q[0, 0, rows], axis=-1) for x in off]
    assert rows.sum() > 30
    assert np.mean(off[0] <= 0.02) > 0.95 > 0.8 > np.mean(off[1] <= 0.02)
