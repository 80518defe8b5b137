"""Types of floats: how coarse they are, what is computed in them, and what a number becomes that is stored in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.fuzzing.question import Numbers

# Half the distance from 1 to the next number: the relative error of one rounding.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1.7e308}
# What a number may lose near 0: to float16's coarse steps there, and in wider types to a function that gives up early.
SMALLEST = {"float16": 2.0**-25, "bfloat16": 2.0**-124, "float32": 2.0**-124, "float64": 2.0**-1020}
HALF = ("float16", "bfloat16")


def wide(dtype: str) -> str:
    """What scores and sums of inputs of this type are kept in."""
    return "float64" if dtype == "float64" else "float32"


def coarser(*dtypes: str) -> str:
    return max(dtypes, key=ROUNDING.__getitem__)


def exact_type(dtype: str) -> Any:
    """Wider than what a kernel computes with: float64's own sums are off as far as a kernel's may be."""
    return np.longdouble if dtype == "float64" else np.float64


def unrounded(x: Numbers) -> Numbers:
    return x


def to_float16(x: Numbers) -> Numbers:
    """Numbers of float32 as float16 would hold them, to nearest even; still float32."""
    bits = _bits(x)
    cut = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    normal, size = cut.view(np.float32), np.abs(x)
    # Below 2^-14 steps are 2^-24, as float32's are from 0.5 to 1.
    small = np.copysign((size + np.float32(0.5)) - np.float32(0.5), x)
    rounded = np.where(size < np.float32(2.0**-14), small, normal)
    infinite = np.copysign(np.float32(np.inf), x)
    return np.where(np.isnan(x), x, np.where(np.abs(rounded) > np.float32(65504), infinite, rounded))


def to_bfloat16(x: Numbers) -> Numbers:
    """Numbers of float32 as bfloat16 would hold them, to nearest even; still float32."""
    bits = _bits(x)
    cut = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, cut.view(np.float32))


def _bits(x: Numbers) -> Any:
    if x.dtype != np.float32:
        raise TypeError(f"numbers to round: expected float32, got {x.dtype}")
    return np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)


STORED = {"float16": to_float16, "bfloat16": to_bfloat16, "float32": unrounded, "float64": unrounded}
