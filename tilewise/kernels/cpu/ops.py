"""The cpu op table: expressions as bytecode for the engine's interpreter (engine/program.h)."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Array
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

from tilewise import arrays
from tilewise.expr import Expr, Loaded
from tilewise.kernels.cpu.structs import Instruction
from tilewise.walking import OpTable, evaluate, remembered

# In the order of engine.h.
OPS = (
    "const", "var", "load", "float", "add", "sub", "mul", "div", "floordiv", "mod", "neg", "abs", "minimum", "maximum",
    "where", "exp", "log", "tanh", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not",
    "widen", "narrow",
)  # fmt: skip
VARIABLES = ("S", "B", "H", "HK", "NQ", "NK", "Q", "QP", "K", "KP")
_CONDITIONS = {"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"}


class Place(IntFlag):
    """Where a value varies; what depends on both a query and a key varies from score to score."""

    UNIFORM = 0
    ALONG_Q = 1
    ALONG_K = 2
    EVERYWHERE = 3


class Number(IntEnum):
    """What a register holds, as in engine.h: an integer of the width computed with or a condition, a float, or an
    integer of 64 bits."""

    WHOLE = 0
    REAL = 1
    WIDE = 2


_PLACES = {"S": Place.EVERYWHERE, "Q": Place.ALONG_Q, "QP": Place.ALONG_Q, "K": Place.ALONG_K, "KP": Place.ALONG_K}


@dataclass(frozen=True)
class Register:
    """The result of the instruction of that number."""

    number: int
    holds: Number
    place: Place


class Bytecode(NamedTuple):
    """An expression's instructions as the engine takes them, the arrays they load, and where the result is."""

    code: Array[Instruction]
    slots: list[Loaded]
    at: int


def bytecode(expr: Expr, wide: bool = False) -> Bytecode:
    """Assembled once for each expression. wide: integers of arrays have 64 bits, and so has arithmetic on them."""
    return remembered(expr, ("cpu", wide), lambda expr: _assemble(expr, wide))


def _assemble(expr: Expr, wide: bool) -> Bytecode:
    assembler = Assembler(wide)
    at = assembler.add(expr).number
    return Bytecode(assembler.table(), assembler.slots, at)


@dataclass(eq=False)
class Assembler:
    """Instructions, each written once however often its value is used; and the arrays they load."""

    wide: bool = False
    code: list[Instruction] = field(default_factory=list)
    slots: list[Loaded] = field(default_factory=list)
    _known: dict[tuple[Any, ...], Register] = field(default_factory=dict)

    def add(self, expr: Expr) -> Register:
        """The register that will hold the expression's value."""
        register: Register = evaluate(expr, _Variables(self), self._ops())
        return register

    def table(self) -> Array[Instruction]:
        return (Instruction * len(self.code))(*self.code)

    def _ops(self) -> OpTable:
        table: dict[str, Callable[..., Register]] = {op: self._operation(op) for op in OPS[3:-2]}
        return {**table, "const": self._constant, "load": self._load, "where": self._where}

    def _operation(self, op: str) -> Callable[..., Register]:
        def emit(*args: Register) -> Register:
            args = self._alike(*args)
            of = args[-1].holds
            return self.emit(op, args, of, Number.REAL if op == "float" else Number.WHOLE if op in _CONDITIONS else of)

        return emit

    def _where(self, condition: Register, *choices: Register) -> Register:
        choices = self._alike(*choices)
        return self.emit("where", (condition, *choices), choices[0].holds, choices[0].holds)

    def _alike(self, *args: Register) -> tuple[Register, ...]:
        """Of one width: as wide as the widest."""
        if all(x.holds != Number.WIDE for x in args):
            return args
        return tuple(x if x.holds == Number.WIDE else self.emit("widen", (x,), Number.WHOLE, Number.WIDE) for x in args)

    def _constant(self, value: bool | int | float) -> Register:
        kind = Number.REAL if isinstance(value, float) else Number.WHOLE
        return self.emit("const", (), kind, kind, value=value)

    def _load(self, slot: Loaded, *index: Register) -> Register:
        known = [i for i, x in enumerate(self.slots) if x.array is slot.array]
        if not known:
            self.slots.append(slot)
        index = tuple(
            self.emit("narrow", (x,), Number.WIDE, Number.WHOLE) if x.holds == Number.WIDE else x for x in index
        )
        kind = arrays.value_kind(slot.array)
        holds = Number.REAL if kind == "float" else Number.WIDE if kind == "int" and self.wide else Number.WHOLE
        return self.emit("load", index, holds, holds, slot=known[0] if known else len(self.slots) - 1)

    def emit(
        self, op: str, args: tuple[Register, ...], operands: Number, result: Number,
        slot: int = -1, value: float = 0.0, place: Place = Place.UNIFORM,
    ) -> Register:  # fmt: skip
        """Write an instruction, unless the same one is there."""
        numbers = [x.number for x in args]
        key = (op, *numbers, operands, slot, repr(value))  # repr tells 0.0 from -0.0
        if key not in self._known:
            for x in args:
                place |= x.place
            made = Instruction(OPS.index(op), place, operands, result, len(args), slot=slot, value=value)
            made.args[: len(numbers)] = numbers
            self._known[key] = Register(len(self.code), result, place)
            self.code.append(made)
        return self._known[key]


class _Variables(dict[str, Register]):
    """The registers of variables, each read when first asked for."""

    def __init__(self, assembler: Assembler) -> None:
        self.assembler = assembler

    def __missing__(self, name: str) -> Register:
        kind = Number.REAL if name == "S" else Number.WHOLE
        place = _PLACES.get(name, Place.UNIFORM)
        return self.assembler.emit("var", (), kind, kind, slot=VARIABLES.index(name), place=place)
