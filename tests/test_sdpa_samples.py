"""PyTorch's own samples for scaled_dot_product_attention, which every PyTorch wheel has, given to ours.

PyTorch judges its own kernels by what the same computation in the same type is off by, times a small factor
(test_transformers.py). So does this: an error may be twice that of PyTorch's math backend, or within assert_close's
default tolerance.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw

pytest.importorskip("expecttest", reason="PyTorch's samples need it")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FUDGE = 2.0  # PyTorch's own factors for attention are 1.5 to 10
# PyTorch 2.13 has 25 for each type. A release with fewer, or with none, must not pass unseen.
LEAST_SAMPLES = 25
TOLERANCES = {  # assert_close's; of float32 as PyTorch's entry for this function has it
    torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5), torch.float32: (5e-6, 5e-5),
    torch.float64: (1e-7, 1e-7),
}  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Attention = Callable[..., torch.Tensor]


@cache
def _entry() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what PyTorch's test code imports
        from torch.testing._internal.common_methods_invocations import op_db
    return next(entry for entry in op_db if entry.name == "nn.functional.scaled_dot_product_attention")


def _samples(device: str, dtype: torch.dtype, gradients: bool) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(_entry().sample_inputs(device, dtype, requires_grad=gradients))
    assert len(found) >= LEAST_SAMPLES
    return found


def _answer(attention: Attention, sample: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """out, and the gradient of every operand that requires one, as float64."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        same = x.dtype == dtype
        kept = x.detach() if same else x.detach().to(dtype if x.is_floating_point() else x.dtype)
        return kept.requires_grad_(x.requires_grad)

    operands = [leaf(x) for x in (sample.input, *sample.args)]
    options = {name: leaf(x) for name, x in sample.kwargs.items()}
    out = attention(*operands, **options)
    learned = [x for x in (*operands, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    results = [out.detach()]
    if learned:
        pulled = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        # Rounded as the sample is, so that the exact answer is of the same d_out.
        results += torch.autograd.grad(out, learned, pulled.to(sample.input.dtype).to(out))
    return [x.double() for x in results]


def _in_math(*given: Any, **options: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*given, **options)


def _check(sample: Any) -> None:
    dtype = sample.input.dtype
    exact, theirs = (_answer(_in_math, sample, wide) for wide in (torch.float64, dtype))
    ours = _answer(tw.scaled_dot_product_attention, sample, dtype)
    rtol, atol = TOLERANCES[dtype]
    for found, other, want in zip(ours, theirs, exact, strict=True):
        allowed = FUDGE * (other - want).abs().max()
        torch.testing.assert_close(found, want, rtol=rtol, atol=max(atol, float(allowed)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_sample_is_right(dtype: torch.dtype, gradients: bool, device: str) -> None:
    without_dropout = [x for x in _samples(device, dtype, gradients) if not x.kwargs.get("dropout_p")]
    assert without_dropout
    for sample in without_dropout:
        _check(sample)
        _check(sample.noncontiguous())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_with_dropout_are_refused(dtype: torch.dtype) -> None:
    with_dropout = [x for x in _samples("cpu", dtype, True) if x.kwargs.get("dropout_p")]
    assert with_dropout
    for sample in with_dropout:
        with pytest.raises(tw.Unsupported, match="dropout_p"):
            _answer(tw.scaled_dot_product_attention, sample, dtype)


def test_a_wrong_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tw.scaled_dot_product_attention
    monkeypatch.setattr(
        tw, "scaled_dot_product_attention", lambda *given, is_causal, **options: right(*given, **options)
    )
    with pytest.raises(AssertionError, match="not close"):
        _check(next(x for x in _samples("cpu", torch.bfloat16, False) if x.kwargs.get("is_causal")))
