"""Values at which an integer argument may break: each gets the right result or an error that names the argument.

A `Case` is one argument of one callable: how to call it, what is right, and which whole numbers it must take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import tilewise as tw

INTEGERS = {
    "-2^63": -(2**63), "-2^31 - 1": -(2**31) - 1, "-2^31": -(2**31), "-1": -1, "0": 0, "1": 1,
    "2^31 - 1": 2**31 - 1, "2^31": 2**31, "2^32": 2**32, "2^53 + 1": 2**53 + 1, "2^63 - 1": 2**63 - 1, "2^64": 2**64,
    "int8 1": np.int8(1), "int8 -128": np.int8(-128), "int64 -2^63": np.int64(-(2**63)),
    "uint64 2^64 - 1": np.uint64(2**64 - 1), "uint32 2^32 - 1": np.uint32(2**32 - 1), "uint8 1": np.uint8(1),
}  # fmt: skip
OTHERS = {
    "True": True,
    "1.0": 1.0,
    "float32 1": np.float32(1),
    "NaN": float("nan"),
    "infinity": float("inf"),
    "text": "1",
}
VALUES: dict[str, Any] = INTEGERS | OTHERS

REFUSALS = (ValueError, TypeError, tw.Unsupported, IndexError, MemoryError)


@dataclass(frozen=True)
class Case:
    """call(value) is what to try, right(value) its result by other means; None: it runs, and that is all."""

    call: Callable[[Any], Any]
    right: Callable[[int], Any] | None
    least: int  # whole numbers that must be taken; all other values must be refused
    most: int
    names: str  # what an error must say: the argument
    may_take_more: bool = False  # whole numbers beyond these may have the right result too
    arrays: bool = False  # the value is put into an array: of unsigned 32 and 64 bits there are none


def check(case: Case, value: Any) -> None:
    """The right result, or an error that names the argument."""
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    is_taken = is_whole and case.least <= int(value) <= case.most
    if case.arrays and np.asarray(value).dtype.name in ("uint32", "uint64", "object"):
        is_taken = is_whole = False
    try:
        found = case.call(value)
    except REFUSALS as refusal:
        assert not is_taken, refusal
        assert case.names in str(refusal)
        return
    assert is_taken or (is_whole and case.may_take_more), "what should be refused is not"
    if case.right is not None:
        np.testing.assert_allclose(found, case.right(int(value)), rtol=1e-5, atol=1e-6)
