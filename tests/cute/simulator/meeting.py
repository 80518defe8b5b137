"""Instructions by which lanes, warps and the copy engine meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.cute.simulator.machine import WAITS, Step, Warp
from tests.cute.simulator.memory import Barrier, Named
from tests.cute.simulator.transfers import active
from tests.cute.simulator.values import LANE, LANES, Numbers, Reader

MOST_NAMED = 16


def _shuffle(reader: Reader, name: str, given: Sequence[str]) -> Step:
    read, offset = reader.numbers(given[1], "u32"), reader.numbers(given[2], "u32")
    is_crosswise = ".bfly." in name

    def step(warp: Warp, lanes: Numbers | None) -> None:
        other = LANE ^ offset(warp.registers) if is_crosswise else offset(warp.registers) % LANES
        warp.write(given[0], read(warp.registers)[other], lanes)

    return step


def _vote(reader: Reader, name: str, given: Sequence[str]) -> Step:
    read = reader.numbers(given[1], "pred")
    return lambda warp, lanes: warp.write(given[0], np.full(LANES, read(warp.registers).any()), lanes)


def _elect(reader: Reader, name: str, given: Sequence[str]) -> Step:
    lane, chosen = given[0].split("|")

    def step(warp: Warp, lanes: Numbers | None) -> None:
        warp.write(lane, np.zeros(LANES, np.uint32), lanes)
        warp.write(chosen, LANE == 0, lanes)

    return step


# -- barriers of a number ---------------------------------------------------------------------------------------------


def _named(reader: Reader, given: Sequence[str], threads: int) -> Callable[[Warp], tuple[int, Named, int]]:
    number = reader.numbers(given[0], "u32")
    count = reader.numbers(given[1] if len(given) > 1 else str(threads), "u32")

    def found(warp: Warp) -> tuple[int, Named, int]:
        which, of = int(number(warp.registers)[0]), int(count(warp.registers)[0])
        if which >= MOST_NAMED or of % LANES:
            raise ValueError(f"barrier {which} of {of} threads")
        return which, warp.block.shared.named.setdefault(which, Named()), of

    return found


def _sync(threads: int, reader: Reader, name: str, given: Sequence[str]) -> Step:
    named = _named(reader, given, threads)

    def step(warp: Warp, lanes: Numbers | None) -> int | None:
        which, barrier, of = named(warp)
        if warp.waiting is None:
            warp.waiting = which, barrier.generation
            barrier.arrive(LANES, of)
        if warp.waiting == (which, barrier.generation):
            return WAITS
        warp.waiting = None
        return None

    return step


def _arrive(threads: int, reader: Reader, name: str, given: Sequence[str]) -> Step:
    named = _named(reader, given, threads)

    def step(warp: Warp, lanes: Numbers | None) -> None:
        _, barrier, of = named(warp)
        barrier.arrive(LANES, of)

    return step


# -- barriers in shared memory ----------------------------------------------------------------------------------------


def _init(reader: Reader, name: str, given: Sequence[str]) -> Step:
    address, count = reader.address(given[0]), reader.numbers(given[1], "u32")

    def step(warp: Warp, lanes: Numbers | None) -> None:
        for i in active(lanes):
            number = int(count(warp.registers)[i])
            warp.block.shared.barriers[int(address(warp.registers)[i])] = Barrier(number, number)

    return step


def _wait(reader: Reader, name: str, given: Sequence[str]) -> Step:
    address, parity = reader.address(given[1]), reader.numbers(given[2], "u32")

    def step(warp: Warp, lanes: Numbers | None) -> int | None:
        (at,), (phase,) = (np.unique(read(warp.registers)) for read in (address, parity))  # all lanes for the same
        if warp.block.shared.barriers[int(at)].phase == int(phase) & 1:
            return WAITS
        warp.write(given[0], np.full(LANES, True), lanes)
        return None

    return step


def _tell(reader: Reader, name: str, given: Sequence[str]) -> Step:
    expects, (place, count) = "expect_tx" in name, given[-2:]
    address, number = reader.address(place), reader.numbers(count, "u32")

    def step(warp: Warp, lanes: Numbers | None) -> None:
        for i in active(lanes):
            barrier = warp.block.shared.barriers[int(address(warp.registers)[i])]
            told = int(number(warp.registers)[i])
            barrier.expected += told if expects else 0
            barrier.arrive(1 if expects else told)

    return step


def makers(threads: int) -> dict[str, Any]:
    """threads: of a block."""
    return {
        "shfl.sync.": _shuffle, "vote.sync.any": _vote, "elect.sync": _elect, "bar.sync": partial(_sync, threads),
        "bar.arrive": partial(_arrive, threads), "mbarrier.init": _init, "mbarrier.try_wait": _wait,
        "mbarrier.arrive": _tell,
    }  # fmt: skip
