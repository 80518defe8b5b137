"""What a warp's lanes have of matrices, in registers; and matrices in shared memory, as descriptors tell of them."""

from __future__ import annotations

import numpy as np

from tests.cute.simulator.arithmetic import widened
from tests.cute.simulator.memory import SHARED, Shared
from tests.cute.simulator.values import LANE, Numbers

_ROW, _PAIR = (LANE // 4).astype(int), (LANE % 4 * 2).astype(int)


def in_shared(shared: Shared, descriptor: int, rows: int, across: bool, element: str) -> Numbers:
    """(rows, 16) of a tile. across: its rows lie side by side."""
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    if descriptor >> 62 != 1:
        raise ValueError(f"expected rows of 128 bytes whose chunks change places, got {descriptor:#x}")
    row, k = np.ogrid[:rows, :16]
    if across:
        at = start + k // 8 * stride + k % 8 * 128 + row // 64 * leading + row % 64 * 2
    else:
        at = start + row // 8 * stride + row % 8 * 128 + k * 2
    at = (at ^ (at >> 7 & 7) << 4) - SHARED
    return widened(shared.content[at].astype(np.uint16) | shared.content[at + 1].astype(np.uint16) << 8, element)


def first_operand(registers: list[Numbers], element: str) -> Numbers:
    """(16, 16), two numbers a register."""
    made = np.empty((16, 16), np.float32)
    for i, both in enumerate(registers):
        for half in range(2):
            made[_ROW + 8 * (i % 2), _PAIR + 8 * (i // 2) + half] = _half(both, half, element)
    return made


def second_operand(registers: list[Numbers], element: str) -> Numbers:
    """(8, 16): column by column."""
    made = np.empty((8, 16), np.float32)
    for i, both in enumerate(registers):
        for half in range(2):
            made[_ROW, _PAIR + 8 * i + half] = _half(both, half, element)
    return made


def _half(both: Numbers, half: int, element: str) -> Numbers:
    return widened((both >> np.uint32(16 * half)).astype(np.uint16), element)


def gathered(registers: list[Numbers]) -> Numbers:
    """A result's 16 rows: of each eight columns a lane has two, of two rows."""
    made = np.empty((16, len(registers) * 2), np.float32)
    for i, numbers in enumerate(registers):
        made[_ROW + i // 2 % 2 * 8, _PAIR + i // 4 * 8 + i % 2] = numbers.view(np.float32)
    return made


def scattered(result: Numbers) -> list[Numbers]:
    """The other way round."""
    places = [(_ROW + i // 2 % 2 * 8, _PAIR + i // 4 * 8 + i % 2) for i in range(result.shape[1] // 2)]
    return [result[place].astype(np.float32).view(np.uint32) for place in places]
