"""Old results beside new ones: what became slower, by more than the noise of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilewise.bench.page.measurement import Measurement, Run, distinguishing, label
from tilewise.bench.table import geometric_mean

TOLERANCE = 0.05  # changes up to this are never called one
_MACHINE = ("cpu", "cores", "gpu", "torch_threads")  # what makes two machines the same one
_SOFTWARE = ("os", "python", "numpy", "torch", "cuda", "cudnn", "driver")

SLOWER, FASTER, SAME, BROKEN, ELSEWHERE = "slower", "faster", "the same", "broken", "on another machine"


@dataclass(frozen=True, eq=False)
class Change:
    """A contestant in a cell, now and before."""

    run: Run
    what: str  # the cell, in words
    new: Measurement
    old: Measurement
    verdict: str

    @property
    def ratio(self) -> float | None:
        """Time now over time before: above 1 is slower."""
        return self.new.ms / self.old.ms if self.new.ms and self.old.ms and self.new.is_right else None

    @property
    def is_regression(self) -> bool:
        return self.new.ours and self.verdict in (SLOWER, BROKEN)


@dataclass(frozen=True, eq=False)
class Comparison:
    changes: dict[Measurement, Change]  # by what is new
    tolerance: float
    only_new: int  # right measurements of ours that the other side has not
    only_old: int
    machines: list[str]  # how they differ, if they do
    software: list[str]

    @property
    def regressions(self) -> list[Change]:
        """The worst first."""
        found = [change for change in self.changes.values() if change.is_regression]
        return sorted(found, key=lambda change: -(change.ratio or float("inf")))

    @property
    def improvements(self) -> list[Change]:
        found = [change for change in self.changes.values() if change.new.ours and change.verdict == FASTER]
        return sorted(found, key=lambda change: change.ratio or 1.0)

    def count(self, verdict: str) -> int:
        return sum(change.new.ours and change.verdict == verdict for change in self.changes.values())

    def mean(self, ours: bool) -> tuple[float, int] | None:
        """The geometric mean of the ratios, and of how many."""
        ratios = [c.ratio for c in self.changes.values() if c.new.ours == ours and c.ratio]
        return (geometric_mean(ratios), len(ratios)) if ratios else None


def compare(new: list[Run], old: list[Run], tolerance: float = TOLERANCE, across: bool = False) -> Comparison:
    """across: judge even where the machines differ."""
    before = {key: (run, m) for run in sorted(old, key=lambda run: run.date) for key, m in _keyed(run)}
    changes, machines, software, only_new = {}, {}, {}, 0
    for run in new:
        fields = distinguishing([m.cell for m in run.measurements])
        for key, m in _keyed(run):
            if key not in before:
                only_new += m.ours and m.is_right
                continue
            then, past = before[key]
            differ = _differences(run.machine, then.machine, _MACHINE)
            machines.update(dict.fromkeys(differ))
            software.update(dict.fromkeys(_differences(_versions(run), _versions(then), None)))
            verdict = ELSEWHERE if differ and not across else _verdict(m, past, tolerance)
            changes[m] = Change(run, label(m.cell, fields) or run.title, m, past, verdict)
    now = {key for run in new for key, _ in _keyed(run)}
    only_old = sum(m.ours and m.is_right for key, (_, m) in before.items() if key not in now)
    return Comparison(changes, tolerance, only_new, only_old, list(machines), list(software))


def _keyed(run: Run) -> Iterator[tuple[tuple[Any, ...], Measurement]]:
    for m in run.measurements:
        yield (run.where, run.name, m.contestant, *sorted((k, v) for k, v in m.cell.items() if v is not None)), m


def _verdict(new: Measurement, old: Measurement, tolerance: float) -> str:
    if not old.is_right or not old.ms:
        return SAME
    if not new.is_right or not new.ms:
        return BROKEN
    ratio = new.ms / old.ms
    if ratio > 1 + tolerance and _above(new, old):
        return SLOWER
    if ratio < 1 / (1 + tolerance) and _above(old, new):
        return FASTER
    return SAME


def _above(slow: Measurement, fast: Measurement) -> bool:
    """Their noise does not meet, or is not known."""
    return slow.low_ms is None or fast.high_ms is None or slow.low_ms > fast.high_ms


def _versions(run: Run) -> dict[str, Any]:
    known = {name: run.machine.get(name) for name in _SOFTWARE}
    return {**known, **(run.machine.get("versions") or {})}


def _differences(new: Mapping[str, Any], old: Mapping[str, Any], names: Iterable[str] | None) -> list[str]:
    """In words; what one of them does not say does not differ."""
    shared = [name for name in names or new if new.get(name) is not None and old.get(name) is not None]
    return [f"{name}: {old[name]} before, {new[name]} now" for name in shared if new[name] != old[name]]


# -- as text ----------------------------------------------------------------------------------------------------------


def text(found: Comparison) -> str:
    lines = [f"{len(found.changes)} measurements were there before; {rule(found)}"]
    lines += [f"ANOTHER MACHINE: {line}" for line in found.machines]
    lines += [f"another version: {line}" for line in found.software]
    lines += [_line("SLOWER" if c.verdict == SLOWER else "BROKEN", c) for c in found.regressions]
    lines += [_line("faster", c) for c in found.improvements]
    return "\n".join([*lines, summary(found)])


def rule(found: Comparison) -> str:
    return (
        f"a change is one of more than {100 * found.tolerance:g}% whose noise does not meet the other's "
        "(10th to 90th percentile, or all rounds; where neither is known, the percentage alone)"
    )


def _line(mark: str, c: Change) -> str:
    where = f"{c.run.where} {c.run.name}: {c.new.contestant}, {c.what}"
    if c.ratio is None:
        return f"{mark}  {where}: {c.new.status} now: {c.new.reason}"
    return f"{mark} {c.ratio:.2f}x  {where}: {told(c.old)} before, {told(c.new)} now"


def told(m: Measurement) -> str:
    """Milliseconds and their noise."""
    if m.ms is None or not m.is_right:
        return m.status
    noise = "" if m.low_ms is None or m.high_ms is None else f" ({m.low_ms:.4g} – {m.high_ms:.4g})"
    return f"{m.ms:.4g} ms{noise}"


def summary(found: Comparison) -> str:
    counts = ", ".join(
        f"{found.count(verdict)} {verdict}" for verdict in (SLOWER, BROKEN, FASTER, SAME) if found.count(verdict)
    )
    lines = [f"Ours: {counts}."] if counts else []
    if found.count(ELSEWHERE):
        lines.append(
            f"{found.count(ELSEWHERE)} of ours were measured on another machine, and are not judged "
            "(--across-machines judges them)."
        )
    for ours, who in ((True, "ours"), (False, "peers")):
        mean = found.mean(ours)
        if mean is not None:
            lines.append(f"Time now over before, {who}: {mean[0]:.3f} (geometric mean of {mean[1]}).")
    if found.only_new or found.only_old:
        lines.append(f"Of ours {found.only_new} are new, and {found.only_old} are gone.")
    return " ".join(lines)
