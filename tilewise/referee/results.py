"""A trial as a results file, as `--json` writes it: a record for each feature and pass, and the smallest faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewise.bench.stamp import stamp
from tilewise.referee.contender import Says
from tilewise.referee.court import Options
from tilewise.referee.features import FEATURES
from tilewise.referee.session import Judged
from tilewise.referee.trial import Heard, Plan
from tilewise.referee.verdict import CRASHED, INEXACT, NOT_ASKED, OTHERWISE, REFUSED, RIGHT, VERDICTS, WRONG

SCHEMA = "tilewise judge 1"
_REASONS = 3  # of refusals that are kept for a feature and pass
Record = Mapping[str, Any]
Results = Mapping[str, Any]
# The worst thing that was seen says what stands in a cell of a table.
_WORST = (CRASHED, WRONG, INEXACT, OTHERWISE, RIGHT, REFUSED, NOT_ASKED)
MARKS = {
    CRASHED: "crash", WRONG: "✗", INEXACT: "≈", OTHERWISE: "†", RIGHT: "✓", REFUSED: "–", NOT_ASKED: "",
}  # fmt: skip


def results(judged: Judged, options: Options, plan: Plan, machine: dict[str, Any]) -> dict[str, Any]:
    about = judged.introduction
    groups: dict[tuple[str, str], list[Heard]] = {}
    for x in judged.heard:
        groups.setdefault((x.feature, x.what), []).append(x)
    return {
        "schema": SCHEMA,
        "contender": judged.name,
        "about": about.about,
        "ours": about.ours,
        "notes": [] if about.says is None else _notes(about.says),
        "device": options.device,
        "versions": about.versions,
        "options": {"calls": plan.count, "seed": plan.seed, "large": plan.large, "causal": options.causal},
        "complete": not judged.is_cut,
        **stamp(machine),
        "records": [_record(*name, found) for name, found in groups.items()],
        "faults": [_fault(x) for x in judged.faults],
    }


def _notes(says: Says) -> list[str]:
    return [*says.notes, *(["its gradients may have other bits each time, as documented"] if says.unordered else [])]


def _record(feature: str, what: str, heard: Sequence[Heard]) -> dict[str, Any]:
    counts = Counter(x.finding.verdict for x in heard)
    reasons = dict.fromkeys(x.finding.reason for x in heard if x.finding.verdict in (REFUSED, NOT_ASKED, OTHERWISE))
    return {
        "feature": FEATURES[feature].name, "pass": what, **{name: counts[name] for name in VERDICTS},
        "not deterministic": sum(bool(x.finding.differs) for x in heard), "reasons": list(reasons)[:_REASONS],
    }  # fmt: skip


def _fault(x: Heard) -> dict[str, Any]:
    return {
        "id": x.call.id, "feature": FEATURES[x.feature].name, "pass": x.what, "dtype": x.call.dtype,
        "call": x.call.describe(), "verdict": x.finding.verdict, "what": x.finding.what, "error": x.finding.error,
        "limit": x.finding.limit, "reason": x.finding.reason, "not deterministic": list(x.finding.differs),
    }  # fmt: skip


def worst(record: Record) -> str:
    """The verdict that stands for a feature and pass."""
    return next((name for name in _WORST if record[name]), NOT_ASKED)


def mark(records: Iterable[Record]) -> str:
    """Of a feature: forward and gradients, as marks."""
    found = {r["pass"]: MARKS[worst(r)] + ("*" if r["not deterministic"] else "") for r in records}
    return " ".join(filter(None, (found.get("forward", ""), found.get("gradients", ""))))


def counted(record: Record) -> str:
    """ "7 right, 1 wrong": everything that was said of a feature and pass."""
    told = [f"{record[name]} {name}" for name in VERDICTS if record[name] and name != NOT_ASKED]
    if record["not deterministic"]:
        told.append(f"{record['not deterministic']} not deterministic")
    return ", ".join(told) or "not asked"


def fault_line(fault: Mapping[str, Any]) -> str:
    """What is the matter, in a line."""
    told = " ".join(filter(None, (fault["what"] and fault["what"] + ":", fault["reason"])))
    differs = fault["not deterministic"]
    if differs:
        told = "; ".join(filter(None, (told, f"other bits the second time: {', '.join(differs)}")))
    return f"{fault['verdict']}: {told}" if fault["verdict"] != RIGHT else told


def total(found: Results) -> Counter[str]:
    """Calls by verdict, over all features."""
    return Counter({name: sum(r[name] for r in found["records"]) for name in (*VERDICTS, "not deterministic")})
