"""Bounds over tiles are never wrong: whatever an expression is, its values lie within them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tilewise as tw
from tests.expressions import Expressions
from tests.strategies import BOOL_ARRAYS, FLOAT_ARRAYS, SMALL, bool_exprs, dense_env, float_exprs, int_exprs, profile
from tilewise import arrays
from tilewise import expr as ex
from tilewise.expr import H, K, Loaded, Q, S
from tilewise.intervals import INTERVAL_OPS, SCORE
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.walking import evaluate

TILES = st.sampled_from([(1, 1), (3, 2), (4, 4), (5, 7), (12, 14)])


def bounds(expr, tile, shape=SMALL):
    """lo and hi of every tile, spread back over the positions they are about."""
    q, k = (np.arange(0, n, t) for n, t in zip((shape.n_q, shape.n_k), tile, strict=True))
    b, h = np.arange(shape.batch)[:, None, None, None], np.arange(shape.heads)[:, None, None]
    low = shape.env(b, h, q[:, None], k)
    high = shape.env(b, h, np.minimum(q + tile[0], shape.n_q)[:, None] - 1, np.minimum(k + tile[1], shape.n_k) - 1)
    env = {"S": SCORE, **{name: (np.asarray(low[name]), np.asarray(high[name])) for name in low}}
    grid = (shape.batch, shape.heads, len(q), len(k))
    for side in evaluate(expr, env, INTERVAL_OPS):
        over_tiles = np.broadcast_to(side, grid)
        yield over_tiles.repeat(tile[0], axis=2)[:, :, : shape.n_q].repeat(tile[1], axis=3)[..., : shape.n_k]


def assert_sound(expr, tile, dtype=np.float64):
    lo, hi = bounds(expr, tile)
    with np.errstate(all="ignore"):
        found = np.broadcast_to(evaluate(expr, dense_env(dtype=dtype), numpy_ops(dtype)), lo.shape)
    if expr.kind == ex.BOOL:
        assert not (lo & ~found).any(), f"{expr}: said to hold everywhere and does not"
        assert not (~hi & found).any(), f"{expr}: said to hold nowhere and does"
        assert not (lo & ~hi).any()
        return
    unknown = np.isnan(lo) | np.isnan(hi)
    inside = (found >= lo) & (found <= hi)
    assert (inside | unknown).all(), f"{expr}: {found[~(inside | unknown)][:3]} outside"
    if expr.kind == ex.INT:
        assert not unknown.any()


@profile(500)
@given(int_exprs(4), TILES)
def test_bounds_of_integers(expr, tile):
    assert_sound(expr, tile)


@profile(500)
@given(float_exprs(4), TILES, st.sampled_from([np.float32, np.float64]))
def test_bounds_of_floats(expr, tile, dtype):
    assert_sound(expr, tile, dtype)


@profile(500)
@given(bool_exprs(4, scores=True), TILES, st.sampled_from([np.float32, np.float64]))
@example(tw.where(Q < 5, 0.1, 0.2) < 0.1 + 1e-12, (4, 4), np.float32)
@example(tw.where(Q < 5, 0.1, 0.2) >= 0.1 + 1e-12, (4, 4), np.float32)
@example(tw.load(np.array([0.1, 0.2], np.float32), Q % 2) > 0.1, (1, 1), np.float32)
@example(tw.where(Q < 5, 1e39, 1.0) < np.inf, (4, 4), np.float32)
@example(tw.log(Q - 5) < 100.0, (12, 14), np.float64)  # NaN compares False
@example(~(tw.log(Q - 5) >= -100.0), (12, 14), np.float64)
@example(tw.where(Q < 5, np.inf, 1.0) - tw.where(K < 5, np.inf, 1.0) < np.inf, (4, 4), np.float64)
@example(tw.where(Q < 5, np.inf, 1.0) * tw.where(K < 5, 0.0, 1.0) >= 0.0, (4, 4), np.float64)
@example(abs(tw.where(Q < 5, 0.0, 1.0) / tw.where(K < 5, 0.0, 1.0)) >= 0.0, (4, 4), np.float64)
def test_conditions_are_never_wrong(expr, tile, dtype):
    assert_sound(expr, tile, dtype)


@st.composite
def conditions_on_ids(draw, depth=3):
    """Over integers of 64 bits: what leaves those wraps around."""
    below = draw(st.randoms(use_true_random=False)).randrange
    pools = {"int": IDS, "float": FLOAT_ARRAYS, "bool": BOOL_ARRAYS}
    drawn = Expressions(below, lambda kind: Loaded(drawn.one_of(pools[kind])))
    return drawn.one_of([ex.Expr.__eq__, ex.Expr.__lt__, ex.Expr.__le__])(drawn.integer(depth), drawn.load("int", 1))


HASH = 0x9E3779B97F4A7C15 - 2**64
_EXTREMES = [-(2**63), -(2**63) + 1, HASH, HASH + 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**62, -1, 0, 1, 2**31]
IDS = [np.array(_EXTREMES), np.sort(_EXTREMES), np.array([2**63 - 1, 2**63 - 2]), np.array(-(2**63))]


@profile(500)
@given(conditions_on_ids(), TILES)
@example(tw.load(IDS[2], Q % 2) == tw.load(IDS[2], K % 2), (1, 1))
@example(tw.load(IDS[0], Q) - tw.load(IDS[0], K) < 5, (3, 2))
@example(tw.load(IDS[0], Q) // -1 < 0, (1, 1))
@example(tw.load(IDS[0], Q) // -1 <= tw.load(np.array(2**63 - 2)), (3, 1))
@example(-tw.load(IDS[0], Q) < 0, (1, 1))
@example(abs(tw.load(IDS[0], Q)) >= 0, (1, 1))
@example(abs(tw.load(IDS[0], Q)) >= 0, (10, 1))
@example(3 * tw.load(IDS[0], Q) > tw.load(IDS[0], K), (3, 2))
def test_conditions_on_integers_of_64_bits_are_never_wrong(expr, tile):
    assert_sound(expr, tile)


def test_ids_that_are_one_number_as_floats_are_told_apart():
    lo, hi = bounds(tw.load(IDS[2], Q % 2) == tw.load(IDS[2], K % 2), (1, 1))
    assert np.array_equal(lo, hi)
    assert np.array_equal(lo[0, 0, :2, :2], np.eye(2, dtype=bool))


@pytest.mark.slow
@profile(10000)
@given(st.one_of(int_exprs(5), float_exprs(5), bool_exprs(5, scores=True)), TILES, st.booleans())
def test_bounds_of_anything_long(expr, tile, double):
    assert_sound(expr, tile, np.float64 if double else np.float32)


# -- exhaustively, on small integers ----------------------------------------------------------------------------------

RANGES = [(lo, hi) for lo in range(-5, 6) for hi in range(lo, 6)]


@pytest.mark.parametrize(
    "op", ["add", "sub", "mul", "floordiv", "mod", "minimum", "maximum", "lt", "le", "gt", "ge", "eq", "ne"]
)
def test_every_small_range_of_integers(op):
    """All pairs of ranges within -5 .. 5: bounds hold, and for all but // and % they are the tightest there are."""
    lo, hi = np.array(RANGES).T
    a, b = (lo[:, None], hi[:, None]), (lo, hi)
    low, high = (np.broadcast_to(x, (len(lo), len(lo))) for x in INTERVAL_OPS[op](a, b))
    values = np.arange(-5, 6)
    table = numpy_ops(np.float64)[op](values[:, None], values)  # table[x + 5, y + 5]
    for i, (a_lo, a_hi) in enumerate(RANGES):
        for j, (b_lo, b_hi) in enumerate(RANGES):
            block = table[a_lo + 5 : a_hi + 6, b_lo + 5 : b_hi + 6]
            assert low[i, j] <= block.min() and high[i, j] >= block.max(), (op, RANGES[i], RANGES[j])
            if op not in ("mod", "floordiv"):
                assert low[i, j] == block.min() and high[i, j] == block.max(), (op, RANGES[i], RANGES[j])


