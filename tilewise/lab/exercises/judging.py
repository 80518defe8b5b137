"""What is told of a result: right, or where it is wrong first, how far off, and which mistake it looks like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from tilewise import arrays, contract, validate
from tilewise.arrays import Array
from tilewise.contract import ContractError, Expected
from tilewise.lab.blocks import blocks
from tilewise.softmax import State
from tilewise.validate import Call


class WrongError(Exception):
    """What a learner's code did wrong, in words for the learner."""


@dataclass(frozen=True)
class Habit:
    """What a mistaken attention leaves out. Its result is known, so that a learner's can be recognised."""

    told: str
    scales: bool = True
    masks: bool = True
    rescales_sum: bool = True
    rescales_acc: bool = True
    carries_on: bool = True
    divides: bool = True


HABITS = (
    Habit("row_sum and acc are not rescaled when a larger maximum comes. rescale = exp(old maximum - new maximum) "
          "needs both: take it before row_max is overwritten", rescales_sum=False, rescales_acc=False),
    Habit("acc is rescaled when a larger maximum comes, row_sum is not. The same factor belongs to both, taken before "
          "row_max is overwritten", rescales_sum=False),
    Habit("row_sum is rescaled when a larger maximum comes, acc is not. The same factor belongs to both",
          rescales_acc=False),
    Habit("scores are not scaled by 1 / sqrt(d)", scales=False),
    Habit("the mask is forgotten: keys count that may not be seen", masks=False),
    Habit("acc is not divided by row_sum at the end", divides=False),
    Habit("row_max, row_sum and acc begin anew with every block of keys: they belong before the loop",
          carries_on=False),
)  # fmt: skip


def after(s: Array, v: Array, block: int, habit: Habit) -> State:
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


@dataclass(frozen=True, eq=False)
class Problem:
    """An attention for learners' kernels: q, k, v (batch, heads, n, d), and how many keys a kernel takes at a time."""

    about: str
    q: Array
    k: Array
    v: Array
    block: int
    causal: bool = False
    skipped_by: int = (
        0  # queries that share a block which is skipped if they see nothing of it; 0: all keys are visited
    )
    told: str = ""  # what to think of if it is wrong, and no habit explains it

    @classmethod
    def random(cls, about: str, shape: Sequence[int], dtype: str = "float32", **options: Any) -> Problem:
        """shape: batch, heads, n_q, n_k, d, d_v. Scores are wide apart, so that row_max grows in later blocks."""
        batch, heads, n_q, n_k, d, d_v = shape
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((batch, heads, *size)) for size in ((n_q, d), (n_k, d), (n_k, d_v)))
        q, k, v = (arrays.narrow(x, dtype) for x in (2 * q, k, v))
        return cls(about, q, k, v, **options)

    @cached_property
    def call(self) -> Call:
        return validate.prepare(self.q, self.k, self.v, causal=self.causal)

    def check(self, got: Any) -> None:
        """got: the output, (batch, heads, n, d)."""
        expected = next(x for x in contract.expected_forward(self.call) if x.what == "out")
        compare(self.about, expected, got, recognised(got, self._mistaken()) or self.told)

    def _mistaken(self) -> Iterator[tuple[str, Array]]:
        q, k, v = (arrays.widen(x, np.float64) for x in (self.q, self.k, self.v))
        for habit in HABITS:
            s = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if habit.scales else 1)
            state = after(np.where(self._seen(habit.masks), s, -np.inf), v, self.block, habit)
            yield habit.told, state.finish().out if habit.divides else state.acc

    def _seen(self, masks: bool) -> Array:
        """Who sees which key (n_q, n_k); without a mask every key of the blocks that are visited."""
        n_q, n_k = self.q.shape[2], self.k.shape[2]
        seen: Array = np.ones((n_q, n_k), bool)
        if self.causal and (masks or self.skipped_by):
            seen = np.arange(n_k) <= np.arange(n_q)[:, None] + n_k - n_q
        if not masks and self.skipped_by:
            for rows, cols in product(blocks(n_q, self.skipped_by), blocks(n_k, self.block)):
                seen[rows, cols] = seen[rows, cols].any()
        return seen


def recognised(got: Any, mistaken: Iterator[tuple[str, Array]]) -> str:
    """The mistake that leads to this result; "" if it is none of these."""
    try:
        wide = arrays.widen(arrays.as_numpy(got), np.float64)
    except Exception:  # it is no array at all, as will be told
        return ""
    loose = 1e-4 if arrays.dtype_name(got) == "float32" else 1e-2
    alike = (told for told, x in mistaken if x.shape == wide.shape and np.allclose(wide, x, rtol=loose, atol=loose))
    return next((f"It looks as if {told}." for told in alike), "")


def compare(about: str, expected: Expected, got: Any, told: str = "") -> None:
    """WrongError if a result is outside the contract; told: what may be the reason."""
    try:
        errors = expected.errors(got)
    except (ContractError, AttributeError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, ContractError) else f"expected an array, came {type(got).__name__}"
        raise WrongError("\n".join(filter(None, [f"{about}: {reason}", _first_nan(expected, got), told]))) from None
    if errors.max(initial=0) <= expected.limit:
        return
    by_row = errors.max(axis=-1) if expected.what in ("out", "acc", "p") else errors
    wrong = np.argwhere(by_row > expected.limit)
    at = tuple(wrong[0])
    lines = [
        f"{about}: {expected.what}, {_place(at)}: expected {_numbers(expected.exact[at])}, came {_numbers(got[at])}",
        f"{len(wrong)} of {by_row.size} rows are wrong; the largest error is {errors.max():.3g}, "
        f"the contract allows {expected.limit:.3g}",
    ]
    raise WrongError("\n".join(filter(None, [*lines, told])))


def _first_nan(expected: Expected, got: Any) -> str:
    if getattr(got, "shape", None) != expected.exact.shape:
        return ""
    wide = arrays.widen(arrays.as_numpy(got), np.float64)
    wrong = np.argwhere(~np.isfinite(wide) & np.isfinite(expected.exact))
    if not len(wrong):
        return ""
    at = tuple(wrong[0][: 3 if wide.ndim == 4 else 1])
    return f"first in {_place(at)}: expected {_numbers(expected.exact[at])}, came {_numbers(got[at])}"


def _place(at: tuple[int, ...]) -> str:
    names = ("batch", "head", "row")[-len(at) :]
    return ", ".join(f"{name} {i}" for name, i in zip(names, at, strict=True))


def _numbers(x: Any) -> str:
    values = np.ravel(arrays.widen(arrays.as_numpy(x), np.float64))
    shown = " ".join(f"{value:.4g}" for value in values[:4])
    return f"{shown} ..." if len(values) > 4 else shown
