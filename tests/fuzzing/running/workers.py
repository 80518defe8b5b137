"""Processes that answer what they are given, item by item. One may crash or hang: at which item is known outside.

An item is a seed or a question; what is answered is up to the caller.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

Begin = Callable[[], Callable[[Any], Any]]  # in the process, before its first item: what answers items

PATIENCE = 120.0  # seconds for one item, after which it is taken to hang
_fork = multiprocessing.get_context("fork")  # kernels need not be picklable; nothing has been computed before


class Trouble(str):
    """In place of an answer: how the process ended that was to give it."""


class Worker:
    def __init__(self, begin: Begin, patience: float | None = None) -> None:
        self._begin, self._patience = begin, PATIENCE if patience is None else patience
        self._left: deque[Any] = deque()
        self._start()

    def _start(self) -> None:
        self.connection, theirs = _fork.Pipe()
        self._ended, self._since = False, time.monotonic()
        self._process = _fork.Process(target=self._run, args=(theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    def _run(self, connection: Connection, parent: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
        faulthandler.enable(sys.__stderr__)
        answer = self._begin()
        while os.getppid() == parent:  # else no one listens any more
            if connection.poll(1.0):
                for item in connection.recv():
                    connection.send(answer(item))

    def give(self, items: Sequence[Any]) -> None:
        if not self._left:
            self._since = time.monotonic()
        self._left.extend(items)
        self.connection.send(list(items))

    @property
    def idle(self) -> bool:
        return not self._left

    def answers(self) -> Iterator[tuple[Any, Any]]:
        """What has arrived, with its item. After a crash or a hang that is told, and a new process does the rest."""
        while not self._ended and self.connection.poll():
            try:
                answer = self.connection.recv()
            except (EOFError, ConnectionResetError):
                self._ended = True
                break
            self._since = time.monotonic()
            yield self._left.popleft(), answer
        trouble = self._trouble()
        if trouble is not None:
            self.stop()
            item, rest = self._left.popleft(), list(self._left)
            self._left.clear()
            self._start()
            if rest:
                self.give(rest)
            yield item, trouble

    def _trouble(self) -> Trouble | None:
        """Why no more is to be expected of it, or None."""
        if self._ended and self._left:
            self._process.join()
            code = self._process.exitcode or 0
            return Trouble(f"crashed: {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}")
        if self._left and time.monotonic() - self._since > self._patience:
            return Trouble(f"no answer within {self._patience:g} s")
        return None

    def one(self, item: Any) -> Any:
        """The answer to one item, waited for."""
        self.give([item])
        while True:
            for _, answer in self.answers():
                return answer
            wait([self.connection], timeout=1.0)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def answered(
    begin: Begin, blocks: Iterable[Sequence[Any]], jobs: int, until: float | None = None
) -> Iterator[tuple[Any, Any] | None]:
    """Every item with its answer, as they come, and None now and then, so that the caller may tell how it goes.

    A block is one process's. until: a time.monotonic() at which what is not answered is dropped.
    """
    left = iter(blocks)
    workers = [Worker(begin) for _ in range(jobs)]
    try:
        while until is None or time.monotonic() < until:
            for worker in workers:
                if worker.idle and (block := next(left, None)) is not None:
                    worker.give(block)
            if all(worker.idle for worker in workers):
                return
            wait([worker.connection for worker in workers if not worker.idle], timeout=0.5)
            for worker in workers:
                yield from worker.answers()
            yield None
    finally:
        for worker in workers:
            worker.stop()
