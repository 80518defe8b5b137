"""Random expressions of every operation, from any source of choices: Hypothesis for properties, a seed for the fuzz."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tilewise import expr as ex
from tilewise.expr import HK, NK, NQ, B, Expr, H, K, Loaded, Q, S

T = TypeVar("T")

_INT_LEAVES = (Q, K, Q, K, B, H, HK, NQ, NK, Q - K, Q + (NK - NQ) - K)
_INT_OPS = ("leaf", *ex.ARITHMETIC, "leaf product", "neg", "abs", "minimum", "maximum", "where", "load")
_FLOAT_OPS = (
    "leaf", "int", *ex.ARITHMETIC, "neg", "abs", "minimum", "maximum", "where", "load", "exp", "log", "tanh",
)  # fmt: skip
_BOOL_OPS = ("ints", "ints", "floats", "and", "or", "not", "where", "load")
_COMPARISONS = tuple(f"__{op}__" for op in ex.COMPARISONS)
_UNARY: dict[str, Callable[[Expr], Expr]] = {
    "neg": lambda a: -a,
    "abs": abs,
    "exp": ex.exp,
    "log": ex.log,
    "tanh": ex.tanh,
}
_BINARY: dict[str, Callable[[Expr, Expr], Expr]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "minimum": ex.minimum,
    "maximum": ex.maximum,
}
FLOATS = (0.0, 0.1, -0.5, 1.0, 2.5, -3.0, 1e-3, 30.0, float("inf"), -float("inf"), 1e30)


class Expressions:
    """Draws expressions: `below(n)` chooses from 0 to n - 1, `slot(kind)` an array to read; `floats` are constants."""

    def __init__(
        self, below: Callable[[int], int], slot: Callable[[str], Loaded], floats: Sequence[float] = FLOATS
    ) -> None:
        self.below, self.slot, self.floats = below, slot, floats

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def integer(self, depth: int) -> Expr:
        """Whole numbers that stay small: products have a constant or two leaves."""
        op = self.one_of(_INT_OPS) if depth > 0 else "leaf"
        if op == "leaf":
            return self.one_of(_INT_LEAVES) if self.below(2) else self._int_constant()
        if op == "leaf product":
            return self.one_of(_INT_LEAVES) * self.one_of(_INT_LEAVES)
        if op == "load":
            return self.load("int", depth - 1)
        if op == "where":
            return ex.where(self.condition(depth - 1), self.integer(depth - 1), self.integer(depth - 1))
        a = self.integer(depth - 1)
        if op in _UNARY:
            return _UNARY[op](a)
        if op == "mul":
            return a * self._int_constant()
        b = self.integer(depth - 1)
        if op in ("floordiv", "mod", "div"):
            return _BINARY["floordiv" if op == "div" else op](a, _divisor(b))
        return _BINARY[op](a, b)

    def number(self, depth: int, scores: bool) -> Expr:
        op = self.one_of(_FLOAT_OPS) if depth > 0 else "leaf"
        if op == "leaf":
            return S if scores and self.below(2) else ex.constant(self.one_of(self.floats))
        if op == "int":
            return ex.as_float(self.integer(depth - 1))
        if op == "load":
            return self.load("float", depth - 1)
        a = self.number(depth - 1, scores)
        if op in _UNARY:
            return _UNARY[op](a)
        b = self.integer(depth - 1) if self.below(4) == 0 else self.number(depth - 1, scores)
        if op == "where":
            return ex.where(self.condition(depth - 1, scores), a, b)
        return _BINARY[op](a, _divisor(b) if op in ("floordiv", "mod") else b)

    def condition(self, depth: int, scores: bool = False) -> Expr:
        op = self.one_of(_BOOL_OPS) if depth > 0 else "ints"
        if op == "ints":
            return self._compared(self.integer(depth - 1), self.integer(depth - 1))
        if op == "floats":
            return self._compared(self.number(depth - 1, scores), self.number(depth - 1, scores))
        if op == "load":
            return self.load("bool", depth - 1)
        a = self.condition(depth - 1, scores)
        if op == "not":
            return ~a
        b = self.condition(depth - 1, scores)
        return a & b if op == "and" else a | b if op == "or" else ex.where(a, b, ~b)

    def load(self, kind: str, depth: int) -> Expr:
        slot = self.slot(kind)
        # A constant index outside the array is an error, not a clamp, so indices are made to depend on something.
        return ex.load_slot(slot, *(self.integer(depth) + 0 * Q for _ in slot.array.shape))

    def _compared(self, a: Expr, b: Expr) -> Expr:
        compared: Any = getattr(a, self.one_of(_COMPARISONS))(b)
        return compared

    def _int_constant(self) -> Expr:
        return ex.constant(self.below(19) - 9)


def _divisor(e: Expr) -> Expr:
    return ex.constant(3) if e.op == "const" and e.payload == 0 else e
