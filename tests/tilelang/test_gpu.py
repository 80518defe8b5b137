"""TileLang's kernels on a GPU, beside the cases: bits, neighbours in a pack, strides, what runs before them."""

from __future__ import annotations

from typing import Any

import pytest

import tilewise as tw
from tests.tilelang.compiled import missing
from tilewise import dispatch

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch")
    has_gpu = torch.cuda.is_available()
    reason = dispatch.kernel("tilelang").unavailable() or missing() if has_gpu else "there is no NVIDIA GPU"
    if reason is not None:
        pytest.skip(f"tilelang cannot run on this machine: {reason}")
    torch.manual_seed(0)
    return torch


def _drawn(torch: Any, *shape: int, grad: bool = False) -> Any:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


def test_the_same_call_has_the_same_bits(torch: Any) -> None:
    q, k, v = (_drawn(torch, 2, heads, 700, 128, grad=True) for heads in (8, 2, 2))
    d_out = _drawn(torch, 2, 8, 700, 128)
    found = []
    for _ in range(20):
        out = tw.attention(q, k, v, causal=True, kernel="tilelang")
        found.append((out, *torch.autograd.grad(out, (q, k, v), d_out)))
    assert all(torch.equal(a, b) for later in found[1:] for a, b in zip(later, found[0], strict=True))


def test_what_a_neighbour_in_a_pack_has_is_nobody_elses(torch: Any) -> None:
    q, k, v = (_drawn(torch, 300, 4, 64) for _ in range(3))
    lengths = torch.tensor([0, 77, 300], device="cuda", dtype=torch.int32)
    clean = tw.attention_varlen(q, k, v, lengths, lengths, kernel="tilelang")
    k[77:], v[77:] = torch.nan, torch.nan
    assert torch.equal(tw.attention_varlen(q, k, v, lengths, lengths, kernel="tilelang")[:77], clean[:77])


@pytest.mark.parametrize("d", [40, 64, 128])
def test_strides_change_nothing(torch: Any, d: int) -> None:
    """Heads behind tokens, and rows that begin at no multiple of 16 bytes."""
    q, k, v = (_drawn(torch, 2, 4, 200, d) for _ in range(3))
    wanted = tw.attention(q, k, v, causal=True, kernel="tilelang")
    by_tokens = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(tw.attention(*by_tokens, causal=True, kernel="tilelang"), wanted)
    odd = (torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v))
    torch.testing.assert_close(tw.attention(*odd, causal=True, kernel="tilelang"), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("n", [200, 300])
def test_gradients_where_the_last_tile_of_queries_has_few(torch: Any, n: int) -> None:
    """Tiles of 96 go beyond the places that numbers of rows have, which are a multiple of 128."""
    q, k, v = (_drawn(torch, 2, 4, n, 64, grad=True) for _ in range(3))
    d_out = _drawn(torch, 2, 4, n, 64)
    found = torch.autograd.grad(tw.attention(q, k, v, causal=True, kernel="tilelang"), (q, k, v), d_out)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    for x, y in zip(found, torch.autograd.grad(out, wide, d_out.double()), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=2e-2)


def test_a_kernel_waits_for_the_one_before(torch: Any) -> None:
    """Products of PyTorch's library may let the next kernel begin before they have written all."""
    x, w = _drawn(torch, 4096, 2048), _drawn(torch, 2048, 2048) / 45
    k, v = (_drawn(torch, 1, 16, 4096, 128) for _ in range(2))
    for _ in range(20):
        q = (x @ w).view(1, 4096, 16, 128).transpose(1, 2)
        got = tw.attention(q, k, v, kernel="tilelang")
        torch.cuda.synchronize()
        assert torch.equal(got, tw.attention(q, k, v, kernel="tilelang"))
        x = x.roll(1, 0)
