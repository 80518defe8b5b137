"""From the arguments of one rank to its part of the result: what all agree on, the method, the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise import arrays, dispatch, validate, wire
from tilewise.arrays import Array
from tilewise.expr import KP, QP, Expr, K, Q, substitute
from tilewise.parallel import cost, dtensors, heads, layout, packed, sequence
from tilewise.parallel.agreement import Facts, agree
from tilewise.parallel.blocks import Problem
from tilewise.parallel.cost import Cost, Machine
from tilewise.parallel.digest import digest
from tilewise.parallel.groups import carrier
from tilewise.parallel.heads import Swap
from tilewise.parallel.layout import Layout
from tilewise.parallel.mesh import Ranks, ranks_of
from tilewise.pytorch import front
from tilewise.rope import Rope, places
from tilewise.rotating import apply_rope
from tilewise.spec import Attention, Positions, Shape
from tilewise.validate import Call


@dataclass(frozen=True, eq=False)
class Arguments:
    """Of one rank, as its caller gave them. options: what to compute, as `tw.attention` takes it."""

    q: Any
    k: Any
    v: Any
    lengths: Any  # of packed sequences, both
    mesh: Any
    layout: Any
    method: str
    kernel: str
    options: dict[str, Any]

    @property
    def dim(self) -> int:
        """Where the sequence lies."""
        return -2 if self.lengths is None else 0

    def local(self) -> Arguments:
        """With this rank's tensors, of the type computed with."""
        q, k, v = dtensors.local(self.q, self.k, self.v, dtensors.mesh_of(self.mesh, self.q), self.dim)
        if not arrays.is_torch(q):
            raise TypeError(f"q: expected a PyTorch tensor, got {type(q).__name__}; pass torch.as_tensor(q)")
        q, k, v = front.autocast(q, k, v)
        return replace(self, q=q, k=k, v=v)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A call that every rank agrees on: the whole attention, and this rank's shards, (batch, heads, n, d)."""

    ranks: Ranks
    spec: Attention  # dense, of the whole sequence, without sinks and rotary embedding
    shape: Shape  # likewise
    sinks: Any
    q: Tensor
    k: Tensor
    v: Tensor
    rank: int  # of the caller's arrays, or PACKED
    queries: Layout
    keys: Layout
    machine: Machine
    costs: list[Cost]
    kernel: str

    @property
    def taken(self) -> Cost:
        return cost.least(self.costs, self.machine)


def prepare(given: Arguments) -> Prepared:
    """In two rounds: sizes first, which tell the whole sequence's, then what is made of them."""
    ranks = ranks_of(dtensors.mesh_of(given.mesh, given.q, given.k, given.v))
    own: list[Arguments] = []
    made: list[Prepared] = []

    def begin() -> Facts:
        own.append(given.local())
        return _sizes(own[0], ranks)

    def settle() -> Facts:
        sizes = ([facts[name] for facts in told] for name in ("queries", "keys"))
        queries, keys = (layout.found(given.layout, each, name) for each, name in zip(sizes, "qk", strict=True))
        made.append(_settled(own[0], ranks, queries, keys))
        return _said(made[0])

    told = agree(ranks, begin)
    agree(ranks, settle)
    ranks.begin(own[0].q.device)
    return made[0]


def _sizes(given: Arguments, ranks: Ranks) -> Facts:
    """What a shard tells by itself; as far as it is right by itself."""
    q, k, v = given.q, given.k, given.v
    layout.check_name(given.layout)
    dispatch.check_name(given.kernel)
    if given.method not in cost.METHODS:
        raise ValueError(f"method: expected one of {', '.join(cost.METHODS)}, got {given.method!r}")
    call = validate.outline(q, k, v) if given.lengths is None else validate.outline_varlen(q, k, v, *given.lengths)
    for group in ranks.groups:
        carrier(group, q.device)
    s = call.shape
    return {
        "queries": s.n_q, "keys": s.n_k, "batch": s.batch, "heads": s.heads, "heads of keys": s.heads_k,
        "head dimension": s.d, "head dimension of values": s.d_v, "dtype": s.dtype, "device": q.device.type,
        "dimensions": call.rank, "layout": given.layout if isinstance(given.layout, str) else digest(given.layout),
        "method": given.method, "kernel": given.kernel, "gradients of q, k and v": _learned(q, k, v),
    }  # fmt: skip


def _learned(*tensors: Any) -> list[bool]:
    """Which want gradients: a rank that has one would wait for the others' in vain if they have none."""
    return [torch.is_grad_enabled() and bool(getattr(x, "requires_grad", False)) for x in tensors]


def _settled(given: Arguments, ranks: Ranks, queries: Layout, keys: Layout) -> Prepared:
    """Checked as one process would check it, on stand-ins for the whole sequence that take no memory."""
    q, k, v, lengths = given.q, given.k, given.v, given.lengths
    options = {**given.options}
    rope = options.pop("rope")
    whole = [_whole(x, n, lengths is not None) for x, n in ((q, queries.n), (k, keys.n), (v, keys.n))]
    if lengths is None:
        call = validate.prepare(*whole, **options)
    else:
        call = validate.prepare_varlen(*whole, *lengths, **options)
    q, k, v = (call.expand(x) for x in (q, k, v))
    if rope is not None:
        q, k = _turned(rope, call, q, k, queries.positions(ranks.me), keys.positions(ranks.me))
    spec = _dense(call.spec, q)
    placed = replace(spec, positions=Positions(0, 0, queries.n, keys.n), wide_out=True)  # as parts of it will be
    dispatch.resolve(given.kernel, placed, call.shape)  # what it raises, it raises on all ranks alike
    machine = cost.CPU if q.device.type == "cpu" else cost.H100
    ways = cost.ways(ranks.size, ranks.sizes, call.shape, given.method)
    on_host = _dense(call.spec, np.zeros(0))  # where packed sequences begin and end is known there
    costs = cost.costs(ways, on_host, call.shape, queries, keys, machine)
    return Prepared(
        ranks, spec, call.shape, call.spec.sinks, q, k, v, call.rank, queries, keys, machine, costs, given.kernel
    )


