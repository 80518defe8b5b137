"""The backward passes' kernels, as rungs.py has those of the forward pass: the tiled ones, and Hopper's."""

from __future__ import annotations

from collections.abc import Mapping

from tilewise.kernels.cuda import wgmma
from tilewise.kernels.cuda.rungs import PLAIN, RUNGS, SOURCES, UNORDERED, ForwardSm90, Rung, Tiled, parts, up
from tilewise.spec import Attention, Shape, Tile


class _TiledBackward:
    """What the kernels of the tiled backward pass have in common. Together they serve what `tiled` does."""

    folder, planned, persistent = SOURCES, True, False
    SLICE = Tiled.SLICE

    def unsupported(self, shape: Shape) -> str | None:
        return None

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        raise NotImplementedError

    def fitting(self, tile: Tile, shape: Shape) -> Tile:
        most = self.default_tile(PLAIN, shape)
        return Tile(min(tile.q, most.q), min(tile.k, most.k))

    def threads(self, tile: Tile) -> int:
        return 128

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        return {}


class TiledDQuery(_TiledBackward):
    """For queries: d_out lies in shared memory beside q."""

    name, by_key = "tiled_d_query", False

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return RUNGS["tiled"].default_tile(spec, shape)

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        rows, keys = up(tile.q, 8), up(tile.k, 16)
        numbers = rows * (up(shape.d, self.SLICE) + 4) + rows * (up(shape.d_v, self.SLICE) + 4)
        numbers += max(rows, keys) * (self.SLICE + 4) + rows * (keys + 4)
        return {"SLICE": self.SLICE, "SHARED_BYTES": 4 * numbers}


class TiledDKeys(_TiledBackward):
    """For keys and values, both of which lie in shared memory whole: their tile is smaller where heads are large."""

    name, by_key = "tiled_d_keys", True

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return Tile(32, RUNGS["tiled"].default_tile(spec, shape).q)

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        rows, keys = up(tile.q, 8), up(tile.k, 16)
        numbers = keys * (up(shape.d, self.SLICE) + 4) + keys * (up(shape.d_v, self.SLICE) + 4)
        numbers += rows * (self.SLICE + 4) + keys * (rows + 4)
        return {"SLICE": self.SLICE, "SHARED_BYTES": 4 * numbers}


class _BackwardSm90:
    """What the kernels of Hopper's backward pass share. A block has 128 keys, or half of that where heads are wide. It
    meets 64 queries at a time, or 128 where heads are small and scores are products alone: what a score reads would
    have no room in registers then, and be waited for one by one.

    ordered: what key tiles add to d_q is added in their order, so that it has the same bits each time.
    """

    name: str
    folder, planned, by_key, persistent = SOURCES, True, True, False
    SMALL, NARROW = 64, 128

    def __init__(self, ordered: bool) -> None:
        self.ordered = ordered

    def unsupported(self, shape: Shape) -> str | None:
        return RUNGS["forward_sm90"].unsupported(shape)

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        widest = max(shape.d, shape.d_v)
        if widest > self.NARROW:
            return Tile(64, 64)
        return Tile(128 if widest <= self.SMALL and spec.score is None else 64, 128)

    def fitting(self, tile: Tile, shape: Shape) -> Tile:
        return tile  # its own: these kernels are not told others

    def threads(self, tile: Tile) -> int:
        return 256

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        return {"SHARED_BYTES": 0, "ORDERED": self.ordered, "S_STAGES": 1 if tile.q == 128 else 2}

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        return {}


