"""Which charts show a run: speed against n, ratios and shares as heatmaps, memory beside the full matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tilewise.bench import plot_parts
from tilewise.bench.page.charts import (
    RATIO_STEPS,
    SHARE_STEPS,
    Bars,
    Chart,
    Group,
    Heatmap,
    Lines,
    Panel,
    Point,
    Series,
    short,
)
from tilewise.bench.page.measurement import Measurement, Run, distinguishing, label
from tilewise.explanation import size

Measurements = list[Measurement]
MATRIX = "all n × n scores (naive)"
_LEAST_LENGTHS = 3  # fewer are bars: a line through two points says little


def charts(run: Run) -> list[Chart]:
    """Those that the run has numbers for; memory first, where that is what it is about."""
    lines, bars = _speed(run)
    found: list[Chart | None] = [lines, bars, _memory(run), _ratios(run), _shares(run)]
    made = [chart for chart in found if chart is not None]
    return sorted(made, key=lambda chart: run.kind == "memory" and chart.name != "memory")


def colours(run: Run) -> dict[str, str]:
    return plot_parts.palette([{"contestant": m.contestant, "ours": m.ours} for m in run.measurements])


def number(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


# -- speed ------------------------------------------------------------------------------------------------------------


def _speed(run: Run) -> tuple[Lines | None, Bars | None]:
    """Lines for what was measured at several lengths, bars for the rest."""
    fields = distinguishing([m.cell for m in run.measurements])
    right = _ordered([m for m in run.measurements if m.is_right and m.value is not None], fields)
    beside = [name for name in fields if name != "n"]
    panels = _grouped(right, beside)
    long = {title: ms for title, ms in panels.items() if len({m.cell["n"] for m in ms}) >= _LEAST_LENGTHS}
    rest = [m for title, ms in panels.items() if title not in long for m in ms]
    title = f"{run.unit.name}, {run.unit.better}"
    lines = bars = None
    if long:
        made = [Panel(name, _lines(run, ms)) for name, ms in long.items()]
        lines = Lines("speed", f"{title}, against n", made, "{:,g}".format, not run.unit.higher_is_better)
    if rest:
        made_bars = [(name, _groups(run, ms, fields)) for name, ms in _grouped(rest, _bar_fields(fields)).items()]
        bars = Bars("bars", title, made_bars, number)
    return lines, bars


def _bar_fields(fields: list[str]) -> list[str]:
    """A panel of bars for each of these, so that no panel is endless."""
    return [name for name in ("work", "dtype", "d") if name in fields]


def _grouped(measurements: Measurements, fields: list[str]) -> dict[str, Measurements]:
    found: dict[str, Measurements] = {}
    for m in measurements:
        found.setdefault(label(m.cell, fields), []).append(m)
    return found


def _ordered(measurements: Measurements, fields: list[str]) -> Measurements:
    """Numbers rising, words as they first came."""
    places: dict[str, dict[Any, Any]] = {name: {} for name in fields}
    for m in measurements:
        for name, known in places.items():
            value = m.cell.get(name)
            known.setdefault(value, value if isinstance(value, int) else len(known))
    return sorted(measurements, key=lambda m: [places[name][m.cell.get(name)] for name in fields])


def _lines(run: Run, measurements: Measurements) -> list[Series]:
    made = [_bound(run.limit, measurements)] if run.limit else []
    made += _contestants(run, measurements, partial(_point, run))
    return [series for series in made if series.points]


def _contestants(run: Run, measurements: Measurements, point: Callable[[Measurement], Point]) -> list[Series]:
    """Ours last, on top of the others."""
    hues = colours(run)
    by_name = {m.contestant: m for m in sorted(measurements, key=lambda m: m.ours)}
    points = {
        name: sorted((point(m) for m in measurements if m.contestant == name), key=lambda p: p.x) for name in by_name
    }
    return [Series(name, hues[name], points[name], m.ours) for name, m in by_name.items()]


def _point(run: Run, m: Measurement) -> Point:
    value = m.value or 0.0
    ends = [_at(run, m, ms) for ms in (m.low_ms, m.high_ms)]
    return Point(m.cell["n"], value, min(ends), max(ends), m)


def _at(run: Run, m: Measurement, ms: float | None) -> float:
    """The value if it had taken so long."""
    if not m.value or not m.ms or not ms:
        return m.value or 0.0
    return m.value * (m.ms / ms if run.unit.higher_is_better else ms / m.ms)


def _bound(name: str, measurements: Measurements) -> Series:
    """One limit a length: ours, where each contestant's process measured its own."""
    limits: dict[int, Point] = {}
    for m in sorted(measurements, key=lambda m: m.ours):
        if m.limit:
            limits[m.cell["n"]] = Point(m.cell["n"], m.limit, m.limit, m.limit, m)
    return Series(name, plot_parts.TEXT, [limits[n] for n in sorted(limits)], bound=True)


