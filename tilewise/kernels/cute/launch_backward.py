"""A call's gradients: arrays as the kernels of the backward pass take them, and their launch."""

from __future__ import annotations

from typing import Any

import torch

from tilewise import arrays
from tilewise.dispatch import Unsupported
from tilewise.kernels.cute import library, turns
from tilewise.kernels.cute.launch import as_kernels_take, cannot_be_copied, steps_in_order
from tilewise.kernels.cute.rungs import BACKWARD, backward_rung
from tilewise.kernels.cute.wanted import Wanted, kernel_of
from tilewise.kernels.tables import Tables
from tilewise.kernels.uploads import loaded_on, plan_on, planned_on, tensor
from tilewise.pytorch.sinks import d_sinks
from tilewise.spec import Attention, Grads, Partial, Shape, Tile


def backward(spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any, arch: str) -> Grads:
    """Gradients of sum(out * d_out) + sum(lse * d_lse), for (batch, heads, n, d) tensors of a GPU."""
    _check(d_out, q)
    shape = Shape.of(spec, q, k, v, backward=True)
    kernel = kernel_of(backward_rung(spec, shape), spec, shape)
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    *rows, out, d_out = (_copied(x.detach()) for x in (q, k, v, saved.out, d_out))
    rows += [out, _remainder_of(saved), d_out]
    lse = saved.lse.detach().contiguous()
    delta = torch.empty_like(lse)
    d_lse = lse.new_zeros(()).expand(lse.shape) if d_lse is None else d_lse.detach().float()
    loaded = tuple(map(as_kernels_take, loaded_on(spec, q.device))) or (lse.view(-1),)
    given = (steps_in_order(x, kernel.vector) for x in (*rows, d_q, d_k, d_v))
    if 0 not in (shape.batch, shape.heads):
        more = _of_turns if kernel.rung == BACKWARD.name else _of_both_ways
        launch = library.kernel(kernel, arch)
        launch(*given, lse, d_lse, *more(kernel, spec, shape, delta), loaded, spec.scale)
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


def _remainder_of(saved: Partial) -> Any:
    """Where forward kept none, one row of zeros for all: it is read by threads, not by the copy engine."""
    if saved.remainder is None:
        return saved.out.new_zeros(saved.out.shape[-1]).expand(saved.out.shape)
    return _copied(saved.remainder.detach())


def _of_turns(kernel: Wanted, spec: Attention, shape: Shape, delta: Any) -> list[Any]:
    """What backward_sm90 is given behind lse and its gradient."""
    device, tile = delta.device, kernel.tile
    by_query = planned_on(
        device, spec, shape, tile, False, "tiles of queries", lambda made: _numbered(made, spec, shape, tile, device)
    )
    records, runs, visits, key_tiles = planned_on(
        device, spec, shape, tile, True, "turns", lambda made: _in_turns(made, spec, shape, tile, device)
    )
    heads, of_all = (shape.batch, shape.heads), (-1, -1)
    tiles = shape.batch * shape.heads * turns.tiles_of_queries(shape, spec.lengths, tile.q)
    rows, sums = (delta.new_empty((tiles, 2, n)) for n in (tile.q, tile.q * kernel.depth // 2))
    counts = torch.empty(tiles + 1, dtype=torch.int32, device=device)
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    section = turns.section(shape, visits / max(1, key_tiles), blocks)
    items = shape.batch * shape.heads_k * key_tiles
    return [
        delta, rows, sums, counts, by_query.expand(*heads, *of_all), records.expand(*heads, *of_all), runs, section,
        min(blocks, items),
    ]  # fmt: skip


def _numbered(made: Tables, spec: Attention, shape: Shape, tile: Tile, device: Any) -> Any:
    return torch.from_numpy(turns.numbered(made.records, shape, spec.lengths, tile.q)).to(device)


def _in_turns(made: Tables, spec: Attention, shape: Shape, tile: Tile, device: Any) -> tuple[Any, Any, int, int]:
    """Records and runs; visits, of how many key tiles of how many plans."""
    ready = turns.in_turns(made, shape, spec.lengths, tile.q)
    records, runs = (torch.from_numpy(x).to(device) for x in (ready.records, ready.runs))
    plans = made.records.shape[0] * made.records.shape[1]
    return records, runs, made.visits // plans, made.records.shape[2]


def _of_both_ways(kernel: Wanted, spec: Attention, shape: Shape, delta: Any) -> list[Any]:
    """What backward_sm90_twice is given behind lse and its gradient."""
    assert kernel.by_key is not None
    plans = [
        plan_on(delta.device, spec, shape, tile, by_key)
        for tile, by_key in ((kernel.tile, False), (kernel.by_key, True))
    ]
    every = [(plan.records.expand(shape.batch, shape.heads, -1, -1), plan.runs) for plan in plans]
    return [torch.empty_like(delta), delta, *(x for both in every for x in both)]
