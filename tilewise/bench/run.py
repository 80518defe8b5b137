"""The sweep: every cell, every contestant, one record each, with all numbers or the reason there are none."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from tilewise._version import __version__
from tilewise.bench import judge, machine, measure, memory, table
from tilewise.bench.contestants import Contestant, Entry, RefusedError
from tilewise.bench.judge import Judge, Verdict
from tilewise.bench.problem import Cell, Problem
from tilewise.explanation import size

SCHEMA = 1
MEMORY_SHARE = 0.25  # of the available memory that a contestant may be known to need
PATIENCE = 20  # budgets: a single call that is expected to take longer is not made
_PATH = re.compile(r"(?:[A-Za-z]:\\|~?/)[\w.+-]+(?:[\\/][\w.+-]+)+")

Record = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How a sweep is measured."""

    repeat: int = 20
    budget: float = 2.0  # seconds of repetitions for a contestant in a cell
    memory: bool = True
    threads: int | None = None
    seed: int = 0


@dataclass(eq=False)
class Sweep:
    """Runs cells one after the other, and remembers how fast each contestant was."""

    contestants: Sequence[Contestant]
    settings: Settings = field(default_factory=Settings)
    timer: measure.Timer = field(default_factory=measure.wall_timer)
    say: Say = lambda line: None
    _pace: dict[tuple[Any, ...], tuple[float, float]] = field(default_factory=dict)  # seconds, and the work they did

    def run(self, cells: Iterable[Cell]) -> list[Record]:
        """All records; stopped by the keyboard, those of the cells that were done."""
        records: list[Record] = []
        with contextlib.suppress(KeyboardInterrupt):
            for cell in sorted(cells, key=lambda c: c.n):
                records += self.cell(cell)
        return records

    def cell(self, cell: Cell) -> list[Record]:
        """One record a contestant, in their order."""
        self.say(table.title(cell.describe()))
        refusal = _too_large(cell.input_bytes, "the inputs")
        if refusal is not None:
            return [_record(cell.describe(), c, refusal) for c in self.contestants]
        problem = Problem.make(cell, self.settings.seed)
        entrants, records = self._enter(problem)
        seconds, failed = measure.round_robin(
            {name: e.action for name, e in entrants.items()},
            {name: e.count for name, e in entrants.items()},
            self.timer,
        )
        for contestant in self.contestants:
            name = contestant.name
            if name in failed:
                records[name] = _record(problem.describe(), contestant, _failure(failed[name]))
            elif name in entrants:
                records[name] = self._result(problem, contestant, entrants[name], seconds[name])
        ordered = [records[c.name] for c in self.contestants]
        _compare(ordered)
        return ordered

    def _enter(self, problem: Problem) -> tuple[dict[str, _Entrant], dict[str, Record]]:
        """Set up, judge and warm up every contestant; a record already for those who do not get that far."""
        entrants: dict[str, _Entrant] = {}
        refused: dict[str, Record] = {}
        against = Judge(problem)
        for contestant in self.contestants:
            try:
                entrants[contestant.name] = self._entrant(problem, contestant, against)
            except Exception as error:  # a peer's failure is a result of the benchmark
                refused[contestant.name] = _record(problem.describe(), contestant, _failure(error))
        return entrants, refused

    def _entrant(self, problem: Problem, contestant: Contestant, against: Judge) -> _Entrant:
        refusal = _too_large(contestant.needs(problem), "the full matrix and dense masks")
        refusal = refusal or self._too_slow(problem, contestant)
        if refusal is not None:
            raise refusal
        entry = contestant.enter(problem)
        d_out = entry.put(problem.d_out)
        judge.poison([entry.put(x) for x in (problem.q, problem.k, problem.v)])
        probe = entry.put(against.d_out) if problem.cell.backward else d_out
        verdict = against.verdict(entry.run(probe))  # the first call also loads libraries and compiles: not timed
        took = self.timer(lambda: entry.run(d_out))
        self._pace[_pace_key(problem.cell, contestant)] = took, _work(problem, contestant)
        count = measure.repetitions(took, self.settings.budget, self.settings.repeat)
        return _Entrant(entry, lambda: entry.run(d_out), verdict, count, int(against.rows.size))

    def _too_slow(self, problem: Problem, contestant: Contestant) -> RefusedError | None:
        if _pace_key(problem.cell, contestant) not in self._pace:
            return None
        seconds, work = self._pace[_pace_key(problem.cell, contestant)]
        expected, limit = seconds * _work(problem, contestant) / work, PATIENCE * self.settings.budget
        if expected <= limit:
            return None
        why = f"a call would take about {expected:.0f} s, judging by a smaller n; the limit is {limit:.0f} s"
        return RefusedError("skipped", why)

    def _result(self, problem: Problem, contestant: Contestant, entrant: _Entrant, seconds: list[float]) -> Record:
        times, verdict = measure.Times.of(seconds), entrant.verdict
        why = f"error {verdict.error:.2g} against the reference, at most {verdict.allowed:.2g} is rounding"
        record = _record(problem.describe(), contestant, RefusedError("wrong", why) if verdict.wrong else None)
        record.update(
            median_ms=times.median * 1e3, min_ms=times.min * 1e3, p10_ms=times.p10 * 1e3, p90_ms=times.p90 * 1e3,
            repetitions=times.repetitions, gflops=problem.flops / times.median / 1e9 if times.median else None,
            held_bytes=entrant.entry.held_bytes,
            # JSON has no infinity: a missing error of a wrong contestant is a NaN or an infinity in its output.
            error=verdict.error if verdict.error < float("inf") else None, error_rows=entrant.rows,
        )  # fmt: skip
        if self.settings.memory:
            record.update(self._memory(problem.cell, contestant, entrant, times.median))
        return record

    def _memory(self, cell: Cell, contestant: Contestant, entrant: _Entrant, seconds: float) -> Record:
        try:
            if cell.device != "cpu":
                return {"extra_bytes": memory.cuda_extra_bytes(entrant.action, entrant.entry.held_bytes)}
            timeout = 120 + 3 * seconds
            settings = self.settings
            return {"extra_bytes": memory.extra_bytes(cell, contestant.name, settings.seed, settings.threads, timeout)}
        except Exception as error:  # the time stands, and the record says why there is no memory
            return {"memory_reason": _public(f"{_failure(error).status}: {error}")}


