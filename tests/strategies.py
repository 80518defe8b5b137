"""What the property tests draw from: random expressions, shapes, arrays; and the profiles they run under."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.expressions import Expressions
from tilewise.expr import Expr, Loaded
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.spec import Shape
from tilewise.walking import evaluate

_ALL_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def profile(examples: int) -> settings:
    """Fixed examples, so that a run on CI says the same each time."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=_ALL_CHECKS
    )


# -- expressions ------------------------------------------------------------------------------------------------------

_rng = np.random.default_rng(7)
_floats = _rng.standard_normal(9).astype(np.float32)
_floats[3] = -np.inf
INT_ARRAYS = [
    np.sort(_rng.integers(0, 4, 14)).astype(np.int32),
    _rng.integers(-3, 9, (3, 12)).astype(np.int64),
    np.array(3, np.int8),
    np.arange(250, 256).astype(np.uint8),
]
FLOAT_ARRAYS = [_floats, _rng.standard_normal((2, 4, 5, 6)), _rng.standard_normal((4, 7)).astype(np.float16)]
BOOL_ARRAYS = [
    _rng.random(10) < 0.5,
    np.kron(_rng.random((3, 3)) < 0.5, np.ones((4, 4), bool)),
    _rng.random((2, 1, 5, 6)) < 0.5,
]

_POOLS = {"int": INT_ARRAYS, "float": FLOAT_ARRAYS, "bool": BOOL_ARRAYS}


@cache
def _numbers(n: int) -> Any:
    return st.integers(0, n - 1)


def _expressions(draw: Any) -> Expressions:
    def below(n: int) -> int:
        return draw(_numbers(n))

    return Expressions(below, lambda kind: Loaded(_POOLS[kind][below(len(_POOLS[kind]))]))


@st.composite
def int_exprs(draw: Any, depth: int = 3) -> Expr:
    return _expressions(draw).integer(depth)


@st.composite
def float_exprs(draw: Any, depth: int = 3, scores: bool = True) -> Expr:
    return _expressions(draw).number(depth, scores)


@st.composite
def bool_exprs(draw: Any, depth: int = 3, scores: bool = False) -> Expr:
    return _expressions(draw).condition(depth, scores)


def any_exprs(depth: int = 3) -> st.SearchStrategy[Expr]:
    return st.one_of(int_exprs(depth), float_exprs(depth), bool_exprs(depth, scores=True))


# -- evaluation over a whole small problem ----------------------------------------------------------------------------

SMALL = Shape(2, 4, 2, 12, 14, 8, 8)


def dense_env(shape: Shape = SMALL, seed: int = 0, dtype: Any = np.float64) -> dict[str, Any]:
    """Every (batch, head, query, key) of a shape, and scores to go with them."""
    b, h = np.arange(shape.batch)[:, None, None, None], np.arange(shape.heads)[:, None, None]
    env = shape.env(b, h, np.arange(shape.n_q)[:, None], np.arange(shape.n_k))
    s = 3 * np.random.default_rng(seed).standard_normal((shape.batch, shape.heads, shape.n_q, shape.n_k))
    return {**env, "S": s.astype(dtype)}


def dense_values(expr: Expr, shape: Shape = SMALL, seed: int = 0, dtype: Any = np.float64) -> Any:
    with np.errstate(all="ignore"):
        value = evaluate(expr, dense_env(shape, seed, dtype), numpy_ops(dtype))
    return np.broadcast_to(value, (shape.batch, shape.heads, shape.n_q, shape.n_k))


def value(expr: Expr, dtype: Any = np.float64, **env: Any) -> Any:
    """At one place, whose variables are given."""
    result = evaluate(expr, env, numpy_ops(dtype))
    return np.asarray(result)[()]
