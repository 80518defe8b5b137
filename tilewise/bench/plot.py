"""Results as pictures: speed and extra memory against n, a column a variant; one picture a type and pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilewise.bench import plot_parts as parts
from tilewise.bench.plot_parts import TEXT, Palette, Record

_ABOUT = "Lines: medians; bands: 10th to 90th percentile."


def draw(results: dict[str, Any], target: Path) -> list[Path]:
    """Write PNG files: `target`, or named by type and pass where it is a folder or there are several."""
    groups: dict[str, list[Record]] = {}
    for record in results["records"]:
        groups.setdefault(f"{record['dtype']}-{record['pass']}", []).append(record)
    written = []
    for name, records in groups.items():
        path = _path(target, name, len(groups) > 1)
        parts.save(_figure(results, records), path, results)
        written.append(path)
    return written


def _path(target: Path, name: str, several: bool) -> Path:
    if target.is_dir():
        return target / f"bench-{name}.png"
    return target.with_name(f"{target.stem}-{name}{target.suffix}") if several else target


def _figure(results: dict[str, Any], records: list[Record]) -> Any:
    variants, dims = parts.unique(records, "variant"), sorted(parts.unique(records, "d"))
    colours = parts.palette(results["records"])
    figure = parts.new_figure(max(3.1 * len(variants), 7.5) + 0.6, 5.4 * len(dims) + 1.7)
    axes = figure.subplots(2 * len(dims), len(variants), squeeze=False)
    for i, d in enumerate(dims):
        for j, variant in enumerate(variants):
            shown = [r for r in records if r["d"] == d and r["variant"] == variant]
            speed, memory = axes[2 * i][j], axes[2 * i + 1][j]
            _speed(speed, shown, colours)
            parts.memory_panel(memory, shown, colours)
            speed.set_title(f"{variant}, d = {d}", fontsize=11, fontweight="bold")
        axes[2 * i][0].set_ylabel("GFLOP/s (higher is better)")
        axes[2 * i + 1][0].set_ylabel("extra memory (lower is better)")
    for axis in axes[-1]:
        axis.set_xlabel("n (queries = keys)")
    parts.footer(figure, results, _ABOUT)
    parts.legend(figure, axes, _title(records[0]))
    return figure


def _speed(axis: Any, records: list[Record], colours: Palette) -> None:
    for name, line in parts.lines(records, "gflops").items():
        n, middle = [r["n_k"] for r in line], [r["gflops"] for r in line]
        axis.plot(n, middle, label=name, **parts.line_style(line[0], colours))
        slow, fast = ([r["gflops"] * r["median_ms"] / r[p] for r in line] for p in ("p90_ms", "p10_ms"))
        axis.fill_between(n, slow, fast, color=colours[name], alpha=0.15, linewidth=0)
    axis.set_ylim(bottom=0)
    parts.log_ticks(axis, sorted(parts.unique(records, "n_k")))
    _remarks(axis, records)


def _remarks(axis: Any, records: list[Record]) -> None:
    """Who is not in the picture, so that a missing line is not taken for an oversight."""
    told: dict[str, str] = {}
    for r in records:
        if r["status"] != "ok":
            told.setdefault(r["contestant"], f"{r['contestant']}: {r['status']}" + _from(r, records))
    if told:
        axis.text(
            0.02, 0.98, "\n".join(told.values()), transform=axis.transAxes, va="top", fontsize=7, color=TEXT,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )  # fmt: skip
        axis.set_ylim(top=axis.get_ylim()[1] * (1 + 0.1 * (1 + len(told))))  # room above the lines


def _from(record: Record, records: list[Record]) -> str:
    smaller = any(r["contestant"] == record["contestant"] and r["n_k"] < record["n_k"] for r in records)
    return f" from n = {record['n_k']}" if smaller else ""


def _title(r: Record) -> str:
    heads = f"{r['heads']} heads" + (f" ({r['heads_k']} of keys)" if r["heads"] != r["heads_k"] else "")
    what = f"{r['pass'].replace('+', ' + ')}, {r['dtype']}, batch {r['batch']}, {heads}"
    return f"Attention on the {'CPU' if r['device'] == 'cpu' else 'GPU'}: {what}"
