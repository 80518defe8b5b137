"""The process that all contestants share: it draws a case's tensors, judges everyone and times them in turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from tilewise.bench.gpu import cases, judge, limits, timing
from tilewise.bench.gpu.cases import Case
from tilewise.bench.gpu.contestants import Contestant, entered, find
from tilewise.bench.gpu.judge import ALLOWED
from tilewise.bench.gpu.timing import Clock, GpuClock, HostClock, Loop, Settings
from tilewise.bench.refusal import RefusedError, public, refusal

Record = dict[str, Any]
NUMBERS = (
    "how", "calls", "median_ms", "rounds_ms", "spread", "tflops", "fraction", "gbs", "read_fraction", "error", "ratio",
    "ratios", "plan_bytes", "limits_ms", "dram_bytes", "l2_bytes", "tensor_busy", "exp_busy", "issue_busy",
    "counters_reason", "warm_ms", "warm_rounds_ms", "compiled",
)  # fmt: skip


class Stage:
    clock: type[Clock] = GpuClock
    device = "cuda"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._gpu = self.clock(settings)

    def machine(self) -> dict[str, Any]:
        return limits.machine()

    def limits(self) -> dict[str, float | None]:
        return limits.measured()

    def missing(self, names: Sequence[str]) -> dict[str, str]:
        """Who cannot take part, with the reason."""
        reasons = {name: find(name).missing() for name in names}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def measure(self, case: Case, names: Sequence[str], host: bool = False) -> list[Record]:
        """A record for everyone, in their order. A GPU that can no longer be used is an error, not a record."""
        clock = HostClock(self._settings, self._gpu.sync) if host else self._gpu
        contestants = [find(name) for name in names]
        loops, errors, refused = self._enter(case, contestants, clock)
        turns = {name: partial(self._turn, clock, name, loop) for name, loop in loops.items()}
        seconds, failed = timing.rounds(turns, self._settings.rounds)
        refused.update({name: refusal(error) for name, error in failed.items()})
        records = []
        for c in contestants:
            record = blank(case, c.name, c.ours, refused.get(c.name))
            if c.name not in refused:
                record.update(_numbers(case, loops[c.name], seconds[c.name], errors[c.name]))
            records.append(record)
        compare(records)
        return records

    def _enter(
        self, case: Case, contestants: Sequence[Contestant], clock: Clock
    ) -> tuple[dict[str, Loop], dict[str, float], dict[str, RefusedError]]:
        """Everyone's loop and error; and who does not get that far."""
        sets = cases.sets(case, self.device)
        expected = judge.expected(case, sets[0])
        loops: dict[str, Loop] = {}
        errors: dict[str, float] = {}
        refused: dict[str, RefusedError] = {}
        for c in contestants:
            try:
                loops[c.name] = clock.loop(entered(c, case, sets))
                errors[c.name] = expected.error(_poisoned(loops[c.name]))
            except Exception as error:  # a peer's failure is a result of the benchmark
                refused[c.name] = refusal(error)
                loops.pop(c.name, None)
                self._check_device(c.name, refused[c.name])
        return loops, errors, refused

    def _turn(self, clock: Clock, name: str, loop: Loop) -> float:
        try:
            return clock.turn(loop)
        except Exception as error:
            self._check_device(name, refusal(error))
            raise

    def _check_device(self, name: str, refused: RefusedError) -> None:
        try:
            self._gpu.sync()
        except Exception:
            raise RefusedError(refused.status, f"{name} left the GPU unusable: {refused.reason}") from None


def _poisoned(loop: Loop) -> Any:
    """The output of a run that finds NaN where it will write, so that what it leaves out shows."""
    with loop.entry.around():
        written = loop.run()
        for x in written if isinstance(written, tuple) else (written,):
            x.fill_(math.nan)
        return loop.entry.read(loop.run())


def blank(case: Case, name: str, ours: bool, refused: RefusedError | None) -> Record:
    """A record with every field; numbers come later, if they come."""
    status, reason = ("ok", None) if refused is None else (refused.status, public(refused.reason))
    who = {"contestant": name, "ours": ours, "status": status, "reason": reason}
    return {**case.describe(), **who, **dict.fromkeys(NUMBERS)}


def _numbers(case: Case, loop: Loop, seconds: list[float], error: float) -> Record:
    """The median of the rounds' medians, and how far apart those are as a part of it."""
    middle = median(seconds)
    return {
        "how": loop.how, "calls": loop.calls, "median_ms": middle * 1e3, "rounds_ms": [x * 1e3 for x in seconds],
        "spread": (max(seconds) - min(seconds)) / middle,
        "tflops": None if loop.how == timing.HOST else case.flops / middle / 1e12,
        "gbs": case.read_bytes / middle / 1e9 if case.queries else None,
        **judged(error),
    }  # fmt: skip


def judged(error: float) -> Record:
    """A record's part that says whether the numbers count."""
    found: Record = {"error": error if math.isfinite(error) else None}  # JSON has no infinity
    if error > ALLOWED:
        found.update(status="wrong", reason=f"relative error {error:.2g}, at most {ALLOWED} is rounding")
    return found


def compare(records: list[Record]) -> None:
    """Our speed over that of every right peer (ratios), and of the best of them (ratio)."""
    times = {r["contestant"]: r["median_ms"] for r in records if not r["ours"] and r["status"] == "ok"}
    for r in records:
        if r["ours"] and r["status"] == "ok" and times:
            r["ratios"] = {name: ms / r["median_ms"] for name, ms in times.items()}
            r["ratio"] = min(r["ratios"].values())
