"""Planting a mistake in the package, in a process of its own, and looking for it with random calls."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from tests.fuzzing.running import systems
from tests.fuzzing.running.put import Put
from tests.fuzzing.running.systems import System
from tests.fuzzing.running.workers import answered

MOST_CALLS = 2000
BLOCK = 20


@dataclass(frozen=True)
class Mistake:
    """On which system it is looked for, and what plants it; wanted: what is drawn differently.

    first: the seed to begin at, where one call takes seconds and a mistake shows in few; is_slow: it takes long.
    """

    system: str
    plant: Callable[[], None]
    wanted: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    is_slow: bool = False


@dataclass(frozen=True)
class Found:
    calls: int  # the one that failed included
    told: str


def found(mistake: Mistake, most: int = MOST_CALLS) -> Found | None:
    """How many calls it took to find it; None: it was not found."""
    seeds = range(mistake.first, mistake.first + most)
    calls = 0
    for answer in answered(put(mistake).begin, (seeds[at : at + BLOCK] for at in range(0, len(seeds), BLOCK)), 1):
        if answer is not None:
            calls += 1
            told = getattr(answer[1], "failure", str(answer[1]))
            if told is not None and told.startswith("ended with exit code"):
                raise RuntimeError(f"the mistake could not be planted, or a call not be drawn: {told}")
            if told is not None:
                return Found(calls, told)
    return None


def put(mistake: Mistake) -> Put:
    def make(name: str) -> System:
        mistake.plant()
        return systems.system(name)

    wanted = replace(systems.wanted(mistake.system), shapes=1, **mistake.wanted)
    return Put(mistake.system, wanted, make=make)


# -- planting ---------------------------------------------------------------------------------------------------------


def named(path: str) -> Any:
    """package.module:Name.attribute"""
    module, _, inside = path.partition(":")
    thing = import_module(f"tilewise.{module}")
    for name in inside.split("."):
        thing = inspect.getattr_static(thing, name) if inspect.isclass(thing) else getattr(thing, name)
    return thing


def edit(path: str, old: str, new: str) -> Callable[[], None]:
    """In a function's source, for all who hold the function."""

    def plant() -> None:
        function = named(path)
        for held in ("fget", "__func__", "__wrapped__"):  # of a property, a class method, a decorated function
            function = getattr(function, held, None) or function
        text = textwrap.dedent(inspect.getsource(function))
        if text.count(old) != 1:
            raise ValueError(f"{path} has no more, or more than once: {old}")
        text = "\n".join(line for line in text.replace(old, new).splitlines() if not line.startswith("@"))
        made: dict[str, Any] = {}
        code = compile(text, f"{path}, with a mistake", "exec", __future__.annotations.compiler_flag)
        exec(code, function.__globals__, made)
        function.__code__ = made[function.__name__].__code__

    return plant


def entry(path: str, key: str, value: Any) -> Callable[[], None]:
    """In a table. value: another key of it, whose entry is taken, or a function of what stands there."""

    def plant() -> None:
        table = named(path)
        table[key] = table[value] if isinstance(value, str) and value in table else value(table[key]) if callable(
            value) else value  # fmt: skip

    return plant
