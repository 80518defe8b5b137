"""The script that runs what CI cannot: its processes, their logs and what it tells of them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import proof, prove_gpu
from tests.proof import Outcome, Record
from tests.prove_gpu import Proof


def _python(name: str, text: str) -> Proof:
    return Proof(name, (sys.executable, "-c", text))


def test_all_run_at_once_and_each_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = "import time; time.sleep(0.5); print('3 passed in 1 s')"
    began = time.monotonic()
    outcomes = list(prove_gpu.run([_python("one", slow), _python("two", slow)], tmp_path, patience=60))
    assert time.monotonic() - began < 20
    assert all(x.held and 0.5 <= x.seconds < 20 for x in outcomes) and {x.name for x in outcomes} == {"one", "two"}
    out = capsys.readouterr().out
    assert "one: held" in out and "two: held" in out and "  3 passed in 1 s" in out
    assert (tmp_path / "one.txt").read_text() == "3 passed in 1 s\n"


def test_what_fails_and_what_does_not_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bad,) = prove_gpu.run([_python("bad", "print('FAILED here'); raise SystemExit(2)")], tmp_path, patience=60)
    assert not bad.held
    assert "bad: failed (2)" in capsys.readouterr().out
    # A shell's background programs begin with Ctrl-C ignored.
    heeds = "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    endless = f"{heeds}try: time.sleep(60)\nexcept KeyboardInterrupt: print('7 cases in 1 s', flush=True)"
    (left,) = prove_gpu.run([_python("endless", endless)], tmp_path, patience=2)
    assert not left.held
    told = capsys.readouterr().out
    assert "endless: did not end" in told and "7 cases in 1 s" in told


def test_every_system_of_gpus_gets_random_calls() -> None:
    """Those that long runs are wanted of, but for rungs of one that is there; the slowest to compile get the fewest."""
    from tests.fuzzing.running.systems import TARGETS, check_name

    kernels = {kernel for kernel, _ in prove_gpu.FUZZED.values()}
    for kernel in kernels:
        check_name(kernel)
    assert {name for name in TARGETS if name.startswith(("cuda/un", "tilelang", "cute"))} - {"tilelang-c"} <= kernels
    commands = {x.name: x.command for x in prove_gpu.random_calls(jobs=4, cases=2000, seed=9)}
    assert commands["fuzz-cuda"][-6:] == ("--seed", "9", "--cases", "2000", "--jobs", "4")
    assert commands["fuzz-cute"][-3] == "100"


def test_the_lines_that_count() -> None:
    log = "....F.\nE   ValueError: no\nFAILED tests/x.py::y\n===== 1 failed, 5 passed in 3 s =====\nnothing\n"
    assert prove_gpu.told(log) == [
        "E   ValueError: no",
        "FAILED tests/x.py::y",
        "===== 1 failed, 5 passed in 3 s =====",
    ]
    assert prove_gpu.told("========= RACECHECK SUMMARY: 0 hazards displayed") != []


def test_sanitizers_look_at_tests_that_there_are() -> None:
    """The expressions that select them still do: every kind of head of Hopper's backward pass among them."""
    names: list[str] = []

    class Names:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            names.extend(item.name for item in session.items)

    by_tool = {proof.name: proof.command[-1] for proof in prove_gpu.sanitizers()}
    for cases in (by_tool["initcheck"], by_tool["racecheck"]):
        names.clear()
        assert pytest.main(["--collect-only", "-qq", "-m", "gpu", "tests/conformance", "-k", cases], [Names()]) == 0
    for kernel in ("forward_sm90", "unordered"):
        backward = [name for name in names if name.startswith(f"test_backward_on_a_gpu[cuda/{kernel}-")]
        assert any("full | several tiles" in name for name in backward)
        assert any("full | head of 128" in name for name in backward)


# -- proof.json -------------------------------------------------------------------------------------------------------

FUZZ = """FAILED: out is off
  again: python tests/fuzz.py --kernel cuda --only 1234 --backward-share 0.3 --half-share 0.5 --shapes 20

2,000 cases in 301 s (7 a second), 1 failures
  forward 2,000, backward as well 612
  largest error: 0.512 of its limit (seed 77)
"""
LOGS: dict[str, tuple[str, dict[str, Any]]] = {
    "quiet": (
        "....s\n1203 passed, 4 skipped, 9801 deselected in 412.33s (0:06:52)\n",
        {"tests": {"passed": 1203, "failed": 0, "skipped": 4, "errors": 0}},
    ),
    "red": (
        "FAILED tests/x.py::y\n=== 2 failed, 10 passed, 1 error, 3 warnings in 3.10s ===\n",
        {"tests": {"passed": 10, "failed": 2, "skipped": 0, "errors": 1}},
    ),
    "memcheck": (
        "========= COMPUTE-SANITIZER\n5 passed in 60.00s\n========= ERROR SUMMARY: 0 errors\n",
        {"tests": {"passed": 5, "failed": 0, "skipped": 0, "errors": 0}, "sanitizer": ["ERROR SUMMARY: 0 errors"]},
    ),
    "racecheck": (
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n",
        {"sanitizer": ["RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"]},
    ),
    "fuzz": (
        FUZZ,
        {
            "fuzz": {
                "cases": 2000,
                "failures": 1,
                "failed_seeds": [1234],
                "largest_error": {"of_its_limit": 0.512, "seed": 77},
            }
        },
    ),
    "interrupted": ("....\n=== short test summary info ===\nKilled\n", {}),
}


