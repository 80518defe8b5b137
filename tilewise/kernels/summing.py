"""What kernels sum up for the gradients of arrays that a score reads, and what becomes of their sums.

Kernels sum up rows, columns, pairs or distances, of each head; here the sums are led to the cells of the array. Systems
have the kernels, and their sums are of NumPy or of PyTorch: the code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.expr import Loaded
from tilewise.kernels.reads import Read, Sharing, cells_of_distances, reads
from tilewise.spec import Attention, Lengths, Shape
from tilewise.walking import loads


class Summing:
    """The sums of one read, as kernels make them, and then as the array has its axes."""

    def __init__(self, spec: Attention, shape: Shape, read: Read) -> None:
        self.spec, self.shape, self.read = spec, shape, read
        self.names = [i.payload if i.op == "var" else None for i in read.node.args]
        self.sequences, self.most_q, self.most_k = shape.batch, shape.n_q, shape.n_k
        if spec.lengths is not None:
            self.sequences = len(spec.lengths.q) - 1
            self.most_q, self.most_k = (int(np.diff(x).max(initial=0)) for x in (spec.lengths.q, spec.lengths.k))

    # -- what a system's kernels do -----------------------------------------------------------------------------------
    def rows(self) -> Any:
        """Sums over keys: (batch, heads, n_q)."""
        raise NotImplementedError

    def columns(self) -> Any:
        """Sums over queries: (batch, heads, n_k)."""
        raise NotImplementedError

    def pairs(self) -> Any:
        """Sums over those that share a cell of the array: (*self.kept, most_q, most_k)."""
        raise NotImplementedError

    def distances(self) -> tuple[Any, int]:
        """Sums over all pairs of a distance q - k, (sequences, heads, distances), and the first of the distances."""
        raise NotImplementedError

    def cells(
        self, sums: Any, size: int, key: tuple[Any, ...], slots: Sequence[Loaded], read: Callable[[], Array]
    ) -> Any:
        """Sums of readers, (batch, heads, readers), as those of the cells that `read` says they read: (batch, heads,
        size) in float64. What it says follows from the key and from the arrays of these slots."""
        raise NotImplementedError

    # -- what becomes of it -------------------------------------------------------------------------------------------
    def gradient(self) -> Any:
        """Of the array, in the type that sums have."""
        if self.read.sharing is Sharing.ROWS:
            return self._of_rows(self.rows(), "Q")
        if self.read.sharing is Sharing.COLUMNS:
            return self._of_rows(self.columns(), "K")
        if self.read.sharing is Sharing.PAIRS:
            last = len(self.names)
            return self._as_indexed(self.pairs(), {**self._outer_dims(), last - 2: 2, last - 1: 3})
        return self._of_distances(*self.distances())

    @property
    def kept(self) -> tuple[int, int]:
        """Batch indices, or packed sequences, and heads that the array tells apart."""
        heads = self.shape.heads if "H" in self.names else self.shape.heads_k if "HK" in self.names else 1
        return (self.sequences if "B" in self.names else 1), heads

    @property
    def is_packed(self) -> bool:
        return self.spec.lengths is not None

    def _of_rows(self, sums: Any, side: str) -> Any:
        """Sums of queries, or of keys, as those of the cells that they read."""
        along = {i: name for i, name in enumerate(self.names) if name in (side, side + "P")}
        lengths = self.spec.lengths
        if lengths is None:
            return self._as_indexed(_widened(sums), {**self._outer_dims(), **dict.fromkeys(along, 2)})
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
        cells = self.cells(sums, int(np.prod(shape)), key, (), read)
        dims = {i: 2 + j for j, i in enumerate(sorted(along))}
        heads = {i: dim for i, dim in self._outer_dims().items() if dim == 1}
        return self._as_indexed(cells.reshape(*cells.shape[:2], *shape) if shape else cells, {**heads, **dims})

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
            sums = sums.swapaxes(0, 1).reshape(1, s.heads, -1)
        key = ("distances", index.key, s, rows, size, least, count, key_of(lengths))
        cells = self.cells(sums, rows * size, key, loads(index), read)
        if self.is_packed:
            cells = cells.reshape(s.heads, rows, size).swapaxes(0, 1)
        return self._as_indexed(cells, {**self._outer_dims(), axis: 2})

    # -- axes ---------------------------------------------------------------------------------------------------------
    def _outer_dims(self) -> dict[int, int]:
        """The axes for batch indices, or packed sequences, and heads, as dimensions of sums."""
        dims = {"B": 0, "H": 1, "HK": 1}
        return {i: dims[name] for i, name in enumerate(self.names) if name in dims}

    def _as_indexed(self, sums: Any, dims: dict[int, int]) -> Any:
        """Sums as the array has its axes. dims: which dimension an axis is; over the others it is summed."""
        s = self.shape
        if "HK" in self.names and sums.shape[1] == s.heads:
            sums = sums.reshape(sums.shape[0], s.heads_k, s.group, *sums.shape[2:]).sum(2)
        others = tuple(d for d in range(sums.ndim) if d not in dims.values())
        sums = sums.sum(others) if others else sums
        left, axes = sorted(dims.values()), sorted(dims)
        view = _permuted(sums, tuple(left.index(dims[i]) for i in axes))
        origins = {"Q": s.origin_q, "K": s.origin_k}
        at: list[Any] = [None if i in dims else int(x.payload) for i, x in enumerate(self.read.node.args)]
        for i, size in zip(axes, view.shape, strict=True):
            origin = 0 if self.is_packed else origins.get(self.names[i] or "", 0)
            at[i] = slice(origin, origin + size)
        whole = _zeros(tuple(self.read.array.shape), sums)
        whole[tuple(at)] = view
        return whole


def of_arrays(spec: Attention, summing: Callable[[Read], Summing]) -> list[Any]:
    """The gradient of every array that wants one, in the type that sums have; summing: of one of its reads."""
    made: dict[int, Any] = {}
    for read in reads(spec):
        part = summing(read).gradient()
        made[id(read.array)] = part if id(read.array) not in made else made[id(read.array)] + part
    return [made[id(slot.array)] for slot in spec.wanted]


def key_of(lengths: Lengths | None) -> tuple[bytes, ...]:
    return () if lengths is None else (lengths.q.tobytes(), lengths.k.tobytes())


# -- NumPy or PyTorch -------------------------------------------------------------------------------------------------


def _widened(x: Any) -> Any:
    return x.double() if arrays.is_torch(x) else x.astype(np.float64)


def _permuted(x: Any, order: tuple[int, ...]) -> Any:
    return x.permute(order) if arrays.is_torch(x) else x.transpose(order)


def _zeros(shape: tuple[int, ...], like: Any) -> Any:
    return like.new_zeros(shape) if arrays.is_torch(like) else np.zeros(shape, like.dtype)
