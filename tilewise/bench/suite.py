"""The CPU engine's suite: the cells by which its targets are proved or missed, in sections. `tilewise bench --cpu`."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.bench.contestants import OURS
from tilewise.bench.problem import Cell
from tilewise.bench.run import Settings

KERNEL = "cpu"
PEER = "torch sdpa"
THREADS = 2
REPEAT, BUDGET = 50, 1.5  # repetitions at most, and seconds for them; never fewer than LEAST
LEAST = 3
LONGEST = 16384
DECODE_HEADS = 32
GROUPS_AT = 32768  # keys


@dataclass(frozen=True)
class Section:
    name: str
    about: str
    cells: tuple[Cell, ...]
    memory: bool = False

    def settings(self, threads: int, repeat: int = REPEAT, budget: float = BUDGET) -> Settings:
        return Settings(repeat, budget, self.memory, threads, least=LEAST)


def _square(variant: str, n: int, d: int, dtype: str = "float32", backward: bool = False) -> Cell:
    return Cell(variant, n, n, d, dtype, heads=8, heads_k=8, backward=backward)


def _grid(*dtypes: str, backward: bool = False) -> tuple[Cell, ...]:
    return tuple(
        _square(variant, n, d, dtype, backward)
        for dtype in dtypes
        for variant in ("full", "causal")
        for n in (512, 2048, 8192)
        for d in (64, 128)
    )


def _decode(keys: int, dtype: str, heads: int = DECODE_HEADS) -> Cell:
    """One query a head; the last query sees every key, causal or not."""
    return Cell("full", 1, keys, 128, dtype, heads=heads, heads_k=8)


_KEYS = (8192, 16384, GROUPS_AT, 65536)
_DTYPES = ("float32", "bfloat16", "float16")
_DECODE = tuple(_decode(keys, dtype) for dtype in _DTYPES for keys in _KEYS)
# Groups of 4 are above: 32 query heads for 8 key heads.
_GROUPS = tuple(_decode(GROUPS_AT, dtype, heads=8 * group) for dtype in _DTYPES for group in (1, 2, 8, 16))

SECTIONS = {
    section.name: section
    for section in (
        Section("forward", "forward, float32", _grid("float32")),
        Section("half", "forward, float16 and bfloat16", _grid("float16", "bfloat16")),
        Section("training", "forward and backward, float32", _grid("float32", backward=True)),
        Section("decode", "one query for many keys, 8 key heads", (*_DECODE, *_GROUPS)),
        Section(
            "window",
            "the last 256 keys of each query",
            tuple(_square("window", n, 64) for n in (1024, 2048, 4096, 8192, LONGEST)),
        ),
        Section(
            "memory",
            "memory beyond the inputs, the output included",
            tuple(_square("causal", n, 64) for n in (2048, 4096, 8192, LONGEST)),
            memory=True,
        ),
    )
}


def takes_part(contestant: str, kernel: str) -> bool:
    return contestant in (OURS + kernel, PEER)
