"""How arrays of a call lie in memory: strides that attention meets in programs, in NumPy and in PyTorch alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array

EXPANDED = {"one batch entry, expanded": 0, "one head, expanded": 1}
FAR = "heads beyond 2^31 elements"
LARGE = "arrays beyond 2^31 elements"
LAYOUTS = {
    "packed": "(batch, heads, n, d)",
    "heads inside": "(batch, n, heads, d), transposed",
    "sliced": "a slice of a longer and wider array, whose other numbers are NaN",
    "one element in": "a storage offset of one element",
    "columns first": "(batch, heads, d, n), transposed: the last dimension is not contiguous",
    **dict.fromkeys(EXPANDED, "stride 0"),
    FAR: "the second head begins beyond what 32 bits can count",
    LARGE: "packed; three of its heads hold the numbers, the last two beyond that, and all others are 0",
}
BEYOND = 2**31
_APART = BEYOND + 64


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


def as_tensors(given: Sequence[Array], layout: str, device: str) -> list[Any]:
    """Tensors of these numbers that lie so. What is not part of them is NaN, so that a read beyond them shows.

    Far ones share their memory, gigabytes of which only the pages that are touched are taken on a CPU.
    """
    import torch

    if layout == LARGE:
        return [_among_zeros(x, device) for x in given]
    small = [arrays.as_tensor(np.ascontiguousarray(x)).to(device) for x in given]
    places = [place(layout, x.shape) for x in given]
    if layout != FAR:
        rooms = [
            torch.full((at.room,), float("nan"), dtype=x.dtype, device=device)
            for at, x in zip(places, small, strict=True)
        ]
        return [_written(x, room, at, at.first) for x, room, at in zip(small, rooms, places, strict=True)]
    gap = _aligned(max(x.size for x in given))
    shared = torch.empty(len(given) * gap + max(at.room for at in places), dtype=small[0].dtype, device=device)
    return [_written(x, shared, at, i * gap) for i, (x, at) in enumerate(zip(small, places, strict=True))]


def large_heads(n: int, d: int) -> tuple[int, list[int]]:
    """How many heads reach beyond, and which of them hold numbers."""
    heads = BEYOND // (n * d) + 3
    return heads, [0, heads - 2, heads - 1]


def _among_zeros(x: Array, device: str) -> Any:
    import torch

    heads, places = large_heads(*x.shape[2:])
    small = arrays.as_tensor(np.ascontiguousarray(x)).to(device)
    full = torch.zeros((x.shape[0], heads, *x.shape[2:]), dtype=small.dtype, device=device)
    full[:, places] = small
    return full


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _written(x: Any, room: Any, at: Place, first: int) -> Any:
    made = room.as_strided(x.shape, at.strides, first)
    strides = zip(at.strides, x.shape, strict=True)
    once = tuple(slice(None) if stride or size == 1 else slice(1) for stride, size in strides)
    made[once].copy_(x[once])
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
