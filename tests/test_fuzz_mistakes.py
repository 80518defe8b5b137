"""The fuzz can fail: mistakes in code generators, interval tables and marshalling are planted, and each is found."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.fuzzing.running import systems
from tests.fuzzing.running.mistakes import MISTAKES
from tests.fuzzing.running.planting import MOST_CALLS, Mistake, edit, found, put
from tests.fuzzing.running.workers import answered


def _params() -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if x.is_slow else []) for name, x in MISTAKES.items()]


def _need(mistake: Mistake) -> None:
    reason = systems.unavailable(mistake.system)
    if reason is not None or systems.device(mistake.system) != "cpu":
        pytest.skip(f"{mistake.system} cannot run in main memory here: {reason}")


@pytest.mark.parametrize("name", _params())
def test_mistake_is_found(name: str, record_property: Any) -> None:
    mistake = MISTAKES[name]
    _need(mistake)
    seen = found(mistake)
    assert seen is not None, f"{MOST_CALLS} calls do not show it"
    record_property("calls", seen.calls)
    # A wrong result, a wrong plan, a crash, or an error where none is due; never a question that could not be asked.
    assert not re.match("Refused|Unaskable|no answer", seen.told), seen.told


def test_there_are_many_of_each_kind() -> None:
    kinds = {"intervals", "bytecode", "values", "derivatives", "marshalling", "calls", "linear", "triton", "cuda"}
    assert len(MISTAKES) >= 30 and kinds <= {name.partition(":")[0] for name in MISTAKES}
    assert sum(not mistake.is_slow for mistake in MISTAKES.values()) >= 30
    assert {"cuda: a bound and a start are one value", "tilelang: quotients are simplified"} <= MISTAKES.keys()


@pytest.mark.parametrize("group", ["intervals", "bytecode", "derivatives", "linear"])
def test_without_a_mistake_nothing_is_found(group: str) -> None:
    """The same calls, of the systems as they are."""
    mistake = next(mistake for name, mistake in MISTAKES.items() if name.startswith(group))
    _need(mistake)
    right = Mistake(mistake.system, lambda: None, mistake.wanted)
    verdicts = [x[1] for x in answered(put(right).begin, [range(60)], 1) if x is not None]
    assert len(verdicts) == 60 and [x.failure for x in verdicts if x.failure is not None] == []


def test_a_mistake_that_cannot_be_planted_is_told() -> None:
    """The sources changed: an edit that finds nothing must not pass for a mistake that was found."""
    with pytest.raises(RuntimeError, match="could not be planted"):
        found(Mistake("numpy", edit("intervals:_abs", "what is not there", "")), most=1)
