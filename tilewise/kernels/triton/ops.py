"""The triton op table: expressions as Triton source, a function each, that kernels take as their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilewise import arrays
from tilewise.expr import ARITHMETIC, COMPARISONS, Expr, Loaded
from tilewise.walking import OpTable, evaluate

VARIABLES = ("B", "H", "HK", "Q", "K", "QP", "KP", "NQ", "NK")
_GIVEN = ", ".join(("S", *VARIABLES, "arrays", "sizes", "steps"))
_KEYS = ("K", "KP")
_VARYING = ("S", "Q", "K", "QP", "KP")
_INT, _FLOAT, _BOOL = "int", "float", "bool"


@dataclass(frozen=True)
class Value:
    """A value in Triton: a name or a literal. Q runs down a tile, K across it; others are single numbers."""

    text: str
    kind: str
    literal: bool = False
    from_array: bool = False  # such integers may have any size, so arithmetic on them takes 64 bits, as in NumPy
    varies: bool = False  # within a tile


def function(name: str, expr: Expr, slots: Sequence[Loaded], complete: Sequence[int] = ()) -> str:
    """The expression as a function; `slots` are the arrays in the order in which kernels are given them.

    complete: the numbers of those that have a cell for every key along their last axis.
    """
    writer = _Writer({id(slot.array): i for i, slot in enumerate(slots)}, complete)
    result: Value = evaluate(expr, _Variables(), writer.ops())
    body = "".join(f"    {name} = {text}\n" for text, name in writer.names.items())
    return f"@triton.jit\ndef {name}({_GIVEN}):\n{body}    return {result.text}\n"


class _Variables(dict[str, Value]):
    def __missing__(self, name: str) -> Value:
        return Value(name, _FLOAT if name == "S" else _INT, varies=name in _VARYING)


@dataclass(eq=False)
class _Writer:
    """Statements, each written once however often its value is used."""

    numbers: dict[int, int]  # of arrays, by id
    complete: Sequence[int]
    names: dict[str, str] = field(default_factory=dict)

    def value(self, text: str, kind: str, *of: Value) -> Value:
        name = self.names.setdefault(text, f"x{len(self.names)}")
        wide = kind == _INT and any(x.from_array for x in of)
        return Value(name, kind, from_array=wide, varies=any(x.varies for x in of))

    def condition(self, a: str, symbol: str, b: str, *of: Value) -> Value:
        """A comparison, for every score of a tile: Triton's interpreter cannot join conditions of single numbers."""
        spread = a if any(x.varies for x in of) else f"({a} + K * 0)"
        return replace(self.value(f"{spread} {symbol} {b}", _BOOL), varies=True)

    def ops(self) -> OpTable:
        table: dict[str, Callable[..., Value]] = {op: self._comparison(symbol) for op, symbol in COMPARISONS.items()}
        table |= {op: self._arithmetic(op, symbol) for op, symbol in ARITHMETIC.items()}
        table |= {op: self._function(text) for op, text in _FUNCTIONS.items()}
        return {
            **table, "const": _constant, "load": self._load, "float": self._float, "where": self._where,
            "and": self._and, "or": self._or, "not": self._not, "neg": lambda a: self._unary("-{0}", a),
            "abs": lambda a: self._unary("tl.abs({0})", a),
            "minimum": self._extreme("minimum"), "maximum": self._extreme("maximum"),
        }  # fmt: skip

    def _comparison(self, symbol: str) -> Callable[[Value, Value], Value]:
        return lambda a, b: self.condition(a.text, symbol, b.text, a, b)

    def _arithmetic(self, op: str, symbol: str) -> Callable[[Value, Value], Value]:
        def combine(a: Value, b: Value) -> Value:
            if a.kind == _FLOAT or b.kind == _FLOAT:
                return self._of_floats(op, symbol, a, b)
            left, right = self._wide(a, b)
            text = {"floordiv": f"floor_quotient({left}, {right})", "mod": f"floor_remainder({left}, {right})"}
            return self.value(text.get(op, f"{left} {symbol} {right}"), _INT, a, b)

        return combine

    def _of_floats(self, op: str, symbol: str, a: Value, b: Value) -> Value:
        if op == "div":
            return self.value(f"tl.div_rn({_tensor(a)}, {_tensor(b)})", _FLOAT, a, b)
        if op in ("floordiv", "mod"):
            floor = self.value(f"tl.floor(tl.div_rn({_tensor(a)}, {_tensor(b)}))", _FLOAT, a, b)
            return floor if op == "floordiv" else self.value(f"{a.text} - {b.text} * {floor.text}", _FLOAT, a, b)
        return self.value(f"{a.text} {symbol} {b.text}", _FLOAT, a, b)

    def _wide(self, *values: Value) -> list[str]:
        if not any(x.from_array for x in values):
            return [x.text for x in values]
        return [f"tl.cast({x.text}, tl.int64)" for x in values]

    def _unary(self, template: str, a: Value) -> Value:
        return self.value(template.format(_tensor(a) if a.kind == _FLOAT else self._wide(a)[0]), a.kind, a)

    def _function(self, template: str) -> Callable[[Value], Value]:
        return lambda a: self.value(template.format(_tensor(a)), _FLOAT, a)

    def _extreme(self, name: str) -> Callable[[Value, Value], Value]:
        def combine(a: Value, b: Value) -> Value:
            if _FLOAT in (a.kind, b.kind):  # NaN stays NaN, as in NumPy
                text = f"tl.{name}({_tensor(a)}, {_tensor(b)}, propagate_nan=tl.PropagateNan.ALL)"
                return self.value(text, _FLOAT, a, b)
            left, right = self._wide(a, b)
            return self.value(f"tl.{name}({left}, {right})", _INT, a, b)

        return combine

    def _where(self, condition: Value, a: Value, b: Value) -> Value:
        if condition.literal:
            return a if condition.text == "True" else b
        return self.value(f"tl.where({condition.text}, {a.text}, {b.text})", a.kind, condition, a, b)

    def _and(self, a: Value, b: Value) -> Value:
        for x, other in ((a, b), (b, a)):
            if x.literal:
                return other if x.text == "True" else x
        return self.value(f"{a.text} & {b.text}", _BOOL, a, b)

    def _or(self, a: Value, b: Value) -> Value:
        for x, other in ((a, b), (b, a)):
            if x.literal:
                return x if x.text == "True" else other
        return self.value(f"{a.text} | {b.text}", _BOOL, a, b)

    def _not(self, a: Value) -> Value:
        if a.literal:
            return Value(str(a.text != "True"), _BOOL, literal=True)
        return self.value(f"{a.text} == 0", _BOOL, a)

    def _float(self, a: Value) -> Value:
        return _constant(float(a.text.strip("()"))) if a.literal else self.value(_tensor(a), _FLOAT, a)

    def _load(self, slot: Loaded, *index: Value) -> Value:
        """A cell; nothing is read outside the array: indices are clamped to it, or masked if it has all keys."""
        number, kind = self.numbers[id(slot.array)], arrays.value_kind(slot.array)
        by_key = bool(index) and index[-1].text in _KEYS and number in self.complete
        clamped = index[:-1] if by_key else index
        at = "".join(f" + {self._offset(number, axis, i).text}" for axis, i in enumerate(clamped))
        cell = f"tl.load(arrays[{number}]{at})"
        if by_key:
            axis = f"[{number}][{len(index) - 1}]"
            cell = f"cell_of(arrays[{number}]{at}, {index[-1].text}, sizes{axis}, steps{axis})"
        if kind == _BOOL:
            return self.condition(cell, "!=", "0", *index)
        wide = arrays.dtype_name(slot.array) == "int64"
        type_ = "tl.float32" if kind == _FLOAT else "tl.int64" if wide else "tl.int32"
        return replace(self.value(f"{cell}.to({type_})", kind, *index), from_array=kind == _INT)

    def _offset(self, number: int, axis: int, index: Value) -> Value:
        if index.literal and index.text == "0":
            return Value("0", _INT, literal=True)
        clamped = self.value(f"tl.minimum(tl.maximum({index.text}, 0), sizes[{number}][{axis}] - 1)", _INT, index)
        return self.value(f"tl.cast({clamped.text}, tl.int64) * steps[{number}][{axis}]", _INT, index)


_FUNCTIONS = {"exp": "tl.exp({0})", "log": "tl.log({0})", "tanh": "tanh({0})"}


def _tensor(a: Value) -> str:
    """As a float32 tensor: literals and whole numbers are none yet."""
    return a.text if a.kind == _FLOAT and not a.literal else f"tl.cast({a.text}, tl.float32)"


def _constant(value: Any) -> Value:
    if isinstance(value, bool):
        return Value(str(value), _BOOL, literal=True)
    if isinstance(value, int):
        return Value(str(value) if value >= 0 else f"({value})", _INT, literal=True)
    text = f'float("{value}")' if value in (float("inf"), float("-inf")) else repr(value)
    return Value(text if value >= 0 else f"({text})", _FLOAT, literal=True)
