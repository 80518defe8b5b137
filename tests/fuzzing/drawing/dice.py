"""Chance from one seed: choices, sizes, and numbers to fill arrays with."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from tests.fuzzing.question import Numbers

T = TypeVar("T")
PERIOD = 4999


class Choices:
    """Choices, from any source of whole numbers: `below(n)` is from 0 to n - 1."""

    def __init__(self, below: Callable[[int], int]) -> None:
        self.below = below

    def between(self, low: int, high: int) -> int:
        """Both inclusive."""
        return low + self.below(high - low + 1)

    def chance(self, share: float) -> bool:
        return self.below(100) < 100 * share

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def weighted(self, shares: Mapping[T, float]) -> T:
        at = self.below(1000) * sum(shares.values()) / 1000
        options = list(shares)
        for option in options:
            at -= shares[option]
            if at < 0:
                return option
        return options[-1]  # by rounding alone


class Dice(Choices):
    """Choices and numbers from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random
        self._values = np.random.default_rng(seed)
        super().__init__(lambda n: int(self._random() * n))

    def chance(self, share: float) -> bool:
        return self._random() < share

    def normal(self, shape: tuple[int, ...]) -> Numbers:
        """Never beyond 4, so that a magnitude of 10 000 still fits float16. Many repeat a prime number of them: no two
        rows are alike, and drawing costs less than computing."""
        drawn = self._values.standard_normal(min(math.prod(shape), PERIOD))
        return np.resize(np.clip(drawn, -4, 4), shape)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Numbers:
        """Both inclusive."""
        return np.asarray(self._values.integers(low, high + 1, shape))
