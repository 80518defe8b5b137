"""Whole sequences to shards and back: words, position ids, labels, q, k and v alike."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.parallel import layout as layouts
from tilewise.parallel.agreement import Facts, agree
from tilewise.parallel.digest import digest
from tilewise.parallel.layout import Layout
from tilewise.parallel.mesh import Ranks, ranks_of


def shard(x: Tensor, mesh: Any, *, dim: int, layout: str | Layout = "contiguous") -> Tensor:
    """This rank's part of x, which every rank has; dim: where the sequence lies.

    layout: "contiguous", "zigzag" (a part from the beginning and one from the end: equal work under a causal mask), or
    a parallel.Layout. Shift labels before they are sharded: a shard's next word may be on another rank.
    """
    ranks = ranks_of(mesh)
    _check(x, dim)
    made = layouts.named(layout, x.shape[dim], ranks.size)
    parts = [x.narrow(dim, rows.start, len(rows)) for rows in made.ranges[ranks.me]]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def unshard(x: Tensor, mesh: Any, *, dim: int, layout: str | Layout = "contiguous") -> Tensor:
    """The whole of which x is this rank's part, on every rank; the opposite of `shard`.

    Its gradient is the sum of what all ranks' losses have: gather to look at results, or divide such a loss by ranks.
    """
    ranks = ranks_of(mesh)
    told = agree(ranks, lambda: _said(x, dim, layout))
    made = layouts.found(layout, [facts["rows"] for facts in told], "x")
    whole: Tensor = _Whole.apply(x, ranks, made, dim % x.dim())
    return whole


def positions(n: int, mesh: Any, *, layout: str | Layout = "contiguous", device: Any = None) -> Tensor:
    """Where this rank's rows stand in a sequence of n: its position ids."""
    ranks = ranks_of(mesh)
    return torch.as_tensor(layouts.named(layout, n, ranks.size).positions(ranks.me), device=device)


def replicated(x: Tensor, mesh: Any) -> Tensor:
    """x, which every rank has alike, with a gradient that is the sum over ranks.

    For a bias, a table or sinks where nothing else joins gradients. DDP and FSDP do it for their parameters, by the
    mean: multiply the loss by the ranks there, or let each rank take its own mean if all have as many rows.
    """
    ranks = ranks_of(mesh)
    agree(ranks, lambda: _sizes(x))
    made: Tensor = _Replicated.apply(x, ranks)
    return made


def _said(x: Any, dim: int, layout: str | Layout) -> Facts:
    """What ranks tell each other of parts that are to be joined."""
    _check(x, dim)
    layouts.check_name(layout)
    at = dim % x.dim()
    others = [size for i, size in enumerate(x.shape) if i != at]
    named = layout if isinstance(layout, str) else digest(layout)
    return {"rows": x.shape[at], "layout": named, "dim": at, **_sizes(x), "sizes of x": others}


def _sizes(x: Any) -> Facts:
    _check_tensor(x)
    learns = torch.is_grad_enabled() and x.requires_grad
    return {"dtype of x": str(x.dtype), "sizes of x": list(x.shape), "a gradient of x": learns}


def _check_tensor(x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a PyTorch tensor, got {type(x).__name__}; pass torch.as_tensor(x)")


def _check(x: Any, dim: Any) -> None:
    _check_tensor(x)
    if isinstance(dim, bool) or not isinstance(dim, Integral) or not -x.dim() <= int(dim) < x.dim():
        raise ValueError(f"dim: expected a dimension of x, which has {x.dim()}, got {dim}")


class _Whole(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, made: Layout, dim: int) -> Tensor:
        ctx.ranks, ctx.made, ctx.dim = ranks, made, dim
        rows = [made.rows(rank) for rank in range(made.ranks)]
        first = x.movedim(dim, 0)
        padded = first.new_zeros(max(rows), *first.shape[1:])
        padded[: len(first)] = first
        gathered = ranks.gather(padded)
        joined = torch.cat([part[:count] for part, count in zip(gathered, rows, strict=True)])
        order = np.argsort(made.positions(*range(made.ranks)))
        return joined[torch.as_tensor(order, device=x.device)].movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, d_whole: Tensor) -> tuple[Any, ...]:
        at = torch.as_tensor(ctx.made.positions(ctx.ranks.me), device=d_whole.device)
        return ctx.ranks.sum(d_whole).index_select(ctx.dim, at), None, None, None


class _Replicated(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(d_x), None
