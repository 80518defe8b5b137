"""Which keys each rank needs of the others, found by interval arithmetic over tiles: EMPTY ones never travel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from tilewise import arrays, schedule, validate
from tilewise.arrays import Array
from tilewise.parallel.digest import digest
from tilewise.parallel.layout import Layout, counted
from tilewise.schedule import Kind
from tilewise.sharing import Kept, lazy
from tilewise.spec import Attention, Shape
from tilewise.walking import loads, variables

LEAST_TILE = 64
MOST_TILES = 2**20  # of all heads that masks tell apart, about: longer sequences have larger tiles
_PIECES = 4
_MOST_PIECES = 2**18  # of all ranks together

Ranges = tuple[range, ...]


@dataclass(frozen=True, eq=False)
class Tiles:
    """A layout's ranges cut into tiles, in the sequence's order."""

    edges: Array  # (tiles + 1,)
    owner: Array  # (tiles,): the rank that has it
    ranks: int

    @classmethod
    def of(cls, layout: Layout, most: int) -> Tiles:
        """About as many as told, and at least one a range."""
        step = max(LEAST_TILE, -(-layout.n // most))
        cut = [(start, rank) for rank, each in enumerate(layout.ranges) for x in each for start in x[::step]]
        starts, owner = np.array(sorted(cut), np.int64).reshape(-1, 2).T
        return cls(np.append(starts, layout.n), owner, layout.ranks)

    @property
    def count(self) -> int:
        return len(self.owner)

    def touched(self, rows: range) -> slice:
        """The tiles that have any of these rows."""
        first = int(np.searchsorted(self.edges, rows.start, "right")) - 1
        return slice(first, int(np.searchsorted(self.edges, rows.stop, "left")))

    @lazy
    def _by_owner(self) -> tuple[Array, Array]:
        """The tiles of one rank after the other, and where each rank's begin in that order."""
        order = np.argsort(self.owner, kind="stable")
        return order, np.searchsorted(self.owner[order], np.arange(self.ranks + 1))

    def any(self, marked: Array) -> Array:
        """Whether any tile of each rank is marked: (tiles, others) to (ranks, others)."""
        order, begin = self._by_owner
        made, has = np.zeros((self.ranks, marked.shape[1]), bool), np.diff(begin) > 0
        made[has] = np.logical_or.reduceat(marked[order], begin[:-1][has])
        return made

    def rows(self, marked: Array) -> Array:
        """How many rows the marked tiles of each rank have: (others, tiles) to (others, ranks)."""
        order, begin = self._by_owner
        made, has = np.zeros((len(marked), self.ranks), np.int64), np.diff(begin) > 0
        made[:, has] = np.add.reduceat(marked[:, order] * np.diff(self.edges)[order], begin[:-1][has], 1)
        return made

    def ranges(self, marked: Array, rank: int) -> Ranges:
        """The rows of a rank's marked tiles."""
        order, begin = self._by_owner
        own = order[begin[rank] : begin[rank + 1]]
        tiles = own[marked[own]]
        ends = np.flatnonzero(np.diff(tiles) > 1)
        first, last = tiles[np.append(0, ends + 1)[: len(tiles)]], tiles[np.append(ends, -1)[: len(tiles)]]
        return tuple(map(range, self.edges[first].tolist(), self.edges[last + 1].tolist()))

    def filled(self, marked: Array) -> Array:
        """Marked, and from the first of each range that is to the last: (..., tiles)."""
        number, (first, last) = np.arange(self.count), self._around
        before = np.maximum.accumulate(np.where(marked, number, -1), -1)
        after = np.minimum.accumulate(np.where(marked, number, self.count)[..., ::-1], -1)[..., ::-1]
        return (before >= first) & (after <= last)

    @property
    def _around(self) -> tuple[Array, Array]:
        """The first and the last tile of the range that each is of: ranges of a rank that touch are one."""
        changes = np.flatnonzero(np.diff(self.owner)) + 1
        sizes = np.diff([0, *changes, self.count])
        return np.repeat([0, *changes], sizes), np.repeat([*(changes - 1), self.count - 1], sizes)


@dataclass(frozen=True, eq=False)
class Needs:
    """What travels: tiles of keys, and whole ones. Arrays tell it, as of many ranks there are more pairs than Python
    could count in a time that nobody notices."""

    needed: Array  # (ranks, key tiles): of each range, those from the first to the last that a rank sees
    work: tuple[int, ...]  # scores in tiles that are not EMPTY, of one batch index and head on average, a rank
    queries: Tiles
    keys: Tiles
    seen: Array  # (query tiles, key tiles): whether any head sees any of it
    _ranges: dict[tuple[int, int, bool], Ranges] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return len(self.needed)

    @lazy
    def digest(self) -> int:
        return digest([x.tobytes() for x in (np.packbits(self.needed), self.keys.edges, self.keys.owner)])

    def is_empty(self, queries: range, keys: range) -> bool:
        """Whether no query of these sees any of these keys, as far as tiles tell."""
        return not self.seen[self.queries.touched(queries), self.keys.touched(keys)].any()

    def of(self, rank: int, owner: int) -> Ranges:
        """The keys of `owner` that a rank needs, a range or none of each of its ranges."""
        return self._found(self.needed, rank, owner, False)

    def beyond(self, owner: int, hops: int) -> Ranges:
        """What of a rank's keys is needed after that many hops around the ring, by all that are still to come."""
        return self._found(self._ahead, hops, owner, True)

    def _found(self, marked: Array, row: int, owner: int, ahead: bool) -> Ranges:
        key = row, owner, ahead
        if key not in self._ranges:
            self._ranges[key] = self.keys.ranges(marked[row], owner)
        return self._ranges[key]

    @lazy
    def rows(self) -> Array:
        """(ranks, owners): how many keys of each other a rank needs."""
        found = self.keys.rows(self.needed)
        np.fill_diagonal(found, 0)
        return found

    @lazy
    def rows_beyond(self) -> Array:
        """(hops, owners): how many of a rank's keys go farther than that around the ring."""
        return self.keys.rows(self._ahead)

    @lazy
    def _ahead(self) -> Array:
        """(hops, key tiles): whether anyone from there on around the ring, as its owner counts, needs a tile."""
        at_hop = (self.keys.owner + np.arange(self.ranks)[:, None]) % self.ranks
        by_hop = self.needed[at_hop, np.arange(self.keys.count)]
        later = np.logical_or.accumulate(by_hop[::-1])[::-1]
        return np.concatenate([later, np.zeros_like(later[:1])])


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
    work = np.bincount(q.owner, scores, queries.ranks)
    return Needs(k.filled(q.any(seen)), tuple(int(x) for x in work), q, k, seen)


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
    n, ranks = counted(n, ranks)
    pieces = validate.whole("pieces", pieces, 1, _MOST_PIECES // ranks)
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
