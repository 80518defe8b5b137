"""The NumPy kernel system: readable, exact, available everywhere NumPy is."""

from __future__ import annotations

from functools import partial
from typing import Any

from tilewise.kernels import host
from tilewise.kernels.numpy.backward import backward
from tilewise.kernels.numpy.forward import Watch, forward
from tilewise.spec import Attention, Grads, Partial, Shape, Tile

DEFAULT_TILE = Tile(q=256, k=512)


class NumpyKernel:
    name = "numpy"
    summary = "the readable definition, on any CPU"

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        return host.unsupported(shape)

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return DEFAULT_TILE

    def forward(
        self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None, watch: Watch | None = None
    ) -> Partial:
        return host.run_forward(partial(forward, tile=tile or DEFAULT_TILE, watch=watch), spec, q, k, v)

    def backward(
        self,
        spec: Attention,
        q: Any,
        k: Any,
        v: Any,
        saved: Partial,
        d_out: Any,
        d_lse: Any = None,
        tile: Tile | None = None,
    ) -> Grads:
        return host.run_backward(partial(backward, tile=tile or DEFAULT_TILE), spec, q, k, v, saved, d_out, d_lse)
