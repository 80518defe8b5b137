"""Attention of queries that stay to keys that come from other ranks: around a ring, or all at once.

Both are a way for blocks of keys to arrive; what is done with a block is the same. Partial results over blocks are
merged in float32. Gradients of a block's keys go straight back to the rank that has them, which adds them in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import softmax, wire
from tilewise.parallel.layout import Layout, joined
from tilewise.parallel.needs import Needs, Ranges
from tilewise.parallel.team import Pending, Team
from tilewise.pytorch import operator
from tilewise.pytorch.sinks import d_sinks
from tilewise.spec import Attention, Partial, Positions, Shape

METHODS = ("ring", "gather")


class Piece(NamedTuple):
    """Keys and values, or their gradients, of a range of the sequence."""

    rows: range
    k: Tensor
    v: Tensor

    def cut(self, rows: range) -> Piece:
        part = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        return Piece(rows, self.k[:, :, part], self.v[:, :, part])


class Block(NamedTuple):
    """Pieces that arrived together, and the ranks that have them."""

    owners: tuple[int, ...]
    pieces: list[Piece]


class Given(NamedTuple):
    """What a call was given: this rank's shards, the arrays that its variant reads, which of them want gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    arrays: Sequence[Tensor]
    wanted: Sequence[bool]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, *self.arrays


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention of a team: what to compute, how the sequence lies, and which keys travel where."""

    team: Team
    spec: Attention  # without sinks, which join the row sum once, when all is merged
    shape: Shape  # of the whole sequence
    queries: Layout
    keys: Layout
    needs: Needs
    method: str
    kernel: str

    @property
    def me(self) -> int:
        return self.team.me

    def line(self, queries: range, keys: range) -> str:
        """The call on a part of the sequence, as the operator reads it: positions stay those of the whole."""
        where = Positions(queries.start, keys.start, self.shape.total_q, self.shape.total_k)
        return wire.encode(replace(self.spec, positions=where), self.kernel)[0]

    def parts(self) -> list[tuple[range, slice]]:
        """This rank's ranges of queries, and where they lie in its shard."""
        return _places(self.queries.ranges[self.me])

    def sizes(self, rows: Ranges) -> list[tuple[int, ...]]:
        """Of the keys and values of these ranges."""
        s = self.shape
        return [(s.batch, s.heads_k, len(x), d) for x in rows for d in (s.d, s.d_v)]


