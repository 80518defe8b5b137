"""Exercise: the step of the online softmax."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tilewise import contract
from tilewise.arrays import Array
from tilewise.lab.blocks import blocks
from tilewise.lab.exercises.cutting import Source
from tilewise.lab.exercises.exercise import Exercise
from tilewise.lab.exercises.grading import load
from tilewise.lab.exercises.habits import IN_SUMS, after, recognised
from tilewise.lab.exercises.judging import WrongError, compare
from tilewise.lab.exercises.problem import OVERFLOW

TASK = """
Softmax looks as if it needed a whole row of scores: its maximum, so that exp does not overflow, and
its sum. But scores come a block at a time. Three running values a row are enough:

    row_max   the largest score so far                             at first -inf
    row_sum   the sum of exp(score - row_max)                      at first 0
    acc       the sum of exp(score - row_max) * its row of values  at first 0

When a block brings a larger maximum, what was summed before is relative to the wrong one. One
factor a row puts it right.

Write State.step: it takes the scores s and the values v of one block into the three. At the end acc
/ row_sum must be what softmax(all scores) @ (all values) gives. It returns the weights of the
block, p = exp(s - new maximum), and the factor.

- A masked score is -inf, and may fill a row: exp(-inf - -inf) would be NaN. `finite` below is for
  that.
- s may have any number of dimensions before (rows, keys): count axes from the end.
- Overwrite row_max last: the factor needs the old maximum and the new one.
"""

IMPORTS = """
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewise.arrays import Array
"""

HINTS = (
    "The new maximum of each row is the larger of row_max and the block's own: np.maximum(self.row_max, "
    "s.max(axis=-1)).",
    "The weights are p = np.exp(s - shift[..., None]), where shift is finite(new maximum). The factor for "
    "what was there before is rescale = np.exp(self.row_max - shift): 1 if the maximum stays, 0 for a row "
    "that had no key yet.",
    "row_sum is row_sum * rescale + the sum of p over the keys. acc is the same with p @ v in place of the "
    "sum; there rescale wants [..., None], as acc has a column more.",
)


FIELDS = ("row_max", "row_sum", "acc")


def grade(path: Path) -> Iterator[str]:
    state = load(path, "State", "finite").State
    rng = np.random.default_rng(0)
    s, v = rng.standard_normal((5, 24)) * 3, rng.standard_normal((24, 4))
    ordered = np.sort(s, axis=-1)
    yield _checked(state, "one block", s, v, 24)
    yield _checked(state, "scores that fall from block to block", ordered[:, ::-1], v, 8)
    yield _checked(state, "scores that grow from block to block", ordered, v, 8)
    yield _checked(state, "blocks of one key", s, v, 1)
    yield _checked(state, "a last block that is shorter", s, v, 7)
    hidden = np.where(np.arange(24) < 8, -np.inf, s)
    hidden[1] = -np.inf
    nan = "A row that has seen no key yet has row_max -inf, and -inf - -inf is NaN: shift by finite(new maximum)."
    yield _checked(state, "rows that have seen no key yet", hidden, v, 8, nan)
    yield _checked(state, "scores of some hundreds", 100 * s, v, 8, OVERFLOW)
    more = rng.standard_normal((2, 3, 5, 24))
    yield _checked(state, "dimensions before (rows, keys)", more, np.broadcast_to(v, (2, 3, 24, 4)), 8)
    yield _returned(state, ordered, v)


def _checked(state: Any, about: str, s: Array, v: Array, block: int, told: str = "") -> str:
    s, v = s.astype(np.float32), v.astype(np.float32)
    mine = state.init(s.shape[:-1], v.shape[-1], np.float32)
    for cols in blocks(s.shape[-1], block):
        mine.step(s[..., cols].copy(), v[..., cols, :])
        _compare(f"{about}, after key {cols.stop}", mine, s[..., : cols.stop], v[..., : cols.stop, :], block, told)
    return about


def _compare(about: str, mine: Any, s: Array, v: Array, block: int, told: str) -> None:
    """With what all these keys give at once."""
    exact = s.astype(np.float64), v.astype(np.float64)
    wide, dense = after(*exact, s.shape[-1]), after(s, v, s.shape[-1])

    def reason() -> str:
        known = ((habit, _values(after(*exact, block, habit))) for habit in IN_SUMS)
        return recognised(_values(mine), known) or told

    for name in FIELDS:
        expected = contract.expected(name, "float32", "float32", getattr(wide, name), getattr(dense, name))
        compare(about, expected, getattr(mine, name), reason)


def _values(state: Any) -> list[Array]:
    return [getattr(state, name) for name in FIELDS]


def _returned(state: Any, s: Array, v: Array) -> str:
    """The second of two blocks: p and rescale are no longer trivial."""
    s, v = s.astype(np.float32), v.astype(np.float32)
    mine = state.init(s.shape[:-1], v.shape[-1], np.float32)
    mine.step(s[:, :8].copy(), v[:8])
    old = mine.row_max.copy()
    returned = mine.step(s[:, 8:].copy(), v[8:])
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise WrongError(f"what step returns: expected the pair (p, rescale), came {type(returned).__name__}")
    wanted = {"p": np.exp(s[:, 8:] - mine.row_max[:, None]), "rescale": np.exp(old - mine.row_max)}
    for got, (name, want) in zip(returned, wanted.items(), strict=True):
        wide = want.astype(np.float64)
        compare("what step returns", contract.expected(name, "float32", "float32", wide, want), got)
    return "what step returns"


EXERCISE = Exercise(
    title="the online softmax",
    task=TASK,
    imports=IMPORTS,
    source=Source("softmax.py", cut=("5", "6"), definitions=("finite", "State: init step")),
    hints=HINTS,
    grade=grade,
)
