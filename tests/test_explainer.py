"""The recorder behind `tilewise explain`: its numbers are the kernel's, and add up to the plan's and to NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise as tw
from tilewise import schedule
from tilewise.explainer.record import Recording, record
from tilewise.expr import Expr
from tilewise.schedule import Kind
from tilewise.spec import Attention, Shape, Tile

MASKS = {
    "full": None,
    "causal window": tw.causal() & tw.window(9),
    "nothing": tw.K < 0,
    "prefix": tw.causal() | tw.prefix(5),
}
TILE = Tile(16, 8)


def _recording(mask: Expr | None = None, n_q: int = 37, n_k: int = 45, magnitude: float = 1.0) -> Recording:
    shape = Shape(1, 1, 1, n_q, n_k, 8, 8)
    return record(Attention(shape.d**-0.5, mask), shape, TILE, magnitude=magnitude)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_tile_has_a_step_and_the_last_state_is_the_result(mask: Expr | None) -> None:
    made = _recording(mask)
    assert [(step.query_tile, step.key_tile) for step in made.steps] == list(np.ndindex(3, 6))
    for step in made.steps:
        assert (step.numbers is None) == (step.kind == Kind.EMPTY)
    for i in range(3):
        last = [s.numbers for s in made.steps if s.query_tile == i and s.numbers is not None]
        if last:
            seen = last[-1].row_sum > 0
            rows = made.plan.queries(i)
            np.testing.assert_array_equal(
                (last[-1].acc / last[-1].row_sum[:, None])[seen], np.asarray(made.done.out[rows])[seen]
            )


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_state_is_the_plain_softmax_of_the_scores_so_far(mask: Expr | None) -> None:
    made = _recording(mask)
    for i in range(3):
        scores: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for step in made.steps:
            if step.query_tile != i or step.numbers is None:
                continue
            scores.append(step.numbers.s)
            values.append(made.v[made.plan.keys(step.key_tile)])
            s, v = np.concatenate(scores, axis=1).astype(np.float64), np.concatenate(values)
            seen = np.isfinite(s).any(axis=1)
            p = np.exp(s[seen] - s[seen].max(axis=1, keepdims=True))
            n = step.numbers
            np.testing.assert_array_equal(n.row_max, s.max(axis=1).astype(np.float32))
            np.testing.assert_allclose(n.row_sum[seen], p.sum(axis=1), rtol=1e-5)
            np.testing.assert_allclose(n.acc[seen], p @ v, rtol=1e-4, atol=1e-5)


def test_moved_maxima_are_marked() -> None:
    made = _recording(tw.causal())
    before = {i: np.full(made.plan.queries(i).stop - made.plan.queries(i).start, -np.inf) for i in range(3)}
    marked = 0
    for step in made.steps:
        if step.numbers is not None:
            np.testing.assert_array_equal(step.numbers.moved, step.numbers.row_max > before[step.query_tile])
            before[step.query_tile] = step.numbers.row_max
            marked += int(step.numbers.moved.sum())
    assert marked > 37


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("sizes", [(37, 45), (32, 40), (5, 64)])
def test_bytes_add_up_to_the_plan(mask: Expr | None, sizes: tuple[int, int]) -> None:
    made = _recording(mask, *sizes)
    last = made.steps[-1].memory
    assert last.tiled.total == made.plan.bytes_tiled
    assert last.naive.total == made.plan.bytes_naive
    held = max(step.memory.on_chip for step in made.steps)
    assert held <= made.plan.bytes_on_chip
    whole = [step.kind != Kind.EMPTY and step.query_tile * 16 + 16 <= sizes[0] for step in made.steps]
    assert (held == made.plan.bytes_on_chip) == any(whole)


def test_without_the_running_maximum_large_scores_overflow_in_half_precision_first() -> None:
    made = _recording(magnitude=5.0)
    sums = [step.numbers.bare_sums for step in made.steps if step.numbers is not None]
    assert any(np.isinf(x["float16"]).any() for x in sums)
    assert not any(np.isinf(x["float32"]).any() for x in sums)
    first = made.steps[0].numbers
    assert first is not None
    np.testing.assert_array_equal(first.bare_sums["float32"], np.exp(first.s).sum(axis=1))


def test_the_head_asked_for_is_recorded() -> None:
    shape, tile = Shape(1, 4, 4, 16, 16, 8, 8), Tile(8, 8)
    spec = Attention(1.0, score=tw.alibi(4))
    slopes = [record(spec, shape, tile, head=h).steps[0].numbers for h in (0, 3)]
    assert slopes[0] is not None and slopes[1] is not None
    assert not np.array_equal(slopes[0].s, slopes[1].s)
    assert schedule.plan(spec, shape, tile).bytes_tiled == 4 * record(spec, shape, tile).steps[-1].memory.tiled.total
