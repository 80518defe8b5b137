"""A plan as TileLang's kernels follow it: for each tile a list of the tiles that it visits, and how.

Its loops are pipelined: the threads that load tiles run ahead of those that compute, and each finds its next tile by
number. So runs are written out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tilewise.arrays import Array
from tilewise.kernels.tables import FIRST_RUN, N_RUNS, Tables
from tilewise.kernels.uploads import planned_on
from tilewise.schedule import Kind
from tilewise.spec import Attention, Shape, Tile


@dataclass(frozen=True, eq=False)
class Visits:
    """records: (batch, heads, tiles, fields), each with its first visit and their number in place of runs."""

    records: Any
    visits: Any


def visits_on(device: Any, spec: Attention, shape: Shape, tile: Tile, by_key: bool = False) -> Visits:
    """It looks at arrays in main memory alone."""

    def brought(made: Tables) -> Visits:
        return Visits(*(torch.from_numpy(x).to(device) for x in written_out(made)))

    found = planned_on(device, spec, shape, tile, by_key, "visits", brought)
    return Visits(found.records.expand(shape.batch, shape.heads, -1, -1), found.visits)


def written_out(tables: Tables) -> tuple[Array, Array]:
    """Records and visits, 2 * tile + (1 if it is masked).

    A tile that visits none has one to be masked: what was loaded for it is waited for, and its rows are stored.
    """
    first, last, kind = tables.runs.T
    counts = np.where(kind == Kind.EMPTY, 0, last - first)
    ends = np.concatenate([[0], np.cumsum(counts)])
    tile = np.arange(ends[-1]) + np.repeat(first - ends[:-1], counts)
    masked = 2 * tile + np.repeat(kind == Kind.PARTIAL, counts)
    visits = np.append(masked, 1).astype(np.int32)
    records = tables.records.copy()
    begin, end = ends[records[..., FIRST_RUN]], ends[records[..., FIRST_RUN] + records[..., N_RUNS]]
    records[..., FIRST_RUN] = np.where(begin == end, len(visits) - 1, begin)
    records[..., N_RUNS] = np.maximum(end - begin, 1)
    # The most visits first, so that no block is left to work alone at the end.
    order = np.argsort(-records[..., N_RUNS], axis=-1, kind="stable")
    return np.take_along_axis(records, order[..., None], axis=-2), visits
