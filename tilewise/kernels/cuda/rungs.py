"""The ladder: the CUDA kernels in the order in which a reader would climb them, and what each needs of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tilewise.kernels import gpus
from tilewise.kernels.cuda import wgmma
from tilewise.spec import Attention, Shape, Tile

SOURCES = Path(__file__).with_name("source")


class Compiled(Protocol):
    """What a source is assembled for. It is NAME.cu in its folder."""

    name: str
    folder: Path

    def threads(self, tile: Tile) -> int: ...

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        """Further constants of the source; SHARED_BYTES is how much dynamic shared memory a block has.

        cell_bytes: of the numbers of a table whose tiles could come along with those of keys; 0 if there is none.
        """

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        """Headers that are made for the source."""


class Rung(Compiled, Protocol):
    """A kernel of the ladder, and how it divides the work."""

    planned: bool  # whether it visits the tiles of a plan, or simply all keys
    by_key: bool  # whether a block has keys and visits queries
    persistent: bool  # whether its blocks take one query tile after the other, with tiles that TMA loads

    def unsupported(self, shape: Shape) -> str | None:
        """Why it cannot compute calls of this shape."""

    def default_tile(self, spec: Attention, shape: Shape) -> Tile: ...

    def fitting(self, tile: Tile, shape: Shape) -> Tile:
        """The tile, or the largest one below it that the kernel has room for."""


class Naive:
    name, folder, planned, by_key, persistent = "naive", SOURCES, False, False, False

    def unsupported(self, shape: Shape) -> str | None:
        return None

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return Tile(128, 128)

    def fitting(self, tile: Tile, shape: Shape) -> Tile:
        return Tile(min(tile.q, 256), tile.k)  # more threads would have too few registers

    def threads(self, tile: Tile) -> int:
        return tile.q

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        return {"SHARED_BYTES": 0}

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        return {}


class Tiled:
    """Tiles are smaller where heads are large: q lies in shared memory whole, acc in registers."""

    name, folder, planned, by_key, persistent = "tiled", SOURCES, True, False, False
    SLICE = 32
    MOST_KEYS = 128

    def unsupported(self, shape: Shape) -> str | None:
        return None

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return Tile(self._most_rows(shape), 64)

    def _most_rows(self, shape: Shape) -> int:
        largest = max(shape.d, shape.d_v)
        return 64 if largest <= 128 else 32 if largest <= 256 else 16

    def fitting(self, tile: Tile, shape: Shape) -> Tile:
        return Tile(min(tile.q, self._most_rows(shape)), min(tile.k, self.MOST_KEYS))

    def threads(self, tile: Tile) -> int:
        return 128

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        # As in tiled.cu: whole rows of groups and lanes, whole slices, and four numbers more a row.
        rows, keys, columns = up(tile.q, 8), up(tile.k, 16), up(shape.d, self.SLICE)
        numbers = rows * (columns + 4) + keys * (self.SLICE + 4) + rows * (keys + 4)
        return {"SLICE": self.SLICE, "SHARED_BYTES": 4 * numbers}

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        return {}


class ForwardSm90:
    """A warpgroup has 64 queries of the tile; registers decide how many keys, shared memory how many stages."""

    name, folder, planned, by_key, persistent = "forward_sm90", SOURCES, True, False, True
    SHARED = gpus.SHARED
    AROUND = 2048  # barriers, items and the room to align tiles
    MOST_STAGES = 4

    def unsupported(self, shape: Shape) -> str | None:
        return gpus.not_for_hopper(shape)

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        largest = max(shape.d, shape.d_v)
        if largest <= 64:
            # Three warpgroups hide more, but their larger tiles leave more of a short sequence over.
            # Of the shortest, a mask leaves so little that small key tiles waste the least.
            sequences = 1 if spec.lengths is None else max(len(spec.lengths.q) - 1, 1)
            n = shape.n_q // sequences
            if spec.batch_invariant or 512 < n < 2048 or (n <= 512 and spec.mask is None):
                return Tile(128, 128)
            return Tile(192, 96) if n >= 2048 else Tile(128, 64)
        return Tile(128, 128 if largest <= 128 else 96 if largest <= 192 else 64)

    def fitting(self, tile: Tile, shape: Shape) -> Tile:
        queries = 192 if tile.q >= 192 and max(shape.d, shape.d_v) <= 64 else 128
        most = 96 if queries == 192 else self.default_tile(PLAIN, shape).k if max(shape.d, shape.d_v) > 64 else 128
        return Tile(queries, max(min(tile.k, most) // 16 * 16, 16))

    def threads(self, tile: Tile) -> int:
        return (tile.q // 64 + 1) * 128

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        q_bytes, stage_bytes = self._bytes(tile, shape)
        table_bytes = -(-tile.k * cell_bytes // 128) * tile.q * 128
        room = self.SHARED - self.AROUND - q_bytes
        # As many stages of the table as leave two of keys; if none does, scores read it themselves.
        tables = next((n for n in (2, 1) if table_bytes and room - n * table_bytes >= 2 * stage_bytes), 0)
        stages = min((room - tables * table_bytes) // stage_bytes, self.MOST_STAGES)
        three = tile.q == 192
        held = up(shape.d_v, 16) // 2 + tile.k // 2 + tile.k // 4 + up(shape.d, 16) // 4  # registers: acc, s, p, q
        return {
            "STAGES": stages,
            "SHARED_BYTES": q_bytes + stages * stage_bytes + tables * table_bytes + self.AROUND,
            "USES_TABLE": tables > 0,
            "TABLE_STAGES": max(tables, 1),
            "Q_IN_REGISTERS": held <= 200,
            "PING_PONG": tile.q == 128 and shape.d > 64,
            # When most exponentials of a tile are under way, the product before is waited for.
            "EIGHTHS_BEFORE_WAIT": 4 if three else 6 if shape.d > 64 else 8,
            "HOLDS_WAIT": three or shape.d > 64,  # else the compiler finds a better place for that wait
            "CONSUMER_REGISTERS": 160 if three else 232,
            "PRODUCER_REGISTERS": 32 if three else 40,
        }

    def _bytes(self, tile: Tile, shape: Shape) -> tuple[int, int]:
        """Of q's tile, and of a stage of k and v."""
        q_parts, v_parts = parts(shape.d), parts(shape.d_v)
        return tile.q * q_parts * 128, tile.k * (q_parts + v_parts) * 128

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        return {"wgmma.h": wgmma.header(shape.dtype, {tile.k, up(shape.d_v, 16)})}


