"""Attention of queries that stay to keys that come from other ranks.

Partial results over blocks of keys are merged in float32; what rounding takes from the merged out is kept for the
backward pass. Gradients of a block's keys go straight back to the rank that has them, which adds them in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import softmax, wire
from tilewise.parallel.blocks import Piece, Problem, Sums, arriving, wide
from tilewise.pytorch import operator
from tilewise.pytorch.sinks import d_sinks
from tilewise.spec import Partial


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


def attention(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arrays: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries over all keys; differentiable in everything that it is given."""
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks, *arrays))
    out, lse = _Attention.apply(problem, learns and q.dtype != wide(q), q, k, v, sinks, *arrays)
    return out, lse


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, problem: Problem, keeps: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *arrays: Tensor
    ) -> tuple[Tensor, Tensor]:
        exact, lse = _forward(problem, q, k, v, sinks, arrays)
        out = exact.to(q.dtype)
        ctx.problem = problem
        ctx.save_for_backward(q, k, v, sinks, out, lse, _remainder(exact, out) if keeps else None, *arrays)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse, remainder, *arrays = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        given, saved = Given(q, k, v, arrays, ctx.needs_input_grad[6:]), Partial(out, lse, remainder)
        d_q, d_k, d_v, *d_arrays = _backward(ctx.problem, given, saved, d_out, d_lse)
        return None, None, d_q, d_k, d_v, _of_sinks(sinks, saved, d_out, d_lse), *d_arrays


def _forward(p: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arrays: Sequence[Tensor]) -> Partial:
    """In the type computed with."""
    parts = p.parts()
    merged: list[Partial | None] = [None] * len(parts)
    computed_q = p.computed(q)
    for piece in (p.computed_piece(x) for block in arriving(p, k, v) for x in block.pieces):
        for i, (rows, place) in enumerate(parts):
            if not p.needs.is_empty(rows, piece.rows):
                line = p.line_forward(rows, piece.rows)
                found = operator.attention(computed_q[:, :, place], piece.k, piece.v, arrays, None, line)
                merged[i] = _merged(merged[i], Partial(*found))
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide(q))
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide(q))
    for (_, place), part in zip(parts, merged, strict=True):
        if part is not None:
            out[:, :, place], lse[:, :, place] = part
    out, lse = (out, lse) if sinks is None else softmax.merge([Partial(out, lse)], sinks)
    return Partial(out, lse.to(wide(q)))


def _merged(before: Partial | None, found: Partial) -> Partial:
    return found if before is None else softmax.merge([before, found])


def _remainder(exact: Tensor, out: Tensor) -> Tensor:
    lost = exact - out
    return torch.where(lost.isfinite(), lost, 0).to(out.dtype)


def _unrounded(saved: Partial) -> Tensor:
    out: Tensor = saved.out.to(saved.lse.dtype)
    return out if saved.remainder is None else out + saved.remainder


def _of_sinks(sinks: Any, saved: Partial, d_out: Tensor, d_lse: Tensor | None) -> Tensor | None:
    if sinks is None:
        return None
    delta = (_unrounded(saved) * d_out).sum(-1)
    found: Tensor = d_sinks(sinks, saved.lse, delta if d_lse is None else delta - d_lse)
    return found


def _backward(p: Problem, given: Given, saved: Partial, d_out: Tensor, d_lse: Tensor | None) -> tuple[Any, ...]:
    walk, sums = _Gradients(p, given, saved, d_out, d_lse), Sums(p, given.k, given.v)
    for block in arriving(p, given.k, given.v):
        sums.take(block.owners, [walk.through(piece) for piece in block.pieces])
    d_k, d_v = sums.finish()
    found = walk.d_q, d_k, d_v, *map(walk.d_arrays.get, range(len(given.arrays)))
    return tuple(None if x is None else x.to(like.dtype) for x, like in zip(found, given.tensors, strict=True))


class _Gradients:
    """Gradients of this rank's queries, piece by piece. Weights come from the lse over all keys, so that what a piece
    gives is a term of a sum."""

    def __init__(self, p: Problem, given: Given, saved: Partial, d_out: Tensor, d_lse: Tensor | None) -> None:
        self.p, self.given = p, given
        q, d_out = map(p.computed, (given.q, d_out))
        if q.dtype != saved.out.dtype:
            saved = Partial(_unrounded(saved), saved.lse)
        self.of_rows = q, saved.out, d_out, saved.lse, d_lse, saved.remainder
        self.d_q = torch.zeros_like(given.q, dtype=wide(given.q))
        self.wanted = [i for i in wire.score_arrays(p.line(range(0), range(0))) if given.wanted[i]]
        # A rank that sees nothing has gradients too, all 0: whoever adds them up waits for every rank's.
        self.d_arrays = {i: torch.zeros_like(x, dtype=wide(x)) for i, x in enumerate(given.arrays) if i in self.wanted}

    def through(self, piece: Piece) -> Piece:
        """Adds what a piece gives to the queries and arrays; returns its own gradients."""
        piece = self.p.computed_piece(piece)
        d_piece = Piece(piece.rows, *(torch.zeros_like(x, dtype=wide(x)) for x in piece[1:]))
        for rows, place in self.p.parts():
            if not self.p.needs.is_empty(rows, piece.rows):
                d_q, d_k, d_v = self._of(rows, place, piece)
                self.d_q[:, :, place] += d_q
                d_piece.k.add_(d_k)
                d_piece.v.add_(d_v)
        return d_piece

    def _of(self, rows: range, place: slice, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        line = self.p.line(rows, piece.rows)
        q, out, d_out, lse, d_lse, remainder = (None if x is None else x[:, :, place] for x in self.of_rows)
        d_q, d_k, d_v, d_arrays = operator.attention_backward(
            q, piece.k, piece.v, self.given.arrays, None, line, out, lse, d_out, d_lse, self.wanted, remainder
        )
        for i, part in zip(self.wanted, d_arrays, strict=True):
            self.d_arrays[i] += part
        return d_q, d_k, d_v
