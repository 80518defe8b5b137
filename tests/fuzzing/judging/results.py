"""What the judge answers: each result as it is exactly, and how far from it a kernel may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from tests.fuzzing.judging.widths import LARGEST
from tests.fuzzing.question import Numbers


@dataclass(frozen=True, eq=False)
class Exact:
    """One result: its type, what it is, and what the same computation gives in the precision of a kernel.

    rounded_as, saved: what the contract's limit is made of besides: the type by whose rounding results are off, and
    what was rounded before, as a share of the result.
    """

    what: str
    dtype: str
    rounded_as: str
    exact: Numbers
    dense: Numbers
    saved: float
    bounds: Callable[[], dict[str, Numbers]] = field(repr=False)
    remainders: Callable[[], dict[str, Numbers]] | None = field(default=None, repr=False)

    @property
    def bound(self) -> Numbers:
        """How far rounding alone can take each number from the exact one; found when it is asked for."""
        return self.bounds()[self.what]

    @property
    def with_remainder(self) -> Exact:
        """The same for a backward pass that got what storing took from out, by which it is to be more exact."""
        return self if self.remainders is None else replace(self, dense=self.remainders()[self.what], remainders=None)


@dataclass(frozen=True, eq=False)
class Answer:
    """A question's results by their names, unless it is not fit to judge by: `unfit` says why."""

    unfit: str | None
    results: dict[str, Exact]


def beyond_its_type(x: Exact) -> str | None:
    finite = np.isfinite(x.exact)
    largest = np.abs(x.exact[finite]).max(initial=0)
    fits = not np.isnan(x.exact).any() and largest < 0.9 * LARGEST[x.dtype] and np.isfinite(x.dense[finite]).all()
    return None if fits else "results beyond the range of their type"


def remembered(find: Callable[[], dict[str, Numbers]]) -> Callable[[], dict[str, Numbers]]:
    """Found when it is asked for, once."""

    @lru_cache(maxsize=1)
    def quietly() -> dict[str, Numbers]:
        with np.errstate(all="ignore"):
            return find()

    return quietly
