"""A results file on the page: its charts, where it was measured, and a table of every number."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from itertools import groupby

from tilewise.bench.page import against, drawing
from tilewise.bench.page.charts import Chart
from tilewise.bench.page.choosing import charts, number
from tilewise.bench.page.measurement import Measurement, Run, common, distinguishing, label
from tilewise.bench.page.parts import Data, Row, table
from tilewise.explanation import size

Column = tuple[str, Callable[[Measurement], Data]]
_EMPTY = Data()


def made(run: Run, name: str, ink: drawing.Ink, compared: against.Comparison | None) -> str:
    figures = "".join(_figure(chart, ink) for chart in charts(run))
    return (
        f'<section class="panel run" id="{name}"><h3>{escape(_capital(run.title))}</h3>'
        f'<p class="where">{escape(run.path)} · {escape(run.origin)}<br>{escape(run.conditions)}</p>'
        f'<p class="note">{escape(_about(run))}</p><div class="figures">{figures}</div>{_remarks(run)}'
        f"<details><summary>Every number of these charts</summary>{_table(run, ink, compared)}</details></section>"
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _figure(chart: Chart, ink: drawing.Ink) -> str:
    kind = drawing.layout(chart)
    return f'<figure class="{kind}"><figcaption>{escape(chart.title)}</figcaption>{drawing.drawn(chart, ink)}</figure>'


def _about(run: Run) -> str:
    """What the labels do not say, and the limit as a number."""
    cells = [m.cell for m in run.measurements]
    told = [common(cells, distinguishing(cells))]
    limits = sorted({m.limit for m in run.measurements if m.limit})
    if limits:
        between = number(limits[0]) if limits[0] == limits[-1] else f"{number(limits[0])} to {number(limits[-1])}"
        told.append(f"limit: {run.limit}, {between} {run.unit.name}")
    return "; ".join(filter(None, told)) + "."


def _remarks(run: Run) -> str:
    """Who has no number, so that a missing line is not taken for an oversight."""
    lines = [f"{who} is not here: {why}" for who, why in run.absent.items()]
    unwell = sorted((m for m in run.measurements if not m.is_right), key=_trouble)
    for (who, status), found in groupby(unwell, key=_trouble):
        reasons = [m.reason for m in found]
        cells = "1 cell" if len(reasons) == 1 else f"{len(reasons)} cells"
        such_as = ", such as" if len(set(reasons)) > 1 else ""
        lines.append(f"{who}: {status} in {cells}{such_as}" + (f": {reasons[0]}" if reasons[0] else ""))
    return f'<ul class="notes">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>' if lines else ""


def _trouble(m: Measurement) -> tuple[str, str]:
    return m.contestant, m.status


# -- every number -----------------------------------------------------------------------------------------------------


def _table(run: Run, ink: drawing.Ink, compared: against.Comparison | None) -> str:
    fields = distinguishing([m.cell for m in run.measurements])
    columns = _columns(run, compared)
    rows = [
        Row(
            label(m.cell, fields) or run.title,
            [Data(m.contestant, style="who"), *(show(m) for _, show in columns)],
            id=ink.row(m),
            style=ink.mark(m),
        )
        for m in run.measurements
    ]
    return table(["cell", "contestant", *(name for name, _ in columns)], rows, f"Every number: {run.title}")


def _columns(run: Run, compared: against.Comparison | None) -> list[Column]:
    """Those that have a number for anyone."""
    more = dict.fromkeys(name for m in run.measurements for name in m.more)
    every: list[Column] = [
        ("ms", lambda m: Data(number(m.ms), m.ms) if m.ms is not None and m.is_right else Data(m.status)),
        ("noise, ms", lambda m: _EMPTY if m.low_ms is None or m.high_ms is None else Data(_noise(m))),
    ]
    if run.unit.name != "ms":
        every.append((run.unit.name, lambda m: _shown(m.value, number)))
    every += [
        ("of the limit", lambda m: _shown(m.fraction, "{:.1%}".format)),
        (f"over {run.versus}", lambda m: _shown(m.ratio, "{:.3f}×".format)),
        ("extra memory", lambda m: _shown(m.extra_bytes, size)),
        ("n × n scores", lambda m: _shown(m.matrix_bytes, size) if run.has_memory else _EMPTY),
        ("largest error", lambda m: _shown(m.error, "{:.1e}".format)),
        *((name, _other(name)) for name in more),
    ]
    if compared is not None:
        every += [("before, ms", lambda m: _before(m, compared)), ("now / before", lambda m: _change(m, compared))]
    return [(name, show) for name, show in every if any(show(m).text for m in run.measurements)]


def _shown(value: float | None, text: Callable[[float], str]) -> Data:
    return _EMPTY if value is None else Data(text(value), value)


def _noise(m: Measurement) -> str:
    return f"{number(m.low_ms or 0.0)} – {number(m.high_ms or 0.0)}"


def _other(name: str) -> Callable[[Measurement], Data]:
    return lambda m: Data(m.more.get(name, ""))


def _before(m: Measurement, compared: against.Comparison) -> Data:
    change = compared.changes.get(m)
    return _EMPTY if change is None or change.old.ms is None else Data(number(change.old.ms), change.old.ms)


def _change(m: Measurement, compared: against.Comparison) -> Data:
    change = compared.changes.get(m)
    if change is None or change.ratio is None:
        return _EMPTY
    word = f" {change.verdict}" if m.ours and change.verdict != against.SAME else ""
    return Data(f"{change.ratio:.3f}×{word}", change.ratio)
