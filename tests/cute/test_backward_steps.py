"""What the backward pass makes of scores, run on a CPU by CuTe's compiler, beside NumPy; products are NumPy's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")
import tilewise as tw
from tests.cute.test_layouts import _from
from tilewise.derivative import score_slopes
from tilewise.expr import Expr, K, Q, S, where
from tilewise.kernels.cute import modules, turns
from tilewise.kernels.cute.rungs import BACKWARD, BACKWARD_TWICE
from tilewise.kernels.cute.wanted import kernel_of
from tilewise.kernels.tables import tables
from tilewise.reference import values
from tilewise.spec import Attention, Lengths, Shape

SHAPE = Shape(2, 4, 2, 150, 200, 64, 64, "bfloat16")
B, H = 1, 3  # of which scores are looked at
PACKED = Lengths(np.array([0, 60, 60, 150]), np.array([0, 110, 130, 200]))
BIAS = np.random.default_rng(5).standard_normal((4, 150, 200)).astype(np.float32)
SPECS = {
    "full": Attention(0.125),
    "causal": Attention(0.125, tw.causal()),
    "window": Attention(0.125, tw.window(9, 30)),
    "heads differ": Attention(0.125, abs(Q - K) < 20 * (tw.H + 1) + tw.B),
    "softcap": Attention(0.125, None, tw.softcap(2.0)),
    "softcap, bias": Attention(0.125, tw.causal(), tw.softcap(2.0) >> tw.bias(BIAS)),
    "masking score": Attention(0.125, None, where(K % 5 == 2, -np.inf, S * S)),
    "packed": Attention(0.125, tw.causal(), tw.softcap(2.0), lengths=PACKED),
}


def _expected(
    spec: Attention, shape: Shape, product: np.ndarray, d_p: np.ndarray, shift: np.ndarray, delta: np.ndarray
):
    """p and d_s, sequence by sequence."""
    p, d_s = np.zeros_like(product), np.zeros_like(product)
    for part, queries, keys in shape.sequences(spec.lengths):
        at = queries, keys
        s = product[at].astype(np.float64) * spec.scale
        b = 0 if spec.lengths is not None else B
        env = part.env(b, H, np.arange(part.n_q)[:, None], np.arange(part.n_k)) | {"S": s}
        scores = s if spec.score is None else np.broadcast_to(values(spec.score, env), s.shape)
        counts = True if spec.mask is None else values(spec.mask, env)
        scores = np.where(np.broadcast_to(counts, s.shape), scores, -np.inf)
        p[at] = np.exp2(scores * np.log2(np.e) + shift[queries, None])
        d_score = p[at] * (d_p[at] - delta[queries, None])
        slope = np.broadcast_to(values(score_slopes(spec)[S], env), s.shape)
        d_s[at] = np.where(d_score == 0, 0, d_score * slope)
    return p, d_s


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("order", ["by_query", "by_key", "once"])
def test_weights_and_their_gradients_are_numpys(order: str, name: str) -> None:
    """Tile by tile as the plan has them: each score is met once, and none that counts is left out."""
    from tests.cute import backward_steps
    from tilewise.kernels.cute.launch import as_kernels_take

    spec = SPECS[name]
    shape = SHAPE if spec.lengths is None else replace(SHAPE, batch=1)
    if order == "once" and not BACKWARD.takes(spec, shape):
        pytest.skip("goes over the scores twice")
    b = B if spec.lengths is None else 0
    kernel = kernel_of(BACKWARD if order == "once" else BACKWARD_TWICE, spec, shape)
    rng = np.random.default_rng(0)
    product, d_p = (rng.standard_normal((shape.n_q, shape.n_k)).astype(np.float32) for _ in range(2))
    shift, delta = (rng.standard_normal((shape.batch, shape.heads, shape.n_q)).astype(np.float32) for _ in range(2))
    p, d_s = (np.zeros_like(product) for _ in range(2))
    tile = kernel.tile if order == "by_query" else kernel.by_key
    assert tile is not None
    plan = tables(spec, shape, tile, by_key=order != "by_query")
    if order == "once":
        plan = turns.in_turns(plan, shape, spec.lengths, tile.q)
    records = np.broadcast_to(plan.records, (shape.batch, shape.heads, *plan.records.shape[2:])).copy()
    arrays = tuple(_from(as_kernels_take(slot.array)) for slot in spec.loaded) or (_from(shift),)
    build = SimpleNamespace(**vars(kernel), variant=modules.module(kernel.functions))
    getattr(backward_steps, order)(
        *map(_from, (product, d_p, p, d_s, shift, delta, records, plan.runs)), arrays, spec.scale, b, H, shape.group,
        build,
    )  # fmt: skip
    want_p, want_d_s = _expected(spec, shape, product, d_p, shift[b, H], delta[b, H])
    rtol = 1 / 128 if order == "once" else 1e-5  # there they are narrowed, as products take them
    np.testing.assert_allclose(p, want_p, rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(d_s, want_d_s, rtol=10 * rtol, atol=1e-5)


def test_delta_is_of_the_output_and_its_remainder() -> None:
    from tests.cute import backward_steps

    rng = np.random.default_rng(0)
    out, remainder, d_out = (rng.standard_normal((5, 24)).astype(np.float32) for _ in range(3))
    delta = np.zeros((5, 3), np.float32)
    backward_steps.delta_of_parts(*map(_from, (out, remainder, d_out, delta)))
    np.testing.assert_allclose(delta, (d_out * (out + remainder)).reshape(5, 3, 8).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("columns", "count", "width"), [(64, 128, 64), (128, 77, 120), (256, 1, 192)])
def test_sums_are_stored_where_they_belong(columns: int, count: int, width: int) -> None:
    """And nothing is written beyond the last row and column."""
    from tests.cute import backward_steps

    out = np.full((128, width), -1, np.float32)
    backward_steps.stored(_from(out), count, (128, columns))
    row, column = np.ogrid[:128, :width]
    assert np.array_equal(out, np.where(row < count, 256 * row + column, -1))


@pytest.mark.parametrize("score", [None, tw.alibi(4), tw.bias(BIAS)], ids=["none", "alibi", "bias"])
def test_a_slope_of_1_is_no_function(score: Expr | None) -> None:
    assert "def slope" not in modules.text(Attention(1.0, None, score), has_slope=True)
    assert "def slope" in modules.text(Attention(1.0, None, tw.softcap(2.0)), has_slope=True)
    assert "def slope" not in modules.text(Attention(1.0, None, tw.softcap(2.0)))
