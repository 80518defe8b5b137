"""Arrays that scores read, as far as their layout decides over a kernel's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tilewise import arrays

TABLE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}  # of the cells of tables that come by tiles


@dataclass(frozen=True)
class Table:
    """An array of which a score reads the cell of its query and its key: a tile of it can come along with one of keys.

    Its axes: those of queries and of keys, and the others, which a head chooses.
    """

    cell: str  # of variant::Near
    slot: int
    dtype: str
    q_axis: int
    k_axis: int
    others: tuple[int, ...]


class Axis(NamedTuple):
    """What of an array's layout decides over the text."""

    is_unit: bool  # its numbers lie side by side
    is_copied: bool  # in steps that the copy engine takes: multiples of 16 bytes


def layout(array: Any) -> tuple[Axis, ...]:
    size = array.element_size() if arrays.is_torch(array) else array.itemsize
    steps = [size * step for step in array.stride()] if arrays.is_torch(array) else array.strides
    return tuple(
        Axis(step == size, n == 1 or (step > 0 and step % 16 == 0)) for n, step in zip(array.shape, steps, strict=True)
    )
