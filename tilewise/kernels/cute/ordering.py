"""Which query tiles a persistent kernel's blocks compute, and in which order."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from tilewise.kernels.tables import FIRST_RUN, N_RUNS, Tables
from tilewise.kernels.uploads import Plan
from tilewise.pytorch import graphs
from tilewise.spec import Shape

L2_SHARE = 24 << 20  # bytes of k and v that stay in a GPU's cache while tiles of several heads are taken in turns
_PARTIAL_TILE = (0, 1, 1)  # a run: the first tile, whose keys all have to ask whether they count


def never_without_keys(made: Tables) -> Tables:
    """Rows without keys get a tile in which every key is masked: a kernel's blocks need not know of them."""
    without = made.records[..., N_RUNS] == 0
    if not without.any():
        return made
    records = made.records.copy()
    records[..., FIRST_RUN][without], records[..., N_RUNS][without] = len(made.runs), 1
    return replace(made, records=records, runs=np.concatenate([made.runs, np.array([_PARTIAL_TILE], np.int32)]))


def items(device: Any, shape: Shape, plan: Plan, shares_rows: bool) -> tuple[Any, int, int, int]:
    """What such a kernel is told: the count of those taken, how many blocks there are, sections of heads and their
    number. shares_rows: heads read the same rows of an array, which stay in the cache if they take turns."""
    blocks = min(_multiprocessors(device), shape.batch * shape.heads * plan.records.shape[2])
    return _count_on(device), blocks, *sections(shape, plan, blocks, shares_rows)


def sections(shape: Shape, plan: Plan, at_once: int, shares_rows: bool = False) -> tuple[int, int]:
    """How many heads take turns, their largest tiles first, and how many sections there are, the last with the rest.

    So many heads that k and v stay in the cache. But the last section needs enough of them to hide its largest tile.
    Where all tiles are alike one head after the other is best.
    """
    heads, tiles = shape.heads * shape.batch, plan.records.shape[2]
    planned = plan.records.shape[0] * plan.records.shape[1]
    if plan.visits == plan.most_visits * tiles * planned and not shares_rows:
        return 1, heads
    by_cache = max(1, L2_SHARE * shape.group // max(1, 2 * shape.n_k * (shape.d + shape.d_v)))
    by_balance = math.ceil(1.5 * at_once * plan.most_visits * planned / max(1, plan.visits))
    before = max(0, heads - max(by_cache, by_balance))
    count = math.ceil(before / by_cache)
    return (heads, 1) if count == 0 else (before // count, count + 1)


_ROOM = 4096
_lock = threading.Lock()


@dataclass(eq=False)
class _Counts:
    """On a device, each 0: launches of one stream follow each other and share one; those of captured graphs may be
    replayed on any stream, so each has its own."""

    free: list[Any]
    of_stream: dict[int, Any]

    def add(self, device: Any) -> None:
        """More of them, which stay for as long as graphs may be replayed. They are 0 when this returns: the first to
        read one may be another stream, which does not wait for the one that writes them."""
        made = torch.zeros(_ROOM, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()
        graphs.hold(made)
        self.free.extend(made.split(1))


_counts: dict[Any, _Counts] = {}


def _count_on(device: Any) -> Any:
    """A count that is 0, and is again after a launch."""
    with _lock:
        if graphs.is_capturing():
            counts = _counts.get(device)
            if counts is not None and counts.free:
                return counts.free.pop()
            return torch.zeros(1, dtype=torch.int32, device=device)  # a part of the graph
        counts = _counts.setdefault(device, _Counts([], {}))
        if not counts.free:
            counts.add(device)
        stream = torch.cuda.current_stream(device).cuda_stream
        if stream not in counts.of_stream:
            counts.of_stream[stream] = counts.free.pop()
        return counts.of_stream[stream]


@cache
def _multiprocessors(device: Any) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
