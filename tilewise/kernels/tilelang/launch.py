"""A call's kernels: which, on what, and with which arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tilewise import arrays
from tilewise.derivative import ONE, score_slopes
from tilewise.expr import S
from tilewise.kernels.tilelang.build import Variant, variant_of
from tilewise.kernels.tilelang.call import Call, row_places
from tilewise.kernels.tilelang.choices import Pass
from tilewise.kernels.tilelang.launch_gradients import of_arrays
from tilewise.kernels.uploads import tensor
from tilewise.pytorch.sinks import d_sinks
from tilewise.spec import Attention, Grads, Partial, Shape, Tile


def forward(spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None, target: str) -> Partial:
    """Attention on (batch, heads, n, d) tensors."""
    shape = Shape.of(spec, q, k, v)
    out = torch.empty_strided(*arrays.stored_as(q, v), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    sinks = None if spec.sinks is None else tensor(spec.sinks, q.device).float().contiguous()
    if shape.n_k == 0:
        out.zero_()
        lse.copy_(torch.full_like(lse, -torch.inf) if sinks is None else sinks[:, None].expand(lse.shape))
    if 0 not in (shape.batch, shape.heads, shape.n_q, shape.n_k):
        call = Call(spec, shape, target, Pass.FORWARD, tile, variant_of(spec), (q, k, v, out))
        call.plan()
        call.give(q=q, k=k, v=v, sinks=lse if sinks is None else sinks)
        call.take(out=out, lse=lse)
        call.launch("forward")
    return Partial(out, lse)


def backward(
    spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any, tile: Tile | None, target: str
) -> Grads:
    """Gradients of sum(out * d_out) + sum(lse * d_lse), in the type of q, which all arrays have."""
    shape = Shape.of(spec, q, k, v, backward=True)
    shift, delta = _of_rows(spec, shape, target, tile, saved, d_out, d_lse)
    given = {"q": q, "k": k, "v": v, "d_out": d_out, "shift": shift, "delta": delta}
    d_q, d_k, d_v = _of_operands(spec, shape, target, tile, given)
    sinks = None if spec.sinks is None else d_sinks(tensor(spec.sinks, q.device), saved.lse, delta[..., : shape.n_q])
    return Grads(d_q, d_k, d_v, sinks, of_arrays(spec, shape, target, tile, given))


def _of_rows(
    spec: Attention, shape: Shape, target: str, tile: Tile | None, saved: Partial, d_out: Any, d_lse: Any
) -> tuple[Any, Any]:
    """What weights are recomputed with: shift and delta."""
    sizes = (*d_out.shape[:2], row_places(shape.n_q))
    shift, delta = (torch.zeros(sizes, dtype=torch.float32, device=d_out.device) for _ in range(2))
    if 0 not in (*sizes, shape.d_v):
        call = Call(spec, shape, target, Pass.ROWS, tile, Variant({}, ()), (saved.out, d_out))
        call.give(out=saved.out, d_out=d_out, lse=saved.lse)
        call.give(d_lse=torch.zeros_like(saved.lse) if d_lse is None else d_lse)
        call.take(shift=shift, delta=delta)
        call.launch("rows")
    return shift, delta


def _of_operands(
    spec: Attention, shape: Shape, target: str, tile: Tile | None, given: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """The gradients of q, k and v."""
    q, k, v, d_out, *_ = given.values()
    is_empty = 0 in (shape.batch, shape.heads, shape.n_q, shape.n_k)
    made = torch.zeros if is_empty or spec.lengths is not None else torch.empty  # every row has a tile that stores it
    d_q, summed = made(q.shape, dtype=q.dtype, device=q.device), torch.float32 if shape.group > 1 else q.dtype
    d_k, d_v = (made((*q.shape[:2], *x.shape[2:]), dtype=summed, device=q.device) for x in (k, v))
    if spec.lengths is not None:
        d_q, d_k, d_v = map(_by_tokens, (d_q, d_k, d_v))
    if not is_empty:
        slope = score_slopes(spec)[S]
        variant = variant_of(spec, **({} if slope is ONE else {"slope": slope}))
        for kind, results in ((Pass.D_QUERY, {"d_q": d_q}), (Pass.D_KEYS, {"d_k": d_k, "d_v": d_v})):
            call = Call(spec, shape, target, kind, tile, variant, (q, k, v, d_out, *results.values()))
            call.plan(by_key=kind is Pass.D_KEYS)
            call.give(**given)
            call.take(**results)
            call.launch(kind.value)
    return d_q, *(_of_key_heads(x, shape).to(q.dtype) for x in (d_k, d_v))


def _of_key_heads(x: Any, shape: Shape) -> Any:
    """The sums over the query heads that share a key head."""
    return x if shape.group <= 1 else x.unflatten(1, (shape.heads_k, shape.group)).sum(2)


def _by_tokens(x: Any) -> Any:
    """The same, (total, heads, d) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def simple(spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None, target: str) -> Partial:
    """The same by the kernel that has one head, again and again."""
    shape = Shape.of(spec, q, k, v)
    out = torch.empty_strided(*arrays.stored_as(q, v), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for b, h in np.ndindex(*lse.shape[:2] if shape.n_q else (0, 0)):
        one, lse_of_one = torch.empty_like(out[b, h], memory_format=torch.contiguous_format), lse[b, h].clone()
        call = Call(spec, shape, target, Pass.SIMPLE, tile, variant_of(spec), ())
        heads = {"q": q[b, h], "k": k[b, h // shape.group], "v": v[b, h // shape.group]}
        call.give(**{name: x.clone(memory_format=torch.contiguous_format) for name, x in heads.items()})
        call.take(out=one, lse=lse_of_one)
        call.launch("simple")
        out[b, h], lse[b, h] = one, lse_of_one
    return Partial(out, lse)
