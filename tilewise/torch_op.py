"""PyTorch: tensors in, tensors out, gradients through autograd. Imported only when a tensor is passed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tilewise import dispatch
from tilewise.spec import Partial
from tilewise.validate import Call


def attention(call: Call, kernel: str) -> Partial:
    """Run a checked call on tensors; differentiable in q, k, v, sinks and every loaded tensor that requires grad."""
    return Partial(*_Attention.apply(call, kernel, call.q, call.k, call.v, call.spec.sinks, *_loaded(call)))


def _loaded(call: Call) -> list[Any]:
    """Every tensor the variant reads: autograd asks some for gradients, and watches all for changes in place."""
    return [slot.array for slot in call.spec.loaded if isinstance(slot.array, torch.Tensor)]


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, call: Call, kernel: str, q: Any, k: Any, v: Any, sinks: Any, *loaded: Any) -> tuple[Any, Any]:
        done = dispatch.resolve(kernel, call.spec, call.shape).forward(call.spec, q, k, v)
        ctx.call, ctx.kernel = call, kernel
        ctx.save_for_backward(q, k, v, done.out, done.lse, sinks, *loaded)
        return done.out, done.lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        q, k, v, out, lse, *_ = ctx.saved_tensors  # raises if one was changed in place since
        call = ctx.call
        system = dispatch.resolve(ctx.kernel, call.spec, replace(call.shape, backward=True))
        grads = system.backward(call.spec, q, k, v, Partial(out, lse), d_out, d_lse)
        by_array = {id(slot.array): grad for slot, grad in zip(call.spec.wanted, grads.arrays, strict=True)}
        return (None, None, grads.q, grads.k, grads.v, grads.sinks, *(by_array.get(id(x)) for x in _loaded(call)))
