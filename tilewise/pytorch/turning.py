"""The operator tilewise::turn: Triton's rotary embedding of whole tensors for autograd and torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import arrays, dispatch
from tilewise.rope import Rotation


def turned(x: Tensor, rotation: Rotation) -> Tensor:
    """(batch, heads, n, d) numbers, contiguous, differentiable in x."""
    made: Tensor = _turn(x, rotation.cos, rotation.sin, rotation.interleaved, False)
    return made


def is_served(x: Tensor) -> bool:
    """Whether Triton's kernel takes such a tensor."""
    from tilewise.kernels.triton import MOST_D

    return not is_followed() and bool(is_available(x.device.type, arrays.dtype_name(x))) and x.shape[-1] <= MOST_D


def is_followed() -> bool:
    """Whether torch.func or forward mode looks on: they go through PyTorch's own operations, not through operators."""
    if arrays.compiling():
        return False
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_available(device: str, dtype: str) -> bool:
    """Asked once where torch.compile reads. Triton's interpreter is for tests of the operator: it takes long."""
    from tilewise.kernels.triton import DTYPES
    from tilewise.kernels.triton.modules import is_interpreted

    suits = device == "cuda" and dtype in DTYPES and not is_interpreted()
    return suits and dispatch.kernel("triton").unavailable() is None


@torch.library.custom_op("tilewise::turn", mutates_args=())  # type: ignore[untyped-decorator]
def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    from tilewise.kernels.triton import launch_rope

    with torch.cuda.device_of(x):  # Triton launches on the current one
        return launch_rope.turned(x, Rotation(cos, sin, interleaved), back)


@_turn.register_fake  # type: ignore[untyped-decorator]
def _shape_of_turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    return x.new_empty(x.shape)


# -- gradients --------------------------------------------------------------------------------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    return _turn(d_y, cos, sin, ctx.interleaved, not ctx.back), None, None, None, None


_turn.register_autograd(_gradients, setup_context=_remember)
