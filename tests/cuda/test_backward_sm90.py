"""Hopper's backward pass on the simulator: right, with the same bits in every order of threads."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.cuda import every_lane
from tests.cuda.backward_problems import (
    FILES,
    LAST_FIRST,
    PROBLEMS,
    TAKE,
    check,
    gradients,
    posed,
    small_shares,  # noqa: F401
    unwritten,  # noqa: F401
)
from tests.cuda.mistakes import expect_told, plant, some
from tests.cuda.test_ops import needs_compiler
from tilewise import arrays, validate
from tilewise.contract import check_results, gradients_to_pull
from tilewise.expr import Expr
from tilewise.kernels.cuda import marshal_backward
from tilewise.kernels.cuda.backward_rungs import BACKWARD_SM90
from tilewise.kernels.cuda.simulator import Order, kernel
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel
from tilewise.spec import Attention, Partial, Shape, Tile

pytestmark = needs_compiler


def _same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(x.view(np.uint8), other[name].view(np.uint8)) for name, x in one.items())


# After the first, which is Order.FORWARD.
ORDERS = {
    "two": [(Order.BACKWARD, 1), (Order.RANDOM, 1)],
    "more": [(Order.FORWARD, 1), (Order.RANDOM, 2), (Order.RANDOM, 3)],
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("orders", ["two", pytest.param("more", marks=pytest.mark.slow)])
def test_gradients_are_right_and_have_the_same_bits_in_every_order(problem: str, orders: str) -> None:
    first = gradients(problem)
    check_results(posed(problem).expected, first)
    for order, seed in ORDERS[orders]:
        assert _same_bits(first, gradients(problem, order, seed)), (order, seed)


# The same kernels with another sum of d_q: every other problem here.
@pytest.mark.parametrize("problem", some(PROBLEMS))
def test_gradients_in_no_order_are_right(problem: str) -> None:
    for order, seed in ((Order.FORWARD, 1), (Order.RANDOM, 2)):
        check(problem, order, seed, "unordered")


@pytest.mark.parametrize(
    ("d", "score", "tile"),
    [(64, None, (128, 128)), (64, tw.softcap(2.0), (64, 128)), (128, None, (64, 128)), (256, None, (64, 64))],
)
def test_tiles_are_as_large_as_registers_allow(d: int, score: Expr | None, tile: tuple[int, int]) -> None:
    shape = Shape(1, 1, 1, 512, 512, d, d, "bfloat16")
    assert BACKWARD_SM90.rung(shape).default_tile(Attention(1.0, score=score), shape) == Tile(*tile)


def test_what_meets_nothing_is_zero() -> None:
    got = {name: arrays.widen(x, np.float32) for name, x in gradients("tiles that meet none").items()}
    assert not got["d_q"][:, :, :128].any()
    assert not any(got[name][:, :, at].any() for name in ("d_k", "d_v") for at in (slice(128), slice(256, None)))
    assert all(x.any() for x in got.values())


def test_weights_of_huge_scores_are_exact() -> None:
    """A query sees its own key, by scores up to 36608, and lse is the same number: weights are 1, and d_v is d_out."""
    sizes = np.arange(128, 144) * 256.0
    q, k = (arrays.narrow(x[None, None], "float16") for x in (np.diag(sizes), np.eye(16)))
    call = validate.prepare(q, k, k, scale=1.0)
    saved = Partial(k, sizes.astype(np.float32)[None, None])
    d_out, _ = gradients_to_pull(call)
    grads = CudaSimKernel("forward_sm90").backward(call.spec, call.q, call.k, call.v, saved, d_out)
    assert np.array_equal(grads.v, d_out)


# -- blocks and their turns -------------------------------------------------------------------------------------------

FREE = "q_ring.parity = 1;  // all places are free"


def _at_most(count: int) -> dict[str, str]:
    """Key tiles that a block takes."""
    few = f"const int index = taken++ < {count} ? next_index() : launch.items;"
    return {FREE: f"{FREE}\n        int taken = 0;", TAKE: few}


@pytest.mark.parametrize("order", Order, ids=lambda order: order.name)
@pytest.mark.parametrize("problem", ["grouped", "d 128"])
@pytest.mark.parametrize("each", [1, 2])
def test_blocks_that_share_the_key_tiles(
    problem: str, each: int, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of a query tile come from several blocks, and have the bits that one block gives."""
    alone = gradients(problem)
    monkeypatch.setattr(kernel, "MULTIPROCESSORS", 64)
    plant(monkeypatch, FILES, _at_most(each))
    assert _same_bits(alone, gradients(problem, order))


@pytest.mark.parametrize("blocks", [2, 64])
@pytest.mark.parametrize("sections", [(1, 4), (2, 2), (1, 3)], ids=str)
def test_heads_by_sections_have_the_same_bits(
    sections: tuple[int, int], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four key heads; the last section has the rest. d_q of a section comes behind the key tiles of later ones."""
    alone = gradients("grouped")
    monkeypatch.setattr(marshal_backward, "_sections", lambda *_: sections)
    monkeypatch.setattr(kernel, "MULTIPROCESSORS", blocks)
    if blocks > 2:
        plant(monkeypatch, FILES, _at_most(1))
    assert _same_bits(alone, gradients("grouped"))


@pytest.mark.parametrize("problem", ["grouped", "d 80, d_v 40, packed", "d 256, causal"])
def test_the_share_of_d_q_changes_nothing(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_tiles = gradients(problem)
    monkeypatch.setattr(marshal_backward, "_SHARE", 1 << 18)
    assert _same_bits(by_tiles, gradients(problem))


def test_a_key_tile_waits_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU those may be under way in other blocks. Here nobody has begun them: it would wait forever."""
    plant(monkeypatch, FILES, LAST_FIRST)
    expect_told("deadlock.*for another block", partial(check, "full"))


@pytest.mark.parametrize("problem", ["full", "packed", "d 128", "d 192, packed"])
def test_a_version_that_racecheck_understands(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, FILES, dict(edit for name in FILES for edit in every_lane.EDITS.get(name, ())))
    check(problem)
