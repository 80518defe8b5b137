"""Which tiles, warps and stages a call takes: those of the table or of `tilewise tune`, as far as a GPU has room."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from tilewise.kernels import gpus
from tilewise.kernels.triton import tuned
from tilewise.kernels.triton.choices import BLACKWELL, Calls, Choice, Entry, Pass, entry, entry_of_float32, row_of, up
from tilewise.kernels.triton.fitting import (
    LEAST,
    WIDE,
    Held,
    architecture,
    fitted,
    power_of_2,
    shared_bytes,
    shared_memory,
)
from tilewise.kernels.triton.modules import is_interpreted
from tilewise.spec import Attention, Shape, Tile

_INTERPRETED = Choice(Tile(128, 128), 4, 1)  # large tiles: an interpreter takes as long for a small one

_HELD = {
    Pass.FORWARD: Held("q", both=False, loops=1), Pass.D_QUERY: Held("q", both=True, loops=1),
    Pass.D_KEYS: Held("k", both=True, loops=1), Pass.PAIRS: Held("", both=True, loops=1),
    # Of distances twice as many keys pass by, and queries with them.
    Pass.ARRAYS: Held("q", both=True, loops=2), Pass.DECODE: Held("q", both=False, loops=1),
}  # fmt: skip
_WAITING = {Pass.D_QUERY: 1, Pass.D_KEYS: 2}  # on Blackwell: k, and q with d_out


@cache
def _held(kind: Pass, device: str) -> Held:
    is_blackwell = row_of(architecture(device)) == BLACKWELL
    return _HELD[kind]._replace(waiting=_WAITING.get(kind, 0) if is_blackwell else 0)


def chosen(kind: Pass, spec: Attention, shape: Shape, tile: Tile | None = None) -> Choice:
    """For such calls; a tile that was asked for is taken as near as it comes below."""
    interpreted = _runs_by_interpreter(shape.device)
    if interpreted and kind is not Pass.DECODE:
        found = _INTERPRETED
    else:
        wanted, device = _entry(kind, spec, shape).choice, shape.device
        found = fitted(wanted, spec, shape, _held(kind, device), shared_memory(device))
    if tile is not None:
        fitting = Tile(_at_most(tile.q, found.tile.q), _at_most(tile.k, found.tile.k))
        found = Choice(fitting, found.warps if fitting == found.tile else 4, found.stages)
    return found if shape.dtype == "float32" or interpreted else _wide_enough(kind, found)


def _runs_by_interpreter(device: str) -> bool:
    return is_interpreted() and not gpus.is_imagined(device)


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


def _entry(kind: Pass, spec: Attention, shape: Shape) -> Entry:
    if kind in _tried:
        return Entry(_tried[kind], "this very choice", "tried")
    head = up(max(shape.d, shape.d_v))
    if shape.dtype == "float32":
        return entry_of_float32(head)
    calls = calls_of(spec)
    found = tuned.choices(shape.device).get((kind, calls, head))
    if found is not None:
        return Entry(found, f"{calls.value} calls on this GPU, heads up to {head}", "tuned")
    return entry(architecture(shape.device), kind, calls, head)


def calls_of(spec: Attention) -> Calls:
    is_plain = spec.mask is None and spec.score is None and spec.rope is None and spec.lengths is None
    return Calls.PLAIN if is_plain else Calls.MASKED


def described(kind: Pass, spec: Attention, shape: Shape) -> str:
    """What a call takes, and which row of which table it is from."""
    taken, found = chosen(kind, spec, shape), _entry(kind, spec, shape)
    if _runs_by_interpreter(shape.device) and kind is not Pass.DECODE:
        return f"{taken} (for the interpreter)"
    return f"{taken} ({found}{'' if taken == found.choice else ', made smaller to fit'})"


def without_room(spec: Attention, shape: Shape) -> str | None:
    """Why a GPU cannot hold even the smallest tiles, or None."""
    if _runs_by_interpreter(shape.device):
        return None
    limit = shared_memory(shape.device)
    for kind in (Pass.FORWARD, Pass.D_QUERY, Pass.D_KEYS) if shape.backward else (Pass.FORWARD,):
        wanted = shared_bytes(chosen(kind, spec, shape), spec, shape, _held(kind, shape.device))
        if wanted > limit:
            return (
                f"the smallest tiles of heads of {shape.d} and {shape.d_v} in {shape.dtype} take {wanted >> 10} KiB of "
                f"shared memory, and {shape.device} has {limit >> 10}; half precision takes half"
            )
    return None


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
