"""The native CPU engine: C++ with vector instructions and threads of its own, for arrays in main memory."""

from __future__ import annotations

from functools import partial
from typing import Any

from tilewise.kernels import host
from tilewise.kernels.cpu import library
from tilewise.kernels.cpu.backward import backward
from tilewise.kernels.cpu.forward import forward
from tilewise.kernels.cpu.structs import MAX_RANK
from tilewise.spec import Attention, Grads, Partial, Shape, Tile

# Small tiles skip more; of a run of tiles the engine takes as many at a time as its caches hold.
FORWARD_TILE = Tile(q=96, k=64)
BACKWARD_TILE = Tile(q=96, k=256)
MOST_ENTRIES = 2**31  # of a dimension of an array that is read, at indices of 32 bits


class CpuKernel:
    name = "cpu"
    summary = "the native engine: C++, vector instructions, threads"

    def unavailable(self) -> str | None:
        return library.unavailable()

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        if shape.device != "cpu":
            return host.unsupported(shape)
        for slot in spec.loaded:
            if len(slot.array.shape) > MAX_RANK:
                return f"a loaded array has {len(slot.array.shape)} dimensions; it reads up to {MAX_RANK}"
            longest = max(slot.array.shape, default=0)
            if longest > MOST_ENTRIES:
                return f"a loaded array has {longest} entries in a dimension; it reads up to {MOST_ENTRIES}"
        return None

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return BACKWARD_TILE if shape.backward else FORWARD_TILE

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial:
        run = host.turning_first(partial(forward, tile=tile or FORWARD_TILE))
        return host.run_forward(run, spec, q, k, v)

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
        run = host.turning_back(partial(backward, tile=tile or BACKWARD_TILE))
        return host.run_backward(run, spec, q, k, v, saved, d_out, d_lse)
