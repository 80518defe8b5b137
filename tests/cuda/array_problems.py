"""Problems for the kernels that sum up gradients of arrays, on the simulator, and what their sums must be."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

import tilewise as tw
from tilewise import arrays, reference, validate
from tilewise.arrays import Array
from tilewise.contract import Expected, check_results, expected_backward, gradients_to_pull
from tilewise.expr import HK, KP, NK, NQ, B, H, K, Q, S, load
from tilewise.kernels.cuda.array_gradients import gradients
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.simulator import Order
from tilewise.kernels.cuda.simulator.kernel import _Simulated
from tilewise.spec import Shape, Tile
from tilewise.validate import Call

LENGTHS = [0, 40, 40, 45, 80], [0, 56, 70, 89, 120]  # of queries and keys; one has no queries


class Problem(NamedTuple):
    options: dict[str, Any]
    sizes: tuple[int, int, int, int, int, int, int] = (
        2,
        4,
        2,
        40,
        56,
        24,
        8,
    )  # batch, heads, heads_k, n_q, n_k, d, d_v
    lengths: tuple[list[int], list[int]] | None = None


def _array(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


PROBLEMS: dict[str, Problem] = {
    "rows": Problem({"score": S - load(abs(_array(4)) / 8, H, grad=True) * abs(Q + (NK - NQ) - K), "causal": True}),
    "rows, capped": Problem({"score": (S + load(_array(2, 40), B, Q, grad=True)) >> tw.softcap(1.5)}),
    "columns": Problem({"score": S + load(_array(2, 56), HK, K, grad=True), "mask": tw.window(20)}),
    "columns, capped": Problem({"score": (S * load(_array(56), K, grad=True)) >> tw.softcap(1.5), "causal": True}),
    "pairs": Problem({"score": S + load(_array(40, 56), Q, K, grad=True), "causal": True}),
    "few pairs": Problem({"score": S + load(_array(9, 12), Q, K, grad=True)}, (1, 3, 1, 9, 12, 8, 8)),  # split in parts
    "pairs of heads": Problem({"score": S + load(_array(2, 40, 56), HK, Q, K, grad=True), "mask": tw.window(20)}),
    "distances": Problem({"score": tw.relative(_array(4, 21), signed=True, grad=True), "causal": True}),
    "distances of all": Problem({"score": tw.relative(_array(9), grad=True)}),
    "packed rows": Problem(
        {"score": S + load(_array(4, 56), B, Q, grad=True) + load(_array(2, 120), HK, KP, grad=True)},
        (1, 4, 2, 80, 120, 24, 8),
        LENGTHS,
    ),
    "packed pairs": Problem(
        {"score": S + load(_array(4, 41, 57), H, Q, K, grad=True), "causal": True}, (1, 4, 2, 80, 120, 24, 8), LENGTHS
    ),
    "packed distances": Problem(
        {"score": S + load(_array(4, 9), B, tw.minimum(abs(Q - K), 8), grad=True)}, (1, 4, 2, 80, 120, 24, 8), LENGTHS
    ),
    "an array read twice": Problem(
        {"score": S + load(TWICE := _array(56), K, grad=True) * load(TWICE, tw.minimum(abs(Q - K), 30), grad=True)}
    ),
    # Several of Hopper's tiles, of 128 queries and 128 keys, or 64 keys of large heads.
    "large, rows": Problem(
        {"score": S - load(abs(_array(2)) / 8, H, grad=True) * abs(Q - K)}, (1, 2, 1, 140, 400, 72, 24)
    ),
    "large, columns": Problem(
        {"score": S + load(_array(300), K, grad=True), "causal": True}, (1, 2, 1, 280, 300, 16, 16)
    ),
    "large, pairs": Problem({"score": S + load(_array(140, 136), Q, K, grad=True)}, (2, 3, 1, 140, 136, 16, 16)),
    "large, odd pairs": Problem({"score": S + load(_array(9, 131), Q, K, grad=True)}, (2, 3, 1, 9, 131, 16, 16)),
    "large, pairs beside another table": Problem(
        {"score": S + load(_array(2, 20, 136), B, Q, K) + load(_array(3, 20, 136), H, Q, K, grad=True)},
        (2, 3, 1, 20, 136, 16, 16),
    ),
    "large, distances": Problem({"score": tw.relative(_array(2, 300), grad=True)}, (1, 2, 1, 300, 270, 16, 16)),
    "large heads, rows": Problem({"score": S + load(_array(70), Q, grad=True)}, (1, 1, 1, 70, 140, 248, 200)),
    "large heads, distances": Problem({"score": tw.relative(_array(9), grad=True)}, (1, 1, 1, 270, 150, 16, 200)),
    "no rows": Problem({"score": S + load(_array(4), H, grad=True)}, (1, 4, 2, 0, 56, 8, 8)),
    "no keys": Problem({"score": S + load(_array(40), Q, grad=True)}, (1, 4, 2, 40, 0, 8, 8)),
}  # fmt: skip


class Posed(NamedTuple):
    call: Call
    given: dict[str, Array]  # what the backward pass leaves to these kernels
    expected: list[Expected]


@cache
def posed(name: str, dtype: str) -> Posed:
    options, (batch, heads, heads_k, n_q, n_k, d, d_v), lengths = PROBLEMS[name]
    rng = np.random.default_rng(1)
    sizes = (heads, n_q, d), (heads_k, n_k, d), (heads_k, n_k, d_v)
    q, k, v = (arrays.narrow(rng.standard_normal((batch, *size)), dtype) for size in sizes)
    if lengths is None:
        call = validate.prepare(q, k, v, **options)
    else:
        packed = (x[0].swapaxes(0, 1) for x in (q, k, v))
        call = validate.prepare_varlen(*packed, *(np.array(x, np.int32) for x in lengths), **options)
    out, lse = reference.forward(call.spec, call.q, call.k, call.v, dtype=np.float64)
    d_out, _ = gradients_to_pull(call)
    delta = (arrays.widen(d_out, np.float64) * out).sum(-1)
    given = {"q": call.q, "k": call.k, "v": call.v, "out": arrays.narrow(out, dtype), "d_out": d_out}
    given |= {"lse": lse.astype(np.float32), "delta": delta.astype(np.float32)}
    expected = [x for x in expected_backward(call, d_out, None) if x.what.startswith("d_array")]
    return Posed(call, given, expected)


def check(name: str, tile: Tile | None, dtype: str = "float32", order: Order = Order.FORWARD, seed: int = 1) -> None:
    """By the kernels of arrays alone."""
    call, given, expected = posed(name, dtype)
    shape = Shape.of(call.spec, call.q, call.k, call.v)
    views = {what: View.of_numpy(x) for what, x in given.items()}
    found = gradients(
        _Simulated(call.spec, shape, views, order, seed), call.spec, shape, tile, hopper=dtype != "float32"
    )
    check_results(expected, {f"d_array {i}": x.astype(np.float32) for i, x in enumerate(found)})
