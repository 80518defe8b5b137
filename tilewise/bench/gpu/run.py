"""The suite's sections, one after the other, in a process that is started again when a contestant has broken it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from tilewise import dispatch
from tilewise.bench.contestants import OURS
from tilewise.bench.gpu import counters, first
from tilewise.bench.gpu.cases import DTYPE, Case
from tilewise.bench.gpu.contestants import find
from tilewise.bench.gpu.limits import shortest_ms
from tilewise.bench.gpu.stage import Record, blank
from tilewise.bench.gpu.suite import Section
from tilewise.bench.gpu.timing import Settings
from tilewise.bench.process import Child
from tilewise.bench.refusal import RefusedError, public
from tilewise.bench.stamp import stamp
from tilewise.schedule import itemsize, plan
from tilewise.spec import Attention, Shape

SCHEMA = "gpu 1"
STAGE = "tilewise.bench.gpu.stage:Stage"
TIMEOUT = 240.0  # seconds for a case: compilers included, hanging kernels excluded

Results = dict[str, Any]
Say = Callable[[str], None]


@dataclass(eq=False)
class Suite:
    kernel: str
    settings: Settings
    say: Say = lambda line: None
    _child: Child | None = None
    _about: dict[str, Any] = field(default_factory=dict)

    def section(self, section: Section, cases: Sequence[Case], options: dict[str, Any]) -> Results:
        """What is written as JSON."""
        names = list(dict.fromkeys(name for case in cases for name in section.who(self.kernel, case)))
        self.say(f"{section.name}: measuring the GPU's own limits")
        self._about = self._about or self._ask("machine")
        limits = self._ask("limits")
        missing = self._ask("missing", names)
        records: list[Record] = []
        for i, case in enumerate(cases, 1):
            self.say(f"{section.name} {i}/{len(cases)}: {case.variant}, n {case.n}, d {case.d}")
            who = [name for name in section.who(self.kernel, case) if name not in missing]
            records += self._first(case, who) if section.first else self._case(case, who, section.host)
        for record in records:
            record["fraction"] = _share(record["tflops"], limits["matmul_tflops"])
            record["read_fraction"] = _share(record["gbs"], limits["read_gbs"])
        if section.name == "ladder":
            self.say("ladder: counting bytes")
            climb(records, cases, limits)
        if section.name == "units":
            self.say("units: counting cycles")
            watch(records, cases)
        return {
            "schema": SCHEMA,
            **stamp({**self._about, **limits}),
            "method": self._method(section),
            "options": {"section": section.name, **options},
            "missing": {name: public(reason) for name, reason in missing.items()},
            "records": records,
        }

    def _case(self, case: Case, who: list[str], host: bool) -> list[Record]:
        """A contestant that breaks the process, or never ends, costs the case, not the run."""
        try:
            records: list[Record] = self._ask("measure", case, who, host)
            return records
        except RefusedError as error:
            self._restart()
            return [blank(case, name, find(name).ours, error) for name in who]

    def _first(self, case: Case, who: list[str]) -> list[Record]:
        return [first.measured(case, name, first.rounds(self.settings)) for name in who]

    def _method(self, section: Section) -> dict[str, Any]:
        return {"rounds": first.rounds(self.settings)} if section.first else asdict(self.settings)

    def _ask(self, method: str, *args: Any) -> Any:
        if self._child is None or not self._child.alive:
            self._restart()
            self._child = Child(STAGE, self.settings)
        return self._child.ask(method, *args, timeout=TIMEOUT)

    def _restart(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def __enter__(self) -> Suite:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restart()


def climb(records: list[Record], cases: Sequence[Case], limits: dict[str, Any]) -> None:
    """What the ladder's records say besides: the plan's bytes, the limits, and the bytes that were counted."""
    right = [r for r in records if r["status"] == "ok"]
    for r in right:
        r["plan_bytes"] = _plan_bytes(r)
        pairs = r["flops"] / (4 * r["d"])  # an exponential each
        r["limits_ms"] = shortest_ms(r["flops"], pairs, _least_bytes(r), limits)
    _count(right, cases, counters.traffic, {"dram_bytes": counters.DRAM, "l2_bytes": counters.L2})


def watch(records: list[Record], cases: Sequence[Case]) -> None:
    """How busy the units are, in percent."""
    right = [r for r in records if r["status"] == "ok"]
    shares = {"tensor_busy": counters.TENSOR, "exp_busy": counters.EXPONENTIALS, "issue_busy": counters.ISSUE}
    _count(right, cases, counters.busy, shares)


def _count(records: list[Record], cases: Sequence[Case], count: Any, fields: dict[str, str]) -> None:
    """What the counters say of a record's call, in these fields; or why they say nothing."""
    by_name = {_title(case.describe()): case for case in cases}
    counted = count([(r["contestant"], by_name[_title(r)]) for r in records]) if records else []
    for i, r in enumerate(records):
        if isinstance(counted, str):
            r["counters_reason"] = counted
        else:
            r.update({field: counted[i][metric] for field, metric in fields.items()})


def _title(r: Record) -> tuple[Any, ...]:
    return r["variant"], r["n"], r["d"], r["inputs"]


def _plan_bytes(r: Record) -> int:
    """Of full attention, at the tile that the kernel takes by itself."""
    shape = Shape(r["batch"], r["heads"], r["heads_k"], r["n"], r["n"], r["d"], r["d"], DTYPE, "cuda")
    spec = Attention(r["d"] ** -0.5)
    kernel = dispatch.kernel(r["contestant"].removeprefix(OURS))
    return plan(spec, shape, kernel.default_tile(spec, shape)).bytes_tiled


def _least_bytes(r: Record) -> int:
    """q, k, v and out, once."""
    return int(2 * r["batch"] * (r["heads"] + r["heads_k"]) * r["n"] * r["d"] * itemsize(DTYPE))


def _share(value: float | None, of: float | None) -> float | None:
    return value / of if value and of else None
