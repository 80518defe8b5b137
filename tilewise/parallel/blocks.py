"""How keys and values travel: around a ring, or all at once; and how their gradients go back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import wire
from tilewise.parallel.layout import Layout, joined
from tilewise.parallel.needs import Needs, Ranges
from tilewise.parallel.team import Pending, Team
from tilewise.spec import Attention, Positions, Shape


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
        return self._line(self.spec, queries, keys)

    def line_forward(self, queries: range, keys: range) -> str:
        """The same of a forward pass, whose results are merged before they are rounded."""
        return self._line(replace(self.spec, wide_out=True), queries, keys)

    def _line(self, spec: Attention, queries: range, keys: range) -> str:
        where = Positions(queries.start, keys.start, self.shape.total_q, self.shape.total_k)
        return wire.encode(replace(spec, positions=where), self.kernel)[0]

    def parts(self) -> list[tuple[range, slice]]:
        """This rank's ranges of queries, and where they lie in its shard."""
        return _places(self.queries.ranges[self.me])

    def sizes(self, rows: Ranges) -> list[tuple[int, ...]]:
        """Of the keys and values of these ranges."""
        s = self.shape
        return [(s.batch, s.heads_k, len(x), d) for x in rows for d in (s.d, s.d_v)]

    def computed(self, x: Tensor) -> Tensor:
        """As kernels are given it. On the CPU half precision is computed in float32 anyway: asked for that, kernels
        take no longer and round no gradient of a part. On a GPU these are rounded before they are added."""
        widens = x.device.type == "cpu" and self.kernel in ("auto", "cpu", "numpy")
        return x.to(wide(x)) if widens else x

    def computed_piece(self, piece: Piece) -> Piece:
        return Piece(piece.rows, self.computed(piece.k), self.computed(piece.v))


def wide(x: Tensor) -> torch.dtype:
    """What sums of it are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# -- how blocks of keys arrive ----------------------------------------------------------------------------------------


def arriving(p: Problem, k: Tensor, v: Tensor) -> Iterator[Block]:
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
        yield Block((owner,), _cut(held, p.needs.of(p.me, owner)))
        if pending is not None:
            held = _pieces(rows, pending.wait()[before])


def _all_at_once(p: Problem, own: list[Piece], like: Tensor) -> Iterator[Block]:
    """Each rank sends what the others need of its keys. Those that lie side by side become one piece."""
    needs, me = p.needs.of, p.me
    sends = {peer: _tensors(_cut(own, needs(peer, me))) for peer in p.team.others}
    came = p.team.exchange(sends, {peer: p.sizes(needs(me, peer)) for peer in p.team.others}, like).wait()
    pieces = _cut(own, needs(me, me))
    for peer, tensors in came.items():
        pieces += _pieces(needs(me, peer), tensors)
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


class Sums:
    """The gradients of this rank's keys and values: its own, and what others send back, in the same order each time."""

    def __init__(self, p: Problem, k: Tensor, v: Tensor) -> None:
        self.p, self.like = p, k
        self.d_k, self.d_v = (torch.zeros_like(x, dtype=wide(x)) for x in (k, v))
        self.own = [Piece(rows, self.d_k[:, :, at], self.d_v[:, :, at]) for rows, at in _places(p.keys.ranges[p.me])]
        self.pending: Pending | None = None

    def take(self, owners: Sequence[int], found: list[Piece]) -> None:
        """Gradients of a block: what is this rank's own is added, the rest is sent to those that have it, in the type
        of the keys, which kernels' gradients are rounded to anyway; and what they found of ours comes."""
        needs, me, size = self.p.needs.of, self.p.me, self.p.team.size
        self._add()
        if me in owners:
            self._add_pieces(_cut(found, needs(me, me)))
        sends = {peer: self._rounded(_cut(found, needs(me, peer))) for peer in owners if peer != me}
        # In step with this rank, which has `peer`'s block, the rank as far ahead has ours.
        givers = [(2 * me - peer) % size for peer in sends]
        receives = {giver: self.p.sizes(needs(giver, me)) for giver in sorted(givers)}
        self.pending = self.p.team.exchange(sends, receives, self.like) if sends else None

    def finish(self) -> tuple[Tensor, Tensor]:
        self._add()
        return self.d_k, self.d_v

    def _add(self) -> None:
        came = {} if self.pending is None else self.pending.wait()
        for giver, tensors in came.items():
            self._add_pieces(_pieces(self.p.needs.of(giver, self.p.me), tensors))
        self.pending = None

    def _add_pieces(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            (total,) = _cut(self.own, (piece.rows,))
            total.k.add_(piece.k)
            total.v.add_(piece.v)

    def _rounded(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [x.to(self.like.dtype) for x in _tensors(pieces)]
