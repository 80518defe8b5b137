"""Derivatives of expressions, against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

import tilewise as tw
from tests.strategies import dense_values, float_exprs, profile, value
from tilewise import expr as ex
from tilewise import reference
from tilewise.derivative import ONE, ZERO, derivative
from tilewise.expr import FLOAT, K, Q, S
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.spec import Attention
from tilewise.walking import evaluate

_x = np.array([0.3, -0.7, 1.3, 2.1])
X = tw.load(_x, Q)

DERIVATIVES = {
    "S": S,
    "add": S + X,
    "sub": X - S,
    "mul": S * X * 3.0,
    "square": S * S * X * X,
    "div": S / (X + 5.0),
    "div by S": X / (S * S + 1.0),
    "floordiv": S // 1.7 + X,
    "mod": S % 1.7 + X % 0.9,
    "mod by S": X % (S * S + 0.5),
    "neg": -S - -X,
    "abs": abs(S) + abs(X),
    "minimum": tw.minimum(S, X),
    "maximum": tw.maximum(S * 0.5, X * 2.0),
    "where": tw.where(Q < 2, S * 2.0, X * X * S),
    "where by S": tw.where(S > 0.1, S * S, X),
    "exp": tw.exp(S * 0.5) * tw.exp(-X),
    "log": tw.log(S * S + 1.0) * tw.log(X * X + 2.0),
    "tanh": tw.tanh(S / 2.0) + tw.tanh(X),
    "ints": S * Q + K * X,
    "softcap": tw.softcap(1.5),
    "composed": tw.softcap(1.5) >> (S - X * abs(Q - K)) >> tw.where(K <= Q, S, S * 0.25) >> tw.log(1 + tw.exp(S)),
    "twice": (S + X) >> S * S,
    "through the condition alone": tw.where(S < X, 1.0, 2.0),
}


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("wrt", ["S", "load"])
def test_derivative_against_finite_differences(name, wrt):
    expr, step = DERIVATIVES[name], 1e-6
    q, k = np.arange(4)[:, None], np.arange(5)
    s = np.random.default_rng(3).standard_normal((4, 5)) + 0.01

    def at(shift):
        env = {"S": s + (shift if wrt == "S" else 0), "Q": q, "K": k}
        ops = dict(numpy_ops(np.float64))
        read = ops["load"]
        ops["load"] = lambda slot, *i: read(slot, *i) + (shift if wrt == "load" else 0)
        return np.broadcast_to(evaluate(expr, env, ops), (4, 5))

    numeric = (at(step) - at(-step)) / (2 * step)
    made = derivative(expr, S if wrt == "S" else X)
    found = np.broadcast_to(evaluate(made, {"S": s, "Q": q, "K": k}, numpy_ops(np.float64)), (4, 5))
    np.testing.assert_allclose(found, numeric, rtol=1e-5, atol=1e-6)


def test_derivative_is_simple_where_it_can_be():
    assert derivative(S, S) is ONE
    assert derivative(S + X, S) is ONE
    assert derivative(S + X, X) is ONE
    assert derivative(S * 3.0, S) is ex.constant(3.0)
    assert derivative(S / 4.0, S) is ex.constant(0.25)
    assert derivative(X, S) is ZERO
    assert derivative(Q * 1.0, S) is ZERO
    assert derivative(S // 2.0, S) is ZERO
    assert derivative(tw.where(Q < K, S, S + 1), S) is ONE
    assert derivative(tw.alibi(4), S) is ONE


def test_derivative_where_constants_make_no_number():
    """Such a branch may well never be taken; its slope is found out when it is."""
    assert value(derivative(S / 0.0, S), S=1.0) == np.inf
    assert np.isnan(value(derivative(S * np.inf * -0.0, S), S=1.0))
    assert value(derivative(tw.where(S > 0, S, S / 0.0), S), S=1.0) == 1.0


def test_corners_take_one_side():
    for expr in (abs(S), tw.minimum(S, 0.0), tw.maximum(0.0, S)):
        assert value(derivative(expr, S), S=0.0) in (-1.0, 0.0, 1.0)
    assert value(derivative(abs(S), S), S=0.0) == 0.0


@profile(150)
@given(float_exprs(3))
def test_derivative_of_anything_builds_and_evaluates(expr):
    made = derivative(expr, S)
    assert made.kind == FLOAT
    assert dense_values(made).shape == dense_values(expr).shape


def test_reference_uses_the_derivative_of_the_score():
    """End to end: the oracle's gradient against finite differences of the oracle's output, in every array."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 2, 4, 3)) for _ in range(3))
    slopes, sinks = rng.random(2), rng.standard_normal(2)
    score = tw.softcap(1.5) >> tw.alibi(slopes, grad=True)

    def loss():
        done = reference.forward(Attention(0.7, tw.causal(), score, sinks), q, k, v)
        return float((done.out * d_out).sum() + (done.lse * d_lse).sum())

    d_out, d_lse = rng.standard_normal((1, 2, 4, 3)), rng.standard_normal((1, 2, 4))
    grads = reference.backward(Attention(0.7, tw.causal(), score, sinks), q, k, v, d_out, d_lse)
    for x, grad in ((q, grads.q), (k, grads.k), (v, grads.v), (slopes, grads.arrays[0]), (sinks, grads.sinks)):
        for at in np.ndindex(x.shape):
            kept = x[at]
            x[at] = kept + 1e-6
            above = loss()
            x[at] = kept - 1e-6
            below = loss()
            x[at] = kept
            assert grad[at] == pytest.approx((above - below) / 2e-6, rel=1e-4, abs=1e-7)
