"""The NumPy kernel system: readable, exact, available everywhere NumPy is."""

from __future__ import annotations

from typing import Any

from tilewise.arrays import as_numpy, like
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
        if shape.device != "cpu":
            return f"it works in main memory and the arrays are on {shape.device}; move them with .cpu()"
        return None

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return DEFAULT_TILE

    def forward(
        self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None, watch: Watch | None = None
    ) -> Partial:
        done = forward(spec, as_numpy(q), as_numpy(k), as_numpy(v), tile or DEFAULT_TILE, watch)
        return Partial(like(done.out, q), like(done.lse, q))

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
        held = Partial(as_numpy(saved.out), as_numpy(saved.lse))
        d_lse = None if d_lse is None else as_numpy(d_lse)
        grads = backward(
            spec, as_numpy(q), as_numpy(k), as_numpy(v), held, as_numpy(d_out), d_lse, tile or DEFAULT_TILE
        )
        wanted = zip(grads.arrays, spec.wanted, strict=True)
        return Grads(
            like(grads.q, q), like(grads.k, k), like(grads.v, v),
            None if grads.sinks is None else like(grads.sinks, spec.sinks),
            tuple(like(g, slot.array) for g, slot in wanted),
        )  # fmt: skip
