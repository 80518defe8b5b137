"""Tiles, stages and threads of each kernel: what is wished for, as far as a GPU has room for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from tilewise.generations import GENERATIONS
from tilewise.kernels.tilelang.compiler import C
from tilewise.schedule import itemsize
from tilewise.spec import Attention, Shape, Tile

# Bytes of shared memory that a block may take, by architecture; of others the least is taken for granted.
SHARED_MEMORY = {arch: found.block for arch, found in GENERATIONS.items()} | {"sm_90a": GENERATIONS["sm_90"].block}
LEAST_SHARED_MEMORY = 99 << 10
_RESERVED = 1 << 10  # for barriers
_WARPGROUP = 128  # threads, which multiply 64 rows at a time
_ROWS = 64
_L2_CACHE = 48 << 20  # bytes, of an H200; it has some more


class Pass(Enum):
    """Whose tiles stay, and whose come by."""

    SIMPLE = "simple"
    FORWARD = "forward"
    ROWS = "rows"
    D_QUERY = "d_query"
    D_KEYS = "d_keys"
    ARRAYS = "arrays"


@dataclass(frozen=True)
class Choice:
    tile: Tile
    stages: int
    threads: int = _WARPGROUP
    turns: bool = False  # of warpgroups, when they begin products


# By the columns of a head, up to these. Each warpgroup has 64 rows of the tiles that stay; those that come by have a
# multiple of 16, of queries of 32, whose numbers the copy engine leaves at multiples of 128 bytes.
_CHOICES = {
    Pass.SIMPLE: {128: Choice(Tile(128, 128), 2), 256: Choice(Tile(128, 64), 2)},
    Pass.FORWARD: {
        64: Choice(Tile(192, 128), 2, turns=True), 128: Choice(Tile(128, 160), 2), 256: Choice(Tile(128, 64), 2),
    },
    Pass.ROWS: {256: Choice(Tile(64, 64), 0)},
    Pass.D_QUERY: {
        64: Choice(Tile(192, 96), 2, turns=True), 128: Choice(Tile(128, 96), 2, turns=True),
        256: Choice(Tile(64, 64), 1),
    },
    Pass.D_KEYS: {
        64: Choice(Tile(96, 128), 2), 128: Choice(Tile(64, 128), 2, turns=True), 256: Choice(Tile(64, 64), 1),
    },
    Pass.ARRAYS: {256: Choice(Tile(64, 64), 0)},
}  # fmt: skip
# Where registers are short: scores are more than products, or threads load rows, and wait for each other before every
# product, so that there are no turns; rows of the last begin anywhere.
_MOST = {Pass.D_QUERY: Tile(128, 64), Pass.D_KEYS: Tile(64, 128)}
_MOST_OF_OTHERS, _MOST_ANYWHERE = Tile(128, 128), Tile(128, 64)
_ON_C = Choice(Tile(32, 32), 0)


def chosen(
    kind: Pass, spec: Attention, shape: Shape, target: str, wish: Tile | None = None, aligned: bool = True
) -> Choice:
    """In main memory any tile will do; a GPU's are multiples of 64, or as large as the table has them.

    aligned: rows begin at multiples of 16 bytes.
    """
    if target == C:
        return replace(_ON_C, tile=wish or _ON_C.tile)
    widest = max(padded(shape.d), padded(shape.d_v))
    found = next(choice for most, choice in _CHOICES[kind].items() if widest <= most)
    if not (spec.raw_scores and spec.lengths is None and aligned):
        found = replace(_at_most(found, _MOST.get(kind, _MOST_OF_OTHERS)), turns=False)
        found = found if aligned else _at_most(found, _MOST_ANYWHERE)
    if wish is not None:
        found = _at_most(found, Tile(_up(wish.q), _up(wish.k)))
    found = _fitting(found, kind, shape, _room(target))
    stay = found.tile.k if kind is Pass.D_KEYS else found.tile.q
    return replace(found, threads=stay // _ROWS * _WARPGROUP, turns=found.turns and stay > _ROWS)


def _at_most(choice: Choice, tile: Tile) -> Choice:
    return replace(choice, tile=Tile(min(choice.tile.q, tile.q), min(choice.tile.k, tile.k)))


def heads_first(spec: Attention, shape: Shape, target: str) -> bool:
    """Whether blocks have the same tile of all heads, and then the next, in place of one head after the other.

    A mask makes tiles of more and of less work. The most come first; if these are of all heads, little is left to wait
    for at the end. But what all heads read is then read at one time, and again for each tile: the cache is to hold it,
    for each head of queries, whose rows d_keys reads. Of a mask nothing is known here but that there is one: where it
    leaves all tiles alike, this order is a few percent slower. Packed sequences may have any number of tiles, more than
    a grid's second number.
    """
    rows = max(shape.n_q, shape.n_k) * shape.heads * (padded(shape.d) + padded(shape.d_v)) * itemsize(shape.dtype)
    return target != C and spec.mask is not None and spec.lengths is None and rows <= _L2_CACHE


def padded(columns: int) -> int:
    """Columns as tiles in shared memory have them: one layout of 128 bytes a row, whatever the head."""
    return _up(columns)


def _up(size: int) -> int:
    return -(-size // _ROWS) * _ROWS


def _sizes(tile: Tile) -> tuple[int, int]:
    return tile.q, tile.k


def _fitting(choice: Choice, kind: Pass, shape: Shape, room: int) -> Choice:
    """With fewer stages, then with fewer rows, until there is room."""
    while shared_bytes(choice, kind, shape) > room:
        tile = choice.tile
        if choice.stages > 1:
            choice = replace(choice, stages=choice.stages - 1)
        elif max(_sizes(tile)) > _ROWS:
            choice = replace(choice, tile=Tile(min(tile.q, _ROWS), tile.k) if tile.q > _ROWS else Tile(tile.q, _ROWS))
        else:
            break
    return choice


def has_room(kind: Pass, spec: Attention, shape: Shape, target: str) -> bool:
    return target == C or shared_bytes(chosen(kind, spec, shape, target), kind, shape) <= _room(target)


def _room(target: str) -> int:
    """Bytes of shared memory for tiles."""
    return SHARED_MEMORY.get(target, LEAST_SHARED_MEMORY) - _RESERVED


def shared_bytes(choice: Choice, kind: Pass, shape: Shape) -> int:
    """The tiles that stay, and those that come by in each stage."""
    d, d_v, (q, k) = padded(shape.d), padded(shape.d_v), _sizes(choice.tile)
    stages = max(choice.stages, 1)
    forward = q * d + stages * k * (d + d_v)
    numbers = {
        Pass.SIMPLE: forward,
        Pass.FORWARD: forward,
        Pass.ROWS: 2 * q * d_v,
        Pass.D_QUERY: (q + stages * k) * (d + d_v),
        Pass.D_KEYS: (k + stages * q) * (d + d_v),
        Pass.ARRAYS: (q + 2 * k) * (d + d_v) + 4 * q * k,
    }[kind]
    return numbers * itemsize(shape.dtype)
