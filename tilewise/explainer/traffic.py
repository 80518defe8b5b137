"""Bytes that cross between slow and fast memory, step by step: by the tiles, and by the naive algorithm beside them.

Both come by the tiles of the grid in the same order; the naive one skips none, stores the scores and reads them again,
and so it does with the weights. What has been counted after the last step is what the plan says.
"""

from __future__ import annotations

from typing import NamedTuple

from tilewise import arrays
from tilewise.schedule import Kind, Plan, itemsize


class Traffic(NamedTuple):
    """Bytes so far."""

    read: int = 0
    written: int = 0

    def more(self, read: int, written: int = 0) -> Traffic:
        return Traffic(self.read + read, self.written + written)

    @property
    def total(self) -> int:
        return self.read + self.written


class Memory(NamedTuple):
    """After a step: traffic so far, and what the step's work held on chip."""

    tiled: Traffic
    naive: Traffic
    on_chip: int


def memory(plan: Plan, head: int = 0) -> list[Memory]:
    """For each tile of the grid of one head, row by row."""
    shape, size = plan.shape, itemsize(plan.shape.dtype)
    wide = arrays.compute_dtype(shape.dtype).itemsize
    kinds, (last_i, last_j) = plan.kinds(0, head), (n - 1 for n in plan.grid)
    tiled, naive, made = Traffic(), Traffic(), []
    for i in range(last_i + 1):
        rows = _length(plan.queries(i))
        held = rows * shape.d * size + rows * (shape.d_v + 2) * wide  # q; acc, row_max, row_sum
        for j in range(last_j + 1):
            keys = _length(plan.keys(j))
            k_v, scores, visited = keys * (shape.d + shape.d_v) * size, rows * keys, kinds[i, j] != Kind.EMPTY
            if j == 0:
                tiled, naive = (x.more(rows * shape.d * size) for x in (tiled, naive))
            tiled = tiled.more(k_v if visited else 0)
            naive = naive.more(2 * scores * size + (k_v if i == 0 else 0), 2 * scores * size)
            if j == last_j:
                out = rows * shape.d_v * size
                tiled, naive = tiled.more(0, out + rows * wide), naive.more(0, out)
            made.append(Memory(tiled, naive, held + (k_v + scores * wide if visited else 0)))
    return made


def _length(tile: slice) -> int:
    return int(tile.stop - tile.start)
