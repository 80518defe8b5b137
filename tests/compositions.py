"""Masks and scores drawn from one pool of forms: the same sum of positions is a bound, a float and an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tilewise import expr as ex
from tilewise.expr import NK, NQ, QP, Expr, H, K, Loaded, Q, S

T = TypeVar("T")

# What K is compared with and counted from; a number is a constant to add. Top left and bottom right alignment both.
FORMS: dict[str, Callable[[int], Expr]] = {
    "Q": lambda c: Q,
    "Q + (NK - NQ)": lambda c: Q + (NK - NQ),
    "Q + c": lambda c: Q + c,
    "Q + (NK - NQ) + c": lambda c: Q + (NK - NQ) + c,
    "2 * Q": lambda c: 2 * Q,
    "NK - Q": lambda c: NK - Q,
    "H + Q": lambda c: H + Q,
    "QP": lambda c: QP,
    "c": lambda c: ex.constant(abs(c)),
    "0": lambda c: ex.constant(0),
}
BOUNDS: tuple[Callable[[Expr], Expr], ...] = (
    lambda f: f >= K,
    lambda f: f > K,
    lambda f: f <= K,
    lambda f: f < K,
    lambda f: K < f + 1,
    lambda f: K - f <= 0,
    lambda f: f - K >= 0,
)
OTHERS: tuple[Callable[[Expr], Expr], ...] = (
    lambda f: H == 0,
    lambda f: Q % 3 == 1,
    lambda f: K % 3 != 1,
    lambda f: f == K,
    lambda f: abs(f - K) < 5,
)
JOINS: tuple[Callable[[Expr, Expr, Expr], Expr], ...] = (
    lambda a, b, other: a,
    lambda a, b, other: a | other,
    lambda a, b, other: other | a,
    lambda a, b, other: a & other,
    lambda a, b, other: (a & b) | other,
    lambda a, b, other: (a & other) | b,
    lambda a, b, other: ~a,
    lambda a, b, other: ~(a & b),
    lambda a, b, other: a | b,
)
DISTANCES: tuple[Callable[[Expr], Expr], ...] = (
    lambda f: f - K,
    lambda f: K - f,
    lambda f: abs(f - K),
    lambda f: abs(K - f),
)


class Compositions:
    """Draws a mask and a score over the same form or two.

    `below(n)` chooses from 0 to n - 1; `table()` is a line of floats to read, which may want its gradient.
    """

    def __init__(self, below: Callable[[int], int], table: Callable[[], Loaded]) -> None:
        self.below, self.table = below, table
        names = list(FORMS)
        self.forms = [FORMS[self.one_of(names)](below(19) - 9) for _ in range(1 + below(2))]

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def mask(self) -> Expr:
        a, b = (self.one_of(BOUNDS)(self.one_of(self.forms)) for _ in range(2))
        return self.one_of(JOINS)(a, b, self.one_of(OTHERS)(self.one_of(self.forms)))

    def score(self) -> Expr:
        made = S
        for _ in range(1 + self.below(2)):
            made = made + self._term(self.one_of(DISTANCES)(self.one_of(self.forms)))
        return made

    def _term(self, distance: Expr) -> Expr:
        kind = self.one_of(("float", "float", "index", "condition"))
        if kind == "index":
            # A variable alone, as K - 0 is, would need a table of its size; other indices are clamped.
            return ex.load_slot(self.table(), distance + 1 if distance.op == "var" else distance)
        if kind == "condition":
            return ex.where(self.one_of(BOUNDS)(self.one_of(self.forms)), 0.01 * distance, -0.5)
        return self.one_of((-0.02, 0.05)) * distance
