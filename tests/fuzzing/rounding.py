"""How far rounding alone can move a number: a bound for each, whatever the order of sums.

The contract's limit is twice the error that one dense computation happens to have. Where few numbers are computed that
error may be nearly none, by luck, and an honest kernel's own is beyond it: such a result is judged by the bound here.
docs/design.md has its derivation, and why that may happen to few results only: the bound is much looser than the limit.

It is an op table again: a value is a pair (value, error); a condition's error is True where rounding may turn it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.contract import ROUNDING
from tilewise.expr import Loaded
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.walking import OpTable

Pair = tuple[Any, Any]

FUNCTION = 8  # roundings that exp, log and tanh may be off by, or the few operations around a sum
LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1.7e308}
# What a number may lose near 0: to float16's coarse steps there, and in wider types to a function that gives up early.
SMALLEST = {"float16": 2.0**-25, "bfloat16": 2.0**-124, "float32": 2.0**-124, "float64": 2.0**-1020}


def error_ops(dtype: str) -> OpTable:
    """Expressions as (value, error), computed in float64, for a kernel that computes them in `dtype`."""
    unit, tiny, values = ROUNDING[dtype], SMALLEST[dtype], numpy_ops(np.float64)

    def rounded(value: Any, error: Any, *operands: Pair) -> Pair:
        """A float result: its own rounding, unless it is exact; unknown if it overflows or is NaN."""
        exact = (error == 0) & _is_short(value)
        error = np.where(exact, 0.0, error + unit * np.abs(value) + tiny)
        beyond = ~(np.abs(value) <= LARGEST[dtype]) | np.isnan(error)
        given = np.isinf(value) & _any(np.isinf(a) & (ea == 0) for a, ea in operands)
        return value, np.where(given, 0.0, np.where(beyond, np.inf, error))

    def const(value: Any) -> Pair:
        if isinstance(value, bool):
            return np.bool_(value), np.False_
        return rounded(np.float64(value), 0.0, (value, 0)) if isinstance(value, float) else (value, 0.0)

    def load(slot: Loaded, *index: Pair) -> Pair:
        value = values["load"](slot, *(i for i, _ in index))
        lost = _any(error != 0 for _, error in index)
        if arrays.value_kind(slot.array) == "float":
            value, error = rounded(value, 0.0, (value, 0)) if arrays.dtype_name(slot.array) == "float64" else (value, 0)
            return value, np.where(lost, np.inf, error)
        return value, np.where(lost, np.inf, 0.0) if arrays.value_kind(slot.array) == "int" else lost

    def sums(op: str) -> Callable[[Pair, Pair], Pair]:
        def apply(a: Pair, b: Pair) -> Pair:
            value = values[op](a[0], b[0])
            return rounded(value, a[1] + b[1], a, b) if _is_float(value) else (value, a[1] + b[1])

        return apply

    def mul(a: Pair, b: Pair) -> Pair:
        value = values["mul"](a[0], b[0])
        error = np.abs(a[0]) * b[1] + np.abs(b[0]) * a[1] + a[1] * b[1]
        return rounded(value, error) if _is_float(value) else (value, _all_or_none(a, b))

    def div(a: Pair, b: Pair) -> Pair:
        value = values["div"](a[0], b[0])
        margin = np.abs(b[0]) - b[1]
        return rounded(value, np.where(margin > 0, (a[1] + np.abs(value) * b[1]) / margin, np.inf))

    def floordiv(a: Pair, b: Pair) -> Pair:
        value = values["floordiv"](a[0], b[0])
        if not _is_float(value):
            return value, _all_or_none(a, b)
        quotient, error = div(a, b)
        return rounded(value, np.floor(quotient + error) - np.floor(quotient - error))

    def mod(a: Pair, b: Pair) -> Pair:
        if not _is_float(values["mod"](a[0], b[0])):
            return values["mod"](a[0], b[0]), _all_or_none(a, b)
        return sums("sub")(a, mul(b, floordiv(a, b)))

    def pick(op: str) -> Callable[[Pair, Pair], Pair]:
        def apply(a: Pair, b: Pair) -> Pair:
            value = values[op](a[0], b[0])
            apart = np.abs(a[0] - b[0]) > a[1] + b[1]
            return value, np.where(apart, np.where(value == a[0], a[1], b[1]), np.maximum(a[1], b[1]))

        return apply

    def exp(a: Pair) -> Pair:
        value = values["exp"](a[0])
        return rounded(value, value * (np.expm1(a[1]) + unit * (FUNCTION + np.abs(a[0]))))

    def log(a: Pair) -> Pair:
        margin = np.abs(a[0]) - a[1]
        error = np.where(margin > 0, a[1] / margin, np.inf) + FUNCTION * unit
        return rounded(values["log"](a[0]), error)

    def tanh(a: Pair) -> Pair:
        error = np.tanh(a[0] + a[1]) - np.tanh(a[0] - a[1]) + FUNCTION * unit
        return rounded(np.tanh(a[0]), np.where(a[1] == np.inf, np.inf, error))  # NaN, perhaps

    def where(c: Pair, a: Pair, b: Pair) -> Pair:
        value = np.where(c[0], a[0], b[0])
        either = np.where(a[0] == b[0], 0, np.abs(a[0] - b[0])) + np.maximum(a[1], b[1])
        if not _is_float(value):
            either = np.where(either == 0, 0, np.inf)
        error = np.where(c[1], either, np.where(c[0], a[1], b[1]))
        return value, np.where(np.isnan(error), np.inf, error)

    def compare(op: str) -> Callable[[Pair, Pair], Pair]:
        def apply(a: Pair, b: Pair) -> Pair:
            error = a[1] + b[1]
            return values[op](a[0], b[0]), (error != 0) & ~(np.abs(a[0] - b[0]) > error)

        return apply

    return {
        "const": const, "load": load, "float": lambda a: rounded(np.asarray(a[0], np.float64), a[1]),
        "add": sums("add"), "sub": sums("sub"), "mul": mul, "div": div, "floordiv": floordiv, "mod": mod,
        "neg": lambda a: (-a[0], a[1]), "abs": lambda a: (np.abs(a[0]), a[1]),
        "minimum": pick("minimum"), "maximum": pick("maximum"), "exp": exp, "log": log, "tanh": tanh, "where": where,
        **{op: compare(op) for op in ("lt", "le", "gt", "ge", "eq", "ne")},
        "and": lambda a, b: (a[0] & b[0], (a[1] & (b[0] | b[1])) | (b[1] & (a[0] | a[1]))),
        "or": lambda a, b: (a[0] | b[0], (a[1] & (b[1] | ~b[0])) | (b[1] & (a[1] | ~a[0]))),
        "not": lambda a: (np.logical_not(a[0]), a[1]),
    }  # fmt: skip


def _is_float(value: Any) -> bool:
    return bool(np.asarray(value).dtype.kind == "f")


def _is_short(value: Any) -> Any:
    """Numbers that float32 holds as they are: sums and products of them are often exact, in any type."""
    return np.asarray(value, np.float32) == value


def _any(conditions: Any) -> Any:
    found: Any = np.False_
    for condition in conditions:
        found = found | condition
    return found


def _all_or_none(*operands: Pair) -> Array:
    """Whole numbers are as they are, or anything."""
    return np.where(_any(error != 0 for _, error in operands), np.inf, 0.0)
