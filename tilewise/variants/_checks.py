"""What the variants check about their arguments, and the position they share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any

from tilewise import arrays
from tilewise.expr import INT32_MAX, NK, NQ, Expr, Loaded, Q, load_slot

# A query's position among the keys: the last query stands at the last key, whatever the lengths.
P: Expr = Q + (NK - NQ)


def whole(variant: str, name: str, value: Any, least: int, most: int = INT32_MAX) -> int:
    """A whole number as an int. The most unless told: integers in expressions are 32 bit."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{variant}: {name} must be a whole number of at least {least}, got {value!r}")
    if int(value) > most:
        raise ValueError(f"{variant}: {name} must be at most {most}, got {value!r}")
    return int(value)


def positive(variant: str, name: str, value: Any) -> float:
    number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{variant}: {name} must be a positive number, got {value!r}")
    return number


def array(variant: str, name: str, value: Any, kind: str, ranks: range) -> Any:
    """An array of this kind ('bool', 'int', 'float') and one of these numbers of dimensions."""
    value = arrays.from_foreign(f"{variant}: {name}", value)
    if not arrays.is_array(value):
        found = f"{type(value).__name__}{arrays.list_advice(value)}"
        raise TypeError(f"{variant}: {name} must be a NumPy array or a PyTorch tensor, got {found}")
    if arrays.value_kind(value) != kind:
        raise TypeError(f"{variant}: {name} must be of type {kind}, got {arrays.dtype_name(value)}")
    if len(value.shape) not in ranks:
        expected = " or ".join(map(str, ranks))
        raise ValueError(f"{variant}: {name} must have {expected} dimensions, got shape {tuple(value.shape)}")
    return value


def read(variant: str, name: str, array: Any, *index: Any, grad: bool = False, constant: bool = False) -> Expr:
    """load(array, ...), which errors call by the name that the variant's argument has."""
    return load_slot(Loaded(array, grad, constant, f"{variant}: {name}"), *index)


def constant_table(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a variant's own array: it runs once for the same arguments."""
    made = cache(make)

    def tensor(*args: Any) -> Any:
        return arrays.as_tensor(made(*args))

    # What torch.compiler.assume_constant_result sets (PyTorch need not be there): this is run, not followed.
    tensor._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @wraps(make)
    def table(*args: Any) -> Any:
        return tensor(*args) if arrays.compiling() else made(*args)

    return table
