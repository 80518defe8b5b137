"""The structures that kernels take, field by field as in source/params.h, items.h, sm90.h, backward.h, sm90_backward.h,
arrays.h, arrays_sm90.cu, cells.cu, refine.cu and refine_backward.cu."""

from __future__ import annotations

from ctypes import Structure, addressof, c_byte, c_float, c_int32, c_int64, c_void_p, sizeof
from functools import cache
from typing import Any

MAX_RANK = 8
MOST_BYTES = 4 << 10  # of parameters that kernels of any driver take
MAX_ARRAYS = 18  # all of Launch must fit them
MAX_CONSTANTS = 7  # of bounds, such as a window's sizes
_ALIGNMENT = 64  # tensor maps need it

# Sequence is a row of whole numbers.
SEQUENCE_FIELDS = (
    "first_tile", "q_begin", "k_begin", "n_q", "n_k", "batch", "origin_q", "origin_k", "total_q", "total_k",
    "packed_q", "packed_k", "offsets", "offsets_batch", "offsets_head",
)  # fmt: skip


# Item of source/items.h: where its numbers are after those of Sequence, and how many runs it has at hand.
RUNS_AT_HAND = 3
ITEM_PLACES = {"b": 15, "h": 16, "hk": 17, "tile": 18, "first_query": 19, "n_runs": 20, "first_run": 21, "runs": 22}


class Array(Structure):
    _fields_ = [("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64)]


class Slot(Structure):
    _fields_ = [("data", c_void_p), ("step", c_int64 * MAX_RANK), ("size", c_int64 * MAX_RANK)]


TensorMapBytes = c_byte * 128
MAPS = ("q", "k", "v", "table")  # of Launch


@cache
def params_type(n_arrays: int) -> type[Structure]:
    """Params, with as many loaded arrays as the kernel's source has, but at least one."""

    class Params(Structure):
        _fields_ = [
            *((name, Array) for name in ("q", "k", "v", "out", "lse", "remainder")),
            ("sinks", c_void_p),
            ("sinks_step", c_int64),
            *((name, c_void_p) for name in ("sequences", "offsets", "runs")),
            *((name, c_int32) for name in ("n_sequences", "tiles", "heads", "group")),
            ("scale", c_float),
            ("constants", c_int32 * MAX_CONSTANTS),
            ("arrays", Slot * n_arrays),
        ]  # fmt: skip

    return Params


@cache
def launch_type(n_arrays: int) -> type[Structure]:
    """What a persistent kernel takes: Launch, with its Params inside."""

    class Launch(Structure):
        _fields_ = [
            *((name, TensorMapBytes) for name in MAPS),
            ("params", params_type(n_arrays)),
            ("records", c_void_p),
            *((name, c_int32) for name in ("record_batch", "record_head")),
            ("next_item", c_void_p),
            *((name, c_int32) for name in ("items", "section", "sections")),
            *((name, c_float) for name in ("binary_scale", "natural", "natural_rest")),
        ]  # fmt: skip

    return Launch


BACKWARD_OPERANDS = ("q", "k", "v", "d_out")  # that the copy engine brings
BACKWARD_RESULTS = ("d_q", "d_k", "d_v")  # that it stores
SUMS_MAPS = (*BACKWARD_OPERANDS, "table")
BACKWARD_MAPS = (*BACKWARD_OPERANDS, *BACKWARD_RESULTS, "table")
BACKWARD_ARRAYS = ("d_out", "d_lse", "delta", "d_q", "d_k", "d_v", "remainder")


@cache
def backward_type(n_arrays: int) -> type[Structure]:
    """Backward of source/params.h."""

    class Backward(Structure):
        _fields_ = [("params", params_type(n_arrays)), *((name, Array) for name in BACKWARD_ARRAYS)]

    return Backward


@cache
def sums_type(n_arrays: int) -> type[Structure]:
    """Sums of source/arrays.h, with Backward inside."""

    class Sums(Structure):
        _fields_ = [
            ("backward", backward_type(n_arrays)),
            ("sums", Array),
            *((name, c_int32) for name in ("most_q", "most_k", "q_tiles", "k_tiles")),
            *((name, c_int32) for name in ("kept_batch", "kept_heads", "summed_batch", "summed_heads", "splits")),
        ]  # fmt: skip

    return Sums


@cache
def sums_launch_type(n_arrays: int) -> type[Structure]:
    """Launch of source/arrays_sm90.cu, with Sums inside."""

    class SumsLaunch(Structure):
        _fields_ = [*((name, TensorMapBytes) for name in SUMS_MAPS), ("sums", sums_type(n_arrays))]

    return SumsLaunch


class Gathering(Structure):
    """Of source/cells.cu."""

    _fields_ = [
        *((name, c_void_p) for name in ("sums", "cells", "order", "begins")),
        *((name, c_int32) for name in ("heads", "n_readers", "n_cells")),
    ]  # fmt: skip


WORKSPACE = ("rows", "sums", "turns", "done")


@cache
def backward_launch_type(n_arrays: int) -> type[Structure]:
    """What Hopper's backward kernels take: Launch of source/sm90_backward.h, with Backward inside."""

    class BackwardLaunch(Structure):
        _fields_ = [
            *((name, TensorMapBytes) for name in BACKWARD_MAPS),
            ("backward", backward_type(n_arrays)),
            *((name, c_void_p) for name in ("sequences", "offsets", "runs")),
            *((name, c_void_p) for name in WORKSPACE),
            *((name, c_int32) for name in ("q_tiles", "offsets_apart")),
            ("next_item", c_void_p),
            *((name, c_int32) for name in ("items", "section", "sections", "heads", "share", "shares", "behind")),
        ]  # fmt: skip

    return BackwardLaunch


@cache
def refinement_type(n_arrays: int) -> type[Structure]:
    """Refinement of source/refine.cu."""

    class Refinement(Structure):
        _fields_ = [
            ("params", params_type(n_arrays)),
            ("records", c_void_p),
            *((name, c_int32) for name in ("record_batch", "record_head")),
            ("refined", c_void_p),
            *((name, c_int32) for name in ("n_records", "most_tiles", "joins")),
        ]  # fmt: skip

    return Refinement


class Plan(Structure):
    """Of source/refine_backward.cu."""

    _fields_ = [
        *((name, c_void_p) for name in ("sequences", "offsets", "runs")),
        *((name, c_int32) for name in ("tiles", "n_offsets", "most")),
    ]  # fmt: skip


@cache
def backward_refinement_type(n_arrays: int) -> type[Structure]:
    """Refinement of source/refine_backward.cu."""

    class BackwardRefinement(Structure):
        _fields_ = [
            ("params", params_type(n_arrays)),
            *((name, Plan) for name in ("by_query", "by_key")),
            *((name, c_int32) for name in ("batches", "heads")),
            ("refined", c_void_p),
            ("joins", c_int32),
        ]  # fmt: skip

    return BackwardRefinement


def aligned(kind: type[Structure]) -> Any:
    """A structure at an address that is a multiple of 64, with room for C++ to round its size up to one."""
    room = (c_byte * (sizeof(kind) + 2 * _ALIGNMENT))()
    return kind.from_buffer(room, -addressof(room) % _ALIGNMENT)
