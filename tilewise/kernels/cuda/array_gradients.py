"""Gradients of the arrays that a score reads: which blocks sum up what, on a GPU or on the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tilewise.arrays import Array
from tilewise.expr import Expr, Loaded
from tilewise.kernels.cuda.array_rungs import suited
from tilewise.kernels.cuda.marshal import Tables, blocks
from tilewise.kernels.cuda.rungs import Rung
from tilewise.kernels.reads import Read, readers_of_cells
from tilewise.kernels.summing import Summing, of_arrays
from tilewise.spec import Attention, Shape, Tile


class Machine(Protocol):
    """Where the kernels of a call run, on its arrays."""

    @property
    def at_once(self) -> int:
        """How many large blocks run at the same time."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any: ...

    def tables(self, rung: Rung, tile: Tile) -> Tables:
        """The plan that a kernel follows."""

    def sum_up(self, rung: Rung, tile: Tile, slope: Expr, sums: Any, told: dict[str, int], count: int) -> None:
        """Launch so many blocks. slope: of the score, by what it reads. told: what marshal_backward.sums is."""

    def readers(self, key: tuple[Any, ...], slots: Sequence[Loaded], make: Callable[[], tuple[Array, Array]]) -> Any:
        """What `make` gives, brought here. It follows from the key and from the arrays of these slots."""

    def gather(self, sums: Any, cells: Any, order: Any, begins: Any) -> None:
        """Launch source/cells.cu, on contiguous arrays."""


def gradients(machine: Machine, spec: Attention, shape: Shape, tile: Tile | None, hopper: bool) -> list[Any]:
    """Of every array that wants one, in the type that sums have. hopper: the backward pass was Hopper's."""
    return of_arrays(spec, lambda read: _Sums(machine, spec, shape, tile, read, suited(read.sharing, shape, hopper)))


class _Sums(Summing):
    def __init__(
        self, machine: Machine, spec: Attention, shape: Shape, tile: Tile | None, read: Read, rung: Rung
    ) -> None:
        super().__init__(spec, shape, read)
        self.machine, self.rung = machine, rung
        self.tile = rung.fitting(tile or rung.default_tile(spec, shape), shape)

    def rows(self) -> Any:
        return self._along_runs(self.shape.n_q)

    def columns(self) -> Any:
        return self._along_runs(self.shape.n_k)

    def _along_runs(self, n: int) -> Any:
        s = self.shape
        return self._summed((s.batch, s.heads, n), blocks(s, self.machine.tables(self.rung, self.tile)))

    def pairs(self) -> Any:
        (batch, heads), (q_tiles, k_tiles) = self.kept, self._tiles
        summed_batch, summed_heads = self.sequences // max(batch, 1), self.shape.heads // max(heads, 1)
        count = batch * heads * q_tiles * k_tiles
        splits = max(1, min(self.machine.at_once // max(count, 1), summed_batch * summed_heads))
        told = {
            "kept_batch": batch, "kept_heads": heads, "summed_batch": summed_batch, "summed_heads": summed_heads,
            "splits": splits,
        }  # fmt: skip
        sums = self._summed((splits * batch, heads, self.most_q, self.most_k), splits * count, told)
        return sums if splits == 1 else sums.reshape(splits, batch, *sums.shape[1:]).sum(0)

    def distances(self) -> tuple[Any, int]:
        (q_tiles, k_tiles), heads = self._tiles, self.shape.heads
        steps = self.tile.q // self.tile.k
        diagonals = steps * (q_tiles - 1) + k_tiles if q_tiles and k_tiles else 0
        shape = self.sequences, heads, steps + 1, (diagonals + steps) * self.tile.k
        return self._summed(shape, diagonals * heads * self.sequences).sum(2), 1 - k_tiles * self.tile.k

    @property
    def _tiles(self) -> tuple[int, int]:
        """Of queries and of keys, of the longest sequences."""
        return -(-self.most_q // self.tile.q), -(-self.most_k // self.tile.k)

    def _summed(self, shape: tuple[int, ...], count: int, told: dict[str, int] | None = None) -> Any:
        """Sums of this shape, by so many blocks."""
        sums = self.machine.zeros(shape, "float32")
        if count > 0:
            q_tiles, k_tiles = self._tiles
            sizes = {"most_q": self.most_q, "most_k": self.most_k, "q_tiles": q_tiles, "k_tiles": k_tiles}
            self.machine.sum_up(self.rung, self.tile, self.read.slope, sums, {**sizes, **(told or {})}, count)
        return sums

    def cells(
        self, sums: Any, size: int, key: tuple[Any, ...], slots: Sequence[Loaded], read: Callable[[], Array]
    ) -> Any:
        order, begins = self.machine.readers((*key, size), slots, lambda: readers_of_cells(read(), size))
        cells = self.machine.zeros((*sums.shape[:2], size), "float64")
        if 0 not in cells.shape:
            self.machine.gather(sums, cells, order, begins)
        return cells
