"""The ladder: the CUDA kernels in the order in which a reader would climb them, and what each needs of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

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
        rows, keys, columns = _up(tile.q, 8), _up(tile.k, 16), _up(shape.d, self.SLICE)
        numbers = rows * (columns + 4) + keys * (self.SLICE + 4) + rows * (keys + 4)
        return {"SLICE": self.SLICE, "SHARED_BYTES": 4 * numbers}

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        return {}


class _TiledBackward:
    """What the kernels of the tiled backward pass have in common. Together they serve what `tiled` does."""

    folder, planned, persistent = SOURCES, True, False
    SLICE = Tiled.SLICE

    def unsupported(self, shape: Shape) -> str | None:
        return None

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        raise NotImplementedError

    def fitting(self, tile: Tile, shape: Shape) -> Tile:
        most = self.default_tile(_PLAIN, shape)
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
        rows, keys = _up(tile.q, 8), _up(tile.k, 16)
        numbers = rows * (_up(shape.d, self.SLICE) + 4) + rows * (_up(shape.d_v, self.SLICE) + 4)
        numbers += max(rows, keys) * (self.SLICE + 4) + rows * (keys + 4)
        return {"SLICE": self.SLICE, "SHARED_BYTES": 4 * numbers}


class TiledDKeys(_TiledBackward):
    """For keys and values, both of which lie in shared memory whole: their tile is smaller where heads are large."""

    name, by_key = "tiled_d_keys", True

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return Tile(32, RUNGS["tiled"].default_tile(spec, shape).q)

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        rows, keys = _up(tile.q, 8), _up(tile.k, 16)
        numbers = keys * (_up(shape.d, self.SLICE) + 4) + keys * (_up(shape.d_v, self.SLICE) + 4)
        numbers += rows * (self.SLICE + 4) + keys * (rows + 4)
        return {"SLICE": self.SLICE, "SHARED_BYTES": 4 * numbers}


class ForwardSm90:
    """A warpgroup has 64 queries of the tile; registers decide how many keys, shared memory how many stages."""

    name, folder, planned, by_key, persistent = "forward_sm90", SOURCES, True, False, True
    DTYPES = ("float16", "bfloat16")
    MOST_D = 256
    SHARED = 227 << 10  # of a block
    AROUND = 2048  # barriers, items and the room to align tiles
    MOST_STAGES = 4

    def unsupported(self, shape: Shape) -> str | None:
        if shape.dtype not in self.DTYPES:
            return f"it multiplies {' and '.join(self.DTYPES)}, and the arrays are {shape.dtype}"
        if max(shape.d, shape.d_v) > self.MOST_D or shape.d % 8 or shape.d_v % 8:
            taken = f"multiples of 8 up to {self.MOST_D}"
            return f"it takes head dimensions that are {taken}, and they are {shape.d} and {shape.d_v}"
        if shape.n_k == 0 or shape.n_q == 0:
            return "there is nothing to load"
        return None

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
        most = 96 if queries == 192 else self.default_tile(_PLAIN, shape).k if max(shape.d, shape.d_v) > 64 else 128
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
        held = _up(shape.d_v, 16) // 2 + tile.k // 2 + tile.k // 4 + _up(shape.d, 16) // 4  # registers: acc, s, p, q
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
        q_parts, v_parts = _parts(shape.d), _parts(shape.d_v)
        return tile.q * q_parts * 128, tile.k * (q_parts + v_parts) * 128

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        return {"wgmma.h": wgmma.header(shape.dtype, {tile.k, _up(shape.d_v, 16)})}


class _BackwardSm90:
    """What the kernels of Hopper's backward pass share. A block meets 64 queries at a time; it has 128 keys, or half of
    that where heads are wide.

    ordered: what key tiles add to d_q is added in their order, so that it has the same bits each time.
    """

    name: str
    folder, planned, by_key, persistent = SOURCES, True, True, False
    NARROW = 128

    def __init__(self, ordered: bool) -> None:
        self.ordered = ordered

    def unsupported(self, shape: Shape) -> str | None:
        return RUNGS["forward_sm90"].unsupported(shape)

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return Tile(64, 128 if max(shape.d, shape.d_v) <= self.NARROW else 64)

    def fitting(self, tile: Tile, shape: Shape) -> Tile:
        return self.default_tile(_PLAIN, shape)

    def threads(self, tile: Tile) -> int:
        return 256

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        return {"SHARED_BYTES": 0, "ORDERED": self.ordered, "STAGES": self.stages(shape)}

    def stages(self, shape: Shape) -> int:
        """Of k, and of d_s unless heads are wide. Larger heads leave room for one: a third of q and a second of d_q
        bring more."""
        return 1 if max(shape.d, shape.d_v) > 64 else 2

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        return {}


class BackwardRows(_BackwardSm90):
    """First, what is to be known of each query."""

    name = "backward_sm90_rows"


class BackwardProducts(_BackwardSm90):
    """d_k and d_v lie in registers, d_q in sums in memory."""

    name = "backward_sm90"

    def threads(self, tile: Tile) -> int:
        return 384

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        q_parts, v_parts, stages = _parts(shape.d), _parts(shape.d_v), self.stages(shape)
        # Rows of 128 bytes: k, v, d_s, q, d_out. Then twice d_q, thrice shift, twice delta.
        rows = tile.k * (stages * q_parts + v_parts + stages) + tile.q * (3 * q_parts + 2 * v_parts)
        return {
            **super().constants(tile, shape, cell_bytes),
            "SHARED_BYTES": 128 * rows + 2 * 4 * tile.q * 64 * q_parts + 5 * 4 * tile.q + self.AROUND,
            # What has but one stage has large products, which leave the producer few registers.
            "CONSUMER_REGISTERS": 240 if stages == 1 else 232,
            "PRODUCER_REGISTERS": 24 if stages == 1 else 40,
        }

    AROUND = 384 + 1024  # barriers and what is told beside tiles, and the room to align them

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        half = _parts(shape.d) * 32
        return {"wgmma.h": wgmma.header(shape.dtype, {tile.q, _up(shape.d, 16), _up(shape.d_v, 16), half})}


class WideBackwardProducts(BackwardProducts):
    """The same for wide heads, whose columns are halved: three parts of 64 count as four."""

    name = "backward_sm90_wide"

    def constants(self, tile: Tile, shape: Shape, cell_bytes: int = 0) -> Mapping[str, int | bool]:
        q_parts, v_parts = _halved(_parts(shape.d)), _halved(_parts(shape.d_v))
        # Rows of 128 bytes: k, v, twice d_s and p, twice q, d_out. Then half of d_q, twice shift, delta.
        rows = tile.k * (q_parts + v_parts + 4) + tile.q * (2 * q_parts + v_parts)
        return {
            **super().constants(tile, shape, cell_bytes),
            "SHARED_BYTES": 128 * rows + 4 * tile.q * 32 * q_parts + 3 * 4 * tile.q + self.AROUND,
        }

    def headers(self, tile: Tile, shape: Shape) -> dict[str, str]:
        half, v_half = (_halved(_parts(d)) * 32 for d in (shape.d, shape.d_v))
        return {"wgmma.h": wgmma.header(shape.dtype, {tile.q // 2, half, half // 2, v_half})}


class BackwardDQuery(_BackwardSm90):
    """Last, d_q from its sums."""

    name = "backward_sm90_d_query"


class Hoppers:
    """Hopper's backward pass: three kernels, one after the other."""

    def __init__(self, ordered: bool) -> None:
        self._first, self._last = BackwardRows(ordered), BackwardDQuery(ordered)
        self._products = {False: BackwardProducts(ordered), True: WideBackwardProducts(ordered)}

    def unsupported(self, shape: Shape) -> str | None:
        return self._first.unsupported(shape)

    def rungs(self, shape: Shape) -> tuple[Rung, Rung, Rung]:
        return self._first, self._products[self._is_wide(shape)], self._last

    def _is_wide(self, shape: Shape) -> bool:
        return max(shape.d, shape.d_v) > _BackwardSm90.NARROW

    def workspace(self, shape: Shape, q_tiles: int) -> dict[str, int]:
        """How many numbers of 4 bytes it needs beside its results; q_tiles: of all heads."""
        rows = q_tiles * self._first.default_tile(_PLAIN, shape).q
        turns = 2 * q_tiles if self._is_wide(shape) else q_tiles
        return {"rows": 2 * rows, "sums": rows * 64 * _halved(_parts(shape.d)), "turns": turns}


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


_PLAIN = Attention(scale=1.0)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _parts(columns: int) -> int:
    """Of 64 columns, whose rows have 128 bytes."""
    return -(-columns // 64)


def _halved(parts: int) -> int:
    return 4 if parts == 3 else parts


RUNGS: dict[str, Rung] = {rung.name: rung for rung in (Naive(), Tiled(), ForwardSm90())}
REFINE, REFINE_BACKWARD = Refine("refine"), Refine("refine_backward")
# Those of backward passes, one after the other.
BACKWARD: tuple[Rung, ...] = (TiledDQuery(), TiledDKeys())
BACKWARD_SM90, UNORDERED_SM90 = Hoppers(ordered=True), Hoppers(ordered=False)

UNORDERED = "unordered"  # what can be named as a rung: the last one, with the backward pass that adds in any order


def named(name: str) -> Rung:
    return RUNGS["forward_sm90" if name == UNORDERED else name]


def hoppers_backward(name: str | None) -> Hoppers | None:
    """That of a kernel that was named so, or None if the tiled ones are its."""
    return {"forward_sm90": BACKWARD_SM90, UNORDERED: UNORDERED_SM90}.get(name or "")
