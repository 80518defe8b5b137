"""The page's charts as PNG and SVG files, by matplotlib: for slides and papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilewise.bench import plot_parts as parts
from tilewise.bench.page.charts import Bars, Chart, Group, Heatmap, Lines, Panel, Series, short
from tilewise.bench.page.choosing import charts
from tilewise.bench.page.measurement import Run
from tilewise.bench.page.scales import ceiling

_COLUMNS = 3
_BOUND = {"linestyle": (0, (4, 2)), "linewidth": 1.3, "zorder": 1}
# As in the page's style sheet, light.
_RATIOS = ("#b5430f", "#e08a55", "#f5cfb4", "#ebecee", "#c3d9f3", "#78a9e0", "#1f5fbf")
_SHARES = ("#eef1f8", "#cfdbf5", "#a3bbee", "#4c72d4", "#2a3f9e")
_MARKERS = ("s", "^", "D", "P", "_")


def draw(runs: Sequence[Run], folder: Path, say: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Two files a chart: of a device, a section and what it shows. Runs of one name are numbered."""
    written: list[Path] = []
    for run in runs:
        for chart in charts(run):
            name = f"{run.where.lower()}-{run.name}-{chart.name}"
            taken = sum(path.stem == name or path.stem.startswith(f"{name}-") for path in written) // 2
            name += f"-{taken + 1}" if taken else ""
            say(f"drawing {name}")
            figure = _figure(run, chart)
            for path in (folder / f"{name}.png", folder / f"{name}.svg"):
                figure.savefig(path, dpi=2 * parts.DPI)
                written.append(path)
    return written


def _figure(run: Run, chart: Chart) -> Any:
    if isinstance(chart, Heatmap):
        figure = parts.new_figure(1.9 + 0.75 * len(chart.columns) + 2.4, 1.3 + 0.32 * len(chart.rows))
        axes = figure.subplots(1, 1, squeeze=False)
        _heatmap(axes[0][0], chart)
        figure.suptitle(f"{run.title}\n{chart.title}", fontsize=11)
    else:
        across = min(len(chart.panels), _COLUMNS)
        down = -(-len(chart.panels) // across)
        figure = parts.new_figure(max(4.2 * across, 9.0), _height(chart) * down + 1.2)
        axes = figure.subplots(down, across, squeeze=False, sharey=isinstance(chart, Lines))
        _panels(axes, chart)
        parts.legend(figure, axes, f"{run.title}\n{chart.title}")
    figure.supxlabel(f"{run.conditions}\n{run.path} · {run.origin}", fontsize=6.5, color=parts.TEXT, wrap=True)
    return figure


def _height(chart: Lines | Bars) -> float:
    if isinstance(chart, Lines):
        return 3.1
    return 0.5 + 0.2 * max(sum(len(group.series) + 1 for group in groups) for _, groups in chart.panels)


def _panels(axes: Any, chart: Lines | Bars) -> None:
    for axis in axes.flat[len(chart.panels) :]:
        axis.remove()
    if isinstance(chart, Bars):
        for axis, (title, groups) in zip(axes.flat, chart.panels, strict=False):
            axis.set_title(title, fontsize=11, fontweight="bold")
            _bars(axis, chart, groups)
        return
    for axis, panel in zip(axes.flat, chart.panels, strict=False):
        axis.set_title(panel.title, fontsize=11, fontweight="bold")
        _lines(axis, chart, panel)
    if not chart.logarithmic:
        most = max(p.high for panel in chart.panels for series in panel.series for p in series.points)
        axes[0][0].set_ylim(0, ceiling(most)[0])


def _lines(axis: Any, chart: Lines, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    peers = [series.name for series in panel.series if not series.ours and not series.bound]
    for series in panel.series:
        x = [p.x for p in series.points]
        axis.plot(x, [p.y for p in series.points], label=series.name, color=series.colour, **_style(series, peers))
        if not series.bound:
            low, high = [p.low for p in series.points], [p.high for p in series.points]
            axis.fill_between(x, low, high, color=series.colour, alpha=0.15, linewidth=0)
    lengths = sorted({p.x for series in panel.series for p in series.points})
    parts.log_ticks(axis, [int(n) for n in lengths])
    axis.set_xticks(lengths, [short(n) for n in lengths], fontsize=8, rotation=0)
    if chart.logarithmic:
        axis.set_yscale("log", base=2 if chart.name == "memory" else 10)
        axis.yaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: chart.tick(y)))


def _style(series: Series, peers: list[str]) -> dict[str, Any]:
    if series.bound:
        return _BOUND
    if series.ours:
        return {"marker": "o", "markersize": 5, "linewidth": 2.4, "zorder": 3}
    marker = _MARKERS[peers.index(series.name) % len(_MARKERS)]
    return {"marker": marker, "markersize": 4, "linewidth": 1.6, "zorder": 2}


def _bars(axis: Any, chart: Bars, groups: list[Group]) -> None:
    """Downwards, as on the page: the group's name, its bars, a gap."""
    y, names = 0.0, []
    for group in groups:
        bars = [series for series in group.series if not series.bound]
        names.append((y + (len(bars) - 1) / 2, group.label))
        for bound in (series for series in group.series if series.bound):
            limit = bound.points[0].y
            axis.plot([limit] * 2, [y - 0.5, y + len(bars) - 0.5], label=bound.name, color=bound.colour, **_BOUND)
        for series in bars:
            p = series.points[0]
            ratio = "" if p.of.ratio is None else f", {p.of.ratio:.2f}×"
            axis.barh(y, p.y, 0.86, color=series.colour, label=series.name)
            axis.plot([p.low, p.high], [y, y], color=parts.TEXT, linewidth=0.8)
            axis.annotate(
                chart.number(p.y) + ratio, (max(p.y, p.high), y), (3, 0), textcoords="offset points", va="center",
                fontsize=7,
            )  # fmt: skip
            y += 1
        y += 0.8
    axis.set_yticks([at for at, _ in names], [name for _, name in names], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.22)
    axis.set_xlim(left=0)
    parts.plain(axis)
    axis.grid(False, axis="y")


def _heatmap(axis: Any, chart: Heatmap) -> None:
    from matplotlib.patches import Rectangle

    colours = _RATIOS if chart.name == "ratio" else _SHARES
    for i, (_, cells) in enumerate(chart.rows):
        for j, m in enumerate(cells):
            value = None if m is None else chart.number(m)
            if value is None:
                continue
            step = chart.step(value)
            axis.add_patch(Rectangle((j - 0.48, i - 0.46), 0.96, 0.92, color=colours[step], linewidth=0))
            axis.text(j, i, chart.shown(value), ha="center", va="center", fontsize=8, color=_on(colours[step]))
    axis.set_xlim(-0.5, len(chart.columns) - 0.5)
    axis.set_ylim(len(chart.rows) - 0.5, -0.5)
    axis.set_xticks(range(len(chart.columns)), chart.columns, fontsize=8)
    axis.set_yticks(range(len(chart.rows)), [name for name, _ in chart.rows], fontsize=8)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _on(colour: str) -> str:
    """What can be read on it."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 130 else "black"
