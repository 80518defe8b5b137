"""How kernels of linear attention share the work: rows at a time, blocks of a state, warps, and segments."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.kernels.triton.fitting import padded, shared_memory
from tilewise.spec import Shape

_COLUMNS = 64  # or rows of a state that a program has in registers
_ROOM = 160 << 10  # bytes of shared memory that two stages of the widest heads take; other GPUs have one
_HOPPER = 227 << 10  # and three of bfloat16, which are loaded while two more are on their way
_START = 4  # chunks that could be computed while a program begins: it waits for a state, and for its first rows
_AGAIN = 1.5  # times that rows take of which the state must be known before: k and v are read twice


class Choice(NamedTuple):
    chunk: int  # rows at a time
    block: int  # rows or columns of a state that a program has
    warps: int = 4
    stages: int = 2  # with two, Triton 3.6 loads a chunk when the one before is done, and programs take turns
    residents: int = 2  # programs that a processor has at a time

    @property
    def one(self) -> float | None:
        """See chunks.added."""
        return 1.0 if 16 * self.warps > self.chunk and self.block >= 64 else None


def choice_of(kernel: str, shape: Shape, chunk: int | None = None) -> Choice:
    """For one of the kernels, by its name. No block is narrower than 64 in half precision: see fitting.WIDE. Float32 is
    multiplied without tensor cores, by threads that each hold their part of the rows."""
    d, d_v = padded(shape.d, shape.dtype), padded(shape.d_v, shape.dtype)
    block = min(_COLUMNS, d, d_v)
    room = shared_memory(shape.device)
    if shape.dtype == "bfloat16" and room >= _HOPPER:
        if max(d, d_v) > _COLUMNS:
            warps = 4 if kernel == "map_rows" else 8  # the fewer, the more of its programs are there at a time
            return Choice(chunk or 64, min(d, d_v), warps, 3, 1)
        return Choice(chunk or 64, block, 4, 3, 2)
    return Choice(chunk or (16 if shape.dtype == "float32" else 64), block, 4, 2 if room >= _ROOM else 1)


def segments_for(programs: int, chunks: int, slots: int) -> int:
    """How many segments each sequence is cut into, for so many programs otherwise, each with so many chunks, and slots
    that run programs side by side: what is done soonest; of equals, the fewest."""

    def time(segments: int) -> float:
        rounds = -(-programs * segments // slots)
        return rounds * (-(-chunks // segments) * (_AGAIN if segments > 1 else 1) + _START)

    most = max(1, min(chunks // 2, 4 * slots // max(1, programs)))
    return min(range(1, most + 1), key=time)