@pytest.mark.parametrize("name", LOGS)
def test_logs_in_numbers(name: str) -> None:
    log, want = LOGS[name]
    assert proof.counts(log) == want


def test_a_real_summary_of_the_fuzz_is_understood() -> None:
    """Sample logs grow old; the report does not."""
    from tests.fuzzing.running.report import Report

    report = Report(cases=12_345, worst=(0.25, 99), failures=[(7, "off")])
    found = proof.counts(report.summary())["fuzz"]
    assert (found["cases"], found["failures"]) == (12_345, 1)
    assert found["largest_error"] == {"of_its_limit": 0.25, "seed": 99}


def _outcome(name: str, how: str = "held", log: str = "") -> Outcome:
    return Outcome(name, (sys.executable, "tests/fuzz.py", "--seed", "5"), how, 1.6, log)


ABC = {"commit": "abc", "dirty": False}


def test_the_record_grows_with_runs_of_the_same_sources(tmp_path: Path) -> None:
    about = {"schema": 1, "sources": "123", "machine": {"gpu": "H200"}}
    Record(tmp_path, about, ABC, ("one", "two")).add(_outcome("two", log=FUZZ))
    made = json.loads((tmp_path / "proof.json").read_text())
    assert (made["held"], made["missing"], made["sources"]) == (False, ["one"], "123")
    two = made["proofs"]["two"]
    assert (two["commit"], two["dirty"]) == ("abc", False)
    assert two["command"] == "python tests/fuzz.py --seed 5" and (two["outcome"], two["seconds"]) == ("held", 2)
    assert (two["fuzz"]["first_seed"], two["fuzz"]["cases"]) == (5, 2000)

    again = Record(tmp_path, about, {**ABC, "commit": "def"}, ("one", "two"))
    assert again.other is None
    again.add(_outcome("one"))
    made = json.loads((tmp_path / "proof.json").read_text())
    assert made["held"] and made["missing"] == []
    assert [(name, x["commit"]) for name, x in made["proofs"].items()] == [("one", "def"), ("two", "abc")]
    again.add(_outcome("one", "failed (1)"))
    assert json.loads((tmp_path / "proof.json").read_text())["held"] is False

    other = Record(tmp_path, {**about, "sources": "456"}, ABC, ("one", "two"))
    assert other.other is not None and "sources 123" in other.other
    other.add(_outcome("one"))
    assert json.loads((tmp_path / "proof.json").read_text())["missing"] == ["two"]


def test_a_record_that_cannot_be_read_begins_anew(tmp_path: Path) -> None:
    for text in ("", "[]", '{"proofs": 3}'):
        (tmp_path / "proof.json").write_text(text)
        Record(tmp_path, {"sources": "123"}, ABC, ("one",)).add(_outcome("one"))
        assert list(json.loads((tmp_path / "proof.json").read_text())["proofs"]) == ["one"]


def test_what_a_proof_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": "abc", "status": " M tests/x.py"}
    monkeypatch.setattr(proof, "_git", lambda command, *rest: answers.get(command))
    assert {"gpu", "driver", "cpu", "python", "pytest"} <= set(proof.about()["machine"])
    assert proof.commit() == {"commit": "abc", "dirty": True}
    answers["status"] = ""
    assert proof.commit() == {"commit": "abc", "dirty": False}
    assert proof.commit("def") == {"commit": "def", "dirty": None}
    answers.clear()
    assert proof.commit() == {"commit": None, "dirty": None}


def test_sources_are_told_apart_by_names_and_content(tmp_path: Path) -> None:
    found = [proof.digest(tmp_path)]
    for name, text in (("a.py", "x"), ("b.cu", "x"), ("a.py", "y"), ("kernel.cubin", "y"), ("a.py", "x")):
        (tmp_path / name).write_text(text)
        found.append(proof.digest(tmp_path))
    assert found[5] == found[2] and found[4] == found[3] and len(set(found)) == 4
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    assert proof.digest(tmp_path) not in found


def test_some_proofs_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(proofs: list[Proof], folder: Path, patience: float) -> list[Outcome]:
        ran.append([x.name for x in proofs])
        return [Outcome(x.name, x.command, "held", 1.0, "") for x in proofs]

    monkeypatch.setattr(prove_gpu, "run", run)
    monkeypatch.setattr(prove_gpu.shutil, "which", lambda name: name)
    assert prove_gpu.main([str(tmp_path), "--only", "tests", "memcheck", "fuzz-cuda"]) == 0
    assert ran == [["tests", "memcheck"], ["fuzz-cuda"], *[[]] * (len(prove_gpu.FUZZED) - 1)]
    assert json.loads((tmp_path / "proof.json").read_text())["missing"][-1] == "fuzz-cute"
    ran.clear()
    monkeypatch.setattr(prove_gpu.shutil, "which", lambda name: None)
    assert prove_gpu.main([str(tmp_path)]) == 0
    assert ran == [["tests"], *([name] for name in prove_gpu.FUZZED)]
    assert "its tools are left out" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        prove_gpu.main([str(tmp_path), "--only", "nothing"])
