"""Gradients of the arrays that a score reads: which kernel sums up what, and what becomes of its sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.derivative import ONE
from tilewise.expr import Loaded
from tilewise.kernels.triton import modules
from tilewise.kernels.triton.arguments import (
    functions,
    keys_of,
    maps,
    sequences_of,
    sizes,
    steps_of,
)
from tilewise.kernels.triton.choices import Choice, Pass
from tilewise.kernels.triton.launch_plan import planned
from tilewise.kernels.triton.reads import Read, Sharing, cells_of_distances, readers_of_cells, reads
from tilewise.kernels.triton.source import gradients
from tilewise.kernels.triton.tuning import chosen, distances
from tilewise.kernels.uploads import kept_on, key_of
from tilewise.spec import Attention, Shape, Tile
from tilewise.walking import loads


def of_arrays(
    spec: Attention, shape: Shape, tile: Tile | None, given: tuple[Any, ...], turned: dict[str, Any]
) -> tuple[Any, ...]:
    """The gradient of every array that wants one. given: q, k, v, d_out, shift, delta; turned: what turns q and k."""
    made: dict[int, Any] = {}
    for read in reads(spec):
        kind = Pass.PAIRS if read.sharing is Sharing.PAIRS else Pass.ARRAYS
        part = _Sum(spec, shape, chosen(kind, spec, shape, tile), given, turned, read).gradient()
        made[id(read.array)] = part if id(read.array) not in made else made[id(read.array)] + part
    return tuple(made[id(slot.array)].to(getattr(torch, arrays.dtype_name(slot.array))) for slot in spec.wanted)


class _Sum:
    """The sums of one read, as a kernel makes them: (batch, heads, n), and then as the array has its axes."""

    def __init__(
        self, spec: Attention, shape: Shape, choice: Choice, given: tuple[Any, ...], turned: dict[str, Any], read: Read
    ) -> None:
        self.spec, self.shape, self.given, self.read = spec, shape, given, read
        self.tile, self.options = choice.tile, choice.options
        self.device = given[0].device
        variant = modules.variant(spec, keys_of(shape), {} if read.slope is ONE else {"part": read.slope})
        self.functions = functions(spec, variant, "score", "mask", "part") | turned
        self.steps = tuple(map(steps_of, given[:5]))
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

    # -- kernels ------------------------------------------------------------------------------------------------------
    def _rows(self) -> Any:
        s = self.shape
        sums = self._zeros(s.batch, s.n_q)
        grid, *rest = planned(self.spec, s, self.tile, self.given[0])
        if 0 not in grid:
            gradients.of_rows[grid](
                *self.given, sums, *self.steps, *rest, s.group, self.spec.scale,
                **self.functions, **self.options, **sizes(s, self.tile),
            )  # fmt: skip
        return self._of_rows(sums, "Q")

    def _columns(self) -> Any:
        s = self.shape
        sums = self._zeros(s.batch, s.n_k)
        (tiles, _, batch), *rest = planned(self.spec, s, self.tile, self.given[0], by_key=True)
        if tiles and s.heads and batch:
            gradients.of_columns[(tiles, s.heads, batch)](
                *self.given, sums, *self.steps, steps_of(sums), *rest, s.group, self.spec.scale,
                **self.functions, **self.options, **sizes(s, self.tile),
            )  # fmt: skip
        return self._of_rows(sums, "K")

    def _distances(self) -> Any:
        s = self.shape
        least, count = 1 - self.most_k, max(self.most_q + self.most_k - 1, 0)
        sums = self._zeros(self.sequences, count)
        grid = -(-count // distances()), s.heads, self.sequences
        if 0 not in (*grid, self.most_q, self.most_k):
            records, loaded = sequences_of(self.spec, s, self.given[0])
            told = {name: x for name, x in sizes(s, self.tile).items() if not name.startswith("TILE")}
            gradients.of_distances[grid](
                *self.given, sums, *self.steps, steps_of(sums), records, loaded, s.group, self.spec.scale, least=least,
                count=count, **self.functions, **self.options, TILE=distances(), **told, PACKED=self._is_packed,
            )  # fmt: skip
        return self._of_distances(sums, least)

    def _pairs(self) -> Any:
        s, tile = self.shape, self.tile
        heads = s.heads if "H" in self.names else s.heads_k if "HK" in self.names else 1
        kept = (self.sequences if "B" in self.names else 1), heads
        grad = torch.zeros((*kept, self.most_q, self.most_k), dtype=torch.float32, device=self.device)
        key_tiles = -(-self.most_k // tile.k)
        grid = -(-self.most_q // tile.q) * key_tiles, kept[0] * kept[1]
        if 0 not in (*grid, self.sequences, s.heads):
            q, k, v, d_out, *_ = self.given
            records, loaded = sequences_of(self.spec, s, q)
            gradients.of_pairs[grid](
                *self.given, grad, *self.steps, steps_of(grad), records, loaded, s.group, self.spec.scale,
                most_q=self.most_q, most_k=self.most_k, key_tiles=key_tiles, kept_heads=kept[1],
                summed_batch=self.sequences // kept[0], summed_heads=s.heads // kept[1],
                **self.functions, **self.options, **sizes(s, tile), PACKED=self._is_packed,
                **maps(self.spec, tile.q, q=q, d_out=d_out), **maps(self.spec, tile.k, k=k, v=v),
            )  # fmt: skip
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
        rows = self.sequences if self._is_packed and "B" in self.names else 1

        def read() -> Array:
            parts = [part for part, _, _ in s.sequences(lengths)]
            found = [cells_of_distances(index, part, size, least, count) for part in parts]
            return np.concatenate([cells + (i % rows) * size for i, cells in enumerate(found)])

        if self._is_packed:
            sums = sums.transpose(0, 1).reshape(1, s.heads, -1)
        key = ("distances", index.key, s, rows, size, least, count, key_of(lengths))
        cells = self._cells(sums, rows * size, key, loads(index), read)
        if self._is_packed:
            cells = cells.unflatten(2, (rows, size))[0].permute(1, 0, 2)
        return self._as_indexed(cells, {**self._outer_dims(), axis: 2})

    def _cells(self, sums: Any, size: int, key: tuple[Any, ...], slots: Sequence[Loaded], read: Any) -> Any:
        """Sums of rows or distances as those of the cells that `read` says they read: (batch, heads, size)."""

        def make() -> tuple[Any, ...]:
            return tuple(torch.from_numpy(x).to(self.device) for x in readers_of_cells(read(), size))

        order, begins = kept_on(self.device, key, slots, make)
        cells = torch.zeros((*sums.shape[:2], size), dtype=torch.float64, device=self.device)
        grid = size, *sums.shape[1::-1]
        if 0 not in grid:
            gradients.of_cells[grid](sums, cells, order, begins, steps_of(sums), steps_of(cells), AT_ONCE=256)
        return cells

    # -- axes ---------------------------------------------------------------------------------------------------------
    @property
    def _is_packed(self) -> bool:
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
            origin = 0 if self._is_packed else origins.get(self.names[i] or "", 0)
            at[i] = slice(origin, origin + size)
        whole = torch.zeros(tuple(self.read.array.shape), dtype=sums.dtype, device=self.device)
        whole[tuple(at)] = view
        return whole
