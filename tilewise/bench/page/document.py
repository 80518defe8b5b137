"""The page: what was measured at a glance, what changed, and a section for each results file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from tilewise._version import __version__
from tilewise.bench import suite
from tilewise.bench.gpu import suite as gpu_suite
from tilewise.bench.page import against, drawing, glance, section, trials
from tilewise.bench.page.measurement import Measurement, Run
from tilewise.bench.page.parts import table
from tilewise.web import template

ASSETS = Path(__file__).with_name("assets")
# What a full set of results has of each device, in the page's order, and what measures it.
KINDS = {
    "forward": "Forward", "backward": "Backward", "decode": "Decoding", "linear": "Linear attention",
    "memory": "Memory", "other": "More",
}  # fmt: skip
_MEASURED_BY = {
    ("CPU", "forward"): "--cpu forward --json results/cpu", ("GPU", "forward"): "--gpu forward --json results/gpu",
    ("CPU", "backward"): "--cpu training --json results/cpu",
    ("GPU", "backward"): "--gpu gradients --json results/gpu",
    ("CPU", "decode"): "--cpu decode --json results/cpu", ("GPU", "decode"): "--gpu decode --json results/gpu",
    ("CPU", "linear"): "--linear --json results/linear.json",
    ("GPU", "linear"): "--linear --device cuda --json results/gpu/linear.json",
    ("CPU", "memory"): "--cpu memory --json results/cpu",
    ("GPU", "memory"): "--device cuda --dtype bfloat16 --json results/gpu/sweep.json",
}  # fmt: skip


def page(
    runs: Sequence[Run],
    compared: against.Comparison | None = None,
    left_out: Mapping[str, str] | None = None,
    judged: Sequence[trials.Trial] = (),
) -> str:
    ordered = sorted(runs, key=_place)
    ids = {m: f"m{i}" for i, m in enumerate(m for run in ordered for m in run.measurements)}
    ink = drawing.Ink(ids.__getitem__, _marker(compared))
    chapters = [
        (f"{kind}-{i}", kind, here, list(found))
        for i, ((kind, here), found) in enumerate(groupby(ordered, key=lambda run: (run.kind, _device(run))))
    ]
    body = [] if compared is None else [_changes(compared)]
    body.append(_glance(ordered, left_out or {}))
    for name, kind, here, found in chapters:
        sections = "".join(section.made(run, _id(ordered, run), ink, compared) for run in found)
        body.append(f'<h2 id="{name}">{KINDS[kind]} <span class="on">{escape(here)}</span></h2>{sections}')
    body.append(trials.chapter(judged))
    return template.filled(
        ASSETS / "report.html",
        {
            "style": template.style(ASSETS / "report.css"),
            "script": template.script(ASSETS / "report.js"),
            "shapes": drawing.shapes(),
            "version": __version__,
            "about": escape(_about(ordered, judged)),
            "places": _places(chapters, compared is not None, bool(judged)),
            "body": "\n".join(body),
        },
    )


def _marker(compared: against.Comparison | None) -> Callable[..., str]:
    def mark(m: Measurement) -> str:
        change = compared.changes.get(m) if compared is not None else None
        if change is None or not change.new.ours:
            return ""
        return change.verdict if change.verdict in (against.SLOWER, against.FASTER) else ""

    return mark


def _device(run: Run) -> str:
    return str(run.machine.get("gpu") or run.machine.get("cpu") or run.where)


def _place(run: Run) -> tuple[object, ...]:
    """GPUs first, then by kind, and in the suites' own order."""
    known = [*gpu_suite.SECTIONS] if run.where == "GPU" else [*suite.SECTIONS]
    order = known.index(run.name) if run.name in known else len(known)
    return run.where == "CPU", _device(run), list(KINDS).index(run.kind), order, run.path


def _id(runs: Sequence[Run], run: Run) -> str:
    return f"run-{list(runs).index(run)}"


