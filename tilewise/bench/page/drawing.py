"""Charts inside the page: SVG, and tables for heatmaps. Colours come from the style sheet, for dark and light."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape

from tilewise.bench.page.charts import (
    Bars,
    Chart,
    Format,
    Group,
    Heatmap,
    Lines,
    Panel,
    Point,
    Series,
    series_of,
    short,
)
from tilewise.bench.page.measurement import Measurement
from tilewise.bench.page.scales import Scale, ceiling, powers

WIDTH, HEIGHT = 372, 232
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 10, 24
_BAR, _GAP, _LABEL = 12, 9, 15  # heights
_MIDDLE = 4  # from a text's base line to its middle

# Ours are circles; peers have other shapes, so that no line is told by its colour alone.
_SHAPES = {
    "circle": "M-4.2,0a4.2,4.2 0 1 0 8.4,0a4.2,4.2 0 1 0 -8.4,0",
    "square": "M-3.6,-3.6h7.2v7.2h-7.2z",
    "triangle": "M0,-4.6L4.4,3.4H-4.4z",
    "diamond": "M0,-5L4.4,0L0,5L-4.4,0z",
    "bar": "M-5,-1.6h10v3.2h-10z",
    "cross": "M-4.4,-1.5h2.9v-2.9h3v2.9h2.9v3h-2.9v2.9h-3v-2.9h-2.9z",
}
_PEERS = ("square", "triangle", "diamond", "cross", "bar")


@dataclass(frozen=True)
class Ink:
    """What the page knows of measurements: the row of a table, and how it changed since the old results."""

    row: Callable[[Measurement], str]
    mark: Callable[[Measurement], str]  # "slower", "faster" or ""


def shapes() -> str:
    """Drawn once in a page, and used by name."""
    made = "".join(f'<path id="shape-{name}" d="{d}"/>' for name, d in _SHAPES.items())
    return f'<svg class="defs" width="0" height="0" aria-hidden="true"><defs>{made}</defs></svg>'


def drawn(chart: Chart, ink: Ink) -> str:
    if isinstance(chart, Heatmap):
        return _heatmap(chart, ink)
    names = _shape_names(series_of(chart).values())
    if isinstance(chart, Lines):
        panels = [_panel(panel.title, _lines(chart, panel, names, ink)) for panel in chart.panels]
    else:
        most = max(series.points[0].high for _, groups in chart.panels for g in groups for series in g.series)
        panels = [_panel(title, _bars(chart, title, groups, most, ink)) for title, groups in chart.panels]
    return f'{_legend(chart, names)}<div class="panels {layout(chart)}">{"".join(panels)}</div>'


def layout(chart: Chart) -> str:
    """Rows without a gap, where there is room for them."""
    if isinstance(chart, Heatmap):
        return "heatmap"
    count = len(chart.panels)
    return "alone" if count == 1 else "in-threes" if count % 3 == 0 or count > 6 else "in-twos"


def _panel(title: str, svg: str) -> str:
    head = f"<h4>{escape(title)}</h4>" if title else ""
    return f"<div>{head}{svg}</div>"


def _shape_names(series: Iterable[Series]) -> dict[str, str]:
    every = list(series)
    ours = dict.fromkeys((s.name for s in every if s.ours), "circle")
    peers = [s.name for s in every if not s.ours and not s.bound]
    return {**ours, **{name: _PEERS[i % len(_PEERS)] for i, name in enumerate(peers)}}


def _legend(chart: Lines | Bars, names: dict[str, str]) -> str:
    items = []
    for name, series in series_of(chart).items():
        mark = f'<use href="#shape-{names[name]}" x="14" y="7"/>' if isinstance(chart, Lines) and name in names else ""
        line = '<path class="line" d="M1,7H27"/>' if isinstance(chart, Lines) or series.bound else ""
        block = "" if line else '<rect x="6" y="1" width="16" height="12" rx="2"/>'
        icon = f'<svg width="28" height="14" aria-hidden="true"><g {_class(series)}>{line}{block}{mark}</g></svg>'
        items.append(f"<li>{icon}{escape(name)}</li>")
    return f'<ul class="legend chart-legend">{"".join(items)}</ul>'


def _class(series: Series) -> str:
    kind = "bound" if series.bound else "ours" if series.ours else "peer"
    return f'class="series {kind}" style="--hue:{series.colour}"'


def _svg(height: float, label: str, inside: Iterable[str]) -> str:
    about = f"{label}. Arrow keys read the numbers; the table below has all of them."
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="group" aria-roledescription="chart" tabindex="0" '
        f'aria-label="{escape(about, quote=True)}">{"".join(inside)}</svg>'
    )


def _titles(panel: str, chart: str) -> str:
    return f"{panel}: {chart}" if panel else chart


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    of = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{of}>{escape(text)}</text>'


# -- lines ------------------------------------------------------------------------------------------------------------


def _lines(chart: Lines, panel: Panel, names: dict[str, str], ink: Ink) -> str:
    lengths = sorted({p.x for series in panel.series for p in series.points})
    x = Scale(lengths[0], lengths[-1] * (1 if len(lengths) > 1 else 2), _LEFT + 10, WIDTH - _RIGHT - 6, True)
    y, ticks = vertical(chart, HEIGHT - _BOTTOM, _TOP)
    inside = [_horizontal(y(tick), chart.tick(tick)) for tick in ticks]
    inside += [_text(x(n), HEIGHT - 6, short(n), "middle") for n in _spaced(lengths, x)]
    inside += [_line(series, x, y, names.get(series.name), ink) for series in panel.series]
    return _svg(HEIGHT, _titles(panel.title, chart.title), inside)


def vertical(chart: Lines, first: float, last: float) -> tuple[Scale, list[float]]:
    """One for all panels, so that they can be compared."""
    points = [p for panel in chart.panels for series in panel.series for p in series.points]
    if not chart.logarithmic:
        high, ticks = ceiling(max(max(p.y, p.high) for p in points))
        return Scale(0.0, high, first, last), ticks
    low, high, ticks = powers([p.y for p in points], 2 if chart.name == "memory" else 10)
    return Scale(low, high, first, last, True), ticks


def _spaced(lengths: list[float], x: Scale) -> list[float]:
    """Those whose names have room beside each other."""
    kept: list[float] = []
    for n in lengths:
        if not kept or x(n) - x(kept[-1]) >= 26:
            kept.append(n)
    return kept


def _horizontal(y: float, text: str) -> str:
    line = f'<path class="tick" d="M{_LEFT},{y:.1f}H{WIDTH - _RIGHT}"/>'
    return line + _text(_LEFT - 6, y + _MIDDLE, text, "end")


def _line(series: Series, x: Scale, y: Scale, shape: str | None, ink: Ink) -> str:
    ends = [(x(p.x), y(p.y)) for p in series.points]
    inside = [f'<polyline class="line" points="{_places(ends)}"/>'] if len(ends) > 1 else []
    if shape is not None:
        inside = [_band(series.points, x, y), *inside, *(_marker(p, x, y, shape, ink) for p in series.points)]
    return f"<g {_class(series)}>{''.join(inside)}</g>"


def _band(points: list[Point], x: Scale, y: Scale) -> str:
    """The noise, where it can be seen at all."""
    if all(abs(y(p.high) - y(p.low)) < 1.0 for p in points):
        return ""
    around = [(x(p.x), y(p.high)) for p in points] + [(x(p.x), y(p.low)) for p in reversed(points)]
    return f'<polygon class="noise" points="{_places(around)}"/>'


def _places(ends: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in ends)


def _marker(p: Point, x: Scale, y: Scale, shape: str, ink: Ink) -> str:
    at = f'x="{x(p.x):.1f}" y="{y(p.y):.1f}"'
    mark = ink.mark(p.of)
    ring = f'<circle class="change {mark}" cx="{x(p.x):.1f}" cy="{y(p.y):.1f}" r="9"/>' if mark else ""
    return f'{ring}<use href="#shape-{shape}" {at} data-row="{ink.row(p.of)}"/>'


# -- bars -------------------------------------------------------------------------------------------------------------


def _bars(chart: Bars, title: str, groups: list[Group], most: float, ink: Ink) -> str:
    x = Scale(0.0, most, 0.0, WIDTH - 92.0)
    inside, y = [], 0.0
    for group in groups:
        bars = [series for series in group.series if not series.bound]
        inside.append(_text(0, y + _LABEL - _MIDDLE, group.label, kind="group"))
        top = y + _LABEL if group.label else y
        inside += [_bar(series, x, top + i * _BAR, ink) for i, series in enumerate(bars)]
        inside += [_stop(series, x, top, len(bars)) for series in group.series if series.bound]
        inside += [_value(series, x, top + i * _BAR, chart.number, ink) for i, series in enumerate(bars)]
        y = top + len(bars) * _BAR + _GAP
    return _svg(y, _titles(title, chart.title), inside)


def _stop(bound: Series, x: Scale, top: float, bars: int) -> str:
    """Where the bars could end at best."""
    place = f"M{x(bound.points[0].y):.1f},{top - 1:.1f}v{bars * _BAR + 1}"
    return f'<g {_class(bound)}><path class="line" d="{place}"/></g>'


def _bar(series: Series, x: Scale, y: float, ink: Ink) -> str:
    p = series.points[0]
    bar = f'<rect x="0" y="{y:.1f}" width="{max(x(p.y), 1):.1f}" height="{_BAR - 2}" data-row="{ink.row(p.of)}"/>'
    noise = f'<path class="whisker" d="M{x(p.low):.1f},{y + _BAR / 2 - 1:.1f}H{x(p.high):.1f}"/>'
    return f"<g {_class(series)}>{bar}{noise}</g>"


def _value(series: Series, x: Scale, y: float, number: Format, ink: Ink) -> str:
    """Behind the bar: its number, ours also beside the best peer, and an arrow where it changed."""
    p = series.points[0]
    ratio = "" if p.of.ratio is None else f" · {p.of.ratio:.2f}×"
    mark = ink.mark(p.of)
    arrow = {"slower": " ▼", "faster": " ▲"}.get(mark, "")
    kind = f"value {'of-ours' if series.ours else ''} {mark}".strip()
    return _text(x(max(p.y, p.high)) + 5, y + _BAR - 3, f"{number(p.y)}{ratio}{arrow}", kind=kind)


# -- heatmaps ---------------------------------------------------------------------------------------------------------


def _heatmap(chart: Heatmap, ink: Ink) -> str:
    """A table already: every number can be read without the colours."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in chart.columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(_cell(chart, m, ink) for m in cells)}</tr>'
        for name, cells in chart.rows
    )
    kind = "ratio" if chart.name == "ratio" else "share"
    steps = "".join(f'<li><i class="swatch {kind}-{i}"></i>{escape(t)}</li>' for i, t in enumerate(chart.legend))
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(chart.title, quote=True)}">'
        f'<table class="heat"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f'<ul class="legend steps">{steps}</ul>'
    )


def _cell(chart: Heatmap, m: Measurement | None, ink: Ink) -> str:
    value = None if m is None else chart.number(m)
    if m is None or value is None:
        return "<td>·</td>"
    kind = "ratio" if chart.name == "ratio" else "share"
    step = f"{kind}-{chart.step(value)}"
    return f'<td class="{step}" data-value="{value!r}" data-row="{ink.row(m)}">{escape(chart.shown(value))}</td>'
