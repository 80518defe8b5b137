"""Hopper's backward pass on the simulator: right, with the same bits in every order of threads; planted mistakes are
told."""

from __future__ import annotations

import ctypes
import math
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import tilewise as tw
from tests.cuda.mistakes import WRONG, Mistake, expect_told, plant
from tests.cuda.test_ops import needs_compiler
from tests.fuzzing.menu import spoil_unread
from tilewise import arrays, reference, validate
from tilewise.arrays import Array
from tilewise.contract import Expected, backward_results, check_results, expected_backward, gradients_to_pull
from tilewise.expr import NQ, B, H, K, Q, S, where
from tilewise.kernels.cuda import marshal
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.simulator import Order, kernel
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel
from tilewise.spec import Partial
from tilewise.validate import Call

pytestmark = needs_compiler

FILES = (
    "backward_sm90.cu", "sm90_backward.h", "sm90_backward_producer.h", "sm90_tiles.h", "backward_sm90_rows.cu",
    "backward_sm90_d_query.cu",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels do not write is NaN, as on a GPU it would be anything."""
    launch = kernel._launch_sm90

    def launch_on_nan(rungs: Any, spec: Any, shape: Any, views: dict[str, View], order: Order, seed: int) -> None:
        for name in ("d_q", "d_k", "d_v"):
            ctypes.memset(views[name].address, 0xFF, 2 * math.prod(views[name].shape))
        launch(rungs, spec, shape, views, order, seed)

    monkeypatch.setattr(kernel, "_launch_sm90", launch_on_nan)


# -- problems ---------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """Tiles have 64 queries and 128 keys."""

    shape: tuple[int, int, int, int, int, int, int]  # batch, heads, heads_k, n_q, n_k, d, d_v
    options: dict[str, Any] = {}  # noqa: RUF012
    dtype: str = "bfloat16"
    d_lse: bool = True
    magnitude: float = 1.0  # of q


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
    "d 128": Problem((1, 2, 1, 70, 390, 128, 128), {"causal": True}),
    "d 96, d_v 80": Problem((2, 2, 1, 70, 150, 96, 80)),
    "d 80, d_v 128": Problem((1, 1, 1, 100, 280, 80, 128), {"causal": True}),
    "d 128, d_v 8": Problem((1, 1, 1, 100, 280, 128, 8)),
    "d 8, d_v 64": Problem((1, 1, 1, 100, 280, 8, 64)),
    # Types, scores and what else there is.
    "float16": Problem((1, 2, 1, 200, 300, 64, 48), {"causal": True}, "float16"),
    "no d_lse": Problem((1, 2, 1, 100, 150, 16, 16), {"causal": True}, d_lse=False),
    "a slope": Problem((1, 2, 1, 150, 280, 16, 16), {"causal": True, "score": tw.softcap(1.0), "scale": 0.5}),
    "a slope, float16, d 128": Problem((1, 1, 1, 100, 260, 128, 64), {"score": tw.softcap(2.0)}, "float16"),
    "alibi": Problem((1, 4, 2, 100, 150, 16, 16), {"score": tw.softcap(3.0) >> tw.alibi(4), "mask": tw.window(70)}),
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
    spoil_unread(tuple(map(np.array, lengths)), k, v)
    rows = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
    return validate.prepare_varlen(*rows, *map(np.array, lengths), **options)


@cache
def _posed(name: str) -> Posed:
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


def _gradients(problem: str, order: Order = Order.FORWARD, seed: int = 1, name: str = "forward_sm90") -> dict[str, Any]:
    call, saved, d_out, d_lse, _ = _posed(problem)
    run = CudaSimKernel(name, order, seed)
    return backward_results(run.backward(call.spec, call.q, call.k, call.v, saved, d_out, d_lse))


def _check(problem: str, order: Order = Order.FORWARD, seed: int = 1, name: str = "forward_sm90") -> None:
    check_results(_posed(problem).expected, _gradients(problem, order, seed, name))


def _same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(x.view(np.uint8), other[name].view(np.uint8)) for name, x in one.items())


@pytest.mark.parametrize("problem", PROBLEMS)
def test_gradients_are_right_and_have_the_same_bits_in_every_order(problem: str) -> None:
    first = _gradients(problem)
    check_results(_posed(problem).expected, first)
    orders = [(Order.FORWARD, 1), (Order.BACKWARD, 1), *((Order.RANDOM, seed) for seed in (1, 2, 3))]
    for order, seed in orders:
        assert _same_bits(first, _gradients(problem, order, seed)), (order, seed)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_gradients_in_no_order_are_right(problem: str) -> None:
    for order, seed in ((Order.FORWARD, 1), (Order.RANDOM, 2)):
        _check(problem, order, seed, "unordered")


def test_what_meets_nothing_is_zero() -> None:
    got = {name: arrays.widen(x, np.float32) for name, x in _gradients("tiles that meet none").items()}
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

# The first block to run takes all key tiles, unless it is told otherwise.
TAKE = "const int index = next_index();"
FREE = "k_ring.parity = q_ring.parity = 1;"


def _at_most(count: int) -> dict[str, str]:
    """Key tiles that a block takes."""
    few = f"const int index = taken++ < {count} ? next_index() : launch.items;"
    return {FREE: f"{FREE}\n        int taken = 0;", TAKE: few}


LAST_FIRST = {TAKE: "const int asked = next_index();\n"
                    "        const int index = asked < launch.items ? launch.items - 1 - asked : asked;"}  # fmt: skip


@pytest.mark.parametrize("order", Order, ids=lambda order: order.name)
@pytest.mark.parametrize("problem", ["grouped", "d 128"])
@pytest.mark.parametrize("each", [1, 2])
def test_blocks_that_share_the_key_tiles(
    problem: str, each: int, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of a query tile come from several blocks, and have the bits that one block gives."""
    alone = _gradients(problem)
    monkeypatch.setattr(kernel, "MULTIPROCESSORS", 64)
    plant(monkeypatch, FILES, _at_most(each))
    assert _same_bits(alone, _gradients(problem, order))


def test_heads_by_sections_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = _gradients("grouped")
    monkeypatch.setattr(marshal, "_L2_SHARE", 1)
    assert _same_bits(alone, _gradients("grouped"))


def test_a_key_tile_waits_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU those may be under way in other blocks. Here nobody has begun them: it would wait forever."""
    plant(monkeypatch, FILES, LAST_FIRST)
    expect_told("deadlock.*for another block", partial(_check, "full"))


# -- planted mistakes -------------------------------------------------------------------------------------------------

EARLY = f"{WRONG}|more often|deadlock|after a warp had issued it"
FREE_Q = "            arrive(shared.q_free(stage ^ 1));  // that of the step before\n"
FREE_V = "        if (LAST) arrive(shared.v_free());\n"
FREE_D_OUT = "        arrive(shared.d_out_free(stage));\n"
FREE_K = "            arrive(shared.k_free(stage));\n"
MULTIPLY_V = "        multiply_rows<COLUMNS>(d_p, shared.v(), shared.d_out(stage));\n"
MEET = "            meet_queries(__shfl_sync(~0u, shared.item(stage).visits, 0));\n"
ITEM = "            const Shared::Item item = shared.copy_of_item(stage);\n"
TURN = "hw::wait_for_number(owed, turn);"

# Each is one kind of mistake.
MISTAKES: dict[str, Mistake] = {
    # Tiles arrive.
    "no wait for k": Mistake(
        f"{WRONG}|deadlock", "full", {"hw::mbarrier_wait(shared.k_full(stage), keys / K_STAGES % 2);": ""},
    ),
    "no wait for q": Mistake(
        f"{WRONG}|more often", "full", {"hw::mbarrier_wait(shared.q_full(step % 2), step / 2 % 2);": ""},
    ),
    "no wait for v": Mistake(WRONG, "full", {"hw::mbarrier_wait(shared.v_full(), keys % 2);": ""}),
    "no wait for d_out": Mistake(
        f"{WRONG}|more often", "full", {"hw::mbarrier_wait(shared.d_out_full(stage), steps / 2 % 2);": ""},
    ),
    "a parity that never changes": Mistake(EARLY, "full", {"parity ^= 1;": ""}),
    "the parity of q changes too often": Mistake(
        EARLY, "full", {"q_full(step % 2), step / 2 % 2": "q_full(step % 2), step % 2"},
    ),
    "the parity of v of a ring of two": Mistake(
        EARLY, "full", {"shared.v_full(), keys % 2": "shared.v_full(), keys / 2 % 2"},
    ),
    "v not free at first": Mistake(
        "deadlock", "full", {"v_ring.parity = o_ring.parity = 1;": "o_ring.parity = 1;"},
    ),
    "shifts and deltas that nobody waits for": Mistake(
        f"more than were expected|more often|{WRONG}", "full", {" + (more ? ROWS_BYTES : 0)": ""},
    ),
    "too many bytes": Mistake(
        "deadlock.* 16384 bytes to come", "full",
        {"arrive_expect(told, ROWS * PARTS": "arrive_expect(told, 2 * ROWS * PARTS"},
    ),
    # Tails of packed sequences.
    "rows of the next sequence": Mistake(WRONG, "packed", {"params.n_sequences > 1 && left < ROWS": "false"}),
    "rows cleared before they come": Mistake(
        f"{WRONG}|without fence|more often", "packed", {"wait_together(told, tails++ % 2);": "tails++;"},
    ),
    "no fence after rows are cleared": Mistake(
        "without fence.proxy.async", "packed", {"hw::fence_async();\n        __syncwarp();": "__syncwarp();"},
    ),
    "the parity of tails": Mistake(EARLY, "packed", {"tails++ % 2": "tails % 2"}),
    "keys of another sequence": Mistake(WRONG, "packed", {"sequence.k_begin + key + half * 8": "key + half * 8"}),
    "queries of another sequence": Mistake(
        WRONG, "packed", {"row_of<Element>(launch.backward.d_q, b, h, sequence.q_begin + query)":
                          "row_of<Element>(launch.backward.d_q, b, h, query)"},
    ),
    # Places are let go.
    "q never let go": Mistake("deadlock", "full", {FREE_Q: ""}),
    "q let go before d_k is done": Mistake(
        EARLY, "full",
        {FREE_Q: "", "        add_to_d_k(stage);\n":
         "        add_to_d_k(stage);\n        if (!LAST) arrive(shared.q_free(stage));\n"},
    ),
    "the last q let go before d_k is done": Mistake(
        EARLY, "full",
        {"        arrive(shared.q_free((steps - 1) % 2));\n": "",
         "        multiply_d_q(steps - 1);\n        hw": "        arrive(shared.q_free((steps - 1) % 2));\n"
                                                     "        multiply_d_q(steps - 1);\n        hw"},
    ),
    "d_out let go before d_v is done": Mistake(
        EARLY, "full", {FREE_D_OUT: "", "        write_d_s(stage);\n": f"{FREE_D_OUT}        write_d_s(stage);\n"},
    ),
    "v let go before d_p is done": Mistake(EARLY, "full", {FREE_V: "", MULTIPLY_V: f"{MULTIPLY_V}{FREE_V}"}),
    "v never let go by a key tile that meets none": Mistake(
        "deadlock", "tiles that meet none",
        {"            arrive(shared.v_free());\n            return;": "            return;"},
    ),
    "k let go before it is multiplied": Mistake(
        EARLY, "one query tile",
        {FREE_K: "", FREE_V: f"{FREE_V}        if (LAST) arrive(shared.k_free(keys % K_STAGES));\n",
         MEET + ITEM: ITEM + MEET},
    ),
    "too few to let q go": Mistake(
        EARLY, "full", {"init(q_free(stage), CONSUMER_WARPS)": "init(q_free(stage), CONSUMER_WARPS / 2)"},
    ),
    "too many to let k go": Mistake("deadlock", "full", {"CONSUMER_WARPS + 3)": "CONSUMER_WARPS + 4)"}),
    # What threads hand to each other, to products and to the copy engine.
    "no fence after d_s": Mistake(
        "without fence.proxy.async", "full", {"write_d_s(stage);\n        hw::fence_async();": "write_d_s(stage);"},
    ),
    "no fence after d_q": Mistake(
        "without fence.proxy.async", "full", {"hw::fence_async();\n        hw::barrier_arrive": "hw::barrier_arrive"},
    ),
    "a warpgroup that does not wait for the other's d_s": Mistake(
        f"{WRONG}|without fence.proxy.async|more often|after a warp had issued it", "packed",
        {"hw::mbarrier_wait(shared.d_s_full(step % 2), step / 2 % 2);": ""},
    ),
    "d_s written while the other warpgroup multiplies it": Mistake(
        f"{WRONG}|more often|without fence.proxy.async", "full",
        {"hw::mbarrier_wait(shared.d_s_free(stage), steps / 2 % 2 ^ 1);": ""},
    ),
    "d_s let go before it is multiplied": Mistake(
        EARLY, "full",
        {"        arrive(shared.d_s_free(step % 2));\n": "",
         "multiply_d_s_k(step % 2);": "multiply_d_s_k(step % 2);\n        arrive(shared.d_s_free(step % 2));"},
    ),
    "d_s never let go": Mistake("deadlock", "full", {"        arrive(shared.d_s_free(step % 2));\n": ""}),
    "d_s of another step": Mistake(WRONG, "full", {"multiply_d_s_k(step % 2);": "multiply_d_s_k(step % 2 ^ 1);"}),
    "a last d_q that is not handed over": Mistake(
        "deadlock|ended", "full",
        {"        arrive(shared.q_free((steps - 1) % 2));\n        finish_d_q(steps - 1);\n":
         "        arrive(shared.q_free((steps - 1) % 2));\n"},
    ),
    "d_q overwritten before it was read": Mistake(
        f"{WRONG}|deadlock.*named barrier", "full",
        {"hw::barrier_sync(Shared::d_q_room(step, number), 160);":
         "hw::barrier_arrive(Shared::d_q_room(step, number), 160);"},
    ),
    "d_q stored before it is written": Mistake(
        f"{WRONG}|deadlock.*named barrier", "full",
        {"hw::barrier_sync(Shared::d_q_written(steps, half), 160);":
         "hw::barrier_arrive(Shared::d_q_written(steps, half), 160);"},
    ),
    "d_q let go before the copy engine has read it": Mistake(
        WRONG, "full", {"hw::tma_store_commit();\n                hw::tma_store_wait<0>();": "hw::tma_store_commit();"},
    ),
    "d_q of which nobody says that it was read": Mistake(
        "deadlock.*named barrier", "full", {"hw::barrier_arrive(Shared::d_q_room(steps, half), 160);": ""},
    ),
    # Turns.
    # Key tiles in the order in which blocks at once may come to add theirs.
    "no wait for the turn": Mistake(WRONG, "full", {TURN: "", **LAST_FIRST}),
    "a turn given away once d_q was read": Mistake(
        WRONG, "full", {"hw::bulk_wait_done<0>();": "hw::tma_store_wait<0>();"},
    ),
    "a turn never given away": Mistake(
        "deadlock.*for another block", "full", {"hw::add_release(owed, 1);": ""},
    ),
    "a turn too late": Mistake(
        "deadlock.*for another block", "full", {"min(at.j, run.last)": "min(at.j + 1, run.last)"},
    ),
    "a turn too late after tiles that are skipped": Mistake(
        "deadlock.*for another block", "window", {"min(at.j, run.last) - run.first": "min(at.j, run.last)"},
    ),
    "plans of another head": Mistake(f"{WRONG}|deadlock", "heads differ", {"int64(h) * here.offsets_head": "0"}),
    "plans of another batch": Mistake(f"{WRONG}|deadlock", "heads differ", {"int64(b) * here.offsets_batch": "0"}),
    "turns that do not begin at 0": Mistake(
        "deadlock.*for another block", "full",
        {"if (threadIdx.x == 0) launch.turns": "if (threadIdx.x == 0 && tile == 0) launch.turns"},
    ),
    "a first turn that adds": Mistake(
        WRONG, "full", {"leads && turn == 0": "leads && turn < 0", "leads && turn != 0": "leads && turn >= 0"},
    ),
    "turns that only store": Mistake(
        WRONG, "full", {"leads && turn == 0": "leads", "leads && turn != 0": "leads && turn < 0"},
    ),
    "sums of a query tile that met none": Mistake(WRONG, "tiles that meet none", {"launch.turns[at] > 0;": "true;"}),
    # Products.
    "wrong swizzle of d_s": Mistake(WRONG, "full", {"^ row % 8)": "^ row % 4)"}),
    "wrong step along d_s": Mistake(
        WRONG, "full", {"a = a_at + k * 16 * ROW_BYTES / 16, b": "a = a_at + k * 32 / 16, b"},
    ),
    "wrong step along k": Mistake(
        WRONG, "full", {"b = b_at + k * 16 * ROW_BYTES / 16;": "b = b_at + k * 8 * ROW_BYTES / 16;"},
    ),
    "the other half of k's columns": Mistake(WRONG, "whole tiles", {"k() + number * (": "k() + (1 - number) * ("}),
    "the other part of k's columns": Mistake(
        WRONG, "d 128", {"Q_PARTS == 2 ? TILE_K * ROW_BYTES": "Q_PARTS == 2 ? ROW_BYTES / 2"},
    ),
    "the other half of d_q": Mistake(WRONG, "whole tiles", {"query) + half * HALF;": "query) + (1 - half) * HALF;"}),
    "d_q's rows in another order": Mistake(
        WRONG, "whole tiles", {"lane / 4 + lower * 8": "lane / 4 + (1 - lower) * 8"},
    ),
    "the other warpgroup's keys": Mistake(
        WRONG, "full", {"shared.d_s(stage) + number * 64": "shared.d_s(stage) + (1 - number) * 64"},
    ),
    "d_k of the query tile before": Mistake(
        WRONG, "full", {"swizzled_128(shared.q(stage), 8": "swizzled_128(shared.q(stage ^ 1), 8"},
    ),
    "no fence before d_p": Mistake("wgmma.fence is missing", "full", {f"hw::wgmma_fence();\n{MULTIPLY_V}": MULTIPLY_V}),
    "no wait for d_p": Mistake(
        WRONG, "full", {"hw::wgmma_wait<1>();\n        hw::pin(d_p);": "hw::wgmma_wait<2>();"},
    ),
    "no wait for d_q": Mistake(
        f"{WRONG}|written to", "full", {"hw::wgmma_wait<LAST ? 1 : 2>();": "hw::wgmma_wait<LAST ? 2 : 3>();"},
    ),
    "no wait for s": Mistake(
        f"{WRONG}|written to before", "full", {"hw::wgmma_wait<1>();\n            hw::pin(s);": ""},
    ),
    "no wait for d_k": Mistake(
        "ended before its wgmma|written to before", "full",
        {"hw::wgmma_wait<0>();\n        hw::pin(d_k);": "hw::pin(d_k);"},
    ),
    "p packed before d_v is done": Mistake(
        f"operand were written to|{EARLY}", "full",
        {"hw::wgmma_wait<FIRST ? 0 : 1>();": "hw::wgmma_wait<FIRST ? 1 : 2>();"},
    ),
    "d_k that does not begin at 0": Mistake(WRONG, "full", {"d_k[i] = 0;": ""}),
    "d_v that does not begin at 0": Mistake(WRONG, "tiles that meet none", {"d_v[i] = 0;": ""}),
    # Scores and weights.
    "no mask": Mistake(WRONG, "causal", {"(is_partial && !variant::mask(params, head, row, key, near))": "false"}),
    "a mask one query off": Mistake(
        WRONG, "causal", {"n * 8 + lane % 4 * 2 + e;\n": "n * 8 + lane % 4 * 2 + e + 1;\n"},
    ),
    "the kind of another query tile": Mistake(
        WRONG, "causal", {"shared.meeting(stage).kind": "shared.meeting(stage ^ 1).kind"},
    ),
    "scores beyond the last query": Mistake(WRONG, "no number beyond the last query", {"query >= n_q || ": ""}),
    "no shift beyond the last query": Mistake(WRONG, "full", {"rows[row] = lse": "if (inside) rows[row] = lse"}),
    "no shift of rows without keys": Mistake(
        WRONG, "every other row", {"lse == -INFINITY ? INFINITY : lse;": "lse;"},
    ),
    "powers of 2": Mistake(WRONG, "full", {"exp2_approximate(LOG2_E * fmaf": "exp2_approximate(fmaf"}),
    "no delta": Mistake(WRONG, "full", {"- (i % 2 ? delta.y : delta.x)": ""}),
    "delta of half of the columns": Mistake(WRONG, "whole tiles", {"delta += __shfl_xor_sync(~0u, delta, 2);": ""}),
    "d_lse added": Mistake(WRONG, "full", {"delta -= *row_of": "delta += *row_of"}),
    "no slope": Mistake(
        WRONG, "a slope", {"s[i] *= variant::slope(params, head, row, key, near, plain[i]);": "s[i] *= 1;"},
    ),
    "a slope of scores without scale": Mistake(
        WRONG, "a slope", {"plain[i] = s[i] * params.scale;": "plain[i] = s[i];"},
    ),
    "no scale of d_k": Mistake(WRONG, "full", {"d_k, D, item, params.scale": "d_k, D, item, 1.0f"}),
    "no scale of d_q": Mistake(
        WRONG, "full", {"&held[0][lower * 2], params.scale": "&held[0][lower * 2], 1.0f"},
    ),
    # Which tiles meet.
    "a head too few of a group": Mistake(
        WRONG, "grouped",
        {"last_head(h + launch.backward.params.group)": "last_head(h + launch.backward.params.group - 1)"},
    ),
    "the last run only": Mistake(
        f"{WRONG}|deadlock", "runs", {"first_run = offsets[0];": "first_run = offsets[1] - 1;"},
    ),
    "a visit too few": Mistake("deadlock", "full", {"at.tile + 1 - at.first": "at.tile - at.first"}),
    "keys of another head": Mistake(
        WRONG, "tiles that meet none",
        {"sequence.k_begin + item.j * TILE_K, item.hk, item.b, sequence.n_k - item.j * TILE_K);":
         "sequence.k_begin + item.j * TILE_K, 0, item.b, sequence.n_k - item.j * TILE_K);"},
    ),
}  # fmt: skip


# Where there is no order.
UNORDERED: dict[str, Mistake] = {
    "sums that do not begin at 0": Mistake(WRONG, "full", {"sums[i] = make_float4(0, 0, 0, 0)": "sums[i] = sums[i]"}),
    "half of the sums begin at 0": Mistake(
        WRONG, "whole tiles", {"i < 2 * HALF_BYTES / 16; i += 4": "i < HALF_BYTES / 16; i += 4"},
    ),
    "a sum that is stored": Mistake(WRONG, "full", {"ORDERED ? turn_of(at) : 1": "ORDERED ? turn_of(at) : 0"}),
    "a round that does not go on": Mistake(
        f"{WRONG}|deadlock|outside|address|never", "full",
        {"                h = last_head - launch.backward.params.group;\n": ""},
    ),
    "a visit too few": Mistake("deadlock", "full", {"if (left == 0) return false;": "if (left <= 1) return false;"}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", UNORDERED)
def test_a_mistake_without_order_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, problem, edits = UNORDERED[mistake]
    plant(monkeypatch, FILES, edits)
    expect_told(expected, partial(_check, problem, name="unordered"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, problem, edits = MISTAKES[mistake]
    plant(monkeypatch, FILES, edits)
    expect_told(expected, partial(_check, problem))
