"""Which tiles to visit: a plan, made by interval arithmetic over whole tiles, never over single scores.

A tile is EMPTY (no key counts: skipped), FULL (all do: no mask code) or PARTIAL. A plan is runs of tiles, not tiles:
for each query tile a few (first, last, kind) ranges; and the same for each key tile, for the backward pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.expr import INT32_MAX, INT32_MIN, Expr, Loaded, S, constant
from tilewise.intervals import INTERVAL_OPS, SCORE, bounds
from tilewise.sharing import Lock, lazy
from tilewise.spec import Attention, Lengths, Shape, Tile
from tilewise.walking import evaluate_all, loads, nodes, variables

_COARSE = 16  # tiles a side: blocks of tiles are classified first, and only mixed ones are looked into
_CACHE_SIZE = 256


class Kind(IntEnum):
    EMPTY = 0
    PARTIAL = 1
    FULL = 2


class Run(NamedTuple):
    """Tiles first, first + 1 ... last - 1, all of one kind."""

    first: int
    last: int
    kind: Kind


@dataclass(frozen=True, eq=False)
class Runs:
    """Compressed runs: those of row i of (batch, head) are table[offsets[..., i] : offsets[..., i + 1]].

    Batch and head dimensions have size 1 where the expression does not depend on them.
    """

    table: Array  # (runs, 3): first, last, kind
    offsets: Array  # (batch or 1, heads or 1, rows + 1)

    def row(self, b: int, h: int, i: int) -> list[Run]:
        where = self.offsets[b if self.offsets.shape[0] > 1 else 0, h if self.offsets.shape[1] > 1 else 0]
        return [Run(first, last, Kind(kind)) for first, last, kind in self.table[where[i] : where[i + 1]].tolist()]

    def tiles(self, b: int, h: int, i: int) -> Iterator[tuple[int, Kind]]:
        """The tiles to visit in row i, one by one."""
        for run in self.row(b, h, i):
            for j in range(run.first, run.last):
                yield j, run.kind


@dataclass(frozen=True, eq=False)
class Plan:
    """The tiles of one attention, and what they cost."""

    shape: Shape
    tile: Tile
    live: Expr | None  # True where a key counts; None: everywhere

    @property
    def grid(self) -> tuple[int, int]:
        return -(-self.shape.n_q // self.tile.q), -(-self.shape.n_k // self.tile.k)

    def queries(self, i: int) -> slice:
        return slice(i * self.tile.q, min((i + 1) * self.tile.q, self.shape.n_q))

    def keys(self, j: int) -> slice:
        return slice(j * self.tile.k, min((j + 1) * self.tile.k, self.shape.n_k))

    @lazy
    def by_query(self) -> Runs:
        return _runs(self, keys_first=False)

    @lazy
    def by_key(self) -> Runs:
        return _runs(self, keys_first=True)

    def joined(self, count: int, most_skipped: int) -> Runs:
        """Each `count` query tiles as one row, whose runs have a kind for each of them, two bits each.

        For kernels whose warpgroups share what they load, from the last tile to the first. EMPTY tiles are those that a
        warpgroup may leave out while others do not: its last, `most_skipped` at most. None is left without a tile.
        """
        return _compressed(_joined(kinds, count, most_skipped) for kinds in _whole_rows(_bands(self, False), count))

    def kinds(self, b: int = 0, h: int = 0) -> Array:
        """The whole grid of tile kinds of one head, for looking at."""
        grid = np.zeros(self.grid, np.uint8)
        for i in range(self.grid[0]):
            for first, last, kind in self.by_query.row(b, h, i):
                grid[i, first:last] = kind
        return grid

    @property
    def told_apart(self) -> tuple[int, int]:
        """For how many sequences and heads tiles are classified: 1 if the expression does not read which it is."""
        used = variables(self.live) if self.live is not None else frozenset()
        return self.shape.batch if "B" in used else 1, self.shape.heads if {"H", "HK"} & used else 1

    @property
    def at_once(self) -> int:
        """The most tiles, or blocks of them, that are classified together: each takes memory while a plan is made."""
        (n_q, n_k), (batches, heads) = self.grid, self.told_apart
        coarse, band = -(-n_q // _COARSE) * -(-n_k // _COARSE), max(min(_COARSE, n_q) * n_k, min(_COARSE, n_k) * n_q)
        return batches * heads * (n_q * n_k if n_q * n_k <= _COARSE**3 else max(coarse, band))

    # -- what it costs ------------------------------------------------------------------------------------------------
    @lazy
    def counts(self) -> dict[Kind, int]:
        """Tiles by kind, over all batches and heads."""
        first, last, kind = self.by_query.table.T
        size = last - first
        counts = {k: int(size[kind == k].sum()) * self._repeats for k in (Kind.PARTIAL, Kind.FULL)}
        total = self.grid[0] * self.grid[1] * self.shape.batch * self.shape.heads
        return {Kind.EMPTY: total - sum(counts.values()), **counts}

    @property
    def _repeats(self) -> int:
        """How many (batch, head) pairs each stored row stands for."""
        stored = self.by_query.offsets.shape[0] * self.by_query.offsets.shape[1]
        return self.shape.batch * self.shape.heads // stored if stored else 0

    @lazy
    def _visited(self) -> tuple[int, int]:
        """(scores computed, keys loaded), over all batches and heads; ragged tiles counted as they are."""
        first, last, _ = self.by_query.table.T
        keys = np.minimum(last * self.tile.k, self.shape.n_k) - first * self.tile.k
        offsets = self.by_query.offsets
        row_of_run = np.repeat(np.tile(np.arange(self.grid[0]), offsets[..., 0].size), np.diff(offsets).ravel())
        loaded, last_row = int(keys.sum()), self.grid[0] - 1
        of_last = int(keys[row_of_run == last_row].sum())
        # Python's integers: scores are more than 64 bits can count before anything else is too large.
        scores = (loaded - of_last) * self.tile.q + of_last * (self.shape.n_q - last_row * self.tile.q)
        return scores * self._repeats, loaded * self._repeats

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, in the tiles visited."""
        return 2 * self._visited[0] * (self.shape.d + self.shape.d_v)

    @property
    def flops_naive(self) -> int:
        s = self.shape
        return 2 * s.batch * s.heads * s.n_q * s.n_k * (s.d + s.d_v)

    @property
    def bytes_tiled(self) -> int:
        """Slow-memory traffic, tiled: q, out and lse once, k and v once for each query tile that visits them."""
        s, size = self.shape, itemsize(self.shape.dtype)
        rows = s.batch * s.heads * s.n_q
        return (
            rows * (s.d + s.d_v) * size
            + rows * arrays.compute_dtype(s.dtype).itemsize
            + self._visited[1] * (s.d + s.d_v) * size
        )

    @property
    def bytes_naive(self) -> int:
        """Traffic of the naive algorithm: q, k, v, out once; scores written and read, weights written and read."""
        s, size = self.shape, itemsize(self.shape.dtype)
        rows, keys = s.batch * s.heads * s.n_q, s.batch * s.heads_k * s.n_k
        return ((rows + keys) * (s.d + s.d_v) + 4 * rows * s.n_k) * size

    @property
    def bytes_matrix(self) -> int:
        """The full score matrix, which the tiled algorithm never stores."""
        s = self.shape
        return s.batch * s.heads * s.n_q * s.n_k * itemsize(s.dtype)

    @property
    def bytes_on_chip(self) -> int:
        """What one tile's work holds: q, k, v tiles as stored; scores, acc, row_max, row_sum in the wider type."""
        s, size = self.shape, itemsize(self.shape.dtype)
        wide = arrays.compute_dtype(s.dtype).itemsize
        stored = self.tile.q * s.d + self.tile.k * (s.d + s.d_v)
        return stored * size + (self.tile.q * (self.tile.k + s.d_v + 2)) * wide


