"""The kernels that sum up gradients of arrays, as rungs.py has those of the forward pass."""

from __future__ import annotations

from collections.abc import Mapping

from tilewise.kernels.cuda.rungs import PLAIN, SOURCES, Rung, Tiled, up
from tilewise.kernels.reads import Sharing
from tilewise.spec import Attention, Shape, Tile

_NUMBERS = {sharing: number for number, sharing in enumerate(Sharing)}  # as in source/arrays.h


class TiledArrays:
    """On any GPU. Slices of both operands lie in shared memory, so that any head has room."""

    name, folder, planned, persistent = "tiled_arrays", SOURCES, True, False
    SLICE = Tiled.SLICE

    def __init__(self, sharing: Sharing) -> None:
        self.sharing, self.by_key = sharing, sharing is Sharing.COLUMNS

    def unsupported(self, shape: Shape) -> str | None:
        return None

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return Tile(64, 64)

    def fitting(self, tile: Tile, shape: Shape) -> Tile:
        most = self.default_tile(PLAIN, shape)
        fitting = Tile(min(tile.q, most.q), min(tile.k, most.k))
        least = min(fitting.q, fitting.k)  # diagonals go from corner to corner
        return Tile(least, least) if self.sharing is Sharing.DISTANCES else fitting

    def threads(self, tile: Tile) -> int:
        return 128

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        rows, keys = up(tile.q, 8), up(tile.k, 16)
        numbers = max((rows + keys) * (self.SLICE + 4), rows * (keys + 4))
        return {"SLICE": self.SLICE, "SHARED_BYTES": 4 * numbers, "SHARING": _NUMBERS[self.sharing]}

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        return {}


class Cells:
    """Sums of rows or distances, led to the cells that they read: the same for all calls."""

    name, folder = "cells", SOURCES
    THREADS = 128

    def threads(self, tile: Tile) -> int:
        return self.THREADS

    def blocks(self, cells: int) -> int:
        """A warp a cell."""
        return -(-cells // (self.THREADS // 32))

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        return {"SHARED_BYTES": 0}

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        return {}


TILED_ARRAYS: dict[Sharing, Rung] = {sharing: TiledArrays(sharing) for sharing in Sharing}
CELLS = Cells()
ANY_CALL = PLAIN, Shape(1, 1, 1, 1, 1, 1, 1), Tile(1, 1)  # what CELLS is assembled for
