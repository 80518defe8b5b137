"""What a kernel keeps in shared memory, and how a choice becomes one that a GPU has room for."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from tilewise import arrays
from tilewise.expr import Expr, Loaded
from tilewise.kernels import gpus
from tilewise.kernels.triton.choices import Choice
from tilewise.spec import Attention, Shape, Tile
from tilewise.walking import nodes, remembered, variables

HOPPER = 227 << 10  # bytes
LEAST = 16  # rows or columns, as tensor cores take a matrix
# In half precision matrices are as wide as this where 64 rows or more are multiplied. Hopper has its own instructions
# for those; kernels with narrower ones, as Triton 3.6 compiles them, now and then read memory that is not theirs
# (triton-lang/triton, issue 11366).
WIDE = 64
_WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4}
_CELL = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int64": 8, "float64": 8,
}  # fmt: skip
_QUERIES, _KEYS = {"Q", "QP"}, {"K", "KP"}


class Held(NamedTuple):
    """Whose tile stays in shared memory while those of the other pass by."""

    by: str  # "q" or "k"; "": neither's does, as one head's follow another's
    both: bool  # with d_out or v beside it
    loops: int  # in which tiles pass by, each with room of its own
    waiting: int = 0  # of the two tiles of a stage, how many wait for a second product, with room of their own


class Sizes(NamedTuple):
    """What of a call decides how much room it takes."""

    d: int  # padded
    d_v: int
    width: int  # bytes of a number
    cells: int  # bytes that the variant reads for each score
    angles: int  # bytes of what a row is turned by: cos and sin, in float32, of half its numbers

    @classmethod
    def of(cls, spec: Attention, shape: Shape) -> Sizes:
        d, d_v = padded(shape.d, shape.dtype), padded(shape.d_v, shape.dtype)
        return cls(d, d_v, _WIDTH[shape.dtype], _cells(spec), 0 if spec.rope is None else 4 * d)


def fitted(choice: Choice, spec: Attention, shape: Shape, held: Held, limit: int) -> Choice:
    """The choice, or the nearest below it that fits: fewer stages first, then smaller tiles."""
    return _fitted(choice, Sizes.of(spec, shape), held, limit)


@cache
def _fitted(choice: Choice, sizes: Sizes, held: Held, limit: int) -> Choice:
    """Stages that hold a variant's cells as well would crowd out other programs: rather fewer stages than those."""
    programs = max(1, limit // _shared_bytes(choice, sizes._replace(cells=0), held))
    while choice.stages > 2 and programs * _shared_bytes(choice, sizes, held) > limit:
        choice = replace(choice, stages=choice.stages - 1)
    while _shared_bytes(choice, sizes, held) > limit:
        smaller = _smaller(choice, held)
        if smaller is None:
            return choice
        choice = smaller
    return choice


def shared_bytes(choice: Choice, spec: Attention, shape: Shape, held: Held) -> int:
    return _shared_bytes(choice, Sizes.of(spec, shape), held)


@cache
def _shared_bytes(choice: Choice, sizes: Sizes, held: Held) -> int:
    """Rows of tiles, once of those that stay and in each stage of those that pass by, there with what the variant reads
    for every score, and angles if they are loaded ahead; in float32 also scores on their way from one layout to
    another."""
    tile, width = choice.tile, sizes.width
    stays = {"q": tile.q, "k": tile.k, "": 0}[held.by]
    passes = tile.q + tile.k - stays
    both = (sizes.d + sizes.d_v) * width
    stage = passes * (both + (sizes.angles if choice.stages > 1 else 0)) + tile.q * tile.k * sizes.cells
    moved = tile.q * tile.k * width if width == 4 else 0
    if held.by == "k" and choice.stages == 1:  # q, multiplied both ways, lies there both ways
        stage += passes * sizes.d * width
    stages = held.loops * choice.stages if choice.stages > 1 else 1  # a single one is no loop's own
    waits = passes * (0, sizes.d, sizes.d + sizes.d_v)[held.waiting] * width if stages > 1 else 0
    return stays * (both if held.both else sizes.d * width) + stages * stage + waits + moved


def _smaller(choice: Choice, held: Held) -> Choice | None:
    if choice.stages > 2:
        return replace(choice, stages=choice.stages - 1)
    q, k = choice.tile.q, choice.tile.k
    if max(q, k) == LEAST:
        return replace(choice, stages=1) if choice.stages > 1 else None
    halves_q = q > k if q != k else held.by == "k"  # of two that are the same, the tile that passes by
    return replace(choice, tile=Tile(q // 2, k) if halves_q else Tile(q, k // 2), warps=4)


def _cells(spec: Attention) -> int:
    """Bytes that the variant reads from arrays for each pair of a query and a key."""
    return sum(remembered(expr, "bytes of pairs", _cells_of) for expr in spec.expressions)


def _cells_of(expr: Expr) -> int:
    return sum(_CELL.get(arrays.dtype_name(node.payload.array), 4) for node in nodes(expr) if _of_pairs(node))


def _of_pairs(node: Expr) -> bool:
    if not isinstance(node.payload, Loaded):
        return False
    used = frozenset().union(*map(variables, node.args)) if node.args else frozenset()
    return bool(used & _QUERIES) and bool(used & _KEYS)


def power_of_2(n: int) -> int:
    """As wide as tensor cores take a matrix, at least."""
    return max(LEAST, 1 << (n - 1).bit_length())


def padded(d: int, dtype: str) -> int:
    """A head's columns in a kernel."""
    return power_of_2(d) if dtype == "float32" else max(WIDE, power_of_2(d))


@cache
def shared_memory(device: str) -> int:
    """Of a block, in bytes. Where there is no GPU a kernel is interpreted, or compiled for one that may be large."""
    if not device.startswith("cuda"):
        return HOPPER
    if gpus.is_imagined(device):
        return gpus.room(gpus.architecture(device)) or gpus.LEAST_ROOM
    properties = sys.modules["torch"].cuda.get_device_properties(device)
    # PyTorch for AMD's GPUs does not tell the first; there both are the same.
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block)


@cache
def architecture(device: str) -> str:
    """As compilers name it: sm_90, gfx942. Where there is no GPU, the one that the memory above is of."""
    return gpus.architecture(device) if device.startswith("cuda") else "sm_90"
