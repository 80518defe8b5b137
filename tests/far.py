"""Arrays whose last number lies 2^31 numbers and 2^32 bytes behind the first, in memory that is hardly touched."""

from __future__ import annotations

import mmap
import sys
from math import prod
from typing import Any

import numpy as np
import pytest

APART = 2**31 + 64  # elements between the first index of an axis and the last, at least
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; this module names it from Python 3.12 on

needs_addresses = pytest.mark.skipif(
    sys.platform != "linux" or sys.maxsize < 2**32, reason="gigabytes of addresses without memory, as Linux gives them"
)


def far(x: np.ndarray, axis: int) -> np.ndarray:
    """A copy of x, spread along one axis; the other axes are as in a packed array. Its rows lie in a page each."""
    copy = room(x.shape, x.dtype, axis)
    copy[...] = x
    return copy


def room(shape: tuple[int, ...], dtype: Any, axis: int) -> np.ndarray:
    """Zeros that are spread along one axis."""
    dtype = np.dtype(dtype)
    assert shape[axis] > 1, "one index is not far from itself"
    least = max(APART, 2**32 // dtype.itemsize + 64)
    block = prod(shape[:axis]) * prod(shape[axis + 1 :])
    # A multiple of 16 bytes, which the copy engine of a GPU asks for; and room for all that lies between two steps.
    step = max(-(-least // (shape[axis] - 1)), block) // 64 * 64 + 64
    memory = mmap.mmap(
        -1, (step * (shape[axis] - 1) + block) * dtype.itemsize,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE,
    )  # fmt: skip
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # or each row would take two megabytes
    others = [size for i, size in enumerate(shape) if i != axis]
    packed = np.empty(others, dtype).strides
    strides = [*packed[:axis], step * dtype.itemsize, *packed[axis:]]
    return np.ndarray(shape, dtype, buffer=memory, strides=strides)
