"""What long runs of the fuzz have passed, in results/fuzz.json: seeds and counts, by system and by sources.

A run is of one system (on one of the engine's instruction sets), of sources and of questions, each told by a digest.
Runs of the same add up, seed by seed: a seed that is there already counts once. Other sources begin anew, beside them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tests import proof
from tests.fuzzing.running.systems import TARGETS

ROOT = Path(__file__).resolve().parents[3]
KEPT, PAGE = ROOT / "results" / "fuzz.json", ROOT / "docs" / "contract.md"
SCHEMA = 1
SUMS = ("calls", "computed", "backward", "refused", "redrawn", "plans", "wrong", "seconds")

Run = dict[str, Any]
Ranges = list[list[int]]  # of seeds, each with its first and the one after its last


# -- seeds ------------------------------------------------------------------------------------------------------------


def ranges(seeds: Iterable[int]) -> Ranges:
    found: Ranges = []
    for seed in sorted(seeds):
        if found and found[-1][1] == seed:
            found[-1][1] += 1
        else:
            found.append([seed, seed + 1])
    return found


def united(*several: Ranges) -> Ranges:
    found: Ranges = []
    for first, end in sorted(x for one in several for x in one):
        if found and first <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([first, end])
    return found


def count(seeds: Ranges) -> int:
    return sum(end - first for first, end in seeds)


def missing(done: Ranges, first: int, size: int) -> Iterable[range]:
    """Blocks of seeds that are not done yet, from the first on, without an end. A block is of one variant's seeds."""
    at, held = first - first % size, united(done)
    while True:
        left = [seed for seed in range(at, at + size) if seed >= first]
        for begin, end in held:
            if begin < at + size and end > at:
                left = [seed for seed in left if not begin <= seed < end]
        for begin, end in ranges(left):
            yield range(begin, end)
        at += size


# -- the record -------------------------------------------------------------------------------------------------------


def of_now(system: str, isa: str | None, commit: str | None = None) -> Run:
    """What a run of this system is of, here and now."""
    about = proof.about()
    return {
        "system": system, "isa": isa, "sources": about["sources"],
        "questions": proof.digest(ROOT / "tests" / "fuzzing"),
        "machine": about["machine"], **proof.commit(commit), "date": date.today().isoformat(), "seeds": [],
    }  # fmt: skip


class Record:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[Run] = json.loads(path.read_text())["runs"] if path.exists() else []

    def done(self, of: Run) -> Ranges:
        """The seeds that were judged of the same system, sources and questions, anywhere."""
        return united(*(run["seeds"] for run in self.runs if _same(run, of)))

    def calls(self, system: str, sources: str, isa: str | None = None) -> int:
        """Calls judged of these sources; on one instruction set, or on all."""
        chosen = (run for run in self.runs if (run["system"], run["sources"]) == (system, sources))
        return sum(run["calls"] for run in chosen if isa in (None, run["isa"]))

    def put(self, run: Run) -> None:
        """Add a run to what is there of the same. ValueError if some of its seeds are there already."""
        if count(united(self.done(run), run["seeds"])) < count(self.done(run)) + count(run["seeds"]):
            raise ValueError(f"{run['system']}: some of the seeds {run['seeds']} are on record already")
        before = next((x for x in self.runs if _same(x, run) and x["machine"] == run["machine"]), None)
        if before is not None:
            self.runs.remove(before)
            run = {**run, **{name: before[name] + run[name] for name in SUMS}}
            run |= {"seeds": united(before["seeds"], run["seeds"]), "worst": max(before["worst"], run["worst"])}
        self.runs.append(run)

    def write(self) -> None:
        ordered = sorted(self.runs, key=lambda x: (list(TARGETS).index(x["system"]), x["isa"] or "", x["date"]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(f"  {json.dumps(run)}" for run in ordered)
        self.path.write_text(f'{{"schema": {SCHEMA}, "runs": [\n{lines}\n]}}\n')


def _same(one: Run, other: Run) -> bool:
    return all(one[name] == other[name] for name in ("system", "isa", "sources", "questions"))


def merged(path: Path, files: Sequence[Path]) -> list[str]:
    """Add what other machines' files have; what was not, since its seeds are there already."""
    record, left = Record(path), []
    for file in files:
        for run in Record(file).runs:
            try:
                record.put(run)
            except ValueError as reason:
                left.append(f"{file}: {reason}")
    record.write()
    return left


# -- what is told -----------------------------------------------------------------------------------------------------


def left(record: Record, sources: str) -> dict[str, int]:
    """How many calls of each system are missing, with these sources."""
    wanted = {system: target - record.calls(system, sources) for system, target in TARGETS.items()}
    return {system: number for system, number in wanted.items() if number > 0}


def table(record: Record) -> str:
    """A row for each system, and its instruction set, and the sources that it had."""
    rows = ["| system | calls | backward as well | refused | wrong | largest error | sources | machine |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for run in record.runs:
        name = f"`{run['system']}`" + (f", {run['isa']}" if run["isa"] else "")
        machine = run["machine"]["gpu"] or f"{run['machine']['cpu']}, {run['machine']['cores']} cores"
        rows.append(
            f"| {name} | {run['calls']:,} | {run['backward']:,} | {run['refused']:,} | {run['wrong']:,} "
            f"| {run['worst']:.2f} of its limit | {run['sources'][:10]} | {machine} |"
        )
    return "\n".join(rows)


def tell(path: Path = KEPT, page: Path = PAGE) -> None:
    text = re.sub(
        r"(<!-- fuzz -->\n).*?(<!-- end -->)", lambda found: f"{found[1]}{table(Record(path))}\n{found[2]}",
        page.read_text(), flags=re.DOTALL,
    )  # fmt: skip
    page.write_text(text)
