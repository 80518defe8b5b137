"""Memory as a kernel sees it: arrays of the host, a block's shared memory, and what the copy engine brings to it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np

from tests.cute.simulator.values import Numbers

SHARED = 1024  # where a block's begins
PARAMETERS = 1 << 60  # addresses from here on are of parameters
# In a descriptor of the copy engine: bytes of numbers, by their type, and of rows whose chunks change places.
_SIZES, _SWIZZLES = {6: 2, 7: 4, 10: 2}, {2: 64, 3: 128}


@dataclass(frozen=True)
class Memory:
    """Arrays of the host, each from one address up to another, and the bytes of all parameters."""

    arrays: list[tuple[int, int]]
    parameters: bytes

    def read(self, address: int, size: int) -> bytes:
        if address >= PARAMETERS:
            return self.parameters[address - PARAMETERS :][:size]
        self._check(address, size)
        return ctypes.string_at(address, size)

    def write(self, address: int, content: bytes) -> None:
        self._check(address, len(content))
        ctypes.memmove(address, content, len(content))

    def _check(self, address: int, size: int) -> None:
        if not any(begin <= address and address + size <= end for begin, end in self.arrays):
            raise IndexError(f"{size} bytes at {address:#x} are of no array")


@dataclass
class Barrier:
    """In shared memory: a phase is over when all have arrived, and all bytes that were told are there."""

    count: int
    pending: int
    phase: int = 0
    expected: int = 0  # bytes

    def arrive(self, count: int = 1) -> None:
        if count > self.pending:
            raise RuntimeError(f"{count} arrive at a barrier that waits for {self.pending} of {self.count}")
        self.pending -= count
        self.look()

    def look(self) -> None:
        if self.pending == 0 and self.expected == 0:
            self.phase, self.pending = self.phase ^ 1, self.count


@dataclass
class Named:
    """A barrier of a block by its number."""

    arrived: int = 0
    generation: int = 0

    def arrive(self, threads: int, of: int) -> None:
        self.arrived += threads
        if self.arrived > of:
            raise RuntimeError(f"{self.arrived} threads at a barrier of {of}")
        if self.arrived == of:
            self.arrived, self.generation = 0, self.generation + 1


@dataclass
class Shared:
    content: Numbers = field(default_factory=lambda: np.full(227 << 10, 0xFF, np.uint8))  # NaN, whatever the type
    barriers: dict[int, Barrier] = field(default_factory=dict)
    named: dict[int, Named] = field(default_factory=dict)

    def places(self, addresses: Numbers, size: int) -> Numbers:
        """Of so many bytes from each address on, in content."""
        at = (addresses.astype(np.int64) - SHARED)[:, None] + np.arange(size)
        if at.min() < 0 or at.max() >= self.content.size or (addresses % size).any():
            raise IndexError(f"{size} bytes of shared memory at {addresses}")
        return at


@dataclass(frozen=True)
class Map:
    """Of the copy engine: an array of which boxes are brought, its dimensions from the innermost on."""

    address: int
    size: int  # of a number, in bytes
    sizes: tuple[int, ...]
    steps: tuple[int, ...]  # in bytes
    box: tuple[int, ...]
    swizzle: int  # bytes of a row

    @classmethod
    def decoded(cls, content: bytes) -> Map:
        """A descriptor, as far as ours differ."""
        words = np.frombuffer(content, np.uint32)
        rank, size = int(words[2] >> 4 & 7) + 1, _SIZES[int(words[2] >> 7 & 15)]
        return cls(
            int(words[0]) | int(words[1]) << 32, size, tuple(int(x) + 1 for x in words[8 : 8 + rank]),
            (size, *(int(x) << 4 for x in words[3 : 2 + rank])), tuple(x + 1 for x in content[55 : 55 + rank]),
            _SWIZZLES[int(words[2] >> 13 & 3)],
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        return self.size * int(np.prod(self.box))

    def brought(self, memory: Memory, at: tuple[int, ...]) -> Numbers:
        """A box as bytes, row by row; what is outside the array is 0."""
        rows = np.zeros((*reversed(self.box), self.size), np.uint8)
        first, last = max(at[0], 0), min(at[0] + self.box[0], self.sizes[0])
        for where in np.ndindex(*self.box[1:]):
            place = [begin + i for begin, i in zip(at[1:], where, strict=True)]
            if first < last and all(0 <= x < n for x, n in zip(place, self.sizes[1:], strict=True)):
                address = self.address + sum(x * step for x, step in zip((first, *place), self.steps, strict=True))
                got = np.frombuffer(memory.read(address, (last - first) * self.size), np.uint8)
                rows[tuple(reversed(where))][first - at[0] : last - at[0]] = got.reshape(-1, self.size)
        return rows.reshape(-1)

    def swizzled(self, address: int) -> Numbers:
        """Where a box's bytes are put: chunks of 16 change places, by the row of 128 that they are in."""
        at = address + np.arange(self.bytes)
        return at ^ ((at >> 7 & (self.swizzle // 16 - 1)) << 4)
