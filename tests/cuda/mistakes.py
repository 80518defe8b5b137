"""Mistakes that are planted in a kernel's source, one at a time: each must be told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import pytest

from tilewise.contract import ContractError
from tilewise.kernels.cuda import source
from tilewise.kernels.cuda.rungs import SOURCES
from tilewise.kernels.cuda.simulator import Order, SimulationError
from tilewise.sharing import Kept

WRONG = "a wrong result"
SOUND = "sound"
# What the simulator says of operands: one that was written to, one that the copy engine or a product may not see yet.
ISSUED, UNFENCED = "after a warp had issued it", "without fence.proxy.async"
EARLY = f"{WRONG}|{ISSUED}"


class Mistake(NamedTuple):
    told: str  # what must be told of it
    problem: str
    edits: dict[str, str]  # what is replaced, by what; it is there once in all the files


def plant(monkeypatch: pytest.MonkeyPatch, files: Sequence[str], edits: dict[str, str]) -> None:
    """Put edits into sources, as long as the test runs."""
    read, texts = source._read, {name: (SOURCES / name).read_text() for name in files}
    for old, new in edits.items():
        (name,) = [name for name, text in texts.items() if text.count(old) == 1] or pytest.fail(f"no more: {old}")
        texts[name] = texts[name].replace(old, new)
    monkeypatch.setattr(source, "_read", lambda folder, name: texts.get(name) or read(folder, name))
    monkeypatch.setattr(source, "_sources", Kept(512))


def some(names: Iterable[str]) -> list[Any]:
    """As a test's parameters. Each is compiled and run for half a second or more: every other one by `make test`."""
    marks = {0: (), 1: (pytest.mark.slow,)}
    return [pytest.param(name, marks=marks[crc32(name.encode()) % 2]) for name in names]


def check_all_can_be_planted(files: Sequence[str], mistakes: Mapping[str, Mistake]) -> None:
    """Whichever are run: the sources still have what they replace."""
    for mistake in mistakes.values():
        with pytest.MonkeyPatch.context() as monkeypatch:
            plant(monkeypatch, files, mistake.edits)


def told(check: Callable[[], None]) -> str:
    """What is told of a kernel by a run of it."""
    try:
        check()
    except SimulationError as report:
        return str(report)
    except ContractError:
        return WRONG
    return SOUND


def expect_told(expected: str, check: Callable[[Order, int], None]) -> None:
    """In some order of threads."""
    reports = []
    for order, seed in [(order, seed) for seed in (1, 2, 3) for order in Order]:
        reports.append(told(lambda order=order, seed=seed: check(order, seed)))  # type: ignore[misc]
        if re.search(expected, reports[-1], re.DOTALL):
            return
    pytest.fail(f"told only: {set(reports)}")
