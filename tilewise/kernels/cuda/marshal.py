"""A call as the kernels take it: addresses, steps, tables of sequences and plans. GPU and simulator take the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.kernels import gpus
from tilewise.kernels.cuda import structs
from tilewise.kernels.cuda.rungs import Rung
from tilewise.kernels.cuda.tables import TABLE_BYTES, Table
from tilewise.kernels.cuda.tensor_map import TensorMap
from tilewise.schedule import Runs, plan
from tilewise.spec import Attention, Shape, Tile
from tilewise.walking import loads

L2_SHARE = 24 << 20  # bytes of k and v that stay in a GPU's L2 cache while tiles of several heads are taken in turns
_PART = 64  # columns that one copy of TMA takes: 128 bytes
LOG2_E = 1.4426950408889634
WARPGROUP_ROWS = 64
RECORD = 32  # whole numbers of a record


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
    tiles: int  # of queries, over all sequences
    n_sequences: int
    sequences_at: int = 0
    offsets_at: int = 0
    runs_at: int = 0
    record_batch: int = 0
    record_head: int = 0
    sizes: Array | None = None  # how many key tiles each query tile has
    n_records: int = 0
    most_tiles: int = 0  # that one of them meets
    plans: tuple[int, int] = (1, 1)  # batch indices and heads whose plans differ
    mean_visits: float = 0.0  # tiles that one of them meets


def tables(spec: Attention, shape: Shape, tile: Tile, rung: Rung) -> Tables:
    return _records(spec, shape, tile) if rung.persistent else _sequences(spec, shape, tile, rung.planned, rung.by_key)


def _fields(part: Shape, queries: slice, keys: slice, first_tile: int) -> tuple[int, ...]:
    """Sequence of source/params.h, but for where its offsets are."""
    return (
        first_tile, queries.start or 0, keys.start or 0, part.n_q, part.n_k, part.first_batch, part.origin_q,
        part.origin_k, part.total_q, part.total_k, part.packed_q, part.packed_k,
    )  # fmt: skip


def _sequences(spec: Attention, shape: Shape, tile: Tile, planned: bool, by_key: bool) -> Tables:
    """A table of sequences, and of the runs of their query tiles, or key tiles, if the kernel follows a plan."""
    spec = _as_the_host_sees_it(spec)
    rows: list[tuple[int, ...]] = []
    offsets: list[Array] = []
    runs: list[Array] = []
    tiles = n_offsets = n_runs = visited = planned_tiles = most = 0
    plans = (1, 1)
    for part, queries, keys in shape.sequences(spec.lengths):
        where = (0, 0, 0)
        if planned:
            made = plan(spec, part, tile)
            visits = made.by_key if by_key else made.by_query
            where = (n_offsets, *_steps(visits.offsets))
            offsets.append(visits.offsets.ravel() + n_runs)
            runs.append(visits.table)
            n_offsets += visits.offsets.size
            n_runs += len(visits.table)
            sizes = _sizes(visits)
            visited += int(sizes.sum())
            planned_tiles += sizes.size
            most, plans = max(most, int(sizes.max(initial=0))), np.broadcast_shapes(plans, sizes.shape[:2])
        rows.append((*_fields(part, queries, keys, tiles), *where))
        tiles += -(-part.n_k // tile.k) if by_key else -(-part.n_q // tile.q)
    numbers = _joined(np.array(rows, np.int32), *offsets, *runs)
    offsets_at = len(rows) * len(structs.SEQUENCE_FIELDS)
    return Tables(
        numbers, tiles, len(rows), offsets_at=offsets_at, runs_at=offsets_at + n_offsets,
        mean_visits=visited / max(1, planned_tiles), most_tiles=most, plans=plans,
    )  # fmt: skip


def _sizes(made: Runs) -> Array:
    """How many tiles each tile meets: (batch or 1, heads or 1, tiles)."""
    before = np.concatenate([[0], np.cumsum(made.table[:, 1] - made.table[:, 0])])
    sizes: Array = before[made.offsets[..., 1:]] - before[made.offsets[..., :-1]]
    return sizes


def _records(spec: Attention, shape: Shape, tile: Tile) -> Tables:
    """A record for each query tile, ready to be worked on (Item in source/items.h), those with the most keys first."""
    records: list[Array] = []
    runs: list[Array] = []
    tiles = n_sequences = n_runs = 0
    for part, queries, keys in shape.sequences(spec.lengths):
        n_sequences += 1
        if part.n_q == 0:
            continue
        made = _by_warpgroup(spec, part, tile)
        records.append(_records_of(made, _fields(part, queries, keys, tiles), tile, n_runs))
        runs.append(made.table)
        tiles += -(-part.n_q // tile.q)
        n_runs += len(made.table)
    if not records:
        return Tables(np.zeros(0, np.int32), 0, n_sequences)
    heads = np.broadcast_shapes(*(x.shape[:2] for x in records))
    every = np.concatenate([np.broadcast_to(x, (*heads, *x.shape[2:])) for x in records], axis=2)
    size = every[..., -1].sum(axis=(0, 1))
    every = every[:, :, np.argsort(-size, kind="stable")]
    steps = _steps(every[..., 0])
    return Tables(
        _joined(every, *runs), tiles, n_sequences, runs_at=every.size, record_batch=steps[0], record_head=steps[1],
        sizes=size, n_records=every[..., 0].size, most_tiles=int(every[..., -1].max()),
    )  # fmt: skip


def _by_warpgroup(spec: Attention, part: Shape, tile: Tile) -> Runs:
    """The plan of each warpgroup's rows, joined to query tiles."""
    if part.n_k == 0:  # a tile to mask, so that there is one
        rows = -(-part.n_q // tile.q)
        return Runs(np.array([[0, 1, 0b010101]] * rows), np.arange(rows + 1)[None, None])
    spec = _as_the_host_sees_it(spec)
    if not spec.loaded:  # rows beyond the last query are computed as if they were there: no reason for a mask
        part = replace(part, n_q=-(-part.n_q // WARPGROUP_ROWS) * WARPGROUP_ROWS)
    return plan(spec, part, Tile(WARPGROUP_ROWS, tile.k)).joined(tile.q // WARPGROUP_ROWS, most_skipped=1)


def _as_the_host_sees_it(spec: Attention) -> Attention:
    """Without a score that reads arrays elsewhere: those of -inf need no mask; that all are in a tile, nobody can
    know."""
    unseen = spec.score is not None and any(arrays.is_elsewhere(slot.array) for slot in loads(spec.score))
    return replace(spec, score=None) if unseen else spec


def _records_of(made: Runs, fields: tuple[int, ...], tile: Tile, n_runs: int) -> Array:
    """(batch or 1, heads or 1, query tiles, 32); the last number, which kernels do not read, is the count of tiles."""
    starts, ends = made.offsets[..., :-1], made.offsets[..., 1:]
    records = np.zeros((*starts.shape, RECORD), np.int64)
    records[..., : len(fields)] = fields
    number = np.arange(starts.shape[-1])
    at = structs.ITEM_PLACES
    records[..., at["tile"]] = number
    records[..., at["first_query"]] = number * tile.q
    records[..., at["n_runs"]] = ends - starts
    records[..., at["first_run"]] = starts + n_runs
    for i in range(structs.RUNS_AT_HAND):
        run = made.table[np.minimum(starts + i, len(made.table) - 1)]
        records[..., at["runs"] + 3 * i : at["runs"] + 3 * i + 3] = run
    records[..., -1] = _sizes(made)
    return records


def _joined(*parts: Array) -> Array:
    return np.concatenate([part.ravel() for part in parts]).astype(np.int32)


def _steps(table: Array) -> tuple[int, int]:
    """From one batch index and one head to the next; 0 where the plan is the same for all."""
    batch, heads, rows = table.shape
    return (heads * rows if batch > 1 else 0), (rows if heads > 1 else 0)


def blocks(shape: Shape, made: Tables, by_key: bool = False) -> int:
    """One for each query tile of each head, or key tile of each key head."""
    return made.tiles * (shape.heads_k if by_key else shape.heads) * shape.batch


# -- parameters -------------------------------------------------------------------------------------------------------


def params(
    spec: Attention,
    shape: Shape,
    made: Tables,
    tables_address: int,
    operands: dict[str, View],
    sinks: View | None,
    loaded: Sequence[View],
    constants: Sequence[int] = (),
) -> Structure:
    """Params of source/params.h. `operands`: q, k, v, out, lse, and remainder, if one is kept."""
    call: Any = structs.params_type(max(len(loaded), 1))()
    for name, view in operands.items():
        setattr(call, name, structs.Array(view.address, *view.steps[:3]))
    if sinks is not None:
        call.sinks, call.sinks_step = sinks.address, sinks.steps[0]
    call.sequences = tables_address + 4 * made.sequences_at
    call.offsets = tables_address + 4 * made.offsets_at
    call.runs = tables_address + 4 * made.runs_at
    call.n_sequences, call.tiles, call.heads, call.group = made.n_sequences, made.tiles, shape.heads, shape.group
    call.scale = spec.scale
    call.constants[: len(constants)] = constants
    for i, view in enumerate(loaded):
        call.arrays[i].data = view.address
        call.arrays[i].step[: len(view.steps)] = view.steps
        call.arrays[i].size[: len(view.shape)] = view.shape
    return call  # type: ignore[no-any-return]


def launch(
    call: Any, spec: Attention, shape: Shape, made: Tables, maps: dict[str, bytes], next_item: int, at_once: int
) -> Structure:
    """Launch of source/sm90.h around Params. next_item: the address of a count that is 0; at_once: blocks that run."""
    full: Any = structs.aligned(structs.launch_type(len(call.arrays)))
    for name, encoded in maps.items():
        setattr(full, name, structs.TensorMapBytes.from_buffer_copy(encoded))
    full.params = call
    full.records = call.sequences
    full.record_batch, full.record_head = made.record_batch, made.record_head
    full.next_item = next_item
    full.items = blocks(shape, made)
    full.section, full.sections = _sections(shape, made, at_once)
    scale = call.scale if spec.raw_scores else 1.0
    full.binary_scale = LOG2_E * scale
    full.natural = scale / full.binary_scale
    full.natural_rest = scale / full.binary_scale - full.natural
    return full  # type: ignore[no-any-return]


REFINED_AT_MOST = 256 << 20  # bytes


def refined_numbers(made: Tables, tile: Tile) -> int:
    """Whole numbers that refined records and their runs take, a run being at most a tile; and what is found of tiles, a
    byte a warp."""
    found = made.most_tiles * tile.q // 32
    return made.n_records * (RECORD + 3 * made.most_tiles) + -(-made.n_records * found // 4)


def refinement_blocks(made: Tables, tile: Tile, threads: int) -> int:
    """Of the first launch: each looks at as many key tiles of a record as its threads have groups of queries."""
    return made.n_records * -(-made.most_tiles // (threads // tile.q))


def refinement(call: Any, made: Tables, joins: bool) -> Structure:
    """Refinement of source/refine.cu, for its first or its second launch, which adds where the refined records go."""
    full: Any = structs.refinement_type(len(call.arrays))()
    full.params, full.records, full.joins = call, call.sequences, joins
    full.n_records, full.most_tiles = made.n_records, made.most_tiles
    full.record_batch, full.record_head = made.record_batch, made.record_head
    return full  # type: ignore[no-any-return]


def _sections(shape: Shape, made: Tables, at_once: int) -> tuple[int, int]:
    """How many heads take turns, their largest tiles first, and how many sections there are, the last with the rest.

    So many heads that k and v stay in the cache. But the last section needs enough of them to hide its largest tile.
    Where all tiles are alike one head after the other is best.
    """
    heads, sizes = max(1, shape.heads * shape.batch), made.sizes
    if sizes is None or np.all(sizes == sizes[0]):
        return 1, heads
    by_cache = max(1, L2_SHARE * shape.group // (2 * shape.n_k * (shape.d + shape.d_v)))
    by_balance = math.ceil(1.5 * at_once * int(sizes.max()) / int(sizes.sum()))
    before = max(0, heads - max(by_cache, by_balance))
    count = math.ceil(before / by_cache)
    return (heads, 1) if count == 0 else (before // count, count + 1)


def tensor_maps(
    operands: dict[str, View], dtype: str, tile: Tile, table: Table | None = None, loaded: Sequence[View] = ()
) -> dict[str, TensorMap]:
    """q, k, v and d_out, those that there are, as TMA loads them: (d, n, heads, batch), a part of a tile's columns. And
    d_q, d_k and d_v, as a warpgroup has it store them.

    table: an array among those that the variant loads of which tiles come along: (keys, queries, other, other).
    """
    rows = {"q": tile.q, "k": tile.k, "v": tile.k, "d_out": tile.q}
    rows |= dict.fromkeys(("d_q", "d_k", "d_v"), WARPGROUP_ROWS)
    maps = {name: _tensor_map(operands[name], dtype, count) for name, count in rows.items() if name in operands}
    if table is not None:
        maps["table"] = _table_map(loaded[table.slot], table, tile)
    return maps


def _table_map(view: View, table: Table, tile: Tile) -> TensorMap:
    size = TABLE_BYTES[table.dtype]
    axes = (table.q_axis, *table.others)
    sizes = [view.shape[table.k_axis], *(view.shape[i] for i in axes)]
    steps = [size * view.steps[i] if view.shape[i] > 1 else 16 for i in axes]
    missing = 4 - len(sizes)
    return TensorMap(
        view.address, table.dtype, (*sizes, *[1] * missing), (*steps, *[16] * missing), (128 // size, tile.q, 1, 1)
    )


def _tensor_map(view: View, dtype: str, rows: int) -> TensorMap:
    return TensorMap(view.address, dtype, view.shape[::-1], _bytes_of_steps(view), (_PART, rows, 1, 1))


def _bytes_of_steps(view: View) -> tuple[int, ...]:
    """Of 16-bit numbers, innermost first. The step of a dimension of size 1 is never taken: any will do."""
    return tuple(2 * step if size > 1 else 16 for size, step in zip(view.shape[2::-1], view.steps[2::-1], strict=True))


def cannot_be_copied(operands: dict[str, View]) -> str | None:
    """Why TMA cannot load these arrays."""
    reasons = (gpus.not_copied(name, view.address, _bytes_of_steps(view)) for name, view in operands.items())
    return next((reason for reason in reasons if reason is not None), None)
