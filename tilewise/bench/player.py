"""A contestant in its own process: what it does there when the parent asks.

Nothing here multiplies matrices in NumPy: the threads of NumPy's library would be in the way of the contestant's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

from tilewise.arrays import Array
from tilewise.bench import judge, measure, memory
from tilewise.bench.contestants import Entry, find
from tilewise.bench.judge import Judge
from tilewise.bench.problem import Cell, Problem

_SMALL = 64  # rows: enough to load libraries and start threads


class Player:
    def __init__(self, contestant: str) -> None:
        self._contestant = find(contestant)
        self._action: Callable[[], Any]
        self._timer: measure.Timer
        self._keys: tuple[Array, ...] = ()
        self._held_bytes = 0
        self._takes = 0.0

    def enter(self, cell: Cell, seed: int) -> tuple[list[Array], int]:
        """Make a cell's arrays and compute it once, libraries load here: what came out, and the bytes held for it."""
        self._action, self._keys = (lambda: None), ()  # frees the cell before
        problem = Problem.make(cell, seed)
        entry = self._contestant.enter(problem)
        outputs = entry.run(entry.put(Judge(problem).d_out if cell.backward else problem.d_out))
        self._prepare(problem, entry)
        self._keys = problem.k, problem.v  # on the CPU, tensors share their memory
        self._timer = measure.wall_timer() if cell.device == "cpu" else measure.cuda_timer()
        return [judge.in_main_memory(x) for x in outputs], entry.held_bytes

    def pace(self) -> float:
        """Seconds of one call, to plan with."""
        self._takes = self._timer(self._action)
        return self._takes

    def turn(self, count: int) -> list[float]:
        measure.warm_up(self._action, self._takes)
        return [self._timer(self._action) for _ in range(count)]

    def plain_read(self, library: str) -> float | None:
        """Bytes a second of only reading the k and v it attends over; None where the native library is not here."""
        found: Any = import_module(library)
        return None if found.unavailable() else float(found.read_rate(*self._keys))

    def extra_bytes(self, cell: Cell, seed: int) -> int:
        """Bytes beyond the inputs at the peak of one call. On the CPU, asked of a fresh process."""
        if cell.device != "cpu":
            return memory.cuda_peak_growth(self._action) + self._held_bytes
        small = Problem.make(replace(cell, n_q=min(cell.n_q, _SMALL), n_k=min(cell.n_k, _SMALL)), seed)
        self._prepare(small, self._contestant.enter(small))
        self._action()
        problem = Problem.make(cell, seed)
        self._prepare(problem, self._contestant.enter(problem))
        return memory.peak_growth(self._action) + self._held_bytes

    def _prepare(self, problem: Problem, entry: Entry) -> None:
        d_out = entry.put(problem.d_out)
        self._action, self._held_bytes = (lambda: entry.run(d_out)), entry.held_bytes
