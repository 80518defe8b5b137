"""A call as the engine takes it: pointers, strides, programs, plans. What they point into is kept beside them."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.expr import Expr
from tilewise.kernels.cpu import structs
from tilewise.kernels.cpu.ops import Bytecode, bytecode
from tilewise.schedule import Runs as PlanRuns
from tilewise.schedule import beyond_32_bits, plan
from tilewise.spec import Attention, Partial, Shape, Tile
from tilewise.walking import loads

_SPLIT_KEYS, _MOST_SPLITS = 512, 8


def splits(n_k: int) -> int:
    """Into how many tasks a head's keys are split; by their number alone, so that bits do not depend on the machine."""
    return max(1, min(_MOST_SPLITS, n_k // _SPLIT_KEYS))


def _has_whole_steps(x: Array) -> bool:
    """Whether a pointer to its numbers can walk the array: a field of records, say, may lie anywhere."""
    flags = x.flags
    return flags.aligned and (flags.c_contiguous or not any(step % x.itemsize for step in x.strides))


def _has_rows(x: Array) -> bool:
    """Whether the engine takes it where it is: the last numbers side by side. An empty one has any strides."""
    return x.size == 0 or (_has_whole_steps(x) and (x.strides[-1] == x.itemsize or x.shape[-1] == 1))


class Marshal:
    """Builds the structures of one call, and keeps alive what they point to."""

    def __init__(self, spec: Attention, shape: Shape, tile: Tile) -> None:
        self.spec, self.shape, self.tile = spec, shape, tile
        self._kept: list[Any] = []

    def forward(self, q: Array, k: Array, v: Array, results: Partial, backward: bool = False) -> structs.Call:
        spec, shape, lse = self.spec, self.shape, results.lse
        result = self.array if backward else self.output  # backward reads what forward has written
        call = structs.Call(
            type=structs.TYPES.index(shape.dtype), batch=shape.batch, heads=shape.heads, heads_k=shape.heads_k,
            d=shape.d, d_v=shape.d_v, rows_q=q.shape[2], rows_k=k.shape[2], tile_q=min(self.tile.q, max(shape.n_q, 1)),
            tile_k=min(self.tile.k, max(shape.n_k, 1)), scale=spec.scale,
            q=self.array(q), k=self.array(k), v=self.array(v), out=result(results.out), lse=result(lse),
        )  # fmt: skip
        if results.remainder is not None:
            call.remainder = result(results.remainder)
        sequences = [self._sequence(*part, backward) for part in shape.sequences(spec.lengths)]
        call.n_sequences = len(sequences)
        call.sequences = self.table(structs.Sequence, sequences)
        if spec.mask is not None:
            code = bytecode(spec.mask, self.is_wide(spec.mask))
            call.mask, call.mask_at = self.program(code), code.at
        if spec.sinks is not None:
            call.sinks = self.data(np.require(arrays.widen(arrays.as_numpy(spec.sinks), lse.dtype), None, ["C", "A"]))
        return call

    def is_wide(self, expr: Expr) -> bool:
        """Whether integers of the expression take 64 bits: ids that are hashes, say. Others are computed faster."""
        reads_integers = any(arrays.value_kind(slot.array) == "int" for slot in loads(expr))
        return reads_integers and beyond_32_bits(expr, self.shape, self.spec.lengths)

    def array(self, x: Array) -> structs.Array:
        """(batch, heads, n, d) or (batch, heads, n) numbers to read; copied unless they lie in rows."""
        if not _has_rows(x):
            x = x.copy(order="C")  # np.ascontiguousarray leaves a misaligned one where it is
        return self._where(x)

    def output(self, x: Array) -> structs.Array:
        """The same to write to: never a copy, which no one would read."""
        if not _has_rows(x):
            raise ValueError(f"the engine cannot write to strides {x.strides} of {x.itemsize}-byte numbers")
        return self._where(x)

    def _where(self, x: Array) -> structs.Array:
        size, (batch, head, row, *_) = x.itemsize, x.strides
        return structs.Array(self.data(x), batch // size, head // size, row // size)

    def program(self, made: Bytecode) -> structs.Program:
        slots = [self.slot(arrays.as_numpy(slot.array)) for slot in made.slots]
        self._kept.append(made.code)
        return structs.Program(ctypes.addressof(made.code), len(made.code), self.table(structs.Slot, slots))

    def slot(self, x: Array) -> structs.Slot:
        if not _has_whole_steps(x):
            x = x.copy(order="C")  # of no dimensions too, to which np.ascontiguousarray gives one
        slot = structs.Slot(self.data(x), structs.TYPES.index(arrays.dtype_name(x)), x.ndim)
        slot.size[: x.ndim] = x.shape
        slot.stride[: x.ndim] = [step // x.itemsize for step in x.strides]
        return slot

    def _sequence(self, part: Shape, rows: slice, cols: slice, backward: bool) -> structs.Sequence:
        # One query is a tile of its own: in a larger one it would be ragged, and its mask looked at everywhere.
        schedule = plan(self.spec, part, replace(self.tile, q=1) if part.n_q == 1 and not backward else self.tile)
        order = {"by_key": schedule.by_key} if backward else {"by_query": schedule.by_query}
        return structs.Sequence(
            rows.start or 0, cols.start or 0, part.n_q, part.n_k, part.first_batch, part.origin_q, part.origin_k,
            part.total_q, part.total_k, part.packed_q, part.packed_k, splits(part.n_k),
            **{name: self._runs(runs) for name, runs in order.items()},
        )  # fmt: skip

    def _runs(self, runs: PlanRuns) -> structs.Runs:
        steps = zip(runs.offsets.strides, runs.offsets.shape, strict=True)
        batch, head, _ = (step // runs.offsets.itemsize if size > 1 else 0 for step, size in steps)
        return structs.Runs(self.data(runs.table), self.data(runs.offsets), batch, head)

    def table(self, kind: Any, items: list[Any]) -> int:
        table = (kind * len(items))(*items)
        self._kept.append(table)
        return ctypes.addressof(table)

    def data(self, x: Array) -> int:
        self._kept.append(x)
        return int(x.ctypes.data)
