"""What the property tests draw from: random expressions, shapes, arrays; and the profiles they run under."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tilewise import expr as ex
from tilewise.expr import HK, NK, NQ, B, Expr, H, K, Q, S
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.spec import Shape

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

_INT_LEAVES = st.sampled_from([Q, K, Q, K, B, H, HK, NQ, NK, Q - K, Q + (NK - NQ) - K])
_INT_CONSTANTS = st.integers(-9, 9).map(ex.constant)
_FLOAT_CONSTANTS = st.sampled_from([0.0, 0.1, -0.5, 1.0, 2.5, -3.0, 1e-3, 30.0, np.inf, -np.inf, 1e30]).map(ex.constant)
_INT_OPS = st.sampled_from(
    ["leaf", *ex.ARITHMETIC, "leaf product", "neg", "abs", "minimum", "maximum", "where", "load"]
)
_FLOAT_OPS = st.sampled_from(
    ["leaf", "int", *ex.ARITHMETIC, "neg", "abs", "minimum", "maximum", "where", "load", "exp", "log", "tanh"]
)
_BOOL_OPS = st.sampled_from(["ints", "ints", "floats", "and", "or", "not", "where", "load"])
_COMPARISONS = st.sampled_from([f"__{op}__" for op in ex.COMPARISONS])
_UNARY = {"neg": lambda a: -a, "abs": abs, "exp": ex.exp, "log": ex.log, "tanh": ex.tanh}
_BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "minimum": ex.minimum,
    "maximum": ex.maximum,
}


def _read(draw: Any, pool: list[Any], depth: int) -> Expr:
    array = pool[draw(st.integers(0, len(pool) - 1))]
    # A constant index outside the array is an error, not a clamp, so indices are made to depend on something.
    return ex.load(array, *(_int(draw, depth) + 0 * Q for _ in array.shape))


def _divisor(e: Expr) -> Expr:
    return ex.constant(3) if e.op == "const" and e.payload == 0 else e


def _int(draw: Any, depth: int) -> Expr:
    """Whole numbers that stay small: products have a constant or two leaves."""
    op = draw(_INT_OPS) if depth > 0 else "leaf"
    if op == "leaf":
        return draw(st.one_of(_INT_LEAVES, _INT_CONSTANTS))
    if op == "leaf product":
        return draw(_INT_LEAVES) * draw(_INT_LEAVES)
    if op == "load":
        return _read(draw, INT_ARRAYS, depth - 1)
    if op == "where":
        return ex.where(_bool(draw, depth - 1, False), _int(draw, depth - 1), _int(draw, depth - 1))
    a = _int(draw, depth - 1)
    if op in _UNARY:
        return _UNARY[op](a)
    if op == "mul":
        return a * draw(_INT_CONSTANTS)
    b = _int(draw, depth - 1)
    if op in ("floordiv", "mod", "div"):
        return _BINARY["floordiv" if op == "div" else op](a, _divisor(b))
    return _BINARY[op](a, b)


def _float(draw: Any, depth: int, scores: bool) -> Expr:
    op = draw(_FLOAT_OPS) if depth > 0 else "leaf"
    if op == "leaf":
        return S if scores and draw(st.booleans()) else draw(_FLOAT_CONSTANTS)
    if op == "int":
        return ex.as_float(_int(draw, depth - 1))
    if op == "load":
        return _read(draw, FLOAT_ARRAYS, depth - 1)
    a = _float(draw, depth - 1, scores)
    if op in _UNARY:
        return _UNARY[op](a)
    b = _int(draw, depth - 1) if draw(st.integers(0, 3)) == 0 else _float(draw, depth - 1, scores)
    if op == "where":
        return ex.where(_bool(draw, depth - 1, scores), a, b)
    return _BINARY[op](a, _divisor(b) if op in ("floordiv", "mod") else b)


def _bool(draw: Any, depth: int, scores: bool) -> Expr:
    op = draw(_BOOL_OPS) if depth > 0 else "ints"
    if op == "ints":
        return getattr(_int(draw, depth - 1), draw(_COMPARISONS))(_int(draw, depth - 1))
    if op == "floats":
        return getattr(_float(draw, depth - 1, scores), draw(_COMPARISONS))(_float(draw, depth - 1, scores))
    if op == "load":
        return _read(draw, BOOL_ARRAYS, depth - 1)
    a = _bool(draw, depth - 1, scores)
    if op == "not":
        return ~a
    b = _bool(draw, depth - 1, scores)
    return a & b if op == "and" else a | b if op == "or" else ex.where(a, b, ~b)


@st.composite
def int_exprs(draw: Any, depth: int = 3) -> Expr:
    return _int(draw, depth)


@st.composite
def float_exprs(draw: Any, depth: int = 3, scores: bool = True) -> Expr:
    return _float(draw, depth, scores)


@st.composite
def bool_exprs(draw: Any, depth: int = 3, scores: bool = False) -> Expr:
    return _bool(draw, depth, scores)


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
        value = ex.evaluate(expr, dense_env(shape, seed, dtype), numpy_ops(dtype))
    return np.broadcast_to(value, (shape.batch, shape.heads, shape.n_q, shape.n_k))
