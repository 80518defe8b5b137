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
from tilewise.kernels.reads import Read, Sharing
from tilewise.kernels.triton import modules
from tilewise.kernels.triton.arguments import (
    functions,
    keys_of,
    maps,
    sequences_of,
    sizes,
    steps_of,
)
from tilewise.kernels.triton.choices import Choice, Pass
from tilewise.kernels.triton.launch_plan import planned
from tilewise.kernels.triton.source import gradients
from tilewise.kernels.triton.tuning import chosen, distances
from tilewise.kernels.uploads import readers_on
from tilewise.spec import Attention, Shape, Tile


def of_arrays(
    spec: Attention, shape: Shape, tile: Tile | None, given: tuple[Any, ...], turned: dict[str, Any]
) -> tuple[Any, ...]:
    """The gradient of every array that wants one. given: q, k, v, d_out, shift, delta; turned: what turns q and k."""

    def summing_of(read: Read) -> _Summing:
        kind = Pass.PAIRS if read.sharing is Sharing.PAIRS else Pass.ARRAYS
        return _Summing(spec, shape, chosen(kind, spec, shape, tile), given, turned, read)

    made = zip(summing.of_arrays(spec, summing_of), spec.wanted, strict=True)
    return tuple(x.to(getattr(torch, arrays.dtype_name(slot.array))) for x, slot in made)


class _Summing(summing.Summing):
    def __init__(
        self, spec: Attention, shape: Shape, choice: Choice, given: tuple[Any, ...], turned: dict[str, Any], read: Read
    ) -> None:
        super().__init__(spec, shape, read)
        self.given, self.tile, self.options = given, choice.tile, choice.options
        self.device = given[0].device
        variant = modules.variant(spec, keys_of(shape), {} if read.slope is ONE else {"part": read.slope})
        self.functions = functions(spec, variant, "score", "mask", "part") | turned
        self.steps = tuple(map(steps_of, given[:5]))

    def rows(self) -> Any:
        s = self.shape
        sums = self._zeros(s.batch, s.n_q)
        grid, *rest = planned(self.spec, s, self.tile, self.given[0])
        if 0 not in grid:
            gradients.of_rows[grid](
                *self.given, sums, *self.steps, *rest, s.group, self.spec.scale,
                **self.functions, **self.options, **sizes(s, self.tile),
            )  # fmt: skip
        return sums

    def columns(self) -> Any:
        s = self.shape
        sums = self._zeros(s.batch, s.n_k)
        (tiles, _, batch), *rest = planned(self.spec, s, self.tile, self.given[0], by_key=True)
        if tiles and s.heads and batch:
            gradients.of_columns[(tiles, s.heads, batch)](
                *self.given, sums, *self.steps, steps_of(sums), *rest, s.group, self.spec.scale,
                **self.functions, **self.options, **sizes(s, self.tile),
            )  # fmt: skip
        return sums

    def distances(self) -> tuple[Any, int]:
        s = self.shape
        least, count = 1 - self.most_k, max(self.most_q + self.most_k - 1, 0)
        sums = self._zeros(self.sequences, count)
        grid = -(-count // distances()), s.heads, self.sequences
        if 0 not in (*grid, self.most_q, self.most_k):
            records, loaded = sequences_of(self.spec, s, self.given[0])
            told = {name: x for name, x in sizes(s, self.tile).items() if not name.startswith("TILE")}
            gradients.of_distances[grid](
                *self.given, sums, *self.steps, steps_of(sums), records, loaded, s.group, self.spec.scale, least=least,
                count=count, **self.functions, **self.options, TILE=distances(), **told, PACKED=self.is_packed,
            )  # fmt: skip
        return sums, least

    def pairs(self) -> Any:
        s, tile, kept = self.shape, self.tile, self.kept
        grad = torch.zeros((*kept, self.most_q, self.most_k), dtype=torch.float32, device=self.device)
        key_tiles = -(-self.most_k // tile.k)
        grid = -(-self.most_q // tile.q) * key_tiles, kept[0] * kept[1]
        if 0 not in (*grid, self.sequences, s.heads):
            q, k, v, d_out, *_ = self.given
            records, loaded = sequences_of(self.spec, s, q)
            gradients.of_pairs[grid](
                *self.given, grad, *self.steps, steps_of(grad), records, loaded, s.group, self.spec.scale,
                most_q=self.most_q, most_k=self.most_k, key_tiles=key_tiles, kept_heads=kept[1],
                summed_batch=self.sequences // kept[0], summed_heads=s.heads // kept[1],
                **self.functions, **self.options, **sizes(s, tile), PACKED=self.is_packed,
                **maps(self.spec, tile.q, q=q, d_out=d_out), **maps(self.spec, tile.k, k=k, v=v),
            )  # fmt: skip
        return grad

    def cells(
        self, sums: Any, size: int, key: tuple[Any, ...], slots: Sequence[Loaded], read: Callable[[], Array]
    ) -> Any:
        order, begins = readers_on(self.device, key, slots, read, size)
        cells = torch.zeros((*sums.shape[:2], size), dtype=torch.float64, device=self.device)
        grid = size, *sums.shape[1::-1]
        if 0 not in grid:
            gradients.of_cells[grid](sums, cells, order, begins, steps_of(sums), steps_of(cells), AT_ONCE=256)
        return cells

    def _zeros(self, batch: int, n: int) -> Any:
        return torch.zeros((batch, self.shape.heads, n), dtype=torch.float32, device=self.device)
