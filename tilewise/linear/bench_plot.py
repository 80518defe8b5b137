"""Linear attention as a picture: time against n beside softmax attention, or memory's rate on a GPU beside the peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilewise.bench import plot_parts as parts
from tilewise.bench.plot_parts import GREY, Record
from tilewise.linear import bench_gpu

Results = dict[str, Any]
_DASHED: dict[str, Any] = {"color": GREY, "linestyle": (0, (2, 2)), "linewidth": 1.5}


def draw(found: Results, path: Path) -> None:
    figure = _on_gpu(found) if found["schema"] == bench_gpu.SCHEMA else _on_cpu(found)
    parts.save(figure, path, found)


def _on_cpu(found: Results) -> Any:
    figure = parts.new_figure(8.5, 4.8)
    axes = figure.subplots(1, 1, squeeze=False)
    axis, rows = axes[0, 0], found["records"]
    n = [row["n"] for row in rows]
    for name, ours in (("softmax", False), ("linear", True)):
        style = parts.line_style({"contestant": name, "ours": ours}, {"softmax": "#1d4ed8", "linear": "#c2410c"})
        axis.plot(n, [1e3 * row[name] for row in rows], label=name, **style)
    if found["crossover"] is not None:
        axis.axvline(found["crossover"], label=f"equal, measured: {found['crossover']:.0f}", **_DASHED)
    axis.axvline(found["expected"], label=f"equal, counted: {found['expected']}", **{**_DASHED, "linestyle": ":"})
    axis.set_yscale("log")
    axis.set_xlabel("n (queries = keys)")
    axis.set_ylabel("milliseconds of a call (lower is better)")
    parts.log_ticks(axis, n)
    parts.footer(figure, found, f"float32, {found['heads']} heads, d {found['d']}; medians of turns.")
    parts.legend(figure, axes, "Causal linear and softmax attention on the CPU")
    return figure


def _on_gpu(found: Results) -> Any:
    figure = parts.new_figure(9.0, 7.0)
    axes = figure.subplots(2, 1, squeeze=False)
    for axis, what in zip(axes[:, 0], bench_gpu.TARGETS, strict=True):
        _rates(axis, found["records"], what)
        axis.axhline(found["copy"], label="a plain copy", **_DASHED)
        axis.set_title(what, fontsize=11, fontweight="bold")
        axis.set_ylabel("GB/s (higher is better)")
    parts.footer(figure, found, f"What must be moved at least; numbers: to {bench_gpu.PEER} {found['peer']}.")
    parts.legend(figure, axes, f"Linear attention on {found['gpu']}: bfloat16, causal")
    return figure


def _rates(axis: Any, records: list[Record], what: str) -> None:
    names, groups = parts.unique(records, "contestant"), list(dict.fromkeys(map(_group, records)))
    colours, width = parts.palette(records), 0.8 / len(names)
    for r in (r for r in records if r["status"] == "ok" and r[f"{what}_rate"] is not None):
        at = groups.index(_group(r)) + (names.index(r["contestant"]) - (len(names) - 1) / 2) * width
        rate, ratio = r[f"{what}_rate"], r[f"{what}_ratio"]
        axis.bar(at, rate, width, color=colours[r["contestant"]], label=r["contestant"])
        if ratio is not None:
            axis.annotate(f"{ratio:.1f}x", (at, rate), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    parts.plain(axis)
    axis.grid(False, axis="x")


def _group(r: Record) -> str:
    return f"batch {r['batch']}, n {r['n']}\n{r['heads']} heads, d {r['d']}"
