"""An attention that a learner's kernel is to compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from tilewise import arrays, contract, validate
from tilewise.arrays import Array
from tilewise.lab.blocks import blocks
from tilewise.lab.exercises.habits import HABITS, Habit, after, recognised
from tilewise.lab.exercises.judging import compare
from tilewise.validate import Call

OVERFLOW = "exp of more than 88 overflows in float32: subtract the maximum of all scores so far before exp."
_OF_LSE = "out is right, so it is row_max or row_sum that are not what step 7 makes lse of."


@dataclass(frozen=True, eq=False)
class Problem:
    """q, k, v (batch, heads, n, d). A kernel takes `block` keys at a time."""

    about: str
    q: Array
    k: Array
    v: Array
    block: int
    causal: bool = False
    skipped_by: int = 0  # so many queries skip a block of which they see nothing; 0: all keys are visited
    told: str = ""  # what to think of if it is wrong, and no habit explains it

    @classmethod
    def large(cls, shape: Sequence[int], **options: Any) -> Problem:
        """Scores that no exp takes without the maximum."""
        return cls.random("scores of some hundreds", shape, spread=200.0, told=OVERFLOW, **options)

    @classmethod
    def random(
        cls, about: str, shape: Sequence[int], dtype: str = "float32", spread: float = 2.0, **options: Any
    ) -> Problem:
        """shape: batch, heads, n_q, n_k, d, d_v. Scores are wide apart, so that row_max grows in later blocks."""
        batch, heads, n_q, n_k, d, d_v = shape
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((batch, heads, *size)) for size in ((n_q, d), (n_k, d), (n_k, d_v)))
        q, k, v = (arrays.narrow(x, dtype) for x in (spread * q, k, v))
        return cls(about, q, k, v, **options)

    def call(self) -> Call:
        """On copies: a learner may write to them."""
        return validate.prepare(self.q.copy(), self.k.copy(), self.v.copy(), causal=self.causal)

    def check(self, out: Any, lse: Any = None) -> None:
        """out: (batch, heads, n, d). lse: (batch, heads, n), of kernels that have one."""
        exact = {expected.what: expected for expected in contract.expected_forward(self.call())}
        compare(self.about, exact["out"], out, lambda: recognised([out], self._mistaken()) or self.told)
        if lse is not None:
            compare(self.about, exact["lse"], lse, lambda: _OF_LSE)

    def _mistaken(self) -> Iterator[tuple[Habit, list[Array]]]:
        q, k, v = (arrays.widen(x, np.float64) for x in (self.q, self.k, self.v))
        for habit in HABITS:
            s = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if habit.scales else 1)
            state = after(np.where(self._seen(habit.masks), s, -np.inf), v, self.block, habit)
            yield habit, [state.finish().out if habit.divides else state.acc]

    def _seen(self, masks: bool) -> Array:
        """Who sees which key (n_q, n_k); without a mask every key of the blocks that are visited."""
        n_q, n_k = self.q.shape[2], self.k.shape[2]
        if not self.causal or not (masks or self.skipped_by):
            return np.ones((n_q, n_k), bool)
        seen: Array = np.arange(n_k) <= np.arange(n_q)[:, None] + n_k - n_q
        if not masks:
            for rows, cols in product(blocks(n_q, self.skipped_by), blocks(n_k, self.block)):
                seen[rows, cols] = seen[rows, cols].any()
        return seen
