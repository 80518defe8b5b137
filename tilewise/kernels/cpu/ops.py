"""The cpu op table: expressions as bytecode for the engine's interpreter (engine/program.h)."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Array
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any, NamedTuple

from tilewise import arrays
from tilewise.expr import Expr, Loaded
from tilewise.kernels.cpu.structs import Instruction
from tilewise.walking import OpTable, evaluate, remembered

# In the order of engine.h.
OPS = (
    "const", "var", "load", "float", "add", "sub", "mul", "div", "floordiv", "mod", "neg", "abs", "minimum", "maximum",
    "where", "exp", "log", "tanh", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not",
)  # fmt: skip
VARIABLES = ("S", "B", "H", "HK", "NQ", "NK", "Q", "QP", "K", "KP")
_CONDITIONS = {"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"}


class Place(IntFlag):
    """Where a value varies; what depends on both a query and a key varies from score to score."""

    UNIFORM = 0
    ALONG_Q = 1
    ALONG_K = 2
    EVERYWHERE = 3


_PLACES = {"S": Place.EVERYWHERE, "Q": Place.ALONG_Q, "QP": Place.ALONG_Q, "K": Place.ALONG_K, "KP": Place.ALONG_K}


@dataclass(frozen=True)
class Register:
    """The result of the instruction of that number."""

    number: int
    is_float: bool
    place: Place


class Bytecode(NamedTuple):
    """An expression's instructions as the engine takes them, the arrays they load, and where the result is."""

    code: Array[Instruction]
    slots: list[Loaded]
    at: int


def bytecode(expr: Expr) -> Bytecode:
    """Assembled once for each expression."""
    return remembered(expr, "cpu", _assemble)


def _assemble(expr: Expr) -> Bytecode:
    assembler = Assembler()
    at = assembler.add(expr).number
    return Bytecode(assembler.table(), assembler.slots, at)


@dataclass(eq=False)
class Assembler:
    """Instructions, each written once however often its value is used; and the arrays they load."""

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
        table: dict[str, Callable[..., Register]] = {op: self._operation(op) for op in OPS[3:]}
        return {**table, "const": self._constant, "load": self._load}

    def _operation(self, op: str) -> Callable[..., Register]:
        def emit(*args: Register) -> Register:
            operands = args[-1].is_float
            result = op == "float" or (operands and op not in _CONDITIONS)
            return self.emit(op, args, operands, result)

        return emit

    def _constant(self, value: bool | int | float) -> Register:
        is_float = isinstance(value, float)
        return self.emit("const", (), is_float, is_float, value=value)

    def _load(self, slot: Loaded, *index: Register) -> Register:
        known = [i for i, x in enumerate(self.slots) if x.array is slot.array]
        if not known:
            self.slots.append(slot)
        is_float = arrays.value_kind(slot.array) == "float"
        return self.emit("load", index, is_float, is_float, slot=known[0] if known else len(self.slots) - 1)

    def emit(
        self, op: str, args: tuple[Register, ...], operands: bool, result: bool,
        slot: int = -1, value: float = 0.0, place: Place = Place.UNIFORM,
    ) -> Register:  # fmt: skip
        """Write an instruction, unless the same one is there. operands, result: whether they are floats."""
        numbers = [x.number for x in args]
        key = (op, *numbers, operands, slot, repr(value))  # repr tells 0.0 from -0.0
        if key not in self._known:
            for x in args:
                place |= x.place
            made = Instruction(OPS.index(op), place, operands, len(args), slot=slot, value=value)
            made.args[: len(numbers)] = numbers
            self._known[key] = Register(len(self.code), result, place)
            self.code.append(made)
        return self._known[key]


class _Variables(dict[str, Register]):
    """The registers of variables, each read when first asked for."""

    def __init__(self, assembler: Assembler) -> None:
        self.assembler = assembler

    def __missing__(self, name: str) -> Register:
        is_float = name == "S"
        place = _PLACES.get(name, Place.UNIFORM)
        return self.assembler.emit("var", (), is_float, is_float, slot=VARIABLES.index(name), place=place)
