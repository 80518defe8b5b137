"""The whole measurement: each contestant in a process of its own, on a GPU several at once, since nothing is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

from tilewise.bench import machine
from tilewise.bench.accuracy.cells import Cell, is_common
from tilewise.bench.accuracy.contestants import FORMAT, SLOW_TO_COMPILE
from tilewise.bench.accuracy.stage import Record, blank
from tilewise.bench.process import Child
from tilewise.bench.refusal import RefusedError, public
from tilewise.bench.stamp import stamp

SCHEMA = "accuracy 1"
STAGE = "tilewise.bench.accuracy.stage:Stage"
TIMEOUT = 240.0  # seconds for a cell: compilers included, hanging kernels excluded
AT_ONCE = 8  # processes that share a GPU

Results = dict[str, Any]
Say = Callable[[str], None]


@dataclass(eq=False)
class Measurement:
    device: str
    cells: list[Cell]
    names: list[str]  # of contestants
    say: Say = lambda line: None
    stage: str = STAGE
    _done: int = 0
    _lock: Lock = field(default_factory=Lock)
    _stopped: Event = field(default_factory=Event)

    def results(self, options: dict[str, Any]) -> Results:
        """What is written as JSON."""
        begin = time.monotonic()
        with _Process(self.stage, self.device) as process:
            about = process.ask("machine")
            missing = process.ask("missing", self.names)
        present = [FORMAT, *(name for name in self.names if name not in missing)]
        return {
            "schema": SCHEMA,
            **stamp(about),
            "options": options,
            "missing": {name: public(reason) for name, reason in missing.items()},
            "records": self._all(present),
            "seconds": round(time.monotonic() - begin, 1),
        }

    def _all(self, present: list[str]) -> list[Record]:
        """Cell by cell, everyone in their order."""
        width = 1 if self.device == "cpu" else min(AT_ONCE, machine.cores(), len(present))
        with ThreadPoolExecutor(width) as pool:
            try:
                found = list(pool.map(self._of, present))
            except BaseException:
                self._stopped.set()
                raise
        by_cell = [[r for records in found for r in records if _of_cell(r, cell)] for cell in self.cells]
        return [r for records in by_cell for r in records]

    def _of(self, name: str) -> list[Record]:
        """One contestant's records. One that breaks its process, or never ends, is not asked again."""
        mine = [cell for cell in self.cells if name not in SLOW_TO_COMPILE or is_common(cell)]
        records: list[Record] = []
        broken: RefusedError | None = None
        with _Process(self.stage, self.device) as process:
            for cell in mine:
                if self._stopped.is_set():
                    break
                try:
                    records.append(blank(cell, name, broken) if broken else process.ask("measure", cell, name))
                except RefusedError as error:
                    broken = error
                    records.append(blank(cell, name, error))
                self._tell(name, len(records), len(mine))
        return records

    def _tell(self, name: str, done: int, of: int) -> None:
        with self._lock:
            self.say(f"accuracy: {name}, {done}/{of}")


def _of_cell(r: Record, cell: Cell) -> bool:
    return all(r[key] == value for key, value in cell.describe().items())


class _Process:
    """A child with a stage."""

    def __init__(self, stage: str, device: str) -> None:
        self._child = Child(stage, device)

    def ask(self, method: str, *args: Any) -> Any:
        return self._child.ask(method, *args, timeout=TIMEOUT)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.close()
