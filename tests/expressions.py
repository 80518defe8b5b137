"""Random expressions of the fuzz's grammar, from any source of choices: Hypothesis for properties, or a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tests.fuzzing.drawing.dice import Choices
from tests.fuzzing.drawing.forms import WIDE, Pool
from tests.fuzzing.drawing.grammar import Grammar
from tests.fuzzing.drawing.language import INT, Node, load, text
from tilewise import arrays
from tilewise.expr import Expr, Loaded
from tilewise.text import parse

T = TypeVar("T")

FLOATS = (0.0, 0.1, -0.5, 1.0, 2.5, -3.0, 1e-3, 30.0, float("inf"), -float("inf"), 1e30)
FURTHEST = 9  # constants of forms: the calls of these tests are small


class Expressions:
    """Draws expressions: `below(n)` chooses from 0 to n - 1, `slot(kind)` an array to read; `floats` are constants."""

    def __init__(
        self, below: Callable[[int], int], slot: Callable[[str], Loaded], floats: Sequence[float] = FLOATS
    ) -> None:
        self.choices = Choices(below)
        self._pool = _Slots(self.choices, slot)
        self._grammar = Grammar(self._pool, tuple(floats), tame=False)

    def one_of(self, options: Sequence[T]) -> T:
        return self.choices.one_of(options)

    def integer(self, depth: int) -> Expr:
        return self._expression(self._grammar.integer(depth))

    def number(self, depth: int, scores: bool) -> Expr:
        return self._expression(self._grammar.number(depth, scores))

    def condition(self, depth: int, scores: bool = False) -> Expr:
        return self._expression(self._grammar.condition(depth, scores))

    def load(self, kind: str, depth: int) -> Expr:
        return self._expression(self._pool.read(kind, lambda: self._grammar.integer(depth)))

    def _expression(self, tree: Node) -> Expr:
        return parse(text(tree), self._pool.arrays)


class _Slots(Pool):
    """A pool over the arrays of a test, whose sizes are no call's: no index is a variable alone."""

    def __init__(self, choices: Choices, slot: Callable[[str], Loaded]) -> None:
        super().__init__(choices, FURTHEST)
        self.slot, self.arrays = slot, list[Any]()

    def wide(self) -> Node:
        """Those of the test: it knows how wide its numbers are."""
        return self.dice.one_of(WIDE)(self.read(INT), self.read(INT), 1 + self.dice.below(9))

    def read(self, kind: str, indices: Callable[[], Node] | None = None) -> Node:
        array = self.slot(kind).array
        assert arrays.value_kind(array) == kind
        known = [i for i, x in enumerate(self.arrays) if x is array]
        if not known:
            self.arrays.append(array)
        at = known[0] if known else len(self.arrays) - 1
        return load(f"a{at}", kind, *(self.index_of_any(indices) for _ in array.shape))
