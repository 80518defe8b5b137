"""The operator tilewise::qkv_projection: Triton's fused projection for autograd and torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.rope import Rotation


def project(x: Tensor, w: Tensor, bias: Tensor | None, turn: Rotation | None, heads: int, heads_k: int) -> Tensor:
    """(batch, heads + 2 * heads_k, n, d), differentiable in x, w and bias."""
    cos, sin = (None, None) if turn is None else (turn.cos, turn.sin)
    interleaved = turn is not None and turn.interleaved
    made: Tensor = _project(x, w, bias, cos, sin, interleaved, heads + 2 * heads_k, heads + heads_k)
    return made


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def unsupported(device: str, dtype: str) -> str | None:
    """Why Triton's kernel cannot take such tensors, or None; asked once where torch.compile reads."""
    from tilewise.kernels.triton import DTYPES
    from tilewise.kernels.triton.modules import is_interpreted

    reason = dispatch.kernel("triton").unavailable()
    if reason is None and (device == "cpu") != is_interpreted():
        reason = f"it computes on GPUs, by its interpreter on CPUs, and x is on {device}"
    if reason is None and dtype not in DTYPES:
        reason = f"it computes {', '.join(DTYPES)}, and x is {dtype}"
    return reason


@torch.library.custom_op("tilewise::qkv_projection", mutates_args=())  # type: ignore[untyped-decorator]
def _project(
    x: Tensor, w: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, interleaved: bool,
    heads: int, turned_heads: int,
) -> Tensor:  # fmt: skip
    from tilewise.kernels.triton import launch_projection

    turn = _rotation(cos, sin, interleaved)
    with torch.cuda.device_of(x):  # Triton launches on the current one
        return launch_projection.project(x, w, bias, turn, heads, turned_heads)


@_project.register_fake  # type: ignore[untyped-decorator]
def _shape_of_project(
    x: Tensor, w: Tensor, bias: Any, cos: Any, sin: Any, interleaved: bool, heads: int, turned_heads: int
) -> Tensor:
    return x.new_empty((x.shape[0], heads, x.shape[1], w.shape[1] // heads))


@torch.library.custom_op("tilewise::qkv_gradients", mutates_args=())  # type: ignore[untyped-decorator]
def _gather(d_y: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool, turned_heads: int) -> Tensor:
    from tilewise.kernels.triton import launch_projection

    turn = _rotation(cos, sin, interleaved)
    with torch.cuda.device_of(d_y):
        return launch_projection.gather(d_y, turn, turned_heads)


@_gather.register_fake  # type: ignore[untyped-decorator]
def _shape_of_gather(d_y: Tensor, cos: Any, sin: Any, interleaved: bool, turned_heads: int) -> Tensor:
    batch, heads, n, d = d_y.shape
    return d_y.new_empty((batch, n, heads * d))


def _rotation(cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Rotation | None:
    return None if cos is None else Rotation(cos, sin, interleaved)


# -- gradients --------------------------------------------------------------------------------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, cos, sin, ctx.interleaved, _, ctx.turned_heads = inputs
    ctx.save_for_backward(x, w, cos, sin)


def _gradients(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
    """Once gradients lie side by side and are turned back, the rest are products of matrices, which PyTorch has."""
    x, w, cos, sin = ctx.saved_tensors
    joined = _gather(d_y, cos, sin, ctx.interleaved, ctx.turned_heads)
    d_x = joined @ w.T if ctx.needs_input_grad[0] else None
    d_w = x.flatten(0, 1).T @ joined.flatten(0, 1) if ctx.needs_input_grad[1] else None
    d_bias = joined.sum((0, 1)) if ctx.needs_input_grad[2] else None
    return d_x, d_w, d_bias, None, None, None, None, None


_project.register_autograd(_gradients, setup_context=_remember)