def _whole(x: Tensor, n: int, is_packed: bool) -> Tensor:
    size = (n, *x.shape[1:]) if is_packed else (*x.shape[:-2], n, x.shape[-1])
    return x.new_zeros(x.shape[-1]).expand(size)


def _turned(rope: Rope, call: Call, q: Tensor, k: Tensor, at_q: Any, at_k: Any) -> tuple[Tensor, Tensor]:
    """q and k are turned before they travel, at the rope's own positions, which are shards too, or at counted ones."""
    if rope.positions is not None:
        given_k = rope.positions if rope.positions_k is None else rope.positions_k
        return apply_rope(q, rope, positions=rope.positions), apply_rope(k, rope, positions=given_k)
    counted = (_numbered(each) for each in places(rope, call.shape, call.spec.lengths))
    places_q, places_k = (
        torch.as_tensor(each[at], device=q.device) for each, at in zip(counted, (at_q, at_k), strict=True)
    )
    return apply_rope(q, rope, positions=places_q), apply_rope(k, rope, positions=places_k)


def _numbered(ranges: tuple[range, ...]) -> Array:
    return np.concatenate([np.arange(x.start, x.stop) for x in (range(0), *ranges)])


def _dense(spec: Attention, like: Tensor) -> Attention:
    """Packed sequences as one; and QP and KP, which count from a part's beginning, as the positions that they are."""
    if spec.lengths is None:
        return _over(replace(spec, sinks=None), lambda expr: substitute(expr, {QP: Q, KP: K}))
    same = packed.same_sequence(spec.lengths, like)
    made = _over(replace(spec, sinks=None, lengths=None), packed.within(spec.lengths, like))
    return replace(made, mask=same if made.mask is None else same & made.mask)


def _over(spec: Attention, change: Callable[[Expr], Expr]) -> Attention:
    mask, score = (None if expr is None else change(expr) for expr in (spec.mask, spec.score))
    return replace(spec, mask=mask, score=score)


def _said(p: Prepared) -> Facts:
    """What ranks must have alike beside sizes: the variant, its arrays' sizes, and which keys travel."""
    line, named = wire.encode(p.spec, p.kernel)
    return {
        "variant": line if len(line) < 500 else digest(line),
        "arrays": digest([(arrays.dtype_name(x), tuple(x.shape)) for x in named]),
        "sinks": p.sinks is not None,
        "gradients of arrays and sinks": _learned(*named, p.sinks),
        "mask, its arrays or lengths, by a number for the keys that travel": p.taken.needs.digest,
        "way": p.taken.way.named(p.ranks.size),
    }


# -- running it -------------------------------------------------------------------------------------------------------


def run(p: Prepared) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries, in the caller's layout."""
    size = p.taken.way.heads
    near, far = p.ranks.teams(size)
    out, lse = _by_sequence(p, far, p.q, p.k, p.v, p.sinks, p.spec, p.shape) if size == 1 else _by_heads(p, near, far)
    return validate.restore(out, p.rank), validate.restore(lse, p.rank)


def _by_heads(p: Prepared, near: Any, far: Any) -> tuple[Tensor, Tensor]:
    """Rows for heads among neighbours, attention of those heads, and heads for rows again."""
    heads_q, heads_k = heads.shares(p.shape.heads, p.shape.heads_k, near.size)
    members = range(p.ranks.me - near.me, p.ranks.me - near.me + near.size)
    swap_q, swap_k = (
        Swap(near, each, [lay.rows(rank) for rank in members])
        for each, lay in ((heads_q, p.queries), (heads_k, p.keys))
    )
    order_q, order_k = (_order(lay, members, p.q.device) for lay in (p.queries, p.keys))
    q = _in_order(swap_q.to_heads(p.q), order_q)
    k, v = (_in_order(swap_k.to_heads(x), order_k) for x in (p.k, p.v))
    own_q, own_k = heads_q[near.me], heads_k[near.me]
    spec = _over(p.spec, heads.part_of(own_q, own_k))
    shape = replace(p.shape, heads=len(own_q), heads_k=len(own_k))
    sinks = None if p.sinks is None else p.sinks[own_q.start : own_q.stop]
    out, lse = _by_sequence(p, far, q, k, v, sinks, spec, shape)
    back = None if order_q is None else torch.argsort(order_q)
    out, lse = (swap_q.to_rows(_in_order(x, back)) for x in (out, lse[..., None]))
    return out, lse[..., 0]


def _order(lay: Layout, members: range, device: Any) -> Tensor | None:
    """The rows of several ranks in the sequence's order; None if they are."""
    positions = lay.positions(*members)
    if np.all(np.diff(positions) > 0):
        return None
    return torch.as_tensor(np.argsort(positions), device=device)


def _in_order(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.index_select(2, order)


def _by_sequence(
    p: Prepared, team: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, spec: Attention, shape: Shape
) -> tuple[Tensor, Tensor]:
    way = p.taken.way
    queries, keys = p.queries.joined(way.heads), p.keys.joined(way.heads)
    problem = Problem(team, spec, shape, queries, keys, p.taken.needs, way.sequence, p.kernel)
    return sequence.attention(problem, q, k, v, sinks, front.operands(spec, wire.encode(spec, p.kernel)[1], q.device))
