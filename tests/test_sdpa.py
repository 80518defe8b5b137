"""tw.scaled_dot_product_attention beside PyTorch's own: the same arguments, the same answers."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import tilewise as tw

ours = tw.scaled_dot_product_attention
theirs = F.scaled_dot_product_attention

# query, key, value, enable_gqa. Queries are 4 long, keys 5.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]] = {
    "2-D": ((4, 8), (5, 8), (5, 8), False),
    "3-D": ((3, 4, 8), (3, 5, 8), (3, 5, 6), False),
    "4-D": ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8), False),
    "5-D": ((2, 2, 3, 4, 8), (2, 2, 3, 5, 8), (2, 2, 3, 5, 8), False),
    "6-D, broadcast": ((2, 1, 2, 3, 4, 8), (2, 3, 2, 3, 5, 8), (1, 3, 2, 3, 5, 8), False),
    "keys of all batches": ((2, 3, 4, 8), (1, 3, 5, 8), (1, 3, 5, 8), False),
    "keys of all heads": ((2, 3, 4, 8), (2, 1, 5, 8), (2, 1, 5, 8), False),
    "queries of all heads": ((2, 1, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8), False),
    "keys of fewer dimensions": ((2, 3, 4, 8), (3, 5, 8), (3, 5, 8), False),
    "queries of fewer dimensions": ((4, 8), (2, 3, 5, 8), (2, 3, 5, 8), False),
    "values of all heads": ((2, 3, 4, 8), (2, 3, 5, 8), (2, 1, 5, 8), False),
    "grouped": ((2, 4, 4, 8), (2, 2, 5, 8), (2, 2, 5, 8), True),
    "grouped 3-D": ((4, 4, 8), (2, 5, 8), (2, 5, 8), True),
    "grouped 5-D": ((2, 2, 4, 4, 8), (2, 2, 2, 5, 8), (2, 2, 2, 5, 8), True),
    "grouped in two ways": ((2, 4, 4, 8), (2, 2, 5, 8), (2, 1, 5, 8), True),
}


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _masks(lead: tuple[int, ...]) -> list[torch.Tensor | None]:
    """None, boolean and float masks of every shape that broadcasts to (*lead, 4, 5)."""
    shapes: list[tuple[int, ...]] = [(4, 5), (1, 5), (4, 1)]
    if lead:
        shapes += [(lead[-1], 4, 5), (*lead, 4, 5), (*lead[:-1], 1, 1, 5)]
    if len(lead) > 1:
        shapes += [(*lead[:-2], 1, lead[-1], 4, 5), (lead[-2], 1, 4, 5)]
    return [None, *(_draw(*shape) for shape in shapes), *(_draw(*shape) > -0.5 for shape in shapes)]


def _reference(q: Any, k: Any, v: Any, mask: torch.Tensor | None, causal: bool, **options: Any) -> torch.Tensor:
    """PyTorch's answer, its causal mask written out: with another mask only some of its backends take both."""
    if causal and mask is not None:
        added = (
            mask if mask.is_floating_point() else torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        )
        above = torch.ones(4, 5, dtype=torch.bool).triu(1)
        causal, mask = False, (added + torch.zeros(4, 5, dtype=q.dtype)).masked_fill(above, -torch.inf)
    return torch.nan_to_num(theirs(q, k, v, mask, is_causal=causal, **options))


@pytest.mark.parametrize("name", SHAPES)
def test_every_combination_of_arguments(name: str) -> None:
    *sizes, gqa = SHAPES[name]
    q, k, v = (_draw(*size, seed=i) for i, size in enumerate(sizes))
    lead = tuple(theirs(q, k, v, enable_gqa=gqa).shape[:-2])
    for mask, causal, scale in itertools.product(_masks(lead), (False, True), (None, 0.3)):
        options: dict[str, Any] = {"scale": scale, "enable_gqa": gqa}
        got = ours(q, k, v, mask, is_causal=causal, **options)
        assert_close(got, _reference(q, k, v, mask, causal, **options))
        arrays = [None if x is None else x.numpy() for x in (q, k, v, mask)]
        assert np.array_equal(ours(*arrays, is_causal=causal, **options), got.numpy())


