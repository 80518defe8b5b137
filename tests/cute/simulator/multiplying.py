"""Instructions that multiply matrices: by warpgroups (wgmma), of which a warp has 16 rows, and by warps (mma)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from tests.cute.simulator import fragments
from tests.cute.simulator.machine import Product, Step, Warp
from tests.cute.simulator.values import LANE, LANES, Numbers, Reader, listed


def _begin(reader: Reader, name: str, given: Sequence[str]) -> Step:
    """{sums}, a, b, adds, ..., whether b lies across. a is in registers, or told by a descriptor as b is."""
    shape, _, element = name.split(".")[4:7]
    columns, of, of_a = int(re.findall(r"n(\d+)k", shape)[0]), listed(given[0]), listed(given[1])
    is_across, adds, b = given[-1] == "1", reader.numbers(given[3], "pred"), reader.numbers(given[2], "u64")
    a = reader.numbers(given[1], "u64") if len(of_a) == 1 else None

    def step(warp: Warp, lanes: Numbers | None) -> None:
        shared, registers = warp.block.shared, warp.registers
        at_a, at_b = (None if x is None else int(x(registers)[0]) for x in (a, b))

        def first() -> Numbers:
            if at_a is None:
                return fragments.first_operand([registers[x] for x in of_a], element)
            return fragments.in_shared(shared, at_a, 64, False, element)[warp.number % 4 * 16 :][:16]

        def second() -> Numbers:
            return fragments.in_shared(shared, int(at_b or 0), columns, is_across, element)

        nothing = np.zeros(LANES, np.uint32)
        sums = [warp.flying.get(x) or registers.get(x, nothing) for x in of]
        warp.begin_product(Product(of, sums, bool(adds(registers)[0]), first, second))

    return step


def _commit(reader: Reader, name: str, given: Sequence[str]) -> Step:
    return lambda warp, lanes: warp.commit()


def _wait(reader: Reader, name: str, given: Sequence[str]) -> Step:
    left = int(given[0])
    return lambda warp, lanes: warp.wait_for_products(left)


def _matrices(reader: Reader, name: str, given: Sequence[str]) -> Step:
    """Matrices of 8 x 8, of whose rows each lane tells one."""
    targets, address, is_turned = listed(given[0]), reader.address(given[1]), ".trans" in name

    def step(warp: Warp, lanes: Numbers | None) -> None:
        shared = warp.block.shared
        rows = np.ascontiguousarray(shared.content[shared.places(address(warp.registers), 16)]).view(np.uint16)
        for i, target in enumerate(targets):
            matrix = rows[8 * i : 8 * i + 8].T if is_turned else rows[8 * i : 8 * i + 8]
            low, high = (matrix[LANE // 4, LANE % 4 * 2 + j].astype(np.uint32) for j in range(2))
            warp.write(target, low | high << 16, lanes)

    return step


def _at_once(reader: Reader, name: str, given: Sequence[str]) -> Step:
    element, (of, a, b, c) = name.split(".")[7], map(listed, given)
    reads = [reader.numbers(x, "u32") for x in c]

    def step(warp: Warp, lanes: Numbers | None) -> None:
        registers = warp.registers
        first = fragments.first_operand([registers[x] for x in a], element)
        second = fragments.second_operand([registers[x] for x in b], element)
        result = first @ second.T + fragments.gathered([read(registers) for read in reads])
        for target, numbers in zip(of, fragments.scattered(result), strict=True):
            warp.write(target, numbers, lanes)

    return step


MAKERS = {
    "wgmma.mma_async": _begin, "wgmma.commit": _commit, "wgmma.wait": _wait, "ldmatrix": _matrices,
    "mma.sync": _at_once,
}  # fmt: skip
