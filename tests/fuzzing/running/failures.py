"""Failures as they are told: what went wrong, the line that makes it again, and the smallest question that fails so."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from tests.fuzzing.question import Given, LinearQuestion
from tests.fuzzing.running.put import Asked, Put, question_of
from tests.fuzzing.running.shrink import shrunk
from tests.fuzzing.running.trial import Verdict, kind_of
from tests.fuzzing.running.workers import Trouble, Worker
from tests.fuzzing.running.written import written

MOST_SHRUNK = 3  # failures that are made small
PATIENCE = 30.0  # seconds for a smaller question, after which it is taken to hang
MOST_CHARACTERS = 60_000  # of a line that a shell surely takes
ENVIRONMENT = ("TILEWISE_CPU_ISA", "OMP_NUM_THREADS", "TRITON_INTERPRET")  # what a replay needs as well


class Failures:
    def __init__(self, put: Put, seconds: float) -> None:
        self.put, self.seconds = put, seconds

    def tell(self, failures: Sequence[tuple[int, str]]) -> None:
        for i, (seed, failure) in enumerate(failures):
            question = question_of(seed, self.put.wanted)
            print(f"FAILED: {failure}\n{described(question)}\n  again: {self._by_seed(seed)}")
            if i < MOST_SHRUNK and self.seconds > 0:
                self._tell_smallest(question, failure)
            print()

    def _tell_smallest(self, question: Asked, failure: str) -> None:
        small, how = self.smallest(question, failure)
        if how is None:
            print("  it does not fail when it is asked alone")
            return
        print(f"  smallest: {how}\n{described(small)}\n  again: {self._by_question(small)}")

    def smallest(self, question: Asked, failure: str) -> tuple[Asked, str | None]:
        """The smallest question that fails in the same way, and how it does; None if this one does not fail again."""
        worker = Worker(self.put.begin, PATIENCE)
        kind, last = _kind(failure), dict[str, str]()

        def fails(candidate: Asked) -> bool:
            found = _failure_of(worker.one(candidate))
            if found is not None and _kind(found) == kind:
                last["told"] = found
                return True
            return False

        try:
            small = shrunk(question, fails, self.seconds) if fails(question) else question
        finally:
            worker.stop()
        return small, last.get("told")

    # -- lines --------------------------------------------------------------------------------------------------------
    def _by_seed(self, seed: int) -> str:
        wanted = self.put.wanted
        shares = [f"--backward-share {wanted.backward_share:g}", f"--half-share {wanted.half_share:g}"]
        return self._line(f"--only {seed}", *shares, f"--shapes {wanted.shapes}")

    def _by_question(self, question: Asked) -> str:
        text = written(question)
        if len(text) > MOST_CHARACTERS:
            return self._line("--question -", f"<<< {shlex.quote(text)}")  # too long for an argument
        return self._line(f"--question {shlex.quote(text)}")

    def _line(self, *arguments: str) -> str:
        environment = [f"{name}={shlex.quote(os.environ[name])}" for name in ENVIRONMENT if name in os.environ]
        isa = [] if self.put.isa is None else [f"--isa {self.put.isa}"]
        return " ".join([*environment, f"python tests/fuzz.py --kernel {self.put.name}", *isa, *arguments])


def _failure_of(found: Verdict | Trouble) -> str | None:
    return str(found) if isinstance(found, Trouble) else found.failure


def _kind(failure: str) -> str:
    """What stays the same while a question becomes smaller: an error's name, or that the process ended or hung."""
    named = re.match(r"(\w+):", failure)
    return named[1] if named and not failure.startswith("crashed") else failure.split(":")[0].split(" ")[0]


# -- in words ---------------------------------------------------------------------------------------------------------


def described(question: Asked) -> str:
    told = [f"  {kind_of(question)}, {question.dtype}: {', '.join(question.names)}"]
    given = {name: getattr(question, name, None) for name in ("q", "k", "v", "sinks", "decay", "d_out", "d_lse")}
    told += [f"  {name}: {_in_words(x)}" for name, x in given.items() if x is not None]
    if isinstance(question, LinearQuestion):
        told.append(f"  feature: {question.feature_as_written or question.feature}, lengths {question.lengths}")
        told.append(f"  causal {question.causal}, normalize {question.normalize}, scale {question.scale:g}")
        return "\n".join(told)
    for name in ("mask", "score"):
        text, as_written = getattr(question, name), getattr(question, f"{name}_as_written")
        told += [f"  {name}: {text}"] if text is not None else []
        told += [f"    as written: {as_written}"] if as_written is not None else []
    told += [f"  a{i}: {_in_words(x)}" for i, x in enumerate(question.arrays)]
    for name in ("lengths", "cache", "total", "tile"):
        told += [f"  {name}: {getattr(question, name)}"] if getattr(question, name) is not None else []
    told.append(
        f"  origin {question.origin}, {question.threads} threads, scale {question.scale:g}, "
        f"batch_invariant {question.batch_invariant}, saved elsewhere {question.saved_elsewhere}"
    )
    return "\n".join(told)


def _in_words(given: Given) -> str:
    layout = "" if given.layout == type(given.layout)() else f", {given.layout}"
    return f"{given.dtype} {given.values.shape}{layout}{', its gradient wanted' if given.wants_gradient else ''}"
