"""Gradients of the operators, for autograd and for torch.func. Tensors come side by side: q, k, v, sinks, *arrays.

For the forward operator torch.library.register_autograd would do, but it walks lists of tensors in Python, and that
takes longer than a small attention.

Where a backward pass may follow in half precision, forward is attention_with_remainder, and the remainder is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise import wire

_functorch = torch._C._functorch
_HALF = (torch.float16, torch.bfloat16)


def register(library: Any) -> None:
    library.impl("attention", _attention, "Autograd")
    torch.library.register_autograd("tilewise::attention_with_remainder", _not_for_callers, lib=library)
    torch.library.register_autograd("tilewise::attention_backward", _no_second_derivative, lib=library)


def _attention(q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], sinks: Any, spec: str) -> tuple[Tensor, ...]:
    tensors = (q, k, v, sinks, *arrays)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return recorded(partial(_below_autograd, keeps_remainder(spec, q)), spec, *tensors)
    return _below_autograd(False, spec, *tensors)


def keeps_remainder(spec: str, q: Tensor) -> bool:
    """Whether the backward pass of this call is told what rounding took from out."""
    return q.dtype in _HALF and not wire.has_wide_out(spec)


def recorded(run: Any, spec: str, *tensors: Any) -> tuple[Tensor, Tensor]:
    """out and lse of what `run` computes of the same arguments, with gradients; it may have a remainder, too."""
    return _Attention.apply(run, spec, *tensors)  # type: ignore[no-any-return]


def _below_autograd(
    keeps: bool, spec: str, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *arrays: Tensor
) -> tuple[Tensor, ...]:
    operators = torch.ops.tilewise
    operator = operators.attention_with_remainder.default if keeps else operators.attention.default
    with torch._C._AutoDispatchBelowAutograd():
        return operator(q, k, v, arrays, sinks, spec)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, run: Any, spec: str, *tensors: Any) -> tuple[Tensor, ...]:
        output: tuple[Tensor, ...] = run(spec, *tensors)
        _remember(ctx, spec, tensors, output)
        return output[:2]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        return None, *_gradients(ctx, ctx.needs_input_grad[1:], d_out, d_lse, _backward)


def _remember(ctx: Any, spec: str, tensors: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    ctx.spec = spec
    remainder = output[2] if len(output) > 2 else None
    ctx.save_for_backward(*tensors, *output[:2], remainder)  # raises in backward if one was changed in place since
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, needed: Any, d_out: Tensor | None, d_lse: Tensor | None, backward: Any
) -> tuple[Any, ...]:  # fmt: skip
    """One for each input: spec, q, k, v, sinks, *arrays; needed: which of them need one."""
    q, k, v, sinks, *arrays, out, lse, remainder = ctx.saved_tensors
    wanted = [i for i in wire.score_arrays(ctx.spec) if needed[5 + i]]
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_q, d_k, d_v, *others = backward(ctx.spec, wanted, out, lse, remainder, d_out, d_lse, q, k, v, sinks, *arrays)
    d_sinks = None if sinks is None else others.pop()
    d_arrays = dict(zip(wanted, others, strict=True))
    return None, d_q, d_k, d_v, d_sinks, *map(d_arrays.get, range(len(arrays)))


def _backward(
    spec: str, wanted: list[int], out: Tensor, lse: Tensor, remainder: Any, d_out: Tensor, d_lse: Any,
    q: Any, k: Any, v: Any, sinks: Any, *arrays: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    operator = torch.ops.tilewise.attention_backward.default
    with nullcontext() if torch.is_grad_enabled() else torch._C._AutoDispatchBelowAutograd():
        *grads, others = operator(q, k, v, arrays, sinks, spec, out, lse, d_out, d_lse, wanted, remainder)
    return (*grads, *others)


def _not_for_callers(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "tilewise::attention_with_remainder has no derivative of its own, and one was asked for; call "
        "tilewise::attention, which keeps the remainder for its backward pass by itself"
    )


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "tilewise attention has first derivatives alone, and a second one was asked for (create_graph=True, a gradient "
        "penalty ...); write that part with torch.softmax"
    )


# -- torch.func: its transforms take autograd functions with a setup_context, not operators ---------------------------


def transformed(spec: str, *tensors: Any) -> tuple[Tensor, Tensor]:
    """out and lse under torch.func.grad, torch.vmap and the like."""
    learns = torch.is_grad_enabled() and any(map(_is_differentiated, tensors))
    keeps = learns and keeps_remainder(spec, tensors[0])
    out, lse, *_ = _Transformed.apply(keeps, spec, *tensors)
    return out, lse


def _is_differentiated(x: Any) -> bool:
    """Whether autograd follows the tensor itself, or what a transform has wrapped."""
    while x is not None and not x.requires_grad and _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x is not None and bool(x.requires_grad)


class _Transformed(torch.autograd.Function):  # type: ignore[misc]
    """Attention under torch.func.grad, torch.vmap and the like."""

    generate_vmap_rule = True
    forward = staticmethod(_below_autograd)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, spec, *tensors = inputs
        ctx.mark_non_differentiable(*output[2:])
        _remember(ctx, spec, tensors, output)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: None) -> tuple[Any, ...]:
        return None, *_gradients(ctx, ctx.needs_input_grad[1:], d_out, d_lse, _TransformedBackward.apply)


class _TransformedBackward(torch.autograd.Function):  # type: ignore[misc]
    generate_vmap_rule = True
    forward = staticmethod(_backward)
    backward = staticmethod(_no_second_derivative)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """To refuse, nothing need be remembered."""
