"""What accuracy must be, and whether the results show it. Nothing here is a measured number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from tilewise.bench.accuracy.contestants import FORMAT, UNFUSED
from tilewise.bench.targets import Check
from tilewise.contract import ROUNDING
from tilewise.saturated import GRADIENTS, OF_SATURATED, share_of_bfloat16

Record = dict[str, Any]
Results = dict[str, Any]

TO_THE_BEST = 1.10  # times the best peer's error
JUDGED = {"x1": "out d_q d_k d_v", "x4": "out d_q d_k d_v", "x12": "out d_q d_k d_v", "first": "out", "last": "out"}
NOTHING = 0.02  # of a rounding: an error below that is none, so that of two such the ratio says nothing
_MILLION = 1e6
_CELL = ("inputs", "mask", "dtype", "n", "d", "learned")


class Ratio(NamedTuple):
    """Our error over the best peer's, in one cell."""

    name: str
    what: str
    inputs: str
    ratio: float


def checks(results: Results) -> list[Check]:
    """Of each of ours: beside the best peer, and beside what the contract promises."""
    records = [r for r in results["records"] if not r["learned"]]
    ratios = to_the_best(records)
    names = dict.fromkeys(r["contestant"] for r in records if r["ours"])
    return [check for name in names for check in _of(name, records, ratios)]


def _of(name: str, records: Sequence[Record], ratios: Sequence[Ratio]) -> Iterator[Check]:
    for title, chosen in (("out", ("out",)), ("gradients", ("d_q", "d_k", "d_v"))):
        found = [x.ratio for x in ratios if x.name == name and x.what in chosen and x.what in JUDGED.get(x.inputs, "")]
        worst, note = (max(found), "") if found else (None, "no peer ran")
        yield Check(f"{name}: {title}, worst error over the best peer's", TO_THE_BEST, True, value=worst, note=note)
    mine = [r for r in records if r["contestant"] == name and r["status"] == "ok"]
    for dtype in dict.fromkeys(r["dtype"] for r in records):
        share = share_of_bfloat16(dtype)
        of_type = [r for r in mine if r["dtype"] == dtype]
        yield _promised(f"{name}: d_q at q x12, {dtype}", of_type, "d_q", ("x12",), GRADIENTS * share)
        saturated = ("x4", "x12", "x40")
        yield _promised(f"{name}: saturated rows, {dtype}", of_type, "d_q saturated", saturated, OF_SATURATED * share)


def _promised(about: str, records: Sequence[Record], what: str, inputs: Sequence[str], limit: float) -> Check:
    """In parts per million, the worst cell."""
    found = [r["errors"][what][0] for r in records if r["inputs"] in inputs and what in r["errors"]]
    known = [_MILLION * x for x in found if x is not None]
    value = max(known) if known and len(known) == len(found) else None
    note = "" if known else "it has no numbers"
    return Check(about, _MILLION * limit, at_most=True, unit="ppm", value=value, note=note)


def to_the_best(records: Sequence[Record]) -> list[Ratio]:
    """Of each of our errors that has a peer's beside it."""
    found = []
    for _, group in groupby(sorted(records, key=_cell), key=_cell):
        cell = [r for r in group if r["status"] == "ok"]
        peers = [r for r in cell if not r["ours"] and r["contestant"] not in (FORMAT, *UNFUSED)]
        for r in (r for r in cell if r["ours"] and peers):
            for what in JUDGED.get(r["inputs"], "").split():
                least = NOTHING * ROUNDING[r["dtype"]]
                best = min(_relative(peer, what) for peer in peers)
                found.append(Ratio(r["contestant"], what, r["inputs"], _relative(r, what) / max(best, least)))
    return found


def _relative(r: Record, what: str) -> float:
    error = r["errors"][what][0]
    return float("inf") if error is None else float(error)


def _cell(r: Record) -> tuple[Any, ...]:
    return tuple(r[key] for key in _CELL)


def unwell(records: Sequence[Record]) -> list[tuple[str, str, int]]:
    """Who was wrong, failed or refused, why, and in how many cells. Nobody is asked what no peer can say."""
    counts: dict[tuple[str, str], int] = {}
    for r in records:
        if r["status"] not in ("ok", "cannot express"):
            key = r["contestant"], f"{r['status']}: {r['reason']}"
            counts[key] = counts.get(key, 0) + 1
    return [(name, reason, count) for (name, reason), count in counts.items()]
