"""A call as the kernels take it: addresses, steps, tables of sequences and plans. GPU and simulator take the same."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.arrays import Array
from tilewise.kernels.cuda import structs
from tilewise.schedule import plan
from tilewise.spec import Attention, Shape, Tile


@dataclass(frozen=True)
class View:
    """Where an array lies: its address, and its steps counted in numbers."""

    address: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    @classmethod
    def of_numpy(cls, x: Array) -> View:
        return cls(int(x.ctypes.data), x.shape, tuple(step // x.itemsize for step in x.strides))

    @classmethod
    def of_torch(cls, x: Any) -> View:
        return cls(x.data_ptr(), tuple(x.shape), tuple(x.stride()))


@dataclass(frozen=True, eq=False)
class Tables:
    """The sequences of a call and the key tiles that each of their query tiles visits, as one array of int32."""

    numbers: Array
    n_sequences: int
    tiles: int  # of queries, over all sequences
    offsets_at: int
    runs_at: int


def tables(spec: Attention, shape: Shape, tile: Tile, planned: bool = True) -> Tables:
    """`planned`: with the key tiles to visit; the naive kernel visits all keys."""
    rows: list[tuple[int, ...]] = []
    offsets: list[Array] = []
    runs: list[Array] = []
    tiles = n_offsets = n_runs = 0
    for part, queries, keys in shape.sequences(spec.lengths):
        steps = (0, 0)
        at = n_offsets
        if planned:
            by_query = plan(spec, part, tile).by_query
            offsets.append(by_query.offsets.ravel() + n_runs)
            runs.append(by_query.table)
            steps = _steps(by_query.offsets)
            n_offsets += by_query.offsets.size
            n_runs += len(by_query.table)
        rows.append((
            tiles, queries.start or 0, keys.start or 0, part.n_q, part.n_k, part.first_batch, part.origin_q,
            part.origin_k, part.total_q, part.total_k, part.packed_q, part.packed_k, at, *steps,
        ))  # fmt: skip
        tiles += -(-part.n_q // tile.q)
    parts = [np.array(rows, np.int32).ravel(), *offsets, *(table.ravel() for table in runs)]
    numbers = np.concatenate(parts).astype(np.int32) if rows else np.zeros(0, np.int32)
    offsets_at = len(rows) * len(structs.SEQUENCE_FIELDS)
    return Tables(numbers, len(rows), tiles, offsets_at, offsets_at + n_offsets)


def _steps(offsets: Array) -> tuple[int, int]:
    """From one batch index and one head to the next; 0 where the plan is the same for all."""
    batch, heads, rows = offsets.shape
    return (heads * rows if batch > 1 else 0), (rows if heads > 1 else 0)


def params(
    spec: Attention,
    shape: Shape,
    made: Tables,
    tables_address: int,
    operands: dict[str, View],
    sinks: View | None,
    loaded: Sequence[View],
) -> Structure:
    """Params of source/params.h. `operands`: q, k, v, out and lse."""
    call: Any = structs.params_type(len(loaded))()
    for name, view in operands.items():
        setattr(call, name, structs.Array(view.address, *view.steps[:3]))
    if sinks is not None:
        call.sinks, call.sinks_step = sinks.address, sinks.steps[0]
    call.sequences = tables_address
    call.offsets = tables_address + 4 * made.offsets_at
    call.runs = tables_address + 4 * made.runs_at
    call.n_sequences, call.tiles, call.heads, call.group = made.n_sequences, made.tiles, shape.heads, shape.group
    call.scale = spec.scale
    for i, view in enumerate(loaded):
        call.arrays[i].data = view.address
        call.arrays[i].step[: len(view.steps)] = view.steps
        call.arrays[i].size[: len(view.shape)] = view.shape
    return call  # type: ignore[no-any-return]


def blocks(shape: Shape, made: Tables) -> int:
    """One for each query tile of each head."""
    return made.tiles * shape.heads * shape.batch
