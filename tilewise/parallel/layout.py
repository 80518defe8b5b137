"""How a sequence lies over ranks: each has a few ranges of it. Arithmetic alone, nothing here knows of processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from tilewise.arrays import Array
from tilewise.sharing import lazy
from tilewise.validate import whole

NAMES = ("contiguous", "zigzag")
MOST_RANKS = 2**16
_LATEST = 64  # of many ranks a layout takes long to make, and a model has the same one in every layer


@dataclass(frozen=True)
class Layout:
    """ranges[r]: the parts of the sequence that rank r has, in its order. Together they are all of it, once."""

    ranges: tuple[tuple[range, ...], ...]

    def __post_init__(self) -> None:
        given = sorted((x for each in self.ranges for x in each if len(x)), key=lambda x: x.start)
        edges = [0, *(x.stop for x in given)]
        if any(x.step != 1 or x.start != edge for x, edge in zip(given, edges, strict=False)):
            raise ValueError(f"Layout: expected ranges that are all of a sequence, each place once, got {self.ranges}")
        object.__setattr__(self, "ranges", tuple(map(joined, self.ranges)))

    @property
    def ranks(self) -> int:
        return len(self.ranges)

    @property
    def n(self) -> int:
        return int(self.sizes.sum())

    def rows(self, rank: int) -> int:
        return int(self.sizes[rank])

    @lazy
    def sizes(self) -> Array:
        """How many rows each rank has."""
        return np.array([sum(map(len, each)) for each in self.ranges], np.int64)

    def __hash__(self) -> int:
        return self._hash

    @lazy
    def _hash(self) -> int:  # a layout is part of many keys, and may have thousands of ranges
        return hash(self.ranges)

    def positions(self, *ranks: int) -> Array:
        """Where the rows of these ranks stand in the sequence, one rank after the other."""
        parts = [np.arange(x.start, x.stop) for rank in ranks for x in self.ranges[rank]]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    @lru_cache(maxsize=_LATEST)  # noqa: B019 - of the latest alone
    def joined(self, size: int) -> Layout:
        """Each `size` neighbouring ranks as one."""
        if size == 1:
            return self
        teams = (self.ranges[i : i + size] for i in range(0, self.ranks, size))
        return Layout(tuple(tuple(x for each in team for x in each) for team in teams))


def joined(ranges: Iterable[range]) -> tuple[range, ...]:
    """In order, with those that overlap or touch as one, and without empty ones."""
    made: list[range] = []
    for each in sorted((x for x in ranges if len(x)), key=lambda x: x.start):
        if made and each.start <= made[-1].stop:
            made[-1] = range(made[-1].start, max(made[-1].stop, each.stop))
        else:
            made.append(each)
    return tuple(made)


@lru_cache(maxsize=_LATEST)
def of_sizes(sizes: tuple[int, ...]) -> Layout:
    """One range a rank, of these sizes."""
    edges = np.cumsum([0, *sizes]).tolist()
    return Layout(tuple((range(a, b),) for a, b in pairwise(edges)))


def contiguous(n: int, ranks: int) -> Layout:
    """One range a rank, as equal as they can be."""
    return of_sizes(tuple(len(x) for x in _even(*counted(n, ranks))))


def zigzag(n: int, ranks: int) -> Layout:
    """Two ranges a rank, one from the beginning and its mirror image from the end: equal work under a causal mask.

    >>> zigzag(8, 2).ranges
    ((range(0, 2), range(6, 8)), (range(2, 6),))
    """
    return _zigzag(*counted(n, ranks))


@lru_cache(maxsize=_LATEST)
def _zigzag(n: int, ranks: int) -> Layout:
    parts = _even(n, 2 * ranks)
    return Layout(tuple((parts[rank], parts[-1 - rank]) for rank in range(ranks)))


def counted(n: int, ranks: int) -> tuple[int, int]:
    """A caller's numbers, checked. Positions are 32 bit."""
    return whole("n", n, 0), whole("ranks", ranks, 1, MOST_RANKS)


def _even(n: int, parts: int) -> list[range]:
    return [range(i * n // parts, (i + 1) * n // parts) for i in range(parts)]


def check_name(layout: object) -> None:
    if not isinstance(layout, Layout) and layout not in NAMES:
        expected = ", ".join(repr(name) for name in NAMES)
        raise ValueError(f"layout: expected {expected} or a parallel.Layout, got {layout!r}")


def named(layout: str | Layout, n: int, ranks: int) -> Layout:
    """The layout of n rows over so many ranks."""
    check_name(layout)
    if not isinstance(layout, Layout):
        return contiguous(n, ranks) if layout == "contiguous" else zigzag(n, ranks)
    if layout.ranks != ranks:
        raise ValueError(f"layout: it is for {layout.ranks} ranks, and the mesh has {ranks}; make it for {ranks}")
    if layout.n != n:
        raise ValueError(f"layout: it is of a sequence of {layout.n}, and the shards have {n} rows together")
    return layout


def found(layout: str | Layout, sizes: Sequence[int], name: str) -> Layout:
    """The layout that ranks with shards of these sizes have; contiguous ones may be of any size."""
    if layout == "contiguous":
        return of_sizes(tuple(sizes))
    made = named(layout, sum(sizes), len(sizes))
    expected = made.sizes.tolist()
    if expected != list(sizes):
        raise ValueError(
            f"{name}: a layout of {sum(sizes)} rows gives the ranks {expected} of them, and their shards have "
            f"{list(sizes)}; shard with parallel.shard(x, mesh, layout=...)"
        )
    return made
