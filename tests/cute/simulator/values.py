"""Registers of a warp: 32 numbers each, one a lane; and operands of instructions as numbers."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[Any]]
Registers = dict[str, Numbers]
Read = Callable[[Registers], Numbers]

LANES = 32
LANE = np.arange(LANES, dtype=np.uint32)
TYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind) for name, kind in {
        "s8": "i1", "s16": "i2", "s32": "i4", "s64": "i8", "u16": "u2", "u32": "u4", "u64": "u8", "b16": "u2",
        "b32": "u4", "b64": "u8", "b8": "u1", "u8": "u1", "f32": "f4", "pred": "?",
    }.items()
}  # fmt: skip
_KEPT = {"%rs": "b16", "%rd": "b64", "%r": "b32", "%f": "b32"}  # by how names of registers begin
_ADDRESS = re.compile(r"\[(\S+?)(?:\+(-?\d+))?\]")


def kept(name: str) -> np.dtype[Any]:
    """How a register has its numbers."""
    return next((TYPES[kind] for prefix, kind in _KEPT.items() if name.startswith(prefix)), TYPES["pred"])


def put(registers: Registers, name: str, numbers: Numbers, lanes: Numbers | None) -> None:
    """lanes: that write, or None if all do."""
    kind = kept(name)
    if numbers.dtype != kind:
        numbers = numbers.view(kind) if numbers.dtype.itemsize == kind.itemsize else numbers.astype(kind)
    if lanes is not None:
        numbers = np.where(lanes, numbers, registers[name] if name in registers else np.zeros(LANES, kind))
    registers[name] = numbers


class Reader:
    """symbols: addresses, by names."""

    def __init__(self, symbols: dict[str, int]) -> None:
        self.symbols = symbols

    def numbers(self, operand: str, type_: str) -> Read:
        """An operand as numbers of a type: a register, or a constant."""
        wanted = TYPES[type_]
        constant = self._constant(operand, wanted)
        if constant is not None:
            return lambda registers: constant
        if kept(operand).itemsize == wanted.itemsize:
            return lambda registers: registers[operand].view(wanted)
        return lambda registers: registers[operand].astype(wanted)

    def _constant(self, operand: str, wanted: np.dtype[Any]) -> Numbers | None:
        if operand.startswith("0f"):
            (number,) = struct.unpack(">I", bytes.fromhex(operand[2:]))
        elif operand in self.symbols:
            number = self.symbols[operand]
        elif operand.lstrip("-")[0].isdigit():
            number = int(operand, 0)
        else:
            return None
        bits = number & (1 << 8 * wanted.itemsize) - 1
        return np.full(LANES, bits, np.dtype(f"u{wanted.itemsize}")).view(wanted)

    def address(self, operand: str, type_: str = "u32") -> Read:
        """[base+offset]; those of shared memory have 32 bits."""
        base, offset = _ADDRESS.fullmatch(operand).groups()  # type: ignore[union-attr]
        begin, more = self.numbers(base, type_), self.numbers(offset or "0", type_)
        return lambda registers: begin(registers) + more(registers)


def listed(operand: str) -> list[str]:
    """{a, b}"""
    return [x.strip() for x in operand.strip("{}").split(",")]
