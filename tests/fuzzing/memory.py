"""Arrays in hostile places: any strides, at an offset, up against a page that must not be touched.

A kernel that reads or writes beyond an array crashes here, instead of going unnoticed.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np

from tests.fuzzing.dice import Dice
from tilewise import arrays
from tilewise.arrays import Array

ROOM = 1 << 20  # bytes between two guard pages; larger arrays are allocated as usual
ROOMS = 24
PROT_NONE = 0  # which the mmap module does not name
LAYOUTS = {
    "plain": 4, "heads inside": 3, "sliced": 2, "reversed": 1, "one batch for all": 1, "one head for all": 1,
    "one row for all": 0.3, "odd steps": 0.3,
}  # fmt: skip
ALIGNED_LAYOUTS = {"plain": 4, "heads inside": 3, "padded": 2}


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

    def _forbid(self, offset: int) -> None:
        """Any access to this page ends the process from now on."""
        address, size = ctypes.c_void_p(self._bytes.ctypes.data + offset), ctypes.c_size_t(self._page)
        if sys.platform != "win32" and ctypes.CDLL(None, use_errno=True).mprotect(address, size, PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect failed")

    def keep(self, values: Array, dice: Dice, aligned: bool = False) -> Array:
        """A copy of these values that ends, or begins, where a guard page begins, or ends.

        aligned: what has a multiple of 16 bytes begins at one.
        """
        free = len(self.used) < ROOMS and 0 < values.nbytes < ROOM
        if not free or dice.chance(0.3):
            kept = np.array(values)
        else:
            room = self._rooms[len(self.used)]
            # At times an address that no number of several bytes belongs at.
            aside = 1 if not aligned and dice.chance(0.03) else 0
            start = room + ROOM - values.nbytes - aside if dice.chance(0.7) else room + aside
            kept = self._bytes[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
            kept[...] = values
        self.used.append(kept)
        return kept


def store(values: Array, dtype: str, memory: Memory, dice: Dice, aligned: bool = False) -> Array:
    return memory.keep(arrays.narrow(values, dtype), dice, aligned)


def laid_out(values: Array, dtype: str, memory: Memory, dice: Dice, aligned: bool = False) -> Array:
    """(batch, heads, n, d) values stored in a type, in any layout whose last dimension is contiguous.

    aligned: in one that TMA can load, if a row has a multiple of 16 bytes.
    """
    layout = dice.weighted(ALIGNED_LAYOUTS if aligned else LAYOUTS)
    if layout == "heads inside":
        return store(values.swapaxes(1, 2), dtype, memory, dice, aligned).swapaxes(1, 2)
    if layout == "padded":
        b, h, n, d = values.shape
        larger = np.full((b + 1, h + 1, n + 1, d + 24), np.nan)
        larger[1:, :h, :n, 16 : 16 + d] = values
        return store(larger, dtype, memory, dice, aligned)[1:, :h, :n, 16 : 16 + d]
    if layout == "sliced":
        b, h, n, d = values.shape
        larger = np.full((b + 1, h + 1, 2 * n + 1, d + 3), np.nan)  # not even 0 times what lies between is 0
        larger[1:, :h, : 2 * n : 2, 1 : 1 + d] = values
        return store(larger, dtype, memory, dice)[1:, :h, : 2 * n : 2, 1 : 1 + d]
    if layout == "reversed":
        stored = store(values, dtype, memory, dice)
        return stored[dice.one_of([np.s_[::-1], np.s_[:, ::-1], np.s_[:, :, ::-1], np.s_[::-1, ::-1, ::-1]])]
    if layout == "plain":
        return store(values, dtype, memory, dice, aligned)
    if layout == "odd steps":  # rows of records: a byte more than their numbers take
        stored = arrays.narrow(values, dtype)
        row = np.dtype([("numbers", stored.dtype, values.shape[3:]), ("more", np.uint8)])
        records = np.zeros(values.shape[:3], row)
        records["numbers"] = stored
        return memory.keep(records, dice)["numbers"]
    axis = {"one batch for all": 0, "one head for all": 1, "one row for all": 2}[layout]
    first = values[(slice(None),) * axis + (slice(0, 1),)]
    return np.broadcast_to(store(first, dtype, memory, dice), values.shape)


def any_strides(values: Array, dtype: str, memory: Memory, dice: Dice) -> Array:
    """Values of any rank in any layout at all, as a table or a gradient may come."""
    layout = dice.weighted({"plain": 5, "transposed": 1, "reversed": 1, "every other": 1, "read-only": 1})
    if layout == "transposed":
        return store(values.T, dtype, memory, dice).T
    if layout == "reversed":
        return store(values, dtype, memory, dice)[(slice(None, None, -1),) * values.ndim]
    if layout == "every other" and values.ndim:
        apart = np.repeat(values, 2, axis=-1)
        return store(apart, dtype, memory, dice)[..., ::2]
    stored = store(values, dtype, memory, dice)
    if layout == "read-only":
        stored.flags.writeable = False
    return stored


def bits(x: Any) -> bytes:
    return np.ascontiguousarray(arrays.as_numpy(x)).tobytes()
