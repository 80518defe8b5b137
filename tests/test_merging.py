"""Results over parts of the keys, merged, are those over all keys."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tests.problems import TILES, assert_close, problems, store
from tests.strategies import profile
from tilewise import arrays, reference
from tilewise.expr import NK, NQ, K, Q, S
from tilewise.kernels.numpy import NumpyKernel
from tilewise.spec import Attention, Positions

KERNEL = NumpyKernel()
SPLIT_MASKS = [None, tw.causal(), tw.window(4, 2), tw.causal() | tw.prefix(3), K % 2 == 0, K < 0, (NK - K) % 3 == 0]


@profile(120)
@given(
    problems(("float32", "float64"), low=1), st.sampled_from(SPLIT_MASKS), st.lists(st.integers(0, 20), max_size=4),
    st.booleans(), TILES,
)  # fmt: skip
def test_merging_parts_of_the_keys_is_the_whole(problem, mask, cuts, sinks, tile):
    q, k, v, dtype = problem
    n_q, n_k = q.shape[2], k.shape[2]
    sink = store(np.linspace(-1, 1, q.shape[1]), dtype, "torch" if arrays.is_torch(q) else "numpy") if sinks else None
    score = tw.softcap(3.0) >> (S - 0.125 * abs(Q + (NK - NQ) - K))
    edges = [0, *sorted(min(c, n_k) for c in cuts), n_k]
    parts = []
    for a, b in pairwise(edges):
        where = Positions(origin_k=a, total_q=n_q, total_k=n_k)
        spec = Attention(0.4, mask, score, positions=where)
        parts.append(KERNEL.forward(spec, q, k[:, :, a:b], v[:, :, a:b], tile))
    merged = tw.merge(parts, sinks=sink)
    want = reference.forward(Attention(0.4, mask, score, sink), q, k, v)
    assert_close(merged.out, want.out, dtype, 200, "out")
    assert_close(merged.lse, want.lse, dtype, 200, "lse")
    assert merged.out.dtype == q.dtype
    # Any grouping, any order.
    if len(parts) > 2:
        left = tw.merge([tw.merge(parts[:2]), *parts[2:]], sinks=sink)
        right = tw.merge([parts[0], tw.merge(parts[1:])], sinks=sink)
        back = tw.merge(parts[::-1], sinks=sink)
        for other in (left, right, back):
            assert_close(other.out, want.out, dtype, 200, "out")
            assert_close(other.lse, want.lse, dtype, 200, "lse")


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_merge_in_every_layout(rank):
    rng = np.random.default_rng(0)
    shape = {2: (7, 4), 3: (3, 7, 4), 4: (2, 3, 7, 4)}[rank]
    q, k, v = (rng.standard_normal(shape) for _ in range(3))
    sinks = rng.standard_normal(3 if rank == 4 else 1)
    halves = [tw.attention(q, k[..., a:b, :], v[..., a:b, :], return_lse=True) for a, b in ((0, 3), (3, 7))]
    out, lse = tw.attention(q, k, v, sinks=sinks, return_lse=True)
    merged = tw.merge(halves, sinks=sinks)
    got_out, got_lse = merged  # a pair, like those it was made of
    assert got_out is merged.out and got_out.shape == out.shape
    assert got_lse is merged.lse and got_lse.shape == lse.shape
    np.testing.assert_allclose(got_out, out, rtol=1e-12)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-12)


@pytest.mark.parametrize("total", [5, 3])
def test_merge_of_packed_results(total):
    """lse is (total, heads) here, and sinks are by head, also where both have the same size."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((total, 3, 4)) for _ in range(3))
    sinks, ends = rng.standard_normal(3), [0, 2, total]
    even = tw.attention_varlen(q, k, v, ends, ends, mask=K % 2 == 0, return_lse=True)
    odd = tw.attention_varlen(q, k, v, ends, ends, mask=K % 2 == 1, return_lse=True)
    out, lse = tw.attention_varlen(q, k, v, ends, ends, sinks=sinks, return_lse=True)
    merged = tw.merge([even, odd], sinks=sinks)
    np.testing.assert_allclose(merged.out, out, rtol=1e-12)
    np.testing.assert_allclose(merged.lse, lse, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_merge_keeps_half_precision(dtype, library):
    rng = np.random.default_rng(0)
    q, k, v = (store(rng.standard_normal((2, 3, 8, 4)), dtype, library) for _ in range(3))
    halves = [tw.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 5), (5, 8))]
    merged = tw.merge(halves)
    assert merged.out.dtype == q.dtype
    assert arrays.dtype_name(merged.lse) == "float32"
    assert_close(merged.out, reference.forward(Attention(0.5), q, k, v).out, dtype, 400)


def test_states_merge_as_partials_do():
    from tilewise.softmax import State

    rng = np.random.default_rng(0)
    s, v = rng.standard_normal((5, 9)), rng.standard_normal((9, 3))
    s[2] = -np.inf
    s[3, :4] = -np.inf
    a, b, whole = (State.init((5,), 3, np.float64) for _ in range(3))
    a.step(s[:, :4], v[:4])
    b.step(s[:, 4:], v[4:])
    whole.step(s, v)
    merged, want = a.merge(b).finish(), whole.finish()
    np.testing.assert_allclose(merged.out, want.out, rtol=1e-13)
    np.testing.assert_allclose(merged.lse, want.lse, rtol=1e-13)
