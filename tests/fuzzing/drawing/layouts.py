"""How arrays lie in memory, drawn: any strides for tables and gradients, those that kernels take for q, k and v."""

from __future__ import annotations

import numpy as np

from tests.fuzzing.drawing.dice import Choices
from tests.fuzzing.question import Layout, Numbers

# Of (batch, heads, n, d): the last axis is always contiguous.
ROWS = {
    "plain": 4, "heads inside": 3, "one projection": 1, "sliced": 2, "reversed": 1, "padded": 0.5, "odd padding": 0.3,
    "one batch for all": 1, "one head for all": 1, "one row for all": 0.3,
}  # fmt: skip
ALIGNED_ROWS = {"plain": 4, "heads inside": 3, "one projection": 1.5, "padded": 2}
_EXPANDED = {"one batch for all": 0, "one head for all": 1, "one row for all": 2}
_INSIDE = (0, 2, 1, 3)


def rows_layout(dice: Choices, aligned: bool) -> Layout:
    """Of a (batch, heads, n, d) array. aligned: as TMA can load it, if a row has a multiple of 16 bytes."""
    name = dice.weighted(ALIGNED_ROWS if aligned else ROWS)
    page = _at_page(dice)
    aside = 0 if aligned or dice.chance(0.9) else dice.one_of((1, 2, 4, 8))
    if name == "heads inside":
        return Layout(_INSIDE, aside=aside, at_page=page)
    if name == "one projection":  # of q, k and v: rows are three apart
        return Layout(_INSIDE, step=(1, 1, 3, 1), aside=aside, at_page=page)
    if name == "sliced":
        return Layout(step=dice.one_of(((1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1))), aside=aside, at_page=page)
    if name == "reversed":
        return Layout(reversed=dice.one_of(((0,), (1,), (2,), (0, 1, 2))), aside=aside, at_page=page)
    if name in ("padded", "odd padding"):
        return Layout(dice.one_of(((), _INSIDE)), padding=16 if name == "padded" else 1, aside=aside, at_page=page)
    expanded = (_EXPANDED[name],) if name in _EXPANDED else ()
    return Layout(expanded=expanded, aside=aside, at_page=page)


def any_layout(dice: Choices, shape: tuple[int, ...]) -> Layout:
    """Of a table or a gradient, whose every axis may have any stride."""
    name = dice.weighted({"plain": 5, "turned": 1, "reversed": 1, "steps": 1, "expanded": 0.5, "read-only": 1})
    axes, page = range(len(shape)), _at_page(dice)
    aside = dice.one_of((1, 2, 8)) if dice.chance(0.05) else 0
    if not shape or name in ("plain", "read-only"):
        return Layout(aside=aside, at_page=page, writeable=name != "read-only")
    if name == "turned":
        return Layout(tuple(reversed(axes)), aside=aside, at_page=page)
    if name == "reversed":
        every = tuple(axes)
        return Layout(reversed=every if dice.chance(0.5) else (dice.one_of(every),), aside=aside, at_page=page)
    if name == "steps":
        return Layout(step=tuple(1 + dice.below(2) for _ in axes), aside=aside, at_page=page)
    return Layout(expanded=(dice.below(len(shape)),), aside=aside, at_page=page)


def fitted(values: Numbers, layout: Layout) -> Numbers:
    """The numbers of an array that lies so: the same ones along an axis of stride 0."""
    for axis in layout.expanded:
        values = np.repeat(values.take([0], axis), values.shape[axis], axis) if values.shape[axis] else values
    return values


def _at_page(dice: Choices) -> str:
    return dice.weighted({"end": 5, "begin": 2, "": 3})
