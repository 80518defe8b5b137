"""Heads in exchange for rows: each rank of a team gets some heads of all the rows that the team has (Ulysses).

Attention then needs nothing from the others, and the result goes back the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewise.expr import HK, Expr, H, load_slot, rebuild
from tilewise.parallel.team import Team
from tilewise.walking import nodes


def refusal(heads: int, heads_k: int, size: int) -> str | None:
    """Why so many ranks cannot share the heads, or None: each takes as many, and whole groups or parts of one."""
    if heads % size:
        return f"{heads} heads cannot be shared evenly by {size} ranks"
    own, group = heads // size, heads // heads_k
    if own % group and group % own:
        return f"{own} heads a rank are neither whole groups of {group} query heads nor an even part of one"
    return None


def shares(heads: int, heads_k: int, size: int) -> tuple[list[range], list[range]]:
    """The heads of queries, and of keys, that each rank takes. Ranks that share a group all take its keys."""
    own, group = heads // size, heads // heads_k
    queries = [range(i * own, (i + 1) * own) for i in range(size)]
    return queries, [range(x.start // group, -(-x.stop // group)) for x in queries]


@dataclass(frozen=True, eq=False)
class Swap:
    """Rows for heads: which heads each rank of the team takes, and how many rows each has."""

    team: Team
    heads: list[range]
    rows: list[int]

    def to_heads(self, x: Tensor) -> Tensor:
        """(batch, all heads, own rows, d) to (batch, own heads, the team's rows, d); differentiable."""
        done: Tensor = _Swapped.apply(self, x, True)
        return done

    def to_rows(self, x: Tensor) -> Tensor:
        """The way back."""
        done: Tensor = _Swapped.apply(self, x, False)
        return done

    def spread(self, x: Tensor) -> Tensor:
        own = self.heads[self.team.me]
        sends = {peer: [x[:, _slice(self.heads[peer])]] for peer in self.team.others}
        sizes = {peer: [(x.shape[0], len(own), self.rows[peer], x.shape[3])] for peer in self.team.others}
        came = self.team.exchange(sends, sizes, x).wait()
        came[self.team.me] = [x[:, _slice(own)]]
        return torch.cat([came[peer][0] for peer in range(self.team.size)], dim=2)

    def collect(self, x: Tensor) -> Tensor:
        """Heads that several ranks had are added up, as their gradients are."""
        parts = dict(enumerate(x.split(self.rows, dim=2)))
        own = parts[self.team.me]
        sizes = {peer: [(x.shape[0], len(self.heads[peer]), *own.shape[2:])] for peer in self.team.others}
        came = self.team.exchange({peer: [parts[peer]] for peer in self.team.others}, sizes, x).wait()
        came[self.team.me] = [own]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        made = x.new_zeros(x.shape[0], max(each.stop for each in self.heads), *own.shape[2:], dtype=wide)
        for peer in range(self.team.size):
            made[:, _slice(self.heads[peer])] += came[peer][0]
        return made.to(x.dtype)


class _Swapped(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, swap: Swap, x: Tensor, to_heads: bool) -> Tensor:
        ctx.swap, ctx.to_heads = swap, to_heads
        return swap.spread(x) if to_heads else swap.collect(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.swap.collect(d_x) if ctx.to_heads else ctx.swap.spread(d_x), None


def _slice(x: range) -> slice:
    return slice(x.start, x.stop)


# -- expressions ------------------------------------------------------------------------------------------------------


def part_of(heads: range, heads_k: range) -> Callable[[Expr], Expr]:
    """Expressions as these heads alone see them, counted from 0: arrays that are read by H or HK lose the others'
    rows. One that is read twice stays one array, so that it has one gradient."""
    own = {id(H): (heads, H + heads.start), id(HK): (heads_k, HK + heads_k.start)}
    cut: dict[Any, Any] = {}

    def narrowed(array: Any, axes: tuple[tuple[int, range], ...]) -> Any:
        key = (id(array), axes)
        if key not in cut:
            kept = dict(axes)
            cut[key] = array[tuple(_slice(kept[i]) if i in kept else slice(None) for i in range(len(array.shape)))]
        return cut[key]

    def change(expr: Expr) -> Expr:
        new: dict[int, Expr] = {}
        for node in nodes(expr):
            if node.op == "load":
                axes = tuple((i, own[id(arg)][0]) for i, arg in enumerate(node.args) if id(arg) in own)
                slot = replace(node.payload, array=narrowed(node.payload.array, axes)) if axes else node.payload
                new[id(node)] = load_slot(slot, *(arg if id(arg) in own else new[id(arg)] for arg in node.args))
            else:
                moved = own.get(id(node))
                new[id(node)] = rebuild(node, tuple(new[id(a)] for a in node.args)) if moved is None else moved[1]
        return new[id(expr)]

    return change
