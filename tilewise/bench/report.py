"""The suite as text: a line a cell, and at the end every number beside its target."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from tilewise.bench import machine, table
from tilewise.bench.problem import DTYPES, VARIANTS
from tilewise.bench.suite import PEER, SECTIONS
from tilewise.bench.targets import Check, checks
from tilewise.explanation import size

Record = dict[str, Any]
Results = dict[str, Any]
_MARKS = {True: "✓", False: "✗", None: "·"}


def section(name: str, results: Results) -> str:
    """Milliseconds of both, their ratio, and how near the machine's own limit ours comes."""
    peers = list(dict.fromkeys(r["contestant"] for r in results["records"] if not r["ours"]))
    ours = next((r["contestant"] for r in results["records"] if r["ours"]), "ours")
    heads = ("", f"{ours} ms", *(f"{peer} ms" for peer in peers), "ratio", "speed")
    rows = [_row(records, peers) for records in cells(results)]
    return "\n".join([f"{name}: {SECTIONS[name].about}", *table.columns([heads, *rows])])


def cells(results: Results) -> list[list[Record]]:
    """The records of each cell; types and variants together, sizes rising."""
    found = [list(records) for _, records in groupby(results["records"], key=table.cell)]
    return sorted(found, key=lambda records: _place(records[0]))


def _place(r: Record) -> tuple[int, ...]:
    return DTYPES.index(r["dtype"]), list(VARIANTS).index(r["variant"]), r["heads"], r["n_k"], r["d"]


def _row(records: list[Record], peers: list[str]) -> tuple[str, ...]:
    by_name = {r["contestant"]: r for r in records}
    mine = next((r for r in records if r["ours"]), None)
    times = [_time(mine), *(_time(by_name.get(peer)) for peer in peers)]
    ratio = "-" if mine is None or mine["ratio"] is None else f"{mine['ratio']:.2f}x"
    return _cell(records[0]), *times, ratio, "-" if mine is None else _speed(mine)


def _cell(r: Record) -> str:
    heads = f", {r['heads']} heads" if r["n_q"] == 1 else ""
    return f"{r['dtype']} {r['variant']}, {table.length(r)}, d {r['d']}{heads}"


def _time(r: Record | None) -> str:
    if r is None:
        return "-"
    return f"{r['median_ms']:.2f}" if r["status"] == "ok" else r["status"]


def _speed(r: Record) -> str:
    """What limits the cell: operations, reading, or memory where that is measured."""
    if r["extra_bytes"] is not None:
        return f"{size(r['extra_bytes'])} of {size(r['matrix_bytes'])}"
    rate, share, unit = ("read_gbs", "read_fraction", "GB/s") if r["n_q"] == 1 else ("gflops", "fraction", "GFLOP/s")
    if r[rate] is None:
        return "-"
    return f"{r[rate]:.1f} {unit}" + (f", {r[share]:.0%}" if r[share] else "")


def summary(sections: dict[str, Results]) -> str:
    found = checks(sections)
    widths = [max(len(column) for column in columns) for columns in zip(*map(_columns, found), strict=True)]
    lines = ["  ".join(f"{x:<{w}}" for x, w in zip(_columns(check), widths, strict=True)).rstrip() for check in found]
    judged = [check.met for check in found if check.met is not None]
    return "\n".join(
        [
            f"The targets ({PEER}'s time over ours, unless a line says otherwise):",
            *lines,
            f"{sum(judged)} of {len(judged)} met. {_conditions(next(iter(sections.values())))}",
        ]
    )


def _columns(check: Check) -> tuple[str, ...]:
    return f"{_MARKS[check.met]} {check.what}", f"{check.shown:>6}", check.target, check.reason


def _conditions(results: Results) -> str:
    m = results["machine"]
    if m["unmeasured"]:
        limits = f"peak and read rate not measured: {m['unmeasured']}"
    else:
        limits = f"measured peak {m['peak_gflops']:.0f} GFLOP/s of float32, read rate {m['read_gbs']:.1f} GB/s"
    return f"{machine.one_line(m)} · {limits}"