def itemsize(dtype: str) -> int:
    return {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[dtype]


# -- making a plan ----------------------------------------------------------------------------------------------------

_cache: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
_lock = Lock()


def plan(spec: Attention, shape: Shape, tile: Tile) -> Plan:
    """The plan of one sequence (or batch of equal ones). Cached, unless it depends on the contents of arrays."""
    live = live_expression(spec)
    used = variables(live) if live is not None else frozenset()
    # What the expression does not read must not keep an equal plan from being found.
    shape = replace(
        shape, backward=False,
        first_batch=shape.first_batch if "B" in used else 0,
        packed_q=shape.packed_q if "QP" in used else 0, packed_k=shape.packed_k if "KP" in used else 0,
    )  # fmt: skip
    if live is not None and loads(live):
        return Plan(shape, tile, live)
    key = (None if live is None else live.key, shape, tile)
    with _lock:
        found = _cache.pop(key, None) or Plan(shape, tile, live)
        _cache[key] = found
        if len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    return found


def live_expression(spec: Attention) -> Expr | None:
    """Where a key counts: the mask holds and the score is not -inf. None: everywhere."""
    if spec.score is None or not _may_be_minus_infinity(spec.score):
        return spec.mask
    finite = spec.score > constant(-np.inf)
    return finite if spec.mask is None else spec.mask & finite


def is_unseen(spec: Attention) -> bool:
    """Whether the mask reads arrays that no plan looks at, so that tiles are PARTIAL for want of better."""
    return spec.mask is not None and any(arrays.is_elsewhere(slot.array) for slot in loads(spec.mask))


def _may_be_minus_infinity(score: Expr) -> bool:
    """Only a constant -inf or a float array that is read by position can make a block of scores -inf on purpose."""
    return any(
        (node.op == "const" and node.payload == -np.inf)
        or (node.op == "load" and node.kind == "float" and {"Q", "K", "QP", "KP"} & variables(node))
        for node in nodes(score)
    )


def _runs(plan: Plan, keys_first: bool) -> Runs:
    """Runs along each row: a query tile's key tiles, or with keys_first a key tile's query tiles."""
    rows = plan.grid[1] if keys_first else plan.grid[0]
    axes = (0, 1, 3, 2) if keys_first else (0, 1, 2, 3)
    if 0 in (*plan.grid, *plan.told_apart):
        return Runs(np.zeros((0, 3), np.int64), np.zeros((1, 1, rows + 1), np.int64))
    return _compressed(kinds.transpose(axes) for kinds in _bands(plan, keys_first))


def _compressed(bands: Iterable[Array]) -> Runs:
    return _interleave(*zip(*map(_compress, bands), strict=True))


def _whole_rows(bands: Iterable[Array], count: int) -> Iterator[Array]:
    """Bands whose rows are multiples of `count`; the last one is filled up with EMPTY tiles."""
    left: Array | None = None
    for band in bands:
        kinds = band if left is None else np.concatenate([left, band], axis=2)
        whole = kinds.shape[2] // count * count
        left = kinds[:, :, whole:]
        if whole:
            yield kinds[:, :, :whole]
    if left is not None and left.shape[2]:
        missing = count - left.shape[2]
        yield np.concatenate([left, np.zeros_like(left[:, :, :1]).repeat(missing, axis=2)], axis=2)


def _joined(kinds: Array, count: int, most_skipped: int) -> Array:
    batch, heads, rows, columns = kinds.shape
    parts = kinds.reshape(batch, heads, rows // count, count, columns)
    visited = (parts != Kind.EMPTY).any(axis=3, keepdims=True)
    visited[..., 0] |= ~visited.any(axis=-1)  # each row has a tile
    skipped = _at_the_end(parts, visited, most_skipped)
    skipped &= (parts != Kind.EMPTY).any(axis=-1, keepdims=True)
    parts = np.where(visited & ~skipped, np.maximum(parts, Kind.PARTIAL), Kind.EMPTY)
    made: Array = (parts << (2 * np.arange(count, dtype=np.uint8))[:, None]).sum(axis=3, dtype=np.uint8)
    return made


def _at_the_end(parts: Array, visited: Array, most: int) -> Array:
    """Where a part is EMPTY, and so are all of its tiles up to the end, of which at most that many are visited."""
    none_after = np.flip(np.logical_and.accumulate(np.flip(parts == Kind.EMPTY, -1), axis=-1), -1)
    rank = np.flip(np.cumsum(np.flip(visited, -1), axis=-1), -1)
    made: Array = none_after & (rank <= most)
    return made


def _bands(plan: Plan, keys_first: bool) -> Iterator[Array]:
    """Tile kinds (batch, heads, query tiles, key tiles), a band of rows at a time, whole blocks of tiles at once."""
    n_q, n_k = plan.grid
    if n_q * n_k <= _COARSE**3:
        if n_q * n_k:
            yield _classify(plan, np.arange(n_q + 1), np.arange(n_k + 1))
        return
    edges_q, edges_k = (np.append(np.arange(0, n, _COARSE), n) for n in (n_q, n_k))
    coarse = _classify(plan, edges_q, edges_k)
    along, across = (edges_k, edges_q) if keys_first else (edges_q, edges_k)
    for i, (start, stop) in enumerate(pairwise(along)):
        band = coarse[:, :, :, i : i + 1] if keys_first else coarse[:, :, i : i + 1, :]
        axis = 2 if keys_first else 3
        fine = band.repeat(np.diff(across), axis=axis).repeat(stop - start, axis=5 - axis)
        mixed = np.flatnonzero((band == Kind.PARTIAL).any(axis=(0, 1, 5 - axis)))
        for group in np.split(mixed, np.flatnonzero(np.diff(mixed) > 1) + 1) if len(mixed) else []:
            first, last = across[group[0]], across[group[-1] + 1]
            inner, outer = np.arange(first, last + 1), np.arange(start, stop + 1)
            if keys_first:
                fine[:, :, first:last, :] = _classify(plan, inner, outer)
            else:
                fine[:, :, :, first:last] = _classify(plan, outer, inner)
        yield fine


def _classify(plan: Plan, edges_q: Array, edges_k: Array) -> Array:
    """The kinds of blocks of tiles: block i spans query tiles edges_q[i] to edges_q[i + 1], and so for keys."""
    shape = plan.shape
    q_lo, k_lo = edges_q[:-1] * plan.tile.q, edges_k[:-1] * plan.tile.k
    q_hi, k_hi = edges_q[1:] * plan.tile.q, edges_k[1:] * plan.tile.k
    # A ragged last tile needs bounds checks, so it is never FULL.
    ragged = (q_hi > shape.n_q)[:, None] | (k_hi > shape.n_k)
    q_hi, k_hi = np.minimum(q_hi, shape.n_q) - 1, np.minimum(k_hi, shape.n_k) - 1
    if plan.live is None:
        return np.where(ragged, Kind.PARTIAL, Kind.FULL).astype(np.uint8)[None, None]
    batches, told_heads = plan.told_apart
    batch, heads = np.arange(batches)[:, None, None, None], np.arange(told_heads)[:, None, None]
    lo = shape.env(batch, heads, q_lo[:, None], k_lo)
    hi = shape.env(batch, heads, q_hi[:, None], k_hi)
    env = {"S": SCORE, **{name: (np.asarray(lo[name]), np.asarray(hi[name])) for name in lo}}
    always, sometimes = bounds(plan.live, env)
    grid = (batch.shape[0], heads.shape[0], len(q_lo), len(k_lo))
    kinds = np.where(always & ~ragged, Kind.FULL, np.where(sometimes, Kind.PARTIAL, Kind.EMPTY))
    return np.broadcast_to(kinds, grid).astype(np.uint8)


def blocks(spec: Attention, shape: Shape, edges_q: Array, edges_k: Array) -> Array:
    """The kinds of blocks of any size, (batch or 1, heads or 1, blocks, blocks): block i has queries edges_q[i] to
    edges_q[i + 1]. An array that is read in the mask is looked at anew."""
    return _classify(Plan(shape, Tile(1, 1), live_expression(spec)), edges_q, edges_k)


def _compress(kinds: Array) -> tuple[Array, Array]:
    """Runs of equal kind along the last axis, EMPTY ones dropped: (runs, 3), and how many in each row."""
    rows, cols = kinds.reshape(-1, kinds.shape[-1]), kinds.shape[-1]
    begins = np.ones(rows.shape, bool)
    begins[:, 1:] = rows[:, 1:] != rows[:, :-1]
    row, first = np.nonzero(begins)
    last = np.append(first[1:], cols)
    last[np.append(row[1:] != row[:-1], True)] = cols
    kind = rows[row, first]
    keep = kind != Kind.EMPTY
    count = np.bincount(row[keep], minlength=len(rows)).reshape(kinds.shape[:-1])
    return np.stack([first[keep], last[keep], kind[keep]], axis=1).astype(np.int64), count


def _interleave(tables: Sequence[Array], counts: Sequence[Array]) -> Runs:
    """Bands were made a group of rows at a time; runs are stored a head at a time."""
    count = np.concatenate(counts, axis=2)
    offsets = np.zeros((*count.shape[:2], count.shape[2] + 1), np.int64)
    ends = np.cumsum(count).reshape(count.shape)
    offsets[..., 1:] = ends
    offsets[..., 0] = ends[..., 0] - count[..., 0]
    parts = [np.split(table, np.cumsum(c.sum(axis=2).ravel())[:-1]) for table, c in zip(tables, counts, strict=True)]
    heads = range(count.shape[0] * count.shape[1])
    return Runs(np.concatenate([part[h] for h in heads for part in parts]), offsets)


def check_integers(expr: Expr, shape: Shape, lengths: Lengths | None = None) -> None:
    """Refuse shapes at which integers of the expression would not fit 32 bits on every kernel system."""
    if lengths is None and expr.memo.get("fits") == shape:
        return
    unknown = np.asarray(np.nan)
    beyond = _beyond_32_bits(expr, shape, lengths, lambda *_: (unknown, unknown))
    if beyond is not None:
        node, reached = beyond
        raise ValueError(
            f"the expression's integer {node!r} reaches {reached} at these shapes, beyond 32 bits; "
            "compute it in floats (multiply by 1.0)"
        )
    if lengths is None:
        expr.memo["fits"] = shape


def beyond_32_bits(expr: Expr, shape: Shape, lengths: Lengths | None = None) -> bool:
    """Whether the contents of loaded arrays could take an integer of the expression beyond 32 bits."""
    unknown = np.asarray(np.nan)

    def load(slot: Loaded, *index: Any) -> Any:
        if arrays.value_kind(slot.array) != "int" or 0 in slot.array.shape:
            return unknown, unknown
        array = arrays.as_numpy(slot.array)
        return np.asarray(int(array.min())), np.asarray(int(array.max()))

    return _beyond_32_bits(expr, shape, lengths, load) is not None


def _beyond_32_bits(
    expr: Expr, shape: Shape, lengths: Lengths | None, load: Callable[..., Any]
) -> tuple[Expr, int] | None:
    """The first integer of the expression that may leave 32 bits, and what it reaches."""
    lo = shape.env(0, 0, 0, 0)
    hi = shape.env(shape.batch, shape.heads, shape.n_q, shape.n_k)
    if lengths is not None:  # positions are each sequence's own; QP and KP alone run through all of them
        n_q, n_k = (int(np.max(np.diff(x), initial=0)) for x in (lengths.q, lengths.k))
        lo.update(NQ=0, NK=0)
        hi.update(B=len(lengths.q) - 1, Q=n_q, K=n_k, NQ=n_q, NK=n_k)
    env = {"S": SCORE, **{name: (np.asarray(lo[name]), np.asarray(hi[name])) for name in lo}}
    values = evaluate_all(expr, env, {**INTERVAL_OPS, "load": load})
    for node, (low, high) in values.items():
        if node.kind == "int" and node is not S and (low < INT32_MIN or high > INT32_MAX):
            return node, int(max(-low, high))
    return None
