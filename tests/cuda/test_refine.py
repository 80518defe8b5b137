"""Plans that a GPU makes for itself, where masks read arrays that the host has not seen: on the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.cuda.test_ops import needs_compiler
from tilewise import arrays
from tilewise.arrays import Array
from tilewise.expr import B, H, K, Q, load
from tilewise.kernels.cuda import marshal, marshal_backward, simulator, structs
from tilewise.kernels.cuda.backward_rungs import BACKWARD
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.rungs import REFINE, REFINE_BACKWARD, RUNGS
from tilewise.kernels.cuda.source import assembled
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.schedule import Kind
from tilewise.spec import Attention, Shape, Tile
from tilewise.walking import evaluate

pytestmark = needs_compiler

SHAPE = Shape(2, 4, 2, 300, 420, 64, 64, dtype="bfloat16")
EVERY_PLAN = (B >= 0) & (H >= 0) & (K >= 0)  # so that records differ by batch and head
RNG = np.random.default_rng(0)
IDS_Q, IDS_K = (np.sort(RNG.integers(0, 5, (2, n))).astype(np.int32) for n in (300, 420))
MASKS = {
    "document": tw.document(IDS_Q, IDS_K),
    "dense": tw.dense(RNG.random((300, 420)) < 0.01),
    "heads": load(RNG.integers(0, 400, 4).astype(np.int32), H) >= K,
    "nothing": load(np.zeros(300, np.int32), Q) > 0,
    "everything": load(np.ones(420, np.int32), K) > 0,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tile", [Tile(128, 64), Tile(192, 96)], ids=str)
def test_kinds_are_those_of_the_scores(mask: str, tile: Tile) -> None:
    spec = Attention(1.0, MASKS[mask])
    refined = _refined(spec, tile)
    want = _kinds(spec, Tile(64, tile.k))
    for b in range(SHAPE.batch):
        for h in range(SHAPE.heads):
            for record, runs in refined[b, h]:
                _check(want[b, h], runs, record, tile)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tile", [Tile(64, 128), Tile(64, 64), Tile(128, 128)], ids=str)
def test_kinds_before_gradients_are_those_of_the_scores(mask: str, tile: Tile) -> None:
    """By query and by key: every tile that some score counts in is there with its own kind, and no other."""
    spec = Attention(1.0, MASKS[mask])
    want = _kinds(spec, tile)
    for axis, plans in enumerate(_refined_before_gradients(spec, tile)):
        for (b, h, tile_of), runs in plans.items():
            line = np.zeros(want.shape[3 - axis], int)
            for first, last, kind in runs:
                line[first:last] = kind
            assert np.array_equal(line, want[b, h].take(tile_of, axis)), (axis, b, h, tile_of)


def _check(want: Array, runs: list[tuple[int, int, int]], record: Array, tile: Tile) -> None:
    """Each warpgroup's kinds are the scores' own, but for EMPTY tiles that it visits beside another, masked."""
    parts = tile.q // 64
    first = record[structs.ITEM_PLACES["first_query"]] // 64
    found = np.zeros((parts, want.shape[1]), int)
    for start, stop, kinds in runs:
        for part in range(parts):
            found[part, start:stop] = kinds >> 2 * part & 3
    visited = np.flatnonzero((found != Kind.EMPTY).any(axis=0))
    assert len(visited) > 0
    for part in range(parts):
        exact = want[first + part] if first + part < len(want) else np.zeros(want.shape[1], int)
        assert np.all(found[part][exact != Kind.EMPTY] == exact[exact != Kind.EMPTY])
        assert found[part].any(), "a warpgroup has a tile"
        left_out = np.setdiff1d(visited, np.flatnonzero(found[part]))
        may = exact[visited[-1]] == Kind.EMPTY and exact.any()
        assert left_out.tolist() == ([visited[-1]] if may else [])
    empty_for_all = [i for i in range(want.shape[1]) if not want[first : first + parts, i].any()]
    if len(empty_for_all) < want.shape[1]:
        assert not set(empty_for_all) & set(visited)


def _kinds(spec: Attention, tile: Tile) -> Array:
    """(batch, heads, query tiles, key tiles), score by score."""
    b, h, q, k = np.ix_(*(np.arange(n) for n in (SHAPE.batch, SHAPE.heads, SHAPE.n_q, SHAPE.n_k)))
    shape = (SHAPE.batch, SHAPE.heads, SHAPE.n_q, SHAPE.n_k)
    holds = np.broadcast_to(evaluate(spec.mask, SHAPE.env(b, h, q, k), numpy_ops(np.float32)), shape)
    kinds = np.zeros((*shape[:2], -(-SHAPE.n_q // tile.q), -(-SHAPE.n_k // tile.k)), int)
    for i, j in np.ndindex(kinds.shape[2:]):
        part = holds[:, :, tile.q * i : tile.q * (i + 1), tile.k * j : tile.k * (j + 1)]
        whole = (j + 1) * tile.k <= SHAPE.n_k
        full = part.all(axis=(2, 3)) & whole
        kinds[:, :, i, j] = np.where(full, Kind.FULL, np.where(part.any(axis=(2, 3)), Kind.PARTIAL, Kind.EMPTY))
    return kinds


def _refined(spec: Attention, tile: Tile) -> dict[tuple[int, int], list[tuple[Array, list[tuple[int, int, int]]]]]:
    """For each batch index and head the records that refine.cu makes, with their runs."""
    made = marshal.tables(Attention(1.0, EVERY_PLAN), SHAPE, tile, RUNGS["forward_sm90"])
    made.numbers[made.runs_at :].reshape(-1, 3)[:, 2] = 0b010101  # nothing is known but that keys may count
    source, slots = assembled(REFINE, spec, SHAPE, tile, simulator.headers())
    loaded = [View.of_numpy(arrays.as_numpy(slot.array)) for slot in slots]
    params = marshal.params(spec, SHAPE, made, int(made.numbers.ctypes.data), {}, None, loaded, source.constants)
    room = np.full(marshal.refined_numbers(made, tile), -1, np.int32)
    kernel = simulator.compile_source(source.text)
    blocks = marshal.refinement_blocks(made, tile, source.threads)
    for grid, threads, joins in ((blocks, source.threads, False), (made.n_records, REFINE.JOINERS, True)):
        call: Any = marshal.refinement(params, made, joins)
        call.refined = int(room.ctypes.data)
        kernel.launch(call, grid=grid, threads=threads, shared_bytes=source.shared_bytes)
    records = room[: made.n_records * marshal.RECORD].reshape(SHAPE.batch, SHAPE.heads, -1, marshal.RECORD)
    runs = room[records.size :][: 3 * made.n_records * made.most_tiles].reshape(-1, 3)
    at = structs.ITEM_PLACES
    return {
        (b, h): [
            (record, [tuple(run) for run in runs[record[at["first_run"]] :][: record[at["n_runs"]]].tolist()])
            for record in records[b, h]
        ]
        for b, h in np.ndindex(records.shape[:2])
    }


Plans = dict[tuple[int, int, int], list[list[int]]]  # the runs of each batch index, head and tile


def _refined_before_gradients(spec: Attention, tile: Tile) -> tuple[Plans, Plans]:
    """The plans by query and by key that refine_backward.cu makes."""
    unseen = Attention(1.0, EVERY_PLAN)
    both = [marshal.tables(unseen, SHAPE, tile, rung) for rung in BACKWARD]
    for made in both:
        made.numbers[made.runs_at :].reshape(-1, 3)[:, 2] = Kind.PARTIAL  # nothing is known but that keys may count
    by_query, by_key = both
    at = int(by_query.numbers.ctypes.data), int(by_key.numbers.ctypes.data)
    source, slots = assembled(REFINE_BACKWARD, spec, SHAPE, tile, simulator.headers())
    loaded = [View.of_numpy(arrays.as_numpy(slot.array)) for slot in slots]
    params = marshal.params(spec, SHAPE, by_query, at[0], {}, None, loaded, source.constants)
    sizes = marshal_backward.refined_parts(by_query, by_key, tile)
    room = np.full(sum(sizes.values()), -1, np.int32)
    kernel = simulator.compile_source(source.text)
    grids = marshal_backward.refinement_blocks(by_query, by_key, tile, source.threads)
    for grid, threads, joins in zip(grids, (source.threads, REFINE_BACKWARD.JOINERS), (False, True), strict=True):
        call: Any = marshal_backward.refinement(params, by_query, by_key, at, joins)
        call.refined = int(room.ctypes.data)
        kernel.launch(call, grid=grid, threads=threads, shared_bytes=source.shared_bytes)
    parts = dict(zip(sizes, np.split(room, np.cumsum(list(sizes.values()))[:-1]), strict=True))
    return _plans(parts, "by_query", by_query), _plans(parts, "by_key", by_key)


def _plans(parts: dict[str, Array], name: str, made: marshal.Tables) -> Plans:
    pairs = parts[f"offsets_{name}"].reshape(SHAPE.batch, SHAPE.heads, made.tiles + 1, 2)[:, :, :-1]
    runs = parts[f"runs_{name}"].reshape(-1, 3)
    return {at: runs[slice(*pairs[at])].tolist() for at in np.ndindex(pairs.shape[:3])}
