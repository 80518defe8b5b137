"""A kernel system in rough company: threads, forks, no memory, Ctrl-C, interpreters that end. Each program of
tests/stress.py runs in a process of its own, so that a crash or a hang is a failure and nothing more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.conformance.paths import threads
from tests.stress import LONG, calls
from tilewise import dispatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, /proc and limits as Linux has them")

ROOT = Path(__file__).parent.parent
TIMEOUT = 120.0
NOT_SANITIZED = {
    "more_than_memory": "complains of it",
    "little_memory": "needs much of its own",
    "leaks": "keeps what was freed",
    "fork_during_a_call": "has locks that do not survive a fork",
    "data_loader": "does not understand PyTorch",
}
# NumPy's threads are its BLAS library's; what is about threads of a system's own needs the native engine.
SYSTEMS = ("cpu", pytest.param("numpy", marks=pytest.mark.slow))


@pytest.fixture(params=SYSTEMS)
def kernel(request: pytest.FixtureRequest) -> str:
    return _available(request.param)


@pytest.fixture
def cpu() -> str:
    return _available("cpu")


def _available(name: str) -> str:
    if name not in dispatch.NAMES:
        pytest.skip(f"there is no kernel system {name}")
    reason = dispatch.kernel(name).unavailable()
    if reason is not None:
        pytest.skip(f"{name} cannot run on this machine: {reason}")
    return name


def _command(program: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """Four threads, unless told otherwise: more than a small machine has."""
    return {
        "args": [sys.executable, "-m", "tests.stress", program, *arguments],
        "env": {**os.environ, "OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1", **environment},
        "cwd": ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
    }  # fmt: skip


def _run(program: str, *arguments: str, **environment: str) -> None:
    """The program ends by itself, in time, with nothing to complain about."""
    done = subprocess.run(**_command(program, *arguments, **environment), timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@pytest.mark.parametrize(
    "program",
    [
        "threads_at_once", "fork_after_use", "fork_during_a_call", "data_loader", "more_than_memory", "little_memory",
        "idle", "interpreter_let_go", "leaks", "exit_at_once", "exit_during_a_daemon_call", "exit_during_a_call",
    ],
)  # fmt: skip
def test_program(kernel: str, program: str) -> None:
    if program in NOT_SANITIZED and "TILEWISE_SANITIZER" in os.environ:
        pytest.skip(f"a sanitizer {NOT_SANITIZED[program]}")
    _run(program, kernel)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_ctrl_c_ends_a_call(kernel: str, direction: str) -> None:
    with subprocess.Popen(**_command("interrupted", kernel, direction)) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            assert process.stdout.readline() == "begun\n"
            time.sleep(0.3)  # well inside the call
            sent = time.monotonic()
            process.send_signal(signal.SIGINT)
            line, took = process.stdout.readline(), time.monotonic() - sent
            # read(), since communicate() would miss what came in the same packet; the program ends itself if it hangs
            rest, complaints = process.stdout.read(), process.stderr.read()
            process.wait(timeout=TIMEOUT)
        finally:
            process.kill()
    assert line == "interrupted\n", line + complaints
    assert took < LONG / 4
    assert (process.returncode, rest, complaints) == (0, "ok\n", "")


# -- threads of the native engine -------------------------------------------------------------------------------------


def test_any_number_of_threads_gives_the_same_bits(cpu: str) -> None:
    work = calls(cpu)
    with threads(cpu, 1):
        alone = [call() for call in work]
    for count in (2, 3, 4, 7, 16, 64):
        with threads(cpu, count):
            assert tw.get_num_threads() == count
            assert [call() for call in work] == alone, f"{count} threads"


@pytest.mark.parametrize(
    ("given", "error"),
    [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("2", TypeError), (None, TypeError), (True, TypeError)],
)
def test_bad_numbers_of_threads(cpu: str, given: Any, error: type[Exception]) -> None:
    before = tw.get_num_threads()
    with pytest.raises(error, match=r"n: expected .*thread.*, got"):
        tw.set_num_threads(given)
    assert tw.get_num_threads() == before


@pytest.mark.parametrize("count", ["1", "3"])
def test_omp_num_threads_is_respected(cpu: str, count: str) -> None:
    _run("few_threads", cpu, count, OMP_NUM_THREADS=count)


@pytest.mark.parametrize("value", ["", "0", "many", "-1", "2,1", "99999999999999999999"])
def test_odd_omp_num_threads(cpu: str, value: str) -> None:
    _run("odd_environment", cpu, OMP_NUM_THREADS=value)


# -- between calls ----------------------------------------------------------------------------------------------------

X = np.ones((1, 2, 8, 4), np.float32)
BAD_CALLS: dict[str, Callable[[str], Any]] = {
    "heads": lambda kernel: tw.attention(X, X[:, :1].repeat(3, 1), X, kernel=kernel),
    "a list": lambda kernel: tw.attention(X, X, [1, 2], kernel=kernel),  # type: ignore[list-item]
    "a type": lambda kernel: tw.attention(X, X, X.astype(int), kernel=kernel),
    "a mask": lambda kernel: tw.attention(X, X, X, mask=np.ones((3, 3), bool), kernel=kernel),
    "a table": lambda kernel: tw.attention(X, X, X, score=tw.alibi(np.ones(5)), kernel=kernel),
    "integers": lambda kernel: tw.attention(X, X, X, mask=tw.Q * 2**30 * 4 > 0, kernel=kernel),
    "strides": lambda kernel: tw.attention(X[..., ::2], X[..., ::2], X, kernel=kernel),
    "a gradient": lambda kernel: tw.attention_vjp(X, X, X, kernel=kernel)[1](X[:, :1]),
    "a kernel": lambda kernel: tw.attention(X, X, X, kernel=f"{kernel} "),
}


def test_bad_calls_between_good_ones(kernel: str) -> None:
    work = calls(kernel)
    alone = [call() for call in work]
    for bad in BAD_CALLS.values():
        with pytest.raises((ValueError, TypeError, tw.Unsupported)):
            bad(kernel)
        assert [call() for call in work] == alone


def test_contents_that_change_between_calls(kernel: str) -> None:
    """Nothing is remembered of an array but its address, which says nothing: results follow what is in it."""
    rng = np.random.default_rng(0)
    q, k, v, bias = rng.standard_normal((4, 2, 64, 64), dtype=np.float32)
    ids = np.sort(rng.integers(0, 4, 64))
    options = {"score": tw.bias(bias[0], grad=True), "mask": tw.document(ids)}

    def results(*arrays: Any, **options: Any) -> list[Any]:
        out, pullback = tw.attention_vjp(*arrays, **options, kernel=kernel)
        grads = pullback(out)
        return [out, grads.q, grads.k, grads.v, *grads.arrays]

    before = results(q, k, v, **options)
    for changed in (q, k, v, bias, ids):
        changed[...] = np.sort(3 - changed) if changed is ids else changed[..., ::-1].copy()
        after = results(q, k, v, **options)
        fresh = {"score": tw.bias(bias[0].copy(), grad=True), "mask": tw.document(ids.copy())}
        expected = results(q.copy(), k.copy(), v.copy(), **fresh)
        assert all(np.array_equal(a, b) for a, b in zip(after, expected, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(after, before, strict=True))
        before = after
