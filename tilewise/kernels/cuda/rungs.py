"""The ladder: the CUDA kernels in the order in which a reader would climb them, and what each needs of a launch."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tilewise.spec import Tile

SOURCES = Path(__file__).with_name("source")


class Rung(Protocol):
    """A kernel of the ladder, and how it divides the work. Its source is NAME.cu in its folder."""

    name: str
    folder: Path
    planned: bool  # whether it visits the tiles of a plan, or simply all keys

    def default_tile(self, d: int, d_v: int) -> Tile: ...

    def fitting(self, tile: Tile, d: int, d_v: int) -> Tile:
        """The tile, or the largest one below it that the kernel has room for."""

    def threads(self, tile: Tile) -> int: ...

    def constants(self, tile: Tile, d: int, d_v: int) -> dict[str, int]:
        """Further constants of the source; SHARED_BYTES is how much dynamic shared memory a block has."""


class Naive:
    name, folder, planned = "naive", SOURCES, False

    def default_tile(self, d: int, d_v: int) -> Tile:
        return Tile(128, 128)

    def fitting(self, tile: Tile, d: int, d_v: int) -> Tile:
        return Tile(min(tile.q, 256), tile.k)  # more threads would have too few registers

    def threads(self, tile: Tile) -> int:
        return tile.q

    def constants(self, tile: Tile, d: int, d_v: int) -> dict[str, int]:
        return {"SHARED_BYTES": 0}


class Tiled:
    """Tiles are smaller where heads are large: q lies in shared memory whole, acc in registers."""

    name, folder, planned = "tiled", SOURCES, True
    SLICE = 32
    MOST_KEYS = 128

    def default_tile(self, d: int, d_v: int) -> Tile:
        largest = max(d, d_v)
        return Tile(64 if largest <= 128 else 32 if largest <= 256 else 16, 64)

    def fitting(self, tile: Tile, d: int, d_v: int) -> Tile:
        return Tile(min(tile.q, self.default_tile(d, d_v).q), min(tile.k, self.MOST_KEYS))

    def threads(self, tile: Tile) -> int:
        return 128

    def constants(self, tile: Tile, d: int, d_v: int) -> dict[str, int]:
        # As in tiled.cu: whole rows of groups and lanes, whole slices, and four numbers more a row.
        rows, keys, columns = _up(tile.q, 8), _up(tile.k, 16), _up(d, self.SLICE)
        numbers = rows * (columns + 4) + keys * (self.SLICE + 4) + rows * (keys + 4)
        return {"SLICE": self.SLICE, "SHARED_BYTES": 4 * numbers}


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


RUNGS: dict[str, Rung] = {"naive": Naive(), "tiled": Tiled()}
