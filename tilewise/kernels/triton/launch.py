"""A call's kernels, one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tilewise import arrays
from tilewise.derivative import ONE, score_slopes
from tilewise.expr import S
from tilewise.kernels.triton import launch_rope, modules
from tilewise.kernels.triton.arguments import (
    functions,
    keys_of,
    loaded_by,
    maps,
    sizes,
    steps_of,
)
from tilewise.kernels.triton.choices import Pass
from tilewise.kernels.triton.launch_gradients import of_arrays
from tilewise.kernels.triton.launch_plan import planned
from tilewise.kernels.triton.source import backward as backward_kernels
from tilewise.kernels.triton.source import basic as basic_kernel
from tilewise.kernels.triton.source import forward as forward_kernels
from tilewise.kernels.triton.tuning import chosen
from tilewise.kernels.triton.turning import turning, turns_before
from tilewise.kernels.uploads import tensor
from tilewise.pytorch.sinks import d_sinks
from tilewise.spec import Attention, Grads, Partial, Shape, Tile


# Triton's interpreter computes with NumPy, which warns of what IEEE's inf and NaN are for.
@np.errstate(all="ignore")
def forward(spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None, basic: bool = False) -> Partial:
    """Attention on (batch, heads, n, d) tensors. basic: by the kernel that has one query a program, and no plan."""
    shape = Shape.of(spec, q, k, v)
    out = torch.empty_strided(
        *arrays.stored_as(q, v), dtype=getattr(torch, spec.out_dtype(shape.dtype)), device=q.device
    )
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    remainder = torch.empty_like(out) if spec.stores_remainder(shape.dtype) and not basic else None
    before = turns_before(spec, shape, tile, q)
    if before is not None:
        spec, q, k = replace(spec, rope=None), launch_rope.turned(q, before[0]), launch_rope.turned(k, before[1])
    sinks = q if spec.sinks is None else tensor(spec.sinks, q.device).contiguous()
    choice = chosen(Pass.FORWARD, spec, shape, tile)
    if basic:
        choice = replace(choice, tile=Tile(1, choice.tile.k))
    grid, *rest = planned(replace(spec, mask=None, score=None) if basic else spec, shape, choice.tile, q)
    told = functions(spec, modules.variant(spec, keys_of(shape)), "score", "mask")
    if 0 not in grid:
        kernel = basic_kernel.basic if basic else forward_kernels.forward
        kernel[grid](
            q, k, v, out, lse, sinks, *map(steps_of, (q, k, v, out, lse)), *rest[:-1], loaded_by(spec, q), shape.group,
            spec.scale, **told, HAS_SINKS=spec.sinks is not None, **sizes(shape, choice.tile), **choice.options,
            **({} if basic else turning(spec, shape, q) | maps(spec, choice.tile.k, k=k, v=v)),
            **({} if basic else {"remainder": remainder}),
        )  # fmt: skip
    return Partial(out, lse, remainder)


@np.errstate(all="ignore")
def backward(
    spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any, tile: Tile | None
) -> Grads:
    """Gradients of sum(out * d_out) + sum(lse * d_lse), in the type of d_out, which may be wider than that of q."""
    is_wider = d_out.dtype != q.dtype
    before = turns_before(spec, Shape.of(spec, q, k, v), tile, q, always=is_wider)  # and rounded as forward rounds
    if before is not None:
        turn_q, turn_k = before
        q, k = launch_rope.turned(q, turn_q), launch_rope.turned(k, turn_k)
        grads = backward(replace(spec, rope=None), q, k, v, saved, d_out, d_lse, tile)
        d_q, d_k = launch_rope.turned(grads.q, turn_q, back=True), launch_rope.turned(grads.k, turn_k, back=True)
        return replace(grads, q=d_q, k=d_k)
    q, k, v = (x.to(d_out.dtype) for x in (q, k, v))
    shape = Shape.of(spec, q, k, v)
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    shift, delta = (torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))
    held = saved.out, saved.remainder, saved.lse, d_lse
    held_steps = tuple(None if x is None else steps_of(x) for x in held)
    slope = score_slopes(spec)[S]
    variant = modules.variant(spec, keys_of(shape), {} if slope is ONE else {"slope": slope})
    turned = turning(spec, shape, q)
    told = functions(spec, variant, "score", "mask", "slope") | turned
    given = (q, k, v, d_out, shift, delta)
    steps = tuple(map(steps_of, given[:5]))
    choice = chosen(Pass.D_QUERY, spec, shape, tile)
    grid, *rest = planned(spec, shape, choice.tile, q)
    if 0 not in grid:
        backward_kernels.d_query[grid](
            *given, held, d_q, *steps, held_steps, steps_of(d_q), *rest, shape.group, spec.scale,
            **maps(spec, choice.tile.k, k=k, v=v), **told, **sizes(shape, choice.tile), **choice.options,
        )  # fmt: skip
    choice = chosen(Pass.D_KEYS, spec, shape, tile)
    grid, *rest = planned(spec, shape, choice.tile, q, by_key=True)
    if 0 not in grid:
        backward_kernels.d_keys[grid](
            *given, d_k, d_v, *steps, steps_of(d_k), steps_of(d_v), *rest, shape.group, spec.scale,
            **maps(spec, choice.tile.q, q=q, d_out=d_out), **maps(spec, choice.tile.q, shift=shift, delta=delta),
            **told, **sizes(shape, choice.tile), **choice.options,
        )  # fmt: skip
    of_sinks = None if spec.sinks is None else d_sinks(tensor(spec.sinks, q.device), saved.lse, delta)
    return Grads(d_q, d_k, d_v, of_sinks, of_arrays(spec, shape, tile, given, turned))
