"""Attention with its output projection in one kernel: y = out @ w_o, without a per-head output in global memory.

Worth it where launches and small products cost more than what they compute: short queries, small models. Elsewhere
attention, and a library's product after it, has more blocks to work with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tilewise import arrays, validate
from tilewise.dispatch import Unsupported
from tilewise.kernels import gpus
from tilewise.kernels.cute import architecture, library, support
from tilewise.kernels.cute.launch import is_aligned, run
from tilewise.kernels.cute.rungs import BASIC
from tilewise.kernels.cute.wanted import Wanted, kernel_of
from tilewise.schedule import itemsize
from tilewise.spec import Attention, Partial, Shape


def projected_attention(q: Any, k: Any, v: Any, w_o: Any, **options: Any) -> Partial:
    """(y, lse): y is (batch, n, model) for a w_o of (heads * d_v, model); options as those of tw.attention."""
    call = validate.prepare(q, k, v, **options)
    shape = call.shape
    _check(w_o, call.q, shape)
    reason = library.not_installed() or _has_gradients(q, k, v, w_o) or unsupported(call.spec, shape)
    if reason is not None:
        raise Unsupported(f"cute cannot project this call's output: {reason}; multiply tw.attention's output by w_o")
    y = torch.empty((shape.batch, 1, shape.n_q, w_o.shape[1]), dtype=w_o.dtype, device=w_o.device)
    rows = [x.detach() for x in (call.q, call.k, call.v, y)]
    kernel = kernel_for(call.spec, shape, aligned=all(map(is_aligned, (*rows, w_o))))
    with torch.cuda.device_of(call.q):
        lse = run(kernel, call.spec, shape, rows, (w_o.detach(),), architecture(gpus.capability(shape.device)))
    return Partial(y[:, 0], lse)


def kernel_for(spec: Attention, shape: Shape, aligned: bool = True) -> Wanted:
    kernel = kernel_of(BASIC, spec, shape, aligned)
    return replace(kernel, rung="projected", source="projected", heads=shape.heads)


def unsupported(spec: Attention, shape: Shape, capability: tuple[int, int] | None = None) -> str | None:
    """Why the kernel cannot compute this call, or None. capability: of another GPU than the arrays'."""
    away = gpus.elsewhere(shape)
    if away is not None:
        return away
    capability = capability or gpus.capability(shape.device)
    reason = support.unsupported(spec, shape, BASIC, capability)
    if reason is not None:
        return reason
    size, columns = itemsize(shape.dtype), BASIC.columns(shape.d_v)
    results, weights = 64 * (shape.heads * columns * size + 16), columns * (64 * size + 16)
    return support.no_room(BASIC.shared_bytes(shape) + results + weights, shape, capability)


def _check(w_o: Any, q: Any, shape: Shape) -> None:
    if not arrays.is_torch(w_o) or w_o.dtype != q.dtype or w_o.device != q.device:
        got = f"{arrays.dtype_name(w_o)} on {arrays.device_name(w_o)}"
        raise TypeError(f"w_o: expected a tensor of {shape.dtype} on {shape.device}, as q is, got {got}; use w_o.to(q)")
    wanted = shape.heads * shape.d_v
    if w_o.ndim != 2 or w_o.shape[0] != wanted or w_o.stride(1) != 1:
        got = f"{tuple(w_o.shape)} with steps {w_o.stride()}"
        raise ValueError(f"w_o: expected ({wanted}, model), rows of numbers side by side, got {got}")


def _has_gradients(*given: Any) -> str | None:
    if torch.is_grad_enabled() and any(arrays.is_torch(x) and x.requires_grad for x in given):
        return "it has no gradients, and some of q, k, v and w_o want one; call it under torch.no_grad()"
    return None
