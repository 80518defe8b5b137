"""Where a GPU kernel has its tiles: which buffer is in global memory, shared memory or registers in each step.

Sizes are those of the kernels' own launches (rungs.py): what lies in shared memory adds up to what a block asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewise.kernels.cuda.rungs import ForwardSm90, Tiled, parts, up
from tilewise.spec import Attention, Shape, Tile

GLOBAL, SHARED, REGISTERS = "global", "shared", "registers"
_LETTERS = {"G": GLOBAL, "S": SHARED, "R": REGISTERS}
_WIDE = 4  # bytes of float32
_TILED, _HOPPER = Tiled(), ForwardSm90()


@dataclass(frozen=True)
class Buffer:
    """A buffer of a block, and where it is in steps 1 to 7: ("global", "shared") is a move, () that there is none."""

    name: str
    of: str  # "query", "key" or "next key": whose tile it is; "": of the work alone
    places: tuple[tuple[str, ...], ...]
    shared: int = 0  # bytes
    registers: int = 0
    shares: str = ""  # the buffer whose place in shared memory it takes
    count: int = 1  # such buffers in shared memory: the stages of a ring


@dataclass(frozen=True)
class Placement:
    """A kernel's buffers, its tile and the shared memory of a block; `around` is what barriers and the like take."""

    kernel: str
    tile: Tile
    dtype: str
    buffers: tuple[Buffer, ...]
    shared: int
    around: int = 0


def placements(spec: Attention, shape: Shape, tile: Tile) -> list[Placement]:
    """Of the kernels that a reader meets first and last, each with the tile that it takes when asked for this one."""
    half = replace(shape, dtype="bfloat16")
    made = [_of_tiled(shape, _TILED.fitting(tile, shape))]
    return made if _HOPPER.unsupported(half) else [*made, _of_hopper(half, _HOPPER.fitting(tile, half))]


def _of_tiled(shape: Shape, tile: Tile) -> Placement:
    """As in tiled.cu: k and v come through one slice, 32 columns at a time; rows have four numbers more."""
    rows, keys, columns = up(tile.q, 8), up(tile.k, 16), up(shape.d, _TILED.SLICE)
    buffers = (
        Buffer("q", "query", _path("G>S S S S S S -"), shared=rows * (columns + 4) * _WIDE),
        Buffer("k", "key", _path("G G>S G G G G -"), shared=keys * (_TILED.SLICE + 4) * _WIDE),
        Buffer("s", "", _path("- R R R R - -"), registers=rows * keys * _WIDE),
        Buffer("p", "", _path("- - - - R>S S -"), shared=rows * (keys + 4) * _WIDE),
        Buffer("v", "key", _path("G G G G G G>S -"), shares="k's slice"),
        Buffer("row_max, row_sum", "query", _path("R R R R R R R"), registers=2 * rows * _WIDE),
        Buffer("acc", "query", _path("R R R R R R R>G"), registers=rows * up(shape.d_v, _TILED.SLICE) * _WIDE),
    )
    return Placement("cuda/tiled", tile, shape.dtype, buffers, _TILED.constants(tile, shape)["SHARED_BYTES"])


def _of_hopper(shape: Shape, tile: Tile) -> Placement:
    """As in forward_sm90.cu: p never leaves registers, and a producer keeps rings of k and v full, ahead of consumers.

    Its order is k, the next k, v, the k after that, the next v; tiles are shown as coming no earlier than they must.
    """
    constants = _HOPPER.constants(tile, shape)
    stages, q_in_registers = constants["STAGES"], constants["Q_IN_REGISTERS"]
    k_bytes, v_bytes = (tile.k * parts(d) * 128 for d in (shape.d, shape.d_v))
    q_path = "G>S>R R R R R R -" if q_in_registers else "G>S S S S S S -"
    q_registers = tile.q * up(shape.d, 16) * 2 if q_in_registers else 0
    buffers = (
        Buffer("q", "query", _path(q_path), tile.q * parts(shape.d) * 128, q_registers),
        Buffer("k", "key", _path("G>S S S S S - -"), shared=k_bytes, count=stages),
        Buffer("k", "next key", _path("G G>S S S S S -"), shares="the ring of k"),
        Buffer("s", "", _path("- R R R R - -"), registers=tile.q * tile.k * _WIDE),
        Buffer("p", "", _path("- - - - R R -"), registers=tile.q * tile.k * 2),
        Buffer("v", "key", _path("G G>S S S S S -"), shared=v_bytes, count=stages),
        Buffer("v", "next key", _path("G G G G G>S S -"), shares="the ring of v"),
        Buffer("row_max, row_sum", "query", _path("R R R R R R R"), registers=2 * tile.q * _WIDE),
        Buffer("acc", "query", _path("R R R R R R R>G"), registers=tile.q * up(shape.d_v, 16) * _WIDE),
    )
    return Placement("cuda/forward_sm90", tile, shape.dtype, buffers, constants["SHARED_BYTES"], _HOPPER.AROUND)


def _path(text: str) -> tuple[tuple[str, ...], ...]:
    """ "G>S S -": from global to shared memory, there, and no longer."""
    return tuple(tuple(_LETTERS[letter] for letter in step.split(">") if letter != "-") for step in text.split())
