"""Gradients of the arrays that a score reads: which kernel sums up what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.derivative import ONE
from tilewise.expr import Loaded
from tilewise.kernels import summing
from tilewise.kernels.reads import Read
from tilewise.kernels.summing import key_of
from tilewise.kernels.tables import FIELDS, sequences
from tilewise.kernels.tilelang.build import variant_of
from tilewise.kernels.tilelang.call import Call
from tilewise.kernels.tilelang.choices import Pass
from tilewise.kernels.uploads import kept_on, readers_on
from tilewise.spec import Attention, Shape, Tile


def of_arrays(spec: Attention, shape: Shape, target: str, tile: Tile | None, given: dict[str, Any]) -> tuple[Any, ...]:
    """The gradient of every array that wants one. given: q, k, v, d_out, shift and delta, by name."""
    made = summing.of_arrays(spec, lambda read: _Summing(spec, shape, target, tile, given, read))
    return tuple(x.to(getattr(torch, arrays.dtype_name(s.array))) for x, s in zip(made, spec.wanted, strict=True))


class _Summing(summing.Summing):
    def __init__(
        self, spec: Attention, shape: Shape, target: str, tile: Tile | None, given: dict[str, Any], read: Read
    ) -> None:
        super().__init__(spec, shape, read)
        self.given, self.target, self.tile = given, target, tile
        self.device = given["q"].device
        self.variant = variant_of(spec, **({} if read.slope is ONE else {"part": read.slope}))

    def rows(self) -> Any:
        return self._planned("of_rows", self.shape.n_q, by_key=False)

    def columns(self) -> Any:
        return self._planned("of_columns", self.shape.n_k, by_key=True)

    def distances(self) -> tuple[Any, int]:
        least, count = 1 - self.most_k, max(self.most_q + self.most_k - 1, 0)
        sums = self._zeros(self.sequences, self.shape.heads, count)
        if 0 not in (*sums.shape, self.most_q, self.most_k):
            call = self._whole()
            call.tell(kept_batch=self.sequences, count=count, least=least)
            call.take(sums=sums)
            call.launch("of_distances")
        return sums, least

    def pairs(self) -> Any:
        batch, heads = self.kept
        grad = self._zeros(batch, heads, self.most_q, self.most_k)
        if 0 not in (*grad.shape, self.sequences, self.shape.heads):
            call = self._whole()
            call.tell(kept_batch=batch, kept_heads=heads, most_q=self.most_q, most_k=self.most_k)
            call.tell(summed_batch=self.sequences // batch, summed_heads=self.shape.heads // heads)
            call.take(grad=grad)
            call.launch("of_pairs")
        return grad

    def cells(
        self, sums: Any, size: int, key: tuple[Any, ...], slots: Sequence[Loaded], read: Callable[[], Array]
    ) -> Any:
        """By PyTorch, which adds up a segment in its order."""
        order, begins = readers_on(self.device, key, slots, read, size)
        cells = torch.zeros((*sums.shape[:2], size), dtype=torch.float64, device=self.device)
        if 0 not in cells.shape:
            readers = sums.double().flatten(0, 1).T[order.long()]  # (readers, batch * heads)
            made = torch.segment_reduce(readers, "sum", lengths=begins.diff().long(), axis=0)
            cells.copy_(made.T.unflatten(0, cells.shape[:2]))
        return cells

    def _zeros(self, *sizes: int) -> Any:
        return torch.zeros(sizes, dtype=torch.float32, device=self.device)

    def _call(self) -> Call:
        operands = [self.given[name] for name in ("q", "k", "v", "d_out")]
        call = Call(self.spec, self.shape, self.target, Pass.ARRAYS, self.tile, self.variant, operands)
        call.give(**self.given)
        return call

    def _planned(self, kernel: str, n: int, by_key: bool) -> Any:
        sums = self._zeros(self.shape.batch, self.shape.heads, n)
        if 0 not in (*sums.shape, self.shape.n_q, self.shape.n_k):
            call = self._call()
            call.plan(by_key)
            call.take(sums=sums)
            call.launch(kernel)
        return sums

    def _whole(self) -> Call:
        """A call that is told of whole sequences."""

        def make() -> Any:
            made = sequences(self.shape, self.spec.lengths).reshape(-1, 1, 1, FIELDS)
            return torch.from_numpy(made).to(self.device)

        records = kept_on(self.device, ("whole sequences", self.shape, key_of(self.spec.lengths)), (), make)
        call = self._call()
        call.tell(n_sequences=len(records))
        call.give(sequences=records)
        return call
