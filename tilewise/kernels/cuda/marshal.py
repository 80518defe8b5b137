"""A call as the kernels take it: addresses, steps, tables of sequences and plans. GPU and simulator take the same."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise.arrays import Array
from tilewise.kernels.cuda import structs
from tilewise.kernels.cuda.rungs import Rung
from tilewise.kernels.cuda.tensor_map import TensorMap
from tilewise.schedule import Kind, Runs, plan
from tilewise.spec import Attention, Shape, Tile

_L2_SHARE = 24 << 20  # bytes of k and v that stay in a GPU's L2 cache while tiles of several heads are taken in turns
_PART = 64  # columns that one copy of TMA takes: 128 bytes


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


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Tables:
    """The sequences of a call and the key tiles that each of their query tiles visits, as one array of int32."""

    numbers: Array
    n_sequences: int
    tiles: int  # of queries, over all sequences
    offsets_at: int
    runs_at: int
    order_at: int  # query tiles, those with the most key tiles first
    is_even: bool  # whether all query tiles have as many


def tables(spec: Attention, shape: Shape, tile: Tile, rung: Rung) -> Tables:
    """A rung that follows no plan visits all keys, and needs the sequences alone."""
    rows: list[tuple[int, ...]] = []
    offsets: list[Array] = []
    runs: list[Array] = []
    sizes: list[Array] = []  # key tiles of each query tile, over the heads whose plans differ
    tiles = n_offsets = n_runs = 0
    for part, queries, keys in shape.sequences(spec.lengths):
        steps = (0, 0)
        at = n_offsets
        if rung.planned:
            by_query = _plan(spec, part, tile, rung)
            if rung.persistent:
                sizes.append(_sizes(by_query))
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
    size = np.concatenate(sizes) if sizes else np.zeros(0)
    order = np.argsort(-size, kind="stable")
    parts = [np.array(rows, np.int32).ravel(), *offsets, *(table.ravel() for table in runs), order]
    numbers = np.concatenate(parts).astype(np.int32) if rows else np.zeros(0, np.int32)
    offsets_at = len(rows) * len(structs.SEQUENCE_FIELDS)
    runs_at = offsets_at + n_offsets
    is_even = bool(np.all(size == size[:1]))
    return Tables(numbers, len(rows), tiles, offsets_at, runs_at, runs_at + 3 * n_runs, is_even)


def _plan(spec: Attention, part: Shape, tile: Tile, rung: Rung) -> Runs:
    if not rung.persistent:
        return plan(spec, part, tile).by_query
    if not spec.loaded:  # rows beyond the last query are computed as if they were there: no reason for a mask
        part = replace(part, n_q=-(-part.n_q // tile.q) * tile.q)
    return _never_empty(plan(spec, part, tile).by_query)


def _never_empty(runs: Runs) -> Runs:
    """A query tile that no key counts for gets a key tile to mask: each item of a persistent kernel has one."""
    counts = np.diff(runs.offsets)
    if counts.all():
        return runs
    at = np.cumsum(counts.ravel()) - counts.ravel()
    table = np.insert(runs.table, at[counts.ravel() == 0], (0, 1, Kind.PARTIAL), axis=0)
    counts = np.maximum(counts, 1)
    ends = np.cumsum(counts.ravel()).reshape(counts.shape)
    starts = ends[..., :1] - counts[..., :1]
    return Runs(table, np.concatenate([starts, ends], axis=-1))


def _sizes(runs: Runs) -> Array:
    ends = np.concatenate([[0], np.cumsum(runs.table[:, 1] - runs.table[:, 0])])
    size: Array = np.diff(ends[runs.offsets]).sum(axis=(0, 1))
    return size


def _steps(offsets: Array) -> tuple[int, int]:
    """From one batch index and one head to the next; 0 where the plan is the same for all."""
    batch, heads, rows = offsets.shape
    return (heads * rows if batch > 1 else 0), (rows if heads > 1 else 0)


def blocks(shape: Shape, made: Tables) -> int:
    """One for each query tile of each head."""
    return made.tiles * shape.heads * shape.batch


# -- parameters -------------------------------------------------------------------------------------------------------


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
    call: Any = structs.params_type(max(len(loaded), 1))()
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


def launch(call: Any, shape: Shape, made: Tables, maps: dict[str, bytes], next_item: int) -> Structure:
    """Launch of source/sm90.h around Params. `next_item`: the address of a count that is 0."""
    full: Any = structs.aligned(structs.launch_type(len(call.arrays)))
    for name, encoded in maps.items():
        setattr(full, name, structs.TensorMapBytes.from_buffer_copy(encoded))
    full.params = call
    full.order = call.sequences + 4 * made.order_at
    full.next_item = next_item
    full.items, full.section = blocks(shape, made), _section(shape, made)
    return full  # type: ignore[no-any-return]


def _section(shape: Shape, made: Tables) -> int:
    """How many heads take turns. Where all tiles are alike one head after the other is best for the cache."""
    if made.is_even:
        return 1
    bytes_a_head = 2 * shape.n_k * (shape.d + shape.d_v) // shape.group
    return max(1, min(_L2_SHARE // max(bytes_a_head, 1), shape.heads * shape.batch))


def tensor_maps(operands: dict[str, View], dtype: str, tile: Tile) -> dict[str, TensorMap]:
    """q, k and v as TMA loads them: (d, n, heads, batch), a part of the columns of one tile at a time."""
    rows = {"q": tile.q, "k": tile.k, "v": tile.k}
    return {name: _tensor_map(operands[name], dtype, count) for name, count in rows.items()}


def _tensor_map(view: View, dtype: str, rows: int) -> TensorMap:
    return TensorMap(view.address, dtype, view.shape[::-1], _bytes_of_steps(view), (_PART, rows, 1, 1))


def _bytes_of_steps(view: View) -> tuple[int, ...]:
    """Of 16-bit numbers, innermost first. The step of a dimension of size 1 is never taken: any will do."""
    return tuple(2 * step if size > 1 else 16 for size, step in zip(view.shape[2::-1], view.steps[2::-1], strict=True))


def cannot_be_copied(operands: dict[str, View]) -> str | None:
    """Why TMA cannot load these arrays."""
    for name in ("q", "k", "v"):
        view = operands[name]
        if view.address % 16:
            return f"{name} does not begin at a multiple of 16 bytes"
        for step in _bytes_of_steps(view):
            if step % 16 or not 0 < step < 2**40:
                return f"{name} has rows, heads or batches {step} bytes apart; TMA takes positive multiples of 16"
    return None
