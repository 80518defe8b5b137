"""How long: contestants take turns (A B C A B C ...), so that whatever else the machine does falls on all of them.

A turn is a few untimed calls and then a few timed ones: the contestant's threads sleep and the caches hold another's
numbers when it begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

AT_LEAST = 3  # repetitions, when one fits the budget
BLOCK = 5  # timed calls in a turn, at most
WARM_UP = 0.02  # seconds of untimed calls before them
LONG = 0.5  # seconds: a call that hardly notices how it began
_FLUSH_BYTES = 256 << 20  # more than any GPU's L2 cache

Action = Callable[[], Any]
Timer = Callable[[Action], float]  # seconds of one call
Turn = Callable[[int], list[float]]  # seconds of so many calls


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


def repetitions(seconds: float, budget: float, most: int, least: int = 1) -> int:
    """How often a call of this length is repeated within the budget."""
    least = max(least, AT_LEAST) if seconds <= budget else least
    return min(most, max(least, int(budget / max(seconds, 1e-9))))


def warm_up(action: Action, takes: float, clock: Callable[[], float] = time.perf_counter) -> None:
    """Untimed calls: threads wake up and caches fill. At least one and 20 ms of them; a long call needs none."""
    if takes > LONG:
        return
    begin = clock()
    action()
    while clock() - begin < WARM_UP:
        action()


def round_robin(
    turns: Mapping[str, Turn], counts: Mapping[str, int]
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Seconds of each contestant's repetitions, taken in turns; and what one that failed on the way raised.

    Everyone's repetitions are spread over all rounds, so that a slow spell of the machine falls on all alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    failed: dict[str, Exception] = {}
    rounds = -(-max(counts.values(), default=0) // BLOCK)
    for i in range(1, rounds + 1):
        for name, turn in turns.items():
            due = -(-counts[name] * i // rounds) - len(seconds[name])
            if due == 0 or name in failed:
                continue
            try:
                seconds[name] += turn(due)
            except Exception as error:  # a peer's failure is a result of the benchmark
                failed[name] = error
    return seconds, failed
