"""What a kernel keeps in shared memory, and how a choice becomes one that a GPU has room for."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from tilewise import arrays
from tilewise.expr import Expr, Loaded
from tilewise.spec import Attention, Shape, Tile
from tilewise.walking import nodes, variables

if TYPE_CHECKING:
    from tilewise.kernels.triton.tuning import Choice

HOPPER = 227 << 10  # bytes
_LEAST = 16
_WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4}
_CELL = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "float64": 8,
}
_QUERIES, _KEYS = {"Q", "QP"}, {"K", "KP"}


def fitted(choice: Choice, spec: Attention, shape: Shape, held: str, loops: int, limit: int) -> Choice:
    """The choice, or the nearest below it that fits: fewer stages first, then smaller tiles.

    held: "q" or "k", whose tile stays while those of the other pass by. loops: how often those have room of their own.
    """
    while shared_bytes(choice, spec, shape, held, loops) > limit:
        smaller = _smaller(choice, held)
        if smaller is None:
            return choice
        choice = smaller
    return choice


def shared_bytes(choice: Choice, spec: Attention, shape: Shape, held: str, loops: int) -> int:
    """Rows of tiles, once of those that stay and in each stage of those that pass by, there with what the variant reads
    for every score; and scores on their way from one layout to another."""
    tile, row = choice.tile, (_up(shape.d) + _up(shape.d_v)) * _WIDTH[shape.dtype]
    stays, passes = (tile.q, tile.k) if held == "q" else (tile.k, tile.q)
    scores = tile.q * tile.k
    stage = passes * row + scores * _cells(spec)
    return stays * row + loops * choice.stages * stage + scores * _WIDTH[shape.dtype]


def _smaller(choice: Choice, held: str) -> Choice | None:
    if choice.stages > 2:
        return replace(choice, stages=choice.stages - 1)
    q, k = choice.tile.q, choice.tile.k
    if max(q, k) == _LEAST:
        return replace(choice, stages=1) if choice.stages > 1 else None
    halves_q = q > k if q != k else held == "k"  # of two that are the same, the tile that passes by
    return replace(choice, tile=Tile(q // 2, k) if halves_q else Tile(q, k // 2), warps=4)


def _cells(spec: Attention) -> int:
    """Bytes that the variant reads from arrays for each pair of a query and a key."""
    return sum(
        _CELL.get(arrays.dtype_name(node.payload.array), 4) for node in nodes(*spec.expressions) if _of_pairs(node)
    )


def _of_pairs(node: Expr) -> bool:
    if not isinstance(node.payload, Loaded):
        return False
    used = frozenset().union(*map(variables, node.args)) if node.args else frozenset()
    return bool(used & _QUERIES) and bool(used & _KEYS)


def _up(n: int) -> int:
    return max(_LEAST, 1 << (n - 1).bit_length())


@cache
def shared_memory(device: str) -> int:
    """Of a block, in bytes. Where there is no GPU a kernel is interpreted, or compiled for one that may be large."""
    if not device.startswith("cuda"):
        return HOPPER
    return int(sys.modules["torch"].cuda.get_device_properties(device).shared_memory_per_block_optin)
