"""The GPU suite as text: a line a case, and at the end every number beside its target."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from tilewise.bench import machine, table
from tilewise.bench.gpu.cases import DTYPE
from tilewise.bench.gpu.contestants import SDPA
from tilewise.bench.gpu.suite import SECTIONS
from tilewise.bench.gpu.targets import checks, shape_of
from tilewise.bench.report import target_lines
from tilewise.explanation import size
from tilewise.kernels.cute import projected

Record = dict[str, Any]
Results = dict[str, Any]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def section(name: str, results: Results) -> str:
    head, rows = table_of(name, results)
    return "\n".join([f"{name}: {SECTIONS[name].about}", *table.columns([head, *rows]), *notes(name, results)])


def table_of(name: str, results: Results) -> Table:
    """The head and the rows of a section's table, for the terminal and for the pages."""
    made: Callable[[list[Record]], Table] = {
        "ladder": _ladder,
        "units": _units,
        "decode": _decode,
        "scaling": _scaling,
        "projection": _projection,
        "launch": _launch,
        "first": _first,
    }.get(name, _speeds)
    return made(results["records"])


def notes(name: str, results: Results) -> list[str]:
    """What the table does not say: its unit, how far rounds differ, and who has no number."""
    records = results["records"]
    spreads = [r["spread"] for r in records if r["spread"] is not None]
    lines = [f"{_UNITS.get(name, _UNITS['forward'])} Rounds differ by up to {max(spreads, default=0.0):.0%}."]
    lines += [f"{who} is not here: {reason}" for who, reason in results["missing"].items()]
    told: dict[str, int] = {}
    for r in records:
        if r["status"] not in ("ok", "cannot express"):
            what = f"{r['contestant']}: {r['status']}: {r['reason']}"
            told[what] = told.get(what, 0) + 1
    return [*lines, *(f"{what} ({count} {'case' if count == 1 else 'cases'})" for what, count in told.items())]


_UNITS = {
    "forward": "TFLOP/s; the ratio is our speed over the best peer's.",
    "ladder": "Limits: products, exponentials, or q, k, v and out once, at the rates that were measured.",
    "units": "Cycles in which a unit is busy, of all: by Nsight Compute, at the clock that it holds.",
    "decode": "GB/s of k and v; the share is ours of the measured read rate, and the ratio to the best peer.",
    "scaling": "Milliseconds; the error is the norm of what is off over that of the output, in float64.",
    "projection": "Microseconds; the ratio is our speed over the best peer's; steps are those of the rule for `auto`.",
    "launch": "Microseconds until a call returns.",
    "first": "Milliseconds from the call until the GPU is done.",
}


# -- tables -----------------------------------------------------------------------------------------------------------


def cases(records: list[Record]) -> list[list[Record]]:
    return [list(found) for _, found in groupby(records, key=title)]


def title(r: Record) -> str:
    """The case of a record in a few words."""
    heads = "" if r["heads"] == r["heads_k"] else f", {r['heads']} heads on {r['heads_k']}"
    packed = f", packed {r['packed']}" if r["packed"] else ""
    inputs = "" if r["inputs"] == "normal" else f", {r['inputs']}"
    dtype = "" if r["dtype"] == DTYPE else f", {r['dtype']}"
    return f"{r['variant']}, d {r['d']}, n {r['n']}{heads}{packed}{inputs}{dtype}"


def _speeds(records: list[Record]) -> Table:
    names = list(dict.fromkeys(r["contestant"] for r in records))
    rows = []
    for case in cases(records):
        by_name = {r["contestant"]: r for r in case}
        ratio = next((r["ratio"] for r in case if r["ours"]), None)
        speeds = [_speed(by_name.get(name)) for name in names]
        rows.append((title(case[0]), *speeds, "-" if ratio is None else f"{ratio:.2f}x"))
    return ("", *names, "ratio"), rows


def _speed(r: Record | None) -> str:
    if r is None or r["status"] == "cannot express":
        return "-"
    return f"{r['tflops']:.0f}" if r["status"] == "ok" else str(r["status"])


def _ladder(records: list[Record]) -> Table:
    head = ("", "ms", "TFLOP/s", "of matmul", "limit, ms", "plan's bytes", "L2", "DRAM")
    return head, [_rung(r) for r in records]


def _rung(r: Record) -> tuple[str, ...]:
    name = f"{r['contestant']}, {title(r)}"
    if r["status"] != "ok":
        return name, r["status"], *("-",) * 6
    share = "-" if r["fraction"] is None else f"{r['fraction']:.1%}"
    counted = (_size(r[field]) for field in ("plan_bytes", "l2_bytes", "dram_bytes"))
    return name, f"{r['median_ms']:.3f}", f"{r['tflops']:.1f}", share, _limit(r), *counted


def _units(records: list[Record]) -> Table:
    head = ("", "TFLOP/s", "tensor cores", "exponentials", "instructions issued")
    return head, [_busy(r) for r in records]


