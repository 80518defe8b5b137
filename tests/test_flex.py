"""FlexAttention's functions as expressions: they mean what FlexAttention computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.strategies import dense_values
from tilewise.expr import Q, S

SIZES = (2, 4, 9, 11)  # batch, heads, queries, keys


def _dense_mod(function, score=None):
    """What FlexAttention computes: the function at every (b, h, q, k), elementwise on tensors."""
    b, h, q, k = torch.meshgrid(*(torch.arange(n) for n in SIZES), indexing="ij")
    args = (b, h, q, k) if score is None else (score, b, h, q, k)
    return function(*args).broadcast_to(SIZES).numpy()


_ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3])
_slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
_table = torch.linspace(-1, 1, 4 * 9 * 11, dtype=torch.float64).reshape(4, 9, 11)
_limit = torch.tensor(6)

MASK_MODS = {
    "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    "sliding window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 3),
    "document": lambda b, h, q_idx, kv_idx: _ids[q_idx] == _ids[kv_idx],
    "document, causal": lambda b, h, q_idx, kv_idx: (_ids[q_idx] == _ids[kv_idx]) & (q_idx >= kv_idx),
    "prefix": lambda b, h, q_idx, kv_idx: (kv_idx < 4) | (q_idx >= kv_idx),
    "length in a tensor": lambda b, h, q_idx, kv_idx: kv_idx < _limit,
    "tensor first": lambda b, h, q_idx, kv_idx: _limit > kv_idx,
    "by head": lambda b, h, q_idx, kv_idx: torch.abs(q_idx - kv_idx) <= 2 * h + b,
    "dilated": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 == 0,
}
SCORE_MODS = {
    "identity": lambda s, b, h, q_idx, kv_idx: s,
    "alibi": lambda s, b, h, q_idx, kv_idx: s + _slopes[h] * (kv_idx - q_idx),
    "soft cap": lambda s, b, h, q_idx, kv_idx: 2.0 * torch.tanh(s / 2.0),
    "causal": lambda s, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, s, -float("inf")),
    "bias": lambda s, b, h, q_idx, kv_idx: s + _table[h, q_idx, kv_idx],
    "relative": lambda s, b, h, q_idx, kv_idx: s + 0.125 * torch.abs(q_idx - kv_idx),
    "capped alibi": lambda s, b, h, q_idx, kv_idx: torch.tanh(s) - _slopes[h] * torch.abs(q_idx - kv_idx),
    "scaled by a tensor": lambda s, b, h, q_idx, kv_idx: _slopes[0] * s if b is None else s * _slopes[h],
}


def test_what_joins_masks_leaves_no_trace():
    """FlexAttention's and_masks begins with True, its or_masks with False: causal is the one that kernels know."""
    causal = tw.causal()
    assert (causal.new_ones(()) & causal) is causal
    assert (causal | causal.new_zeros(())) is causal
    assert (causal & False) is tw.expr.constant(False)
    assert (True | causal) is tw.expr.constant(True)


def test_an_expression_goes_where_its_tensors_go():
    ids, table = torch.zeros(4, dtype=torch.int64), np.zeros(4, np.int64)
    mask = (tw.load(ids, Q) == tw.load(table, tw.K)) & tw.causal()
    moved = mask.to("meta", non_blocking=True)
    assert [str(slot.array.device) for slot in tw.walking.loads(moved)] == ["meta", "cpu"]
    assert moved.key == mask.key
    assert mask.to(mask.device) is mask
    assert len(tw.walking.loads(tw.document(ids).to("meta"))) == 1  # read twice, moved once


@pytest.mark.parametrize("name", MASK_MODS)
def test_from_mask_mod_means_what_flex_attention_computes(name):
    mask = tw.from_mask_mod(MASK_MODS[name])
    shape = tw.spec.Shape(*SIZES[:2], SIZES[1], *SIZES[2:], 4, 4)
    found = dense_values(mask, shape)
    np.testing.assert_array_equal(found, _dense_mod(MASK_MODS[name]))
    assert found.any()
    assert not found.all()


@pytest.mark.parametrize("name", SCORE_MODS)
def test_from_score_mod_means_what_flex_attention_computes(name):
    score = tw.from_score_mod(SCORE_MODS[name])
    shape = tw.spec.Shape(*SIZES[:2], SIZES[1], *SIZES[2:], 4, 4)
    s = dense_values(S, shape)
    expected = _dense_mod(SCORE_MODS[name], torch.from_numpy(s.copy()))
    np.testing.assert_allclose(dense_values(score, shape), expected, rtol=1e-12, atol=1e-15)


def test_from_mods_against_flex_attention_itself():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def score_mod(score, b, h, q_idx, kv_idx):
        return 5.0 * torch.tanh(score / 5.0) - slopes[h] * torch.abs(q_idx - kv_idx)

    def mask_mod(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    n, rng = 128, torch.Generator().manual_seed(0)
    slopes, ids = torch.tensor([0.1, 0.2]), (torch.arange(n) // 50)
    q, k, v = (torch.randn(1, 2, n, 16, generator=rng) for _ in range(3))
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it runs unfused, which is what is wanted here
        block_mask = create_block_mask(mask_mod, 1, 2, n, n, device="cpu")
        expected = flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)
    found = tw.attention(q, k, v, mask=tw.from_mask_mod(mask_mod), score=tw.from_score_mod(score_mod))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "call, part",
    [
        (lambda: tw.from_mask_mod(3), "from_mask_mod: expected a function of 4 arguments, got int"),
        (lambda: tw.from_score_mod("x"), "from_score_mod: expected a function of 5 arguments, got str"),
        (lambda: tw.from_mask_mod(lambda b, h, q, k: q - k), "must return a condition"),
        (lambda: tw.from_score_mod(lambda s, b, h, q, k: q < k), "must return a number"),
        (lambda: tw.from_mask_mod(lambda b, h, q, k: np.arange(3)[q] == 0), "tw.load"),
        (lambda: tw.from_mask_mod(lambda b, h, q, k: torch.zeros(2, 2)[q] == 0), "one index a dimension"),
        (lambda: tw.from_mask_mod(lambda b, h, q, k: q >= k and q < 3), "`&`"),
    ],
)
def test_from_mods_are_checked(call, part):
    with pytest.raises(TypeError) as error:
        call()
    assert part in str(error.value)


def test_flex_mode_ends_with_the_call():
    with pytest.raises(TypeError):
        tw.from_mask_mod(lambda b, h, q, k: 1 / 0 if q else None)
    with pytest.raises(TypeError, match=r"tw\.load"):
        torch.arange(3)[Q]
