"""Arrays in hostile places: any strides, at an offset, up against a page that must not be touched, NaN all around.

A kernel that reads or writes beyond an array crashes here, instead of going unnoticed.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np

from tests.fuzzing.question import Given, Layout
from tilewise import arrays
from tilewise.arrays import Array

ROOM = 1 << 20  # bytes between two guard pages; larger arrays are allocated as usual
ROOMS = 24
AROUND = 256  # bytes beside an array in a room; all of them 0xff, which is NaN in every float type
PROT_NONE = 0  # which the mmap module does not name


class Memory:
    """Rooms between guard pages, handed out in turn; `used` is everything handed out since `clear`."""

    def __init__(self) -> None:
        self._page, step = mmap.PAGESIZE, ROOM + mmap.PAGESIZE
        self._map = mmap.mmap(-1, ROOMS * step + self._page)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._rooms = [self._page + i * step for i in range(ROOMS)]
        for room in self._rooms:
            self._forbid(room - self._page)
        self._forbid(self._rooms[-1] + ROOM)
        self.clear()

    def clear(self) -> None:
        self.used: list[Array] = []
        self._taken = 0

    def _forbid(self, offset: int) -> None:
        """Any access to this page ends the process from now on."""
        address, size = ctypes.c_void_p(self._bytes.ctypes.data + offset), ctypes.c_size_t(self._page)
        if sys.platform != "win32" and ctypes.CDLL(None, use_errno=True).mprotect(address, size, PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect failed")

    def place(self, given: Given) -> Array:
        """The array, lying as its layout says."""
        layout, values = given.layout, arrays.narrow(np.asarray(given.values), given.dtype)
        held = values[tuple(slice(0, 1) if axis in layout.expanded else slice(None) for axis in range(values.ndim))]
        placed = np.broadcast_to(self._strided(held, layout), values.shape)
        placed.flags.writeable = layout.writeable and not layout.expanded
        self.used.append(placed)
        return placed

    def _strided(self, values: Array, layout: Layout) -> Array:
        order = layout.order or tuple(range(values.ndim))
        steps = layout.step or (1,) * values.ndim
        sizes = [max((values.shape[axis] - 1) * steps[axis] + 1, 0) for axis in order]
        stored = self._rows(sizes, values.dtype, layout).transpose(np.argsort(order))
        stored = stored[(*(slice(None, None, step) for step in steps), ...)]
        stored = stored[(*(slice(None, None, -1 if i in layout.reversed else 1) for i in range(values.ndim)), ...)]
        stored[...] = values
        return stored

    def _rows(self, sizes: list[int], dtype: np.dtype[Any], layout: Layout) -> Array:
        """Numbers of these sizes, some bytes after each row; all of them NaN."""
        if not sizes or not layout.padding:
            return self._room(sizes, dtype, layout)
        row = np.dtype([("numbers", dtype, sizes[-1:]), ("padding", np.uint8, (layout.padding,))])
        made: Array = self._room(sizes[:-1], row, layout)["numbers"]
        return made

    def _room(self, sizes: list[int], dtype: np.dtype[Any], layout: Layout) -> Array:
        """An array of these sizes in their order, at the place that the layout asks for."""
        count = int(np.prod(sizes, dtype=np.int64)) * dtype.itemsize
        if layout.at_page and 0 < count < ROOM - 16 and self._taken < ROOMS:
            room = self._rooms[self._taken]
            self._taken += 1
            start = room + ROOM - count - layout.aside if layout.at_page == "end" else room + layout.aside
            self._bytes[max(start - AROUND, room) : min(start + count + AROUND, room + ROOM)] = 0xFF
            place = self._bytes
        else:
            place = np.full(count + 32, 0xFF, np.uint8)
            start = -place.ctypes.data % 16 + layout.aside
        return place[start : start + count].view(dtype).reshape(sizes)


def bits(x: Any) -> bytes:
    return np.ascontiguousarray(arrays.as_numpy(x)).tobytes()
