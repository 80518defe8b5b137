"""The teaching interface: equal to the definition, O(N) in memory as measured, and its page tells the truth."""

from __future__ import annotations

import pickle
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.lab import (
    Blocks,
    TiledAttention,
    count_blocks,
    online_softmax,
    sram_needed,
    standard_attention,
    update_block,
    verify_memory_usage,
)

ATOL = {np.float16: 2e-3, np.float32: 1e-5, np.float64: 1e-12}
# (leading), n_q, n_k, d, d_v, block_q, block_kv: even, ragged, B_r > B_c, blocks beyond n, single rows, nothing at all
SHAPES = [
    ((), 128, 128, 64, 64, 32, 32),
    ((), 100, 100, 16, 16, 32, 8),
    ((), 37, 53, 8, 5, 7, 16),
    ((), 53, 37, 8, 5, 16, 7),
    ((2,), 33, 65, 4, 4, 32, 32),
    ((2, 3), 20, 31, 4, 6, 8, 3),
    ((), 5, 9, 3, 3, 64, 64),
    ((), 1, 1, 1, 1, 1, 1),
    ((), 0, 4, 2, 2, 2, 2),
    ((), 4, 0, 2, 2, 2, 2),
    ((0,), 4, 4, 2, 2, 2, 2),
]
orders = pytest.mark.parametrize("order", ["kv", "q"])
shapes = pytest.mark.parametrize("lead, n_q, n_k, d, d_v, block_q, block_kv", SHAPES)


def inputs(lead, n_q, n_k, d, d_v, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    sizes = ((n_q, d), (n_k, d), (n_k, d_v))
    return [(rng.standard_normal((*lead, *size)) * 2).astype(dtype) for size in sizes]


def causal_mask(n_q, n_k):
    return np.arange(n_k) <= np.arange(n_q)[:, None] + n_k - n_q


# -- the same result --------------------------------------------------------------------------------------------------


@orders
@shapes
@pytest.mark.parametrize("dtype", ATOL)
def test_equals_standard(order, dtype, lead, n_q, n_k, d, d_v, block_q, block_kv):
    Q, K, V = inputs(lead, n_q, n_k, d, d_v, dtype)
    tiled = TiledAttention(block_q, block_kv, order=order)
    out, (expected, weights) = tiled.forward(Q, K, V), standard_attention(Q, K, V)
    assert out.dtype == expected.dtype == weights.dtype == dtype
    assert out.shape == (*lead, n_q, d_v) and weights.shape == (*lead, n_q, n_k)
    np.testing.assert_allclose(out, expected, rtol=0, atol=ATOL[dtype])
    np.testing.assert_array_equal(tiled(Q, K, V), out)
    assert tiled.last_blocks.skipped == 0


@orders
@shapes
def test_causal_equals_standard(order, lead, n_q, n_k, d, d_v, block_q, block_kv):
    Q, K, V = inputs(lead, n_q, n_k, d, d_v)
    tiled = TiledAttention(block_q, block_kv, order=order)
    out = tiled.forward_causal(Q, K, V)
    expected, _ = standard_attention(Q, K, V, causal_mask(n_q, n_k))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)
    heads = int(np.prod(lead))
    of_one_head = counts(count_blocks(n_q, n_k, block_q, block_kv, causal=True))
    assert counts(tiled.last_blocks) == tuple(heads * count for count in of_one_head)
    # The mask itself, read block by block, skips the same blocks.
    np.testing.assert_array_equal(tiled.forward(Q, K, V, causal_mask(n_q, n_k)), out)
    assert counts(tiled.last_blocks) == tuple(heads * count for count in of_one_head)


@orders
@pytest.mark.parametrize("shape", [(20, 31), (31,), (20, 1), (1, 1), (3, 1, 31), (2, 1, 20, 31), (2, 3, 20, 31)])
def test_masks(order, shape):
    Q, K, V = inputs((2, 3), 20, 31, 4, 6)
    mask = np.random.default_rng(1).random(shape) < 0.4
    before = mask.copy()
    out = TiledAttention(8, 3, order=order).forward(Q, K, V, mask)
    expected, weights = standard_attention(Q, K, V, mask)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)
    assert not weights[~np.broadcast_to(mask, weights.shape)].any()
    np.testing.assert_array_equal(mask, before)


