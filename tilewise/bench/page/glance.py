"""The page's first table: each of our contestants in each section, beside its best peer; and the suites' targets."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tilewise.bench import report
from tilewise.bench import targets as cpu_targets
from tilewise.bench.gpu import run as gpu_run
from tilewise.bench.gpu import targets as gpu_targets
from tilewise.bench.page.charts import RATIO_STEPS
from tilewise.bench.page.measurement import Run
from tilewise.bench.page.parts import Data, Row, table
from tilewise.bench.run import SCHEMA
from tilewise.bench.table import geometric_mean

_HEAD = ("", "mean", "slowest", "fastest", "of the limit", "cells", "beside")


def rows(run: Run, link: str) -> list[Row]:
    names = dict.fromkeys(m.contestant for m in run.measurements if m.ours)
    return [row for name in names if (row := _row(run, name, link)) is not None]


def _row(run: Run, name: str, link: str) -> Row | None:
    mine = [m for m in run.measurements if m.contestant == name and m.is_right]
    ratios = [m.ratio for m in mine if m.ratio]
    shares = [m.fraction for m in mine if m.fraction]
    if not ratios and not shares:
        return None
    limit = f"{min(shares):.0%} – {max(shares):.0%}" if shares else ""
    numbers = [_ratio(x) for x in (geometric_mean(ratios), min(ratios), max(ratios))] if ratios else [Data()] * 3
    told: list[Data | str] = [limit, str(len(mine)), Data(run.versus if ratios else "", style="who")]
    return Row(f"{run.where}: {run.title}", [*numbers, *told], link=link, about=name)


def _ratio(value: float) -> Data:
    step = sum(value >= least for least in RATIO_STEPS)
    return Data(f"{value:.2f}×", value, f"ratio-{step}")


def summary(found: Sequence[Row]) -> str:
    if not found:
        return '<p class="note">No contestant of ours has a peer or a limit beside it.</p>'
    told = "Our speed over that of what stands beside it, by cell: the geometric mean, the slowest and the fastest."
    about = f'<p class="note">{told} Above 1 is faster.</p>'
    return about + table(_HEAD, found, "At a glance")


def targets(runs: Sequence[Run]) -> str:
    """Of both suites, from the newest results of each section."""
    made = ""
    for schema, where, checks in ((gpu_run.SCHEMA, "GPU", gpu_targets.checks), (SCHEMA, "CPU", cpu_targets.checks)):
        newest = sorted((run for run in runs if run.about["schema"] == schema), key=lambda run: run.date)
        try:
            found = checks({run.name: dict(run.about) for run in newest})
        except KeyError as error:
            made += (
                f'<p class="note">Targets, {where}: older results, without {escape(str(error))}, are not judged.</p>'
            )
            continue
        made += _targets(where, found) if found else ""
    return made


def _targets(where: str, found: list[cpu_targets.Check]) -> str:
    judged = [check.met for check in found if check.met is not None]
    rows = [
        Row(check.what, [check.shown, check.target, report.MARKS[check.met], Data(check.note, style="who")])
        for check in found
    ]
    head = ("", "measured", "target", "", "")
    title = f"Targets, {where}: {sum(judged)} of {len(judged)} met"
    return f"<details><summary>{title}</summary>{table(head, rows, title)}</details>"
