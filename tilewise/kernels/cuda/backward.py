"""The backward pass on a GPU: by Hopper's kernels, or by the tiled ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewise.kernels.cuda import loaded_on, marshal
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.prepared import prepare_backward, prepare_backward_sm90
from tilewise.kernels.cuda.rungs import Rung
from tilewise.kernels.cuda.structs import BACKWARD_ARRAYS
from tilewise.pytorch.sinks import d_sinks
from tilewise.spec import Attention, Grads, Partial, Shape, Tile


def backward(
    spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any, tile: Tile | None,
    hoppers: Sequence[Rung] | None,
) -> Grads:  # fmt: skip
    """On the current device. A gradient of the output that is wider than q makes all wider, up to the type computed
    with: Hopper's kernels, if given, leave that to the tiled ones, and what has no queries or no keys."""
    types = q.dtype, k.dtype, v.dtype
    dtype = q.dtype if d_out.dtype == q.dtype else torch.float32
    if dtype != q.dtype or q.numel() == 0 or k.numel() == 0:
        hoppers = None
    lying = _rows if hoppers is None else _copied
    q, k, v, out, d_out = (lying(x.to(dtype)) for x in (q, k, v, saved.out, d_out))
    given = {"q": q, "k": k, "v": v, "out": out, "lse": saved.lse.contiguous(), "d_out": d_out, "d_lse": d_lse}
    made = {f"d_{name}": torch.empty(given[name].shape, dtype=dtype, device=q.device) for name in ("q", "k", "v")}
    every = {**given, **made, "delta": torch.empty_like(given["lse"])}
    views = {name: View(0, (), (0, 0, 0)) if x is None else View.of_torch(x) for name, x in every.items()}
    loaded, shape = loaded_on(spec, q.device), Shape.of(spec, q, k, v)
    loaded_views, device, space = [View.of_torch(x) for x in loaded], q.get_device(), []
    if hoppers is not None:
        kernels, numbers = prepare_backward_sm90(hoppers, spec, shape, views, loaded_views, device)
        # Of the stream: another launch may run beside this one.
        space = [torch.empty(count, dtype=torch.float32, device=q.device) for count in numbers]
    else:
        kernels = prepare_backward(spec, shape, views, loaded_views, device, tile)
    names = ("q", "k", "v", "out", "lse"), BACKWARD_ARRAYS
    first, last = ([0 if every[name] is None else every[name].data_ptr() for name in part] for part in names)
    for kernel in kernels:
        kernel.launch([*first, *(x.data_ptr() for x in loaded), *last, *(x.data_ptr() for x in space)])
    d_q, d_k, d_v = (made[f"d_{name}"].to(kind) for name, kind in zip("qkv", types, strict=True))
    of_sinks = None if spec.sinks is None else d_sinks(spec.sinks, given["lse"], every["delta"])
    return Grads(d_q, d_k, d_v, of_sinks, ())


def _copied(x: Any) -> Any:
    """As the copy engine takes it."""
    return (
        x if marshal.cannot_be_copied({"x": View.of_torch(x)}) is None and x.stride(-1) == 1 else x.clone().contiguous()
    )


def _rows(x: Any) -> Any:
    """Numbers of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
