"""The sweep: every cell, every contestant, one record each, with all numbers or the reason there are none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from tilewise.bench import machine, measure, roofline, table
from tilewise.bench.contestants import Contestant
from tilewise.bench.judge import Judge, Verdict
from tilewise.bench.problem import Cell, Problem
from tilewise.bench.refusal import RefusedError, public, refusal
from tilewise.bench.stamp import stamp
from tilewise.bench.team import Team
from tilewise.explanation import size

SCHEMA = 2
MEMORY_SHARE = 0.25  # of the available memory that a contestant may be known to need
PATIENCE = 20  # budgets: a single call that is expected to take longer is not made

Record = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How a sweep is measured."""

    repeat: int = 20
    budget: float = 2.0  # seconds of repetitions for a contestant in a cell
    memory: bool = True
    threads: int | None = None  # of every contestant; None: its own choice
    seed: int = 0
    least: int = 1  # repetitions, however long they take
    timeout: float = 120.0  # seconds beyond what a contestant's pace promises, until it is given up


@dataclass(eq=False)
class Sweep:
    """Runs cells one after the other, and remembers how fast each contestant was."""

    contestants: Sequence[Contestant]
    settings: Settings = field(default_factory=Settings)
    say: Say = lambda line: None
    _pace: dict[tuple[Any, ...], tuple[float, float]] = field(default_factory=dict)  # seconds, and the work they did

    def run(self, cells: Iterable[Cell]) -> list[Record]:
        """All records; stopped by the keyboard, those of the cells that were done."""
        records: list[Record] = []
        ordered = sorted(cells, key=lambda c: c.pairs)
        with contextlib.suppress(KeyboardInterrupt), Team(self.settings.threads) as team:
            for i, cell in enumerate(ordered, 1):
                self.say(f"{i}/{len(ordered)}: {table.title(cell.describe())}")
                records += self.cell(cell, team)
        return records

    def cell(self, cell: Cell, team: Team) -> list[Record]:
        """One record a contestant, in their order."""
        # The parent has a copy, to judge by, and so has every contestant's process.
        refused = _too_large((1 + len(self.contestants)) * cell.input_bytes, "the inputs, a copy for each process,")
        if refused is not None:
            return [_record(cell.describe(), c, refused) for c in self.contestants]
        problem = Problem.make(cell, self.settings.seed)
        entrants, records = self._enter(problem, team)
        seconds, failed = measure.round_robin(
            {name: partial(self._turn, team, cell, name, e) for name, e in entrants.items()},
            {name: e.count for name, e in entrants.items()},
        )
        for contestant in self.contestants:
            name = contestant.name
            if name in failed:
                records[name] = _record(problem.describe(), contestant, refusal(failed[name]))
            elif name in entrants:
                records[name] = self._result(problem, contestant, entrants[name], seconds[name])
                records[name]["rest_ms"] = _milliseconds(team.rests[name])
                if self.settings.memory:
                    records[name].update(self._memory(cell, name, entrants[name], team))
        ordered = [records[c.name] for c in self.contestants]
        _compare(ordered)
        return ordered

    def _enter(self, problem: Problem, team: Team) -> tuple[dict[str, _Entrant], dict[str, Record]]:
        """Set up, judge and pace every contestant; a record already for those who do not get that far."""
        entrants: dict[str, _Entrant] = {}
        refused: dict[str, Record] = {}
        against = Judge(problem)
        for contestant in self.contestants:
            try:
                entrants[contestant.name] = self._entrant(problem, contestant, against, team)
            except Exception as error:  # a peer's failure is a result of the benchmark
                refused[contestant.name] = _record(problem.describe(), contestant, refusal(error))
        return entrants, refused

    def _entrant(self, problem: Problem, contestant: Contestant, against: Judge, team: Team) -> _Entrant:
        refused = _too_large(contestant.needs(problem), "the full matrix and dense masks")
        refused = refused or self._too_slow(problem, contestant)
        if refused is not None:
            raise refused
        ask = partial(team.ask, contestant.name, timeout=self.settings.timeout)
        outputs, held_bytes = ask("enter", problem.cell, self.settings.seed)
        verdict = against.verdict(outputs)
        takes = ask("pace")
        self._pace[_pace_key(problem.cell, contestant)] = takes, _work(problem, contestant)
        count = measure.repetitions(takes, self.settings.budget, self.settings.repeat, self.settings.least)
        return _Entrant(verdict, int(against.rows.size), held_bytes, takes, count)

    def _turn(self, team: Team, cell: Cell, name: str, entrant: _Entrant, count: int) -> list[float]:
        timeout = self.settings.timeout + 10 * count * entrant.takes
        seconds: list[float] = team.ask(name, "turn", count, timeout=timeout)
        if cell.n_q == 1 and cell.device == "cpu" and (rate := team.plain_read(name, self.settings.timeout)):
            entrant.plain_reads.append(roofline.PlainRead.beside(cell, seconds, rate))
        return seconds

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
            held_bytes=entrant.held_bytes,
            # JSON has no infinity: a missing error of a wrong contestant is a NaN or an infinity in its output.
            error=verdict.error if verdict.error < float("inf") else None, error_rows=entrant.rows,
        )  # fmt: skip
        if problem.cell.n_q == 1 and times.median:
            cache = machine.cache_bytes() if problem.cell.device == "cpu" else None
            record.update(roofline.reading(problem.cell, times.median, entrant.plain_reads, cache))
        return record

    def _memory(self, cell: Cell, name: str, entrant: _Entrant, team: Team) -> Record:
        timeout = self.settings.timeout + 10 * entrant.takes
        try:
            return {"extra_bytes": team.extra_bytes(name, cell, self.settings.seed, timeout)}
        except Exception as error:  # the time stands, and the record says why there is no memory
            refused = refusal(error)
            return {"memory_reason": public(f"{refused.status}: {refused.reason}")}


