"""Tiles, warps and stages of every kernel, by the size of heads: a table, so that no first call tries anything out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

from tilewise.kernels.triton import tuned
from tilewise.kernels.triton.fitting import LEAST, WIDE, Held, fitted, power_of_2, shared_bytes, shared_memory
from tilewise.kernels.triton.modules import is_interpreted
from tilewise.spec import Attention, Shape, Tile


class Pass(Enum):
    FORWARD = "forward"
    D_QUERY = "d_query"
    D_KEYS = "d_keys"
    PAIRS = "pairs"  # the gradient of a bias
    ARRAYS = "arrays"  # those of other arrays
    DECODE = "decode"


@dataclass(frozen=True)
class Choice:
    tile: Tile
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """As a launch takes them."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    def __str__(self) -> str:
        return f"tiles of {self.tile.q} queries and {self.tile.k} keys, {self.warps} warps, {self.stages} stages"


# By the larger head dimension, up to a power of 2, for half precision.
_TABLE: dict[Pass, dict[int, Choice]] = {
    Pass.FORWARD: {
        64: Choice(Tile(64, 64), 4, 3), 128: Choice(Tile(64, 64), 4, 3), 256: Choice(Tile(128, 64), 8, 2),
        512: Choice(Tile(32, 32), 4, 1),
    },
    Pass.D_QUERY: {
        64: Choice(Tile(64, 64), 4, 3), 128: Choice(Tile(128, 64), 8, 3), 256: Choice(Tile(64, 64), 4, 2),
        512: Choice(Tile(32, 16), 4, 1),
    },
    Pass.D_KEYS: {
        64: Choice(Tile(64, 64), 4, 3), 128: Choice(Tile(64, 64), 4, 2), 256: Choice(Tile(64, 64), 8, 2),
        512: Choice(Tile(16, 32), 4, 1),
    },
    Pass.PAIRS: {
        64: Choice(Tile(128, 64), 8, 3), 128: Choice(Tile(128, 64), 8, 2), 256: Choice(Tile(64, 64), 4, 1),
        512: Choice(Tile(16, 16), 4, 1),
    },
    Pass.ARRAYS: {
        64: Choice(Tile(64, 64), 4, 2), 128: Choice(Tile(64, 64), 8, 2), 256: Choice(Tile(32, 32), 4, 1),
        512: Choice(Tile(16, 16), 4, 1),
    },
    # Tile.q: rows at most. Three tiles of k and of v are under way, so that one program keeps its share of memory busy.
    Pass.DECODE: {
        64: Choice(Tile(64, 128), 4, 4), 128: Choice(Tile(64, 64), 4, 4), 256: Choice(Tile(32, 32), 4, 4),
        512: Choice(Tile(32, 16), 4, 4),
    },
}  # fmt: skip

# Without a mask no tile is cut short, and one that is larger reads fewer keys.
_PLAIN: dict[Pass, dict[int, Choice]] = {
    Pass.FORWARD: {64: Choice(Tile(128, 64), 4, 3), 128: Choice(Tile(128, 128), 8, 3)},
}

# float32 has no tensor cores: its products are written out, and large tiles take long to compile.
_FLOAT32 = {
    64: Choice(Tile(32, 32), 4, 2), 128: Choice(Tile(32, 32), 4, 2), 256: Choice(Tile(32, 16), 4, 2),
    512: Choice(Tile(16, 16), 4, 1),
}  # fmt: skip


_INTERPRETED = Choice(Tile(128, 128), 4, 1)  # large tiles: an interpreter takes as long for a small one

_HELD = {
    Pass.FORWARD: Held("q", both=False, loops=1), Pass.D_QUERY: Held("q", both=True, loops=1),
    Pass.D_KEYS: Held("k", both=True, loops=1), Pass.PAIRS: Held("", both=True, loops=1),
    # Of distances twice as many keys pass by, and queries with them.
    Pass.ARRAYS: Held("q", both=True, loops=2), Pass.DECODE: Held("q", both=False, loops=1),
}  # fmt: skip


def chosen(kind: Pass, spec: Attention, shape: Shape, tile: Tile | None = None) -> Choice:
    """For such calls; a tile that was asked for is taken as near as it comes below."""
    if is_interpreted() and kind is not Pass.DECODE:
        found = _INTERPRETED
    else:
        found = fitted(_entry(kind, spec, shape), spec, shape, _HELD[kind], shared_memory(shape.device))
    if tile is not None:
        fitting = Tile(_at_most(tile.q, found.tile.q), _at_most(tile.k, found.tile.k))
        found = Choice(fitting, found.warps if fitting == found.tile else 4, found.stages)
    return found if shape.dtype == "float32" or is_interpreted() else _wide_enough(kind, found)


