"""Instructions of PTX as steps of a warp: those of a lane for itself, and where to go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tests.cute.simulator import meeting, multiplying, transfers
from tests.cute.simulator.arithmetic import COMPARISONS, FUNCTIONS, converted, pair
from tests.cute.simulator.machine import Code, Jump, Step, Warp
from tests.cute.simulator.memory import PARAMETERS, SHARED
from tests.cute.simulator.parse import Instruction, Program
from tests.cute.simulator.values import TYPES, Numbers, Reader, listed

Maker = Callable[[Reader, str, Sequence[str]], Step]
IGNORED = ("fence.", "setmaxnreg.", "wgmma.fence", "prefetch", "bar.warp.sync")
MEETING = ("shfl.", "vote.", "elect.", "bar.", "wgmma.", "ldmatrix.", "mma.", "setmaxnreg.", "mbarrier.try_wait")


def steps(program: Program) -> list[Code]:
    reader = Reader(symbols(program))
    return [
        Code(_guarded(x, _step(reader, program, x)), x.name.startswith(MEETING), f"{x.name} {x.operands}"[:200])
        for x in program.instructions
    ]


def symbols(program: Program) -> dict[str, int]:
    """Addresses: of shared memory, and of parameters, one behind the other."""
    found, at = {"__dynamic_shmem__0": SHARED}, PARAMETERS
    for name, size in program.parameters.items():
        found[name] = at
        at += -(-size // 64) * 64
    return found


def _guarded(instruction: Instruction, step: Step) -> Step:
    guard = instruction.guard
    if guard is None:
        return step

    def guarded(warp: Warp, lanes: Numbers | None) -> Jump | int | None:
        allowed = warp.registers[guard] ^ instruction.negated
        allowed = allowed if lanes is None else allowed & lanes
        return step(warp, None if allowed.all() else allowed) if allowed.any() else None

    return guarded


def _step(reader: Reader, program: Program, instruction: Instruction) -> Step:
    name, given = instruction.name, instruction.operands
    if name.startswith(IGNORED):
        return lambda warp, lanes: None
    if name.startswith(("ret", "exit")):
        return lambda warp, lanes: (-1, lanes)
    if name.startswith("bra"):
        target = program.labels[given[0]]
        return lambda warp, lanes: (target, lanes)
    makers = _MAKERS | transfers.MAKERS | meeting.makers(program.threads) | multiplying.MAKERS
    found = [prefix for prefix in makers if name.startswith(prefix)]
    return makers[max(found, key=len)](reader, name, given) if found else _arithmetic(reader, name, given)


def _arithmetic(reader: Reader, name: str, given: Sequence[str]) -> Step:
    (operation, _, type_), (target, *operands) = name.rpartition("."), given
    function, result = FUNCTIONS[operation], TYPES[type_]
    types = [type_, "u32"] if operation in ("shl", "shr") else [type_] * len(operands)
    reads = [reader.numbers(x, kind) for x, kind in zip(operands, types, strict=True)]

    def step(warp: Warp, lanes: Numbers | None) -> None:
        with np.errstate(all="ignore"):
            made = function(*(read(warp.registers) for read in reads))
        warp.write(target, made if made.dtype == result else made.astype(result), lanes)

    return step


def _move(reader: Reader, name: str, given: Sequence[str]) -> Step:
    """A number; or two as one of twice the width, or the other way round."""
    (target, source), type_ = given, name.rpartition(".")[2]
    narrow, bits = ("b16", np.uint32(16)) if type_ == "b32" else ("b32", np.uint64(32))
    if target.startswith("{"):
        (low, high), whole = listed(target), reader.numbers(source, type_)

        def unpack(warp: Warp, lanes: Numbers | None) -> None:
            number = whole(warp.registers)
            warp.write(low, number.astype(TYPES[narrow]), lanes)
            warp.write(high, (number >> bits).astype(TYPES[narrow]), lanes)

        return unpack
    if source.startswith("{"):
        reads = [reader.numbers(x, narrow) for x in listed(source)]

        def pack(warp: Warp, lanes: Numbers | None) -> None:
            first, second = (read(warp.registers).astype(TYPES[type_]) for read in reads)
            warp.write(target, first | second << bits, lanes)

        return pack
    return _arithmetic(reader, name, given)


def _wide(reader: Reader, name: str, given: Sequence[str]) -> Step:
    type_ = name.rpartition(".")[2]
    wide = TYPES[{"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}[type_]]
    a, b = (reader.numbers(x, type_) for x in given[1:])
    return lambda warp, lanes: warp.write(given[0], a(warp.registers).astype(wide) * b(warp.registers), lanes)


def _compare(reader: Reader, name: str, given: Sequence[str]) -> Step:
    _, comparison, type_ = name.split(".")
    function, (a, b) = COMPARISONS[comparison], (reader.numbers(x, type_) for x in given[1:])
    return lambda warp, lanes: warp.write(given[0], function(a(warp.registers), b(warp.registers)), lanes)


def _select(reader: Reader, name: str, given: Sequence[str]) -> Step:
    target, *operands, which = given
    a, b = (reader.numbers(x, name.rpartition(".")[2]) for x in operands)
    chosen = reader.numbers(which, "pred")
    return lambda warp, lanes: warp.write(
        target, np.where(chosen(warp.registers), a(warp.registers), b(warp.registers)), lanes
    )


def _convert(reader: Reader, name: str, given: Sequence[str]) -> Step:
    *_, to, from_ = name.split(".")
    if to.endswith("x2"):
        high, low = (reader.numbers(x, "f32") for x in given[1:])
        element = to.removesuffix("x2")
        return lambda warp, lanes: warp.write(given[0], pair(high(warp.registers), low(warp.registers), element), lanes)
    read = reader.numbers(given[1], "u16" if from_ in ("bf16", "f16") else from_)
    function = converted(to, from_, ".sat." in name)
    return lambda warp, lanes: warp.write(given[0], function(read(warp.registers)), lanes)


def _address(reader: Reader, name: str, given: Sequence[str]) -> Step:
    """One address is as good as another here."""
    read = reader.numbers(given[1], "u64")
    return lambda warp, lanes: warp.write(given[0], read(warp.registers), lanes)


_MAKERS: dict[str, Maker] = {
    "mov.b": _move, "mul.wide": _wide, "setp.": _compare, "selp.": _select, "cvt.": _convert, "cvta.": _address,
}  # fmt: skip
