"""A disk whose nth step fails, once or from then on: full, read-only, forbidden, or ended in the middle of a file.

    for _, found in every_step(folder, act, ENOSPC): ...    # act() once for each step that it takes there, and one more

Python tells hooks of what it opens, makes, renames and removes, by whichever function; os.write, which it does not tell
of, is replaced for the module that writes caches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from tilewise.kernels import disk

T = TypeVar("T")
_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.utime", "os.scandir", "os.listdir")
_write = os.write
_watching: list[Faults] = []
_hooked: list[bool] = []


@dataclass
class Faults:
    folder: Path
    error: int
    at: int  # the step that fails, counted from 1
    forever: bool  # and all after it
    steps: int = 0

    def step(self, path: Any) -> None:
        if isinstance(path, (str, bytes, os.PathLike)) and Path(os.fsdecode(path)).is_relative_to(self.folder):
            self.count(path)

    def count(self, path: Any) -> None:
        self.steps += 1
        if self.steps == self.at or (self.forever and self.steps > self.at):
            raise OSError(self.error, os.strerror(self.error), os.fsdecode(path))

    def write(self, handle: int, content: Any) -> int:
        """Half of it is on the disk when it fails."""
        if sys._getframe(1).f_globals["__name__"] == disk.__name__:
            half = memoryview(content)[: max(len(content) // 2, 1)]
            written = _write(handle, half)
            self.step(_path_of(handle, self.folder))
            return written
        return _write(handle, content)


def _path_of(handle: int, otherwise: Path) -> Path:
    """Of a file that is open, where the system tells it."""
    link = Path(f"/proc/self/fd/{handle}")
    return link.readlink() if link.exists() else otherwise


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event in _EVENTS:
        _watching[-1].step(args[0])


@contextmanager
def failing(folder: Path, error: int, at: int, forever: bool = False) -> Iterator[Faults]:
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_hook)  # which stays, and is asked no more
    faults = Faults(folder, error, at, forever)
    _watching.append(faults)
    os.write = faults.write
    try:
        yield faults
    finally:
        os.write = _write
        _watching.pop()


def every_step(
    folder: Path, act: Callable[[], T], error: int, forever: bool = False, most: int = 200
) -> Iterator[tuple[int, T]]:
    """What act() gives, or the OSError that it ends in, for each step that fails; at last for none."""
    for at in count(1):
        assert at <= most, "it takes ever more steps"
        with failing(folder, error, at, forever) as faults:
            try:
                found: Any = act()
            except OSError as raised:
                found = raised
        yield at, found
        if faults.steps < at:
            return
