"""The kernel system cuda-sim: the CUDA sources on CPU arrays. For tests and for learning; `auto` never takes it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.kernels import host
from tilewise.kernels.cuda import marshal, simulator, support
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.rungs import RUNGS, Rung
from tilewise.kernels.cuda.simulator import Order
from tilewise.kernels.cuda.source import assembled
from tilewise.spec import Attention, Grads, Partial, Shape, Tile


class CudaSimKernel:
    """`rung` names one of the ladder's kernels; order and seed say how threads take their turns."""

    summary = "the CUDA sources on the CPU simulator; named, never chosen"

    def __init__(self, rung: str = "tiled", order: Order = Order.FORWARD, seed: int = 1) -> None:
        self.name = f"cuda-sim/{rung}"
        self.rung, self.order, self.seed = RUNGS[rung], order, seed

    def unavailable(self) -> str | None:
        return simulator.unavailable()

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        return host.unsupported(shape) or support.unsupported(spec, shape)

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return self.rung.default_tile(shape.d, shape.d_v)

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial:
        run = partial(_forward, rung=self.rung, tile=tile, order=self.order, seed=self.seed)
        return host.run_forward(run, spec, q, k, v)

    def backward(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any = None,
        tile: Tile | None = None,
    ) -> Grads:  # fmt: skip
        raise NotImplementedError("cuda-sim has no backward pass; ask unsupported() first")


def _forward(
    spec: Attention, q: Array, k: Array, v: Array, rung: Rung, tile: Tile | None, order: Order, seed: int
) -> Partial:
    shape = Shape.of(spec, q, k, v)
    tile = rung.fitting(tile or rung.default_tile(shape.d, shape.d_v), shape.d, shape.d_v)
    out = np.empty_like(q, shape=(*q.shape[:3], shape.d_v))  # stored as q is, so that a caller's layout goes on
    if out.strides[-1] != out.itemsize:  # q is broadcast
        out = np.empty(out.shape, out.dtype)
    lse = np.empty(q.shape[:3], np.float32)
    tables = marshal.tables(spec, shape, tile, rung.planned)
    blocks = marshal.blocks(shape, tables)
    if blocks == 0:
        return Partial(out, lse)
    text, slots = assembled(rung, spec, shape, tile, simulator.headers())
    kept = {name: _walkable(x) for name, x in {"q": q, "k": k, "v": v, "out": out, "lse": lse}.items()}
    sinks = None if spec.sinks is None else _walkable(arrays.as_numpy(spec.sinks))
    loaded = [_walkable(arrays.as_numpy(slot.array)) for slot in slots]
    params = marshal.params(
        spec, shape, tables, int(tables.numbers.ctypes.data), {name: View.of_numpy(x) for name, x in kept.items()},
        None if sinks is None else View.of_numpy(sinks), [View.of_numpy(x) for x in loaded],
    )  # fmt: skip
    simulator.compile_source(text.text).launch(
        params, grid=blocks, threads=text.threads, shared_bytes=text.shared_bytes, order=order, seed=seed
    )
    return Partial(out, lse)


def _walkable(x: Array) -> Array:
    """An array that a pointer to its numbers can walk: a field of records, say, may lie anywhere."""
    # NumPy calls every bfloat16 array aligned: to it they are records.
    walks = not x.ctypes.data % x.itemsize and not any(step % x.itemsize for step in x.strides)
    return x if walks else np.array(x, order="C")
