"""Callers' arrays as tensors for kernels of PyTorch's memory, and results as callers have their arrays.

Nothing here imports PyTorch before a tensor is there, or is made.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

from tilewise import arrays
from tilewise.spec import Attention, Grads, Partial


def device_of(x: Any) -> Any:
    """Kernels are launched on the current device."""
    return sys.modules["torch"].cuda.device_of(x) if arrays.is_torch(x) and x.is_cuda else nullcontext()


def as_tensor(x: Any) -> Any:
    return x if arrays.is_torch(x) else arrays.as_tensor(x)


def rows(x: Any, dtype: Any) -> Any:
    """In a type, numbers of a row side by side."""
    x = as_tensor(x).to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def like(result: Any, template: Any) -> Any:
    return result if arrays.is_torch(template) else arrays.like(arrays.as_numpy(result), template)


def partial_like(done: Partial, q: Any) -> Partial:
    return done.map(lambda x: like(x, q))


def grads_like(grads: Grads, spec: Attention, q: Any, k: Any, v: Any) -> Grads:
    """Each in the type of what it is the gradient of."""
    d_q, d_k, d_v = (like(grad.to(as_tensor(x).dtype), x) for grad, x in ((grads.q, q), (grads.k, k), (grads.v, v)))
    sinks = None if grads.sinks is None else like(grads.sinks, spec.sinks)
    wanted = tuple(like(x, slot.array) for x, slot in zip(grads.arrays, spec.wanted, strict=True))
    return Grads(d_q, d_k, d_v, sinks, wanted)
