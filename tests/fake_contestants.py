"""Contestants that a benchmark must survive, and an object for a child process to hold. Children find them by name."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise import reference
from tilewise.bench.contestants import Contestant, Entry
from tilewise.bench.memory import peak_growth
from tilewise.bench.problem import Problem

Answer = Callable[[Problem], tuple[Any, ...]]


def exact(problem: Problem) -> tuple[Any, ...]:
    return (reference.forward(problem.spec, problem.q, problem.k, problem.v).out.astype(np.float32),)


def _contestant(name: str, answer: Answer, ours: bool = False) -> Contestant:
    return Contestant(
        f"{__name__}:{name}", lambda problem: Entry(lambda d_out: answer(problem), lambda x: x), ours=ours
    )


def _broken(problem: Problem) -> tuple[Any, ...]:
    raise RuntimeError("it broke")


def _starved(problem: Problem) -> tuple[Any, ...]:
    raise MemoryError("64 GiB")


def _ended(problem: Problem, by: int) -> tuple[Any, ...]:
    if problem.cell.n_k == 16:
        sys.stderr.write("something went very wrong\n")
        sys.stderr.flush()
        os.kill(os.getpid(), by)
    return exact(problem)


def _hanging(problem: Problem) -> tuple[Any, ...]:
    time.sleep(60)
    return exact(problem)


def _tiring() -> Answer:
    calls = iter([exact] * 2)  # the one that is judged, and the one that sets the pace
    return lambda problem: next(calls, _broken)(problem)


right = _contestant("right", exact)
ours = _contestant("ours", exact, ours=True)
off = _contestant("off", lambda problem: (exact(problem)[0] + 0.01,))
undefined = _contestant("undefined", lambda problem: (exact(problem)[0] * np.nan,))
forgetful = _contestant("forgetful", lambda problem: (np.empty_like(problem.q),))
broken = _contestant("broken", _broken)
starved = _contestant("starved", _starved)
crashing = _contestant("crashing", lambda problem: _ended(problem, signal.SIGABRT))  # at n = 16 only
killed = _contestant("killed", lambda problem: _ended(problem, signal.SIGKILL))
hanging = _contestant("hanging", _hanging)
tiring = _contestant("tiring", _tiring())


class Service:
    """For tests of the child process itself."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, more: int) -> int:
        self.count += more
        return self.count

    def fail(self) -> None:
        raise ValueError("no good")

    def end(self, by: int) -> None:
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        os.kill(os.getpid(), by)

    def leave(self, code: int) -> None:
        os._exit(code)

    def hang(self) -> None:
        time.sleep(60)

    def fork(self) -> str:
        """Both processes go on, as one that forks and forgets which it is."""
        os.fork()
        return "answer"

    def hang_forked(self) -> None:
        if os.fork() == 0:
            time.sleep(15)
            os._exit(0)
        time.sleep(60)

    def chat(self) -> str:
        os.write(1, b"a library says hello\n")
        sys.stdout.write("so does Python\n")
        sys.stdout.flush()
        return "answer"

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def spin(self, seconds: float) -> None:
        """A thread that goes on after the answer, as those of OpenMP and OpenBLAS do."""

        def busy() -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                pass

        threading.Thread(target=busy, daemon=True).start()

    def grow(self) -> int:
        np.ones(12 << 20)  # freed before the measurement, so that it must not hide what comes
        return peak_growth(lambda: np.ones(8 << 20))