def _wide_enough(kind: Pass, choice: Choice) -> Choice:
    """With fewer rows where they would be multiplied with narrow matrices (fitting.WIDE)."""
    q, k = choice.tile.q, choice.tile.k
    narrow_k, narrow_q = q >= WIDE > k and kind is not Pass.D_KEYS, k >= WIDE > q and kind in (Pass.D_KEYS, Pass.ARRAYS)
    if not (narrow_k or narrow_q):
        return choice
    return Choice(Tile(min(q, WIDE // 2), min(k, WIDE // 2)), 4, choice.stages)


def distances() -> int:
    """How many of a relative table a program sums up, and so how many queries it has at a time."""
    return _INTERPRETED.tile.q if is_interpreted() else 32


def _entry(kind: Pass, spec: Attention, shape: Shape) -> Choice:
    if kind in _tried:
        return _tried[kind]
    size = up(max(shape.d, shape.d_v))
    if shape.dtype == "float32":
        return _FLOAT32[size]
    found = tuned.choices(shape.device).get(kind.value, {}).get(size)
    if found is not None:
        q, k, warps, stages = found
        return Choice(Tile(q, k), warps, stages)
    is_plain = spec.mask is None and spec.score is None and spec.rope is None and spec.lengths is None
    return _PLAIN.get(kind, {}).get(size, _TABLE[kind][size]) if is_plain else _TABLE[kind][size]


def up(size: int) -> int:
    """The entry for heads of this size."""
    return next(limit for limit in _FLOAT32 if size <= limit)


def without_room(spec: Attention, shape: Shape) -> str | None:
    """Why a GPU cannot hold even the smallest tiles, or None."""
    if is_interpreted():
        return None
    limit = shared_memory(shape.device)
    for kind in (Pass.FORWARD, Pass.D_QUERY, Pass.D_KEYS) if shape.backward else (Pass.FORWARD,):
        wanted = shared_bytes(chosen(kind, spec, shape), spec, shape, _HELD[kind])
        if wanted > limit:
            return (
                f"the smallest tiles of heads of {shape.d} and {shape.d_v} in {shape.dtype} take {wanted >> 10} KiB of "
                f"shared memory, and {shape.device} has {limit >> 10}; half precision takes half"
            )
    return None


def fits(kind: Pass, choice: Choice, spec: Attention, shape: Shape, limit: int) -> bool:
    return shared_bytes(choice, spec, shape, _HELD[kind]) <= limit


_tried: dict[Pass, Choice] = {}


@contextmanager
def trying(kind: Pass, choice: Choice) -> Iterator[None]:
    """Calls inside take this choice, as far as it fits."""
    _tried[kind] = choice
    try:
        yield
    finally:
        del _tried[kind]


def _at_most(wanted: int, most: int) -> int:
    """A power of 2."""
    return max(LEAST, min(most, 1 << (wanted.bit_length() - 1)))


# -- decoding ---------------------------------------------------------------------------------------------------------

_LEAST_TILES = 4  # of keys, that a program is worth starting for
_NEARLY = 0.95


def fitting_rows(choice: Choice, shape: Shape) -> Choice:
    """With rows for the queries of all heads that share a key head, as long as they fit."""
    rows = power_of_2(shape.group * shape.n_q)
    return replace(choice, tile=replace(choice.tile, q=min(choice.tile.q, rows)))


@cache
def splits_of(programs: int, tiles: int, room: int) -> int:
    """How many programs share the keys of one: the fewest that keep nearly as much of the GPU busy as any number.

    room: how many it runs at a time, one a multiprocessor.
    """
    most = max(1, tiles // _LEAST_TILES)
    busy = [programs * n / (-(-programs * n // room) * room) for n in range(1, min(most, room) + 1)]
    return 1 + next(i for i, share in enumerate(busy) if share >= _NEARLY * max(busy))


@cache
def processors(device: Any) -> int:
    """Multiprocessors of a GPU; where there is none, Triton's interpreter runs one program after the other."""
    if device.type != "cuda":
        return 1
    return int(sys.modules["torch"].cuda.get_device_properties(device).multi_processor_count)
