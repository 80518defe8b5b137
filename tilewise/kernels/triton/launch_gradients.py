"""Gradients of the arrays that a score reads: which kernel adds up what."""

from __future__ import annotations

from typing import Any

from tilewise.derivative import ONE
from tilewise.kernels import array_sums
from tilewise.kernels.array_sums import ArraySums
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
from tilewise.spec import Attention, Shape, Tile


def of_arrays(
    spec: Attention, shape: Shape, tile: Tile | None, given: tuple[Any, ...], turned: dict[str, Any]
) -> tuple[Any, ...]:
    """The gradient of every array that wants one. given: q, k, v, d_out, shift, delta; turned: what turns q and k."""

    def gradient(read: Read) -> Any:
        kind = Pass.PAIRS if read.sharing is Sharing.PAIRS else Pass.ARRAYS
        return _Sums(spec, shape, chosen(kind, spec, shape, tile), given, turned, read).gradient()

    return array_sums.of_arrays(spec, gradient)


class _Sums(ArraySums):
    """By Triton's kernels."""

    def __init__(
        self, spec: Attention, shape: Shape, choice: Choice, given: tuple[Any, ...], turned: dict[str, Any], read: Read
    ) -> None:
        super().__init__(spec, shape, given[0].device, read)
        self.given, self.tile, self.options = given, choice.tile, choice.options
        variant = modules.variant(spec, keys_of(shape), {} if read.slope is ONE else {"part": read.slope})
        self.functions = functions(spec, variant, "score", "mask", "part") | turned
        self.steps = tuple(map(steps_of, given[:5]))

    def add_rows(self, sums: Any) -> None:
        s = self.shape
        grid, *rest = planned(self.spec, s, self.tile, self.given[0])
        if 0 not in grid:
            gradients.of_rows[grid](
                *self.given, sums, *self.steps, *rest, s.group, self.spec.scale,
                **self.functions, **self.options, **sizes(s, self.tile),
            )  # fmt: skip

    def add_columns(self, sums: Any) -> None:
        s = self.shape
        (tiles, _, batch), *rest = planned(self.spec, s, self.tile, self.given[0], by_key=True)
        if tiles and s.heads and batch:
            gradients.of_columns[(tiles, s.heads, batch)](
                *self.given, sums, *self.steps, steps_of(sums), *rest, s.group, self.spec.scale,
                **self.functions, **self.options, **sizes(s, self.tile),
            )  # fmt: skip

    def add_distances(self, sums: Any, least: int) -> None:
        s, count = self.shape, sums.shape[2]
        grid = -(-count // distances()), s.heads, self.sequences
        records, loaded = sequences_of(self.spec, s, self.given[0])
        told = {name: x for name, x in sizes(s, self.tile).items() if not name.startswith("TILE")}
        gradients.of_distances[grid](
            *self.given, sums, *self.steps, steps_of(sums), records, loaded, s.group, self.spec.scale, least=least,
            count=count, **self.functions, **self.options, TILE=distances(), **told, PACKED=self.is_packed,
        )  # fmt: skip

    def add_pairs(self, grad: Any) -> None:
        s, tile, kept = self.shape, self.tile, grad.shape[:2]
        key_tiles = -(-self.most_k // tile.k)
        grid = -(-self.most_q // tile.q) * key_tiles, kept[0] * kept[1]
        q, k, v, d_out, *_ = self.given
        records, loaded = sequences_of(self.spec, s, q)
        gradients.of_pairs[grid](
            *self.given, grad, *self.steps, steps_of(grad), records, loaded, s.group, self.spec.scale,
            most_q=self.most_q, most_k=self.most_k, key_tiles=key_tiles, kept_heads=kept[1],
            summed_batch=self.sequences // kept[0], summed_heads=s.heads // kept[1],
            **self.functions, **self.options, **sizes(s, tile), PACKED=self.is_packed,
            **maps(self.spec, tile.q, q=q, d_out=d_out), **maps(self.spec, tile.k, k=k, v=v),
        )  # fmt: skip

    def add_cells(self, sums: Any, cells: Any, order: Any, begins: Any) -> None:
        grid = cells.shape[2], *sums.shape[1::-1]
        gradients.of_cells[grid](sums, cells, order, begins, steps_of(sums), steps_of(cells), AT_ONCE=256)
