"""The structures of source/params.h, field by field."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache

MAX_RANK = 8
MAX_ARRAYS = 24  # all of Params must fit the 4 KiB that kernels of any driver take as parameters

# Sequence is a row of whole numbers.
SEQUENCE_FIELDS = (
    "first_tile", "q_begin", "k_begin", "n_q", "n_k", "batch", "origin_q", "origin_k", "total_q", "total_k",
    "packed_q", "packed_k", "offsets", "offsets_batch", "offsets_head",
)  # fmt: skip


class Array(Structure):
    _fields_ = [("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64)]


class Slot(Structure):
    _fields_ = [("data", c_void_p), ("step", c_int64 * MAX_RANK), ("size", c_int64 * MAX_RANK)]


@cache
def params_type(n_arrays: int) -> type[Structure]:
    """Params, with as many loaded arrays as the kernel's source has."""

    class Params(Structure):
        _fields_ = [
            *((name, Array) for name in ("q", "k", "v", "out", "lse")),
            ("sinks", c_void_p),
            ("sinks_step", c_int64),
            *((name, c_void_p) for name in ("sequences", "offsets", "runs")),
            *((name, c_int32) for name in ("n_sequences", "tiles", "heads", "group")),
            ("scale", c_float),
            ("arrays", Slot * max(n_arrays, 1)),
        ]  # fmt: skip

    return Params
