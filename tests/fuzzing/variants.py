"""Random masks and scores: every named variant, expressions of every operation, and compositions of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.compositions import Compositions
from tests.expressions import Expressions
from tests.fuzzing.dice import Dice
from tests.fuzzing.memory import Memory, any_strides
from tilewise import arrays, variants
from tilewise import expr as ex
from tilewise.arrays import Array
from tilewise.expr import HK, KP, QP, B, Expr, H, K, Loaded, Q, S

# No infinite or huge constants, of which hardly an expression comes back; scores of -inf have makers of their own.
FLOATS = (0.0, 0.1, -0.5, 1.0, 2.5, -3.0, 1e-3, 30.0)
MASKING = {"causal", "window", "prefix", "document", "dilated", "dense"}  # of the named variants; the others score
HASH = np.int64(0x9E3779B97F4A7C15 - 2**64)  # numbers times it wrap around, and none meets another
MOST_ENTRIES = 4_000_000  # of a table: by positions in the sequence and in the pack at once it could be any size


class Variants:
    """Makes masks and scores that fit a call's sizes (of B, H, HK, Q, K, QP, KP); `names` tells what was taken.

    mask_arrays: whether the call may be given an array as its mask. reach: how far a window sees, at most.
    """

    def __init__(self, dice: Dice, memory: Memory, sizes: dict[str, int], mask_arrays: bool, reach: int) -> None:
        self.dice, self.memory, self.sizes, self.mask_arrays, self.reach = dice, memory, sizes, mask_arrays, reach
        self.names: list[str] = []
        self._slots: dict[str, list[Loaded]] = {"bool": [], "int": [], "float": []}
        self._expressions = Expressions(dice.below, self._slot, FLOATS)

    # -- what a call is given ------------------------------------------------------------------------------------------
    def mask(self) -> Expr:
        """One condition, or several joined by &, | and ~."""
        made = self._one(MASKS)
        for _ in range(self.dice.weighted({0: 6, 1: 3, 2: 1})):
            other = self._one(MASKS)
            made = made & other if self.dice.chance(0.6) else made | other
        return ~made if self.dice.chance(0.1) else made

    def score(self) -> Expr:
        """One score, or several in a row."""
        made = self._one(SCORES)
        for _ in range(self.dice.weighted({0: 6, 1: 3, 2: 1})):
            made = made >> self._one(SCORES)
        return made

    def composition(self) -> tuple[Expr, Expr]:
        """A mask and a score over the same forms of positions."""
        self.names.append("composition")
        table = Loaded(self.floats(self.dice.between(1, 60)), grad=self.dice.chance(0.2))
        drawn = Compositions(self.dice.below, lambda: table)
        return drawn.mask(), drawn.score()

    def _one(self, makers: dict[str, Callable[[Variants], Expr]]) -> Expr:
        name = self.dice.weighted({name: WEIGHTS.get(name, 1.0) for name in makers})
        self.names.append(name)
        return makers[name](self)

    # -- arrays --------------------------------------------------------------------------------------------------------
    def floats(self, *shape: int, masked: float = 0.0) -> Array:
        values = self.dice.normal(shape)
        if self.dice.chance(masked):
            values[self.dice.normal(shape) > 0] = -np.inf
        return any_strides(values, self.dice.one_of(arrays.FLOAT_DTYPES), self.memory, self.dice)

    def ints(self, low: int, high: int, *shape: int) -> Array:
        dtype = self.dice.one_of(arrays.INT_DTYPES)
        low = max(low, 0) if dtype == "uint8" else low
        return any_strides(self.dice.integers(low, high, shape), dtype, self.memory, self.dice)

    def bools(self, share: float, *shape: int) -> Array:
        values = self.dice.integers(1, 100, shape) <= 100 * share
        return any_strides(values, "bool", self.memory, self.dice)

    def broadcastable(self, low_rank: int = 1) -> tuple[int, ...]:
        """A shape that broadcasts to (batch, heads, queries, keys)."""
        full = [self.sizes[name] for name in ("B", "H", "Q", "K")][4 - self.dice.between(low_rank, 4) :]
        return tuple(1 if self.dice.chance(0.3) else size for size in full)

    def grad(self) -> bool:
        return self.dice.chance(0.6)

    def _slot(self, kind: str) -> Loaded:
        """An array of any type and rank, or one that was read before."""
        known = self._slots[kind]
        if not known or self.dice.chance(0.7):
            shape = tuple(self.dice.between(1, 6) for _ in range(self.dice.below(5)))
            made = {"bool": lambda: self.bools(0.5, *shape), "int": lambda: self.ints(-3, 9, *shape)}
            array = made[kind]() if kind in made else self.floats(*shape)
            known.append(Loaded(array, grad=kind == "float" and self.grad()))
        return self.dice.one_of(known)

    # -- a maker each --------------------------------------------------------------------------------------------------
    def document(self) -> Expr:
        high = self.dice.between(0, 6)
        batch = (self.sizes["B"],) if self.dice.chance(0.3) else ()
        q_ids, k_ids = (np.sort(self.dice.integers(-2, high, (*batch, self.sizes[n]))) for n in "QK")
        dtype = self.dice.one_of(arrays.INT_DTYPES[:4])
        if dtype == "int64":  # ids of documents are often hashes; the same ones stay the same
            q_ids, k_ids = (np.sort(x * HASH) for x in (q_ids, k_ids))
        q_ids, k_ids = (any_strides(x, dtype, self.memory, self.dice) for x in (q_ids, k_ids))
        same = self.sizes["Q"] == self.sizes["K"] and self.dice.chance(0.5)
        return variants.document(q_ids) if same else variants.document(q_ids, k_ids)

    def alibi(self) -> Expr:
        if self.dice.chance(0.4):
            return variants.alibi(self.sizes["H"])
        return variants.alibi(self.floats(self.sizes["H"]), grad=self.grad())

    def relative(self) -> Expr:
        signed, half = self.dice.chance(0.5), self.dice.between(0, 20)
        entries = 2 * half + 1 if signed else half + 1
        head = (self.sizes["H"],) if self.dice.chance(0.5) else ()
        return variants.relative(self.floats(*head, entries), signed=signed, grad=self.grad())

    def t5(self) -> Expr:
        side, both = self.dice.between(1, 9), self.dice.chance(0.5)
        buckets = 2 * side if both else side + 1
        head = (self.sizes["H"],) if self.dice.chance(0.5) else ()
        furthest = max((side if both else buckets) // 2, 1) + 1 + self.dice.between(0, 60)
        return variants.t5(self.floats(buckets, *head), furthest, bidirectional=both, grad=self.grad())

    def by_variables(self) -> Expr:
        """A table read by plain variables, whatever they are."""
        by = [v for v in (B, H, HK, Q, K, QP, KP) if self.dice.chance(0.25)]
        shape = [self.sizes[v.payload] for v in by]
        while math.prod(shape) > MOST_ENTRIES:
            by.pop()
            shape.pop()
        return S + ex.load(self.floats(*shape, masked=0.2), *by, grad=self.grad())

    def random_score(self) -> Expr:
        made = self._expressions.number(self.dice.between(1, 4), scores=True)
        return S + made if self.dice.chance(0.5) else made

    def masking_score(self) -> Expr:
        return ex.where(self._expressions.condition(2), S * 0.5, -np.inf)


MASKS: dict[str, Callable[[Variants], Expr]] = {
    "causal": lambda v: variants.causal(),
    "window": lambda v: variants.window(
        v.dice.between(0, v.reach), v.dice.one_of([None, 0, v.dice.between(0, v.reach)])
    ),
    "prefix": lambda v: variants.prefix(v.dice.between(0, v.reach)),
    "document": Variants.document,
    "dilated": lambda v: variants.dilated(v.dice.between(1, 7)),
    "dense": lambda v: variants.dense(v.bools(v.dice.one_of([0.05, 0.5, 0.95]), *v.broadcastable())),
    "packed ids": lambda v: (
        ex.load(v.ints(0, 2, v.sizes["QP"]), QP) == ex.load(v.ints(0, 2, v.sizes["KP"]), KP)
    ),
    "random condition": lambda v: v._expressions.condition(v.dice.between(1, 4)),
    "nothing seen": lambda v: K < v.dice.between(-1, 0),
    "some rows": lambda v: Q % v.dice.between(2, 5) == 0,
}  # fmt: skip
SCORES: dict[str, Callable[[Variants], Expr]] = {
    "alibi": Variants.alibi,
    "relative": Variants.relative,
    "t5": Variants.t5,
    "softcap": lambda v: variants.softcap(v.dice.one_of([0.5, 2, 30.0])),
    "bias": lambda v: variants.bias(v.floats(*v.broadcastable(), masked=0.3), grad=v.grad()),
    "table by variables": Variants.by_variables,
    "random score": Variants.random_score,
    "masking score": Variants.masking_score,
    "multiple": lambda v: S * v.dice.one_of([-1.0, 0.0, 3.0, 1e-3]),
}

# Expressions of all kinds say most; a call in which no key counts says little.
WEIGHTS = {"random condition": 3.0, "random score": 5.0, "nothing seen": 0.3, "some rows": 0.5}


def drawn_options(v: Variants) -> dict[str, Any]:
    """The options of one attention call that say which keys count and for how much."""
    dice, options = v.dice, {}
    if dice.chance(0.2):
        options["mask"], options["score"] = v.composition()
        return options
    if dice.chance(0.75):
        options["mask"] = v.mask()
    if dice.chance(0.55):
        options["score"] = v.score()
    if dice.chance(0.15):
        options["causal"] = True
        v.names.append("causal")
    if v.mask_arrays and dice.chance(0.1):
        dense = dice.chance(0.5)
        shape = v.broadcastable()
        options["mask"] = v.bools(0.5, *shape) if dense else v.floats(*shape, masked=0.4)
        v.names.append("mask array" if dense else "added mask")
    return options
