"""What programs are told of their tiles: a record each, and the runs of tiles that it visits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.schedule import Runs, plan
from tilewise.spec import Attention, Lengths, Shape, Tile
from tilewise.walking import loads

FIELDS = 14  # of a record, as in the tiles.py of each system that takes them
FIRST_RUN, N_RUNS = 5, 6


@dataclass(frozen=True, eq=False)
class Tables:
    """records: (batch or 1, heads or 1, tiles, FIELDS); runs: (n, 3), first, last and kind. Both int32."""

    records: Array
    runs: Array
    visits: int  # of tiles by all records
    most_visits: int  # by one of them

    @property
    def steps(self) -> tuple[int, int]:
        """From one batch index and one head to the next; 0 where records are the same for all."""
        batch, heads, tiles, fields = self.records.shape
        return (heads * tiles * fields if batch > 1 else 0), (tiles * fields if heads > 1 else 0)


def tables(spec: Attention, shape: Shape, tile: Tile, by_key: bool = False) -> Tables:
    """The tiles of queries with the key tiles that each visits, or the other way round; those with the most first."""
    spec = _as_the_host_sees_it(spec)
    parts = [np.zeros((1, 1, 0, FIELDS), np.int64)]  # there may be no sequence
    runs: list[Array] = []
    n_runs = 0
    for part, queries, keys in shape.sequences(spec.lengths):
        made = plan(spec, part, tile)
        rows = made.by_key if by_key else made.by_query
        begins = queries.start or 0, keys.start or 0
        parts.append(_records(rows, part, begins, tile.k if by_key else tile.q, n_runs))
        runs.append(rows.table)
        n_runs += len(rows.table)
    heads = np.broadcast_shapes(*(x.shape[:2] for x in parts))
    every = np.concatenate([np.broadcast_to(x, (*heads, *x.shape[2:])) for x in parts], axis=2)
    table = np.concatenate([*runs, np.zeros((1, 3), np.int64)])  # never empty
    size = np.concatenate([[0], np.cumsum(table[:, 1] - table[:, 0])])
    visits = size[every[..., FIRST_RUN] + every[..., N_RUNS]] - size[every[..., FIRST_RUN]]
    every = every[:, :, np.argsort(-visits.sum(axis=(0, 1)), kind="stable")]
    records, table = np.ascontiguousarray(every, np.int32), table.astype(np.int32)
    return Tables(records, table, int(visits.sum()), int(visits.max(initial=0)))


def sequences(shape: Shape, lengths: Lengths | None) -> Array:
    """A record each of the whole sequences, in their order: (sequences, FIELDS). A dense call is one."""
    parts = [_fields(part, (rows.start or 0, cols.start or 0)) for part, rows, cols in shape.sequences(lengths)]
    return np.asarray(parts, np.int32).reshape(-1, FIELDS)


def _records(rows: Runs, part: Shape, begins: tuple[int, int], size: int, n_runs: int) -> Array:
    starts, ends = rows.offsets[..., :-1], rows.offsets[..., 1:]
    made = np.tile(_fields(part, begins), (*starts.shape, 1))
    made[..., 0] = np.arange(starts.shape[-1]) * size  # the first query or key
    made[..., FIRST_RUN], made[..., N_RUNS] = starts + n_runs, ends - starts
    return made


def _fields(part: Shape, begins: tuple[int, int]) -> Array:
    """What all tiles of a sequence have in common."""
    return np.array([
        0, *begins, part.n_q, part.n_k, 0, 0,
        part.first_batch, part.origin_q, part.origin_k, part.total_q, part.total_k, part.packed_q, part.packed_k,
    ], np.int64)  # fmt: skip


def _as_the_host_sees_it(spec: Attention) -> Attention:
    """Arrays on a GPU are not looked at: tiles in which scores are all -inf because of them are visited."""
    if spec.score is not None and any(arrays.is_elsewhere(slot.array) for slot in loads(spec.score)):
        return replace(spec, score=None)
    return spec
