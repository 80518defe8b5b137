"""What came of many questions: counts, the worst error, luck that is none, and the failures."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.fuzzing.running.trial import Verdict
from tests.fuzzing.running.workers import Trouble

MOST_LUCK, MOST_LUCK_OF_A_KIND = 0.05, 0.15  # the share of results that may need the bound of rounding ...
LUCK_SPARES = 5  # ... once there are some
# Gradients of an array are often one number, whose error is held against one draw of the same distribution: if both are
# normal, it is beyond twice the other with probability 1 - atan(2) * 2 / pi, 3 times in 10, in a kernel as good.
OF_ONE_NUMBER, MOST_LUCK_OF_ONE_NUMBER = "d_array", 0.15


def _most_luck(name: str) -> float:
    """Of results of that name, or of those of one kind of call."""
    if name.startswith(OF_ONE_NUMBER):
        return MOST_LUCK_OF_ONE_NUMBER if " of " not in name else 2 * MOST_LUCK_OF_ONE_NUMBER
    return MOST_LUCK_OF_A_KIND if " of " in name else MOST_LUCK


@dataclass
class Report:
    cases: int = 0
    backward: int = 0
    plans: int = 0
    results: Counter[str] = field(default_factory=Counter)
    lucky: Counter[str] = field(default_factory=Counter)
    worst: tuple[float, int] = (0.0, 0)  # error as a share of its limit, and the seed
    dtypes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)
    unfit: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    interrupted: bool = False
    began: float = field(default_factory=time.monotonic)

    def add(self, seed: int, verdict: Verdict | Trouble) -> None:
        self.cases += 1
        self.seeds.append(seed)
        if isinstance(verdict, Trouble):
            self.failures.append((seed, str(verdict)))
            return
        self.backward += verdict.backward
        self.plans += verdict.plans
        for counts, more in ((self.results, verdict.results), (self.lucky, verdict.lucky)):
            counts.update(more)
            counts.update({f"{name} of {verdict.kind}": count for name, count in more.items()})
        self.worst = max(self.worst, (verdict.ratio, seed))
        self.dtypes[verdict.dtype] += 1
        self.kinds[verdict.kind] += 1
        self.names.update(set(verdict.names))
        self.unfit += verdict.redrawn
        if verdict.refused is not None:
            self.refused[verdict.refused] += 1
        if verdict.failure is not None:
            self.failures.append((seed, verdict.failure))

    @property
    def answered(self) -> int:
        """Calls that were computed and judged."""
        return self.results["out"]

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.began, 1e-9)

    @property
    def rate(self) -> float:
        return self.cases / self.seconds

    @property
    def too_lucky(self) -> str | None:
        """Which results were beyond the contract's limit too often for luck: each within what rounding can do, and yet
        a kernel that rounds more than the contract has it."""
        often = [x for x, n in self.lucky.most_common() if n > LUCK_SPARES and n > _most_luck(x) * self.results[x]]
        return None if not often else f"beyond the contract's limit more often than by luck: {', '.join(often)}"

    def _luck(self) -> str:
        told = (f"{name} {count:,} of {self.results[name]:,}" for name, count in self.lucky.most_common())
        return ", ".join(told) or "none"

    def progress(self, total: int | None) -> str:
        of = "" if total is None else f" of {total:,}"
        return f"{self.cases:,}{of} cases, {len(self.failures)} failures, {self.rate:.1f} a second"

    def summary(self) -> str:
        ratio, seed = self.worst
        rate = f"{self.rate:.0f}" if self.rate > 10 else f"{self.rate:.2g}"
        lines = [
            f"{self.cases:,} cases in {self.seconds:.0f} s ({rate} a second), {len(self.failures)} failures",
            f"  computed {self.answered:,}, backward as well {self.backward:,}; plans judged {self.plans:,}",
            f"  types: {_counts(self.dtypes)}",
            f"  calls: {_counts(self.kinds)}",
            f"  made of: {_counts(self.names, 12)}, ... ({len(self.names)} of them)",
            f"  redrawn, since their results would say nothing: {_counts(self.unfit)}",
            f"  largest error: {ratio:.3f} of its limit (seed {seed})",
            f"  results beyond the contract's limit but within the bound of rounding: {self._luck()}",
        ]
        if self.refused:
            lines += [f"  refused by the kernel, {count:,} times: {why}" for why, count in self.refused.most_common()]
        return "\n".join(lines)

    def counts(self) -> dict[str, Any]:
        """For the record of long runs."""
        return {
            "calls": self.cases, "computed": self.answered, "backward": self.backward,
            "refused": self.refused.total(), "redrawn": self.unfit.total(), "plans": self.plans,
            "wrong": len(self.failures), "worst": round(self.worst[0], 3),
        }  # fmt: skip


def _counts(counter: Counter[str], most: int | None = None) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common(most)) or "none"
