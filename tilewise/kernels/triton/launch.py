"""From a call to its kernels' arguments: tensors, steps, records of tiles, the variant's functions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import triton.language as tl

from tilewise import arrays
from tilewise.derivative import ONE, score_slopes
from tilewise.expr import S
from tilewise.kernels.triton import backward as backward_kernels
from tilewise.kernels.triton import forward as forward_kernels
from tilewise.kernels.triton import modules
from tilewise.kernels.triton.tables import tables
from tilewise.spec import Attention, Grads, Partial, Shape, Tile

_ROWS = 64  # of a program that computes delta


def forward(spec: Attention, q: Any, k: Any, v: Any, tile: Tile) -> Partial:
    """Attention on (batch, heads, n, d) tensors."""
    shape = Shape.of(spec, q, k, v)
    out = torch.empty_strided(*_stored_as(q, v), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    sinks = q if spec.sinks is None else _tensor(spec.sinks, q.device).contiguous()
    grid, *planned = _planned(spec, shape, tile, q)
    if 0 not in grid:
        forward_kernels.forward[grid](
            q, k, v, out, lse, sinks, *map(_steps, (q, k, v, out, lse)), *planned, shape.group, spec.scale,
            **_functions(modules.variant(spec), "score", "mask"), HAS_SINKS=spec.sinks is not None,
            **_sizes(shape, tile),
        )  # fmt: skip
    return Partial(out, lse)


def backward(
    spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any, tile: Tile
) -> Grads:
    """Gradients of sum(out * d_out) + sum(lse * d_lse)."""
    shape = Shape.of(spec, q, k, v)
    d_q, d_k, d_v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = _delta(saved.out, d_out, d_lse)
    slope = score_slopes(spec)[S]
    variant = modules.variant(spec, {} if slope is ONE else {"slope": slope})
    functions = {**_functions(variant, "score", "mask", "slope"), **_sizes(shape, tile)}
    given = (q, k, v, d_out, saved.lse, delta)
    steps = tuple(map(_steps, given[:5]))
    grid, *planned = _planned(spec, shape, tile, q)
    if 0 not in grid:
        backward_kernels.d_query[grid](
            *given, d_q, *steps, _steps(d_q), *planned, shape.group, spec.scale, **functions
        )
    grid, *planned = _planned(spec, shape, tile, q, by_key=True)
    if 0 not in grid:
        backward_kernels.d_keys[grid](
            *given, d_k, d_v, *steps, _steps(d_k), _steps(d_v), *planned, shape.group, spec.scale, **functions
        )
    return Grads(d_q, d_k, d_v, None if spec.sinks is None else _d_sinks(spec.sinks, saved.lse, delta), ())


def _delta(out: Any, d_out: Any, d_lse: Any) -> Any:
    batch, heads, n, d_v = out.shape
    delta = torch.empty((batch, heads, n), dtype=torch.float32, device=out.device)
    grid = (-(-n // _ROWS), heads, batch)
    if 0 not in grid:
        given = out, d_out, delta if d_lse is None else d_lse, delta
        backward_kernels.prepare[grid](
            *given, *map(_steps, given), n, HAS_D_LSE=d_lse is not None, ROWS=_ROWS, D_V=d_v, COLUMNS=_power_of_2(d_v)
        )
    return delta


def _d_sinks(sinks: Any, lse: Any, delta: Any) -> Any:
    """A sink's weight is exp(sink - lse) in each row; it has no value, so its share of d_score is -weight * delta."""
    wide = _tensor(sinks, lse.device).double()
    shift = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
    weight = torch.exp(wide[:, None] - shift)
    return -(weight * delta).sum(dim=(0, 2)).to(_tensor(sinks, lse.device).dtype)


# -- arguments --------------------------------------------------------------------------------------------------------


def _planned(spec: Attention, shape: Shape, tile: Tile, q: Any, by_key: bool = False) -> tuple[Any, ...]:
    """The grid; the records of its tiles with their steps, their runs, and the variant's arrays."""
    made = tables(spec, shape, tile, by_key)
    records, runs = (torch.from_numpy(x).to(q.device) for x in (made.records, made.runs))
    grid = made.tiles, shape.heads_k if by_key else shape.heads, shape.batch
    return grid, records, made.steps, runs, _loaded(spec, q)


def _loaded(spec: Attention, q: Any) -> tuple[Any, Any, Any]:
    """The variant's arrays, their sizes and their steps; one at least, which nothing reads."""
    loaded = [_tensor(slot.array, q.device) for slot in spec.loaded] or [q]
    return tuple(loaded), tuple(tuple(x.shape) or (1,) for x in loaded), tuple(x.stride() or (1,) for x in loaded)


def _tensor(x: Any, device: Any) -> Any:
    return (x.detach() if arrays.is_torch(x) else arrays.as_tensor(x)).to(device)


def _steps(x: Any) -> tuple[int, int, int]:
    return tuple(x.stride()[:3])


def _functions(variant: ModuleType | None, *names: str) -> dict[str, Any]:
    return {name.upper(): getattr(variant, name, None) for name in names}


def _sizes(shape: Shape, tile: Tile) -> dict[str, Any]:
    # Triton's interpreter has bfloat16 as whole numbers, and multiplies those.
    is_wide = modules.is_interpreted() or shape.dtype == "float32"
    return {
        "TILE_Q": tile.q, "TILE_K": tile.k, "D": shape.d, "D_V": shape.d_v,
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
