"""A contender's trial: calls of every feature, each judged; and of each fault the smallest call that shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tilewise.bench.machine import thread_variables
from tilewise.bench.process import Child
from tilewise.bench.refusal import RefusedError, public
from tilewise.referee.calls import PASSES, Call
from tilewise.referee.contender import NO_RESULT, Says
from tilewise.referee.court import Introduction, Options, Testimony
from tilewise.referee.features import FEATURES, Feature, draw
from tilewise.referee.truth import truth
from tilewise.referee.verdict import CRASHED, FAULTS, NOT_ASKED, REFUSED, WRONG, Finding, judge

COURT = "tilewise.referee.court:Court"
START = 300.0  # seconds for a library to be imported, however busy the machine is
_SMALLER = (2, 3, 4, 8, 16, 32)  # sizes in which a fault is looked for again, and seeds for each
_SEEDS = 3
_CRASHES = 2  # of a feature and pass, after which it is asked no more; and tries to make a crash smaller
_SEARCH = 20.0  # seconds for a smaller call, of which there is one try at least
_GPU_LOST = ("CUDA error", "AcceleratorError", "illegal memory access", "device-side assert", "CUDA_ERROR")
# Or JAX takes three quarters of a GPU's memory, and PyTorch's compiler starts as many processes as there are cores.
_MODEST = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@dataclass(frozen=True)
class Heard:
    """A call and what is said of its answer."""

    call: Call
    finding: Finding

    @property
    def feature(self) -> str:
        return self.call.id.partition("/")[0]

    @property
    def what(self) -> str:
        return PASSES[self.call.backward]

    @property
    def size(self) -> int:
        return int(self.call.id.split("/")[3])


@dataclass(frozen=True)
class Plan:
    """Which calls a contender is asked."""

    count: int = 4  # of each feature and pass
    seed: int = 0
    features: tuple[str, ...] = ()  # all
    dtypes: tuple[str, ...] = ()  # all that it says
    passes: tuple[str, ...] = PASSES
    large: bool = False
    timeout: float = 60.0
    budget: float = float("inf")  # seconds after which a process asks nothing more

    def chosen(self) -> list[Feature]:
        return [
            f
            for f in FEATURES.values()
            if (not f.large or self.large) and (not self.features or f.slug in self.features)
        ]

    def parts(self, count: int) -> list[Plan]:
        """This plan in so many, which have its features among them."""
        slugs = [f.slug for f in self.chosen()]
        return [replace(self, features=part) for i in range(count) if (part := tuple(slugs[i::count]))]

    def calls(self, says: Says, device: str) -> Iterator[list[Call]]:
        """A list of calls for each feature and pass: sizes and types change from one to the next."""
        for feature in (f for f in self.chosen() if device != "cpu" or not f.on_gpu):
            dtypes = [x for x in feature.dtypes if x in says.dtypes and (not self.dtypes or x in self.dtypes)]
            for what in feature.passes:
                if dtypes and what in self.passes:
                    yield [self._call(feature, dtypes, what, i) for i in range(self.count)]

    def _call(self, feature: Feature, dtypes: Sequence[str], what: str, i: int) -> Call:
        dtype = dtypes[i % len(dtypes)]
        size = feature.sizes[(i + i // len(dtypes)) % len(feature.sizes)]
        return draw(feature.slug, dtype, what, size, self.seed + i)


class Trial:
    """One contender, in as many processes, one after the other, as it takes."""

    def __init__(
        self, name: str, options: Options, plan: Plan, progress: Callable[[str], None] = lambda text: None
    ) -> None:
        self.name, self.options, self.plan, self.progress = name, options, plan, progress
        self._child: Child | None = None
        self.is_cut = False  # its budget was spent before its calls were asked

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    @cached_property
    def introduction(self) -> Introduction:
        try:
            found: Introduction = self._ask("introduce", timeout=START)
        except RefusedError as error:
            self._end()
            return Introduction(self.name, f"its process did not start: {error}")
        return found

    @property
    def says(self) -> Says:
        if self.introduction.says is None:
            raise RefusedError("missing", self.introduction.missing or "")
        return self.introduction.says

    def run(self) -> tuple[list[Heard], list[Heard]]:
        """Everything that was asked; and of each feature, pass and fault the smallest call that was found."""
        heard: list[Heard] = []
        begin = time.monotonic()

        def is_over() -> bool:
            return time.monotonic() - begin > self.plan.budget

        for calls in self.plan.calls(self.says, self.options.device):
            crashes = 0
            for call in calls:
                self.is_cut = self.is_cut or is_over()
                if crashes < _CRASHES and not self.is_cut:
                    self.progress(f"{self.name}: {len(heard)} calls, {call.id}")
                    heard.append(self.hear(call))
                    crashes += heard[-1].finding.verdict == CRASHED
        return heard, [fault if is_over() else self._smallest(fault) for fault in _faults(heard)]

    def hear(self, call: Call) -> Heard:
        return self.hear_all(call)[0]

    def hear_all(self, call: Call) -> tuple[Heard, Testimony | None]:
        """With the numbers, if there are any."""
        lacking = sorted(call.needs - self.says.arguments)
        if lacking:
            return Heard(call, Finding(NOT_ASKED, reason=", ".join(lacking))), None
        try:
            said = self._ask("hear", call.id, timeout=self.plan.timeout)
        except RefusedError as error:
            return Heard(call, self._not_answered(error)), None
        found = judge(truth(call.id), said.answer, self.says.without_keys)
        if said.changed:
            found = Finding(WRONG, said.changed, reason="the call wrote to this input")
        return Heard(call, replace(found, differs=said.differs)), said

    def _not_answered(self, error: RefusedError) -> Finding:
        """An error is a refusal, as a caller sees it; the end of a process, or of the GPU's context, is a crash."""
        if error.status == NO_RESULT:
            return Finding(WRONG, "out", reason=public(error.reason))
        lost = any(sign in error.reason for sign in _GPU_LOST)
        if self._child is not None and self._child.alive and not lost:
            return Finding(REFUSED, reason=public(error.reason))
        self._end()
        return Finding(CRASHED, reason=public(f"{error.status}: {error.reason}"))

    def _smallest(self, fault: Heard) -> Heard:
        tries, begin = 0, time.monotonic()
        for size in (x for x in _SMALLER if x < fault.size):
            for seed in range(_SEEDS):
                if fault.finding.verdict == CRASHED and (tries >= _CRASHES or "timed out" in fault.finding.reason):
                    return fault
                if tries and time.monotonic() - begin > _SEARCH:
                    return fault
                tries += 1
                self.progress(f"{self.name}: a smaller call than {fault.call.id}")
                found = self.hear(draw(fault.feature, fault.call.dtype, fault.what, size, seed))
                if _kind(found) == _kind(fault):
                    return found
        return fault

    # -- its process ---------------------------------------------------------------------------------------------------
    def _ask(self, method: str, *args: object, timeout: float) -> Any:
        if self._child is None:
            env = {**thread_variables(self.options.threads), **_MODEST}
            self._child = Child(COURT, self.name, self.options, env=env)
            if method != "introduce":  # a new process imports its library first, which is not the call's time
                self._child.ask("introduce", timeout=START)
        return self._child.ask(method, *args, timeout=timeout)

    def _end(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None


def _kind(heard: Heard) -> tuple[str, str, bool]:
    return heard.finding.verdict, heard.finding.what, bool(heard.finding.differs)


def _faults(heard: Sequence[Heard]) -> list[Heard]:
    """The smallest of each feature, pass and kind of fault."""
    found: dict[tuple[object, ...], Heard] = {}
    for x in sorted(heard, key=lambda x: x.size):
        if x.finding.verdict in FAULTS or x.finding.differs:
            found.setdefault((x.feature, x.what, x.finding.verdict, bool(x.finding.differs)), x)
    return list(found.values())