def _busy(r: Record) -> tuple[str, ...]:
    name = f"{r['contestant']}, {title(r)}"
    if r["status"] != "ok":
        return name, r["status"], *("-",) * 3
    shares = (r[field] for field in ("tensor_busy", "exp_busy", "issue_busy"))
    return name, f"{r['tflops']:.0f}", *("-" if share is None else f"{share:.0f}%" for share in shares)


def _limit(r: Record) -> str:
    """The limit that binds, of those that could be measured."""
    known = {name: ms for name, ms in (r["limits_ms"] or {}).items() if ms is not None}
    if not known:
        return "-"
    name = max(known, key=lambda name: known[name])
    return f"{known[name]:.3f} ({name})"


def _size(count: float | None) -> str:
    return "-" if count is None else size(count)


def _decode(records: list[Record]) -> Table:
    names = list(dict.fromkeys(r["contestant"] for r in records))
    rows = []
    for case in cases(records):
        by_name = {r["contestant"]: r for r in case}
        ours = next(r for r in case if r["ours"])
        share = "-" if ours["read_fraction"] is None else f"{ours['read_fraction']:.0%}"
        ratio = "-" if ours["ratio"] is None else f"{ours['ratio']:.2f}x"
        rates = [f"{r['gbs']:.0f}" if r["status"] == "ok" else r["status"] for r in map(by_name.get, names) if r]
        rows.append((f"batch {case[0]['batch']}, {case[0]['n']} keys", *rates, share, ratio))
    return ("", *names, "of the read rate", "ratio"), rows


def _scaling(records: list[Record]) -> Table:
    names = list(dict.fromkeys(r["contestant"] for r in records))
    rows = []
    for case in cases(records):
        by_name = {r["contestant"]: r for r in case}
        told = [_time_and_error(by_name.get(name)) for name in names]
        rows.append((title(case[0]), *(text for both in told for text in both)))
    return ("", *(f"{name}, {what}" for name in names for what in ("ms", "error"))), rows


def _time_and_error(r: Record | None) -> tuple[str, str]:
    if r is None or r["status"] != "ok":
        return "-" if r is None else r["status"], "-"
    return f"{r['median_ms']:.3f}", f"{r['error']:.1e}"


def _projection(records: list[Record]) -> Table:
    names = list(dict.fromkeys(r["contestant"] for r in records))
    rows = []
    for about, found in groupby(records, key=_model):
        by_name = {r["contestant"]: r for r in found}
        ours = next(r for r in by_name.values() if r["ours"])
        times = [f"{1e3 * r['median_ms']:.1f}" if r["status"] == "ok" else r["status"] for r in by_name.values()]
        ratio = "-" if ours["ratio"] is None else f"{ours['ratio']:.2f}x"
        shape = shape_of(ours)
        taken = "yes" if projected.pays(shape, ours["model"]) else "no"
        rows.append((about, *times, ratio, str(projected.steps(shape, ours["model"])), taken))
    return ("", *names, "ratio", "steps", "taken by `auto`"), rows


def _model(r: Record) -> str:
    return f"{r['heads']} heads, d {r['d']}, batch {r['batch']}, {r['queries']} queries, {r['n']} keys"


def _launch(records: list[Record]) -> Table:
    default = next((r["median_ms"] for r in records if r["contestant"] == SDPA and r["status"] == "ok"), None)
    rows: list[tuple[str, ...]] = []
    for r in records:
        right = r["status"] == "ok"
        over = f"{r['median_ms'] / default:.2f}x" if right and default else "-"
        rows.append((r["contestant"], f"{1e3 * r['median_ms']:.1f}" if right else r["status"], over))
    return ("", "us", f"over {SDPA}"), rows


def _first(records: list[Record]) -> Table:
    rows: list[tuple[str, ...]] = []
    for r in records:
        name = f"{r['contestant']}, {title(r)}{', forward and backward' if r['backward'] else ''}"
        told = (f"{r['median_ms']:.0f}", f"{r['warm_ms']:.0f}", str(r["compiled"])) if r["status"] == "ok" else None
        rows.append((name, *(told or (r["status"], "-", "-"))))
    return ("", "empty cache", "later processes", "kernels compiled"), rows


# -- targets ----------------------------------------------------------------------------------------------------------


def summary(sections: dict[str, Results]) -> str:
    found = checks(sections)
    conditions_of = conditions(next(iter(sections.values())))
    if not found:
        return f"No targets in these sections. {conditions_of}"
    judged = [check.met for check in found if check.met is not None]
    heading = "The targets (our speed over the peer's, unless a line says otherwise):"
    return "\n".join([heading, *target_lines(found), f"{sum(judged)} of {len(judged)} met. {conditions_of}"])


def conditions(results: Results) -> str:
    m = results["machine"]
    parts = [machine.one_line(m), *machine.gpu_lines(m)]
    limits = f"measured: bfloat16 matmul {m['matmul_tflops']:.0f} TFLOP/s, copy {m['copy_gbs']:.0f} GB/s"
    exps = "" if m["exp_gops"] is None else f", {m['exp_gops']:.0f} G exp/s"
    quick = ["a quick run"] if results["options"]["quick"] else []
    return " · ".join([*parts, limits + exps, *quick])
