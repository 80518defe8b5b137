"""The plan of a backward pass whose key tiles add to sums of query tiles in turns."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tilewise.arrays import Array
from tilewise.kernels.tables import FIRST_RUN, N_RUNS, Tables
from tilewise.spec import Lengths, Shape

_L2_SHARE = 24 << 20  # bytes that stay in a GPU's L2 cache while key tiles of several heads are taken in turns
_CHAIN = 2.5  # steps from one key tile's addition to a sum until the next tile's may follow, and some to spare
Q_BEGIN, K_BEGIN = 1, 2  # fields of a record; two more come behind the last: TILES_BEFORE and VISITS


def section(shape: Shape, mean_visits: float, blocks: int) -> int:
    """How many key heads take turns.

    So many that the cache holds what they read and add to. But key tiles of a head begin one after the other, each when
    the one before has added to its first sum: heads enough that all blocks are busy nevertheless.
    """
    heads = shape.heads_k * shape.batch
    by_cache = _L2_SHARE // max(1, 2 * (shape.n_k + shape.group * shape.n_q) * (shape.d + shape.d_v))
    by_chain = math.ceil(_CHAIN * blocks / max(1.0, mean_visits * shape.group))
    return min(heads, max(1, by_cache, by_chain))


def tiles_of_queries(shape: Shape, lengths: Lengths | None, size: int) -> int:
    """Of all sequences."""
    return sum(-(-part.n_q // size) for part, _, _ in shape.sequences(lengths))


def in_turns(made: Tables, shape: Shape, lengths: Lengths | None, size: int) -> Tables:
    """A plan by keys. Of each record the query tiles are visited from the last to the first, so that each key tile
    comes to a query tile after those before it did. Runs become (last tile, how many, kind, turn), where turn is how
    many records before this one visit a tile. Records have two fields more: query tiles of the sequences before
    theirs, and visits.

    Blocks take records in their order, so each tile's turns come to blocks that have begun.
    """
    records = numbered(_each_in_its_order(made), shape, lengths, size)
    runs, n_runs = [np.zeros((1, 4), np.int64)], 1  # never empty
    for at in np.ndindex(*records.shape[:2]):
        visits = _visits(records[at], made.runs, size)
        table, counts = _as_runs(visits, len(records[at]))
        records[at][:, FIRST_RUN] = n_runs + np.cumsum(counts) - counts
        records[at][:, N_RUNS] = counts
        records[at][:, -1] = np.bincount(visits[:, 0], minlength=len(records[at]))
        runs.append(table)
        n_runs += len(table)
    return replace(made, records=records, runs=np.concatenate(runs).astype(np.int32))


def _each_in_its_order(made: Tables) -> Array:
    """Records of each batch index, those with the most visits first, whatever other batch indices visit: what is added
    to a sum, and when, does not depend on them."""
    size = np.concatenate([[0], np.cumsum(made.runs[:, 1] - made.runs[:, 0])])
    every = []
    for records in made.records:
        records = records[:, np.lexsort((records[0, :, 0], records[0, :, K_BEGIN]))]
        visits = size[records[..., FIRST_RUN] + records[..., N_RUNS]] - size[records[..., FIRST_RUN]]
        every.append(records[:, np.argsort(-visits.sum(axis=0), kind="stable")])
    return np.stack(every)


def numbered(records: Array, shape: Shape, lengths: Lengths | None, size: int) -> Array:
    """Records with two fields more; the second is 0."""
    parts = [(rows.start or 0, -(-part.n_q // size)) for part, rows, _ in shape.sequences(lengths)]
    begins, counts = np.array(parts, np.int64).reshape(-1, 2).T
    before = np.concatenate([[0], np.cumsum(counts)])[np.searchsorted(begins, records[..., Q_BEGIN])]
    more = np.stack([before, np.zeros_like(before)], axis=-1)
    return np.ascontiguousarray(np.concatenate([records, more], axis=-1), np.int32)


def _visits(records: Array, runs: Array, size: int) -> Array:
    """(record, tile, kind, turn) of each visit, record by record, tiles from the last to the first."""
    of_record = np.repeat(np.arange(len(records)), records[:, N_RUNS])
    within = np.arange(len(of_record)) - np.repeat(
        np.cumsum(records[:, N_RUNS]) - records[:, N_RUNS], records[:, N_RUNS]
    )
    number = records[of_record, FIRST_RUN] + records[of_record, N_RUNS] - 1 - within  # from the last run to the first
    first, last, kind = runs[number].T
    lengths = last - first
    record, kinds = np.repeat(of_record, lengths), np.repeat(kind, lengths)
    back = np.arange(len(record)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    tile = np.repeat(last, lengths) - 1 - back
    return np.stack([record, tile, kinds, _times_before(tile + records[record, -2])], axis=-1)


def _times_before(numbers: Array) -> Array:
    """How often each number was there before."""
    order = np.argsort(numbers, kind="stable")
    begins = np.searchsorted(numbers[order], numbers[order])
    before = np.empty_like(order)
    before[order] = np.arange(len(order)) - begins
    return before


def _as_runs(visits: Array, records: int) -> tuple[Array, Array]:
    """Visits one below the other, of one kind and turn, as one run each; how many of them each record has."""
    record, tile, kind, turn = visits.T
    goes_on = np.zeros(len(visits), bool)
    goes_on[1:] = (np.diff(tile) == -1) & ~np.diff(visits[:, [0, 2, 3]], axis=0).any(axis=1)
    begins = np.flatnonzero(~goes_on)
    counts = np.diff(np.append(begins, len(visits)))
    table = np.stack([tile[begins], counts, kind[begins], turn[begins]], axis=-1)
    return table, np.bincount(record[begins], minlength=records)