class BackwardProducts(_BackwardSm90):
    """d_k and d_v lie in registers, d_q in sums in memory, which are rounded when all key tiles of a head are done."""

    name = "backward_sm90"
    SHARED = ForwardSm90.SHARED
    AROUND = 384 + 1024  # barriers and what is told beside tiles, and the room to align them
    LEAST_D_S = 1  # places

    def threads(self, tile: Tile) -> int:
        return 384

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        """A tile of a table, of cells of 2 bytes, comes along if it has room, for which d_s may give up a place."""
        made = super().constants(tile, shape, cell_bytes)
        places, table = int(made["S_STAGES"]), 2 * tile.q * tile.k if cell_bytes == 2 else 0
        ways = [(places, table), (self.LEAST_D_S, table), (places, 0)]
        places, table = next(way for way in ways if self._bytes(tile, shape, way[0]) + way[1] <= self.SHARED)
        shared_bytes = self._bytes(tile, shape, places) + table
        return {**made, "S_STAGES": places, "USES_TABLE": table > 0, "SHARED_BYTES": shared_bytes}

    def _bytes(self, tile: Tile, shape: Shape, places: int) -> int:
        q_parts, v_parts = parts(shape.d), parts(shape.d_v)
        # Rows of 128 bytes: k, v, d_s, twice q and d_out. Then twice d_q, shift, delta.
        rows = tile.k * (q_parts + v_parts) + tile.q * (2 * places + 2 * (q_parts + v_parts))
        return 128 * rows + 2 * 4 * tile.q * (64 * q_parts + 2) + self.AROUND

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        half = 64 if tile.q == 128 else parts(shape.d) * 32
        return {"wgmma.h": wgmma.header(shape.dtype, {tile.q, up(shape.d, 16), up(shape.d_v, 16), half})}


class WideBackwardProducts(BackwardProducts):
    """The same for wide heads, whose columns are halved: three parts of 64 count as four."""

    name = "backward_sm90_wide"
    LEAST_D_S = 2

    def _bytes(self, tile: Tile, shape: Shape, places: int) -> int:
        q_parts, v_parts = _halved(parts(shape.d)), _halved(parts(shape.d_v))
        # Rows of 128 bytes: k, v, d_s, p, twice q, d_out. Then half of d_q, twice shift, delta.
        rows = tile.k * (q_parts + v_parts + places + 1) + tile.q * (2 * q_parts + v_parts)
        return 128 * rows + 4 * tile.q * 32 * q_parts + 3 * 4 * tile.q + self.AROUND

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        half, v_half = (_halved(parts(d)) * 32 for d in (shape.d, shape.d_v))
        return {"wgmma.h": wgmma.header(shape.dtype, {tile.q // 2, half, half // 2, v_half})}


class Hoppers:
    """Hopper's backward pass: one kernel."""

    def __init__(self, ordered: bool) -> None:
        self.ordered = ordered
        self._products = {False: BackwardProducts(ordered), True: WideBackwardProducts(ordered)}

    def unsupported(self, shape: Shape) -> str | None:
        return self.rung(shape).unsupported(shape)

    def rung(self, shape: Shape) -> Rung:
        return self._products[self._is_wide(shape)]

    def _is_wide(self, shape: Shape) -> bool:
        return max(shape.d, shape.d_v) > _BackwardSm90.NARROW

    def workspace(self, tile: Tile, shape: Shape, q_tiles: int) -> dict[str, int]:
        """How many numbers of 4 bytes it needs beside its results; q_tiles: of all heads."""
        rows = q_tiles * tile.q
        turns = 2 * q_tiles if self._is_wide(shape) else q_tiles
        sums, counts = rows * columns_of_sums(shape), 2 * shape.batch * shape.heads_k
        return {"rows": 2 * rows, "sums": sums, "turns": turns, "counts": counts}


def columns_of_sums(shape: Shape) -> int:
    """Of d_q, as consumers hold it."""
    return 64 * _halved(parts(shape.d))


def _halved(parts: int) -> int:
    return 4 if parts == 3 else parts


# One after the other.
BACKWARD: tuple[Rung, ...] = (TiledDQuery(), TiledDKeys())
BACKWARD_SM90, UNORDERED_SM90 = Hoppers(ordered=True), Hoppers(ordered=False)


def hoppers_backward(name: str | None) -> Hoppers | None:
    """That of a kernel that was named so, or None if the tiled ones are its."""
    return {"forward_sm90": BACKWARD_SM90, UNORDERED: UNORDERED_SM90}.get(name or "")
