"""Gradients of the arrays that a score reads: which kernel adds up what."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.derivative import ONE
from tilewise.kernels.array_sums import ArraySums
from tilewise.kernels.reads import Read
from tilewise.kernels.tables import FIELDS, sequences
from tilewise.kernels.tilelang.build import variant_of
from tilewise.kernels.tilelang.call import Call
from tilewise.kernels.tilelang.choices import Pass
from tilewise.kernels.uploads import kept_on, key_of
from tilewise.spec import Attention, Shape, Tile


class Sums(ArraySums):
    """By TileLang's kernels. given: q, k, v, d_out, shift and delta, by name."""

    def __init__(
        self, spec: Attention, shape: Shape, target: str, tile: Tile | None, given: dict[str, Any], read: Read
    ) -> None:
        super().__init__(spec, shape, given["q"].device, read)
        self.given, self.target, self.tile = given, target, tile
        self.variant = variant_of(spec, **({} if read.slope is ONE else {"part": read.slope}))

    def add_rows(self, sums: Any) -> None:
        self._planned("of_rows", sums, by_key=False)

    def add_columns(self, sums: Any) -> None:
        self._planned("of_columns", sums, by_key=True)

    def add_distances(self, sums: Any, least: int) -> None:
        call = self._whole()
        call.tell(kept_batch=sums.shape[0], count=sums.shape[2], least=least)
        call.take(sums=sums)
        call.launch("of_distances")

    def add_pairs(self, grad: Any) -> None:
        batch, heads, most_q, most_k = grad.shape
        call = self._whole()
        call.tell(kept_batch=batch, kept_heads=heads, most_q=most_q, most_k=most_k)
        call.tell(summed_batch=self.sequences // batch, summed_heads=self.shape.heads // heads)
        call.take(grad=grad)
        call.launch("of_pairs")

    def add_cells(self, sums: Any, cells: Any, order: Any, begins: Any) -> None:
        """By PyTorch, which adds up a segment in its order."""
        readers = sums.double().flatten(0, 1).T[order.long()]  # (readers, batch * heads)
        made = torch.segment_reduce(readers, "sum", lengths=begins.diff().long(), axis=0)
        cells.copy_(made.T.unflatten(0, cells.shape[:2]))

    def _call(self) -> Call:
        operands = [self.given[name] for name in ("q", "k", "v", "d_out")]
        call = Call(self.spec, self.shape, self.target, Pass.ARRAYS, self.tile, self.variant, operands)
        call.give(**self.given)
        return call

    def _planned(self, kernel: str, sums: Any, by_key: bool) -> None:
        if 0 in (*sums.shape, self.shape.n_q, self.shape.n_k):
            return
        call = self._call()
        call.plan(by_key)
        call.take(sums=sums)
        call.launch(kernel)

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
