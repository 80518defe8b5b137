"""The forward pass: engine/forward.h on every tile of queries."""

from __future__ import annotations

import ctypes

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.kernels.cpu import library
from tilewise.kernels.cpu.marshal import Marshal
from tilewise.kernels.cpu.ops import bytecode
from tilewise.spec import Attention, Partial, Shape, Tile


def forward(spec: Attention, q: Array, k: Array, v: Array, tile: Tile) -> Partial:
    """Attention on (batch, heads, n, d) arrays. The engine stores out in the type of q, so a wider out wants a wider q:
    it computes in that type in any case."""
    if spec.wide_out:
        q, k, v = (arrays.widen(x, spec.out_dtype(arrays.dtype_name(x))) for x in (q, k, v))
    shape = Shape.of(spec, q, k, v)
    out = np.empty_like(q, shape=(*q.shape[:3], shape.d_v))  # stored as q is, so that a caller's layout goes on
    if out.strides[-1] != out.itemsize:  # q is broadcast
        out = np.empty(out.shape, out.dtype)
    lse = np.empty(q.shape[:3], arrays.compute_dtype(shape.dtype))
    done = Partial(out, lse, np.empty_like(out) if spec.stores_remainder(shape.dtype) else None)
    marshal = Marshal(spec, shape, tile)
    call = marshal.forward(q, k, v, done)
    if spec.score is not None:
        code = bytecode(spec.score, marshal.is_wide(spec.score))
        call.score, call.score_at = marshal.program(code), code.at
    library.call("tilewise_forward", ctypes.byref(call))
    return done
