"""One shape for the numbers of every results file, whatever its schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Cell = Mapping[str, Any]  # what was computed: work, variant, d, n ...

# What tells cells apart, in the order in which they are named, and how each is written.
FIELDS = {
    "work": "{}", "variant": "{}", "dtype": "{}", "d": "d {}", "n": "n {}", "inputs": "{} inputs",
    "packed": "packed {}", "ranks": "ranks: {}", "layout": "{}", "heads": "{} heads", "heads_k": "{} key heads",
    "queries": "queries: {}", "batch": "batch {}",
}  # fmt: skip
_FOLLOWING = ("heads", "heads_k", "queries", "batch", "layout")  # may follow from the others, as heads do from d


@dataclass(frozen=True)
class Unit:
    """Of what a run measures of a contestant."""

    name: str
    higher_is_better: bool = True

    @property
    def better(self) -> str:
        return "higher is better" if self.higher_is_better else "lower is better"


@dataclass(frozen=True, eq=False)
class Measurement:
    """A contestant in a cell. What was not measured is None."""

    cell: Cell
    contestant: str
    ours: bool
    status: str = "ok"
    reason: str | None = None
    ms: float | None = None  # the median
    low_ms: float | None = None  # the noise: the 10th and 90th percentile, or the fastest and slowest round
    high_ms: float | None = None
    value: float | None = None  # in the run's unit
    limit: float | None = None  # what the machine could reach, in the run's unit
    fraction: float | None = None  # of that
    ratio: float | None = None  # our speed over the best peer's
    extra_bytes: float | None = None
    matrix_bytes: float | None = None  # of all n x n scores
    error: float | None = None
    more: Mapping[str, str] = field(default_factory=dict)  # other numbers, by what they are called

    @property
    def is_right(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True, eq=False)
class Run:
    """A results file."""

    path: str  # as the page names it
    name: str  # the section of a suite, or what stands for one
    title: str
    unit: Unit
    limit: str  # what the limit is
    versus: str  # whose speed ours is compared with
    machine: Mapping[str, Any]
    measurements: list[Measurement]
    about: Mapping[str, Any]  # all that the file says
    origin: str  # when, and of which sources
    conditions: str  # the machine and the versions
    absent: Mapping[str, str]  # who was not there, and why

    @property
    def date(self) -> str:
        return str(self.about.get("date", ""))

    @property
    def where(self) -> str:
        return "GPU" if self.machine.get("gpu") else "CPU"

    @property
    def kind(self) -> str:
        """Under which heading it stands."""
        return "memory" if self.name == "memory" else KINDS.get(self.measurements[0].cell["work"], "other")

    @property
    def has_memory(self) -> bool:
        return any(m.extra_bytes is not None for m in self.measurements)


KINDS = {
    "forward": "forward", "backward": "backward", "forward+backward": "backward", "training step": "backward",
    "decode": "decode", "linear": "linear", "linear backward": "linear",
}  # fmt: skip


def distinguishing(cells: list[Cell]) -> list[str]:
    """The fields that tell these cells apart, without those that follow from the others."""
    chosen = [name for name in FIELDS if name not in _FOLLOWING and len({cell.get(name) for cell in cells}) > 1]
    for name in _FOLLOWING:
        if _apart(cells, [*chosen, name]) > _apart(cells, chosen):
            chosen.append(name)
    return chosen


def _apart(cells: list[Cell], fields: list[str]) -> int:
    return len({tuple(cell.get(name) for name in fields) for cell in cells})


def label(cell: Cell, fields: list[str]) -> str:
    return ", ".join(FIELDS[name].format(cell[name]) for name in fields if cell.get(name) is not None)


def common(cells: list[Cell], fields: list[str]) -> str:
    """What a label by these fields does not say, since it is the same in all cells or follows from the others."""
    told = []
    for name, text in FIELDS.items():
        values = sorted({cell[name] for cell in cells if cell.get(name) is not None})
        if name in fields or not values:
            continue
        if len(values) == 1 or isinstance(values[0], str):
            told.append(text.format(" and ".join(map(str, values))))
        else:
            told.append(text.format(f"{values[0]} to {values[-1]}"))
    return ", ".join(told)
