"""From numbers to places on an axis, and the ticks along it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_TICKS = 5


@dataclass(frozen=True)
class Scale:
    """An axis from `first` to `last`; its ends are `low` and `high`."""

    low: float
    high: float
    first: float
    last: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        share = (self._of(value) - self._of(self.low)) / ((self._of(self.high) - self._of(self.low)) or 1.0)
        return self.first + share * (self.last - self.first)

    def _of(self, value: float) -> float:
        return math.log2(value) if self.logarithmic else value


def ceiling(most: float) -> tuple[float, list[float]]:
    """The end of an axis from 0 that has room for `most`, and its ticks."""
    step = _step(most / (_TICKS - 1))
    count = max(math.ceil(most / step), 1)
    return count * step, [i * step for i in range(count + 1)]


def _step(about: float) -> float:
    """1, 2, 2.5 or 5 times a power of ten, not below."""
    power = 10.0 ** math.floor(math.log10(about)) if about > 0 else 1.0
    return next((x * power for x in (1, 2, 2.5, 5) if x * power >= about * 0.999), 10 * power)


def powers(values: Iterable[float], base: int) -> tuple[float, float, list[float]]:
    """The ends of a logarithmic axis, and powers of the base between them that are its ticks."""
    found = list(values)
    first, last = math.floor(math.log(min(found), base)), math.ceil(math.log(max(found), base) - 1e-9)
    last = max(last, first + 1)
    stride = -(-(last - first) // _TICKS)
    return float(base) ** first, float(base) ** last, [float(base) ** i for i in range(first, last + 1, stride)]