@pytest.mark.parametrize("op", ["neg", "abs"])
def test_every_small_range_of_one_integer(op):
    for lo, hi in RANGES:
        low, high = INTERVAL_OPS[op]((np.asarray(lo), np.asarray(hi)))
        values = numpy_ops(np.float64)[op](np.arange(lo, hi + 1))
        assert (low, high) == (values.min(), values.max()), (op, lo, hi)


def test_remainders_and_quotients_by_a_constant_are_tight():
    for divisor in (-4, -1, 1, 2, 3, 7):
        for lo, hi in RANGES:
            a, b = (np.asarray(lo), np.asarray(hi)), (np.asarray(divisor),) * 2
            quotients = np.arange(lo, hi + 1) // divisor
            assert INTERVAL_OPS["floordiv"](a, b) == (quotients.min(), quotients.max())
            if quotients.min() == quotients.max():
                rest = np.arange(lo, hi + 1) % divisor
                assert INTERVAL_OPS["mod"](a, b) == (rest.min(), rest.max())


# -- loads ------------------------------------------------------------------------------------------------------------


def test_loads_have_the_bounds_of_their_box():
    rng = np.random.default_rng(0)
    cases = [
        tw.load(rng.integers(-50, 50, 12), Q),
        tw.load(rng.integers(-50, 50, 14), K),
        tw.load(rng.integers(-50, 50, 40), Q + K),
        tw.load(rng.integers(-50, 50, (12, 14)), Q, K),
        tw.load(rng.integers(-50, 50, (14, 12)), K, Q),
        tw.load(rng.integers(-50, 50, (2, 4, 12, 14)), tw.B, H, Q, K),
        tw.load(rng.integers(-50, 50, (14, 4, 12, 2)), K, H, Q, tw.B),
        tw.load(rng.integers(-50, 50, (4, 14)), H, K),
        tw.load(rng.integers(-50, 50, (1, 4, 1, 14)), 0, H, 0, K),
        tw.load(rng.integers(-50, 50, (4, 25)), H, Q - K + 13),
    ]
    for expr in cases:
        for tile in ((4, 7), (5, 3), (1, 1), (12, 14)):
            assert_sound(expr, tile)
            found = evaluate(expr, dense_env(), numpy_ops(np.float64))
            found = np.broadcast_to(found, (2, 4, 12, 14))
            lo, hi = bounds(expr, tile)
            for i in range(0, 12, tile[0]):
                for j in range(0, 14, tile[1]):
                    block = np.s_[:, :, i : i + tile[0], j : j + tile[1]]
                    assert np.array_equal(lo[:, :, i, j], found[block].min(axis=(2, 3))), (expr, tile)
                    assert np.array_equal(hi[:, :, i, j], found[block].max(axis=(2, 3))), (expr, tile)


