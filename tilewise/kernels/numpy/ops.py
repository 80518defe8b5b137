"""The NumPy op table: expressions as values. The reference and the NumPy kernel both read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.expr import Loaded
from tilewise.walking import OpTable


def numpy_ops(dtype: npt.DTypeLike) -> OpTable:
    """Floats are computed in `dtype`; // and % floor, and for integers give 0 on division by 0."""

    def const(value: Any) -> Any:
        return np.asarray(value, dtype)[()] if isinstance(value, float) else value

    def load(slot: Loaded, *index: Any) -> Array:
        values = read(slot, *index)
        return arrays.widen(values, dtype) if arrays.value_kind(slot.array) == "float" else values

    return {
        "const": const,
        "load": load,
        "float": lambda a: np.asarray(a).astype(dtype),
        "add": _quietly(np.add),
        "sub": _quietly(np.subtract),
        "mul": _quietly(np.multiply),
        "div": _quietly(np.true_divide),
        "floordiv": _quietly(lambda a, b: np.floor_divide(a, b) if _is_int(a) else np.floor(a / b)),
        "mod": _quietly(lambda a, b: np.remainder(a, b) if _is_int(a) else a - b * np.floor(a / b)),
        "neg": np.negative,
        "abs": np.abs,
        "minimum": np.minimum,
        "maximum": np.maximum,
        "exp": _quietly(np.exp),
        "log": _quietly(np.log),
        "tanh": np.tanh,
        "where": np.where,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "eq": np.equal,
        "ne": np.not_equal,
        "and": np.logical_and,
        "or": np.logical_or,
        "not": np.logical_not,
    }


def read(slot: Loaded, *index: Any) -> Array:
    """The array's values at these indices, each clamped to the array."""
    array = arrays.as_numpy(slot.array)
    values: Array = array[tuple(clamp(i, n) for i, n in zip(index, array.shape, strict=True))]
    return values.astype(np.int64) if arrays.value_kind(slot.array) == "int" else values


def clamp(index: Any, size: int) -> Any:
    """An index no array is left by, whatever the contents it was computed from."""
    return np.minimum(np.maximum(index, 0), size - 1)


def _is_int(a: Any) -> bool:
    return bool(np.issubdtype(np.asarray(a).dtype, np.integer))


def _quietly(function: Any) -> Any:
    """IEEE's inf and NaN without NumPy's warnings: a masked score may well be log(0)."""

    def quiet(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return quiet
