"""The contestants' processes: one each, kept from cell to cell, started again where one has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tilewise.bench import machine, memory, roofline
from tilewise.bench.problem import Cell
from tilewise.bench.process import Child
from tilewise.bench.refusal import RefusedError

_PLAYER = "tilewise.bench.player:Player"


@dataclass(eq=False)
class Team:
    threads: int | None = None
    rests: dict[str, float | None] = field(default_factory=dict)  # seconds a contestant's threads ran on, the last time
    _children: dict[str, Child] = field(default_factory=dict)

    def ask(self, name: str, method: str, *args: Any, timeout: float) -> Any:
        """What a contestant's process answers. It is at rest again afterwards, so that the next one is undisturbed."""
        child = self._children.get(name)
        if child is None or not child.alive:
            self._release(name)
            child = self._children[name] = Child(_PLAYER, name, env=machine.thread_variables(self.threads))
        answer = child.ask(method, *args, timeout=timeout)
        self.rests[name] = child.rest()
        return answer

    def plain_read(self, name: str, timeout: float) -> float | None:
        """Bytes a second of only reading the contestant's k and v, in its process; None where nobody can measure it.

        Asked between its turns, when its threads sleep; those that read sleep again afterwards.
        """
        child = self._children[name]
        try:
            rate: float | None = child.ask("plain_read", roofline.LIBRARY, timeout=timeout)
        except RefusedError:  # the benchmark can do without
            return None
        child.rest()
        return rate

    def extra_bytes(self, name: str, cell: Cell, seed: int, timeout: float) -> int:
        """Memory of one call: on the CPU in a fresh process, whose allocator gives back what it frees."""
        if cell.device != "cpu":
            return int(self.ask(name, "extra_bytes", cell, seed, timeout=timeout))
        with Child(_PLAYER, name, env={**machine.thread_variables(self.threads), **memory.ENVIRONMENT}) as child:
            return int(child.ask("extra_bytes", cell, seed, timeout=timeout))

    def _release(self, name: str) -> None:
        if name in self._children:
            self._children.pop(name).close()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in list(self._children):
            self._release(name)