@pytest.mark.parametrize("dtype", [np.int32, np.float16, bool])
def test_one_index_may_vary_along_any_axes(dtype):
    """Its boxes have the bounds of what is in them, in grids of any sizes."""
    rng = np.random.default_rng(0)
    indices = [(H, Q - K + 13), (K, K - Q + 11), (K - Q + 11, K), (Q, Q + K, H), (K, 13 - K), (Q + K, Q, 2), (H, H, K)]
    for index in indices:
        values = rng.integers(-50, 50, [4 if i is H else 25 for i in index])
        array = values > 30 if dtype is bool else values.astype(dtype)
        for tile in ((4, 7), (5, 3), (1, 1), (12, 14), (12, 2), (3, 14)):
            lo, hi = bounds(tw.load(array, *index), tile)
            boxes = [[x.astype(int) for x in bounds(ex.lift(i) + 0 * (Q + K), tile)] for i in index]
            for at in np.ndindex(lo.shape):
                inside = array[tuple(slice(first[at], last[at] + 1) for first, last in boxes)]
                assert lo[at] <= inside.min() <= inside.max() <= hi[at]
                assert dtype is np.float16 or (lo[at], hi[at]) == (inside.min(), inside.max()), (index, tile, at)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 1000, 65536, 65537, 200_001])
