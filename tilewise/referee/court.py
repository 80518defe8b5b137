"""The contender's own process: it holds one, and computes the calls whose ids it is told."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tilewise.arrays import Array
from tilewise.referee.calls import Call, inputs
from tilewise.referee.contender import Says, find
from tilewise.referee.features import FEATURES, parse


@dataclass(frozen=True)
class Options:
    """How a contender is judged, and what a function says of itself."""

    device: str = "cpu"
    causal: str = "bottom right"
    dtypes: tuple[str, ...] = ()
    threads: int | None = None


@dataclass(frozen=True)
class Introduction:
    about: str
    missing: str | None
    ours: bool = False
    says: Says | None = None
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Testimony:
    """What a call gave the first time; which results had other bits later; which input was written to."""

    answer: dict[str, Array]
    differs: tuple[str, ...]
    changed: str


class Court:
    def __init__(self, name: str, options: Options) -> None:
        self.contender, self.device = find(name, options.causal, options.dtypes), options.device

    def introduce(self) -> Introduction:
        who = self.contender
        missing = who.missing(self.device)
        if missing is not None:
            return Introduction(who.about, missing)
        return Introduction(who.about, None, who.ours, who.says(self.device), who.versions())

    def hear(self, name: str) -> Testimony:
        call = parse(name)
        run = self.contender.prepare(call, inputs(call), self.device)
        first = {what: np.array(x) for what, x in run().items()}
        differs: set[str] = set()
        for _ in range(_repeats(call) - 1):
            again = run()
            differs |= {what for what, x in first.items() if x.tobytes() != np.asarray(again[what]).tobytes()}
        return Testimony(first, tuple(sorted(differs)), self.contender.inputs_changed())


def _repeats(call: Call) -> int:
    return FEATURES[call.id.partition("/")[0]].repeats
