"""The structures of engine/engine.h, field by field."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int32, c_int64, c_void_p

MAX_RANK = 8

TYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")


class Array(Structure):
    _fields_ = [("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64)]


class Runs(Structure):
    _fields_ = [("table", c_void_p), ("offsets", c_void_p), ("batch", c_int64), ("head", c_int64)]


class Sequence(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("q_begin", "k_begin", "n_q", "n_k")),
        *((name, c_int64) for name in (
            "first_batch", "origin_q", "origin_k", "total_q", "total_k", "packed_q", "packed_k",
            "splits",
        )),
        ("by_query", Runs),
        ("by_key", Runs),
    ]  # fmt: skip


class Slot(Structure):
    _fields_ = [
        ("data", c_void_p), ("type", c_int32), ("rank", c_int32),
        ("size", c_int64 * MAX_RANK), ("stride", c_int64 * MAX_RANK),
    ]  # fmt: skip


class Instruction(Structure):
    _fields_ = [
        ("op", c_int32), ("place", c_int32), ("operands", c_int32), ("result", c_int32), ("n_args", c_int32),
        ("args", c_int32 * MAX_RANK), ("slot", c_int32), ("value", c_double),
    ]  # fmt: skip


class Program(Structure):
    _fields_ = [("code", c_void_p), ("n_code", c_int32), ("slots", c_void_p)]


class ArrayGrad(Structure):
    _fields_ = [
        ("slope", c_int32), ("load", c_int32), ("grid", Slot), ("total", c_void_p), ("cells", c_int64),
        ("copies", c_int32),
    ]  # fmt: skip


class Call(Structure):
    _fields_ = [
        ("type", c_int32),
        ("n_sequences", c_int32),
        *((name, c_int64) for name in (
            "batch", "heads", "heads_k", "d", "d_v", "rows_q", "rows_k", "tile_q", "tile_k",
        )),
        ("scale", c_double),
        *((name, Array) for name in ("q", "k", "v", "out", "lse", "remainder")),
        ("sequences", c_void_p),
        ("mask", Program),
        ("score", Program),
        ("mask_at", c_int32),
        ("score_at", c_int32),
        ("sinks", c_void_p),
    ]  # fmt: skip


class BackwardCall(Structure):
    _fields_ = [
        ("forward", Call),
        *((name, Array) for name in ("d_out", "delta", "d_q", "d_k", "d_v")),
        ("slope_at", c_int32),
        ("n_grads", c_int32),
        ("grads", c_void_p),
        ("turns", c_int32),
    ]


class Span(Structure):
    _fields_ = [("data", c_void_p), ("bytes", c_int64)]
