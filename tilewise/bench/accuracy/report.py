"""The measurement as tables and text: relative errors by contestant and inputs, and the targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from tilewise.bench import machine
from tilewise.bench.accuracy.cells import INPUTS, ONE_HOT, SCALES
from tilewise.bench.accuracy.contestants import UNFUSED
from tilewise.bench.accuracy.targets import checks, to_the_best, unwell
from tilewise.bench.report import target_lines
from tilewise.bench.table import columns

Record = dict[str, Any]
Results = dict[str, Any]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

# Exact gradients of q and k in one-hot rows are nearly 0: no error is a part of them.
TOLD = {"out": INPUTS, "d_q": tuple(SCALES), "d_k": tuple(SCALES), "d_v": INPUTS, "d_q saturated": ("x4", "x12", "x40")}
HEADS = {**{x: f"q {x}" for x in SCALES}, **{x: f"one-hot {x}" for x in ONE_HOT}}
TITLES = {"d_q saturated": "d_q of saturated rows"}


def text(results: Results) -> str:
    lines = [f"tilewise {results['tilewise']}, {results['date']}", conditions(results)]
    lines += [f"not here: {name}: {reason}" for name, reason in results["missing"].items()]
    for dtype in dtypes(results):
        for what in TOLD:
            head, rows = table_of(results, what, dtype)
            lines += ["", f"{TITLES.get(what, what)}, {dtype}: {MEANING}", *columns([head, *rows])]
    head, rows = learned_table(results)
    if rows:
        lines += ["", f"gradients of slopes and sinks: {MEANING}", *columns([head, *rows])]
    head, rows = ratio_table(results)
    if rows:
        lines += ["", "errors over the best peer's of each cell, the median (the worst)", *columns([head, *rows])]
    return "\n".join([*lines, "", *_targets(results), *remarks(results)])


MEANING = "relative error, the median of the cells (the worst)"


def dtypes(results: Results) -> list[str]:
    return list(dict.fromkeys(r["dtype"] for r in results["records"]))


def table_of(results: Results, what: str, dtype: str) -> Table:
    """A row a contestant, a column for each kind of inputs: the median of the cells, and the worst."""
    plain = [r for r in results["records"] if r["dtype"] == dtype and not r["learned"] and r["status"] == "ok"]
    rows = []
    for name in dict.fromkeys(r["contestant"] for r in plain):
        mine = [r for r in plain if r["contestant"] == name]
        told = [_spread(_errors((r for r in mine if r["inputs"] == x), what)) for x in TOLD[what]]
        rows.append((name, *told))
    return ("", *(HEADS[x] for x in TOLD[what])), rows


def learned_table(results: Results) -> Table:
    """Of ours: no peer is asked for these."""
    asked = [r for r in results["records"] if r["learned"] and r["status"] == "ok"]
    kinds = list(dict.fromkeys((f"d_{r['learned']}", r["inputs"]) for r in asked))
    rows = []
    for name in dict.fromkeys(r["contestant"] for r in asked):
        mine = [r for r in asked if r["contestant"] == name]
        rows.append((name, *(_spread(_errors((r for r in mine if r["inputs"] == x), what)) for what, x in kinds)))
    return ("", *(f"{what}, q {x}" for what, x in kinds)), rows


def ratio_table(results: Results) -> Table:
    """Our errors over those of the best peer, of each result over all scales."""
    names = ("out", "d_q", "d_k", "d_v")
    found = to_the_best(results["records"])
    ours = list(dict.fromkeys(name for name, *_ in found))
    rows = []
    for name in ours:
        ratios = [[x.ratio for x in found if x.name == name and x.what == what] for what in names]
        rows.append((name, *(f"{median(x):.2f}x ({max(x):.2f}x)" if x else "-" for x in ratios)))
    return ("", *names), rows


def _errors(records: Iterable[Record], what: str) -> list[float]:
    found = [r["errors"][what][0] for r in records if what in r["errors"]]
    return [x for x in found if x is not None]


def _spread(found: Sequence[float]) -> str:
    if not found:
        return "-"
    middle, worst = _number(median(found)), _number(max(found))
    return middle if middle == worst else f"{middle} ({worst})"


def _number(x: float) -> str:
    return f"{x:.1e}".replace("e-0", "e-")


def _targets(results: Results) -> list[str]:
    found = checks(results)
    judged = [check.met for check in found if check.met is not None]
    return [*target_lines(found), f"{sum(judged)} of {len(judged)} met."] if found else ["No targets: nothing of ours."]


def remarks(results: Results) -> list[str]:
    """Who failed, and how to read the tables."""
    lines = [f"{name}: {reason} ({count} cells)" for name, reason, count in unwell(results["records"])]
    return [*lines, f"{', '.join(UNFUSED)} keeps n x n weights in float32, so no kernel is compared with it."]


def conditions(results: Results) -> str:
    m = results["machine"]
    quick = ["a quick run"] if results["options"]["quick"] else []
    return " · ".join([machine.one_line(m), *machine.gpu_lines(m), *quick])
