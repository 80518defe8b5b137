"""Attention with its output projection in one kernel: y = out @ w_o, without a per-head output in global memory.

Worth it where launches and small products cost more than what they compute: short queries, small models. Elsewhere
attention, and a library's product after it, has more blocks to work with.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

from tilewise import arrays, validate
from tilewise.dispatch import Unsupported
from tilewise.kernels import gpus
from tilewise.kernels.cute import architecture, library, projected
from tilewise.kernels.cute.launch import is_aligned, run
from tilewise.kernels.cute.wanted import Wanted
from tilewise.spec import Attention, Partial, Shape


def projected_attention(q: Any, k: Any, v: Any, w_o: Any, **options: Any) -> Partial:
    """(y, lse): y is (batch, n, model) for a w_o of (heads * d_v, model), of a torch.nn.Linear its weight.T, which is
    not copied; options as those of tw.attention."""
    return _projected(q, k, v, w_o, False, options)


def projected_if_it_pays(q: Any, k: Any, v: Any, w_o: Any, **options: Any) -> Any:
    """y, where that is faster than attention and a product behind it, if a kernel for it was built; or None."""
    shape = Shape.of(Attention(1.0), q, k, v)
    if w_o.dtype == q.dtype and projected.pays(shape, w_o.shape[1]):
        with suppress(Unsupported):
            return _projected(q, k, v, w_o, True, options).out
    return None


def _projected(q: Any, k: Any, v: Any, w_o: Any, only_if_built: bool, options: dict[str, Any]) -> Partial:
    call = validate.prepare(q, k, v, **options)
    shape = call.shape
    _check(w_o, call.q, shape)
    reason = library.not_installed() or _has_gradients(q, k, v, w_o) or unsupported(call.spec, shape)
    if reason is not None:
        raise Unsupported(f"cute cannot project this call's output: {reason}; multiply tw.attention's output by w_o")
    weight = w_o.detach().T if w_o.stride(0) == 1 else w_o.detach().T.contiguous()
    y = torch.empty((shape.batch, 1, shape.n_q, w_o.shape[1]), dtype=w_o.dtype, device=w_o.device)
    rows = [x.detach() for x in (call.q, call.k, call.v, y)]
    kernel = projected.kernel_for(call.spec, shape, aligned=all(map(is_aligned, (*rows, weight))))
    arch = architecture(gpus.capability(shape.device))
    if only_if_built and not _is_built(kernel, arch, os.environ.get(library.FOLDER)):
        raise Unsupported(f"no kernel was built for it: {kernel}")
    with torch.cuda.device_of(call.q):
        lse = run(kernel, call.spec, shape, rows, (weight,), arch)
    return Partial(y[:, 0], lse)


@lru_cache(1024)  # to look takes longer than a launch
def _is_built(kernel: Wanted, arch: str, folder: str | None) -> bool:
    """folder: where kernels were built ahead of time."""
    return library.is_built(kernel, arch)


def unsupported(spec: Attention, shape: Shape) -> str | None:
    """Why the kernel cannot compute this call, or None."""
    return gpus.elsewhere(shape) or projected.unsupported(spec, shape, gpus.capability(shape.device))


def _check(w_o: Any, q: Any, shape: Shape) -> None:
    if not arrays.is_torch(w_o) or w_o.dtype != q.dtype or w_o.device != q.device:
        got = f"{arrays.dtype_name(w_o)} on {arrays.device_name(w_o)}"
        raise TypeError(f"w_o: expected a tensor of {shape.dtype} on {shape.device}, as q is, got {got}; use w_o.to(q)")
    wanted = shape.heads * shape.d_v
    if w_o.ndim != 2 or w_o.shape[0] != wanted:
        raise ValueError(f"w_o: expected ({wanted}, model), got {tuple(w_o.shape)}")


def _has_gradients(*given: Any) -> str | None:
    if torch.is_grad_enabled() and any(arrays.is_torch(x) and x.requires_grad for x in given):
        return "it has no gradients, and some of q, k, v and w_o want one; call it under torch.no_grad()"
    return None
