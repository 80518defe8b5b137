"""Out kept in two halves: what rounding takes from it is stored, and goes to the backward pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tilewise as tw
from tests.conformance.paths import forced, paths
from tests.remainder_problems import HERE, KEEPING, MOST, gradients, off, problem
from tilewise import arrays, dispatch, reference
from tilewise.cases import Case
from tilewise.contract import ROUNDING
from tilewise.spec import Partial
from tilewise.validate import Call, prepare

PATHS = [(name, path) for name in KEEPING for path in paths(name)]

# -- what is kept -----------------------------------------------------------------------------------------------------


def _kept(name: str, call: Call) -> Partial:
    return dispatch.kernel(name).forward(call.spec.before_backward(call.shape.dtype), call.q, call.k, call.v)


@pytest.mark.parametrize("dtype", arrays.HALF_DTYPES)
@pytest.mark.parametrize(
    ("variant", "shape"),
    [("all at once", "ragged"), ("sinks", "grouped"), ("rope", "batch"), ("causal", "packed"),
     ("causal", "more queries than keys")],
)  # fmt: skip
@pytest.mark.parametrize(("name", "path"), [(name, path) for name, path in PATHS if name in HERE])
def test_both_halves_are_out_to_twice_its_precision(
    name: str, path: str | None, variant: str, shape: str, dtype: str
) -> None:
    call = Case(variant, shape, dtype).inputs().call()
    with forced(name, path):
        done, plain = _kept(name, call), dispatch.kernel(name).forward(call.spec, call.q, call.k, call.v)
    assert plain.remainder is None
    assert np.array_equal(done.out, plain.out)
    assert (done.remainder.shape, done.remainder.dtype) == (done.out.shape, done.out.dtype)
    steps = [x.strides for x in (done.out, done.remainder)]
    assert all(a == b for a, b, size in zip(*steps, done.out.shape, strict=True) if size > 1)
    exact = reference.forward(call.spec, call.q, call.k, call.v).out
    out, rest = (arrays.widen(x, np.float64) for x in (done.out, done.remainder))
    assert np.all(np.abs(rest) <= 1.01 * ROUNDING[dtype] * np.abs(out) + 2.0**-24)
    assert not rest[np.isneginf(done.lse)].any()
    if call.spec.rope is None:  # cpu rounds what it turned
        assert np.abs(out + rest - exact).max() <= (2 * ROUNDING[dtype] ** 2 + 4e-6) * np.abs(exact).max()


@pytest.mark.parametrize("name", KEEPING)
def test_what_is_no_number_takes_nothing_from_out(name: str) -> None:
    """Out is then what it is, infinite or NaN, and delta with it."""
    q, k, v, _ = problem(1, "float16", 3, 3)
    v[..., 0], v[..., 1] = np.inf, np.nan
    done = _kept(name, prepare(q, k, v))
    assert np.isinf(done.out[..., 0]).all()
    assert np.isnan(done.out[..., 1]).all()
    assert not done.remainder[..., :2].any()
    assert done.remainder[..., 2:].any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", KEEPING)
def test_nothing_is_kept_of_what_is_not_narrowed(name: str, dtype: str) -> None:
    call = Case("full", "square", dtype).inputs().call()
    assert call.spec.before_backward(dtype) is call.spec
    asked = replace(call.spec, keeps_remainder=True)
    assert dispatch.kernel(name).forward(asked, call.q, call.k, call.v).remainder is None


@pytest.mark.parametrize("name", KEEPING)
def test_nothing_is_kept_of_a_wide_out(name: str) -> None:
    """A part of a result, which is merged before it is rounded."""
    call = Case("full", "square", "bfloat16").inputs().call()
    assert call.spec.before_backward("bfloat16").keeps_remainder
    wide = replace(call.spec, wide_out=True, keeps_remainder=True)
    assert not wide.before_backward("bfloat16").keeps_remainder
    assert dispatch.kernel(name).forward(wide, call.q, call.k, call.v).remainder is None


# -- what it is for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1, 4, 12, 40])
@pytest.mark.parametrize(("name", "path"), PATHS)
def test_gradients_of_saturated_rows(name: str, path: str | None, scale: float) -> None:
    """5.4e-3 at q times 12, and 7.2e-3 at 40, if delta is made from a rounded out."""
    given = problem(scale)
    exact = gradients(given, causal=True)
    with forced(name, path):
        got = tw.attention_vjp(*given[:3], causal=True, kernel=name)[1](given[3])
    assert off(got.q, exact.q) < MOST
    assert off(got.k, exact.k) < MOST


@pytest.mark.parametrize("name", KEEPING)
def test_rows_with_their_weight_on_one_key(name: str) -> None:
    """Their gradients are differences that nearly cancel: off by a fifth, from a rounded out."""
    given = problem(40, "bfloat16", 512, 512)
    heaviest = tw.weights(*given[:3], rows=range(512), causal=True).max(axis=-1)
    rows = (heaviest > 0.99) & (heaviest < 0.9999)
    assert rows.sum() > 20
    exact = gradients(given, causal=True).q[rows]
    got = tw.attention_vjp(*given[:3], causal=True, kernel=name)[1](given[3])
    assert off(got.q[rows], exact) < 0.02


@pytest.mark.parametrize("scale", [1, 12])
@pytest.mark.parametrize("name", HERE)
def test_gradients_of_learned_arrays(name: str, scale: float) -> None:
    """Long sums of terms of either sign: delta's error is in each, and does not cancel as they do."""
    slopes, table = np.linspace(0.1, 0.5, 2, dtype=np.float32), np.zeros(64, np.float32)
    away = abs(tw.Q + (tw.NK - tw.NQ) - tw.K)
    score = tw.S - tw.load(slopes, tw.H, grad=True) * away + tw.load(table, tw.minimum(away, 63), grad=True)
    given = problem(scale, n=257, n_k=65)
    exact = gradients(given, causal=True, score=score)
    got = tw.attention_vjp(*given[:3], causal=True, score=score, kernel=name)[1](given[3])
    for found, want in zip(got.arrays, exact.arrays, strict=True):
        assert off(found, want) < 1e-4


@pytest.mark.parametrize("name", KEEPING)
def test_a_wider_gradient_of_out(name: str) -> None:
    """The engine takes one type for all, and widens what it was given."""
    given = problem(12)
    exact = gradients(given, causal=True)
    got = tw.attention_vjp(*given[:3], causal=True, kernel=name)[1](arrays.widen(given[3], np.float64))
    assert off(got.q, exact.q) < MOST


@pytest.mark.parametrize("backward", KEEPING)
@pytest.mark.parametrize("forward", KEEPING)
def test_one_system_keeps_it_for_another(forward: str, backward: str) -> None:
    given = problem(12)
    call = prepare(*given[:3], causal=True)
    exact = gradients(given, causal=True).q
    inputs = call.spec, call.q, call.k, call.v
    saved = _kept(forward, call)
    assert off(dispatch.kernel(backward).backward(*inputs, saved, given[3]).q, exact) < MOST
    without = dispatch.kernel(backward).backward(*inputs, replace(saved, remainder=None), given[3]).q
    assert MOST < off(without, exact) < 1e-2
