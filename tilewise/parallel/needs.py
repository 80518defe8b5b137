"""Which keys each rank needs of the others, found by interval arithmetic over tiles: EMPTY ones never travel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from tilewise import arrays, schedule, validate
from tilewise.arrays import Array
from tilewise.parallel.digest import digest
from tilewise.parallel.layout import Layout, joined
from tilewise.schedule import Kind
from tilewise.sharing import Kept, lazy
from tilewise.spec import Attention, Shape
from tilewise.walking import loads, variables

LEAST_TILE = 64
MOST_TILES = 2**20  # of all heads that masks tell apart, about: longer sequences have larger tiles
_PIECES = 4

Ranges = tuple[range, ...]


@dataclass(frozen=True, eq=False)
class Tiles:
    """A layout's ranges cut into tiles, in the sequence's order."""

    edges: Array  # (tiles + 1,)
    owner: Array  # (tiles,): the rank that has it

    @classmethod
    def of(cls, layout: Layout, most: int) -> Tiles:
        """About as many as told, and at least one a range."""
        step = max(LEAST_TILE, -(-layout.n // most))
        cut = [(start, rank) for rank, each in enumerate(layout.ranges) for x in each for start in x[::step]]
        starts, owner = np.array(sorted(cut), np.int64).reshape(-1, 2).T
        return cls(np.append(starts, layout.n), owner)

    @property
    def count(self) -> int:
        return len(self.owner)

    def touched(self, rows: range) -> slice:
        """The tiles that have any of these rows."""
        first = int(np.searchsorted(self.edges, rows.start, "right")) - 1
        return slice(first, int(np.searchsorted(self.edges, rows.stop, "left")))

    def needed(self, seen: Array, ranges: Ranges) -> list[Ranges]:
        """From the first tile to the last that each rank sees, of each range. seen: (ranks, tiles)."""
        made: list[Ranges] = [()] * len(seen)
        for each in ranges:
            first, last = np.searchsorted(self.edges, (each.start, each.stop))
            part = seen[:, first:last]
            start, stop = self.edges[first + part.argmax(1)], self.edges[last - part[:, ::-1].argmax(1)]
            for rank in np.flatnonzero(part.any(1)):
                made[rank] += (range(int(start[rank]), int(stop[rank])),)
        return made


@dataclass(frozen=True, eq=False)
class Needs:
    """What travels: rank r needs the keys `of[r][s]` of rank s, a range or none of each of its ranges."""

    of: tuple[tuple[Ranges, ...], ...]
    work: tuple[int, ...]  # scores in tiles that are not EMPTY, of one batch index and head on average, a rank
    queries: Tiles
    keys: Tiles
    seen: Array  # (query tiles, key tiles): whether any head sees any of it

    @property
    def ranks(self) -> int:
        return len(self.of)

    @lazy
    def digest(self) -> int:
        return digest(self.of)

    def is_empty(self, queries: range, keys: range) -> bool:
        """Whether no query of these sees any of these keys, as far as tiles tell."""
        return not self.seen[self.queries.touched(queries), self.keys.touched(keys)].any()

    def beyond(self, owner: int, hops: int) -> Ranges:
        """What of a rank's keys is needed after that many hops around the ring, by all that are still to come."""
        return self._beyond[owner][hops]

    @lazy
    def _beyond(self) -> list[list[Ranges]]:
        return [self._ahead(owner) for owner in range(self.ranks)]

    def _ahead(self, owner: int) -> list[Ranges]:
        made: list[Ranges] = [()]
        for hop in reversed(range(self.ranks)):
            more = self.of[(owner + hop) % self.ranks][owner]
            made.append(joined((*made[-1], *more)) if more and more != made[-1] else made[-1])
        return made[::-1]


_known: Kept[Needs] = Kept(32)


def find(spec: Attention, shape: Shape, queries: Layout, keys: Layout) -> Needs:
    """Kept, by the contents of arrays too: the layers of a model have a mask in common. Arrays on a GPU are not looked
    at: all that they mask travels."""
    live = schedule.live_expression(spec)
    read = () if live is None else tuple(_contents(slot.array) for slot in loads(live))
    key = (None if live is None else live.key, read, shape, queries, keys)
    return _known.found(key, lambda: _find(spec, shape, queries, keys))


def _contents(array: Any) -> tuple[Any, ...]:
    """What tells an array from others of its type, as far as it is looked at."""
    size = tuple(array.shape)
    if arrays.is_torch(array) and array.device.type != "cpu":
        return size
    held = np.ascontiguousarray(arrays.as_numpy(array)).reshape(-1).view(np.uint8)
    return *size, blake2b(held.data, digest_size=16).digest()


def _find(spec: Attention, shape: Shape, queries: Layout, keys: Layout) -> Needs:
    most = math.isqrt(MOST_TILES // _told_apart(spec, shape)) or 1
    q, k = Tiles.of(queries, most), Tiles.of(keys, most)
    seen, scores = _seen(spec, shape, q, k)
    by_rank = np.zeros((queries.ranks, k.count), bool)
    np.logical_or.at(by_rank, q.owner, seen)
    work = np.bincount(q.owner, scores, queries.ranks)
    columns = [k.needed(by_rank, each) for each in keys.ranges]
    return Needs(tuple(zip(*columns, strict=True)), tuple(int(x) for x in work), q, k, seen)


def _told_apart(spec: Attention, shape: Shape) -> int:
    """How many heads of the batch have tiles of their own."""
    live = schedule.live_expression(spec)
    used = frozenset() if live is None else variables(live)
    return max((shape.batch if "B" in used else 1) * (shape.heads if {"H", "HK"} & used else 1), 1)


def _seen(spec: Attention, shape: Shape, q: Tiles, k: Tiles) -> tuple[Array, Array]:
    """Whether any head sees a tile, (query tiles, key tiles), and the scores that a query tile has to compute."""
    if not q.count or not k.count:
        return np.zeros((q.count, k.count), bool), np.zeros(q.count)
    counts = schedule.blocks(spec, shape, q.edges, k.edges) != Kind.EMPTY
    scores = np.diff(q.edges) * (counts.mean(axis=(0, 1)) @ np.diff(k.edges))
    return counts.any(axis=(0, 1)), scores


def balanced(n: int, ranks: int, *, pieces: int = _PIECES, **options: Any) -> Layout:
    """A layout in which ranks have as many rows each, and nearly as many tiles to compute: for documents and windows.

    pieces: ranges a rank, at most.  options: causal, mask and score, as `attention` takes them; arrays that they read
    are of the whole sequence. Heavy pieces are given out first, each to the rank that has least to do.
    """
    stand_in = np.broadcast_to(np.float32(0), (1, 1, n, 1))
    call = validate.prepare(stand_in, stand_in, stand_in, **options)
    count = pieces * ranks
    cut = [range(i * n // count, (i + 1) * n // count) for i in range(count)]
    alone = Layout(tuple((piece,) for piece in cut))
    weights = find(replace(call.spec, sinks=None), call.shape, alone, alone).work
    given: list[list[range]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for i in sorted(range(count), key=lambda i: -weights[i]):
        rank = min((r for r in range(ranks) if len(given[r]) < pieces), key=lambda r: (load[r], r))
        given[rank].append(cut[i])
        load[rank] += weights[i]
    return Layout(tuple(map(tuple, given)))