def test_long_lines_are_summarised_soundly(n):
    rng = np.random.default_rng(n)
    array = rng.integers(-1000, 1000, n)
    first = rng.integers(0, n, 300)
    last = np.minimum(first + rng.integers(0, n, 300) // rng.integers(1, n + 1, 300), n - 1)
    lo, hi = INTERVAL_OPS["load"](ex.Loaded(array), (first, last))
    for i, (a, b) in enumerate(zip(first, last, strict=True)):
        assert lo[i] <= array[a : b + 1].min() <= array[a : b + 1].max() <= hi[i]
        if n <= 65536:
            assert (lo[i], hi[i]) == (array[a : b + 1].min(), array[a : b + 1].max())


@pytest.mark.parametrize("dtype", [np.int64, np.float16, bool])
@pytest.mark.parametrize(("first", "last"), [(3, 3), (1, 5), (-9, 99)])
def test_one_range_for_all_tiles(first, last, dtype):
    """As of load(a, 3) or load(a, NK - 1): no array of ranges, but one number for each end."""
    array = np.array([0, 1, 0, 1, 1, 0, 1], dtype)
    lo, hi = INTERVAL_OPS["load"](ex.Loaded(array), (np.asarray(first), np.asarray(last)))
    read = array[max(first, 0) : last + 1].astype(float)
    assert lo.shape == hi.shape == ()
    assert read.min() - 1e-3 <= lo <= read.min() <= read.max() <= hi <= read.max() + 1e-3


def test_indices_outside_are_clamped_as_values_are():
    array = np.array([5, 6, 7])
    lo, hi = INTERVAL_OPS["load"](ex.Loaded(array), (np.array([-9, -9, 1, 8]), np.array([-4, 1, 50, 90])))
    assert (lo.tolist(), hi.tolist()) == ([5, 5, 6, 7], [5, 6, 7, 7])


def test_nan_in_an_array_is_unknown():
    x = np.array([1.0, np.nan, 2.0, 3.0])
    always, sometimes = INTERVAL_OPS["lt"](
        INTERVAL_OPS["load"](ex.Loaded(x), (np.array([0, 2]), np.array([1, 3]))), INTERVAL_OPS["const"](10.0)
    )
    assert always.tolist() == [False, True]
    assert sometimes.tolist() == [True, True]


@pytest.mark.parametrize("dtype", [np.float16, arrays.BFLOAT16])
@pytest.mark.parametrize("shape", [(2**16,), (2**9, 2**7), (2, 2**8, 2**7), (2**16, 1)])
def test_half_precision_has_the_bounds_of_its_numbers(dtype, shape):
    """Every number there is, in any order: -0, subnormal numbers, infinities and NaN of both signs too."""
    bits = np.random.default_rng(0).permutation(2**16).astype(np.uint16).reshape(shape)
    half = bits.view(dtype)
    box = []
    for axis, n in enumerate(shape):
        first = np.arange(0, n, 4 if n > 2 else 1).reshape(-1, *[1] * (len(shape) - 1 - axis))
        box.append((first, first + (3 if n > 2 else 0)))
    found = INTERVAL_OPS["load"](ex.Loaded(half), *box)
    wanted = INTERVAL_OPS["load"](ex.Loaded(arrays.widen(half, np.float32)), *box)
    assert np.isnan(wanted[0]).any()
    assert np.isfinite(wanted[0]).any()
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one, other, equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float16, arrays.BFLOAT16])
def test_one_number_of_half_precision(dtype):
    low, high = INTERVAL_OPS["load"](ex.Loaded(arrays.narrow(np.array(-1.5), arrays._dtype_name(np.dtype(dtype)))))
    assert low < -1.5 < high < -1.49


def test_scores_are_finite_and_large():
    for expr, always, sometimes in [
        (S > -np.inf, True, True),
        (S < 0, False, True),
        (tw.where(Q < 100, S, -np.inf) > -np.inf, True, True),
        (tw.where(Q >= 100, S, -np.inf) > -np.inf, False, False),
        (S - 1e30 > -np.inf, True, True),
        (tw.tanh(S) <= 1.1, True, True),
        (tw.exp(S) >= -1.0, True, True),
    ]:
        lo, hi = bounds(expr, (4, 4))
        assert (lo.all(), hi.all()) == (always, sometimes), expr
        assert (lo.any(), hi.any()) == (always, sometimes), expr
