"""The rotary embedding in Triton, by its interpreter: what the conformance suite's cases leave out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.triton.test_ops import needs_triton
from tilewise import arrays
from tilewise.cases import Case
from tilewise.contract import (
    backward_results,
    check_results,
    expected_backward,
    expected_forward,
    forward_results,
    gradients_to_pull,
)
from tilewise.dispatch import kernel
from tilewise.spec import Tile
from tilewise.validate import Call, prepare, prepare_varlen


def check(call: Call, tile: Tile | None = None) -> None:
    """Forward and backward are within the contract."""
    triton, given = kernel("triton"), (call.spec, call.q, call.k, call.v)
    d_out, d_lse = gradients_to_pull(call)
    saved = triton.forward(*given, tile)
    check_results(expected_forward(call), forward_results(saved))
    grads = triton.backward(*given, saved, d_out, d_lse, tile)
    check_results(expected_backward(call, d_out, d_lse), backward_results(grads))


def is_before(call: Call, tile: Tile | None) -> bool:
    """Whether q and k are turned before the kernels begin."""
    from tilewise.kernels.triton.turning import turns_before

    return turns_before(call.spec, call.shape, tile, torch.from_numpy(call.q)) is not None


def inputs(d: int, n_q: int, n_k: int, dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng([d, n_q, n_k])
    return [arrays.narrow(rng.standard_normal((2, heads, n, d)), dtype) for heads, n in ((4, n_q), (2, n_k), (2, n_k))]


# -- attention --------------------------------------------------------------------------------------------------------
WAYS = {"tile by tile": 19, "before": 37}  # queries, in two tiles of 16 and in three


@needs_triton
@pytest.mark.parametrize("n_q", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("d", "dim"), [(7, 4), (16, 16), (24, 24), (33, 2), (40, 32)])
def test_heads_and_parts_of_every_size(d: int, dim: int, interleaved: bool, n_q: int) -> None:
    """Heads that are no power of 2, or odd; parts that end within a half."""
    rope = tw.Rope(dim, base=30.0, interleaved=interleaved)
    check(prepare(*inputs(d, n_q, 37), causal=True, rope=rope), Tile(16, 16))


@needs_triton
@pytest.mark.parametrize("n_q", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_rounded_once(dtype: str, n_q: int) -> None:
    positions = np.random.default_rng(0).integers(0, 100_000, (2, 37))
    rope = tw.Rope(positions=positions[:, :n_q].copy(), positions_k=positions)
    check(prepare(*inputs(16, n_q, 37, dtype), rope=rope), Tile(16, 32))


@needs_triton
def test_many_tiles_of_queries_have_keys_turned_before() -> None:
    """Two of them, in whichever tiles, turn keys themselves; and packed ones if no sequence has more."""
    rope = tw.Rope()
    for n_q, tile, before in (
        (32, Tile(16, 16), False), (33, Tile(16, 16), True), (256, None, False), (257, None, True), (0, None, False),
    ):  # fmt: skip
        assert is_before(prepare(*inputs(8, n_q, 37), rope=rope), tile) == before
        assert not is_before(prepare(*inputs(8, n_q, 37)), tile)
    q, k = np.zeros((70, 2, 8), np.float32), np.zeros((90, 2, 8), np.float32)
    lengths_k = np.array([0, 40, 80, 90])
    for lengths, invariant, before in (
        ([0, 32, 64, 70], False, False), ([0, 33, 64, 70], False, True), ([0, 32, 64, 70], True, True),
    ):  # fmt: skip
        cumulative = np.array(lengths), lengths_k
        call = prepare_varlen(q, k, k, *cumulative, rope=rope, batch_invariant=invariant)
        assert is_before(call, Tile(16, 16)) == before


@needs_triton
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("middle", [19, 37])
def test_packed_sequences(middle: int, interleaved: bool) -> None:
    """Positions are counted in each of them; one has no queries."""
    rng = np.random.default_rng(middle)
    lengths_q, lengths_k = np.cumsum([0, 30, 0, middle, 23]), np.cumsum([0, 40, 5, 15, 20])
    sizes = (lengths_q[-1], 4, 8), (lengths_k[-1], 2, 8), (lengths_k[-1], 2, 8)
    q, k, v = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    rope = tw.Rope(6, base=30.0, interleaved=interleaved)
    call = prepare_varlen(q, k, v, lengths_q, lengths_k, causal=True, rope=rope)
    assert is_before(call, Tile(16, 16)) == (middle == 37)
    check(call, Tile(16, 16))


@needs_triton
@pytest.mark.parametrize("n_q", WAYS.values(), ids=WAYS)
def test_gradients_of_arrays(n_q: int) -> None:
    """Their sums are of turned q and k as well."""
    rng = np.random.default_rng(0)
    bias, slopes = rng.standard_normal((n_q, 37)).astype(np.float32), rng.random(4).astype(np.float32)
    score = tw.bias(bias, grad=True) >> tw.alibi(slopes, grad=True)
    check(prepare(*inputs(16, n_q, 37), causal=True, score=score, rope=tw.Rope(8)), Tile(16, 16))


@needs_triton
def test_results_are_stored_as_queries_are() -> None:
    """Though turned ones are contiguous."""
    q, k, v = (torch.from_numpy(x).transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(16, 300, 20))
    out = kernel("triton").forward(prepare(q, k, v, rope=tw.Rope()).spec, q, k, v).out
    assert out.stride() == q.stride()


@needs_triton
@pytest.mark.parametrize("n_q", WAYS.values(), ids=WAYS)
def test_tables_that_lie_anyhow(n_q: int) -> None:
    cos, sin = np.cos(np.arange(160.0)).reshape(4, 40).T, np.sin(np.arange(160.0)).reshape(40, 4)
    check(prepare(*inputs(8, n_q, 37), rope=tw.Rope(cos=cos, sin=sin)), Tile(16, 16))


@needs_triton
def test_turned_inside_is_turned_before() -> None:
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in inputs(16, 9, 20))

    def gradients(out: Any) -> Any:
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    inside = tw.attention(q, k, v, causal=True, rope=tw.Rope(), kernel="triton")
    turned = tw.apply_rope(q, tw.Rope(), positions=torch.arange(11, 20)), tw.apply_rope(k, tw.Rope())
    before = tw.attention(*turned, v, causal=True, kernel="triton")
    assert torch.allclose(inside, before, atol=1e-5)
    for one, other in zip(gradients(inside), gradients(before), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@needs_triton
def test_a_case_without_pairs_is_what_it_was() -> None:
    """No embedding: no angles are made, and none are passed."""
    from tilewise.kernels.triton.turning import turning

    call = Case("causal", "ragged").inputs().call()
    assert turning(call.spec, call.shape, call.q) == {"turns": None, "PAIRS": 0, "INTERLEAVED": False}
