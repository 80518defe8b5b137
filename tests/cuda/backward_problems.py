"""Problems for Hopper's backward pass on the simulator, and what its gradients must be."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

import tilewise as tw
from tests.fuzzing.drawing.menu import spoil_unread
from tilewise import arrays, reference, validate
from tilewise.arrays import Array
from tilewise.contract import Expected, backward_results, check_results, expected_backward, gradients_to_pull
from tilewise.expr import NQ, B, H, K, Q, S, where
from tilewise.kernels.cuda import marshal_backward
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.simulator import Order, kernel
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel
from tilewise.spec import Partial
from tilewise.validate import Call

SHARED_FILES = (
    "sm90_backward.h", "sm90_backward_producer.h", "sm90_backward_consumer.h", "sm90_tiles.h", "backward_sm90_rows.cu",
    "sm90_backward_d_query.h", "sm90_backward_outbox.h",
)  # fmt: skip
FILES, WIDE_FILES = ("backward_sm90.cu", *SHARED_FILES), ("backward_sm90_wide.cu", *SHARED_FILES)

# The first block to run takes all key tiles, in their order, unless it is told otherwise, and then all of d_q.
TAKE = "const int index = next_index();"
LAST_FIRST = {TAKE: "const int asked = next_index(), tiles = launch.heads * params.tiles;\n"
                    "        const int index = asked < tiles ? tiles - 1 - asked : asked;"}  # fmt: skip


@pytest.fixture(autouse=True)
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels do not write is NaN, as on a GPU it would be anything. Each file of tests imports this."""
    launch = kernel._launch_sm90

    def launch_on_nan(rungs: Any, spec: Any, shape: Any, views: dict[str, View], order: Order, seed: int) -> None:
        for name in ("d_q", "d_k", "d_v"):
            ctypes.memset(views[name].address, 0xFF, 2 * math.prod(views[name].shape))
        launch(rungs, spec, shape, views, order, seed)

    monkeypatch.setattr(kernel, "_launch_sm90", launch_on_nan)


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of d_q: up to three tiles of large heads, so that there are several. Each file of tests imports this."""
    monkeypatch.setattr(marshal_backward, "_SHARE", 100_000)


class Problem(NamedTuple):
    """Tiles have 128 queries and 128 keys; 64 queries if heads are beyond 64, and 64 keys too beyond 128."""

    shape: tuple[int, int, int, int, int, int, int]  # batch, heads, heads_k, n_q, n_k, d, d_v
    options: dict[str, Any] = {}  # noqa: RUF012
    dtype: str = "bfloat16"
    d_lse: bool = True
    magnitude: float = 1.0  # of q


def _cells(*shape: int) -> Array:
    return arrays.narrow(np.random.default_rng(len(shape)).standard_normal(shape), "bfloat16")


PROBLEMS: dict[str, Problem] = {
    "one tile": Problem((1, 1, 1, 50, 100, 64, 64)),
    "whole tiles": Problem((1, 1, 1, 256, 256, 64, 64)),
    "full": Problem((1, 1, 1, 390, 390, 16, 16)),
    "one query tile": Problem((1, 3, 3, 40, 300, 16, 16)),
    "one key tile": Problem((1, 3, 3, 300, 40, 16, 16)),
    "one query and one key": Problem((2, 2, 1, 1, 1, 16, 16)),
    # Tiles that are skipped, and masks.
    "causal": Problem((1, 1, 1, 300, 420, 16, 16), {"causal": True}),
    "causal, more queries than keys": Problem((1, 2, 1, 420, 150, 16, 16), {"causal": True}),
    "window": Problem((1, 1, 1, 400, 520, 16, 16), {"mask": tw.causal() & tw.window(90)}),
    "runs": Problem((1, 2, 1, 460, 460, 16, 16), {"mask": (Q // 128 + K // 128) % 2 == 0}),
    "heads differ": Problem((2, 4, 2, 130, 260, 16, 16), {"mask": (K >= (B + H) % 2 * 128) & (K <= Q + 140)}),
    "tiles that meet none": Problem((1, 2, 2, 200, 390, 16, 16), {"mask": (Q >= 128) & (K >= 128) & (K < 256)}),
    "nothing seen": Problem((1, 1, 1, 100, 150, 16, 16), {"mask": K < 0}),
    "every other row": Problem((1, 1, 1, 100, 260, 16, 16), {"mask": Q % 2 == 0}),
    # The second has keys that none sees, which lie in tiles of the first; the third no keys.
    "packed": Problem(
        (1, 4, 2, 300, 420, 16, 16), {"lengths": ((0, 70, 70, 100, 300), (0, 130, 150, 150, 420))}, "float16"
    ),
    # Heads.
    "grouped": Problem((2, 6, 2, 100, 150, 16, 16), {"causal": True}),
    "d 128": Problem((1, 2, 1, 100, 390, 128, 128), {"causal": True}),
    "d 128, full": Problem((1, 1, 1, 310, 300, 128, 128)),  # key tiles begin with either place
    "d 128, tiles that meet none": Problem((1, 2, 1, 100, 390, 128, 128), {"mask": (Q >= 64) & (K >= 128) & (K < 256)}),
    "d 96, d_v 80": Problem((2, 2, 1, 100, 150, 96, 80)),
    "d 80, d_v 128": Problem((1, 1, 1, 100, 280, 80, 128), {"causal": True}),
    "d 80, d_v 40, packed": Problem(
        (1, 4, 2, 390, 420, 80, 40), {"lengths": ((0, 70, 70, 150, 390), (0, 130, 150, 150, 420))}, "float16"
    ),
    "d 128, d_v 8": Problem((1, 1, 1, 100, 280, 128, 8)),
    "d 8, d_v 64": Problem((1, 1, 1, 100, 280, 8, 64)),
    # Wide heads.
    "d 256": Problem((1, 1, 1, 200, 200, 256, 256)),
    "d 256, causal": Problem((1, 2, 1, 150, 200, 256, 256), {"causal": True}),
    "d 256, one tile": Problem((1, 1, 1, 50, 60, 256, 256)),
    "d 256, one query tile": Problem((1, 2, 2, 40, 200, 256, 256)),
    "d 256, tiles that meet none": Problem((1, 2, 1, 200, 260, 256, 256), {"mask": (Q >= 64) & (K >= 64) & (K < 128)}),
    "d 192, d_v 128": Problem((2, 2, 1, 100, 150, 192, 128)),
    "d 136, d_v 40, a slope": Problem(
        (1, 1, 1, 140, 140, 136, 40), {"score": tw.softcap(2.0) >> S * (1 + Q / 64)}, "float16"
    ),
    "d 64, d_v 256, grouped": Problem((1, 6, 2, 100, 150, 64, 256), {"causal": True}),
    "d 192, packed": Problem(
        (1, 2, 1, 230, 230, 192, 192),
        {"lengths": ([0, 70, 70, 199, 230], [0, 90, 120, 200, 230]), "causal": True},
        "float16",
    ),
    # Types, scores and what else there is.
    "float16": Problem((1, 2, 1, 200, 300, 64, 48), {"causal": True}, "float16"),
    "no d_lse": Problem((1, 2, 1, 100, 150, 16, 16), {"causal": True}, d_lse=False),
    "a slope": Problem((1, 2, 1, 150, 280, 16, 16), {"causal": True, "score": tw.softcap(1.0), "scale": 0.5}),
    "every other row, a slope": Problem((1, 1, 1, 100, 260, 16, 16), {"mask": Q % 2 == 0, "score": tw.softcap(2.0)}),
    "a slope, float16, d 128": Problem((1, 1, 1, 100, 260, 128, 64), {"score": tw.softcap(2.0)}, "float16"),
    "alibi": Problem((1, 4, 2, 100, 150, 16, 16), {"score": tw.softcap(3.0) >> tw.alibi(4), "mask": tw.window(70)}),
    # Tiles of an array that scores read come along; where heads are larger, d_s has one place less for it.
    "a table, a slope, packed": Problem(
        (1, 2, 1, 230, 330, 16, 16),
        {"score": tw.bias(_cells(160, 200)) >> tw.softcap(2.0), "lengths": ((0, 70, 100, 230), (0, 130, 152, 330))},
    ),
    "a table, d 128": Problem((1, 2, 1, 150, 264, 128, 128), {"score": tw.bias(_cells(2, 150, 264)), "causal": True}),
    "a table, d 256": Problem((1, 2, 1, 150, 136, 256, 256), {"score": tw.bias(_cells(2, 150, 136))}, "float16"),
    "a score that masks": Problem((1, 1, 1, 150, 150, 16, 16), {"score": where(K % 5 == 2, -np.inf, S * 0.5)}),
    "no number beyond the last query": Problem((1, 1, 1, 100, 150, 16, 16), {"score": S + 1 / (NQ - Q)}),
    "sinks": Problem(
        (2, 4, 2, 100, 150, 16, 16), {"causal": True, "sinks": np.array([0.5, -1, 2, 0], np.float32)}, "float16"
    ),
    "a negative scale": Problem((1, 1, 1, 100, 150, 16, 16), {"causal": True, "scale": -0.4}),
    "large scores": Problem((1, 1, 1, 150, 150, 16, 16), {"causal": True}, magnitude=1e3),
}


class Posed(NamedTuple):
    call: Call
    saved: Partial
    d_out: Array
    d_lse: Array | None
    expected: list[Expected]


def _prepared(q: Array, k: Array, v: Array, lengths: Any = None, **options: Any) -> Call:
    if lengths is None:
        return validate.prepare(q, k, v, **options)
    of_q, of_k = map(np.array, lengths)
    spoil_unread((of_q, of_k), k, v)
    q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
    return validate.prepare_varlen(q, k, v, of_q, of_k, **options)


@cache
def posed(name: str) -> Posed:
    (batch, heads, heads_k, n_q, n_k, d, d_v), options, dtype, has_d_lse, magnitude = PROBLEMS[name]
    rng = np.random.default_rng(1)
    sizes = ((heads, n_q, d), (heads_k, n_k, d), (heads_k, n_k, d_v))
    q, k, v = (
        arrays.narrow(m * rng.standard_normal((batch, *size)), dtype)
        for size, m in zip(sizes, (magnitude, 1, 1), strict=True)
    )
    call = _prepared(q, k, v, **options)
    exact = reference.forward(call.spec, call.q, call.k, call.v, dtype=np.float64)
    saved = Partial(arrays.narrow(exact.out, dtype), exact.lse.astype(np.float32))
    d_out, d_lse = gradients_to_pull(call)
    given = d_lse if has_d_lse else None
    return Posed(call, saved, d_out, given, expected_backward(call, d_out, given))


def gradients(problem: str, order: Order = Order.FORWARD, seed: int = 1, name: str = "forward_sm90") -> dict[str, Any]:
    call, saved, d_out, d_lse, _ = posed(problem)
    run = CudaSimKernel(name, order, seed)
    return backward_results(run.backward(call.spec, call.q, call.k, call.v, saved, d_out, d_lse))


def check(problem: str, order: Order = Order.FORWARD, seed: int = 1, name: str = "forward_sm90") -> None:
    check_results(posed(problem).expected, gradients(problem, order, seed, name))
