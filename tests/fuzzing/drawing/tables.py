"""Arrays that texts read: asked for when a text is drawn, filled when the call's sizes are known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.fuzzing.drawing.dice import Choices, Dice
from tests.fuzzing.drawing.layouts import any_layout, fitted
from tests.fuzzing.question import FLOATS, INTEGERS, Given, Numbers

ANY = ""  # a size that no variable gives
Sizes = dict[str, int]  # how many values each of B, H, HK, Q, K, QP, KP has
HASH = np.int64(0x9E3779B97F4A7C15 - 2**64)  # numbers times it wrap around, and none meets another
_LIMITS = {dtype: (np.iinfo(dtype).min, np.iinfo(dtype).max) for dtype in INTEGERS}
_FEW = 12  # the most places along an axis of any size, if there are others


@dataclass(frozen=True, eq=False)
class Table:
    """dims: for each axis the variable whose places it has, a size, or ANY.

    fill: "normal", "masked" (some are -inf), "slopes" (those that ALiBi's paper gives), "small" whole numbers, "wide"
    ones that 32 bits do not hold, "ids" and "hashes" (which rise along the last axis), "places" (positions of keys),
    "truth". like: the number of a table that has the same values.
    """

    dims: tuple[str | int, ...]
    dtype: str
    fill: str
    share: float = 0.5  # of what is true
    values: Any = None  # if they are known
    like: int | None = None
    wants_gradient: bool = False

    @property
    def is_reusable(self) -> bool:
        """Whether its numbers may be read at any place, for any purpose."""
        return self.fill in ("normal", "small", "truth")


def any_table(dice: Choices, kind: str, dims: tuple[str | int, ...]) -> Table:
    """Of a kind of numbers, in any type that has them."""
    if kind == "bool":
        return Table(dims, "bool", "truth", share=dice.one_of((0.1, 0.5, 0.9)))
    if kind == "int":
        return Table(dims, dice.one_of(INTEGERS), "small")
    return Table(dims, dice.one_of(FLOATS), "normal", wants_gradient=dice.chance(0.4))


def filled(tables: list[Table], sizes: Sizes, dice: Dice) -> tuple[Given, ...]:
    """The arrays, in any strides: those that are alike have the same numbers in layouts of their own."""
    made: list[Given] = []
    for table in tables:
        values = made[table.like].values if table.like is not None else _values(table, sizes, dice)
        layout = any_layout(dice, values.shape)
        if table.like is None and table.fill != "slopes" and table.values is None:
            values = fitted(values, layout)
        else:
            layout = replace(layout, expanded=())
        made.append(Given(values, table.dtype, layout, table.wants_gradient))
    return tuple(made)


def _values(table: Table, sizes: Sizes, dice: Dice) -> Numbers:
    if table.values is not None:
        return np.asarray(table.values)
    most = 60 if len(table.dims) == 1 else _FEW if len(table.dims) == 2 else 6
    shape = tuple(
        dice.between(1, most) if name == ANY else sizes[name] if isinstance(name, str) else name for name in table.dims
    )
    if table.fill == "truth":
        return dice.integers(1, 100, shape) <= 100 * table.share
    if table.fill == "slopes":
        return published_slopes(shape[0])
    if table.fill in ("normal", "masked"):
        values = dice.normal(shape)
        if table.fill == "masked":
            values[dice.normal(shape) > 0.5] = -np.inf
        return rounded(values, table.dtype)
    if table.fill == "places":
        values = dice.integers(0, max(sizes["K"], 1), shape)
    elif table.fill == "wide":
        return 2**40 + 2**32 * dice.integers(0, 2, shape) + dice.integers(-3, 9, shape)
    elif table.fill == "small":
        values = dice.integers(-3, 9, shape)
    else:
        values = np.sort(dice.integers(-2, dice.between(0, 6), shape), axis=-1)
    if table.fill == "hashes":
        return np.sort(values * HASH, axis=-1)
    return np.clip(values, *_LIMITS[table.dtype])


def rounded(values: Numbers, dtype: str) -> Numbers:
    """float64 numbers that the type can hold."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(dtype).astype(np.float64)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    to_even = bits + (0x7FFF + ((bits >> 16) & 1))
    kept = np.where(np.isfinite(values), to_even & np.uint32(0xFFFF0000), bits)
    return kept.astype(np.uint32).view(np.float32).astype(np.float64).reshape(values.shape)


def published_slopes(heads: int) -> Numbers:
    """ALiBi's: powers of 2 ** (-8 / heads); if heads is no power of 2, every other one of the next power is added."""
    lower = 1
    while 2 * lower <= heads:
        lower *= 2
    slopes = [2.0 ** (-8 * (i + 1) / lower) for i in range(lower)]
    slopes += [2.0 ** (-4 * (2 * i + 1) / lower) for i in range(heads - lower)]
    return rounded(np.array(slopes), "float32")
