"""Tiled attention is attention: random shapes, strides, types, masks and tiles against the dense reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tests.problems import TILES, assert_close, bits, problems, store
from tests.strategies import bool_exprs, profile
from tilewise import arrays, reference
from tilewise.expr import HK, KP, NK, NQ, QP, B, H, K, Q, S
from tilewise.kernels.numpy import NumpyKernel
from tilewise.spec import Attention, Lengths, Partial, Tile
from tilewise.walking import nodes

KERNEL = NumpyKernel()

# -- what is drawn ----------------------------------------------------------------------------------------------------

SCORES: dict[str, Any] = {
    "none": lambda rng, h, nq, nk: None,
    "softcap": lambda rng, h, nq, nk: tw.softcap(2.0),
    "alibi": lambda rng, h, nq, nk: tw.alibi(rng.random(h), grad=True),
    "relative": lambda rng, h, nq, nk: tw.relative(rng.standard_normal((h, 5)), signed=True, grad=True),
    "bias": lambda rng, h, nq, nk: tw.bias(rng.standard_normal((h, 1, nk)), grad=True) if nk > 1 else tw.softcap(3.0),
    "t5": lambda rng, h, nq, nk: tw.t5(rng.standard_normal((8, h)), 12, grad=True),
    "masking": lambda rng, h, nq, nk: tw.where((Q + K) % 3 == 1, -np.inf, S * 0.5),
    "composed": lambda rng, h, nq, nk: tw.softcap(3.0) >> tw.alibi(rng.random(h), grad=True) >> S * (1 + H),
    "gathered": lambda rng, h, nq, nk: S + tw.load(rng.standard_normal(4), (Q * 3 + K) % 4, grad=True) * S,
}  # fmt: skip


def _score(draw_name: str, seed: int, q: Any, k: Any) -> Any:
    return SCORES[draw_name](np.random.default_rng(seed), q.shape[1], q.shape[2], k.shape[2])


# -- forward and backward ---------------------------------------------------------------------------------------------


def check_forward(problem: Any, mask: Any, score: Any, tile: Tile, sinks: bool) -> None:
    q, k, v, dtype = problem
    sink = np.linspace(-1, 1, q.shape[1]) if sinks else None
    spec = Attention(0.4, mask, score, sink)
    before = bits(q), bits(k), bits(v)
    done = KERNEL.forward(spec, q, k, v, tile)
    want = reference.forward(spec, q, k, v)
    assert_close(done.out, want.out, dtype, k.shape[2], "out")
    assert_close(done.lse, want.lse, "float64" if dtype == "float64" else "float32", k.shape[2], "lse")
    assert type(done.out) is type(q)
    assert done.out.dtype == q.dtype
    assert arrays.dtype_name(done.lse) == ("float64" if dtype == "float64" else "float32")
    none = want.lse == (-np.inf if sink is None else sink[None, :, None])
    assert not arrays.widen(arrays.as_numpy(done.out), np.float64)[none & (want.out == 0).all(axis=-1)].any()
    assert (bits(q), bits(k), bits(v)) == before
    again = KERNEL.forward(spec, q, k, v, tile)
    assert (bits(again.out), bits(again.lse)) == (bits(done.out), bits(done.lse))


def check_backward(problem: Any, mask: Any, score: Any, tile: Tile, sinks: bool, lse_too: bool) -> None:
    q, k, v, dtype = problem
    spec = Attention(0.4, mask, score, np.linspace(-1, 1, q.shape[1]) if sinks else None)
    saved = KERNEL.forward(spec, q, k, v, tile)
    rng = np.random.default_rng(0)
    d_out = store(rng.standard_normal(tuple(saved.out.shape)), dtype, "torch" if arrays.is_torch(q) else "numpy")
    d_lse = rng.standard_normal(tuple(saved.lse.shape)) if lse_too else None
    grads = KERNEL.backward(spec, q, k, v, saved, d_out, d_lse, tile)
    # A kernel has out as stored. Its rounding moves delta = sum(d_out * out) - d_lse, as a change of d_lse would: with
    # it taken into account, what is left is the rounding of sums, and of storing the gradients.
    exact = reference.forward(spec, q, k, v).out
    stored, g = (arrays.widen(arrays.as_numpy(x), np.float64) for x in (saved.out, d_out))
    moved = (0 if d_lse is None else d_lse) - (g * (stored - exact)).sum(axis=-1)
    want = reference.backward(spec, q, k, v, d_out, moved)
    terms = 8 * (q.shape[2] + k.shape[2] + v.shape[3])
    wide = "float64" if dtype == "float64" else "float32"
    for name in "qkv":
        assert getattr(grads, name).dtype == q.dtype
        assert_close(getattr(grads, name), getattr(want, name), dtype, terms, f"d_{name}")
    assert (grads.sinks is None) == (not sinks)
    if sinks:
        assert_close(grads.sinks, want.sinks, wide, 16 * terms, "d_sinks")
    assert len(grads.arrays) == len(want.arrays) == len(spec.wanted)
    for slot, found, expected in zip(spec.wanted, grads.arrays, want.arrays, strict=True):
        assert found.shape == slot.array.shape
        assert_close(found, expected, wide, 16 * terms, "d_array")
    again = KERNEL.backward(spec, q, k, v, saved, d_out, d_lse, tile)
    assert [bits(getattr(again, x)) for x in "qkv"] == [bits(getattr(grads, x)) for x in "qkv"]
    assert [bits(x) for x in again.arrays] == [bits(x) for x in grads.arrays]


# Exact in every type: an expression's floats are compared by no mask here, since two precisions may then differ.
MASKS = st.none() | st.sampled_from([
    tw.causal(), tw.window(3), tw.causal() & tw.window(4, 0), tw.causal() | tw.prefix(2), tw.dilated(2), K < 0,
    Q % 2 == 0, Q // 4 == K // 4, (K <= Q + (NK - NQ)) & (abs(Q - K) < 3 * (H + 1) + B), K % 3 == HK,
    NK - K < 5, K < NQ,
]) | bool_exprs(3).filter(lambda e: all(n.kind != "float" for n in nodes(e)))  # fmt: skip


@profile(200)
@given(problems(), MASKS, st.sampled_from(list(SCORES)), st.integers(0, 99), TILES, st.booleans())
def test_forward_equals_the_reference(problem, mask, score, seed, tile, sinks):
    check_forward(problem, mask, _score(score, seed, *problem[:2]), tile, sinks)


@profile(150)
@given(problems(), MASKS, st.sampled_from(list(SCORES)), st.integers(0, 99), TILES, st.booleans(), st.booleans())
def test_backward_equals_the_reference(problem, mask, score, seed, tile, sinks, lse_too):
    check_backward(problem, mask, _score(score, seed, *problem[:2]), tile, sinks, lse_too)


@pytest.mark.slow
@profile(4000)
@given(problems(), MASKS, st.sampled_from(list(SCORES)), st.integers(0, 99), TILES, st.booleans(), st.booleans())
def test_forward_and_backward_long(problem, mask, score, seed, tile, sinks, lse_too):
    check_forward(problem, mask, _score(score, seed, *problem[:2]), tile, sinks)
    check_backward(problem, mask, _score(score, seed, *problem[:2]), tile, sinks, lse_too)


def test_the_tolerance_can_fail():
    """A single wrong weight is seen."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 16, 8)).astype(np.float16) for _ in range(3))
    want = reference.forward(Attention(0.4, tw.causal()), q, k, v)
    wrong = KERNEL.forward(Attention(0.4, K < Q), q, k, v, Tile(4, 4))
    with pytest.raises(AssertionError):
        assert_close(wrong.out, want.out, "float16")
    with pytest.raises(AssertionError):
        assert_close(want.out + np.nan, want.out, "float16")