@orders
def test_blocks_of_an_empty_mask_are_skipped(order):
    Q, K, V = inputs((), 64, 64, 8, 8)
    mask = np.zeros((64, 64), bool)
    mask[40, 5] = True
    tiled = TiledAttention(16, 8, order=order)
    out = tiled.forward(Q, K, V, mask)
    assert counts(tiled.last_blocks) == (32, 1, 31)
    np.testing.assert_array_equal(out[40], V[5])
    assert not np.delete(out, 40, axis=0).any()


@orders
@pytest.mark.parametrize("dtype", ATOL)
def test_rows_with_no_key_give_zero(order, dtype):
    Q, K, V = inputs((), 12, 9, 4, 4, dtype)
    mask = np.ones((12, 9), bool)
    mask[[0, 5, 11]] = False
    tiled = TiledAttention(4, 2, order=order)
    for out in (tiled(Q, K, V, mask), standard_attention(Q, K, V, mask)[0]):
        assert not out[[0, 5, 11]].any() and out[[1, 4, 10]].all()
    causal = tiled.forward_causal(Q, K, V)  # more queries than keys: the first three come before all keys
    assert not causal[:3].any() and np.isfinite(causal).all()
    np.testing.assert_array_equal(causal[3], V[0])


@orders
def test_agrees_with_the_library(order):
    Q, K, V = inputs((2, 3), 20, 31, 4, 6)
    out = TiledAttention(8, 5, order=order).forward_causal(Q, K, V)
    np.testing.assert_allclose(out, tw.attention(Q, K, V, mask=tw.causal()), rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 24), st.integers(0, 24), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_any_sizes(n_q, n_k, block_q, block_kv, seed):
    Q, K, V = inputs((), n_q, n_k, 3, 2, seed=seed)
    mask = np.random.default_rng(seed).random((n_q, n_k)) < 0.3
    for order in ("kv", "q"):
        tiled = TiledAttention(block_q, block_kv, order=order)
        for out, allowed in ((tiled(Q, K, V, mask), mask), (tiled.forward_causal(Q, K, V), causal_mask(n_q, n_k))):
            np.testing.assert_allclose(out, standard_attention(Q, K, V, allowed)[0], rtol=0, atol=1e-12)


@orders
def test_huge_scores_and_strided_inputs(order):
    Q, K, V = (x[::2, ::2] for x in inputs((), 80, 80, 16, 16, np.float32))
    out = TiledAttention(16, 8, order=order)(Q * 100, K * 100, V)
    np.testing.assert_allclose(out, standard_attention(Q * 100, K * 100, V)[0], rtol=0, atol=1e-4)


def test_half_precision_is_summed_in_float32():
    n = 4096  # a sum of ones in float16 would stop at 2048
    Q, K, V = np.zeros((1, 4), np.float16), np.zeros((n, 4), np.float16), np.ones((n, 1), np.float16)
    assert TiledAttention(1, 64)(Q, K, V) == 1