def _groups(run: Run, measurements: Measurements, fields: list[str]) -> list[Group]:
    own = [name for name in fields if name not in _bar_fields(fields)]
    made = []
    for name, cell in _grouped(measurements, own).items():
        bars = sorted(_lines(run, cell), key=lambda series: (series.bound, not series.ours))
        made.append(Group(name, bars))
    return made


# -- heatmaps ---------------------------------------------------------------------------------------------------------


def _ratios(run: Run) -> Heatmap | None:
    title = f"Our speed over that of {run.versus}"
    return _heatmap(run, "ratio", title, lambda m: m.ratio, lambda x: f"{x:.2f}×", RATIO_STEPS)


def _shares(run: Run) -> Heatmap | None:
    title = f"Of the limit: {run.limit}"
    return _heatmap(run, "limit", title, lambda m: m.fraction, lambda x: f"{x:.0%}", SHARE_STEPS)


def _heatmap(
    run: Run,
    name: str,
    title: str,
    of: Callable[[Measurement], float | None],
    shown: Callable[[float], str],
    steps: tuple[float, ...],
) -> Heatmap | None:
    """A row a cell of ours, without what the columns are: n, or the inputs where there are more of those."""
    ours = [m for m in run.measurements if m.ours and m.is_right and of(m) is not None]
    if not ours:
        return None
    fields = distinguishing([m.cell for m in ours])
    along = max(("n", "inputs"), key=lambda field: len({m.cell.get(field) for m in ours}))
    beside = [name for name in fields if name != along]
    columns = sorted({m.cell.get(along) for m in ours}, key=lambda x: (isinstance(x, str), x))
    several = len({m.contestant for m in ours}) > 1
    rows: dict[str, list[Measurement | None]] = {}
    for m in _ordered(ours, beside):
        parts = [m.contestant if several or not beside else "", label(m.cell, beside)]
        row = rows.setdefault(", ".join(filter(None, parts)), [None] * len(columns))
        row[columns.index(m.cell.get(along))] = m
    heads = [f"n {short(x)}" if isinstance(x, int) else str(x or "normal") for x in columns]
    return Heatmap(name, title, heads, list(rows.items()), of, shown, steps)


# -- memory -----------------------------------------------------------------------------------------------------------


def _memory(run: Run) -> Lines | None:
    """Extra memory against n, and what the full matrix would take."""
    fields = [name for name in distinguishing([m.cell for m in run.measurements]) if name != "n"]
    measured = _ordered([m for m in run.measurements if m.is_right and m.extra_bytes is not None], fields)
    panels = []
    for name, found in _grouped(measured, fields).items():
        series = [_matrix(found), *_contestants(run, found, _bytes)]
        panels.append(Panel(name, [s for s in series if s.points]))
    title = "Memory beyond the inputs, lower is better, against n"
    return Lines("memory", title, panels, size, logarithmic=True) if panels else None


def _bytes(m: Measurement) -> Point:
    """Nothing measurable is a page: a logarithmic axis has no 0."""
    taken = max(m.extra_bytes or 0.0, plot_parts.PAGE)
    return Point(m.cell["n"], taken, taken, taken, m)


def _matrix(measurements: Measurements) -> Series:
    sizes = {m.cell["n"]: m for m in measurements if m.matrix_bytes}
    points = [Point(n, m.matrix_bytes or 0.0, 0.0, 0.0, m) for n, m in sorted(sizes.items())]
    return Series(MATRIX, plot_parts.TEXT, points, bound=True)
