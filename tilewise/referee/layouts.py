"""How arrays of a call lie in memory: strides that attention meets in programs, in NumPy and in PyTorch alike."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array

EXPANDED = {"one batch entry, expanded": 0, "one head, expanded": 1}
FAR = "heads beyond 2^31 elements"
LAYOUTS = {
    "packed": "(batch, heads, n, d)",
    "heads inside": "(batch, n, heads, d), transposed",
    "sliced": "a slice of a longer and wider array, whose other numbers are NaN",
    "one element in": "a storage offset of one element",
    "columns first": "(batch, heads, d, n), transposed: the last dimension is not contiguous",
    **dict.fromkeys(EXPANDED, "stride 0"),
    FAR: "the second head begins beyond what 32 bits can count",
}
_APART = 2**31 + 64


@dataclass(frozen=True)
class Place:
    """Where an array lies: elements that its memory has, its first one, and its strides in elements."""

    room: int
    first: int
    strides: tuple[int, ...]


def place(layout: str, shape: tuple[int, ...]) -> Place:
    b, h, n, d = shape
    if layout == "heads inside":
        return Place(prod(shape), 0, (n * h * d, d, h * d, 1))
    if layout == "sliced":
        row, head = d + 16, (n + 3) * (d + 16)
        return Place(b * h * head, row + 8, (h * head, head, row, 1))
    if layout == "one element in":
        return Place(prod(shape) + 1, 1, (h * n * d, n * d, d, 1))
    if layout == "columns first":
        return Place(prod(shape), 0, (h * n * d, n * d, 1, n))
    if layout in EXPANDED:
        strides = [h * n * d, n * d, d, 1]
        strides[EXPANDED[layout]] = 0
        return Place(prod(shape), 0, tuple(strides))
    if layout == FAR:
        return Place(_APART * (h - 1) + n * d, 0, (0 if b == 1 else _APART * h, _APART, d, 1))
    return Place(prod(shape), 0, (h * n * d, n * d, d, 1))


def as_tensor(x: Array, layout: str, device: str) -> Any:
    """A tensor of these numbers that lies so. What is not part of it is NaN, so that a read beyond it shows."""
    import torch

    at, small = place(layout, x.shape), arrays.as_tensor(np.ascontiguousarray(x)).to(device)
    room = torch.empty(at.room, dtype=small.dtype, device=device)
    if layout != FAR:  # of which only pages that are touched take memory
        room.fill_(float("nan"))
    made = room.as_strided(x.shape, at.strides, at.first)
    written = tuple(
        slice(None) if stride or size == 1 else slice(1) for stride, size in zip(at.strides, x.shape, strict=True)
    )
    made[written].copy_(small[written])
    return made


def as_array(x: Array, layout: str) -> Array:
    """The same of NumPy."""
    at = place(layout, x.shape)
    room = np.empty(at.room, x.dtype)
    if layout != FAR:
        room[...] = arrays.narrow(np.full(1, np.nan), arrays.dtype_name(x))
    begin, steps = room[at.first :], tuple(step * x.itemsize for step in at.strides)
    made: Array = np.ndarray(x.shape, x.dtype, begin, strides=steps) if x.size else x
    np.copyto(made, x) if made.size else None
    return made
