"""Expressions drawn from the grammar: every operation on every type, to any depth, over the forms of a pool."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzzing.drawing import language as la
from tests.fuzzing.drawing.forms import Pool
from tests.fuzzing.drawing.language import BOOL, FLOAT, HK, INT, NK, NQ, B, H, K, Node, Q, S, where

MOST, LEAST = 2**31 - 1, -(2**31)
MOST_POSITIONS = 2**13  # of the calls that are drawn
# No infinite or huge ones, of which hardly an expression comes back; `_edge` has those that are harmless.
FLOAT_CONSTANTS = (0.0, 0.1, -0.5, 1.0, 2.5, -3.0, 1e-3, 30.0, -0.0)
VARIABLES = (Q, K, Q, K, B, H, HK, NQ, NK)
COMPARED = tuple(la.COMPARISONS)

INT_OPS = {
    "leaf": 4, "product": 1, "add": 2, "sub": 2, "mul": 1.5, "floordiv": 2, "mod": 2, "neg": 1, "abs": 1, "minimum": 1,
    "maximum": 1, "where": 1, "load": 1.5, "edge": 0.4, "negative": 0.8,
}  # fmt: skip
FLOAT_OPS = {
    "leaf": 3, "int": 2, "add": 2, "sub": 2, "mul": 2, "div": 1.5, "floordiv": 0.4, "mod": 0.4, "neg": 1, "abs": 1,
    "minimum": 1, "maximum": 1, "where": 2, "load": 2, "exp": 1, "log": 1, "tanh": 1.5, "edge": 0.5,
}  # fmt: skip
BOOL_OPS = {
    "ints": 5,
    "floats": 1.5,
    "and": 2,
    "or": 2,
    "not": 1.5,
    "where": 1,
    "load": 1,
    "edge": 1,
    "alike": 0.5,
    "wide": 0.4,
}

# Whole numbers at the edges of their type, which stay within it; 2 ** 24 + 1 is the first that float32 has not.
EDGES: tuple[Callable[[Node], Node], ...] = (
    lambda f: la.minimum(f, MOST - 1),
    lambda f: la.maximum(f, LEAST + 1),
    lambda f: la.minimum(MOST, f),
    lambda f: (abs(f) % 1000 + (MOST - 1000)) // (abs(K) + 1000),
    lambda f: LEAST // (abs(f) + 2),
    lambda f: MOST % (abs(f) + 1),
    lambda f: (f + (2**24 + 1)) % 7,
    lambda f: (K + (2**24 + 1)) - (f + 2**24),
    lambda f: (f % 999 - MOST) % -5,
    lambda f: f // -1,
    lambda f: f % -1,
)
BOOL_EDGES: tuple[Callable[[Node], Node], ...] = (
    lambda f: f <= MOST,
    lambda f: f - 1 > LEAST,
    lambda f: la.equal(f + (2**24 + 1), K + (2**24 + 1)),
    lambda f: la.differ(K + 2**24, f + (2**24 + 1)),
    lambda f: f < 0,
    lambda f: f >= -1,
    lambda f: la.as_float(f) < 1e30,
    lambda f: la.as_float(f) > -float("inf"),
    lambda f: la.as_float(f) <= 65504.0,
    lambda f: (K > MOST - 1) | (f > K),
    lambda f: K - f > LEAST + 2**28,
)
# Floats at the edges of theirs, which leave a number as it is, or nearly so; -inf has tiles looked at by their scores.
FLOAT_EDGES: tuple[Callable[[Node], Node], ...] = (
    lambda x: la.minimum(x, 3e38),
    lambda x: la.maximum(-3e38, x),
    lambda x: la.maximum(x, -float("inf")),
    lambda x: la.minimum(x, float("inf")),
    lambda x: where(x < 1e30, x, 0.5),
    lambda x: where(x > -float("inf"), x, -1.0),
    lambda x: x + 1e-30,
    lambda x: x * 1.0000001,
    lambda x: x - -0.0,
    lambda x: x / 65504.0 * 65504.0,
)


class Grammar:
    """Draws over a pool: what it has drawn is used again, in the same text and in the other one.

    tame: most floats are of a size that says something of a score, and no comparison of them is a tie.
    """

    def __init__(self, pool: Pool, floats: tuple[float, ...] = FLOAT_CONSTANTS, tame: bool = True) -> None:
        self.pool, self.dice, self.floats, self.tame = pool, pool.dice, floats, tame

    def mask(self, depth: int) -> Node:
        return self.condition(depth)

    def score(self, depth: int) -> Node:
        """Mostly S and something more; squeezed, as most calls should have weights that are neither 0 nor 1."""
        made = self.number(depth, scores=True)
        kind = self.dice.weighted({"squeezed": 4, "added": 3, "bare": 1.5, "scaled": 1})
        if kind == "squeezed":
            return S + 2.0 * la.tanh(0.1 * made)
        if kind == "scaled":
            return S * (1.0 + 0.5 * la.tanh(made))
        return S + 0.05 * made if kind == "added" else made

    # -- each type -----------------------------------------------------------------------------------------------------
    def integer(self, depth: int) -> Node:
        """Within 32 bits at all the positions that calls have."""
        for less in range(3):
            made = self._integer(max(depth - less, 0))
            if bounded(made):
                return self.pool.shared(INT, made) if made.args else made
        return self.pool.form()

    def _integer(self, depth: int) -> Node:
        again = self._again(INT)
        if again is not None:
            return again
        op = self.dice.weighted(INT_OPS) if depth > 0 else "leaf"
        if op == "leaf":
            return self._int_leaf()
        if op == "product":
            return self.dice.one_of(VARIABLES) * self.dice.one_of(VARIABLES)
        if op == "edge":
            return self.dice.one_of(EDGES)(self.pool.form())
        if op == "negative":
            return self.pool.negative()
        if op == "load":
            return self.pool.read(INT, lambda: self.integer(depth - 1))
        if op == "where":
            return where(self.condition(depth - 1), self._integer(depth - 1), self._integer(depth - 1))
        a = self._integer(depth - 1)
        if op in ("neg", "abs"):
            return la.make(op, a)
        return la.make(op, a, self._constant() if op == "mul" else self._divisor(depth - 1, op))

    def number(self, depth: int, scores: bool) -> Node:
        again = self._again(FLOAT)
        if again is not None:
            return again
        op = self.dice.weighted(FLOAT_OPS) if depth > 0 else "leaf"
        if op == "leaf":
            return S if scores and self.dice.chance(0.5) else la.constant(self.dice.one_of(self.floats))
        if op == "int":
            return self._small(self.integer(depth - 1))
        if op == "load":
            return self.pool.read(FLOAT, lambda: self.integer(depth - 1))
        if op == "where":
            return where(self.condition(depth - 1, scores), *(self._operand(depth - 1, scores) for _ in range(2)))
        a = self.number(depth - 1, scores)
        if op == "edge":
            return self.dice.one_of(FLOAT_EDGES)(a)
        if op in ("exp", "log"):
            return self._function(op, a)
        if op in ("neg", "abs", "tanh"):
            return la.make(op, a)
        b = self._operand(depth - 1, scores)
        made = la.make(op, a, self._safe_divisor(b) if op in ("div", "floordiv", "mod") else b)
        return made if scores else self.pool.shared(FLOAT, made)

    def condition(self, depth: int, scores: bool = False) -> Node:
        again = self._again(BOOL)
        if again is not None:
            return again
        op = self.dice.weighted(BOOL_OPS) if depth > 0 else "ints"
        made = self._condition(op, depth, scores)
        return made if scores else self.pool.shared(BOOL, made)

    def _condition(self, op: str, depth: int, scores: bool) -> Node:
        if op == "ints":
            return self._compared(depth)
        if op == "floats":
            a, b = self.number(depth - 1, scores), self.number(depth - 1, scores)
            if not self.tame:
                return la.make(self.dice.one_of(COMPARED), a, b)
            return la.make(self.dice.one_of(COMPARED[:4]), a, b + 0.0371)  # not a tie that rounding decides
        if op == "edge":
            return self.dice.one_of(BOOL_EDGES)(self.pool.form())
        if op == "wide":
            return self.pool.wide()
        if op == "load":
            return self.pool.read(BOOL, lambda: self.integer(depth - 1))
        a = self.condition(depth - 1, scores)
        if op == "not":
            return ~a
        b = self.condition(depth - 1, scores)
        if op == "alike":
            return la.make(self.dice.one_of(("eq", "ne")), a, b)
        return where(a, b, ~a) if op == "where" else la.make(op, a, b)

    # -- leaves and operands -------------------------------------------------------------------------------------------
    def _again(self, kind: str) -> Node | None:
        made = self.pool.made[kind]
        return self.dice.one_of(made) if made and self.dice.chance(0.12) else None

    def _int_leaf(self) -> Node:
        kind = self.dice.weighted({"form": 4, "variable": 3, "distance": 2, "constant": 2})
        if kind == "variable":
            return self.dice.one_of(VARIABLES)
        return {"form": self.pool.form, "distance": self.pool.distance, "constant": self._constant}[kind]()

    def _compared(self, depth: int) -> Node:
        if self.dice.chance(0.4):
            return self.pool.bound()
        return la.make(self.dice.one_of(COMPARED), self.integer(depth - 1), self.integer(depth - 1))

    def _constant(self) -> Node:
        return la.constant(self.dice.between(-9, 9))

    def _divisor(self, depth: int, op: str) -> Node:
        """Anything, 0 at some places too; negative constants often."""
        if op not in ("floordiv", "mod"):
            return self._integer(depth)
        if self.dice.chance(0.6):
            return la.constant(self.dice.one_of((-1, 1)) * self.dice.between(1, 9))
        b = self._integer(depth)
        return la.constant(3) if _may_be_constant_0(b) else b

    def _operand(self, depth: int, scores: bool) -> Node:
        return self._small(self.integer(depth)) if self.dice.chance(0.25) else self.number(depth, scores)

    def _small(self, a: Node) -> Node:
        """A whole number as a float, mostly one that no score is lost beside."""
        kind = self.dice.weighted({"rate": 4, "float": 1, "small": 1}) if self.tame else "float"
        if kind == "rate":
            return self.dice.one_of((-0.02, 0.05, 0.25)) * a
        return la.as_float(a) if kind == "float" else la.as_float(a % self.dice.between(2, 9))

    def _function(self, op: str, a: Node) -> Node:
        """exp and log, mostly of numbers that they take well."""
        if not self.tame or self.dice.chance(0.1):
            return la.make(op, a)
        return la.exp(la.minimum(a, 2.5)) if op == "exp" else la.log(1.5 + abs(a))

    def _safe_divisor(self, b: Node) -> Node:
        if b.op == "const" or _may_be_constant_0(b):
            return la.constant(1.5) if _may_be_constant_0(b) else b
        return b if not self.tame or self.dice.chance(0.1) else 0.75 + abs(b)


def _may_be_constant_0(b: Node) -> bool:
    """Whether it is a constant 0, or an expression of constants alone that may be folded to it: an error as divisor."""
    return b.value == 0 if b.op == "const" else not any(x.op in ("var", "load") for x in la.nodes(b))


# -- the range of whole numbers ---------------------------------------------------------------------------------------


def bounded(root: Node) -> bool:
    """Whether all whole numbers in it stay within 32 bits, by a bound of their size."""
    return _most(root) <= MOST


def _most(node: Node) -> int:
    """No less than the largest magnitude anywhere in it."""
    inside = [_most(x) for x in node.args]
    return max(_size(node), *inside) if inside else _size(node)


def _size(node: Node) -> int:
    """No less than the magnitude of a whole number; 0 for others."""
    if node.kind != INT:
        return 0
    if node.op == "const":
        return min(abs(int(node.value)), MOST)
    if node.op == "var":
        return 2 * MOST_POSITIONS if node.value in ("NQ", "NK", "QP", "KP") else MOST_POSITIONS
    if node.op == "load":
        return 0  # they have 64 bits, and so has what is computed with them
    sizes = [_size(x) for x in node.args if x.kind == INT]
    if node.op in ("add", "sub"):
        return sizes[0] + sizes[1]
    if node.op == "mul":
        return sizes[0] * sizes[1]
    if node.op == "mod":
        return sizes[1]
    return sizes[0] if node.op in ("floordiv", "neg", "abs") else max(sizes)
