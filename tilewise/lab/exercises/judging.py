"""What is told of a result: right, or where it is wrong first, how far off, and what may be the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.contract import ContractError, Expected


class WrongError(Exception):
    """What a learner's code did wrong, in words for the learner."""


def compare(about: str, expected: Expected, got: Any, reason: Callable[[], str] = lambda: "") -> None:
    """WrongError if a result is outside the contract; reason: asked for if its numbers are wrong."""
    try:
        errors = expected.errors(got)
    except ContractError as error:
        nan = _first_nan(expected, got)
        raise _wrong(f"{about}: {error}", *([nan, reason()] if nan else [])) from None
    except (AttributeError, TypeError, ValueError):
        raise _wrong(f"{about}: {expected.what}: expected an array, came {type(got).__name__}") from None
    by_row = _by_row(expected, errors)
    wrong = np.argwhere(by_row > expected.limit)
    if len(wrong):
        raise _wrong(
            f"{about}: {expected.what}, {_row(expected, got, wrong[0])}",
            f"{len(wrong)} of {by_row.size} rows are wrong; the largest error is {errors.max():.3g}, "
            f"the contract allows {expected.limit:.3g}",
            reason(),
        )


def _wrong(*lines: str) -> WrongError:
    return WrongError("\n".join(filter(None, lines)))


def _first_nan(expected: Expected, got: Any) -> str:
    if tuple(getattr(got, "shape", ())) != expected.exact.shape:
        return ""
    wide = arrays.widen(arrays.as_numpy(got), np.float64)
    wrong = np.argwhere(_by_row(expected, ~np.isfinite(wide) & np.isfinite(expected.exact)))
    return f"first in {_row(expected, got, wrong[0])}" if len(wrong) else ""


def _by_row(expected: Expected, x: Array) -> Array:
    largest: Array = x.max(axis=-1) if expected.what in ("out", "acc", "p") else x
    return largest


def _row(expected: Expected, got: Any, index: Array) -> str:
    """A row's place, with batch and head where there are several, and its numbers."""
    at = tuple(index)
    names = zip(("batch", "head", "row")[-len(at) :], at, expected.exact.shape, strict=False)
    place = ", ".join(f"{name} {i}" for name, i, n in names if n > 1 or name == "row")
    return f"{place}: expected {_numbers(expected.exact[at])}, came {_numbers(got[at])}"


def _numbers(x: Any) -> str:
    values = np.ravel(arrays.widen(arrays.as_numpy(x), np.float64))
    shown = " ".join(f"{value:.4g}" for value in values[:4])
    return f"{shown} ..." if len(values) > 4 else shown
