"""Plans: which tiles are visited, in both orders, at any size, and what they cost."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tests.strategies import bool_exprs, dense_values, float_exprs, profile
from tilewise import schedule
from tilewise.expr import HK, KP, NK, NQ, QP, B, H, K, Q, S
from tilewise.schedule import Kind, plan
from tilewise.spec import Attention, Shape, Tile

EMPTY, PARTIAL, FULL = Kind


def made(mask=None, score=None, tile=(4, 4), **sizes):
    s = {"batch": 1, "heads": 1, "heads_k": 1, "n_q": 16, "n_k": 16, "d": 8, "d_v": 8, **sizes}
    return plan(Attention(1.0, mask, score), Shape(**s), Tile(*tile))


def grid(p):
    """Kinds of every tile from by_query, (batch, heads, query tiles, key tiles)."""
    return np.array([[p.kinds(b, h) for h in range(p.shape.heads)] for b in range(p.shape.batch)])


def grid_by_key(p):
    kinds = np.zeros((p.shape.batch, p.shape.heads, *p.grid), np.uint8)
    for b, h, j in np.ndindex(p.shape.batch, p.shape.heads, p.grid[1]):
        for i, kind in p.by_key.tiles(b, h, j):
            kinds[b, h, i, j] = kind
    return kinds


def assert_runs(p):
    """Runs are sorted, disjoint, not EMPTY, inside the grid, and as long as they can be; offsets cover the table."""
    for runs, rows, cols in ((p.by_query, *p.grid), (p.by_key, *p.grid[::-1])):
        assert runs.offsets.shape[2] == rows + 1
        used = []
        for b, h in np.ndindex(runs.offsets.shape[:2]):
            for i in range(rows):
                end, before = 0, None
                for first, last, kind in runs.row(b, h, i):
                    assert 0 <= end <= first < last <= cols
                    assert kind in (PARTIAL, FULL)
                    assert not (first == end and before == kind and end > 0), "two runs where one would do"
                    end, before = last, kind
                used += range(runs.offsets[b, h, i], runs.offsets[b, h, i + 1])
        assert used == list(range(len(runs.table)))


def assert_sound(p, mask, score=None):
    """EMPTY only if no key counts, FULL only if the mask holds everywhere; ragged tiles are never FULL."""
    shape = p.shape
    allowed = np.ones((shape.batch, shape.heads, shape.n_q, shape.n_k), bool)
    if mask is not None:
        allowed = dense_values(mask, shape)
    live = allowed if score is None else allowed & (dense_values(score, shape) != -np.inf)
    kinds = grid(p)
    np.testing.assert_array_equal(kinds, grid_by_key(p))
    for i, j in np.ndindex(p.grid):
        rows, cols = p.queries(i), p.keys(j)
        ragged = rows.stop - rows.start < p.tile.q or cols.stop - cols.start < p.tile.k
        for b, h in np.ndindex(shape.batch, shape.heads):
            kind = kinds[b, h, i, j]
            if kind == EMPTY:
                assert not live[b, h, rows, cols].any(), (mask, score, b, h, i, j)
            if kind == FULL:
                assert not ragged
                assert allowed[b, h, rows, cols].all(), (mask, score, b, h, i, j)


SHAPES = st.builds(
    lambda b, g, hk, nq, nk: Shape(b, g * hk, hk, nq, nk, 8, 8),
    st.integers(1, 2), st.integers(1, 2), st.integers(1, 2), st.integers(0, 13), st.integers(0, 13),
)  # fmt: skip
SIDES = st.integers(1, 15)


@pytest.mark.parametrize("place", [3, NK - 1, tw.minimum(NQ + NK, 9)])
def test_arrays_that_are_read_at_one_place(place):
    """The same for all tiles, so that a plan has nothing to tell them by."""
    ids = np.arange(16) // 4
    for mask in (
        tw.load(ids, place) >= tw.load(ids, K),
        tw.load(ids, place) > 0,
        tw.load(ids, tw.load(ids, place)) > 0,
    ):
        assert_sound(made(mask), mask)
    score = tw.where(tw.load(ids.astype(np.float32), place) > 0.0, S, float("-inf"))
    assert_sound(made(score=score), None, score)


def check_random(mask, score, shape, tile_q, tile_k):
    p = plan(Attention(1.0, mask, score), shape, Tile(tile_q, tile_k))
    assert_sound(p, mask, score)
    assert_runs(p)


@profile(250)
@given(bool_exprs(4), SHAPES, SIDES, SIDES)
def test_random_masks(mask, shape, tile_q, tile_k):
    check_random(mask, None, shape, tile_q, tile_k)


@profile(150)
@given(st.none() | bool_exprs(2), float_exprs(4), SHAPES, SIDES, SIDES)
def test_random_scores(mask, score, shape, tile_q, tile_k):
    check_random(mask, score, shape, tile_q, tile_k)


def _of_pairs(seed, *shape):
    return np.random.default_rng(seed).integers(0, 3, shape) == 0


# Loads whose indices share axes of a grid: how much of them a tile's bounds follow must not depend on its neighbours.
ENTANGLED = [
    tw.load(_of_pairs(0, 13, 13), K, K - Q),
    tw.load(_of_pairs(1, 13, 25), K, Q - K + 12),
    tw.load(_of_pairs(2, 13, 25), Q, Q + K),
    tw.load(_of_pairs(3, 25, 13), Q + K, K),
    tw.load(_of_pairs(4, 13, 13), Q, Q // 2),
    tw.load(_of_pairs(5, 4, 25), H, Q - K + 12),
    tw.load(_of_pairs(6, 25, 25), Q + K, Q - K + 12),
    tw.load(_of_pairs(7, 13, 13, 13), Q, K - Q, K // 3),
    tw.load(_of_pairs(8, 13, 13, 13), K - Q, Q - K, Q),
    tw.load(_of_pairs(9, 4, 4, 13), H, HK, K),
]


@profile(400)
@given(bool_exprs(3) | st.sampled_from(ENTANGLED), st.sampled_from(ENTANGLED), st.booleans(), SHAPES, SIDES, SIDES)
def test_random_masks_in_bands(one, other, both, shape, tile_q, tile_k):
    """Both orders classify a tile alike, whatever bands of tiles they look at, down to one tile wide."""
    mask = one & other if both else one | other
    with patch.object(schedule, "_COARSE", 2):
        p = schedule.Plan(shape, Tile(min(tile_q, 3), min(tile_k, 3)), mask)
        assert_sound(p, mask)
        assert_runs(p)


def test_tables_by_head_and_distance_skip_tiles():
    """Each head sees as far as its line of the table says; the last head has nothing to skip."""
    near = np.arange(64) < np.array([[8], [24], [64]])
    p = made(tw.load(near, H, abs(Q - K)), tile=(8, 8), n_q=64, n_k=64, heads=3, heads_k=3)
    assert [(grid(p)[0, h] == EMPTY).sum() for h in range(3)] == [42, 20, 0]
    assert (grid(p)[0, 2] == FULL).all()


@pytest.mark.slow
@profile(5000)
@given(st.none() | bool_exprs(4), st.none() | float_exprs(4), SHAPES, SIDES, SIDES)
def test_random_anything_long(mask, score, shape, tile_q, tile_k):
    check_random(mask, score, shape, tile_q, tile_k)


# -- every named mask on every small size -----------------------------------------------------------------------------


def _ids(n):
    return np.sort(np.random.default_rng(n).integers(0, 4, n))


MASKS = {
    "none": lambda nq, nk: None,
    "causal": lambda nq, nk: tw.causal(),
    "window": lambda nq, nk: tw.window(3, 1),
    "causal window": lambda nq, nk: tw.causal() & tw.window(4),
    "prefix": lambda nq, nk: tw.causal() | tw.prefix(3),
    "document": lambda nq, nk: tw.document(_ids(nq), _ids(nk)),
    "document causal": lambda nq, nk: tw.document(_ids(nq), _ids(nk)) & (K <= Q),
    "dilated": lambda nq, nk: tw.dilated(3),
    "blocks": lambda nq, nk: Q // 4 == K // 4,
    "negative divisor": lambda nq, nk: (Q - K) // -3 == (K - Q) % -2,
    "dense": lambda nq, nk: tw.dense(np.kron(_ids(9).reshape(3, 3) % 2 == 0, np.ones((5, 5), bool))[:nq, :nk]),
    "nothing": lambda nq, nk: K < 0,
    "everything": lambda nq, nk: K >= 0,
}


@pytest.mark.parametrize("name", MASKS)
def test_named_masks_on_every_small_size(name):
    for n_q in (1, 2, 5, 8, 12):
        for n_k in (1, 3, 8, 13):
            for tile in ((1, 1), (2, 3), (4, 4), (8, 2), (16, 16)):
                mask = MASKS[name](n_q, n_k)
                p = made(mask, tile=tile, n_q=n_q, n_k=n_k)
                assert_sound(p, mask)
                assert_runs(p)


@pytest.mark.parametrize("n_q, n_k", [(0, 0), (0, 5), (5, 0)])
def test_plans_of_nothing(n_q, n_k):
    p = made(tw.causal(), n_q=n_q, n_k=n_k)
    assert_runs(p)
    assert sum(p.counts.values()) == 0
    assert p.flops == p.flops_naive == 0
    assert list(p.by_query.tiles(0, 0, 0)) == [] if n_q else p.grid[0] == 0


@pytest.mark.parametrize("mask", [K <= Q + B, tw.load(np.arange(64), K + B) < 3], ids=str)
def test_plans_of_no_sequences(mask):
    p = made(mask, batch=0)
    assert_runs(p)
    assert sum(p.counts.values()) == p.flops == 0
    none = np.zeros((0, 1, 16, 8), np.float32)
    for kernel in ("cpu", "numpy"):
        assert tw.attention(none, none, none, mask=mask, kernel=kernel).shape == none.shape


# -- tightness --------------------------------------------------------------------------------------------------------


def loose_tiles(p, mask):
    """PARTIAL tiles, not ragged, that are really EMPTY or FULL."""
    live, kinds, found = dense_values(mask, p.shape), grid(p), []
    for b, h, i, j in np.ndindex(kinds.shape):
        block = live[b, h, p.queries(i), p.keys(j)]
        if kinds[b, h, i, j] == PARTIAL and block.shape == (p.tile.q, p.tile.k) and block.all() == block.any():
            found.append((b, h, i, j))
    return found


_documents = np.repeat([0, 1, 2, 3], [8, 4, 12, 8])
_uneven = np.repeat([0, 1, 2, 3], [7, 5, 13, 7])


@pytest.mark.parametrize(
    "mask",
    [
        tw.causal(),
        tw.window(4),
        tw.window(5, 2),
        tw.causal() & tw.window(6),
        tw.causal() | tw.prefix(8),
        tw.prefix(5),
        tw.document(_documents),
        tw.document(_uneven),
        tw.document(_documents) & tw.causal(),
        Q // 8 == K // 8,
        Q // 4 == K // 4,
        (Q // 8 == K // 8) & tw.causal(),
        tw.dense(np.kron(np.random.default_rng(0).random((8, 8)) < 0.5, np.ones((4, 4), bool))),
        tw.dense(np.random.default_rng(0).random((2, 32, 32)) < 0.03),
        (Q < 16) == (K < 16),
        ~tw.causal(),
        tw.load(np.repeat([4, 8, 32, 16], 8), Q) > K,
    ],
    ids=str,
)
@pytest.mark.parametrize("tile", [(4, 4), (8, 4), (4, 8)])
def test_aligned_tiles_are_classified_exactly(mask, tile):
    p = made(mask, tile=tile, n_q=32, n_k=32, heads=2, heads_k=2)
    assert loose_tiles(p, mask) == []


def test_looseness_that_is_allowed():
    """Where Q and K meet in one %, or one unknown is used twice, bounds cannot see that it is the same one."""
    for mask in (tw.dilated(2), (Q - K) * (Q - K) < 9, tw.document(_uneven[::-1].copy() % 2)):
        p = made(mask, tile=(4, 4), n_q=32, n_k=32)
        assert_sound(p, mask)


def test_causal_pictures():
    assert grid(made(tw.causal()))[0, 0].tolist() == [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
    # Bottom right: four queries at the end of sixteen keys.
    assert grid(made(tw.causal(), n_q=4))[0, 0].tolist() == [[2, 2, 2, 1]]
    # More queries than keys: the first queries see nothing.
    assert grid(made(tw.causal(), n_k=8))[0, 0].tolist() == [[0, 0], [0, 0], [1, 0], [2, 1]]
    assert made(tw.causal()).by_query.row(0, 0, 3) == [(0, 3, FULL), (3, 4, PARTIAL)]
    assert made(tw.causal()).by_key.row(0, 0, 0) == [(0, 1, PARTIAL), (1, 4, FULL)]


def test_ragged_edges_are_partial():
    p = made(None, n_q=10, n_k=9)
    assert grid(p)[0, 0].tolist() == [[2, 2, 1], [2, 2, 1], [1, 1, 1]]
    assert p.queries(2) == slice(8, 10)
    assert p.keys(2) == slice(8, 9)


def test_masking_scores_are_skipped():
    p = made(score=tw.where(K < 8, S, -np.inf))
    assert grid(p)[0, 0].tolist() == [[2, 2, 0, 0]] * 4
    values = np.zeros((16, 16), np.float32)
    values[:, 4:] = -np.inf
    assert grid(made(score=tw.bias(values)))[0, 0].tolist() == [[2, 0, 0, 0]] * 4
    values[0, 0] = -np.inf
    assert grid(made(score=tw.bias(values)))[0, 0].tolist() == [[1, 0, 0, 0]] + [[2, 0, 0, 0]] * 3
    assert grid(made(tw.causal(), tw.bias(values)))[0, 0].tolist() == [[1, 0, 0, 0]] + [[2, 0, 0, 0]] * 3
    assert (grid(made(score=tw.alibi(1))) == FULL).all()
    assert (grid(made(score=tw.softcap(3.0))) == FULL).all()


# -- batch and heads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask, stored",
    [
        (tw.causal(), (1, 1)),
        (K < Q + B, (2, 1)),
        (K < Q + H, (1, 4)),
        (K < Q + HK, (1, 4)),
        (K < Q + H + B, (2, 4)),
        (tw.document(np.zeros((2, 16), int)), (2, 1)),
        (tw.dense(np.ones((4, 16, 16), bool)), (1, 4)),
        (None, (1, 1)),
    ],
    ids=str,
)
def test_batch_and_heads_only_where_used(mask, stored):
    p = made(mask, batch=2, heads=4, heads_k=2)
    assert p.by_query.offsets.shape[:2] == stored
    assert p.by_key.offsets.shape[:2] == stored
    assert_sound(p, mask)
    assert sum(p.counts.values()) == 2 * 4 * 16


def test_packed_positions_and_origins():
    ids = np.repeat([0, 1], 16)
    mask = tw.load(ids, QP) == tw.load(ids, KP)
    assert (grid(made(mask, packed_q=16, packed_k=16)) == FULL).all()
    assert (grid(made(mask, packed_q=16, packed_k=0)) == EMPTY).all()
    p = made(tw.causal(), origin_q=0, origin_k=8, n_k=8, total_q=16, total_k=16)
    assert grid(p)[0, 0].tolist() == [[0, 0], [0, 0], [1, 0], [2, 1]]


# -- joined rows ------------------------------------------------------------------------------------------------------


def assert_joined(p, count, most):
    """What is visited is the union; a part leaves out EMPTY tiles at the last end alone, as many as it may."""
    joined, rows = p.joined(count, most), -(-p.grid[0] // count)
    assert joined.offsets.shape[2] == rows + 1
    for b, h, i in np.ndindex(*joined.offsets.shape[:2], rows):
        kinds = np.full((count, p.grid[1]), EMPTY)
        whole = p.kinds(b, h)[i * count : (i + 1) * count]
        kinds[: len(whole)] = whole
        found = np.zeros_like(kinds)
        for first, last, bits in joined.table[joined.offsets[b, h, i] : joined.offsets[b, h, i + 1]]:
            assert bits
            found[:, first:last] = (bits >> 2 * np.arange(count) & 3)[:, None]
        visited = np.flatnonzero((kinds != EMPTY).any(axis=0)).tolist() or [0]
        assert np.flatnonzero(found.any(axis=0)).tolist() == visited
        for part, joint in zip(kinds[:, visited], found[:, visited], strict=True):
            assert_part(part, joint, most)


def assert_part(part, joint, most):
    """Of the visited tiles: their kinds for one part, and those that it was given."""
    live, taken = np.flatnonzero(part), np.flatnonzero(joint)
    after = len(part) - 1 - live[-1] if len(live) else 0
    assert taken.tolist() == list(range(len(part) - min(after, most)))
    assert joint[taken].tolist() == np.maximum(part[taken], PARTIAL).tolist()


@profile(200)
@given(bool_exprs(3), st.integers(1, 13), st.integers(1, 13), SIDES, SIDES, st.integers(1, 3), st.integers(0, 2))
def test_joined_rows(mask, n_q, n_k, tile_q, tile_k, count, most):
    assert_joined(made(mask, tile=(tile_q, tile_k), n_q=n_q, n_k=n_k, heads=2, batch=2, heads_k=2), count, most)


def test_joined_causal():
    p = made(tw.causal())
    # The first of two rows leaves out the last tile, which is the second's alone; the second is in the upper bits.
    first, second = [[0, 1, 0b1001], [1, 2, 0b0100]], [[0, 2, 0b1010], [2, 3, 0b1001], [3, 4, 0b0100]]
    assert p.joined(2, 1).table.tolist() == first + second
    assert p.joined(2, 0).table.tolist()[:2] == [[0, 1, 0b1001], [1, 2, 0b0101]]


@pytest.mark.parametrize("count", [2, 3])
def test_joined_rows_of_large_grids(count):
    """Bands of 16 rows, which three do not divide."""
    for mask in (tw.causal() & tw.window(70), tw.document(np.sort(np.random.default_rng(0).integers(0, 9, 400)))):
        assert_joined(made(mask, tile=(4, 4), n_q=400, n_k=400), count, 1)


# -- large grids ------------------------------------------------------------------------------------------------------

LARGE = {
    "causal": lambda n: tw.causal(),
    "causal window": lambda n: tw.causal() & tw.window(700),
    "prefix": lambda n: tw.causal() | tw.prefix(1000),
    "document": lambda n: tw.document(np.sort(np.random.default_rng(0).integers(0, 20, n))),
    "blocks": lambda n: Q // 512 == K // 512,
    "stripes": lambda n: (K // 100) % 2 == 0,
    "heads": lambda n: abs(Q - K) < 300 * (H + 1),
    "nothing": lambda n: K < 0,
    "everything": lambda n: K >= 0,
}


@pytest.mark.parametrize("name", LARGE)
def test_large_grids_agree_with_small_ones(name):
    """The coarse path: blocks of tiles first. On samples it says what classifying each tile says."""
    n, side = 16384, 16
    mask = LARGE[name](n)
    p = made(mask, tile=(side, side), n_q=n, n_k=n - 5, heads=2, heads_k=2)
    assert p.grid == (1024, 1024)
    rng, heads = np.random.default_rng(1), p.by_query.offsets.shape[1]
    fine = schedule._classify
    by_key = {j: dict(p.by_key.tiles(0, heads - 1, j)) for j in [*rng.integers(0, 1024, 40).tolist(), 0, 1023]}
    for i in [*rng.integers(0, 1024, 40).tolist(), 0, 15, 16, 1023]:
        expected = fine(p, np.array([i, i + 1]), np.arange(1025))[0, heads - 1, 0]
        found = np.zeros(1024, np.uint8)
        for run in p.by_query.row(0, heads - 1, i):
            found[run.first : run.last] = run.kind
        np.testing.assert_array_equal(found, expected, err_msg=f"{mask} row {i}")
        for j, column in by_key.items():
            assert column.get(i, EMPTY) == expected[j]
    for j in by_key:
        rows = p.by_key.row(0, heads - 1, j)
        for a, b in pairwise(rows):
            assert a.last < b.first or (a.last == b.first and a.kind != b.kind)


def test_a_million_queries_are_planned_in_seconds():
    start = time.process_time()
    n, side = 1_000_000, 128
    p = made(tw.causal() & tw.window(4096), tile=(side, side), n_q=n, n_k=n)
    counts = p.counts
    assert len(p.by_key.table) > 0
    assert time.process_time() - start < 10
    tiles = -(-n // side)
    # A row of tiles sees its own, 32 before it, and the ragged or far end: about 33 tiles, all but two of them FULL.
    assert 32 * tiles < counts[PARTIAL] + counts[FULL] < 35 * tiles
    assert counts[FULL] > 30 * tiles
    assert sum(counts.values()) == tiles**2


def test_documents_of_a_long_sequence_are_planned_in_seconds():
    start = time.process_time()
    n = 204_800 - 640
    full_in_the_last = sum(range(n % 2048 // 128))  # below the diagonal of its whole tiles
    if n % 128:
        pytest.fail("the count above is for whole tiles")
    ids = np.arange(n) // 2048
    p = made(tw.document(ids) & tw.causal(), tile=(128, 128), n_q=n, n_k=n)
    counts = p.counts
    assert time.process_time() - start < 10
    assert counts[FULL] == 120 * (n // 2048) + full_in_the_last
    assert counts[PARTIAL] >= -(-n // 128)


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, size, wide", [("float32", 4, 4), ("float16", 2, 4), ("bfloat16", 2, 4), ("float64", 8, 8)]
)
@pytest.mark.parametrize("mask", [None, tw.causal(), tw.window(5) & (K < Q + 3 * H + B)], ids=str)
def test_numbers_against_brute_force(mask, dtype, size, wide):
    shape = Shape(2, 4, 2, 21, 30, 8, 6, dtype)
    p = plan(Attention(1.0, mask), shape, Tile(4, 8))
    kinds = grid(p)
    counts = {kind: int((kinds == kind).sum()) for kind in Kind}
    assert p.counts == counts
    scores = keys = 0
    for b, h, i, j in np.ndindex(kinds.shape):
        if kinds[b, h, i, j] != EMPTY:
            rows, cols = len(range(21)[p.queries(i)]), len(range(30)[p.keys(j)])
            scores += rows * cols
            keys += cols
    assert p.flops == 2 * scores * 8 + 2 * scores * 6
    assert p.flops_naive == 2 * (2 * 4 * 21 * 30) * (8 + 6)
    q_rows, k_rows = 2 * 4 * 21, 2 * 2 * 30
    assert p.bytes_tiled == q_rows * (8 + 6) * size + q_rows * wide + keys * (8 + 6) * size
    matrix = q_rows * 30 * size
    assert p.bytes_naive == (q_rows * (8 + 6) + k_rows * (8 + 6)) * size + 4 * matrix
    assert p.bytes_matrix == matrix
    assert p.bytes_on_chip == (4 * 8 + 8 * (8 + 6)) * size + (4 * 8 + 4 * 6 + 2 * 4) * wide


# -- the cache --------------------------------------------------------------------------------------------------------


def test_numbers_beyond_64_bits():
    """Of sizes that no machine holds, as a plan on the command line may have them."""
    many = 2**31 - 1
    p = made(tile=(many, 128), batch=many, heads=many, n_q=many, n_k=2**20)
    assert p.counts == {EMPTY: 0, PARTIAL: 0, FULL: many**2 * 2**13}
    assert p.flops == p.flops_naive == 2 * many**3 * 2**20 * 16
    ragged = made(tw.causal(), tile=(3, 2), n_q=7, n_k=7)
    assert ragged.flops == 2 * 16 * (3 * 4 + 3 * 6 + 1 * 7)


@pytest.mark.parametrize(
    ("mask", "told_apart"), [(None, (1, 1)), (K < Q, (1, 1)), (K < B, (5, 1)), (K < H, (1, 6)), (K < B + HK, (5, 6))]
)
@pytest.mark.parametrize("n", [(64, 64), (2000, 40), (40, 2000), (2048, 2048), (1, 9000), (300, 300)])
def test_what_is_classified_at_once(mask, told_apart, n, monkeypatch):
    """No call of the interval arithmetic sees more tiles than the plan says."""
    seen = []
    classify = schedule._classify
    monkeypatch.setattr(schedule, "_classify", lambda *given: seen.append(classify(*given)) or seen[-1])
    p = made(mask, batch=5, heads=6, heads_k=6, n_q=n[0], n_k=n[1], tile=(1, 1))
    assert p.told_apart == told_apart
    assert len(p.by_query.offsets) == told_apart[0] and len(p.by_key.offsets[0]) == told_apart[1]
    assert max(kinds.size for kinds in seen) <= p.at_once <= 16 * 9000 * 30


def test_the_same_plan_is_found_again():
    a = made(tw.causal() & tw.window(11))
    assert made(tw.causal() & tw.window(11)) is a
    assert made(tw.causal() & tw.window(12)) is not a
    assert made(tw.causal() & tw.window(11), n_q=17) is not a
    assert made(tw.causal() & tw.window(11), tile=(4, 8)) is not a
    assert made(tw.causal() & tw.window(11), origin_q=1, total_q=17) is not a
    # What the mask does not read makes no difference.
    assert made(tw.causal() & tw.window(11), first_batch=3, packed_q=9, packed_k=7, backward=True) is a
    assert made(K < B, first_batch=3) is not made(K < B)
    assert made(K < QP, packed_q=3) is not made(K < QP)


def test_plans_that_depend_on_contents_are_not_kept():
    for ids in (np.repeat([0, 1], 8), torch.arange(16) // 8):
        mask = tw.document(ids)
        before = grid(made(mask))[0, 0].tolist()
        ids[:] = 0
        assert (grid(made(mask)) == FULL).all()
        assert before == [[2, 2, 0, 0], [2, 2, 0, 0], [0, 0, 2, 2], [0, 0, 2, 2]]
    bias = np.zeros((16, 16))
    score = tw.bias(bias)
    assert (grid(made(score=score)) == FULL).all()
    bias[:] = -np.inf
    assert (grid(made(score=score)) == EMPTY).all()


def test_the_cache_does_not_grow_without_end():
    for i in range(2 * schedule._CACHE_SIZE):
        made(tw.window(1000 + i))
    assert len(schedule._cache) <= schedule._CACHE_SIZE


# -- integers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask",
    [Q * K < 5, Q * 1_000_000 < K, Q + (2**31 - 1) < K, -Q * 65536 * 65535 < K, abs(Q * -(2**30)) < K],
    ids=str,
)
def test_integers_beyond_32_bits_are_refused(mask):
    shape = Shape(1, 1, 1, 50_000, 50_000, 8, 8)
    with pytest.raises(ValueError, match="beyond 32 bits"):
        schedule.check_integers(mask, shape)


@pytest.mark.parametrize(
    "mask", [Q * K < 5, Q + (2**31 - 41_000) < K, (Q * 1.0) * K < 5, Q % 7 * 1_000_000 < K], ids=str
)
def test_integers_within_32_bits_are_fine(mask):
    schedule.check_integers(mask, Shape(1, 1, 1, 40_000, 40_000, 8, 8))


def test_an_overflow_is_refused_by_the_call():
    q = k = v = np.zeros((300, 4), np.float32)
    with pytest.raises(ValueError, match=r"Q \* 10000000 .*beyond 32 bits.*multiply by 1\.0"):
        tw.attention(q, k, v, mask=Q * 10_000_000 < K)


def test_packed_sequences_are_judged_by_their_own_lengths():
    """Q and K are a sequence's own positions, so the packed total does not overflow."""
    n = 60_000
    q = k = v = np.zeros((n, 1, 1), np.float32)
    cumulative = np.arange(0, n + 1, 100)
    tw.attention_varlen(q, k, v, cumulative, cumulative, mask=(Q * K) % 2 == 0)
    with pytest.raises(ValueError, match="beyond 32 bits"):
        tw.attention_varlen(q, k, v, cumulative, cumulative, mask=(QP * KP) % 2 == 0)


def test_replace_keeps_totals_apart():
    s = Shape(1, 1, 1, 4, 6, 8, 8)
    assert (s.total_q, s.total_k) == (4, 6)
    assert replace(s, origin_k=2, total_k=20).total_k == 20
