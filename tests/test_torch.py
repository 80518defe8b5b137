"""PyTorch tensors on the CPU: the same memory, the same numbers, and gradients that cannot be wrong silently."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.walking import loads


def _inputs(*shape: int, grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad) for _ in range(3)]


def _gradient(score: tw.Expr) -> torch.Tensor:
    q, k, v = _inputs(1, 2, 16, 8)
    tw.attention(q, k, v, causal=True, score=score).sum().backward()
    assert q.grad is not None
    return q.grad


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_copied_expression_is_the_same_expression(make_copy: object) -> None:
    score = tw.softcap(2.0) >> tw.alibi(2)
    copied = make_copy(score)  # type: ignore[operator]
    assert copied.key == score.key
    assert torch.equal(_gradient(copied), _gradient(score))
    assert (tw.softcap(3.0) >> make_copy(tw.S * 2)).key == (tw.softcap(3.0) >> (tw.S * 2)).key  # type: ignore[operator]
    assert make_copy(tw.causal()) is tw.causal()  # type: ignore[operator]


def test_a_deep_copy_of_a_module_reads_the_copied_parameter() -> None:
    class Biased(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
            self.score = tw.relative(self.table)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = tw.attention(x, x, x, score=self.score)
            return out

    module = Biased()
    other = copy.deepcopy(module)
    (x,) = _inputs(1, 2, 9, 4)[:1]
    other(x).pow(2).sum().backward()
    assert module.table.grad is None
    assert other.table.grad is not None
    assert other.table.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"mask": torch.ones(16, 16, dtype=torch.bool)},
        lambda: {"mask": tw.document(torch.zeros(16, dtype=torch.int64))},
        lambda: {"score": tw.bias(torch.zeros(16, 16, dtype=torch.float64))},
        lambda: {"score": tw.relative(torch.zeros(4, dtype=torch.float64, requires_grad=True))},
        lambda: {"sinks": torch.zeros(2, dtype=torch.float64)},
    ],
)
def test_changing_what_backward_needs_is_noticed(options: object) -> None:
    """Gradients are recomputed from the arrays, so autograd must notice when one was changed in between."""
    q, k, v = _inputs(1, 2, 16, 8)
    given = options()  # type: ignore[operator]
    out = tw.attention(q, k, v, **given)
    (array,) = given.values()
    array = loads(array)[0].array if isinstance(array, tw.Expr) else array
    with torch.no_grad():
        array[:] = 1 - array if array.dtype != torch.bool else ~array
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0], dtype=torch.float64)])
def test_merged_rows_with_no_key_have_gradients_of_zero(sinks: torch.Tensor | None) -> None:
    q, k, v = _inputs(1, 2, 6, 4)
    seen = tw.Q > 1
    parts = [
        tw.attention(q, k[:, :, half], v[:, :, half], mask=seen, return_lse=True) for half in (slice(3), slice(3, 6))
    ]
    merged = tw.merge(parts, sinks=sinks)
    whole, lse = tw.attention(q, k, v, mask=seen, sinks=sinks, return_lse=True)
    torch.testing.assert_close(merged.out, whole)
    torch.testing.assert_close(merged.lse, lse)
    (merged.out.sum() + merged.lse[:, :, 2:].sum()).backward()
    found = [x.grad.clone() for x in (q, k, v)]  # type: ignore[union-attr]
    for x in (q, k, v):
        x.grad = None
    (whole.sum() + lse[:, :, 2:].sum()).backward()
    for got, x in zip(found, (q, k, v), strict=True):
        torch.testing.assert_close(got, x.grad)
    assert torch.equal(found[0][:, :, :2], torch.zeros_like(found[0][:, :, :2]))


def test_bfloat16_gradients_of_lse() -> None:
    q, k, v = (x.detach().to(torch.bfloat16).requires_grad_() for x in _inputs(1, 2, 16, 8))
    _, lse = tw.attention(q, k, v, return_lse=True)
    lse.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.bfloat16
    arrays = [x.detach() for x in (q, k, v)]
    _, pullback = tw.attention_vjp(*arrays)
    grads = pullback(torch.zeros(1, 2, 16, 8, dtype=torch.bfloat16), torch.ones(1, 2, 16, dtype=torch.bfloat16))
    assert torch.equal(grads.q, q.grad)


def test_a_tensor_divided_by_an_expression() -> None:
    three = torch.tensor(3.0)
    assert (three / (tw.S + 1)).key == (tw.load(three) / (tw.S + 1)).key
    assert (three - tw.S).key == (tw.load(three) - tw.S).key


@pytest.mark.parametrize("magnitude", [1.0, 1e2, 1e4])
def test_weights_add_up_at_any_magnitude(magnitude: float) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 20, 16)).astype(np.float32) for _ in range(3))
    p = tw.weights(q * np.float32(magnitude), k, v, rows=range(20))
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-6)


def test_packed_ids_are_not_read_by_position_silently() -> None:
    ids, lengths = np.array([0] * 5 + [1] * 3 + [2] * 4), [0, 5, 12]
    q, k, v = (np.random.default_rng(i).standard_normal((12, 2, 4)) for i in range(3))
    with pytest.raises(ValueError, match=r"read it with tw.load\(array, tw.QP\)"):
        tw.attention_varlen(q, k, v, lengths, lengths, mask=tw.document(ids))
    out = tw.attention_varlen(q, k, v, lengths, lengths, mask=tw.load(ids, tw.QP) == tw.load(ids, tw.KP))
    dense = tw.attention(*(x.swapaxes(0, 1)[None] for x in (q, k, v)), mask=tw.document(ids))
    np.testing.assert_allclose(out, dense[0].swapaxes(0, 1), rtol=1e-12)


def test_flex_attentions_own_combinations() -> None:
    from torch.nn.attention.flex_attention import and_masks, or_masks

    def causal(b: object, h: object, q: tw.Expr, k: tw.Expr) -> tw.Expr:
        return q >= k

    def near(b: object, h: object, q: tw.Expr, k: tw.Expr) -> tw.Expr:
        return (q - k).abs() < 3

    both, either = tw.from_mask_mod(and_masks(causal, near)), tw.from_mask_mod(or_masks(causal, near))
    distance = np.arange(9)[:, None] - np.arange(9)
    assert np.array_equal(tw.picture(both, 9, 9), tw.picture(tw.dense((distance >= 0) & (distance < 3)), 9, 9))
    assert np.array_equal(tw.picture(either, 9, 9), tw.picture(tw.dense(distance > -3), 9, 9))


def test_an_old_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    import tilewise.pytorch

    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(ImportError, match=r"PyTorch 2.6 or newer for tensors, this is 2\.5\.1"):
        importlib.reload(tilewise.pytorch)


def test_a_variant_that_was_not_called() -> None:
    q = torch.ones(3, 2)
    with pytest.raises(TypeError, match=r"mask: .* call it: tw.causal\(...\)"):
        tw.attention(q, q, q, mask=tw.causal)
    with pytest.raises(TypeError, match=r"score: .* got ndarray"):
        tw.attention(q, q, q, score=np.ones(3))
