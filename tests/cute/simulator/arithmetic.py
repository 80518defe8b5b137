"""What instructions compute, of numbers that a lane has for itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.cute.simulator.values import TYPES, Numbers

Function = Callable[..., Numbers]


def narrowed(x: Numbers, element: str) -> Numbers:
    """To half precision, as 16 bits; of two numbers that are as near the even one."""
    if element == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    bits = x.astype(np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FFF, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: Numbers, element: str) -> Numbers:
    if element == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pair(high: Numbers, low: Numbers, element: str) -> Numbers:
    return narrowed(high, element).astype(np.uint32) << 16 | narrowed(low, element)


def converted(to: str, from_: str, saturates: bool) -> Function:
    if from_ in ("bf16", "f16"):
        return lambda a: widened(a, from_)
    if to in ("bf16", "f16"):
        return lambda a: narrowed(a, to)
    if saturates:
        return lambda a: np.where(np.isnan(a), 0, np.clip(a, 0, 1)).astype(np.float32)
    return lambda a: a.astype(TYPES[to])


def _fused(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    return a.astype(np.float64) * b + c


def _fused_down(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    exact = _fused(a, b, c)
    near = exact.astype(np.float32)
    return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)


def _power(x: Numbers) -> Numbers:
    made = np.exp2(x)
    return np.where(made < np.float32(2.0**-126), np.float32(0.0), made)


def _quotient(a: Numbers, b: Numbers) -> Numbers:
    """Towards 0."""
    return np.where(b == 0, 0, np.trunc(a.astype(np.float64) / np.where(b == 0, 1, b)))


def _upper_half(a: Numbers, b: Numbers) -> Numbers:
    """Of a product, by Python's own numbers, which have any width."""
    return (a.astype(object) * b.astype(object)) >> (8 * a.dtype.itemsize)


def _shifted_right(a: Numbers, b: Numbers) -> Numbers:
    return a >> np.minimum(b.astype(a.dtype), a.dtype.itemsize * 8 - 1)


def _unordered(a: Numbers, b: Numbers) -> Numbers:
    return np.isnan(a) | np.isnan(b)


FUNCTIONS: dict[str, Function] = {
    "mov": lambda a: a, "neg": lambda a: -a, "abs": np.abs, "not": lambda a: ~a,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mul.lo": np.multiply,
    "mul.hi": _upper_half, "mad.lo": lambda a, b, c: a * b + c,
    "div": _quotient, "div.rn": np.divide, "rcp.rn": lambda a: 1 / a,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": lambda a, b: a << b, "shr": _shifted_right,
    "min": np.fmin, "max": np.fmax, "min.relu": lambda a, b: np.maximum(np.minimum(a, b), 0),
    "fma.rn": _fused, "fma.rm": _fused_down, "ex2.approx.ftz": _power,
}  # fmt: skip
COMPARISONS: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "neu": np.not_equal, "gtu": lambda a, b: ~(a <= b), "ltu": lambda a, b: ~(a >= b), "geu": lambda a, b: ~(a < b),
    "leu": lambda a, b: ~(a > b), "equ": lambda a, b: (a == b) | _unordered(a, b), "nan": _unordered,
    "num": lambda a, b: ~_unordered(a, b),
}  # fmt: skip
