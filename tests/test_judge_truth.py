"""The referee itself: its calls come from their ids, its numbers are ours, and it can say every verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tilewise import arrays, reference
from tilewise.referee import layouts, verdict
from tilewise.referee.calls import Call, inputs
from tilewise.referee.features import FEATURES, draw, parse
from tilewise.referee.ours import options
from tilewise.referee.truth import Truth, truth, visible
from tilewise.validate import prepare

SMALL = [f for f in FEATURES.values() if not f.large and f.slug not in ("many-heads", "long-rows")]


@pytest.mark.parametrize("feature", SMALL, ids=lambda f: f.slug)
def test_an_id_makes_the_call_again(feature: Any) -> None:
    for what in feature.passes:
        for size in (2, 3, *feature.sizes):
            call = draw(feature.slug, feature.dtypes[0], what, size, 5)
            assert parse(call.id) == call
            for x, y in zip(vars(inputs(call)).values(), vars(inputs(parse(call.id))).values(), strict=True):
                assert (x is None and y is None) or x.tobytes() == y.tobytes()


@pytest.mark.parametrize("feature", SMALL, ids=lambda f: f.slug)
def test_dense_attention_agrees_with_our_reference(feature: Any) -> None:
    """Two dense computations that share no code."""
    for seed in range(3):
        call = draw(feature.slug, feature.dtypes[0], feature.passes[-1], 8, seed)
        given, want = inputs(call), truth(call.id).expected
        asked = prepare(
            given.q, given.k, given.v, **{k: v for k, v in options(call, given, "numpy").items() if k != "kernel"}
        )
        found = reference.forward(asked.spec, given.q, given.k, given.v)
        grads = reference.backward(asked.spec, given.q, given.k, given.v, given.d_out)
        pairs = [("out", found.out), ("lse", found.lse), ("d_q", grads.q), ("d_k", grads.k), ("d_v", grads.v)]
        for what, got in pairs + ([("d_bias", grads.arrays[0])] if call.bias_gradient else []):
            exact = want[what].exact.astype(np.float64)
            np.testing.assert_allclose(got, exact, rtol=1e-9, atol=1e-12 + 1e-2 * want[what].limit, err_msg=what)


def test_features_draw_what_they_say() -> None:
    for seed in range(20):
        for size in (2, 8, 48):

            def made(slug: str) -> Call:
                return draw(slug, "float32", "forward", size, seed)  # noqa: B023 - called at once

            assert made("causal-bottom-right").n_q < made("causal-bottom-right").n_k
            assert made("causal-rows-without-keys").n_q > made("causal-rows-without-keys").n_k
            assert 0 in (made("n-0").n_q, made("n-0").n_k)
            for slug in ("mask-rows-without-keys", "bias-rows-without-keys", "causal-rows-without-keys"):
                assert truth(made(slug).id).empty.any(), slug
            for slug in ("mask", "bias-with-inf", "causal", "mask-beside-causal", "window", "documents"):
                assert not truth(made(slug).id).empty.any(), slug


@pytest.mark.parametrize("layout", [x for x in layouts.LAYOUTS if x not in (layouts.FAR, layouts.LARGE)])
def test_layouts_hold_the_numbers_and_nothing_else(layout: str) -> None:
    x = np.arange(2 * 3 * 4 * 8, dtype=np.float32).reshape(2, 3, 4, 8)
    if layout in layouts.EXPANDED:
        x = np.broadcast_to(x.take([0], layouts.EXPANDED[layout]), x.shape)
    strided = layouts.as_array(x, layout)
    assert np.array_equal(strided, x)
    torch = pytest.importorskip("torch")
    (tensor,) = layouts.as_tensors([x], layout, "cpu")
    assert torch.equal(tensor, torch.from_numpy(x.copy()))
    assert tuple(step * 4 for step in tensor.stride()) == strided.strides
    if layout == "sliced":
        around = torch.empty(0).set_(tensor.untyped_storage()).isnan().sum().item()
        assert around == 2 * 3 * (7 * 24 - 4 * 8), "what is not part of it is NaN"
    if layout == "one element in":
        assert tensor.storage_offset() == 1


def _answer(call: str, **changed: Any) -> tuple[Truth, dict[str, Any]]:
    made = truth(call)
    return made, {"out": made.expected["out"].exact.astype(np.float32), **changed}


PLAIN, EMPTY = "plain/float32/forward/8/0", "mask-rows-without-keys/float32/forward/8/0"


def test_verdicts() -> None:
    made, answer = _answer(PLAIN)
    limit, largest = made.expected["out"].limit, np.abs(answer["out"]).max()
    assert verdict.judge(made, answer).verdict == verdict.RIGHT
    for off, due in ((4 * limit, verdict.INEXACT), (0.01 * largest, verdict.INEXACT), (0.05 * largest, verdict.WRONG)):
        assert verdict.judge(made, {"out": answer["out"] + np.float32(off)}).verdict == due
    assert "TF32" in str(verdict.judge(made, {"out": answer["out"] * np.float32(1 + 2.0**-11)}))
    broken = answer["out"].copy()
    broken.flat[3] = np.nan
    assert str(verdict.judge(made, {"out": broken})) == f"out: NaN in 1 of {broken.size} numbers"
    assert verdict.judge(made, {"out": broken[..., 1:]}).verdict == verdict.WRONG
    assert str(verdict.judge(made, {})) == "out: is missing"


def test_rows_without_keys_are_told_by_their_convention() -> None:
    made, answer = _answer(EMPTY)
    for value, told in ((np.nan, verdict.NAN), (made.mean, verdict.MEAN), (7.0, "other numbers")):
        given = {"out": np.where(made.empty[..., None], value, answer["out"]).astype(np.float32)}
        found = verdict.judge(made, given)
        assert (found.verdict, found.reason) == (verdict.WRONG, f"rows without keys are {told}, expected 0")
        assert verdict.judge(made, given, documented=told).verdict == verdict.OTHERWISE
        other = {"out": given["out"] + np.float32(0.5)}  # what is documented is no excuse for the other rows
        assert verdict.judge(made, other, documented=told).verdict == verdict.WRONG


def test_the_worst_of_rows_without_keys_and_of_the_others_counts() -> None:
    made, answer = _answer(EMPTY)
    slightly = answer["out"] + np.float32(0.01) * np.abs(answer["out"]).max()
    empty = made.empty[..., None]
    found = verdict.judge(made, {"out": np.where(empty, 0, slightly).astype(np.float32)})
    assert found.verdict == verdict.INEXACT and "rows without keys" not in str(found), "those are right"
    found = verdict.judge(made, {"out": np.where(empty, np.nan, slightly).astype(np.float32)})
    assert found.verdict == verdict.WRONG and "rows without keys are NaN" in str(found)


def test_nan_gradients_of_rows_without_keys() -> None:
    made = truth("mask-rows-without-keys/float32/gradients/8/0")
    answer = {what: x.exact.astype(np.float32) for what, x in made.expected.items() if what != "lse"}
    d_q = np.where(made.empty[..., None], np.nan, answer["d_q"]).astype(np.float32)
    found = verdict.judge(made, {**answer, "d_q": d_q})
    assert found.verdict == verdict.WRONG and "of rows without keys alone" in str(found)
    assert verdict.judge(made, {**answer, "d_q": d_q}, verdict.NAN).verdict == verdict.OTHERWISE
    assert verdict.judge(made, {**answer, "d_q": d_q + 1}, verdict.NAN).verdict == verdict.WRONG
    d_v = np.full_like(answer["d_v"], np.nan)
    assert "the call has rows without keys" in str(verdict.judge(made, {**answer, "d_v": d_v}))


def test_a_gradient_that_is_zero_may_be_off_by_roundings() -> None:
    """With one key d_q is exactly 0: the limit is that of the terms that cancel."""
    call = replace(draw("one-row-or-key", "float32", "gradients", 8, 2))
    want = truth(call.id).expected["d_q"]
    assert call.n_k == 1 and np.abs(want.exact).max() < 1e-14
    assert 1e-7 < want.limit < 1e-4


def test_visible_is_what_alignments_say() -> None:
    call = draw("causal-bottom-right", "float32", "forward", 8, 0)
    seen = visible(call, inputs(call))[0, 0]
    assert seen[-1].all() and not seen[0, -1] and seen[0, : call.n_k - call.n_q + 1].all()
    assert arrays.as_numpy(seen).sum() == sum(call.n_k - call.n_q + 1 + i for i in range(call.n_q))


def test_far_heads_are_far_and_share_their_memory() -> None:
    torch = pytest.importorskip("torch")
    x = np.arange(2 * 4 * 8, dtype=np.float16).reshape(1, 2, 4, 8)
    one, other = layouts.as_tensors([x, x + 1], layouts.FAR, "cpu")
    assert torch.equal(one, torch.from_numpy(x)) and torch.equal(other, torch.from_numpy(x + 1))
    assert one.stride(1) > 2**31 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_large_arrays_are_judged_by_a_few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that hold numbers lie where an offset of 32 bits would miss them."""
    pytest.importorskip("torch")
    from tilewise.referee.from_torch import Sdpa

    monkeypatch.setattr(layouts, "BEYOND", 2**14)
    call = draw("large-arrays", "bfloat16", "gradients", 16, 0)
    heads, places = layouts.large_heads(call.n_q, call.d)
    assert heads == 11 and places[-2] * call.n_q * call.d >= 2**14
    (q,) = layouts.as_tensors([inputs(call).q], layouts.LARGE, "cpu")
    assert q.shape == (1, 11, 16, 128) and q.is_contiguous() and q[:, 1 : places[1]].abs().max() == 0
    answer = Sdpa("math").prepare(call, inputs(call), "cpu")()
    assert answer["out"].shape == (1, 3, 16, 128)
    assert verdict.judge(truth(call.id), answer).verdict == verdict.RIGHT
