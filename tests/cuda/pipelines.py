"""pipeline.cu, a small kernel in the manner of Hopper: its source, or bulk.cu's, with or without a mistake; a run."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.kernels.cuda import simulator
from tilewise.kernels.cuda.simulator import Order
from tilewise.kernels.cuda.source import spliced
from tilewise.kernels.cuda.tensor_map import SimulatedMap, TensorMap

D, ROWS = 64, 64
SHARED_BYTES = 6 * 64 * D * 2 + 64 + 1024
CONFIG = f"""struct Half;
struct BFloat;
constexpr int D = {D}, TILE_Q = {ROWS}, MAX_RANK = 8, MAX_CONSTANTS = 7, N_ARRAYS = 0;
typedef BFloat Element;
"""


class Params(ctypes.Structure):
    _fields_ = [
        *((name, SimulatedMap) for name in ("q", "k", "v", "out")),
        ("keys", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


def text(old: str = "", new: str = "", headers: dict[str, str] | None = None, file: str = "pipeline.cu") -> str:
    """The source, with `new` in place of `old`, which must be there."""
    given = {"config.h": CONFIG, **(simulator.headers() if headers is None else headers)}
    made = spliced(file, given, Path(__file__).parent)
    assert old in made, f"{file} no longer has: {old}"
    return made.replace(old, new) if old else made


def tensor_map(x: Array, rows: int) -> TensorMap:
    n = x.shape[0]
    return TensorMap(int(x.ctypes.data), "bfloat16", (D, n, 1), (D * 2, n * D * 2), (D, rows, 1))


def run(source: str, n_q: int = 100, n_k: int = 150, order: Order = Order.FORWARD, seed: int = 1) -> float:
    """The largest error of the kernel's output, in float32 terms of what bfloat16 can tell."""
    rng = np.random.default_rng(seed)
    q, k, v = (arrays.narrow(rng.standard_normal((n, D)), "bfloat16") for n in (n_q, n_k, n_k))
    out = arrays.narrow(np.full((n_q, D), np.nan), "bfloat16")
    scale = 1 / np.sqrt(D)
    maps = [tensor_map(x, ROWS).simulated() for x in (q, k, v, out)]
    params = Params(*maps, n_k, scale * np.log2(np.e))
    simulator.compile_source(source).launch(
        params, grid=-(-n_q // ROWS), threads=256, shared_bytes=SHARED_BYTES, order=order, seed=seed
    )
    wide = [arrays.widen(x, np.float32) for x in (q, k, v, out)]
    scores = wide[0] @ wide[1].T * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    want = weights @ wide[2] / weights.sum(axis=1, keepdims=True)
    return float(np.max(np.abs(np.nan_to_num(wide[3], nan=np.inf) - want)))
