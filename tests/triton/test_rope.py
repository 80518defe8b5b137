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
from tilewise.validate import Call, prepare


def check(call: Call, tile: Tile | None = None) -> None:
    """Forward and backward are within the contract."""
    triton, given = kernel("triton"), (call.spec, call.q, call.k, call.v)
    d_out, d_lse = gradients_to_pull(call)
    saved = triton.forward(*given, tile)
    check_results(expected_forward(call), forward_results(saved))
    grads = triton.backward(*given, saved, d_out, d_lse, tile)
    check_results(expected_backward(call, d_out, d_lse), backward_results(grads))


def inputs(d: int, n_q: int, n_k: int, dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng([d, n_q, n_k])
    return [arrays.narrow(rng.standard_normal((2, heads, n, d)), dtype) for heads, n in ((4, n_q), (2, n_k), (2, n_k))]


@needs_triton
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("d", "dim"), [(7, 4), (16, 16), (24, 24), (33, 2), (40, 32)])
def test_heads_and_parts_of_every_size(d: int, dim: int, interleaved: bool) -> None:
    """Heads that are no power of 2, or odd; parts that end within a half."""
    rope = tw.Rope(dim, base=30.0, interleaved=interleaved)
    check(prepare(*inputs(d, 19, 37), causal=True, rope=rope), Tile(16, 16))


@needs_triton
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_rounded_once(dtype: str) -> None:
    positions = np.random.default_rng(0).integers(0, 100_000, (2, 37))
    rope = tw.Rope(positions=positions[:, :19].copy(), positions_k=positions)
    check(prepare(*inputs(16, 19, 37, dtype), rope=rope), Tile(16, 32))


@needs_triton
def test_tables_that_lie_anyhow() -> None:
    cos, sin = np.cos(np.arange(160.0)).reshape(4, 40).T, np.sin(np.arange(160.0)).reshape(40, 4)
    check(prepare(*inputs(8, 19, 37), rope=tw.Rope(cos=cos, sin=sin)))


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
