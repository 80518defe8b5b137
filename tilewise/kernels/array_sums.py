"""Gradients of the arrays that a score reads, whichever system's kernels add them up: who shares a cell, which sums a
kernel makes, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.expr import Loaded
from tilewise.kernels.reads import Read, Sharing, cells_of_distances, readers_of_cells, reads
from tilewise.kernels.uploads import kept_on, key_of
from tilewise.spec import Attention, Shape
from tilewise.walking import loads


def of_arrays(spec: Attention, gradient: Callable[[Read], Any]) -> tuple[Any, ...]:
    """The gradient of every array that wants one; `gradient` gives what one read adds to it."""
    made: dict[int, Any] = {}
    for read in reads(spec):
        part = gradient(read)
        made[id(read.array)] = part if id(read.array) not in made else made[id(read.array)] + part
    return tuple(made[id(slot.array)].to(getattr(torch, arrays.dtype_name(slot.array))) for slot in spec.wanted)


class ArraySums:
    """The sums of one read, as a system's kernels make them: (batch, heads, n), and then as the array has its axes."""

    def __init__(self, spec: Attention, shape: Shape, device: Any, read: Read) -> None:
        self.spec, self.shape, self.device, self.read = spec, shape, device, read
        self.names = [i.payload if i.op == "var" else None for i in read.node.args]
        self.sequences, self.most_q, self.most_k = shape.batch, shape.n_q, shape.n_k
        if spec.lengths is not None:
            self.sequences = len(spec.lengths.q) - 1
            self.most_q, self.most_k = (int(np.diff(x).max(initial=0)) for x in (spec.lengths.q, spec.lengths.k))

    def gradient(self) -> Any:
        return {
            Sharing.ROWS: self._rows, Sharing.COLUMNS: self._columns, Sharing.PAIRS: self._pairs,
            Sharing.DISTANCES: self._distances,
        }[self.read.sharing]()  # fmt: skip

    # -- kernels, each a system's own ----------------------------------------------------------------------------------
    def add_rows(self, sums: Any) -> None:
        """Sums over keys, (batch, heads, n_q)."""
        raise NotImplementedError

    def add_columns(self, sums: Any) -> None:
        """Sums over queries, (batch, heads, n_k)."""
        raise NotImplementedError

    def add_distances(self, sums: Any, least: int) -> None:
        """Sums over all pairs of a distance q - k, (batch or sequences, heads, distances), from the least on."""
        raise NotImplementedError

    def add_pairs(self, grad: Any) -> None:
        """(batch or 1, heads or 1, most_q, most_k), summed over those that share it."""
        raise NotImplementedError

    def add_cells(self, sums: Any, cells: Any, order: Any, begins: Any) -> None:
        """What rows or distances have, as sums of the cells that they read. order: readers, cell by cell."""
        raise NotImplementedError

    def _rows(self) -> Any:
        sums = self._zeros(self.shape.batch, self.shape.n_q)
        self.add_rows(sums)
        return self._of_rows(sums, "Q")

    def _columns(self) -> Any:
        sums = self._zeros(self.shape.batch, self.shape.n_k)
        self.add_columns(sums)
        return self._of_rows(sums, "K")

    def _distances(self) -> Any:
        least, count = 1 - self.most_k, max(self.most_q + self.most_k - 1, 0)
        sums = self._zeros(self.sequences, count)
        if 0 not in (*sums.shape, self.most_q, self.most_k):
            self.add_distances(sums, least)
        return self._of_distances(sums, least)

    def _pairs(self) -> Any:
        s = self.shape
        heads = s.heads if "H" in self.names else s.heads_k if "HK" in self.names else 1
        kept = (self.sequences if "B" in self.names else 1), heads
        grad = torch.zeros((*kept, self.most_q, self.most_k), dtype=torch.float32, device=self.device)
        if 0 not in (*grad.shape, self.sequences, s.heads):
            self.add_pairs(grad)
        last = len(self.names)
        return self._as_indexed(grad, {**self._outer_dims(), last - 2: 2, last - 1: 3})

    # -- cells --------------------------------------------------------------------------------------------------------
    def _of_rows(self, sums: Any, side: str) -> Any:
        """Sums of queries, or of keys, as those of the cells that they read."""
        along = {i: name for i, name in enumerate(self.names) if name in (side, side + "P")}
        lengths = self.spec.lengths
        if lengths is None:
            return self._as_indexed(sums.double(), {**self._outer_dims(), **dict.fromkeys(along, 2)})
        along |= {i: name for i, name in enumerate(self.names) if name == "B"}
        shape = tuple(self.read.array.shape[i] for i in sorted(along))
        ends = lengths.q if side == "Q" else lengths.k

        def read() -> Array:
            sequence = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
            packed = np.arange(len(sequence))
            places = {"B": sequence, side: packed - np.asarray(ends)[sequence], side + "P": packed}
            at = [np.minimum(places[along[i]], size - 1) for i, size in zip(sorted(along), shape, strict=True)]
            return np.ravel_multi_index(at, shape) if at else np.zeros(len(sequence), np.int64)

        key = ("rows", side, tuple(sorted(along.items())), shape, ends.tobytes())
        cells = self._cells(sums, int(np.prod(shape)), key, (), read)
        dims = {i: 2 + j for j, i in enumerate(sorted(along))}
        heads = {i: dim for i, dim in self._outer_dims().items() if dim == 1}
        return self._as_indexed(cells.unflatten(2, shape) if shape else cells, {**heads, **dims})

    def _of_distances(self, sums: Any, least: int) -> Any:
        """Sums of distances as those of the cells that they read; in packed sequences each in its own way."""
        s, lengths, count = self.shape, self.spec.lengths, sums.shape[2]
        axis = self.read.axis
        index, size = self.read.node.args[axis], self.read.array.shape[axis]
        rows = self.sequences if self.is_packed and "B" in self.names else 1

        def read() -> Array:
            parts = [part for part, _, _ in s.sequences(lengths)]
            found = [cells_of_distances(index, part, size, least, count) for part in parts]
            return np.concatenate([cells + (i % rows) * size for i, cells in enumerate(found)])

        if self.is_packed:
            sums = sums.transpose(0, 1).reshape(1, s.heads, -1)
        key = ("distances", index.key, s, rows, size, least, count, key_of(lengths))
        cells = self._cells(sums, rows * size, key, loads(index), read)
        if self.is_packed:
            cells = cells.unflatten(2, (rows, size))[0].permute(1, 0, 2)
        return self._as_indexed(cells, {**self._outer_dims(), axis: 2})

    def _cells(self, sums: Any, size: int, key: tuple[Any, ...], slots: Sequence[Loaded], read: Any) -> Any:
        """Sums of rows or distances as those of the cells that `read` says they read: (batch, heads, size)."""

        def make() -> tuple[Any, ...]:
            return tuple(torch.from_numpy(x).to(self.device) for x in readers_of_cells(read(), size))

        order, begins = kept_on(self.device, key, slots, make)
        cells = torch.zeros((*sums.shape[:2], size), dtype=torch.float64, device=self.device)
        if 0 not in cells.shape:
            self.add_cells(sums, cells, order, begins)
        return cells

    # -- axes ---------------------------------------------------------------------------------------------------------
    @property
    def is_packed(self) -> bool:
        return self.spec.lengths is not None

    def _zeros(self, batch: int, n: int) -> Any:
        return torch.zeros((batch, self.shape.heads, n), dtype=torch.float32, device=self.device)

    def _outer_dims(self) -> dict[int, int]:
        """The axes for batch indices, or packed sequences, and heads, as dimensions of sums."""
        dims = {"B": 0, "H": 1, "HK": 1}
        return {i: dims[name] for i, name in enumerate(self.names) if name in dims}

    def _as_indexed(self, sums: Any, dims: dict[int, int]) -> Any:
        """Sums as the array has its axes. dims: which dimension an axis is; over the others it is summed."""
        s = self.shape
        if "HK" in self.names and sums.shape[1] == s.heads:
            sums = sums.unflatten(1, (s.heads_k, s.group)).sum(2)
        others = [d for d in range(sums.ndim) if d not in dims.values()]
        sums = sums.sum(others) if others else sums
        left, axes = sorted(dims.values()), sorted(dims)
        view = sums.permute([left.index(dims[i]) for i in axes])
        origins = {"Q": s.origin_q, "K": s.origin_k}
        at: list[Any] = [None if i in dims else int(x.payload) for i, x in enumerate(self.read.node.args)]
        for i, size in zip(axes, view.shape, strict=True):
            origin = 0 if self.is_packed else origins.get(self.names[i] or "", 0)
            at[i] = slice(origin, origin + size)
        whole = torch.zeros(tuple(self.read.array.shape), dtype=sums.dtype, device=self.device)
        whole[tuple(at)] = view
        return whole
