"""How long: contestants take turns (A B C A B C ...), so that whatever else the machine does falls on all of them.

A turn is a few untimed calls and then a few timed ones: the threads of the contestant before may still spin, its own
may sleep, and memory that it reuses may not be there yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

AT_LEAST = 3  # repetitions, when one fits the budget
BLOCK = 5  # timed calls in a turn
_FLUSH_BYTES = 256 << 20  # more than any GPU's L2 cache

Action = Callable[[], Any]
Timer = Callable[[Action], float]  # seconds of one call


@dataclass(frozen=True)
class Times:
    """Seconds. p10 and p90 bound the middle eight tenths of the repetitions."""

    median: float
    min: float
    p10: float
    p90: float
    repetitions: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        p10, median, p90 = np.percentile(seconds, [10, 50, 90]).tolist()
        return cls(median, min(seconds), p10, p90, len(seconds))


def wall_timer(clock: Callable[[], float] = time.perf_counter) -> Timer:
    def timed(action: Action) -> float:
        start = clock()
        result = action()
        stop = clock()
        del result  # freed after the clock has stopped
        return stop - start

    return timed


def cuda_timer() -> Timer:
    """CUDA events around a call. L2 is overwritten first: caches start cold, and the launch hides behind that."""
    import torch

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def timed(action: Action) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        result = action()
        stop.record()
        torch.cuda.synchronize()
        del result
        return float(start.elapsed_time(stop)) / 1e3

    return timed


def repetitions(seconds: float, budget: float, most: int) -> int:
    """How often a call of this length is repeated within the budget."""
    if seconds > budget:
        return 1
    return min(most, max(AT_LEAST, int(budget / max(seconds, 1e-9))))


def warm_up(action: Action, clock: Callable[[], float] = time.perf_counter) -> None:
    """Three calls at the least and 50 ms, but none beyond a second: a call that long hardly notices."""
    begin, calls = clock(), 0
    while (calls < 3 or clock() - begin < 0.05) and clock() - begin < 1.0:
        action()
        calls += 1


def round_robin(
    actions: Mapping[str, Action],
    counts: Mapping[str, int],
    timer: Timer,
    block: int = BLOCK,
    warm: Callable[[Action], None] = warm_up,
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Seconds of each contestant's repetitions, taken in turns; and what one that failed on the way raised."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    failed: dict[str, Exception] = {}
    for turn in range(0, max(counts.values(), default=0), block):
        for name, action in actions.items():
            if turn >= counts[name] or name in failed:
                continue
            try:
                warm(action)
                seconds[name].extend(timer(action) for _ in range(min(block, counts[name] - turn)))
            except Exception as error:  # a peer's failure is a result of the benchmark
                failed[name] = error
    return seconds, failed
