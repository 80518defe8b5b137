"""The native CPU engine: C++ with vector instructions and threads of its own, for arrays in main memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.expr import INT32_MAX, INT32_MIN
from tilewise.kernels import host
from tilewise.kernels.cpu import library
from tilewise.kernels.cpu.backward import backward
from tilewise.kernels.cpu.forward import forward
from tilewise.kernels.cpu.structs import MAX_RANK
from tilewise.spec import Attention, Grads, Partial, Shape, Tile

# Small tiles skip more; of a run of tiles the engine takes as many at a time as its caches hold.
FORWARD_TILE = Tile(q=96, k=64)
BACKWARD_TILE = Tile(q=96, k=128)


class CpuKernel:
    name = "cpu"
    summary = "the native engine: C++, vector instructions, threads"

    def unavailable(self) -> str | None:
        return library.unavailable()

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        for slot in spec.loaded:
            array = arrays.as_numpy(slot.array) if arrays.device_name(slot.array) == "cpu" else None
            if array is None:
                continue
            if array.ndim > MAX_RANK:
                return f"a loaded array has {array.ndim} dimensions; it reads up to {MAX_RANK}"
            if array.dtype == np.int64 and array.size and not _fits(array):
                return "an int64 array holds numbers beyond 32 bits; number its values anew"
        return host.unsupported(shape)

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return BACKWARD_TILE if shape.backward else FORWARD_TILE

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial:
        return host.run_forward(partial(forward, tile=tile or FORWARD_TILE), spec, q, k, v)

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
        return host.run_backward(partial(backward, tile=tile or BACKWARD_TILE), spec, q, k, v, saved, d_out, d_lse)


def _fits(array: arrays.Array) -> bool:
    """The engine's integers have 32 bits beside float32."""
    return bool(array.min() >= INT32_MIN and array.max() <= INT32_MAX)
