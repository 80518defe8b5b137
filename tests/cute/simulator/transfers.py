"""Instructions that read and write memory, and what the copy engine is told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.cute.simulator.machine import Step, Warp
from tests.cute.simulator.memory import Map
from tests.cute.simulator.values import LANES, TYPES, Numbers, Reader, listed


def active(lanes: Numbers | None) -> list[int]:
    return list(range(LANES)) if lanes is None else [int(i) for i in np.flatnonzero(lanes)]


def _load(reader: Reader, name: str, given: Sequence[str]) -> Step:
    type_, targets = TYPES[name.rpartition(".")[2]], listed(given[0])
    is_shared, size = ".shared" in name, type_.itemsize * len(targets)
    address = reader.address(given[1], "u32" if is_shared else "u64")

    def step(warp: Warp, lanes: Numbers | None) -> None:
        at, block = address(warp.registers), warp.block
        if is_shared:
            at = at if lanes is None else np.where(lanes, at, at[np.argmax(lanes)])
            content = block.shared.content[block.shared.places(at, size)]
        else:
            content = np.zeros((LANES, size), np.uint8)
            for i in active(lanes):
                content[i] = np.frombuffer(block.grid.memory.read(int(at[i]), size), np.uint8)
        numbers = np.ascontiguousarray(content).view(type_)
        for i, target in enumerate(targets):
            warp.write(target, np.ascontiguousarray(numbers[:, i]), lanes)

    return step


def _store(reader: Reader, name: str, given: Sequence[str]) -> Step:
    is_shared, reads = ".shared" in name, [reader.numbers(x, name.rpartition(".")[2]) for x in listed(given[1])]
    address = reader.address(given[0], "u32" if is_shared else "u64")

    def step(warp: Warp, lanes: Numbers | None) -> None:
        at, shared = address(warp.registers), warp.block.shared
        numbers = np.stack([read(warp.registers) for read in reads], axis=1)
        content = np.ascontiguousarray(numbers).view(np.uint8)
        for i in active(lanes):
            if is_shared:
                shared.content[shared.places(at[i : i + 1], content.shape[1])[0]] = content[i]
            else:
                warp.block.grid.memory.write(int(at[i]), content[i].tobytes())

    return step


def _add(reader: Reader, name: str, given: Sequence[str]) -> Step:
    address, more = reader.address(given[1], "u64"), reader.numbers(given[2], "u32")

    def step(warp: Warp, lanes: Numbers | None) -> None:
        memory, before = warp.block.grid.memory, np.zeros(LANES, np.uint32)
        for i in active(lanes):
            at = int(address(warp.registers)[i])
            before[i] = np.frombuffer(memory.read(at, 4), np.uint32)[0]
            memory.write(at, (before[i] + more(warp.registers)[i]).tobytes())
        warp.write(given[0], before, lanes)

    return step


def _copy(reader: Reader, name: str, given: Sequence[str]) -> Step:
    """[to], [map, {coordinates}], [barrier]"""
    to, barrier = reader.address(given[0]), reader.address(given[2])
    map_, coordinates = given[1].strip("[]").split(", ", 1)
    which, at = reader.numbers(map_, "u64"), [reader.numbers(x, "s32") for x in listed(coordinates)]

    def step(warp: Warp, lanes: Numbers | None) -> None:
        registers = warp.registers
        for i in active(lanes):
            content = warp.block.grid.memory.read(int(which(registers)[i]), 128)
            place = tuple(int(x(registers)[i]) for x in at)
            warp.block.copy(Map.decoded(content), place, int(to(registers)[i]), int(barrier(registers)[i]))

    return step


MAKERS = {"ld.": _load, "st.": _store, "atom.global.add": _add, "cp.async.bulk.tensor": _copy}
