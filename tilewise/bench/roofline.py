"""How fast this machine could be: the native engine's library measures it, and records say how near they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any

from tilewise.bench import machine
from tilewise.bench.problem import Cell
from tilewise.bench.process import Child
from tilewise.bench.refusal import RefusedError, public

LIBRARY = "tilewise.kernels.cpu.library"
_TIMEOUT = 120.0
_BUFFERS = 4  # each lies elsewhere in memory, on large pages or on small ones


@dataclass(frozen=True)
class Roof:
    """Both with all threads; None where they could not be measured, and why."""

    peak_gflops: float | None = None  # float32 multiplications and additions, fused
    read_gbs: float | None = None  # main memory: the best of a few buffers
    unmeasured: str | None = None


UNKNOWN = Roof(unmeasured="the native library is not here")


class Meter:
    """In a process of its own, with the threads that the contestants have."""

    def __init__(self, library: str) -> None:
        self._library: Any = import_module(library)

    def rates(self) -> tuple[float, float]:
        return self._library.peak_flops("float32"), max(self._library.read_rate() for _ in range(_BUFFERS))


def measured(threads: int | None) -> Roof:
    try:
        library: Any = import_module(LIBRARY)
    except ModuleNotFoundError:
        return UNKNOWN
    reason = library.unavailable()
    if reason is not None:
        return Roof(unmeasured=public(reason))
    with Child("tilewise.bench.roofline:Meter", LIBRARY, env=machine.thread_variables(threads)) as child:
        try:
            flops, read = child.ask("rates", timeout=_TIMEOUT)
        except RefusedError as error:  # the benchmark can do without
            return Roof(unmeasured=public(f"{error.status}: {error.reason}"))
    return Roof(flops / 1e9, read / 1e9)


@dataclass(frozen=True)
class PlainRead:
    """After a turn: the rate of only reading k and v, bytes a second, and the turn's own rate as a part of it."""

    rate: float
    share: float

    @classmethod
    def beside(cls, cell: Cell, turn: Sequence[float], rate: float) -> PlainRead:
        return cls(rate, cell.key_bytes / median(turn) / rate)


def reading(cell: Cell, seconds: float, plain: Sequence[PlainRead], cache: int | None) -> dict[str, Any]:
    """What a record says of a step that must read k and v.

    Memory's rate may change from second to second: each turn is compared with the read right after it.
    """
    times_cache = None if cache is None else cell.key_bytes / cache
    return {
        "read_gbs": cell.key_bytes / seconds / 1e9,
        "plain_read_gbs": median(read.rate for read in plain) / 1e9 if plain else None,
        "read_fraction": median(read.share for read in plain) if plain else None,
        "times_cache": times_cache,
        "fits_cache": None if times_cache is None else times_cache <= 1,
    }


def fractions(record: dict[str, Any], roof: Roof) -> dict[str, float | None]:
    """A record's speeds as parts of the limits; halves are computed in float32, float64 has another peak.

    Reading is compared with a plain read of the same arrays: the machine's own rate depends on where an array lies.
    """
    peak = None if record["dtype"] == "float64" else roof.peak_gflops
    return {
        "fraction": _share(record["gflops"], peak),
        "read_fraction": record["read_fraction"] or _share(record["read_gbs"], roof.read_gbs),
    }


def _share(value: float | None, of: float | None) -> float | None:
    return value / of if value and of else None
