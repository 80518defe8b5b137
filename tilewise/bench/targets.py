"""What the CPU engine must reach, and whether the results of the suite show it. Nothing here is a measured number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tilewise.bench.problem import WINDOW
from tilewise.bench.suite import LONGEST
from tilewise.bench.table import geometric_mean

Record = dict[str, Any]
Results = dict[str, Any]

RATIOS = {  # to the peer: the geometric mean, and no cell below
    "full": (1.2, 1.05),
    "causal": (1.5, 1.12),
    "half": (1.6, None),
    "training": (1.35, 1.15),
}
READ_FRACTION = 0.75  # of a plain read of the same k and v
SMALL_GROUP = 4  # query heads for each key head: with more, multiplications may be the limit
BEYOND_CACHE = 2  # caches, of which k and v must fill more: else part of them is not read from memory
FLATNESS = 1.25  # the largest time for each query and key of a window, over the smallest
MEMORY_FRACTION = 0.02  # of the full matrix, at the longest n


@dataclass(frozen=True)
class Check:
    """A number beside its target."""

    what: str
    limit: float | None  # None: told, not judged
    at_most: bool = False
    percent: bool = False
    unit: str = "x"  # times, if nothing else
    value: float | None = None  # None: the results do not say
    note: str = ""  # why there is no value, or what to know beside it

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        if self.value is None:
            return False
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    @property
    def shown(self) -> str:
        return "-" if self.value is None else self._number(self.value)

    @property
    def target(self) -> str:
        if self.limit is None:
            return ""
        return f"{'at most' if self.at_most else 'at least'} {self._number(self.limit)}"

    def _number(self, value: float) -> str:
        if not self.percent:
            return f"{value:.2f}x" if self.unit == "x" else f"{value:.0f} {self.unit}"
        return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"


def checks(sections: dict[str, Results]) -> list[Check]:
    """Every check of the sections that there are results of."""
    return [
        check
        for name, of in _CHECKS.items()
        if name in sections
        for check in of([r for r in sections[name]["records"] if r["ours"]])
    ]


def _forward(records: list[Record]) -> Iterator[Check]:
    for variant in ("full", "causal"):
        cells = [r for r in records if r["variant"] == variant]
        yield from _ratios(f"forward, {variant}", cells, *RATIOS[variant])


def _half(records: list[Record]) -> Iterator[Check]:
    yield from _ratios("half precision", records, *RATIOS["half"])


def _training(records: list[Record]) -> Iterator[Check]:
    yield from _ratios("training", records, *RATIOS["training"])


def _decode(records: list[Record]) -> Iterator[Check]:
    """Judged where k and v come from memory; from the cache, the share is only told."""
    judged = [r for r in records if r["times_cache"] is None or r["times_cache"] > BEYOND_CACHE]
    small = [r for r in judged if _group(r) <= SMALL_GROUP]
    yield _read_share(f"groups up to {SMALL_GROUP}", small, READ_FRACTION)
    for group in sorted({_group(r) for r in judged} - {_group(r) for r in small}):
        yield _read_share(f"groups of {group}", [r for r in judged if _group(r) == group], READ_FRACTION)
    cached = [r for r in records if r not in judged]
    if cached:
        yield _read_share(f"k and v within {BEYOND_CACHE} caches", cached)
    yield from _ratios("decode", records)


def _group(r: Record) -> int:
    return int(r["heads"] // r["heads_k"])


def _read_share(what: str, records: list[Record], limit: float | None = None) -> Check:
    """The least cell's share of the plain read rate; beside it its share of the other limit, and how many reach 75%."""
    check = Check(f"decode, {what}: share of the plain read rate, least cell", limit, percent=True)
    check = valued(check, records, lambda r: r["read_fraction"], min, "the read rate was not measured")
    if check.value is None:
        return check
    reached = sum(r["read_fraction"] >= READ_FRACTION for r in records)
    least = min(records, key=lambda r: r["read_fraction"])
    return replace(check, note=f"{reached} of {len(records)} cells reach {READ_FRACTION:.0%}{_at_the_peak(least)}")


def _at_the_peak(r: Record) -> str:
    """The other limit: the share that multiplications alone would leave."""
    if r["fraction"] is None:
        return ""
    share = r["read_fraction"] / r["fraction"]
    return f"; the least has {r['fraction']:.0%} of the FMA peak, at which it would be {share:.0%}"


def _window(records: list[Record]) -> Iterator[Check]:
    check = Check("window: time for each query and key, most over least", FLATNESS, at_most=True)
    yield valued(check, records, lambda r: r["median_ms"] / (r["n_q"] * WINDOW), lambda each: max(each) / min(each))
    yield from _ratios("window", records)


def _memory(records: list[Record]) -> Iterator[Check]:
    check = Check(f"memory: of the full matrix at n {LONGEST}", MEMORY_FRACTION, at_most=True, percent=True)
    longest = [r for r in records if r["n_k"] == LONGEST]
    yield valued(check, longest, _matrix_fraction, max)


def _matrix_fraction(r: Record) -> float | None:
    return None if r["extra_bytes"] is None else r["extra_bytes"] / r["matrix_bytes"]


def _ratios(what: str, records: list[Record], mean: float | None = None, least: float | None = None) -> Iterator[Check]:
    """Our speed over the peer's."""
    yield valued(Check(f"{what}: geometric mean", mean), records, lambda r: r["ratio"], geometric_mean)
    yield valued(Check(f"{what}: slowest cell", least), records, lambda r: r["ratio"], min)


def valued(
    check: Check,
    records: list[Record],
    number: Callable[[Record], float | None],
    of: Callable[[list[float]], float],
    otherwise: str = "no peer ran",
) -> Check:
    """One wrong or missing cell, and there is no value: a mean without it would prove nothing."""
    numbers = [number(r) if r["status"] == "ok" else None for r in records]
    found = [x for x in numbers if x is not None]
    if records and len(found) == len(records):
        return replace(check, value=of(found))
    lacking = next((r for r, x in zip(records, numbers, strict=True) if x is None), None)
    missing = f"{len(records) - len(found)} of {len(records)} cells have no number: "
    return replace(check, note="no cells" if lacking is None else missing + _why(lacking, otherwise))


def _why(r: Record, otherwise: str) -> str:
    return f"{r['status']}: {r['reason']}" if r["status"] != "ok" else r.get("memory_reason") or otherwise


_CHECKS: dict[str, Callable[[list[Record]], Iterator[Check]]] = {
    "forward": _forward, "half": _half, "training": _training, "decode": _decode, "window": _window, "memory": _memory,
}  # fmt: skip
