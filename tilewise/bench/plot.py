"""Results as pictures: speed and extra memory against n, a column a variant; one picture a type and pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilewise.bench import machine
from tilewise.explanation import size

Record = dict[str, Any]

_OURS = ("#c2410c", "#7c3aed", "#0f766e", "#be185d", "#a16207", "#15803d")
_PEERS = {"torch sdpa": "#1d4ed8", "torch naive": "#60a5fa", "numpy naive": "#64748b"}
_MATRIX = "#94a3b8"
_DPI = 75


def draw(results: dict[str, Any], target: Path) -> list[Path]:
    """Write PNG files: `target`, or named by type and pass where it is a folder or there are several."""
    import matplotlib

    matplotlib.use("Agg")
    groups: dict[str, list[Record]] = {}
    for record in results["records"]:
        groups.setdefault(f"{record['dtype']}-{record['pass']}", []).append(record)
    written = []
    for name, records in groups.items():
        path = _path(target, name, len(groups) > 1)
        _figure(results, records).savefig(path, dpi=_DPI)
        written.append(path)
    return written


def _path(target: Path, name: str, several: bool) -> Path:
    if target.is_dir():
        return target / f"bench-{name}.png"
    return target.with_name(f"{target.stem}-{name}{target.suffix}") if several else target


def _figure(results: dict[str, Any], records: list[Record]) -> Any:
    from matplotlib.figure import Figure

    variants, dims = _unique(records, "variant"), sorted(_unique(records, "d"))
    colours = _colours(results["records"])
    figure = Figure(figsize=(max(3.1 * len(variants), 7.5) + 0.6, 5.4 * len(dims) + 1.7), layout="constrained")
    axes = figure.subplots(2 * len(dims), len(variants), squeeze=False)
    for i, d in enumerate(dims):
        for j, variant in enumerate(variants):
            shown = [r for r in records if r["d"] == d and r["variant"] == variant]
            speed, memory = axes[2 * i][j], axes[2 * i + 1][j]
            _speed(speed, shown, colours)
            _memory(memory, shown, colours)
            speed.set_title(f"{variant}, d = {d}", fontsize=11, fontweight="bold")
        axes[2 * i][0].set_ylabel("GFLOP/s (higher is better)")
        axes[2 * i + 1][0].set_ylabel("extra memory (lower is better)")
    for axis in axes[-1]:
        axis.set_xlabel("n (queries = keys)")
    _footer(figure, results)
    _legend(figure, axes, _title(records[0]))
    return figure


def _speed(axis: Any, records: list[Record], colours: dict[str, str]) -> None:
    for name, line in _lines(records, "gflops").items():
        n, middle = [r["n"] for r in line], [r["gflops"] for r in line]
        axis.plot(n, middle, label=name, **_style(line[0], colours))
        slow, fast = ([r["gflops"] * r["median_ms"] / r[p] for r in line] for p in ("p90_ms", "p10_ms"))
        axis.fill_between(n, slow, fast, color=colours[name], alpha=0.15, linewidth=0)
    axis.set_ylim(bottom=0)
    _ticks(axis, records)
    _remarks(axis, records)


def _memory(axis: Any, records: list[Record], colours: dict[str, str]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    sizes = sorted({r["n"]: r["matrix_bytes"] for r in records}.items())
    axis.plot(*zip(*sizes, strict=True), color=_MATRIX, linestyle=(0, (2, 2)), linewidth=1.5, label="full n × n matrix")
    for name, line in _lines(records, "extra_bytes").items():
        # Nothing measurable is drawn at one page: a logarithmic axis has no 0.
        axis.plot(
            [r["n"] for r in line], [max(r["extra_bytes"], 4096) for r in line], label=name, **_style(line[0], colours)
        )
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: size(y)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    _ticks(axis, records)


def _style(record: Record, colours: dict[str, str]) -> dict[str, Any]:
    ours = record["ours"]
    return {
        "color": colours[record["contestant"]], "marker": "o" if ours else "s", "markersize": 5 if ours else 4,
        "linewidth": 2.4 if ours else 1.6, "zorder": 3 if ours else 2,
    }  # fmt: skip


def _ticks(axis: Any, records: list[Record]) -> None:
    from matplotlib.ticker import NullLocator

    n = sorted(_unique(records, "n"))
    axis.set_xscale("log", base=2)
    axis.set_xticks(n, [str(x) for x in n], fontsize=8, rotation=30 if len(n) > 5 else 0)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(axis="y", labelsize=8)
    axis.grid(True, color="#e2e8f0", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _remarks(axis: Any, records: list[Record]) -> None:
    """Who is not in the picture, so that a missing line is not taken for an oversight."""
    told: dict[str, str] = {}
    for r in records:
        if r["status"] != "ok":
            told.setdefault(r["contestant"], f"{r['contestant']}: {r['status']}" + _from(r, records))
    if told:
        axis.text(
            0.02, 0.98, "\n".join(told.values()), transform=axis.transAxes, va="top", fontsize=7, color="#475569",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )  # fmt: skip
        axis.set_ylim(top=axis.get_ylim()[1] * (1 + 0.1 * (1 + len(told))))  # room above the lines


def _from(record: Record, records: list[Record]) -> str:
    smaller = any(r["contestant"] == record["contestant"] and r["n"] < record["n"] for r in records)
    return f" from n = {record['n']}" if smaller else ""


def _title(r: Record) -> str:
    heads = f"{r['heads']} heads" + (f" ({r['heads_k']} of keys)" if r["heads"] != r["heads_k"] else "")
    what = f"{r['pass'].replace('+', ' + ')}, {r['dtype']}, batch {r['batch']}, {heads}"
    return f"Attention on the {'CPU' if r['device'] == 'cpu' else 'GPU'}: {what}"


def _footer(figure: Any, results: dict[str, Any]) -> None:
    made = f"tilewise {results['tilewise']}, {results['date'][:10]}. Lines: medians; bands: 10th to 90th percentile."
    figure.supxlabel(f"{machine.one_line(results['machine'])}\n{made}", fontsize=7.5, color="#475569")


def _legend(figure: Any, axes: Any, title: str) -> None:
    """One for the figure: every line once. The figure's title is the legend's, since the two would overlap."""
    found: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()), list(found), loc="outside upper center", ncols=min(len(found), 6), frameon=False,
        fontsize=9, title=title, title_fontsize=13,
    )  # fmt: skip


def _lines(records: list[Record], field: str) -> dict[str, list[Record]]:
    """Right answers with this number, a contestant each, sizes rising."""
    lines: dict[str, list[Record]] = {}
    for r in sorted(records, key=lambda r: r["n"]):
        if r["status"] == "ok" and r[field] is not None:
            lines.setdefault(r["contestant"], []).append(r)
    return lines


def _colours(records: list[Record]) -> dict[str, str]:
    """The same colour in every picture of a run."""
    ours = list(dict.fromkeys(r["contestant"] for r in records if r["ours"]))
    return {**_PEERS, **{name: _OURS[i % len(_OURS)] for i, name in enumerate(ours)}}


def _unique(records: list[Record], field: str) -> list[Any]:
    return list(dict.fromkeys(r[field] for r in records))