def test_rows_without_keys():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 12, 4)).astype(np.float32) for _ in range(3))
    for tile in (Tile(1, 1), Tile(5, 5), Tile(64, 64)):
        for mask in (K < 0, Q % 2 == 0, tw.dense(np.zeros((12, 12), bool)), tw.causal() & (K > Q)):
            spec = Attention(0.5, mask)
            done = KERNEL.forward(spec, q, k, v, tile)
            rows = np.broadcast_to(np.arange(12) % 2 == 1 if mask is (Q % 2 == 0) else True, done.lse.shape)
            assert (done.out[rows] == 0).all()
            assert (done.lse[rows] == -np.inf).all()
            grads = KERNEL.backward(spec, q, k, v, done, np.ones_like(v), np.ones_like(done.lse), tile)
            assert np.isfinite(grads.q).all() and np.isfinite(grads.k).all() and np.isfinite(grads.v).all()
            assert (grads.q[rows] == 0).all()


@pytest.mark.parametrize("sink", [0.0, -50.0, 50.0, -np.inf])
def test_sinks_of_rows_without_keys(sink):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 6, 4)).astype(np.float32) for _ in range(3))
    sinks = np.array([sink, 1.0], np.float32)
    spec = Attention(0.5, Q % 2 == 0, sinks=sinks)
    done = KERNEL.forward(spec, q, k, v, Tile(4, 4))
    want = reference.forward(spec, q, k, v)
    assert_close(done.out, want.out, "float32", what="out")
    assert_close(done.lse, want.lse, "float32", what="lse")
    assert (done.out[:, :, 1::2] == 0).all()
    assert (done.lse[:, :, 1::2] == sinks[:, None]).all()
    grads = KERNEL.backward(spec, q, k, v, done, np.ones_like(v))
    assert np.isfinite(grads.sinks).all()
    assert_close(grads.q, reference.backward(spec, q, k, v, np.ones_like(v)).q, "float32")


