"""How long on a GPU: many calls in a row, so that only the GPU's own time counts, in turns of all contestants."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from tilewise.bench.gpu.contestants import Call, Entry

GRAPH, IN_A_ROW, HOST = "graph", "in a row", "host"


@dataclass(frozen=True)
class Settings:
    """Seconds, but for rounds and calls."""

    rounds: int = 5
    warm: float = 0.05  # untimed work before a turn: clocks and power settle on this contestant
    timed: float = 0.03
    chunk: float = 0.004  # that calls between two events take in all
    most_calls: int = 20
    host_calls: int = 200


@dataclass(frozen=True, eq=False)
class Loop:
    """Calls one after the other, on other inputs each; the last one on the first set of inputs."""

    entry: Entry
    run: Callable[[], Any]  # the last output
    calls: int
    how: str
    takes: float  # seconds
    host: float = 0.0  # seconds until the host is done with it


class Clock(Protocol):
    def __init__(self, settings: Settings) -> None: ...

    def loop(self, entry: Entry) -> Loop: ...

    def turn(self, loop: Loop) -> float:
        """Seconds of a call."""

    def sync(self) -> None:
        """Wait for the device; raises if it cannot be used any more."""


def rounds(turns: Mapping[str, Callable[[], float]], count: int) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Everyone's turns, A B C, A C B ..., so that drift and the place behind a hot neighbour fall on all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    failed: dict[str, Exception] = {}
    order = list(turns)
    for i in range(count):
        for name in _turned(order, i):
            if name in failed:
                continue
            try:
                seconds[name].append(turns[name]())
            except Exception as error:  # a contestant's failure is a result of the benchmark
                failed[name] = error
    return seconds, failed


def _turned(order: list[str], i: int) -> list[str]:
    """For round i: it begins with another, and every second round goes the other way, so that neighbours change."""
    first = i % max(1, len(order))
    return (order[first:] + order[:first])[:: -1 if i % 2 else 1]


def in_order(calls: Sequence[Call], count: int) -> list[Call]:
    """So many calls, the sets of inputs by turns, the first set last."""
    return [calls[i % len(calls)] for i in reversed(range(count))]


def run_all(calls: Sequence[Call]) -> Any:
    out = None
    for call in calls:
        out = call()
    return out


class GpuClock:
    """CUDA events around a CUDA graph of calls; around the calls themselves where they cannot be captured.

    In both cases the GPU sleeps first, for as long as the host needs to hand over the work.
    """

    _CYCLES = 2e9  # a second, at least
    _MARGIN = 1e-4  # seconds

    def __init__(self, settings: Settings) -> None:
        import torch

        self._torch: Any = torch
        self._settings = settings

    def sync(self) -> None:
        self._torch.cuda.synchronize()

    def loop(self, entry: Entry) -> Loop:
        with entry.around():
            run_all(entry.calls)  # compiles what is to be compiled
            self.sync()
            pace = self._seconds(entry.calls[0], self._handing_over(entry.calls[0]))
            order = in_order(entry.calls, self._count(pace))
            run, how = self._captured(order) if entry.capturable else None, GRAPH
            if run is None:
                run, how = (lambda: run_all(order)), IN_A_ROW
            host = self._handing_over(run)
            return Loop(entry, run, len(order), how, self._seconds(run, host), host)

    def turn(self, loop: Loop) -> float:
        settings = self._settings
        with loop.entry.around():
            for _ in range(int(settings.warm / loop.takes)):
                loop.run()
            count = max(1, round(settings.timed / loop.takes))
            return median(self._seconds(loop.run, loop.host) for _ in range(count)) / loop.calls

    def _count(self, pace: float) -> int:
        """Two at least, so that they take turns on their inputs; a long call hardly notices what the cache holds."""
        least = 2 if pace < self._settings.timed else 1
        return max(least, min(self._settings.most_calls, round(self._settings.chunk / pace)))

    def _captured(self, order: Sequence[Call]) -> Callable[[], Any] | None:
        cuda = self._torch.cuda
        graph = cuda.CUDAGraph()
        try:
            # The outer stream is there to come back to: a capture that fails leaves its own behind.
            with cuda.stream(cuda.current_stream()), cuda.graph(graph):
                out = run_all(order)
        except Exception:  # it waits for the GPU, or allocates in a way of its own
            self.sync()
            return None

        def replay() -> Any:
            graph.replay()
            return out

        return replay

    def _handing_over(self, run: Call) -> float:
        self.sync()
        begin = time.perf_counter()
        run()
        took = time.perf_counter() - begin
        self.sync()
        return took

    def _seconds(self, run: Call, host: float) -> float:
        start, stop = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._torch.cuda._sleep(int(self._CYCLES * (host + self._MARGIN)))
        start.record()
        run()
        stop.record()
        self.sync()
        return float(start.elapsed_time(stop)) / 1e3


class HostClock:
    """Until a call returns, while the GPU works on: what a program loses that issues one small call after another."""

    _PENDING = 50  # calls; beyond some hundreds the driver makes the host wait

    def __init__(self, settings: Settings, sync: Callable[[], None]) -> None:
        self._settings, self.sync = settings, sync

    def loop(self, entry: Entry) -> Loop:
        with entry.around():
            run_all(entry.calls)
            self.sync()
        return Loop(entry, entry.calls[0], 1, HOST, 0.0)

    def turn(self, loop: Loop) -> float:
        times = []
        with loop.entry.around():
            for i in range(self._settings.host_calls):
                if i % self._PENDING == 0:
                    self.sync()
                    loop.run()  # the first after a wait is slower
                begin = time.perf_counter()
                out = loop.run()
                times.append(time.perf_counter() - begin)
                del out
        self.sync()
        return median(times)
