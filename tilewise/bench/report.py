"""The suite as text: a line a cell, and at the end every number beside its target."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from tilewise.bench import machine, table
from tilewise.bench.problem import DTYPES, VARIANTS
from tilewise.bench.suite import PEER, SECTIONS
from tilewise.bench.targets import Check, checks
from tilewise.explanation import size

Record = dict[str, Any]
Results = dict[str, Any]
Show = Callable[[Record | None], tuple[str, ...]]
_DECODE = ("GB/s", "plain read", "of that", "of the FMA peak", "")
_DECODE_NOTE = "GB/s: k and v over the time. Plain read: GB/s of only reading the same arrays, in the same process."
MARKS = {True: "✓", False: "✗", None: "·"}


def section(name: str, results: Results) -> str:
    """Milliseconds of both, their ratio, and how near the machine's own limit ours comes."""
    peers = list(dict.fromkeys(r["contestant"] for r in results["records"] if not r["ours"]))
    ours = next((r["contestant"] for r in results["records"] if r["ours"]), "ours")
    measured, show = _MEASURED.get(name, (("speed",), _speed))
    heads = ("", f"{ours} ms", *(f"{peer} ms" for peer in peers), "ratio", *measured)
    rows = [_row(records, peers, show) for records in cells(results)]
    note = [_DECODE_NOTE] if name == "decode" else []
    return "\n".join([f"{name}: {SECTIONS[name].about}", *table.columns([heads, *rows]), *note])


def cells(results: Results) -> list[list[Record]]:
    """The records of each cell; types and variants together, sizes rising."""
    found = [list(records) for _, records in groupby(results["records"], key=table.cell)]
    return sorted(found, key=lambda records: _place(records[0]))


def _place(r: Record) -> tuple[int, ...]:
    return DTYPES.index(r["dtype"]), list(VARIANTS).index(r["variant"]), r["heads"], r["n_k"], r["d"]


def _row(records: list[Record], peers: list[str], show: Show) -> tuple[str, ...]:
    by_name = {r["contestant"]: r for r in records}
    mine = next((r for r in records if r["ours"]), None)
    times = [_time(mine), *(_time(by_name.get(peer)) for peer in peers)]
    ratio = "-" if mine is None or mine["ratio"] is None else f"{mine['ratio']:.2f}x"
    return _cell(records[0]), *times, ratio, *show(mine)


def _cell(r: Record) -> str:
    heads = f", {r['heads']} heads" if r["n_q"] == 1 else ""
    return f"{r['dtype']} {r['variant']}, {table.length(r)}, d {r['d']}{heads}"


def _time(r: Record | None) -> str:
    if r is None:
        return "-"
    return f"{r['median_ms']:.2f}" if r["status"] == "ok" else r["status"]


def _reading(r: Record | None) -> tuple[str, ...]:
    """Both limits of a decoding step: memory, or the cache, and multiplications."""
    if r is None or r["read_gbs"] is None:
        return *("-",) * (len(_DECODE) - 1), ""
    rates = ("-" if rate is None else f"{rate:.1f}" for rate in (r["read_gbs"], r["plain_read_gbs"]))
    shares = ("-" if share is None else f"{share:.0%}" for share in (r["read_fraction"], r["fraction"]))
    return *rates, *shares, "in the cache" if r["fits_cache"] else ""


def _memory(r: Record | None) -> tuple[str, ...]:
    if r is None or r["extra_bytes"] is None:
        return ("-",)
    return (f"{size(r['extra_bytes'])} of {size(r['matrix_bytes'])}",)


def _speed(r: Record | None) -> tuple[str, ...]:
    if r is None or r["gflops"] is None:
        return ("-",)
    return (f"{r['gflops']:.1f} GFLOP/s" + (f", {r['fraction']:.0%}" if r["fraction"] else ""),)


# What a section measures of ours, if it is not the speed: the heads of its columns, and what stands in them.
_MEASURED: dict[str, tuple[tuple[str, ...], Show]] = {
    "decode": (_DECODE, _reading),
    "memory": (("extra memory, of all scores",), _memory),
}


def target_lines(found: list[Check]) -> list[str]:
    """A line for every number beside its target, in columns."""
    widths = [max(len(column) for column in columns) for columns in zip(*map(_columns, found), strict=True)]
    return ["  ".join(f"{x:<{w}}" for x, w in zip(_columns(check), widths, strict=True)).rstrip() for check in found]


def summary(sections: dict[str, Results]) -> str:
    found = checks(sections)
    judged = [check.met for check in found if check.met is not None]
    return "\n".join(
        [
            f"The targets ({PEER}'s time over ours, unless a line says otherwise):",
            *target_lines(found),
            f"{sum(judged)} of {len(judged)} met. {_conditions(next(iter(sections.values())))}",
        ]
    )


def _columns(check: Check) -> tuple[str, ...]:
    return f"{MARKS[check.met]} {check.what}", f"{check.shown:>6}", check.target, check.note


def _conditions(results: Results) -> str:
    m = results["machine"]
    if m["unmeasured"]:
        limits = f"peak and read rate not measured: {m['unmeasured']}"
    else:
        limits = f"measured peak {m['peak_gflops']:.0f} GFLOP/s of float32, best read rate {m['read_gbs']:.1f} GB/s"
    return f"{machine.one_line(m)} · {limits}"