class Refine:
    """No kernel of the ladder: it looks at masks before one. Assembled as they are."""

    folder = SOURCES
    KEY_ROOM = 32  # bytes
    JOINERS = 32  # threads of a block of its second launch

    def __init__(self, name: str) -> None:
        self.name = name

    def threads(self, tile: Tile) -> int:
        return 1024 // tile.q * tile.q

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        # What a variant computes for a key is shared, if it has room.
        groups = self.threads(tile) // tile.q
        return {
            "THREADS": self.threads(tile), "KEY_ROOM": self.KEY_ROOM, "SHARED_BYTES": groups * tile.k * self.KEY_ROOM,
        }  # fmt: skip

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        return {}


PLAIN = Attention(scale=1.0)


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def parts(columns: int) -> int:
    """Of 64 columns, whose rows have 128 bytes."""
    return -(-columns // 64)


RUNGS: dict[str, Rung] = {rung.name: rung for rung in (Naive(), Tiled(), ForwardSm90())}
REFINE, REFINE_BACKWARD = Refine("refine"), Refine("refine_backward")

UNORDERED = "unordered"  # what can be named as a rung: the last one, with the backward pass that adds in any order


def named(name: str) -> Rung:
    return RUNGS["forward_sm90" if name == UNORDERED else name]
