"""Chance from one seed: choices, sizes, and numbers to fill arrays with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from tilewise.arrays import Array

T = TypeVar("T")


class Dice:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._values = np.random.default_rng(seed)

    def below(self, n: int) -> int:
        """From 0 to n - 1."""
        return int(self._random.random() * n)

    def between(self, low: int, high: int) -> int:
        """Both inclusive."""
        return low + self.below(high - low + 1)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def weighted(self, shares: Mapping[T, float]) -> T:
        return self._random.choices(list(shares), list(shares.values()))[0]

    def normal(self, shape: tuple[int, ...]) -> Array:
        """Never beyond 4, so that a magnitude of 10 000 still fits float16."""
        return np.asarray(np.clip(self._values.standard_normal(shape), -4, 4))

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Array:
        """Both inclusive."""
        return np.asarray(self._values.integers(low, high + 1, shape))