@pytest.mark.parametrize("name", SHAPES)
def test_gradients(name: str) -> None:
    *sizes, gqa = SHAPES[name]
    leaves = [_draw(*size, seed=i).requires_grad_() for i, size in enumerate(sizes)]
    lead = theirs(*leaves, enable_gqa=gqa).shape[:-2]
    for shape in ((4, 5), (*lead, 4, 5), (*lead[:-1], *(1 for _ in lead[-1:]), 1, 5)):
        mask = _draw(*shape).requires_grad_()
        d_out = _draw(*theirs(*leaves, enable_gqa=gqa).shape, seed=9)
        got = torch.autograd.grad(ours(*leaves, mask, enable_gqa=gqa), (*leaves, mask), d_out)
        want = torch.autograd.grad(theirs(*leaves, mask, enable_gqa=gqa), (*leaves, mask), d_out)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b)


def test_the_signature_is_pytorchs() -> None:
    """By name, and in the order in which PyTorch's takes them by position."""
    said = (theirs.__doc__ or "").split("->")[0]
    names = [argument.split("=")[0].strip() for argument in said[said.index("(") + 1 : said.rindex(")")].split(",")]
    assert list(inspect.signature(ours).parameters) == names
    q = _draw(1, 2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    assert_close(ours(q, q, q, mask, 0.0, False), theirs(q, q, q, mask, 0.0, False))
    for function in (ours, theirs):
        with pytest.raises(TypeError):
            function(q, q, q, None, 0.0, False, 0.5)


@pytest.mark.parametrize(("n", "m"), [(4, 6), (6, 4), (5, 5)])
def test_causal_is_aligned_top_left(n: int, m: int) -> None:
    """Unlike tw.causal()."""
    q, k, v = _draw(1, 2, n, 8), _draw(1, 2, m, 8, seed=1), _draw(1, 2, m, 8, seed=2)
    assert_close(ours(q, k, v, is_causal=True), theirs(q, k, v, is_causal=True))
    assert torch.equal(ours(q, k, v, is_causal=True), tw.attention(q, k, v, mask=tw.K <= tw.Q))
    assert torch.equal(ours(q, k, v, is_causal=True), tw.attention(q, k, v, causal=True)) == (n == m)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_types(dtype: torch.dtype) -> None:
    q, k, v = (_draw(2, 3, 9, 8, seed=i).to(dtype) for i in range(3))
    got = ours(q, k, v, is_causal=True)
    assert got.dtype == dtype
    assert_close(got, theirs(q, k, v, is_causal=True), rtol=2e-2, atol=2e-2)
    assert_close(ours(q, k, v, _draw(9, 9).float()), theirs(q, k, v, _draw(9, 9).float()), rtol=2e-2, atol=2e-2)


def test_rows_that_see_nothing_are_zero() -> None:
    q, k, v = (_draw(1, 2, n, 8, seed=n) for n in (4, 5, 5))
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2] = False
    got = ours(q, k, v, mask)
    assert torch.equal(got[:, :, 2], torch.zeros(1, 2, 8, dtype=torch.float64))
    assert got.isfinite().all()
    assert torch.equal(ours(q, k[:, :, :0], v[:, :, :0]), torch.zeros(1, 2, 4, 8, dtype=torch.float64))


def test_any_strides() -> None:
    q, k, v = (_draw(2, 3, 8, n, seed=n).transpose(-1, -2) for n in (4, 5, 5))
    assert_close(ours(q, k, v), theirs(q, k, v))
    arrays = [x.numpy() for x in (q, k, v)]
    assert_close(torch.from_numpy(ours(*arrays)), theirs(q, k, v))


