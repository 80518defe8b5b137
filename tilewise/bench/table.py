"""Results as text: a table a cell, and a summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from tilewise.bench import headline, machine
from tilewise.explanation import size

Record = dict[str, Any]
CELL = ("variant", "n_q", "n_k", "d", "dtype", "batch", "heads", "heads_k", "pass", "device")
HEADS = ("contestant", "median ms", "p10 - p90", "GFLOP/s", "vs best peer", "extra memory", "max error")
NOTES = (
    "GFLOP/s: 4 d operations for each visible (query, key) pair, the same for everyone (3.5 times that with backward).",
    "vs best peer: 2.00x is twice as fast; in brackets the spread, from p10 and p90 of both.",
    "Extra memory: peak beyond the inputs, the output and dense masks included.",
)
PEAK_NOTE = "GFLOP/s in brackets: as a part of the machine's measured peak in float32."


def text(results: dict[str, Any]) -> str:
    lines = [f"tilewise {results['tilewise']}, {results['date']}", machine.one_line(results["machine"])]
    lines += [f"not here: {name}: {reason}" for name, reason in results["missing"].items()]
    for _, records in groupby(sorted(results["records"], key=_place(results)), key=cell):
        lines += ["", *_table(list(records))]
    notes = [*NOTES, *([PEAK_NOTE] if any(r["fraction"] for r in results["records"]) else [])]
    return "\n".join([*lines, "", *summary(results), *notes])


def cell(record: Record) -> tuple[Any, ...]:
    """What a record was measured on."""
    return tuple(record[name] for name in CELL)


def _place(results: dict[str, Any]) -> Callable[[Record], tuple[Any, ...]]:
    """Cells of a variant together, sizes rising; variants in the order they first came."""
    order = {variant: i for i, variant in reversed(list(enumerate(r["variant"] for r in results["records"])))}
    return lambda r: (r["dtype"], r["pass"], r["d"], order[r["variant"]], r["n_k"])


def _table(records: list[Record]) -> list[str]:
    ranges = headline.ranges(records)
    return [title(records[0]), *columns([HEADS, *(_row(r, ranges.get(r["contestant"])) for r in records)])]


def title(r: Record) -> str:
    """The cell of a record in one line."""
    heads = f"{r['heads']}" if r["heads"] == r["heads_k"] else f"{r['heads']} (keys: {r['heads_k']})"
    what = f"{r['variant']}, {length(r)}, d {r['d']}"
    return f"{what}: {r['dtype']}, batch {r['batch']}, heads {heads}, {r['pass']}, {r['device']}"


def length(r: Record) -> str:
    if r["n_q"] == r["n_k"]:
        return f"n {r['n_k']}"
    return f"{r['n_q']} {'query' if r['n_q'] == 1 else 'queries'}, {r['n_k']} keys"


def _row(r: Record, against: headline.Range | None) -> Sequence[str]:
    if r["median_ms"] is None:
        return r["contestant"], f"{r['status']}: {r['reason']}"
    error = "not finite" if r["error"] is None else f"{r['error']:.1e}"
    return (
        r["contestant"], f"{r['median_ms']:.3f}", f"{r['p10_ms']:.3f} - {r['p90_ms']:.3f}",
        _speed(r), _against(r, against),
        "-" if r["extra_bytes"] is None else size(r["extra_bytes"]),
        f"{error}  WRONG: {r['reason']}" if r["status"] == "wrong" else error,
    )  # fmt: skip


def _against(r: Record, found: headline.Range | None) -> str:
    if found is None:
        return "-" if r["ratio"] is None else f"{r['ratio']:.2f}x"
    return f"{found}" if found.is_wide else f"{found.ratio:.2f}x ({found.low:.2f} - {found.high:.2f})"


def _speed(r: Record) -> str:
    if r["gflops"] is None:
        return "-"
    return f"{r['gflops']:.1f}" + (f" ({r['fraction']:.0%})" if r["fraction"] else "")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, numbers to the right; a row of two cells is a name and a remark."""
    full = [row for row in rows if len(row) == len(rows[0])]
    name = max(len(row[0]) for row in rows)
    widths = [max(len(row[i].split("  ")[0]) for row in full) for i in range(1, len(rows[0]))]
    return [f"  {row[0]:<{name}}  {_cells(row[1:], widths)}".rstrip() for row in rows]


def _cells(cells: Sequence[str], widths: Sequence[int]) -> str:
    if len(cells) == 1:
        return cells[0]
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def summary(results: dict[str, Any]) -> list[str]:
    """What each of our contestants may claim, and who was unwell."""
    unwell: dict[str, int] = {}
    for r in results["records"]:
        if r["status"] in ("wrong", "failed"):
            unwell[r["contestant"]] = unwell.get(r["contestant"], 0) + 1
    claims = headline.lines(headline.by_cell(results["records"], CELL), headline.of_results(results))
    return [*claims, *(f"{name}: wrong or failed in {count} cells" for name, count in unwell.items())]
