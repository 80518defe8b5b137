"""What each step of an expression gives, in one type of floats.

Whole numbers have 64 bits and wrap around. // and % are Python's, also of negative numbers; a whole number divided by 0
gives 0. Floats follow IEEE: x // y is floor(x / y), x % y is x - y * (x // y). Any index is clamped to its array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.fuzzing.judging.walk import BOOL, FLOAT, INT, Walk
from tests.fuzzing.question import Given


def kind_of(given: Given) -> str:
    return {"b": BOOL, "i": INT, "u": INT, "f": FLOAT}[given.values.dtype.kind]


def _floor_divide(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, np.floor_divide(a, np.where(b == 0, 1, b)))


def _remainder(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, a - b * _floor_divide(a, b))


_ANY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs,
    "minimum": np.minimum, "maximum": np.maximum, "where": np.where, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_WHOLE = {**_ANY, "floordiv": _floor_divide, "mod": _remainder}
_REAL = {
    **_ANY, "div": np.true_divide, "floordiv": lambda a, b: np.floor(a / b),
    "mod": lambda a, b: a - b * np.floor(a / b), "exp": np.exp, "log": np.log, "tanh": np.tanh,
}  # fmt: skip
_CONDITION = {
    "and": np.logical_and, "or": np.logical_or, "not": np.logical_not, "where": np.where,
    "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
PLAIN = {INT: _WHOLE, FLOAT: _REAL, BOOL: _CONDITION}


class Values:
    """Numbers as they are, floats in `dtype`."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.one, self.zero = self.dtype.type(1), self.dtype.type(0)

    def const(self, value: Any) -> Any:
        return self.dtype.type(value) if isinstance(value, float) else _whole(value)

    def variable(self, value: Any) -> Any:
        return value

    def load(self, given: Given, index: Sequence[Any]) -> Any:
        found = given.values[places(given, index)]
        kind = kind_of(given)
        return found if kind == BOOL else found.astype(self.dtype if kind == FLOAT else np.int64)

    def apply(self, op: str, kind: str, *args: Any) -> Any:
        """An operation on operands of this type; of a choice, what is chosen from."""
        if op == "float":
            return np.asarray(args[0]).astype(self.dtype)
        return PLAIN[kind][op](*args)

    # -- for slopes ----------------------------------------------------------------------------------------------------
    def times(self, slope: Any, factor: Any) -> Any:
        """No slope, times anything, is none."""
        made = slope * factor
        return made if np.isfinite(made).all() else np.where(slope == 0, self.zero, made)

    def over(self, slope: Any, divisor: Any) -> Any:
        made = slope / divisor
        return made if np.isfinite(made).all() else np.where(slope == 0, self.zero, made)

    def joined(self, a: Any, b: Any) -> Any:
        return a + b

    def value(self, x: Any) -> Any:
        return x


def _whole(value: bool | int) -> Any:
    return np.bool_(value) if isinstance(value, bool) else np.int64(value)


def places(given: Given, index: Sequence[Any]) -> tuple[Any, ...]:
    """Indices, each clamped to the array."""
    return tuple(np.clip(i, 0, n - 1) for i, n in zip(index, given.values.shape, strict=True))


def evaluate(walk: Walk, env: Mapping[str, Any], arrays: Sequence[Given], how: Any) -> list[Any]:
    """The value of every step. how: Values, or what computes with more than values."""
    found: list[Any] = []
    for step in walk.steps:
        if step.op == "var":
            found.append(how.variable(env[step.payload]) if step.payload != "S" else env["S"])
        elif step.op == "const":
            found.append(how.const(step.payload))
        elif step.op == "load":
            found.append(how.load(arrays[step.payload], [found[a] for a in step.args]))
        else:
            found.append(how.apply(step.op, step.operands, *(found[a] for a in step.args)))
    return found