def test_sizes_of_nothing() -> None:
    for size in ((0, 3, 4, 8), (2, 0, 4, 4, 8), (2, 3, 0, 8), (0, 2, 2, 4, 8)):
        x = torch.zeros(size)
        assert ours(x, x, x).shape == x.shape


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dropout_p": 0.1}, tw.Unsupported, "dropout_p: attention is computed without dropout, got 0.1"),
        ({"query": [1.0]}, TypeError, "query: expected a NumPy array or a PyTorch tensor, got list"),
        ({"value": None}, TypeError, "value: expected a NumPy array"),
        ({"query": torch.zeros(8)}, ValueError, r"query: expected \(..., n, d\), got shape \(8,\)"),
        ({"key": torch.zeros(2, 4, 5, 7)}, ValueError, "key: expected a last dimension of 8 as query has, got 7"),
        ({"value": torch.zeros(2, 4, 6, 8)}, ValueError, "value: expected 5 rows as key has, got 6"),
        ({"key": torch.zeros(2, 2, 5, 8)}, ValueError, "heads that differ need enable_gqa=True"),
        ({"key": torch.zeros(3, 4, 5, 8)}, ValueError, "leading dimensions must broadcast"),
        ({"key": torch.zeros(2, 3, 5, 8), "enable_gqa": True}, ValueError, "key: its heads must divide query's 4"),
        ({"value": torch.zeros(2, 3, 5, 8), "enable_gqa": True}, ValueError, "value: its heads must divide query's 4"),
        ({"query": torch.zeros(4, 8), "enable_gqa": True}, ValueError, "as enable_gqa needs"),
        ({"attn_mask": torch.ones(4, 5, dtype=torch.int32)}, TypeError, "attn_mask: .* got int32"),
        ({"attn_mask": "causal"}, TypeError, "attn_mask: .* got str"),
        ({"attn_mask": torch.ones(3, 5) > 0}, ValueError, r"attn_mask: .* broadcasts to \(2, 4, 4, 5\), got \(3, 5\)"),
        ({"attn_mask": torch.ones(1, 2, 4, 4, 5) > 0}, ValueError, "attn_mask: expected a shape that broadcasts"),
        ({"key": torch.zeros(2, 4, 5, 8).double()}, TypeError, "expected float32 as q is, got float64"),
        ({"scale": "big"}, ValueError, "scale: expected a finite number"),
    ],
)
def test_mistakes(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"query": torch.zeros(2, 4, 4, 8), "key": torch.zeros(2, 4, 5, 8), "value": torch.zeros(2, 4, 5, 8)}
    ours(**given)
    with pytest.raises(error, match=message):
        ours(**{**given, **change})


# -- in PyTorch's own modules ------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """F.scaled_dot_product_attention is ours, and counts its calls."""
    made: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        made.append(1)
        return ours(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return made


@pytest.mark.parametrize("masks", ["none", "causal", "padding", "both"])
def test_in_multihead_attention(masks: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = _draw(3, 5, 8).requires_grad_()
    options: dict[str, Any] = {"need_weights": False}
    if masks in ("causal", "both"):
        options |= {"is_causal": True, "attn_mask": torch.nn.Transformer.generate_square_subsequent_mask(5).double()}
    if masks in ("padding", "both"):
        options["key_padding_mask"] = torch.zeros(3, 5, dtype=torch.float64).masked_fill(_draw(3, 5) > 1, -torch.inf)
    got = attention(x, x, x, **options)[0]
    got_grad = torch.autograd.grad(got.sum(), (x, *attention.parameters()))
    assert len(calls) == 1
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    want = attention(x, x, x, **options)[0]
    assert_close(got, want)
    for a, b in zip(got_grad, torch.autograd.grad(want.sum(), (x, *attention.parameters())), strict=True):
        assert_close(a, b)


def test_in_a_transformer_layer(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    x = _draw(3, 5, 8).requires_grad_()
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5).double()
    got = layer(x, src_mask=mask, is_causal=True)
    (got_grad,) = torch.autograd.grad(got.pow(2).sum(), x)
    assert len(calls) == 1
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    want = layer(x, src_mask=mask, is_causal=True)
    assert_close(got, want)
    assert_close(got_grad, torch.autograd.grad(want.pow(2).sum(), x)[0])
