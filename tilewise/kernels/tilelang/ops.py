"""The tilelang op table: variants as expressions of TileLang's compiler, for one score of a tile.

Every value is bound to a name where it is made, so that what is used often is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tilelang.language as T
from tvm import tirx
from tvm.script.ir_builder.tirx import bind

from tilewise import arrays
from tilewise.expr import Expr, Loaded
from tilewise.kernels.tilelang.compiler import WHOLE_NUMBERS
from tilewise.walking import OpTable, evaluate

_COMPARISONS = {"lt": tirx.LT, "le": tirx.LE, "gt": tirx.GT, "ge": tirx.GE, "eq": tirx.EQ, "ne": tirx.NE}

_LARGE = 1 << 29


def value(expr: Expr, variables: Mapping[str, Any], slots: Sequence[Loaded], buffers: Sequence[Any]) -> Any:
    """The expression at one score. buffers: the arrays of `slots`, as a kernel is given them."""
    places = {id(slot.array): buffer for slot, buffer in zip(slots, buffers, strict=True)}
    return evaluate(expr, variables, {**_OPS, "load": lambda slot, *index: _load(slot, places[id(slot.array)], index)})


def _constant(number: bool | int | float) -> Any:
    """TileLang's compiler moves constants from one side of a comparison to the other, where large ones overflow."""
    if isinstance(number, bool):
        return T.bool(number)
    if isinstance(number, int):
        return T.int32(number) if abs(number) < _LARGE else T.int64(number)
    return T.float32(number)


def _load(slot: Loaded, buffer: Any, index: Sequence[Any]) -> Any:
    """A cell; nothing is read outside the array: indices are clamped to it.

    Integers of arrays may have any size, so arithmetic on them takes 64 bits, as in NumPy.
    """
    at = [_clamped(i, size) for i, size in zip(index or [T.int32(0)], buffer.shape, strict=True)]
    cell, kind = bind(buffer[tuple(at)]), arrays.value_kind(slot.array)
    if kind == "bool":
        return tirx.NE(cell, tirx.const(0, cell.dtype))
    return T.cast(cell, "float32" if kind == "float" else "int64")


def _clamped(index: Any, size: Any) -> Any:
    return T.max(T.min(index, T.cast(size, index.dtype) - 1), T.cast(0, index.dtype))


def _is_float(x: Any) -> bool:
    return str(x.dtype) == "float32"


def _alike(*values: Any) -> list[Any]:
    """Of one type: floats, or integers as wide as the widest of them."""
    kinds = {str(x.dtype) for x in values}
    if len(kinds) == 1:
        return list(values)
    return [T.cast(x, "float32" if "float32" in kinds else "int64") for x in values]


def _comparison(node: Any) -> Callable[[Any, Any], Any]:
    return lambda a, b: node(*_alike(a, b))


def _arithmetic(of_numbers: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: bind(of_numbers(*_alike(a, b)))


def _quotient(a: Any, b: Any) -> Any:
    return T.floor(a / b) if _is_float(a) else _of_whole_numbers("quotient", a, b)


def _remainder(a: Any, b: Any) -> Any:
    return a - b * T.floor(a / b) if _is_float(a) else _of_whole_numbers("remainder", a, b)


def _of_whole_numbers(name: str, a: Any, b: Any) -> Any:
    """By a function beside the kernel (compiler.py), which may give anything for all that TileLang knows.

    Its simplifier (0.1.15) is wrong on quotients that are negative, and makes of (-(x // 5)) % 2 what it is not.
    """
    wide = (T.cast(x, "int64") for x in (a, b))  # as TileLang has indices: it would widen arguments, but no result
    return T.cast(T.call_pure_extern("int64", f"{WHOLE_NUMBERS}_{name}{a.dtype.bits}", *wide), a.dtype)


def _extreme(larger: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def combine(a: Any, b: Any) -> Any:
        if not _is_float(a):
            return larger(a, b)
        return tirx.Select(T.isnan(a), a, tirx.Select(T.isnan(b), b, larger(a, b)))  # NaN stays NaN, as in NumPy

    return _arithmetic(combine)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return bind(tirx.Select(condition, *_alike(a, b)))


_OPS: OpTable = {
    **{op: _comparison(node) for op, node in _COMPARISONS.items()},
    "const": _constant,
    "float": lambda a: T.cast(a, "float32"),
    "add": _arithmetic(lambda a, b: a + b),
    "sub": _arithmetic(lambda a, b: a - b),
    "mul": _arithmetic(lambda a, b: a * b),
    "div": _arithmetic(lambda a, b: a / b),
    "floordiv": _arithmetic(_quotient),
    "mod": _arithmetic(_remainder),
    "minimum": _extreme(T.min),
    "maximum": _extreme(T.max),
    "neg": lambda a: bind(-a),
    "abs": lambda a: bind(T.max(a, -a) if _is_float(a) else T.abs(a)),  # TileLang's C target has no fabs
    "exp": lambda a: bind(T.exp(a)),
    "log": lambda a: bind(T.log(a)),
    "tanh": lambda a: bind(T.tanh(a)),
    "where": _where,
    "and": lambda a, b: bind(tirx.And(a, b)),
    "or": lambda a, b: bind(tirx.Or(a, b)),
    "not": lambda a: bind(tirx.Not(a)),
}
