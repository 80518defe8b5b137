"""The record of long runs: seeds that count once, pieces that add up, what is missing, and the table of a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import fuzz
from tests.fuzzing.running import long, records, systems
from tests.fuzzing.running.long import Long
from tests.fuzzing.running.records import Record, left, merged, missing, ranges, tell, united
from tests.fuzzing.running.report import Report
from tests.fuzzing.running.systems import TARGETS
from tests.fuzzing.running.trial import Verdict
from tests.proof import digest

MACHINE = {"gpu": None, "cpu": "a CPU", "cores": 2}
OF = {
    "system": "cpu", "isa": "avx2", "sources": "abc", "questions": "q", "machine": MACHINE, "commit": "c",
    "dirty": False, "date": "2026-01-01",
}  # fmt: skip


def _run(first: int, end: int, **more: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("computed", "backward", "refused", "redrawn", "plans", "wrong"), 1)
    made = {**OF, **counts, "calls": end - first, "worst": 0.5, "seconds": 2.0, "seeds": [[first, end]]}
    return {**made, **more}


def test_seeds_are_kept_as_ranges() -> None:
    assert ranges([5, 3, 4, 9]) == [[3, 6], [9, 10]]
    assert united([[0, 5]], [[3, 8], [9, 10]], []) == [[0, 8], [9, 10]]
    blocks = missing([[0, 7], [10, 12]], first=0, size=5)
    assert [list(next(blocks)) for _ in range(3)] == [[7, 8, 9], [12, 13, 14], [15, 16, 17, 18, 19]]
    assert next(missing([], first=7, size=5)) == range(7, 10)  # what shares a variant stays together


def test_pieces_of_the_same_add_up_and_others_stand_beside_them(tmp_path: Path) -> None:
    record = Record(tmp_path / "fuzz.json")
    for run in (_run(0, 10), _run(10, 30, worst=0.75, seconds=3.5, date="2026-01-02"), _run(0, 5, sources="other")):
        record.put(run)
    record.put(_run(0, 4, isa="portable"))
    with pytest.raises(ValueError, match="on record already"):
        record.put(_run(29, 31, machine={**MACHINE, "cpu": "another"}))  # whoever did them
    record.write()
    again = Record(tmp_path / "fuzz.json")
    one = next(run for run in again.runs if run["isa"] == "avx2" and run["sources"] == "abc")
    assert (one["calls"], one["seeds"], one["worst"], one["backward"]) == (30, [[0, 30]], 0.75, 2)
    assert (one["seconds"], one["date"]) == (5.5, "2026-01-02")
    assert len(again.runs) == 3 and again.done(_run(0, 0)) == [[0, 30]]
    assert again.calls("cpu", "abc") == 34 and again.calls("cpu", "abc", "portable") == 4
    assert left(again, "abc")["cpu"] == TARGETS["cpu"] - 34 and left(again, "abc")["numpy"] == TARGETS["numpy"]


def test_what_other_machines_bring_counts_once(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    for path, run in ((ours, _run(0, 10)), (theirs, _run(10, 12, machine={**MACHINE, "cores": 16}))):
        record = Record(path)
        record.put(run)
        record.write()
    assert merged(ours, [theirs]) == []
    assert Record(ours).calls("cpu", "abc") == 12 and len(Record(ours).runs) == 2
    (left_out,) = merged(ours, [theirs])
    assert str(theirs) in left_out and "already" in left_out
    assert Record(ours).calls("cpu", "abc") == 12


def test_a_long_run_goes_on_where_the_record_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fuzz.json"
    record = Record(path)
    record.put(_run(0, 10))
    record.write()
    going = Long(path, dict(OF), target=25)
    blocks = list(going.blocks(0, 5))
    assert going.left == 15 and [list(block) for block in blocks] == [list(range(n, n + 5)) for n in (10, 15, 20)]
    report = Report()
    for seed in blocks[0]:
        report.add(seed, Verdict("float32", "dense", ("full",)))
    going.take(report)  # it is not yet time
    assert Record(path).done(dict(OF)) == [[0, 10]]
    monkeypatch.setattr(long, "EVERY", 0.0)
    for last in (15, 16, 16):  # what was put is not put again
        going.take(report)
        assert Record(path).done(dict(OF)) == [[0, last]]
        if last == 15:
            report.add(15, Verdict("float32", "dense", ("full",)))
    assert Record(path).calls("cpu", "abc") == 16
    assert Long(path, dict(OF), target=12).left == 0
    assert sum(map(len, Long(path, dict(OF), target=18).blocks(0, 5))) == 2


def test_the_command_puts_its_run_on_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "fuzz.json")
    command = ["--long", "numpy", "--results", path, "--commit", "abc"]
    assert fuzz.main([*command, "--cases", "20"]) == 0
    assert fuzz.main([*command, "--cases", "30"]) == 0
    out = capsys.readouterr().out
    assert "numpy: 20 calls left" in out and "numpy: 10 calls left" in out
    (run,) = Record(Path(path)).runs
    assert run["calls"] == 30 and run["seeds"] == [[0, 30]] and run["wrong"] == 0
    assert run["sources"] == digest(records.ROOT / "tilewise") and (run["commit"], run["dirty"]) == ("abc", None)
    assert fuzz.main(["--left", "--results", path]) == 0
    assert f"numpy: {TARGETS['numpy'] - 30:,} calls" in capsys.readouterr().out


def test_all_is_a_command_for_each_system_that_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "can_run", lambda name: name in ("cpu", "numpy", "triton (interpreted)"))
    monkeypatch.setattr(systems, "isas", lambda name: ("portable", "avx2") if name == "cpu" else (None,))
    made = long.commands(tmp_path / "fuzz.json", 100, ["--jobs", "2"])
    named = [command[command.index("--long") + 1] for command, _ in made]
    assert named == ["cpu", "cpu", "numpy", "triton"]
    assert all(command[-2:] == ["--seconds", "25"] for command, _ in made)
    assert made[1][0][made[1][0].index("--isa") + 1] == "avx2"
    assert made[3][1]["TRITON_INTERPRET"] == "1"
    assert long.share("cpu", "avx2") == TARGETS["cpu"] / 2 and long.share("numpy", None) == TARGETS["numpy"]


def test_the_page_tells_what_is_on_record(tmp_path: Path) -> None:
    path, page = tmp_path / "fuzz.json", tmp_path / "page.md"
    page.write_text("before\n<!-- fuzz -->\nold\n<!-- end -->\nafter\n")
    record = Record(path)
    record.put(_run(0, 1234567))
    record.put(_run(0, 5, isa=None, system="cuda", machine={**MACHINE, "gpu": "H200"}))
    record.write()
    tell(path, page)
    text = page.read_text()
    assert "| `cpu`, avx2 | 1,234,567 | 1 | 1 | 1 | 0.50 of its limit | abc | a CPU, 2 cores |" in text
    assert "| `cuda` | 5 |" in text and "H200 |" in text and "old" not in text
    assert text.startswith("before\n<!-- fuzz -->\n") and text.endswith("<!-- end -->\nafter\n")


def test_the_record_that_is_kept_can_be_read() -> None:
    for run in Record(records.KEPT).runs:
        assert run["system"] in TARGETS and run["wrong"] == 0
        assert run["calls"] == records.count(run["seeds"])
    if records.KEPT.exists():
        assert json.loads(records.KEPT.read_text())["schema"] == records.SCHEMA
