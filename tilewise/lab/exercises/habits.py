"""Mistakes that learners make again and again. Their results are known, so that a wrong one can be recognised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.lab.blocks import blocks
from tilewise.softmax import State


@dataclass(frozen=True)
class Habit:
    """What a mistaken attention leaves out."""

    told: str
    scales: bool = True
    masks: bool = True
    rescales_sum: bool = True
    rescales_acc: bool = True
    carries_on: bool = True
    divides: bool = True


SOUND = Habit("")
IN_SUMS = (
    Habit("row_sum and acc are not rescaled when a larger maximum comes. rescale = exp(old maximum - new maximum) "
          "needs both: take it before row_max is overwritten", rescales_sum=False, rescales_acc=False),
    Habit("acc is rescaled when a larger maximum comes, row_sum is not. The same factor belongs to both, taken before "
          "row_max is overwritten", rescales_sum=False),
    Habit("row_sum is rescaled when a larger maximum comes, acc is not. The same factor belongs to both",
          rescales_acc=False),
    Habit("row_max, row_sum and acc begin anew with every block of keys: they belong before the loop",
          carries_on=False),
)  # fmt: skip
HABITS = (
    *IN_SUMS,
    Habit("scores are not scaled by 1 / sqrt(d)", scales=False),
    Habit("the mask is forgotten: keys count that may not be seen", masks=False),
    Habit("acc is not divided by row_sum at the end", divides=False),
)


def after(s: Array, v: Array, block: int, habit: Habit = SOUND) -> State:
    """The statistics of scores s (..., rows, keys) that come in blocks of keys, kept with this habit."""
    state = State.init(s.shape[:-1], v.shape[-1], s.dtype)
    for cols in blocks(s.shape[-1], block):
        if not habit.carries_on:
            state = State.init(s.shape[:-1], v.shape[-1], s.dtype)
        row_sum, acc, values = state.row_sum, state.acc, v[..., cols, :]
        p, _ = state.step(s[..., cols], values)
        if not habit.rescales_sum:
            state.row_sum = row_sum + p.sum(axis=-1)
        if not habit.rescales_acc:
            state.acc = acc + p @ values
    return state


def recognised(got: Iterable[Any], known: Iterable[tuple[Habit, Iterable[Array]]]) -> str:
    """The habit whose results these are, in words; "" if it is none of them."""
    mine = [arrays.widen(arrays.as_numpy(x), np.float64) for x in got]
    loose = 1e-4 if all(arrays.dtype_name(x) == "float32" for x in got) else 1e-2
    for habit, theirs in known:
        if all(a.shape == b.shape and np.allclose(a, b, loose, loose) for a, b in zip(mine, theirs, strict=True)):
            return f"It looks as if {habit.told}."
    return ""
