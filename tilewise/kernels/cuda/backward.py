"""The backward pass on a GPU, by the tiled kernels."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.kernels.cuda import loaded_on
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.prepared import prepare_backward
from tilewise.kernels.cuda.structs import BACKWARD_ARRAYS
from tilewise.pytorch.sinks import d_sinks
from tilewise.spec import Attention, Grads, Partial, Shape, Tile


def backward(
    spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any, tile: Tile | None
) -> Grads:
    """On the current device. A gradient of the output that is wider than q makes all wider."""
    types = q.dtype, k.dtype, v.dtype
    dtype = torch.promote_types(d_out.dtype, q.dtype)
    q, k, v, out, d_out = (_rows(x.to(dtype)) for x in (q, k, v, saved.out, d_out))
    given = {"q": q, "k": k, "v": v, "out": out, "lse": saved.lse.contiguous(), "d_out": d_out, "d_lse": d_lse}
    made = {f"d_{name}": torch.empty(given[name].shape, dtype=dtype, device=q.device) for name in ("q", "k", "v")}
    every = {**given, **made, "delta": torch.empty_like(given["lse"])}
    views = {name: View(0, (), (0, 0, 0)) if x is None else View.of_torch(x) for name, x in every.items()}
    loaded = loaded_on(spec, q.device)
    for kernel in prepare_backward(
        spec, Shape.of(spec, q, k, v), views, [View.of_torch(x) for x in loaded], q.get_device(), tile
    ):
        names = ("q", "k", "v", "out", "lse"), BACKWARD_ARRAYS
        first, last = ([0 if every[name] is None else every[name].data_ptr() for name in part] for part in names)
        kernel.launch([*first, *(x.data_ptr() for x in loaded), *last])
    d_q, d_k, d_v = (made[f"d_{name}"].to(kind) for name, kind in zip("qkv", types, strict=True))
    of_sinks = None if spec.sinks is None else d_sinks(spec.sinks, given["lse"], every["delta"])
    return Grads(d_q, d_k, d_v, of_sinks, ())


def _rows(x: Any) -> Any:
    """Numbers of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
