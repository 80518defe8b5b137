"""What the referee said: trials of `tilewise judge --json`, a table for each device and the smallest faults."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from tilewise.bench.page.parts import Row, table
from tilewise.referee import results
from tilewise.referee.features import FEATURES
from tilewise.referee.verdict import VERDICTS

Trial = Mapping[str, Any]


def found(places: Iterable[Path]) -> list[Trial]:
    """Every trial in these files and folders, ours first. Several of a contender on a device are one."""
    paths = [path for place in places for path in (sorted(place.rglob("*.json")) if place.is_dir() else [place])]
    trials = [made for path in paths if (made := _read(path)) is not None]
    ordered = sorted(trials, key=_place)
    return [_joined(list(same)) for _, same in groupby(ordered, key=_place)]


def _place(trial: Trial) -> tuple[object, ...]:
    return trial["device"] != "cuda", not trial["ours"], str(trial["contender"])


def _joined(same: list[Trial]) -> Trial:
    """Features that need much memory are judged by a command of their own."""
    parts = {name: [x for trial in same for x in trial[name]] for name in ("records", "faults")}
    return {**same[0], **parts}


def _read(path: Path) -> Trial | None:
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return made if is_whole(made) else None


def is_whole(made: Any) -> bool:
    """Whether it has what this page shows."""
    if not isinstance(made, dict) or made.get("schema") != results.SCHEMA:
        return False
    texts = all(isinstance(made.get(name), str) for name in ("contender", "device", "about"))
    lists = all(isinstance(made.get(name), list) for name in ("records", "faults"))
    if not (texts and lists and all(isinstance(made.get(name), dict) for name in ("versions", "machine"))):
        return False
    counts = (*VERDICTS, "not deterministic")
    records = (_has(r, ("feature", "pass"), str) and _has(r, counts, int) for r in made["records"])
    told = ("feature", "pass", "call", "id", "verdict", "what", "reason")
    faults = (_has(x, told, str) and _has(x, ("not deterministic",), list) for x in made["faults"])
    return all(records) and all(faults)


def _has(record: Any, names: Iterable[str], kind: type) -> bool:
    return isinstance(record, dict) and all(isinstance(record.get(name), kind) for name in names)


def matrix(trials: Sequence[Trial]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Features by contenders: forward and gradients, as marks."""
    names = [str(x["contender"]) for x in trials]
    by_feature = [{name: list(r) for name, r in _grouped(x)} for x in trials]
    rows = [
        (feature.name, *(results.mark(found.get(feature.name, ())) for found in by_feature))
        for feature in FEATURES.values()
        if any(feature.name in found for found in by_feature)
    ]
    return ("", *names), rows


def _grouped(trial: Trial) -> list[tuple[str, list[Mapping[str, Any]]]]:
    return [(str(name), list(found)) for name, found in groupby(trial["records"], key=lambda r: r["feature"])]


LEGEND = (
    "Forward, then gradients: ✓ right, ≈ beyond the contract's limit by little, ✗ wrong, † as its documentation says "
    "and unlike the contract, – all refused, * other bits the second time; empty: it has no such argument."
)


def chapter(trials: Sequence[Trial]) -> str:
    """The part of the page, if there is anything to tell."""
    parts = ['<h2 id="referee">The referee <span class="on">tilewise judge</span></h2>'] if trials else []
    for device, here in groupby(trials, key=lambda x: str(x["device"])):
        parts.append(_device(device, list(here)))
    return "".join(parts)


def _device(device: str, trials: Sequence[Trial]) -> str:
    head, rows = matrix(trials)
    where = "NVIDIA GPU" if device == "cuda" else "CPU"
    machine = trials[0].get("machine") or {}
    on = str(machine.get("gpu") or machine.get("cpu") or where)
    details = "".join(_details(x) for x in trials)
    return (
        f'<section class="panel run"><h3>What each got right: {where}</h3><p class="where">{escape(on)}</p>'
        f'<p class="note">{escape(LEGEND)}</p>'
        f"{table(head, rows, f'The referee: {where}')}{details}</section>"
    )


def _details(trial: Trial) -> str:
    told = ", ".join(f"{count} {name}" for name, count in results.total(trial).items() if count)
    rows = [
        Row(f"{fault['feature']}, {fault['pass']}", [results.fault_line(fault), str(fault["call"]), str(fault["id"])])
        for fault in trial["faults"]
    ]
    name = str(trial["contender"])
    versions = ", ".join(f"{package} {version}" for package, version in trial["versions"].items())
    listed = table(("", "what", "call", "id"), rows, f"Faults of {name}") if rows else ""
    return (
        f"<details><summary>{escape(name)}: {escape(told)}</summary>"
        f'<p class="note">{escape(str(trial["about"]))} ({escape(versions)})</p>{listed}</details>'
    )
