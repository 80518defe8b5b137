"""What a run may claim: speeds as ranges, by the spread of the repetitions, and none from a busy machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import geometric_mean
from typing import Any, NamedTuple

Record = dict[str, Any]
WIDE = 1.5  # a range whose ends are further apart supports no number
_BUSY = 0.5  # of the cores that others kept busy before the run began


class Range(NamedTuple):
    """A ratio of two medians, and of their 10th and 90th percentiles, the worst and the best for ours."""

    low: float
    ratio: float
    high: float

    @property
    def is_wide(self) -> bool:
        return self.high > WIDE * self.low

    def __str__(self) -> str:
        return f"{self.low:.2f}x to {self.high:.2f}x"


def busy(load: float | None, cores: int) -> str | None:
    """Why nothing is claimed, in words; None: the machine was quiet, or does not say. load: before the run."""
    if load is None or load < _BUSY * cores:
        return None
    return (
        f"The machine was busy: a load of {load:.1f} on {cores} cores before the run, which slows some down more "
        "than others. Compare nothing; run it again when the machine is quiet."
    )


def ranges(records: Sequence[Record]) -> dict[str, Range]:
    """Of each contestant of a cell that was measured: its speed over that of the best right peer."""
    peers = [r for r in records if not r["ours"] and r["status"] == "ok" and r["median_ms"]]
    if not peers:
        return {}
    best = min(peers, key=lambda r: r["median_ms"])
    return {
        r["contestant"]: Range(
            best["p10_ms"] / r["p90_ms"], best["median_ms"] / r["median_ms"], best["p90_ms"] / r["p10_ms"]
        )
        for r in records
        if r["median_ms"] and r is not best
    }


def lines(cells: Iterable[Sequence[Record]], why_none: str | None = None) -> list[str]:
    """One for each of our contestants, right answers only: the geometric mean over the cells, as far as the spread
    supports it. why_none: what forbids any claim."""
    if why_none is not None:
        return [why_none]
    found: dict[str, list[Range]] = {}
    for records in cells:
        right = {r["contestant"] for r in records if r["ours"] and r["status"] == "ok"}
        for name, of_cell in ranges(records).items():
            if name in right:
                found.setdefault(name, []).append(of_cell)
    return [_line(name, x) for name, x in found.items()]


def _line(name: str, found: list[Range]) -> str:
    mean = Range(*(geometric_mean(ends) for ends in zip(*found, strict=True)))
    of = f"geometric mean of {len(found)} cells"
    if mean.is_wide:
        return f"{name}: {mean} the speed of the best peer: repetitions differ too much for one number ({of})"
    if mean.low <= 1 <= mean.high:
        return f"{name}: as fast as the best peer, within the spread of {mean} ({of})"
    return f"{name}: {mean.ratio:.2f}x the speed of the best peer, {mean} by the spread ({of})"


def of_results(results: Mapping[str, Any]) -> str | None:
    """Why these results support no claim, or None."""
    return busy(results.get("load"), int(results["machine"].get("cores") or 1))


def by_cell(records: Iterable[Record], names: Sequence[str]) -> list[list[Record]]:
    """The records of each cell, which are neighbours."""
    return [list(group) for _, group in groupby(records, key=lambda r: tuple(r[name] for name in names))]
