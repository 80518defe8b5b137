"""From a call to its kernels' arguments: tensors, steps, records of tiles, the variant's functions."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from tilewise import arrays
from tilewise.kernels.triton import forward as kernels
from tilewise.kernels.triton import modules
from tilewise.kernels.triton.tables import FIELDS, Tables, tables
from tilewise.spec import Attention, Partial, Shape, Tile


def forward(spec: Attention, q: Any, k: Any, v: Any, tile: Tile) -> Partial:
    """Attention on (batch, heads, n, d) tensors."""
    shape = Shape.of(spec, q, k, v)
    out = torch.empty_strided(*_stored_as(q, v), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    made = tables(spec, shape, tile)
    if made.tiles and shape.heads and shape.batch:
        kernels.forward[(made.tiles, shape.heads, shape.batch)](
            q, k, v, out, lse, q if spec.sinks is None else _tensor(spec.sinks, q.device), *_on_device(made, q.device),
            *_loaded(spec, q), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            *lse.stride()[:2], *made.steps, shape.group, spec.scale,
            **_functions(modules.variant(spec)), HAS_SINKS=spec.sinks is not None, **_sizes(shape, tile),
        )  # fmt: skip
    return Partial(out, lse)


def _functions(variant: Any) -> dict[str, Any]:
    return {"SCORE": getattr(variant, "score", None), "MASK": getattr(variant, "mask", None)}


def _on_device(made: Tables, device: Any) -> list[Any]:
    return [torch.from_numpy(x).to(device) for x in (made.records, made.runs)]


def _tensor(x: Any, device: Any) -> Any:
    return (x.detach() if arrays.is_torch(x) else arrays.as_tensor(x)).to(device)


def _loaded(spec: Attention, q: Any) -> tuple[Any, Any, Any]:
    """The variant's arrays, their sizes and their steps; one at least, which nothing reads."""
    loaded = [_tensor(slot.array, q.device) for slot in spec.loaded] or [q]
    return tuple(loaded), tuple(tuple(x.shape) or (1,) for x in loaded), tuple(x.stride() or (1,) for x in loaded)


def _sizes(shape: Shape, tile: Tile) -> dict[str, Any]:
    # Triton's interpreter has bfloat16 as whole numbers, and multiplies those.
    is_wide = modules.is_interpreted() or shape.dtype == "float32"
    return {
        "TILE_Q": tile.q, "TILE_K": tile.k, "D": shape.d, "D_V": shape.d_v, "FIELDS": FIELDS,
        "DEPTH": _power_of_2(shape.d), "COLUMNS": _power_of_2(shape.d_v),
        "DOT": tl.float32 if is_wide else getattr(tl, shape.dtype),
        "PRECISION": "ieee" if shape.dtype == "float32" else "tf32",
    }  # fmt: skip


def _power_of_2(n: int) -> int:
    """As wide as tensor cores take a matrix, at least."""
    return max(16, 1 << (n - 1).bit_length())


def _stored_as(q: Any, v: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The output's sizes and steps: heads side by side if q has them so, or one by one."""
    return (*q.shape[:3], v.shape[3]), arrays.strides_as(q, v)