# -- the online softmax -----------------------------------------------------------------------------------------------


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("shape", [(1,), (100,), (4, 33), (2, 3, 64)])
@pytest.mark.parametrize("block_size", [1, 7, 32, 1000])
def test_online_softmax(shape, block_size):
    x = np.random.default_rng(0).standard_normal(shape) * 5
    np.testing.assert_allclose(online_softmax(x, block_size), softmax(x), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_online_softmax_is_stable(dtype):
    x = np.array([-1e4, 0, 1e4 - 8, 1e4, 1e4, -1e4], dtype)
    out = online_softmax(x, block_size=2)
    assert out.dtype == dtype and np.isfinite(out).all()
    np.testing.assert_allclose(out, softmax(x.astype(np.float64)), rtol=0, atol=1e-3 if dtype == np.float16 else 1e-6)


def test_online_softmax_of_nothing():
    assert not online_softmax(np.full((2, 5), -np.inf), 2).any()
    assert online_softmax(np.zeros((2, 0))).shape == (2, 0)


def test_update_block_is_pure_and_holds_for_any_split():
    rng = np.random.default_rng(0)
    s, v = rng.standard_normal((6, 10)), rng.standard_normal((10, 3))
    start = np.full(6, -np.inf), np.zeros(6), np.zeros((6, 3))
    whole = update_block(*start, s, v)
    first = update_block(*start, s[:, :4], v[:4])
    kept = [x.copy() for x in first]
    for ours, expected in zip(update_block(*first, s[:, 4:], v[4:]), whole, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-13)
    for x, copy in zip((*first, *start), (*kept, np.full(6, -np.inf), np.zeros(6), np.zeros((6, 3))), strict=True):
        np.testing.assert_array_equal(x, copy)
    np.testing.assert_allclose(whole[2] / whole[1][:, None], softmax(s) @ v, rtol=1e-12)


def test_overwriting_the_maximum_before_rescaling_is_wrong():
    """The common mistake; these tests would see it, since scores that grow from block to block need the factor."""

    def wrong(x, block_size):
        row_max, row_sum = -np.inf, 0.0
        for block in np.split(x, range(block_size, len(x), block_size)):
            row_max = max(row_max, block.max())
            row_sum = row_sum * np.exp(row_max - row_max) + np.exp(block - row_max).sum()
        return np.exp(x - row_max) / row_sum

    falling = np.arange(8.0)[::-1]
    np.testing.assert_allclose(wrong(falling, 2), softmax(falling))
    assert wrong(falling[::-1], 2).sum() < 0.5
    np.testing.assert_allclose(online_softmax(falling[::-1], 2).sum(), 1)


# -- counting blocks --------------------------------------------------------------------------------------------------


def counts(blocks):
    return blocks.total, blocks.computed, blocks.skipped


def count_by_looking(n_q, n_k, block_q, block_kv, causal):
    mask = causal_mask(n_q, n_k) if causal else np.ones((n_q, n_k), bool)
    seen = [
        mask[i : i + block_q, j : j + block_kv].any() for i in range(0, n_q, block_q) for j in range(0, n_k, block_kv)
    ]
    return len(seen), sum(seen), len(seen) - sum(seen)


def test_a_count_of_blocks_is_a_number():
    """A grader compares it with the blocks that are computed; the rest is in its attributes."""
    assert count_blocks(128, 128, 32, 32, causal=False) == 16
    counted = count_blocks(128, 128, 32, 32, causal=True)
    assert counted == 10 and isinstance(counted, int) and counted / 16 == 0.625
    assert counts(counted) == (16, 10, 6)
    assert type(counted.computed) is int
    assert repr(counted) == str(counted) == f"{counted}" == "Blocks(total=16, computed=10, skipped=6)"
    assert f"{counted:d}" == "10"
    assert counts(pickle.loads(pickle.dumps(counted))) == (16, 10, 6)
    assert counts(Blocks(np.int64(16), np.int64(10))) == (16, 10, 6)


@pytest.mark.parametrize("causal", [False, True])
def test_count_blocks_against_brute_force(causal):
    for n_q, n_k in ((0, 0), (0, 3), (3, 0), (1, 1), (12, 12), (13, 13), (5, 17), (17, 5), (9, 10)):
        for block_q in (1, 2, 3, 4, 7, 12, 20):
            for block_kv in (1, 2, 3, 4, 5, 12, 20):
                size = (n_q, n_k, block_q, block_kv, causal)
                assert counts(count_blocks(*size)) == count_by_looking(*size), size


def test_causal_skips_about_half():
    assert counts(count_blocks(4096, 4096, 32, 32, causal=True)) == (16384, 8256, 8128)
    assert count_blocks(10**9, 10**9, 10**5, 10**5, causal=True).skipped == 9999 * 10000 // 2
    tiled = TiledAttention(16, 16)
    tiled.forward_causal(*inputs((), 512, 512, 8, 8))
    assert 0.45 < tiled.last_blocks.skipped / tiled.last_blocks.total < 0.5


def causal_with_rule(Q, K, V, block_q, block_kv, skip):
    """Causal attention that skips block (i, j) where the rule says so."""
    n, d = Q.shape
    out = np.zeros_like(V)
    for i, first in enumerate(range(0, n, block_q)):
        rows = np.arange(first, min(first + block_q, n))
        state = np.full(len(rows), -np.inf), np.zeros(len(rows)), np.zeros((len(rows), V.shape[1]))
        for j, start in enumerate(range(0, n, block_kv)):
            if not skip(i, j):
                cols = np.arange(start, min(start + block_kv, n))
                s = np.where(cols <= rows[:, None], Q[rows] @ K[cols].T / np.sqrt(d), -np.inf)
                state = update_block(*state, s, V[cols])
        out[rows] = state[2] / state[1][:, None]
    return out


@pytest.mark.parametrize("block_q, block_kv", [(8, 8), (4, 8), (8, 4), (16, 2), (12, 8), (6, 9), (8, 12)])
def test_the_rule_by_first_query_is_right_only_if_block_q_divides_block_kv(block_q, block_kv):
    Q, K, V = inputs((), 48, 48, 8, 8)
    expected, _ = standard_attention(Q, K, V, causal_mask(48, 48))

    def by_first_query(i, j):
        return i * block_q < j * block_kv

    def by_last_query(i, j):
        return (i + 1) * block_q - 1 < j * block_kv

    right = causal_with_rule(Q, K, V, block_q, block_kv, by_last_query)
    np.testing.assert_allclose(right, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(TiledAttention(block_q, block_kv).forward_causal(Q, K, V), expected, rtol=0, atol=1e-12)
    printed = causal_with_rule(Q, K, V, block_q, block_kv, by_first_query)
    if block_kv % block_q == 0:
        np.testing.assert_allclose(printed, expected, rtol=0, atol=1e-12)
    else:
        assert np.abs(printed - expected).max() > 0.1


# -- memory -----------------------------------------------------------------------------------------------------------


def peak(run):
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@orders
@pytest.mark.parametrize("method", ["forward", "forward_causal"])
def test_doubling_n_doubles_the_peak(order, method):
    peaks = []
    for n in (1024, 2048):
        Q, K, V = inputs((), n, n, 64, 64, np.float32)
        tiled = TiledAttention(64, 64, order=order)
        peaks.append(peak(lambda tiled=tiled, method=method, data=(Q, K, V): getattr(tiled, method)(*data)))
    assert peaks[1] < 2.2 * peaks[0]
    assert peaks[1] < 2048 * 2048 * 4 / 8


@orders
def test_a_mask_is_never_expanded(order):
    Q, K, V = inputs((4,), 1024, 1024, 8, 8, np.float32)
    mask = np.random.default_rng(0).random((1024, 1024)) < 0.5
    # 16 MiB of scores, 4 MiB of booleans if the mask were broadcast, 1 MiB if only copied
    assert peak(lambda: TiledAttention(64, 64, order=order)(Q, K, V, mask)) < 2**19


def test_verify_memory_usage():
    small, large = verify_memory_usage(1024), verify_memory_usage(2048)
    assert large["standard_attention_matrix"] == 2048 * 2048 * 4
    assert large["tiled_max_block"] == 32 * 32 * 4
    assert large["memory_reduction"] == 4096
    assert large["standard_peak"] > large["standard_attention_matrix"]
    assert large["measured_reduction"] == large["standard_peak"] / large["tiled_peak"] > 5
    assert large["standard_peak"] > 3.5 * small["standard_peak"]
    assert large["tiled_peak"] < 2.2 * small["tiled_peak"]
    assert not tracemalloc.is_tracing()


def test_verify_memory_usage_leaves_an_outer_trace_on():
    tracemalloc.start()
    try:
        verify_memory_usage(64)
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


def test_a_matrix_too_large_is_not_made(monkeypatch):
    monkeypatch.setattr("tilewise.lab.memory._MATRIX_LIMIT", 512 * 512 * 4 - 1)
    report = verify_memory_usage(512)
    assert report["standard_peak"] is None and report["measured_reduction"] is None
    assert report["tiled_peak"] > 0 and report["memory_reduction"] == 256


# -- the simulated SRAM -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, size, wide", [(np.float16, 2, 4), (np.float32, 4, 4), (np.float64, 8, 8)])
def test_sram_counts_every_block(dtype, size, wide):
    q, k, v = 16 * 8, 4 * 8, 4 * 5
    scores, acc, row_max, row_sum = 16 * 4, 16 * 5, 16, 16
    needed = (q + k + v) * size + (scores + acc + row_max + row_sum) * wide
    assert sram_needed(16, 4, 8, 5, dtype) == needed
    Q, K, V = inputs((), 10, 10, 8, 5, dtype)
    TiledAttention(16, 4, sram_bytes=needed)(Q, K, V)
    for call in (
        TiledAttention(16, 4, sram_bytes=needed - 1),
        TiledAttention(16, 4, sram_bytes=needed - 1).forward_causal,
    ):
        with pytest.raises(ValueError, match=rf"16 x 4 blocks need {needed} bytes .* there are {needed - 1}; "):
            call(Q, K, V)


@pytest.mark.parametrize("budget", [1036, 5000, 20_000, 80_000])
def test_sram_error_names_blocks_that_fit(budget):
    Q, K, V = inputs((), 10, 10, 64, 64, np.float32)
    with pytest.raises(ValueError, match="would fit") as error:
        TiledAttention(64, 64, sram_bytes=budget)(Q, K, V)
    best = int(re.search(r"block_size_q = block_size_kv = (\d+) would fit", str(error.value))[1])
    TiledAttention(best, best, sram_bytes=budget)(Q, K, V)
    with pytest.raises(ValueError, match="sram_bytes"):
        TiledAttention(best + 1, best + 1, sram_bytes=budget)(Q, K, V)


def test_sram_too_small_for_anything():
    with pytest.raises(ValueError, match="not even 1 x 1 would fit"):
        TiledAttention(10**9, 64, sram_bytes=1035)(*inputs((), 10, 10, 64, 64, np.float32))


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"block_size_q": 0}, ValueError, "block_size_q: expected at least 1, got 0"),
        ({"block_size_kv": -3}, ValueError, "block_size_kv: expected at least 1, got -3"),
        ({"block_size_q": 2.0}, TypeError, "block_size_q: expected a whole number, got 2.0"),
        ({"block_size_kv": True}, TypeError, "block_size_kv: expected a whole number, got True"),
        ({"order": "qk"}, ValueError, 'order: expected "kv" or "q" .* got \'qk\''),
        ({"sram_bytes": 0}, ValueError, "sram_bytes: expected at least 1, got 0"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        TiledAttention(**options)
    assert TiledAttention(np.int64(8)).block_size_q == 8


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"Q": [[1.0]]}, TypeError, "Q: expected a NumPy array, got list"),
        ({"K": np.zeros((9, 4), np.int64)}, TypeError, "K: expected float16, float32 or float64, got int64"),
        ({"V": np.zeros((9, 3), np.float32)}, TypeError, "V: expected float64 as Q has, got float32"),
        ({"Q": np.zeros(4)}, ValueError, r"Q: expected \(..., n, d\), got shape \(4,\)"),
        ({"Q": np.zeros((6, 0))}, ValueError, r"Q: expected d of at least 1, got shape \(6, 0\)"),
        ({"K": np.zeros((2, 9, 4))}, ValueError, r"K: expected leading dimensions \(\) .* got shape \(2, 9, 4\)"),
        ({"K": np.zeros((9, 5))}, ValueError, r"K: expected d = 4 as Q has, got shape \(9, 5\)"),
        ({"V": np.zeros((8, 3))}, ValueError, r"V: expected n = 9 as K has, got shape \(8, 3\)"),
        ({"mask": [True]}, TypeError, "mask: expected a boolean NumPy array, got list"),
        ({"mask": np.ones((6, 9))}, TypeError, "mask: expected booleans .* got float64"),
        ({"mask": np.ones((9, 6), bool)}, ValueError, r"mask: .* broadcasts to \(6, 9\), got \(9, 6\)"),
        ({"mask": np.ones((2, 6, 9), bool)}, ValueError, r"mask: .* broadcasts to \(6, 9\), got \(2, 6, 9\)"),
    ],
)
def test_bad_inputs(change, error, message):
    call = dict(zip("QKV", inputs((), 6, 9, 4, 3), strict=True)) | change
    for function in (TiledAttention(), TiledAttention(order="q").forward, standard_attention):
        with pytest.raises(error, match=message):
            function(**call)


def test_bad_arguments_of_the_functions():
    with pytest.raises(ValueError, match="n_q: expected at least 0, got -1"):
        count_blocks(-1, 4, 2, 2, causal=True)
    with pytest.raises(ValueError, match="block_kv: expected at least 1, got 0"):
        count_blocks(4, 4, 2, 0, causal=True)
    with pytest.raises(ValueError, match="seq_len: expected at least 1, got 0"):
        verify_memory_usage(0)
    with pytest.raises(ValueError, match="block_size: expected at least 1, got 0"):
        online_softmax(np.zeros(3), 0)
    with pytest.raises(TypeError, match="x: expected float16, float32 or float64, got int64"):
        online_softmax(np.arange(3, dtype=np.int64))
    with pytest.raises(ValueError, match="x: expected at least one dimension"):
        online_softmax(np.array(1.0))
