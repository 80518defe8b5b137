"""What a chart shows, and nothing of how it is drawn: drawing.py draws it for the page, plots.py for files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tilewise.bench.page.measurement import Measurement

Format = Callable[[float], str]

# Where a colour begins: ratios around 1 are even, and shares rise in fifths.
RATIO_STEPS = (0.67, 0.83, 0.97, 1.03, 1.2, 1.5)
SHARE_STEPS = (0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float  # the noise; y where it is not known
    high: float
    of: Measurement


@dataclass(frozen=True)
class Series:
    """A contestant's numbers, or a bound that they are seen beside."""

    name: str
    colour: str
    points: list[Point]
    ours: bool = False
    bound: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    series: list[Series]


@dataclass(frozen=True)
class Lines:
    """Panels of lines against n, which is on a logarithmic axis."""

    name: str
    title: str
    panels: list[Panel]
    tick: Format
    logarithmic: bool = False  # the values


@dataclass(frozen=True)
class Group:
    """Bars of one cell."""

    label: str
    series: list[Series]  # a point each


@dataclass(frozen=True)
class Bars:
    name: str
    title: str
    panels: list[tuple[str, list[Group]]]
    number: Format


@dataclass(frozen=True)
class Heatmap:
    """Numbers of ours by cell; a colour for each step that they have passed."""

    name: str
    title: str
    columns: list[str]
    rows: list[tuple[str, list[Measurement | None]]]
    number: Callable[[Measurement], float | None]
    shown: Format
    steps: tuple[float, ...]

    def step(self, value: float) -> int:
        return sum(value >= least for least in self.steps)

    @property
    def legend(self) -> list[str]:
        """What each colour stands for."""
        between = [f"{self.shown(a)} – {self.shown(b)}" for a, b in zip(self.steps, self.steps[1:], strict=False)]
        return [f"below {self.shown(self.steps[0])}", *between, f"{self.shown(self.steps[-1])} and more"]


Chart = Lines | Bars | Heatmap


def series_of(chart: Lines | Bars) -> Mapping[str, Series]:
    """Every name of the chart once, for its legend: ours first, bounds last."""
    if isinstance(chart, Lines):
        every = [series for panel in chart.panels for series in panel.series]
    else:
        every = [series for _, groups in chart.panels for group in groups for series in group.series]
    found: dict[str, Series] = {}
    for series in sorted(every, key=lambda s: (s.bound, not s.ours)):
        found.setdefault(series.name, series)
    return found


def short(n: float) -> str:
    """A length as people say it: 512, 16k."""
    return f"{n / 1024:.0f}k" if n >= 1024 and n % 1024 == 0 else f"{n:.0f}"