# -- packed sequences -------------------------------------------------------------------------------------------------


@profile(80)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    st.sampled_from([None, tw.causal(), tw.window(2), Q % 2 == 0, (K <= Q + B) & (K < NQ + 3)]),
    st.sampled_from(["float32", "float64", "bfloat16"]), st.sampled_from(["numpy", "torch"]), st.booleans(),
)  # fmt: skip
def test_packed_equals_each_alone(sizes, mask, dtype, library, sinks):
    rng = np.random.default_rng(0)
    lengths_q, lengths_k = (np.cumsum([0, *(s[i] for s in sizes)]) for i in (0, 1))
    q = store(rng.standard_normal((lengths_q[-1], 4, 6)), dtype, library)
    k = store(rng.standard_normal((lengths_k[-1], 2, 6)), dtype, library)
    v = store(rng.standard_normal((lengths_k[-1], 2, 5)), dtype, library)
    sink = store(rng.standard_normal(4), dtype, library) if sinks else None
    weight = store(rng.standard_normal(len(sizes)), "float64", library)
    score = tw.softcap(2.0) >> S + tw.load(weight, B, grad=True)
    options = {"mask": mask, "score": score, "sinks": sink}
    out, lse = tw.attention_varlen(q, k, v, lengths_q, lengths_k, return_lse=True, **options)
    assert tuple(lse.shape) == (lengths_q[-1], 4)
    d_out = store(rng.standard_normal(tuple(out.shape)), dtype, library)
    _, pullback = tw.attention_vjp(q, k, v, lengths_q=lengths_q, lengths_k=lengths_k, **options)
    grads = pullback(d_out)
    total_weight, total_sink = np.zeros(len(sizes)), np.zeros(4)
    for i, (n_q, n_k) in enumerate(sizes):
        rows, cols = slice(lengths_q[i], lengths_q[i + 1]), slice(lengths_k[i], lengths_k[i + 1])
        swap = (lambda x: x.transpose(0, 1)[None]) if library == "torch" else (lambda x: x.swapaxes(0, 1)[None])
        one = [swap(x) for x in (q[rows], k[cols], v[cols])]
        # Alone, its number in the batch is 0.
        mask_i = None if mask is None else tw.expr.substitute(mask, {B: tw.expr.constant(i)})
        weight_i = store(arrays.as_numpy(weight)[i : i + 1].copy(), "float64", library)
        score_i = tw.softcap(2.0) >> S + tw.load(weight_i, 0, grad=True)
        alone, alone_lse = tw.attention(*one, mask=mask_i, score=score_i, sinks=sink, return_lse=True)
        assert alone.shape[2] == n_q
        assert one[1].shape[2] == n_k
        assert bits(swap(out[rows])) == bits(alone)
        np.testing.assert_array_equal(arrays.as_numpy(lse[rows]).T, arrays.as_numpy(alone_lse)[0])
        _, pull_alone = tw.attention_vjp(*one, mask=mask_i, score=score_i, sinks=sink)
        g = pull_alone(swap(d_out[rows]))
        for packed, single, where in ((grads.q, g.q, rows), (grads.k, g.k, cols), (grads.v, g.v, cols)):
            assert bits(swap(packed[where])) == bits(single)
        total_weight[i] = float(g.arrays[0][0])
        if sinks:
            total_sink += arrays.widen(arrays.as_numpy(g.sinks), np.float64)
    np.testing.assert_allclose(arrays.as_numpy(grads.arrays[0]), total_weight, rtol=1e-5, atol=1e-6)
    if sinks:
        assert_close(grads.sinks, total_sink, dtype, 4000, "d_sinks")


