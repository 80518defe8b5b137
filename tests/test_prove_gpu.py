"""The script that runs what CI cannot: its processes, their logs and what it tells of them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests import prove_gpu
from tests.prove_gpu import Proof


def _python(name: str, text: str) -> Proof:
    return Proof(name, (sys.executable, "-c", text))


def test_all_run_at_once_and_each_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = "import time; time.sleep(0.5); print('3 passed in 1 s')"
    began = time.monotonic()
    assert prove_gpu.run([_python("one", slow), _python("two", slow)], tmp_path, patience=60)
    assert time.monotonic() - began < 20
    out = capsys.readouterr().out
    assert "one: held" in out and "two: held" in out and "  3 passed in 1 s" in out
    assert (tmp_path / "one.txt").read_text() == "3 passed in 1 s\n"


def test_what_fails_and_what_does_not_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not prove_gpu.run([_python("bad", "print('FAILED here'); raise SystemExit(2)")], tmp_path, patience=60)
    assert "bad: failed (2)" in capsys.readouterr().out
    endless = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('7 cases in 1 s', flush=True)"
    assert not prove_gpu.run([_python("endless", endless)], tmp_path, patience=2)
    told = capsys.readouterr().out
    assert "endless: did not end" in told and "7 cases in 1 s" in told


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