def _about(runs: Sequence[Run], judged: Sequence[trials.Trial]) -> str:
    if not runs:
        return f"{len(judged)} {'trial' if len(judged) == 1 else 'trials'} of tilewise judge"
    count = sum(len(run.measurements) for run in runs)
    days = sorted(run.date[:10] for run in runs if run.date)
    when = "" if not days else f", {days[0]}" if days[0] == days[-1] else f", {days[0]} to {days[-1]}"
    devices = " and ".join(dict.fromkeys(map(_device, runs)))
    return f"{count:,} measurements in {len(runs)} {'file' if len(runs) == 1 else 'files'}, on {devices}{when}"


def _places(chapters: list[tuple[str, str, str, list[Run]]], compared: bool, judged: bool) -> str:
    links = ['<a href="#changes">Changes</a>'] if compared else []
    links.append('<a href="#glance">At a glance</a>')
    for here, found in groupby(chapters, key=lambda chapter: chapter[2]):
        links.append(f'<span class="on">{escape(here)}</span>')
        links += [f'<a href="#{name}">{KINDS[kind]}</a>' for name, kind, _, _ in found]
    return "".join([*links, '<a href="#referee">Referee</a>'] if judged else links)


# -- at a glance ------------------------------------------------------------------------------------------------------


def _glance(runs: Sequence[Run], left_out: Mapping[str, str]) -> str:
    told = [f"<li>{line}</li>" for line in _missing(runs)]
    told += [f"<li><code>{escape(path)}</code> {escape(why)}</li>" for path, why in left_out.items()]
    notes = f'<h3>Not on this page</h3><ul class="notes">{"".join(told)}</ul>' if told else ""
    rows = [row for run in runs for row in glance.rows(run, _id(runs, run))]
    return (
        f'<section class="panel" id="glance" tabindex="-1"><h2>At a glance</h2>{glance.summary(rows)}'
        f"{glance.targets(runs)}{notes}</section>"
    )


def _missing(runs: Sequence[Run]) -> list[str]:
    """What has no results at all, a line each: never an empty chart."""
    here = {(run.where, run.kind) for run in runs} | {(run.where, "memory") for run in runs if run.has_memory}
    return [
        f"{KINDS[kind]}, {where}: no results; <code>tilewise bench {escape(options)}</code> measures it."
        for (where, kind), options in _MEASURED_BY.items()
        if (where, kind) not in here
    ]


# -- changes ----------------------------------------------------------------------------------------------------------


def _changes(compared: against.Comparison) -> str:
    worse, better = compared.regressions, compared.improvements
    elsewhere = "".join(
        f'<p class="alarmed">Another machine: {escape(line)}. Times are shown beside each other, and judged only with '
        "<code>--across-machines</code>.</p>"
        for line in compared.machines
    )
    versions = "".join(f'<p class="note">Another version: {escape(line)}.</p>' for line in compared.software)
    return (
        f'<section class="panel" id="changes" tabindex="-1"><h2>Changes</h2>{elsewhere}{versions}'
        f"<p>{escape(against.summary(compared))}</p>"
        f'<p class="note">{escape(against.rule(compared).capitalize())}.</p>'
        f"{_changed('Slower, or broken', worse, True)}{_changed('Faster', better, not worse)}</section>"
    )


def _changed(title: str, changes: list[against.Change], is_open: bool) -> str:
    if not changes:
        return f'<p class="note">{title}: nothing.</p>'
    head = ("", "section", "cell", "before", "now", "now / before")
    rows = [
        (c.new.contestant, f"{c.run.where} {c.run.name}", c.what, against.told(c.old), against.told(c.new), _times(c))
        for c in changes
    ]
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{title}: {len(changes)}</summary>{table(head, rows, title)}</details>"


def _times(c: against.Change) -> str:
    return c.new.status if c.ratio is None else f"{c.ratio:.2f}×"
