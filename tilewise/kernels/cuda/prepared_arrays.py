"""Gradients of the arrays that a score reads, on a GPU: after the backward pass, on what it was given and left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.arrays import Array
from tilewise.expr import Expr, Loaded
from tilewise.kernels.cuda import gpu, launcher, marshal_backward
from tilewise.kernels.cuda.array_rungs import ANY_CALL, CELLS, copies
from tilewise.kernels.cuda.marshal import Tables, View
from tilewise.kernels.cuda.prepared import Prepared, backward_of
from tilewise.kernels.cuda.rungs import Rung
from tilewise.kernels.cuda.source import assembled
from tilewise.spec import Attention, Shape, Tile


class OnGpu:
    """Where gradients of arrays are summed up (array_gradients.Machine).

    every: the backward pass's arrays, with the delta that it left. loaded: those that the variant reads, in the order
    of spec.loaded.
    """

    def __init__(self, spec: Attention, shape: Shape, every: dict[str, Any], loaded: Sequence[Any]) -> None:
        self._spec, self._shape = spec, shape
        self._views = {name: View(0, (), (0, 0, 0)) if x is None else View.of_torch(x) for name, x in every.items()}
        self._loaded = [View.of_torch(x) for x in loaded]
        self._device, self._on = every["q"].get_device(), every["q"].device

    @property
    def at_once(self) -> int:
        return gpu.multiprocessors(self._device)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self._on)

    def tables(self, rung: Rung, tile: Tile) -> Tables:
        return launcher.tables_on(self._device, self._spec, self._shape, tile, rung)[0]

    def sum_up(self, rung: Rung, tile: Tile, slope: Expr, sums: Any, told: dict[str, int], count: int) -> None:
        tables, numbers = launcher.tables_on(self._device, self._spec, self._shape, tile, rung)
        copied = copies(rung) and all(view.address % 16 == 0 for view in self._loaded)
        source, full, order = backward_of(
            rung, self._spec, self._shape, tile, self._views, self._loaded, tables, numbers, slope, copied
        )
        params = marshal_backward.sums(full, View.of_torch(sums), told)
        if copies(rung):
            in_order = [self._loaded[order.index(i)] for i in range(len(order))]
            maps = marshal_backward.maps(self._views, self._shape.dtype, tile, source.table, in_order)
            params = marshal_backward.sums_launch(params, {name: x.encoded() for name, x in maps.items()})
        Prepared(self._device, source, count, params, [], [numbers]).launch([])

    def readers(
        self, key: tuple[Any, ...], slots: Sequence[Loaded], make: Callable[[], tuple[Array, Array]]
    ) -> tuple[Any, Any]:
        return launcher.readers_on(self._device, key, slots, make)

    def gather(self, sums: Any, cells: Any, order: Any, begins: Any) -> None:
        sums = sums.contiguous()
        params, count = marshal_backward.gathering(*map(View.of_torch, (sums, cells, order, begins)))
        source, _ = assembled(CELLS, *ANY_CALL)
        Prepared(self._device, source, CELLS.blocks(count), params, [], [order, begins]).launch([])