@dataclass(frozen=True)
class _Entrant:
    """A contestant that is ready to be timed."""

    verdict: Verdict
    rows: int  # that were judged
    held_bytes: int
    takes: float  # seconds of a call
    count: int
    plain_reads: list[roofline.PlainRead] = field(default_factory=list)  # one a turn


def results(
    records: list[Record], options: dict[str, Any], missing: dict[str, str], roof: roofline.Roof = roofline.UNKNOWN,
    load: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What is written as JSON. load: of the machine, before the run."""
    for record in records:
        record.update(roofline.fractions(record, roof))
    return {
        "schema": SCHEMA,
        **stamp({**machine.describe(options.get("device", "cpu"), options.get("threads")), **asdict(roof)}),
        "load": load,
        "options": options,
        "missing": {name: public(reason) for name, reason in missing.items()},
        "records": records,
    }


def _record(cell: Record, contestant: Contestant, refused: RefusedError | None) -> Record:
    """A record with every field; numbers come later, if they come."""
    numbers = dict.fromkeys(
        ("median_ms", "min_ms", "p10_ms", "p90_ms", "repetitions", "gflops", "fraction", "read_gbs",
         "plain_read_gbs", "read_fraction", "times_cache", "fits_cache", "ratio", "error", "error_rows", "held_bytes",
         "extra_bytes", "memory_reason", "rest_ms")
    )  # fmt: skip
    status, reason = ("ok", None) if refused is None else (refused.status, public(refused.reason))
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


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _pace_key(cell: Cell, contestant: Contestant) -> tuple[Any, ...]:
    return contestant.name, cell.variant, cell.d, cell.dtype, cell.backward


def _work(problem: Problem, contestant: Contestant) -> float:
    """What a contestant's time grows with: ours with the visible pairs, a peer's at worst with all pairs."""
    return float(problem.visible if contestant.ours else problem.cell.pairs)


def _too_large(needed: int, what: str) -> RefusedError | None:
    available = machine.available_memory()
    if available is None or needed <= MEMORY_SHARE * available:
        return None
    share = f"{MEMORY_SHARE:.0%} of the {size(available)} available"
    return RefusedError("skipped", f"{what} would take {needed} bytes ({size(needed)}), more than {share}")
