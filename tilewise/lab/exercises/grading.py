"""Grading a learner's file: in a process of its own, so that an endless loop or a crash is a result like others."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.bench.process import Child
from tilewise.bench.refusal import RefusedError
from tilewise.lab.exercises import exercise
from tilewise.lab.exercises.judging import WrongError


@dataclass(frozen=True)
class Verdict:
    """What was found right before the first wrong thing; wrong: "" if there is none; missing: why nobody looked."""

    passed: tuple[str, ...] = ()
    wrong: str = ""
    missing: str = ""
    printed: str = ""

    @property
    def is_right(self) -> bool:
        return not self.wrong and not self.missing


def graded(name: str, path: Path, limit: float) -> Verdict:
    """limit: seconds."""
    asked = exercise(name)
    reason = asked.unavailable()
    if reason is not None:
        return Verdict(missing=reason)
    if not path.is_file():
        return Verdict(wrong=f"{path} is not there; `tilewise lab start {path.parent} {name}` writes it")
    refused = asked.refused(path.read_text(errors="replace"))
    if refused is not None:
        return Verdict(wrong=refused)
    with Child(f"{__name__}:Grader", name, str(path.resolve()), env=asked.env) as child:
        try:
            verdict: Verdict = child.ask("grade", timeout=limit)
        except RefusedError as error:
            if error.status == "timed out":
                told = f"it does not end: stopped after {limit:g} s. Does every loop come to its end?"
                return Verdict(wrong=f"{told} On a busy machine --limit gives it longer")
            return Verdict(wrong=str(error))
    return verdict


class Grader:
    """The child's side."""

    def __init__(self, name: str, path: str) -> None:
        self._exercise, self._path = exercise(name), Path(path)

    def grade(self) -> Verdict:
        passed: list[str] = []
        printed = io.StringIO()
        wrong = ""
        with redirect_stdout(printed), np.errstate(all="ignore"):  # what becomes NaN is told of later
            try:
                passed.extend(self._exercise.grade(self._path))
            except WrongError as error:
                wrong = str(error)
            except (Exception, SystemExit) as error:
                wrong = _told(error, self._path)
        return Verdict(tuple(passed), wrong, printed=printed.getvalue())


def load(path: Path, *wanted: str) -> Any:
    """A learner's file as a module, which must have these names."""
    sys.path.insert(0, str(path.parent))  # files beside it can be imported
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = [name for name in wanted if not hasattr(module, name)]
    if missing:
        raise WrongError(f"{path.name} has no {', '.join(missing)}, which is called: keep the names of the skeleton")
    return module


def _told(error: BaseException, path: Path) -> str:
    """An error by the learner's own line, if it came from there."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    lines = [frame for e in _causes(error) for frame in traceback.extract_tb(e.__traceback__) if _is(frame, path)]
    if not lines:
        return what
    return f"line {lines[-1].lineno}: {what}" + (f"\n    {lines[-1].line}" if lines[-1].line else "")


def _is(frame: traceback.FrameSummary, path: Path) -> bool:
    return Path(frame.filename) == path


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
