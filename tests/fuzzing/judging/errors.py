"""How far rounding alone can move a number: a bound for each, whatever the order of sums.

The contract's limit is twice the error that one dense computation happens to have. Where few numbers are computed that
error may be nearly none, by luck, and an honest kernel's own is beyond it: such a result is judged by the bound here.
docs/design.md has its derivation, and why that may happen to few results only: the bound is much looser than the limit.

A number is a pair (value, error), computed in float64; of a condition the error is True where rounding may turn it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.fuzzing.judging.values import PLAIN, Values
from tests.fuzzing.judging.walk import BOOL, FLOAT, INT
from tests.fuzzing.judging.widths import LARGEST, ROUNDING, SMALLEST
from tests.fuzzing.question import Given

Pair = tuple[Any, Any]

FUNCTION = 8  # roundings that exp, log and tanh may be off by, or the few operations around a sum


def _is_none(error: Any) -> bool:
    """Known to be none without a look at the numbers."""
    return (isinstance(error, float) and error == 0.0) or error is False


class Bounded:
    """(value, error) for a kernel that computes in `dtype`, "float32" or "float64"."""

    def __init__(self, dtype: str) -> None:
        self.unit, self.tiny, self.largest = ROUNDING[dtype], SMALLEST[dtype], LARGEST[dtype]
        self.plain = Values(np.float64)
        self.one: Pair = (np.float64(1), 0.0)
        self.zero: Pair = (np.float64(0), 0.0)
        self.tables: dict[str, dict[str, Callable[..., Pair]]] = {
            FLOAT: self._floats(), INT: self._whole_numbers(), BOOL: self._conditions(),
        }  # fmt: skip

    def const(self, value: Any) -> Pair:
        plain = self.plain.const(value)
        if isinstance(value, bool):
            return plain, False
        return self.rounded(plain, 0.0, (plain, 0.0)) if isinstance(value, float) else (plain, 0.0)

    def variable(self, value: Any) -> Pair:
        return value, 0.0

    def load(self, given: Given, index: Sequence[Pair]) -> Pair:
        value = self.plain.load(given, [i for i, _ in index])
        lost = False if all(_is_none(e) for _, e in index) else _any(e != 0 for _, e in index)
        if given.values.dtype.kind == "b":
            return value, lost
        error: Any = 0.0
        if given.dtype == "float64":
            value, error = self.rounded(value, 0.0, (value, 0.0))
        return value, error if lost is False else np.where(lost, np.inf, error)

    def apply(self, op: str, kind: str, *args: Pair) -> Pair:
        return self.tables[kind][op](*args)

    # -- for slopes ----------------------------------------------------------------------------------------------------
    def times(self, slope: Pair, factor: Pair) -> Pair:
        """No slope, times anything, is none."""
        return self._unless_none(slope, self.apply("mul", FLOAT, slope, factor))

    def over(self, slope: Pair, divisor: Pair) -> Pair:
        return self._unless_none(slope, self.apply("div", FLOAT, slope, divisor))

    def _unless_none(self, slope: Pair, made: Pair) -> Pair:
        none = (slope[0] == 0) & (slope[1] == 0)
        return (np.where(none, 0, made[0]), np.where(none, 0, made[1])) if np.any(none) else made

    def joined(self, a: Pair, b: Pair) -> Pair:
        """The sum of two slopes. A kernel may have multiplied by what follows before it adds them, which rounds each;
        by 1 and -1 it does not."""
        size = np.where(a[0] == 0, 0, np.abs(b[0])) + np.where(b[0] == 0, 0, np.abs(a[0]))
        signs = (np.abs(a[0]) == 1) & (np.abs(b[0]) == 1) & (a[1] == 0) & (b[1] == 0)
        return self.rounded(a[0] + b[0], a[1] + b[1] + np.where(signs, 0, 2 * self.unit * size))

    def value(self, x: Pair) -> Any:
        return x[0]

    # -- floats --------------------------------------------------------------------------------------------------------
    def rounded(self, value: Any, error: Any, *operands: Pair) -> Pair:
        """A float result: its own rounding, unless it is exact; unknown if it overflows or is NaN."""
        size = np.abs(value)
        off = error + self.unit * size + self.tiny
        if np.all(size <= self.largest) and not np.isnan(off).any():
            if _is_none(error) or np.ndim(error) == 0 or not np.all(error):
                exact = (error == 0) & _is_short(value)
                return value, 0.0 if np.all(exact) else np.where(exact, 0.0, off)
            return value, off
        beyond = ~(size <= self.largest) | np.isnan(off)
        given = np.isinf(value) & _any(np.isinf(a) & (ea == 0) for a, ea in operands)
        exact = (error == 0) & _is_short(value)
        return value, np.where(given, 0.0, np.where(beyond, np.inf, np.where(exact, 0.0, off)))

    def _floats(self) -> dict[str, Callable[..., Pair]]:
        plain = PLAIN[FLOAT]

        def sums(op: str) -> Callable[[Pair, Pair], Pair]:
            return lambda a, b: self.rounded(plain[op](a[0], b[0]), a[1] + b[1], a, b)

        def mul(a: Pair, b: Pair) -> Pair:
            error: Any = 0.0
            if not _is_none(b[1]):
                error = np.abs(a[0]) * b[1]
            if not _is_none(a[1]):
                error = error + np.abs(b[0]) * a[1] + a[1] * b[1]
            return self.rounded(a[0] * b[0], error)

        def div(a: Pair, b: Pair) -> Pair:
            value = a[0] / b[0]
            margin = np.abs(b[0]) - b[1]
            return self.rounded(value, np.where(margin > 0, (a[1] + np.abs(value) * b[1]) / margin, np.inf))

        def floordiv(a: Pair, b: Pair) -> Pair:
            quotient, error = div(a, b)
            return self.rounded(np.floor(quotient), np.floor(quotient + error) - np.floor(quotient - error))

        def exp(a: Pair) -> Pair:
            value = np.exp(a[0])
            return self.rounded(value, value * (np.expm1(a[1]) + self.unit * (FUNCTION + np.abs(a[0]))))

        def log(a: Pair) -> Pair:
            margin = np.abs(a[0]) - a[1]
            return self.rounded(np.log(a[0]), np.where(margin > 0, a[1] / margin, np.inf) + FUNCTION * self.unit)

        def tanh(a: Pair) -> Pair:
            error = np.tanh(a[0] + a[1]) - np.tanh(a[0] - a[1]) + FUNCTION * self.unit
            return self.rounded(np.tanh(a[0]), np.where(a[1] == np.inf, np.inf, error))  # NaN, perhaps

        def where(c: Pair, a: Pair, b: Pair) -> Pair:
            value = np.where(c[0], a[0], b[0])
            error = 0.0 if _is_none(a[1]) and _is_none(b[1]) else np.where(c[0], a[1], b[1])
            if np.any(c[1]):
                either = np.where(a[0] == b[0], 0, np.abs(a[0] - b[0])) + np.maximum(a[1], b[1])
                error = np.where(c[1], either, error)
            return value, np.where(np.isnan(error), np.inf, error) if np.isnan(error).any() else error

        sub = sums("sub")
        return {
            "add": sums("add"), "sub": sub, "mul": mul, "div": div, "floordiv": floordiv,
            "mod": lambda a, b: sub(a, mul(b, floordiv(a, b))), "neg": lambda a: (-a[0], a[1]),
            "abs": lambda a: (np.abs(a[0]), a[1]), "minimum": _pick(np.minimum), "maximum": _pick(np.maximum),
            "exp": exp, "log": log, "tanh": tanh, "where": where, **_COMPARISONS[FLOAT],
        }  # fmt: skip

    # -- whole numbers and conditions ----------------------------------------------------------------------------------
    def _whole_numbers(self) -> dict[str, Callable[..., Pair]]:
        """They are as they are, or, where a float has decided between them, anything."""
        plain = PLAIN[INT]

        def surely(op: str) -> Callable[..., Pair]:
            def apply(*args: Pair) -> Pair:
                value = plain[op](*(a for a, _ in args))
                known = all(_is_none(error) for _, error in args)
                return value, 0.0 if known else np.where(_any(e != 0 for _, e in args), np.inf, 0.0)

            return apply

        def where(c: Pair, a: Pair, b: Pair) -> Pair:
            value, error = np.where(c[0], a[0], b[0]), 0.0
            if not (_is_none(a[1]) and _is_none(b[1])):
                error = np.where(c[0], a[1], b[1])
            return value, np.where(c[1] & (a[0] != b[0]), np.inf, error) if np.any(c[1]) else error

        def as_float(a: Pair) -> Pair:
            return self.rounded(np.asarray(a[0]).astype(np.float64), a[1])

        whole = {op: surely(op) for op in plain if op not in _COMPARISONS[INT]}
        return {**whole, "where": where, "float": as_float, **_COMPARISONS[INT]}

    def _conditions(self) -> dict[str, Callable[..., Pair]]:
        def where(c: Pair, a: Pair, b: Pair) -> Pair:
            unsure = np.where(c[0], a[1], b[1]) | (c[1] & ((a[0] != b[0]) | a[1] | b[1]))
            return np.where(c[0], a[0], b[0]), unsure

        def both(op: Callable[..., Any]) -> Callable[[Pair, Pair], Pair]:
            return lambda a, b: (op(a[0], b[0]), a[1] | b[1])

        return {
            "and": lambda a, b: (a[0] & b[0], (a[1] & (b[0] | b[1])) | (b[1] & (a[0] | a[1]))),
            "or": lambda a, b: (a[0] | b[0], (a[1] & (b[1] | ~b[0])) | (b[1] & (a[1] | ~a[0]))),
            "not": lambda a: (np.logical_not(a[0]), a[1]),
            "where": where, "eq": both(np.equal), "ne": both(np.not_equal),
        }  # fmt: skip


def _pick(op: Callable[..., Any]) -> Callable[[Pair, Pair], Pair]:
    def apply(a: Pair, b: Pair) -> Pair:
        value = op(a[0], b[0])
        if _is_none(a[1]) and _is_none(b[1]):
            return value, 0.0
        apart = np.abs(a[0] - b[0]) > a[1] + b[1]
        return value, np.where(apart, np.where(value == a[0], a[1], b[1]), np.maximum(a[1], b[1]))

    return apply


def _compare(op: Callable[..., Any]) -> Callable[[Pair, Pair], Pair]:
    def apply(a: Pair, b: Pair) -> Pair:
        value = op(a[0], b[0])
        if _is_none(a[1]) and _is_none(b[1]):
            return value, False
        error = a[1] + b[1]
        return value, (error != 0) & ~(np.abs(a[0] - b[0]) > error)

    return apply


_COMPARISONS = {
    kind: {op: _compare(PLAIN[kind][op]) for op in ("lt", "le", "gt", "ge", "eq", "ne")} for kind in (INT, FLOAT)
}


def _is_short(value: Any) -> Any:
    """Numbers that float32 holds as they are: sums and products of them are often exact, in any type."""
    return np.asarray(value, np.float32) == value


def _any(conditions: Any) -> Any:
    found: Any = np.False_
    for condition in conditions:
        found = found | condition
    return found
