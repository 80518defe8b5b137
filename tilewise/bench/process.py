"""A process of its own for whoever is measured: a child that answers questions over pipes for as long as it is kept.

Libraries then have their own threads, caches and allocators, and one that crashes or hangs takes nobody along. A child
makes one object, named as "module:attribute", and calls the methods that it is asked for.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from tilewise.bench.refusal import RefusedError, refusal

_SERVE = "from tilewise.bench.process import serve; serve()"
_KILLED = -9  # SIGKILL: how Linux ends a process when memory runs out
_LOOK_EVERY = 0.001
# Where threads cannot be looked at. Seen elsewhere: OpenMP's spin for 8 ms after a call, OpenBLAS's for 104 ms.
_BLIND_PAUSE = 0.15


class Child:
    """The parent's side: a process that holds one object."""

    def __init__(self, target: str, *args: Any, env: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._expired = False
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **(env or {})},
        )
        self._first: tuple[Any, ...] | None = (target, args)

    def ask(self, method: str, *args: Any, timeout: float) -> Any:
        """What the object's method returns. An error, a crash or no answer in time is a RefusedError."""
        alarm = threading.Timer(timeout, self._expire)
        alarm.daemon = True
        alarm.start()
        try:
            kind, value = self._exchange((method, args))
        except (EOFError, OSError, pickle.UnpicklingError):  # the pipe broke: the process is gone
            raise self._obituary(timeout) from None
        finally:
            alarm.cancel()
        if kind == "refused":
            raise RefusedError(*value)
        return value

    def _exchange(self, question: tuple[Any, ...]) -> tuple[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        for message in (question,) if self._first is None else (self._first, question):
            pickle.dump(message, self._process.stdin)
        self._first = None
        self._process.stdin.flush()
        answer: tuple[str, Any] = pickle.load(self._process.stdout)
        return answer

    def _expire(self) -> None:
        self._expired = True
        self._process.kill()

    def _obituary(self, timeout: float) -> RefusedError:
        code = self._process.wait()
        if self._expired:
            return RefusedError("timed out", f"no answer within {timeout:.0f} s; its process was ended")
        if code == _KILLED:
            return RefusedError("out of memory", "its process was killed, as a system does when memory runs out")
        how = f"its process ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return RefusedError("failed", ": ".join([how, *last]))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def rest(self, limit: float = 0.5) -> float | None:
        """Wait until none of its threads runs, as they may spin after a call. Seconds that took; None: nobody knows."""
        begin = time.monotonic()
        while running := self._running():
            if time.monotonic() - begin > limit:
                break
            time.sleep(_LOOK_EVERY)
        if running is None:
            time.sleep(_BLIND_PAUSE)
            return None
        return time.monotonic() - begin

    def _running(self) -> int | None:
        """How many of its threads are running or ready to; None where the system does not say."""
        try:
            stats = [path.read_text() for path in Path(f"/proc/{self._process.pid}/task").glob("*/stat")]
        except OSError:  # a thread ended while it was looked at
            return 1
        return sum(stat.rpartition(") ")[2].startswith("R") for stat in stats) if stats else None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:  # what was not sent is not needed any more
                pass

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def serve() -> None:
    """The child's side: answer until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches parent and children alike: the parent decides
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    if hasattr(os, "register_at_fork"):  # what a library forks may outlive this process, or go on as if it were it
        os.register_at_fork(after_in_child=answers.close)
    target, args = pickle.load(questions)
    subject: Any = None
    while True:
        try:
            method, given = pickle.load(questions)
        except EOFError:
            return
        try:
            subject = load(target)(*args) if subject is None else subject
            answer = pickle.dumps(("answer", getattr(subject, method)(*given)), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # its failure is a result of the benchmark
            refused = refusal(error)
            answer = pickle.dumps(("refused", (refused.status, refused.reason)))
        answers.write(answer)
        answers.flush()


def load(target: str) -> Any:
    """The object that "module:attribute" names."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
