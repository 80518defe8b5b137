"""The kernels that sum up gradients of arrays, as rungs.py has those of the forward pass."""

from __future__ import annotations

from collections.abc import Mapping

from tilewise.kernels.cuda import wgmma
from tilewise.kernels.cuda.rungs import PLAIN, RUNGS, SOURCES, ForwardSm90, Rung, Tiled, parts, up
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


class Sm90Arrays:
    """On Hopper, in half precision. A block of two warpgroups has 128 queries, and 128 keys if shared memory has room
    for two slots of a ring, each with the operands of one product."""

    name, folder, planned, persistent = "arrays_sm90", SOURCES, True, False
    SHARED = ForwardSm90.SHARED
    AROUND = 128 + 768 + 1024  # barriers, what is told beside tiles, and the room to align them
    MOST_STAGES = 6

    def __init__(self, sharing: Sharing) -> None:
        self.sharing, self.by_key = sharing, sharing is Sharing.COLUMNS

    def unsupported(self, shape: Shape) -> str | None:
        return RUNGS["forward_sm90"].unsupported(shape)

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return Tile(128, 128 if max(shape.d, shape.d_v) <= 192 else 64)

    def fitting(self, tile: Tile, shape: Shape) -> Tile:
        return self.default_tile(PLAIN, shape)

    def threads(self, tile: Tile) -> int:
        return 384

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        slot_bytes = (tile.q + tile.k) * max(parts(shape.d), parts(shape.d_v)) * 128
        table_bytes = -(-tile.k * cell_bytes // 128) * tile.q * 128
        room = self.SHARED - self.AROUND
        uses_table = 0 < table_bytes <= room - 2 * slot_bytes
        table_bytes = table_bytes if uses_table else 0
        stages = min((room - table_bytes) // slot_bytes, self.MOST_STAGES)
        return {
            "SHARING": _NUMBERS[self.sharing],
            "STAGES": stages,
            "USES_TABLE": uses_table,
            "SHARED_BYTES": stages * slot_bytes + table_bytes + self.AROUND,
            "CONSUMER_REGISTERS": 232,
            "PRODUCER_REGISTERS": 40,
        }

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        return {"wgmma.h": wgmma.header(shape.dtype, {tile.k})}


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
SM90_ARRAYS: dict[Sharing, Rung] = {sharing: Sm90Arrays(sharing) for sharing in Sharing}
CELLS = Cells()
ANY_CALL = PLAIN, Shape(1, 1, 1, 1, 1, 1, 1), Tile(1, 1)  # what CELLS is assembled for


def suited(sharing: Sharing, shape: Shape, hopper: bool) -> Rung:
    """The kernel that sums up. hopper: arrays lie as Hopper's copy engine takes them."""
    rung = SM90_ARRAYS[sharing]
    return rung if hopper and rung.unsupported(shape) is None else TILED_ARRAYS[sharing]


def copies(rung: Rung) -> bool:
    """Whether the copy engine brings its tiles."""
    return isinstance(rung, Sm90Arrays)
