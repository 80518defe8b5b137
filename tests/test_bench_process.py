"""A process for each contestant: what it answers, how it ends, and that it rests between its turns."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewise.bench import memory, roofline
from tilewise.bench.problem import Cell
from tilewise.bench.process import Child
from tilewise.bench.refusal import RefusedError
from tilewise.bench.team import Team

LONG = 60.0
SERVICE = "tests.fake_contestants:Service"
LINUX = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are looked at on Linux")


@pytest.fixture
def child() -> Iterator[Child]:
    with Child(SERVICE, 5) as started:
        yield started


def test_it_keeps_its_object_between_questions(child: Child) -> None:
    assert [child.ask("add", 1, timeout=LONG) for _ in range(3)] == [6, 7, 8]


def test_an_error_is_an_answer_and_the_process_lives_on(child: Child) -> None:
    with pytest.raises(RefusedError) as told:
        child.ask("fail", timeout=LONG)
    assert (told.value.status, told.value.reason) == ("failed", "ValueError: no good")
    assert child.ask("add", 1, timeout=LONG) == 6


def test_what_a_library_prints_is_no_answer(child: Child) -> None:
    assert child.ask("chat", timeout=LONG) == "answer"


@pytest.mark.parametrize(
    ("question", "status", "reason"),
    [
        (("end", signal.SIGABRT), "failed", "its process ended with SIGABRT: last words"),
        (("end", signal.SIGKILL), "out of memory", "its process was killed"),
        (("leave", 3), "failed", "its process ended with code 3"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_the_end_of_a_process_is_told(child: Child, question: tuple[str, int], status: str, reason: str) -> None:
    with pytest.raises(RefusedError) as told:
        child.ask(*question, timeout=LONG)
    assert told.value.status == status and told.value.reason.startswith(reason)
    assert not child.alive


def test_a_process_that_hangs_is_ended(child: Child) -> None:
    begin = time.monotonic()
    with pytest.raises(RefusedError, match="no answer within 1 s") as told:
        child.ask("hang", timeout=1)
    assert told.value.status == "timed out" and not child.alive
    assert time.monotonic() - begin < 30


FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")


@FORKS
def test_a_process_that_hangs_is_ended_though_what_it_forked_lives_on(child: Child) -> None:
    begin = time.monotonic()
    with pytest.raises(RefusedError, match="no answer within 1 s"):
        child.ask("hang_forked", timeout=1)
    assert time.monotonic() - begin < 10


@FORKS
def test_a_forked_process_answers_nothing(child: Child) -> None:
    assert child.ask("fork", timeout=LONG) == "answer"
    time.sleep(0.2)
    assert child.ask("add", 1, timeout=LONG) == 6
    assert child.ask("add", 1, timeout=LONG) == 7


def test_what_cannot_be_made_is_told() -> None:
    with Child("tests.fake_contestants:Nobody") as child, pytest.raises(RefusedError, match="Nobody"):
        child.ask("add", 1, timeout=LONG)


def test_it_is_given_variables() -> None:
    with Child(SERVICE, env={"OMP_NUM_THREADS": "7"}) as child:
        assert child.ask("variable", "OMP_NUM_THREADS", timeout=LONG) == "7"


@LINUX
def test_rest_waits_for_threads_that_run_on(child: Child) -> None:
    child.ask("spin", 0.5, timeout=LONG)
    waited = child.rest(limit=LONG)
    assert waited is not None and 0.1 < waited < LONG
    assert child._running() == 0


@LINUX
def test_threads_that_never_rest_are_not_waited_for_forever(child: Child) -> None:
    child.ask("spin", 30, timeout=LONG)
    waited = child.rest(limit=0.1)
    assert waited is not None and 0.1 <= waited < 10


@LINUX
def test_an_idle_contestant_uses_no_processor() -> None:
    """PyTorch's threads too: between its turns they would slow the others."""
    pytest.importorskip("torch")
    with Team(threads=2) as team:
        team.ask("torch sdpa", "enter", Cell("full", 256, 256, 64), 0, timeout=LONG)
        team.ask("torch sdpa", "turn", 3, timeout=LONG)
        (pid,) = (child._process.pid for child in team._children.values())
        before = _processor_time(pid)
        time.sleep(0.1)
        assert _processor_time(pid) == before
        assert team.rests["torch sdpa"] is not None


def test_a_plain_read_is_measured_between_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the contestant's turn: what is known of its threads stays, and without the library it plays on."""
    name, cell = "tests.fake_contestants:right", Cell("full", 1, 16, 8)
    monkeypatch.setattr(roofline, "LIBRARY", "tests.fake_library")
    with Team(threads=1) as team:
        team.ask(name, "enter", cell, 0, timeout=LONG)
        team.rests[name] = 7.0
        assert team.plain_read(name, timeout=LONG) == 1e4 * cell.key_bytes
        assert team.rests[name] == 7.0
        monkeypatch.setattr(roofline, "LIBRARY", "tilewise.kernels.nothing.library")
        assert team.plain_read(name, timeout=LONG) is None
        assert len(team.ask(name, "turn", 2, timeout=LONG)) == 2


def _processor_time(pid: int) -> int:
    """Nanoseconds of all threads."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


@pytest.mark.skipif(sys.platform == "win32", reason="peak memory is measured on Linux and macOS")
def test_a_process_that_takes_64_mib_is_measured_so() -> None:
    with Child(SERVICE, env=memory.ENVIRONMENT) as child:
        assert child.ask("grow", timeout=LONG) == pytest.approx(64 << 20, rel=0.1)