def attention(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arrays: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries over all keys; differentiable in everything that it is given."""
    out, lse = _Attention.apply(problem, q, k, v, sinks, *arrays)
    return out, lse


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, problem: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *arrays: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(problem, q, k, v, sinks, arrays)
        ctx.problem = problem
        ctx.save_for_backward(q, k, v, sinks, out, lse, *arrays)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse, *arrays = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        given = Given(q, k, v, arrays, ctx.needs_input_grad[5:])
        d_q, d_k, d_v, *d_arrays = _backward(ctx.problem, given, Partial(out, lse), d_out, d_lse)
        return None, d_q, d_k, d_v, _of_sinks(sinks, out, lse, d_out, d_lse), *d_arrays


def _forward(p: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arrays: Sequence[Tensor]) -> Partial:
    parts = p.parts()
    merged: list[Partial | None] = [None] * len(parts)
    for block in _arriving(p, k, v):
        for i, (rows, place) in enumerate(parts):
            for piece in block.pieces:
                if p.needs.is_empty(rows, piece.rows):
                    continue
                found = operator.attention(q[:, :, place], piece.k, piece.v, arrays, None, p.line(rows, piece.rows))
                merged[i] = _merged(merged[i], Partial(*found))
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=_wide(q))
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=_wide(q))
    for (_, place), part in zip(parts, merged, strict=True):
        if part is not None:
            out[:, :, place], lse[:, :, place] = part
    out, lse = (out, lse) if sinks is None else softmax.merge([Partial(out, lse)], sinks)
    return Partial(out.to(q.dtype), lse.to(_wide(q)))


def _merged(before: Partial | None, found: Partial) -> Partial:
    return found if before is None else softmax.merge([before, found])


def _of_sinks(sinks: Any, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Tensor | None:
    if sinks is None:
        return None
    delta = (out.to(lse.dtype) * d_out).sum(-1)
    found: Tensor = d_sinks(sinks, lse, delta if d_lse is None else delta - d_lse)
    return found


def _backward(p: Problem, given: Given, saved: Partial, d_out: Tensor, d_lse: Tensor | None) -> tuple[Any, ...]:
    walk, sums = _Gradients(p, given, saved, d_out, d_lse), _Sums(p, given.k, given.v)
    for block in _arriving(p, given.k, given.v):
        sums.take(block.owners, [walk.through(piece) for piece in block.pieces])
    d_k, d_v = sums.finish()
    found = walk.d_q, d_k, d_v, *map(walk.d_arrays.get, range(len(given.arrays)))
    return tuple(None if x is None else x.to(like.dtype) for x, like in zip(found, given.tensors, strict=True))


class _Gradients:
    """Gradients of this rank's queries, piece by piece. Weights come from the lse over all keys, so that what a piece
    gives is a term of a sum."""

    def __init__(self, p: Problem, given: Given, saved: Partial, d_out: Tensor, d_lse: Tensor | None) -> None:
        self.p, self.given, self.saved, self.d_out, self.d_lse = p, given, saved, d_out, d_lse
        self.d_q = torch.zeros_like(given.q, dtype=_wide(given.q))
        self.wanted = [i for i in wire.score_arrays(p.line(range(0), range(0))) if given.wanted[i]]
        # A rank that sees nothing has gradients too, all 0: whoever adds them up waits for every rank's.
        self.d_arrays = {i: torch.zeros_like(x, dtype=_wide(x)) for i, x in enumerate(given.arrays) if i in self.wanted}

    def through(self, piece: Piece) -> Piece:
        """Adds what a piece gives to the queries and arrays; returns its own gradients."""
        d_piece = Piece(piece.rows, *(torch.zeros_like(x, dtype=_wide(x)) for x in piece[1:]))
        for rows, place in self.p.parts():
            if not self.p.needs.is_empty(rows, piece.rows):
                d_q, d_k, d_v = self._of(rows, place, piece)
                self.d_q[:, :, place] += d_q
                d_piece.k.add_(d_k)
                d_piece.v.add_(d_v)
        return d_piece

    def _of(self, rows: range, place: slice, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        line = self.p.line(rows, piece.rows)
        of_rows = (self.given.q, self.saved.out, self.saved.lse, self.d_out, self.d_lse)
        q, out, lse, d_out, d_lse = (None if x is None else x[:, :, place] for x in of_rows)
        d_q, d_k, d_v, d_arrays = operator.attention_backward(
            q, piece.k, piece.v, self.given.arrays, None, line, out, lse, d_out, d_lse, self.wanted
        )
        for i, part in zip(self.wanted, d_arrays, strict=True):
            self.d_arrays[i] += part
        return d_q, d_k, d_v


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# -- how blocks of keys arrive ----------------------------------------------------------------------------------------


def _arriving(p: Problem, k: Tensor, v: Tensor) -> Iterator[Block]:
    own = [Piece(rows, k[:, :, place], v[:, :, place]) for rows, place in _places(p.keys.ranges[p.me])]
    return _around_the_ring(p, own, k) if p.method == "ring" else _all_at_once(p, own, k)


def _around_the_ring(p: Problem, held: list[Piece], like: Tensor) -> Iterator[Block]:
    """Each rank hands on to its neighbour what it had last, while it computes with it. A block goes as far as it is
    needed, and no row of it farther."""
    size, after, before = p.team.size, (p.me + 1) % p.team.size, (p.me - 1) % p.team.size
    for hops in range(size):
        owner, coming = (p.me - hops) % size, (before - hops) % size
        pending = None
        if hops + 1 < size:
            rows = p.needs.beyond(coming, hops + 1)
            going = _cut(held, p.needs.beyond(owner, hops + 1))
            pending = p.team.exchange({after: _tensors(going)}, {before: p.sizes(rows)}, like)
        yield Block((owner,), _cut(held, p.needs.of[p.me][owner]))
        if pending is not None:
            held = _pieces(rows, pending.wait()[before])


def _all_at_once(p: Problem, own: list[Piece], like: Tensor) -> Iterator[Block]:
    """Each rank sends what the others need of its keys. Those that lie side by side become one piece."""
    table = p.needs.of
    sends = {peer: _tensors(_cut(own, table[peer][p.me])) for peer in p.team.others}
    came = p.team.exchange(sends, {peer: p.sizes(table[p.me][peer]) for peer in p.team.others}, like).wait()
    pieces = _cut(own, table[p.me][p.me])
    for peer, tensors in came.items():
        pieces += _pieces(table[p.me][peer], tensors)
    yield Block(tuple(range(p.team.size)), _side_by_side(pieces))


def _side_by_side(pieces: list[Piece]) -> list[Piece]:
    pieces = sorted(pieces, key=lambda piece: piece.rows.start)
    made = []
    for rows in joined(piece.rows for piece in pieces):
        inside = [piece for piece in pieces if piece.rows.start in rows]
        whole = (torch.cat(each, 2) for each in zip(*(piece[1:] for piece in inside), strict=True))
        made.append(inside[0] if len(inside) == 1 else Piece(rows, *whole))
    return made


def _places(ranges: Ranges) -> list[tuple[range, slice]]:
    """Ranges of the sequence, and where they lie in a shard that has one after the other."""
    made, end = [], 0
    for rows in ranges:
        made.append((rows, slice(end, end + len(rows))))
        end += len(rows)
    return made


def _cut(pieces: Sequence[Piece], ranges: Ranges) -> list[Piece]:
    """The rows of these ranges, each of which lies in one of the pieces."""
    return [piece.cut(rows) for rows in ranges for piece in pieces if rows.start in piece.rows]


def _tensors(pieces: Sequence[Piece]) -> list[Tensor]:
    return [x for piece in pieces for x in piece[1:]]


def _pieces(ranges: Ranges, tensors: Sequence[Tensor]) -> list[Piece]:
    return [Piece(*each) for each in zip(ranges, tensors[::2], tensors[1::2], strict=True)]


# -- how their gradients go back --------------------------------------------------------------------------------------


class _Sums:
    """The gradients of this rank's keys and values: its own, and what others send back, in the same order each time."""

    def __init__(self, p: Problem, k: Tensor, v: Tensor) -> None:
        self.p, self.like = p, k
        self.d_k, self.d_v = (torch.zeros_like(x, dtype=_wide(x)) for x in (k, v))
        self.own = [Piece(rows, self.d_k[:, :, at], self.d_v[:, :, at]) for rows, at in _places(p.keys.ranges[p.me])]
        self.pending: Pending | None = None

    def take(self, owners: Sequence[int], found: list[Piece]) -> None:
        """Gradients of a block: what is this rank's own is added, the rest is sent to those that have it, in the type
        of the keys, which kernels' gradients are rounded to anyway; and what they found of ours comes."""
        table, me, size = self.p.needs.of, self.p.me, self.p.team.size
        self._add()
        if me in owners:
            self._add_pieces(_cut(found, table[me][me]))
        sends = {peer: self._rounded(_cut(found, table[me][peer])) for peer in owners if peer != me}
        # In step with this rank, which has `peer`'s block, the rank as far ahead has ours.
        givers = [(2 * me - peer) % size for peer in sends]
        receives = {giver: self.p.sizes(table[giver][me]) for giver in sorted(givers)}
        self.pending = self.p.team.exchange(sends, receives, self.like) if sends else None

    def finish(self) -> tuple[Tensor, Tensor]:
        self._add()
        return self.d_k, self.d_v

    def _add(self) -> None:
        came = {} if self.pending is None else self.pending.wait()
        for giver, tensors in came.items():
            self._add_pieces(_pieces(self.p.needs.of[giver][self.p.me], tensors))
        self.pending = None

    def _add_pieces(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            (total,) = _cut(self.own, (piece.rows,))
            total.k.add_(piece.k)
            total.v.add_(piece.v)

    def _rounded(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [x.to(self.like.dtype) for x in _tensors(pieces)]
