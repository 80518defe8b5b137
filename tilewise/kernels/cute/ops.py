"""The cute op table: expressions as Python that CuTe's compiler follows, a function each, called for every score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilewise import arrays
from tilewise.expr import ARITHMETIC, COMPARISONS, Expr, Loaded
from tilewise.kernels.cute.near import Table
from tilewise.walking import OpTable, evaluate

VARIABLES = ("B", "H", "HK", "Q", "K", "QP", "KP", "NQ", "NK")
_GIVEN = ", ".join(("S", *VARIABLES, "arrays"))
_INT, _FLOAT, _BOOL = "int", "float", "bool"
_TYPES = {_INT: "Int32", _FLOAT: "Float32", _BOOL: "Boolean"}
_FUNCTIONS = ("exp", "log", "tanh")


@dataclass(frozen=True)
class Value:
    """A value: a name or a literal, one number of Int32, Int64, Float32 or Boolean."""

    text: str
    kind: str
    literal: bool = False
    from_array: bool = False  # such integers may have any size, so arithmetic on them takes 64 bits, as in NumPy

    @property
    def typed(self) -> str:
        """As a number of the DSL: Python would compute with two literals itself, by rules of its own."""
        return f"{_TYPES[self.kind]}({self.text})" if self.literal else self.text


def function(name: str, expr: Expr, slots: Sequence[Loaded], table: Table | None = None) -> str:
    """The expression as a function; `slots` are the arrays in the order in which kernels are given them.

    table: one of them whose cell of the query and the key the function is given, as `near`.
    """
    writer = _Writer({id(slot.array): i for i, slot in enumerate(slots)}, table)
    result: Value = evaluate(expr, _Variables(), writer.ops())
    body = "".join(f"    {name} = {text}\n" for text, name in writer.names.items())
    given = _GIVEN if table is None else f"{_GIVEN}, near"
    return f"def {name}({given}):\n{body}    return {result.typed}\n"


class _Variables(dict[str, Value]):
    def __missing__(self, name: str) -> Value:
        return Value(name, _FLOAT if name == "S" else _INT)


@dataclass(eq=False)
class _Writer:
    """Statements, each written once however often its value is used."""

    numbers: dict[int, int]  # of arrays, by id
    table: Table | None = None
    names: dict[str, str] = field(default_factory=dict)

    def value(self, text: str, kind: str, *of: Value) -> Value:
        name = self.names.setdefault(text, f"x{len(self.names)}")
        return Value(name, kind, from_array=kind == _INT and any(x.from_array for x in of))

    def ops(self) -> OpTable:
        table: dict[str, Callable[..., Value]] = {op: self._comparison(symbol) for op, symbol in COMPARISONS.items()}
        table |= {op: self._arithmetic(op, symbol) for op, symbol in ARITHMETIC.items()}
        table |= {op: self._function(op) for op in _FUNCTIONS}
        return {
            **table, "const": _constant, "load": self._load, "float": self._float, "where": self._where,
            "and": self._and, "or": self._or, "not": self._not, "neg": self._negative, "abs": self._size,
            "minimum": self._extreme("minimum"), "maximum": self._extreme("maximum"),
        }  # fmt: skip

    def _comparison(self, symbol: str) -> Callable[[Value, Value], Value]:
        return lambda a, b: self.value(f"{a.typed} {symbol} {b.typed}", _BOOL)

    def _arithmetic(self, op: str, symbol: str) -> Callable[[Value, Value], Value]:
        named = {"floordiv": "floor_quotient", "mod": "floor_remainder"}

        def combine(a: Value, b: Value) -> Value:
            kind = _FLOAT if _FLOAT in (a.kind, b.kind) else _INT
            left, right = self._operands(kind, a, b)
            if op in named:
                prefix = "float_" if kind == _FLOAT else ""
                return self.value(f"{prefix}{named[op]}({left}, {right})", kind, a, b)
            return self.value(f"{left} {symbol} {right}", kind, a, b)

        return combine

    def _operands(self, kind: str, *values: Value) -> list[str]:
        """Of one type: floats, or integers as wide as the widest of them."""
        if kind == _FLOAT:
            return [x.typed if x.kind == _FLOAT else f"Float32({x.text})" for x in values]
        if any(x.from_array for x in values):
            return [f"Int64({x.text})" for x in values]
        return [x.typed for x in values]

    def _negative(self, a: Value) -> Value:
        return self.value(f"-{self._operands(a.kind, a)[0]}", a.kind, a)

    def _size(self, a: Value) -> Value:
        return self.value(f"absolute({self._operands(a.kind, a)[0]})", a.kind, a)

    def _function(self, name: str) -> Callable[[Value], Value]:
        return lambda a: self.value(f"{name}({self._operands(_FLOAT, a)[0]})", _FLOAT, a)

    def _extreme(self, name: str) -> Callable[[Value, Value], Value]:
        def combine(a: Value, b: Value) -> Value:
            kind = _FLOAT if _FLOAT in (a.kind, b.kind) else _INT
            prefix = "float_" if kind == _FLOAT else ""
            left, right = self._operands(kind, a, b)
            return self.value(f"{prefix}{name}({left}, {right})", kind, a, b)

        return combine

    def _where(self, condition: Value, a: Value, b: Value) -> Value:
        if condition.literal:
            return a if condition.text == "True" else b
        left, right = [a.typed, b.typed] if a.kind == _BOOL else self._operands(a.kind, a, b)
        return self.value(f"where({condition.text}, {left}, {right})", a.kind, a, b)

    def _and(self, a: Value, b: Value) -> Value:
        for x, other in ((a, b), (b, a)):
            if x.literal:
                return other if x.text == "True" else x
        return self.value(f"{a.text} & {b.text}", _BOOL)

    def _or(self, a: Value, b: Value) -> Value:
        for x, other in ((a, b), (b, a)):
            if x.literal:
                return x if x.text == "True" else other
        return self.value(f"{a.text} | {b.text}", _BOOL)

    def _not(self, a: Value) -> Value:
        if a.literal:
            return Value(str(a.text != "True"), _BOOL, literal=True)
        return self.value(f"negated({a.text})", _BOOL)

    def _float(self, a: Value) -> Value:
        return _constant(float(a.text.strip("()"))) if a.literal else self.value(f"Float32({a.text})", _FLOAT)

    def _load(self, slot: Loaded, *index: Value) -> Value:
        """A cell; nothing is read outside the array: indices are clamped to it."""
        number, kind = self.numbers[id(slot.array)], arrays.value_kind(slot.array)
        if self.table is not None and (number, tuple(i.text for i in index)) == (self.table.slot, self.table.index):
            return self.value("Float32(near)", _FLOAT)
        cell = f"cell(arrays[{number}], {''.join(f'{i.text}, ' for i in index)})".replace(", )", ")")
        if kind == _BOOL:
            return self.value(f"{cell} != 0", _BOOL)
        type_ = "Float32" if kind == _FLOAT else "Int64" if arrays.dtype_name(slot.array) == "int64" else "Int32"
        return replace(self.value(f"{type_}({cell})", kind), from_array=kind == _INT)


def _constant(value: Any) -> Value:
    if isinstance(value, bool):
        return Value(str(value), _BOOL, literal=True)
    if isinstance(value, int):
        return Value(str(value) if value >= 0 else f"({value})", _INT, literal=True)
    text = f'float("{value}")' if value in (float("inf"), float("-inf")) else repr(value)
    return Value(text if value >= 0 else f"({text})", _FLOAT, literal=True)
