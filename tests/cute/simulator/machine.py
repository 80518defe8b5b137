"""Blocks, their warps, and who goes on next."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.cute.simulator import fragments
from tests.cute.simulator.memory import SHARED, Map, Memory, Shared
from tests.cute.simulator.values import LANE, LANES, Numbers, Registers, put

WAITS = -1  # what a step gives that is to be taken again later
Jump = tuple[int, Numbers | None]  # where some lanes go on, or all; at -1 they end
Step = Callable[["Warp", "Numbers | None"], "Jump | int | None"]
_NOT_YET = np.full(LANES, 0x7FC00000, np.uint32)  # NaN: the result of a product that was not waited for


class StuckError(RuntimeError):
    """All wait for each other."""


@dataclass(frozen=True)
class Code:
    step: Step
    meets: bool  # all lanes of a warp take it together
    text: str


@dataclass(eq=False)
class Product:
    """Of 16 rows, by a warpgroup: under way until it is waited for."""

    of: list[str]  # registers of the result
    sums: list[Numbers | tuple[Product, int]]  # what it is added to: numbers, or a number of another product's
    adds: bool
    a: Callable[[], Numbers]
    b: Callable[[], Numbers]
    made: list[Numbers] | None = None

    def result(self) -> list[Numbers]:
        if self.made is None:
            product = self.a() @ self.b().T
            if self.adds:
                product = product + fragments.gathered(
                    [x if isinstance(x, np.ndarray) else x[0].result()[x[1]] for x in self.sums]
                )
            self.made = fragments.scattered(product)
        return self.made


@dataclass(eq=False)
class Warp:
    block: Block
    number: int
    registers: Registers
    groups: dict[int, Numbers] = field(default_factory=lambda: {0: np.full(LANES, True)})  # lanes, by where they are
    waiting: tuple[int, int] | None = None  # at a named barrier, in one of its generations
    opened: list[Product] = field(default_factory=list)
    committed: list[list[Product]] = field(default_factory=list)
    flying: dict[str, tuple[Product, int]] = field(default_factory=dict)  # what registers will have

    def write(self, name: str, numbers: Numbers, lanes: Numbers | None) -> None:
        if name in self.flying:
            raise RuntimeError(f"{name} is written while a product is under way")
        put(self.registers, name, numbers, lanes)

    # -- products of a warpgroup --------------------------------------------------------------------------------------
    def begin_product(self, product: Product) -> None:
        for i, name in enumerate(product.of):
            self.flying[name] = product, i
            self.registers[name] = _NOT_YET
        self.opened.append(product)
        if self.block.grid.chance.random() < 0.5:  # tiles are read at once, or when it is waited for
            product.result()

    def commit(self) -> None:
        self.committed.append(self.opened)
        self.opened = []

    def wait_for_products(self, left: int) -> None:
        """All but the last so many groups."""
        while len(self.committed) > left:
            for product in self.committed.pop(0):
                for i, (name, numbers) in enumerate(zip(product.of, product.result(), strict=True)):
                    if self.flying.get(name) == (product, i):
                        self.registers[name] = numbers
                        del self.flying[name]

    # -- one instruction after the other ------------------------------------------------------------------------------
    def run(self, code: list[Code], most: int) -> int:
        """Up to so many; how many were taken before it has to wait."""
        for count in range(most):
            if not self.groups:
                return count
            at, lanes = self._next(code)
            result = code[at].step(self, None if lanes.all() else lanes)
            if result == WAITS:
                return count
            del self.groups[at]
            target, takers = (at + 1, None) if result is None else result
            takers = lanes if takers is None else takers & lanes
            self._go(target, takers)
            self._go(at + 1, lanes & ~takers)
        return most

    def _next(self, code: list[Code]) -> tuple[int, Numbers]:
        """The lanes that are furthest behind, unless they wait for others."""
        for at in sorted(self.groups):
            if len(self.groups) == 1 or not code[at].meets:
                return at, self.groups[at]
        raise StuckError(f"lanes of a warp are apart: {[code[at].text for at in self.groups]}")

    def _go(self, at: int, lanes: Numbers) -> None:
        if at >= 0 and lanes.any():
            self.groups[at] = self.groups[at] | lanes if at in self.groups else lanes


@dataclass(eq=False)
class Block:
    grid: Grid
    number: int
    shared: Shared = field(default_factory=Shared)
    copies: list[tuple[Map, tuple[int, ...], int, int]] = field(default_factory=list)  # under way

    def __post_init__(self) -> None:
        self.warps = [Warp(self, i, self._registers(i)) for i in range(self.grid.threads // LANES)]

    def _registers(self, warp: int) -> Registers:
        first, same = LANE + np.uint32(warp * LANES), np.zeros(LANES, np.uint32)
        row, number = divmod(self.number, self.grid.blocks)
        numbers = {"%ctaid.x": number, "%ctaid.y": row, "%nctaid.x": self.grid.blocks}
        return {"%tid.x": first, "%laneid": LANE, **{name: same + np.uint32(x) for name, x in numbers.items()}}

    def copy(self, map_: Map, at: tuple[int, ...], to: int, barrier: int) -> None:
        """What was there is gone from now on, and what comes is there later."""
        self.shared.content[to - SHARED : to - SHARED + map_.bytes] = 0xFF
        self.copies.append((map_, at, to, barrier))

    def land(self) -> None:
        """One of the copies that are under way."""
        map_, at, to, barrier = self.copies.pop(self.grid.chance.randrange(len(self.copies)))
        self.shared.content[map_.swizzled(to) - SHARED] = map_.brought(self.grid.memory, at)
        self.shared.barriers[barrier].expected -= map_.bytes
        self.shared.barriers[barrier].look()


@dataclass(eq=False)
class Grid:
    code: list[Code]
    threads: int  # of a block
    blocks: int
    memory: Memory
    chance: random.Random
    rows: int = 1  # of so many blocks

    def run(self) -> None:
        """Until all warps have ended."""
        blocks = [Block(self, i) for i in range(self.blocks * self.rows)]
        warps = [warp for block in blocks for warp in block.warps]
        in_vain = 0  # turns, one after the other
        while warps:
            under_way = [block for block in blocks if block.copies]
            if under_way and (in_vain > len(warps) or self.chance.random() < 0.2):
                self.chance.choice(under_way).land()
                in_vain = 0
            warp = warps[in_vain % len(warps)] if in_vain > 2 * len(warps) else self.chance.choice(warps)
            in_vain = 0 if warp.run(self.code, self.chance.choice((1, 30, 1000))) else in_vain + 1
            if not warp.groups:
                warps.remove(warp)
            if in_vain > 4 * len(warps) + 4 and not under_way:
                raise StuckError("\n".join(self._told(warp) for warp in warps))

    def _told(self, warp: Warp) -> str:
        where = "; ".join(self.code[at].text for at in warp.groups)
        barriers = {address: (x.phase, x.pending, x.expected) for address, x in warp.block.shared.barriers.items()}
        return f"block {warp.block.number}, warp {warp.number} waits at {where}; barriers {barriers}"