@dataclass(frozen=True, eq=False)
class _Entrant:
    """A contestant that is ready to be timed."""

    entry: Entry
    action: Callable[[], Any]
    verdict: Verdict
    count: int
    rows: int


def results(records: list[Record], options: dict[str, Any], missing: dict[str, str], device: str) -> dict[str, Any]:
    """What is written as JSON."""
    return {
        "schema": SCHEMA,
        "tilewise": __version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine.describe(device),
        "options": options,
        "missing": {name: _public(reason) for name, reason in missing.items()},
        "records": records,
    }


def _record(cell: Record, contestant: Contestant, refusal: RefusedError | None) -> Record:
    """A record with every field; numbers come later, if they come."""
    numbers = dict.fromkeys(
        ("median_ms", "min_ms", "p10_ms", "p90_ms", "repetitions", "gflops", "ratio", "error", "error_rows",
         "held_bytes", "extra_bytes", "memory_reason")
    )  # fmt: skip
    status, reason = ("ok", None) if refusal is None else (refusal.status, _public(refusal.reason))
    return {
        **cell,
        "contestant": contestant.name,
        "ours": contestant.ours,
        "status": status,
        "reason": reason,
        **numbers,
    }


def _compare(records: list[Record]) -> None:
    """ratio: the best right peer's time over the contestant's, so that 2 is twice as fast as the best peer."""
    peers = [r["median_ms"] for r in records if not r["ours"] and r["status"] == "ok"]
    for record in records:
        if record["median_ms"] and peers:
            record["ratio"] = min(peers) / record["median_ms"]


def _pace_key(cell: Cell, contestant: Contestant) -> tuple[Any, ...]:
    return contestant.name, cell.variant, cell.d, cell.dtype, cell.backward


def _work(problem: Problem, contestant: Contestant) -> float:
    """What a contestant's time grows with: ours with the visible pairs, a peer's at worst with n squared."""
    return float(problem.visible if contestant.ours else problem.cell.n**2)


def _too_large(needed: int, what: str) -> RefusedError | None:
    available = machine.available_memory()
    if available is None or needed <= MEMORY_SHARE * available:
        return None
    share = f"{MEMORY_SHARE:.0%} of the {size(available)} available"
    return RefusedError("skipped", f"{what} would take {needed} bytes ({size(needed)}), more than {share}")


def _failure(error: Exception) -> RefusedError:
    if isinstance(error, RefusedError):
        return error
    told = f"{type(error).__name__}: {error}".splitlines()[0]
    starved = isinstance(error, MemoryError) or "out of memory" in told or "can't allocate memory" in told
    if not starved:
        return RefusedError("failed", told)
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", told)
    return RefusedError("out of memory", f"it asked for {asked[1]}" if asked else told)


def _public(text: str) -> str:
    """A reason without paths, which name users."""
    return _PATH.sub("<path>", text)
