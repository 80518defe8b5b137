"""Long runs: they go on where the record ends, seed by seed, and add to it what they judged every so often."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests import proof
from tests.fuzzing.running import systems
from tests.fuzzing.running.records import ROOT, SUMS, Record, Run, left, missing, ranges
from tests.fuzzing.running.report import Report
from tests.fuzzing.running.systems import TARGETS

EVERY = 60.0  # seconds between two entries


class Long:
    """One system's long run. path: the record's; of: what it is of (see records.of_now)."""

    def __init__(self, path: Path, of: Run, target: int) -> None:
        self.path, self.of = path, of
        record = Record(path)
        self.done = record.done(of)
        self.left = max(target - record.calls(of["system"], of["sources"], of["isa"]), 0)
        self._since = time.monotonic()
        self._put = dict.fromkeys(SUMS, 0)  # of the report, on record already
        self._seeds = 0

    def blocks(self, first: int, size: int) -> Iterator[range]:
        """Seeds that are not on record yet; as many as are left to do."""
        given = 0
        for block in missing(self.done, first, size):
            if given >= self.left:
                return
            yield block[: self.left - given]
            given += len(block)

    def take(self, report: Report, at_once: bool = False) -> None:
        """Put what was judged since the last time on record, if it is time to."""
        seeds = report.seeds[self._seeds :]
        if not seeds or (not at_once and time.monotonic() - self._since < EVERY):
            return
        self._since, self._seeds = time.monotonic(), len(report.seeds)
        now = {**report.counts(), "seconds": round(report.seconds, 1)}
        sums = {name: round(now[name] - self._put[name], 1) for name in SUMS}
        self._put = {name: now[name] for name in SUMS}
        record = Record(self.path)  # another run may have written to it
        record.put({**self.of, **sums, "worst": now["worst"], "seeds": ranges(seeds)})
        record.write()


def share(system: str, isa: str | None) -> int:
    """How many calls of the system's target an instruction set has to pass."""
    return -(-TARGETS[system] // (1 if isa is None else len(systems.isas(system))))


def commands(path: Path, seconds: float | None, further: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """A command for each system that can run here and has calls left, with its environment; the time is shared."""
    still = left(Record(path), proof.digest(ROOT / "tilewise"))
    runs = [(name, isa) for name in still if systems.can_run(name) for isa in systems.isas(name)]
    made = []
    for name, isa in runs:
        system, _, interpreted = name.partition(" ")
        command = [sys.executable, "tests/fuzz.py", "--long", system, "--results", str(path), *further]
        command += [] if isa is None else ["--isa", isa]
        command += [] if seconds is None else ["--seconds", f"{seconds / len(runs):.0f}"]
        made.append((command, {**os.environ, **({"TRITON_INTERPRET": "1"} if interpreted else {})}))
    return made