def test_packed_arrays_are_read_by_packed_position():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((10, 2, 4)) for _ in range(3))
    bias_k = rng.standard_normal(10)
    ends = [0, 4, 4, 10]
    out = tw.attention_varlen(q, k, v, ends, ends, score=S + tw.load(bias_k, KP) + tw.load(bias_k, QP), causal=True)
    for a, b in ((0, 4), (4, 10)):
        alone = tw.attention(
            *(x[a:b].swapaxes(0, 1)[None] for x in (q, k, v)), causal=True, score=tw.bias(bias_k[a:b].copy())
        )
        np.testing.assert_allclose(out[a:b].swapaxes(0, 1), alone[0], rtol=1e-12)


# -- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_batch_invariance_is_bitwise(library, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (store(rng.standard_normal((4, h, 70, 16)), dtype, library) for h in (4, 2, 2))
    options = {"causal": True, "score": tw.alibi(4), "batch_invariant": True, "return_lse": True}
    together = tw.attention(q, k, v, **options)
    for i in range(4):
        alone = tw.attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], **options)
        assert bits(alone[0]) == bits(together[0][i : i + 1])
        assert bits(alone[1]) == bits(together[1][i : i + 1])
    ends = np.arange(0, 281, 70)
    swap = (lambda x: x.transpose(1, 2)) if library == "torch" else (lambda x: x.swapaxes(1, 2))
    packed = [swap(x).reshape(280, -1, 16) for x in (q, k, v)]
    out = tw.attention_varlen(*packed, ends, ends, causal=True, score=tw.alibi(4), batch_invariant=True)
    assert bits(out.reshape(4, 70, 4, 16)) == bits(swap(together[0]))


def test_the_same_call_gives_the_same_bits():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 4, 300, 32)).astype(np.float32) for _ in range(3))
    table = rng.standard_normal((4, 33)).astype(np.float32)
    results = []
    for _ in range(3):
        out, pullback = tw.attention_vjp(q, k, v, causal=True, score=tw.relative(table, signed=True, grad=True))
        grads = pullback(np.ones_like(out))
        results.append([bits(x) for x in (out, grads.q, grads.k, grads.v, *grads.arrays)])
    assert results[0] == results[1] == results[2]


# -- weights ----------------------------------------------------------------------------------------------------------


@profile(60)
@given(problems(("float32", "float64"), low=1), MASKS, st.data(), st.booleans())
def test_weights_are_rows_of_the_softmax(problem, mask, data, sinks):
    q, k, v, dtype = problem
    n = q.shape[2]
    rows = data.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=5))
    sink = store(np.linspace(-1, 1, q.shape[1]), dtype, "torch" if arrays.is_torch(q) else "numpy") if sinks else None
    found = tw.weights(q, k, v, rows=rows, mask=mask, scale=0.4, sinks=sink)
    assert type(found) is type(q)
    identity = np.broadcast_to(np.eye(k.shape[2]), (*k.shape[:3], k.shape[2]))
    dense = reference.forward(Attention(0.4, mask, None, sink), q, k, identity).out
    assert_close(found, dense[:, :, np.array(rows) % n], dtype)


def test_weights_layouts():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 4))
    assert tw.weights(x, x, x, rows=2).shape == (1, 6)
    assert tw.weights(x, x, x, rows=[0, -1], causal=True).shape == (2, 6)
    assert tw.weights(x, x, x, rows=[]).shape == (0, 6)
    np.testing.assert_allclose(tw.weights(x, x, x, rows=range(6)).sum(axis=-1), 1)
    assert tw.weights(x[None], x[None], x[None], rows=[1, 2]).shape == (1, 2, 6)
    assert tw.weights(torch.ones(2, 3, 6, 4), torch.ones(2, 3, 5, 4), torch.ones(2, 3, 5, 4), rows=[1]).shape == (
        2,
        3,
        1,
        5,
    )


def test_partial_and_lengths_are_plain():
    done = tw.attention(*(np.ones((3, 2), np.float32),) * 3, return_lse=True)
    assert Partial(*done).lse.shape == (3,)
    assert Lengths(np.array([0, 3]), np.array([0, 3])).q[-1] == 3
