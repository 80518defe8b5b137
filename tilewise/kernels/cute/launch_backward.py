"""A call's gradients: arrays as the kernels of the backward pass take them, and their launch."""

from __future__ import annotations

from typing import Any

import torch

from tilewise import arrays
from tilewise.dispatch import Unsupported
from tilewise.kernels.cute import library
from tilewise.kernels.cute.launch import as_kernels_take, cannot_be_copied, steps_in_order
from tilewise.kernels.cute.rungs import BACKWARD
from tilewise.kernels.cute.wanted import kernel_of
from tilewise.kernels.uploads import loaded_on, plan_on, tensor
from tilewise.pytorch.sinks import d_sinks
from tilewise.spec import Attention, Grads, Partial, Shape, Tile


def backward(spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any, arch: str) -> Grads:
    """Gradients of sum(out * d_out) + sum(lse * d_lse), for (batch, heads, n, d) tensors of a GPU."""
    _check(d_out, q)
    shape = Shape.of(spec, q, k, v, backward=True)
    kernel = kernel_of(BACKWARD, spec, shape)
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    rows = [_copied(x.detach()) for x in (q, k, v, saved.out, d_out)]
    lse = saved.lse.detach().contiguous()
    shift, delta = torch.empty_like(lse), torch.empty_like(lse)
    d_lse = lse.new_zeros(()).expand(lse.shape) if d_lse is None else d_lse.detach().float()
    assert kernel.by_key is not None
    plans = [*_plan(spec, shape, kernel.tile, q.device), *_plan(spec, shape, kernel.by_key, q.device, by_key=True)]
    loaded = tuple(map(as_kernels_take, loaded_on(spec, q.device))) or (lse.view(-1),)
    given = (steps_in_order(x, kernel.vector) for x in (*rows, d_q, d_k, d_v))
    if 0 not in (shape.batch, shape.heads):
        library.kernel(kernel, arch)(*given, lse, d_lse, shift, delta, *plans, loaded, spec.scale)
    of_sinks = None if spec.sinks is None else d_sinks(tensor(spec.sinks, q.device), lse, delta)
    return Grads(d_q, d_k, d_v, of_sinks)


def _check(d_out: Any, q: Any) -> None:
    """A wider gradient may not be narrowed, and wider operands no tensor core multiplies."""
    if d_out.dtype != q.dtype:
        raise Unsupported(
            f"the kernel {BACKWARD.name!r} cannot compute this call: d_out is {arrays.dtype_name(d_out)}, and it takes "
            f"q's type, {arrays.dtype_name(q)}; kernel='triton' takes both"
        )


def _copied(x: Any) -> Any:
    """As the copy engine takes it."""
    return x if x.stride(-1) == 1 and cannot_be_copied({"x": x}) is None else x.clone().contiguous()


def _plan(spec: Attention, shape: Shape, tile: Tile, device: Any, by_key: bool = False) -> tuple[Any, Any]:
    """Records for every batch index and query head, and runs."""
    plan = plan_on(device, spec, shape, tile, by_key)
    return plan.records.expand(shape.batch, shape.heads, -1, -1), plan.runs
