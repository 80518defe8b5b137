"""How kernels of linear attention share the work: rows at a time, blocks of a state, warps, and segments."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.kernels.triton.fitting import padded, shared_memory
from tilewise.spec import Shape

_COLUMNS = 64  # or rows of a state that a program has in registers; fewer no kernel has, see fitting.WIDE
_ROOM = 160 << 10  # bytes of shared memory that two stages of the widest heads take; other GPUs have one
_START = 4  # chunks that could be computed while a program begins: it waits for a state, and for its first rows
_AGAIN = 1.5  # times that rows take of which the state must be known before: k and v are read twice


class Choice(NamedTuple):
    chunk: int  # rows at a time
    block: int  # rows or columns of a state that a program has
    warps: int = 4
    stages: int = 2


def choice_of(kernel: str, shape: Shape, chunk: int | None = None) -> Choice:
    """For one of the kernels, by its name. Float32 is multiplied without tensor cores, by threads that each hold their
    part of the rows."""
    block = min(_COLUMNS, padded(shape.d, shape.dtype), padded(shape.d_v, shape.dtype))
    stages = 2 if shared_memory(shape.device) >= _ROOM else 1
    return Choice(chunk or (16 if shape.dtype == "float32" else 64), block, 4, stages)


def residents(shape: Shape) -> int:
    """Programs that a processor has at a time."""
    return 2 if max(shape.d, shape.d_v) > _COLUMNS else 4


def segments_for(programs: int, chunks: int, slots: int) -> int:
    """How many segments each sequence is cut into, for so many programs otherwise, each with so many chunks, and slots
    that run programs side by side: what is done soonest; of equals, the fewest."""

    def time(segments: int) -> float:
        rounds = -(-programs * segments // slots)
        return rounds * (-(-chunks // segments) * (_AGAIN if segments > 1 else 1) + _START)

    most = max(1, min(chunks // 2, 4 * slots // max(1, programs)))
    return min(range(1, most + 1), key=time)
