"""forward_sm90 on the simulator: planted mistakes are told, and what is rare on real inputs happens and is right."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.cuda.mistakes import SOUND, WRONG, Mistake, check_all_can_be_planted, expect_told, plant, some, told
from tests.cuda.test_ops import needs_compiler
from tilewise import arrays, validate
from tilewise.arrays import Array
from tilewise.contract import Expected, check_results, expected_forward, forward_results
from tilewise.expr import K, Q
from tilewise.kernels.cuda.simulator import Order
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel
from tilewise.spec import Partial, Tile
from tilewise.validate import Call

pytestmark = needs_compiler

FILES = ("forward_sm90.cu", "sm90.h", "sm90_tiles.h", "sm90_producer.h", "sm90_softmax.h")
TILE = Tile(128, 16)  # two warpgroups; few keys, so that there are many tiles and little to compile


# -- problems ---------------------------------------------------------------------------------------------------------


def _call(q: Array, k: Array, v: Array, dtype: str = "bfloat16", lengths: Any = None, **options: Any) -> Call:
    q, k, v = (arrays.narrow(x, dtype) for x in (q, k, v))
    if lengths is not None:
        return validate.prepare_varlen(q, k, v, lengths, lengths, **options)
    return validate.prepare(q, k, v, **options)


def _causal(d: int = 16) -> Call:
    """Tiles of every kind, for each warpgroup others; more query tiles than a block has places for."""
    rng = np.random.default_rng(1)
    return _call(*(rng.standard_normal((1, 5, 150, d)) for _ in range(3)), causal=True)


def _flat() -> Call:
    """No key is much heavier than another."""
    call = _causal()
    return _call(*(factor * arrays.widen(x, np.float32) for factor, x in ((0.01, call.q), (1, call.k), (1, call.v))),
                 causal=True)  # fmt: skip


def _window() -> Call:
    """Tiles that one warpgroup or the other skips; no lane may miss a barrier's phase there."""
    rng = np.random.default_rng(1)
    return _call(*(rng.standard_normal((1, 3, 512, 16)) for _ in range(3)), mask=tw.causal() & tw.window(160))


def _short() -> Call:
    """A tile of keys for each query tile: the producer is an item ahead."""
    rng = np.random.default_rng(2)
    return _call(*(rng.standard_normal((1, 6, n, 16)) for n in (128, 16, 16)))


def _packed() -> Call:
    """The second sequence's values are NaN: its own results, the first's are not."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((100, 2, 16)) for _ in range(3))
    v[40:] = np.nan
    return _call(q, k, v, lengths=np.array([0, 40, 40, 100]))


def _late() -> Call:
    """Most rows have no key in the tile that is taken first, and all in the next."""
    rng = np.random.default_rng(4)
    return _call(*(rng.standard_normal((1, 2, 128, 16)) for _ in range(3)), mask=(K < 112) | (Q < 4))


def _steep(rise: float, dtype: str = "bfloat16") -> Call:
    """Scores rise by so much, as a power of 2, from a tile of keys to the one before it, which is taken after it."""
    rng = np.random.default_rng(3)
    q, k, v = (0.1 * rng.standard_normal((1, 2, 128, 16)) for _ in range(3))
    q[..., 0], k[..., 0] = 1, rise * np.log(2) * (np.arange(128)[::-1] // TILE.k)
    return _call(q, k, v, dtype, scale=1.0)


PROBLEMS: dict[str, Callable[[], Call]] = {
    "causal": _causal,
    "flat": _flat,
    "causal, taking turns": lambda: _causal(72),
    "window": _window,
    "short": _short,
    "packed": _packed,
    "late": _late,
    "rising": lambda: _steep(12.0),
    "steep": lambda: _steep(40.0),
    "steep, in float16": lambda: _steep(20.0, "float16"),
    "cliff": lambda: _steep(150.0),
}


@cache
def _problem(name: str) -> tuple[Call, list[Expected]]:
    call = PROBLEMS[name]()
    with np.errstate(invalid="ignore"):
        return call, expected_forward(_first_sequence(call))


def _first_sequence(call: Call) -> Call:
    return _sliced(call, 40) if call.spec.lengths is not None else call


def _sliced(call: Call, rows: int) -> Call:
    q, k, v = (x[:, :, :rows] for x in (call.q, call.k, call.v))
    return validate.prepare(q, k, v)


def _check(name: str, order: Order, seed: int = 1) -> None:
    """What the kernel gives for a problem is within the contract."""
    call, expected = _problem(name)
    done = CudaSimKernel("forward_sm90", order, seed).forward(call.spec, call.q, call.k, call.v, TILE)
    rows = expected[0].exact.shape[2]
    check_results(expected, forward_results(Partial(done.out[:, :, :rows], done.lse[:, :, :rows])))


@pytest.mark.parametrize("order", Order, ids=lambda order: order.name)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_sound_kernel_is_right_in_every_order(problem: str, order: Order) -> None:
    for seed in (1, 2):
        _check(problem, order, seed)


# -- planted mistakes -------------------------------------------------------------------------------------------------


# Each is one kind of mistake.
MISTAKES: dict[str, Mistake] = {
    # Tiles and items arrive.
    "no wait for k": Mistake(
        f"{WRONG}|more often", "causal",
        {"__forceinline__ void begin_products() {\n"
         "        hw::mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);":
         "__forceinline__ void begin_products() {"},
    ),
    "no wait for v": Mistake(
        f"{WRONG}|more often", "causal",
        {"hw::mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);\n        multiply_p_v();": "multiply_p_v();"},
    ),
    "no wait for q": Mistake(
        WRONG, "causal", {"hw::mbarrier_wait(shared.q_full(), q_ring.parity);": ""},
    ),
    "v expected to be there at first": Mistake(
        "deadlock", "causal", {"k_ring.parity = v_ring.parity = table": "k_ring.parity = table"},
    ),
    "a parity that never changes": Mistake("more often|deadlock", "causal", {"parity ^= 1;": ""}),
    "too few bytes of k": Mistake(
        "more than were expected|more often", "causal",
        {"arrive_expect(full, K_BYTES);": "arrive_expect(full, K_BYTES / 2);"},
    ),
    "too many bytes of v": Mistake(
        "deadlock.* 2048 bytes to come", "causal",
        {"arrive_expect(told, V_BYTES);": "arrive_expect(told, 2 * V_BYTES);"},
    ),
    # Places are let go.
    "k never let go": Mistake("deadlock", "causal", {"arrive(shared.k_free(k_ring.stage));": ""}),
    "q never let go": Mistake("deadlock", "causal", {"arrive(shared.q_free());": ""}),
    "items never let go": Mistake("deadlock", "causal", {"shared.free_item(done);": ""}),
    "too many to let q go": Mistake(
        "deadlock", "causal", {"init(q_free(), CONSUMER_WARPS)": "init(q_free(), CONSUMER_WARPS + 1)"},
    ),
    "q let go before it is read": Mistake(
        WRONG, "short",
        {"rows_left = item().work": "if (Q_IN_REGISTERS) arrive(shared.q_free());\n        rows_left = item().work",
         "free_q();\n        }\n        if": "q_ring.advance();\n        }\n        if"},
    ),
    "k let go before it is multiplied": Mistake(
        f"{WRONG}|more often|deadlock|after a warp had issued it", "causal",
        {"begin_products();\n        score<false>();":
         "arrive(shared.k_free(k_ring.stage));\n        begin_products();\n        score<false>();",
         "free_k();\n        free_v();": "k_ring.advance();\n        free_v();"},
    ),
    "k let go before it is multiplied again": Mistake(
        WRONG, "cliff",
        {"score<false>();\n        float rescale[2], sums":
         "score<false>();\n        arrive(shared.k_free(k_ring.stage));\n        float rescale[2], sums",
         "free_k();\n        free_v();": "k_ring.advance();\n        free_v();"},
    ),
    "v let go before it is multiplied": Mistake(
        WRONG, "causal",
        {"const bool needed = rows.exact(launch, rescale);":
         "arrive(shared.v_free(v_ring.stage));\n        const bool needed = rows.exact(launch, rescale);",
         "rescale_acc(rescale);\n        free_v();": "rescale_acc(rescale);\n        v_ring.advance();"},
    ),
    "an item's place taken too early": Mistake(
        WRONG, "causal",
        {"constexpr int ITEMS = 4;": "constexpr int ITEMS = 2;",
         "if (made >= ITEMS) shared.wait_until_free(made % ITEMS);": ""},
    ),
    "v of a tile that was skipped": Mistake(f"{WRONG}|deadlock", "causal", {"skipped = true;": ""}),
    "a turn not passed": Mistake(
        "deadlock.*named barrier", "causal, taking turns",
        {"pass_turn();\n        hw::wgmma_wait<1>();": "hw::wgmma_wait<1>();"},
    ),
    # Products.
    "wrong stride of k": Mistake(
        WRONG, "causal", {"shared.k(k_ring.stage), 8 * ROW_BYTES": "shared.k(k_ring.stage), 4 * ROW_BYTES"},
    ),
    "wrong step between parts of v": Mistake(
        WRONG, "causal, taking turns", {"8 * ROW_BYTES, TILE_K * ROW_BYTES);": "8 * ROW_BYTES, 16);"},
    ),
    "no fence before wgmma": Mistake(
        "wgmma.fence is missing", "causal",
        {"hw::wgmma_fence();\n        multiply_q_k();\n        hw": "multiply_q_k();\n        hw"},
    ),
    "no wait for s": Mistake(
        f"{WRONG}|written to before", "causal",
        {"hw::wgmma_wait<1>();": ""},
    ),
    "no wait for acc": Mistake(
        f"{WRONG}|written to before", "causal", {"hw::wgmma_wait_in_place<0>(launch.items > 0);": ";"},
    ),
    "warps that wait at places of their own": Mistake(
        "another warp of the warpgroup waits for its products at forward_sm90.cu", "causal",
        {"        wait_for_p_v();\n        if (needed) rescale_acc":
         "        if (needed) hw::wgmma_wait<0>();\n        else wait_for_p_v();\n        if (needed) rescale_acc"},
    ),
    "p packed before its product is done": Mistake(
        "the registers of this wgmma's operand were written to", "causal",
        {"hw::pin(sums);": "pack_p();"},
    ),
    # Keys beyond the last.
    "the next sequence's v not cleared": Mistake(
        WRONG, "packed", {"clears = launch.params.n_sequences > 1 && v_left < TILE_K": "clears = false"},
    ),
    "cleared one row too late": Mistake(WRONG, "packed", {"V_BYTES, v_left, lane);": "V_BYTES, v_left + 1, lane);"}),
    "cleared without a fence": Mistake("without fence.proxy.async", "packed", {"hw::fence_async();": ""}),
    "the next tile of k": Mistake(
        WRONG, "causal",
        {"work.sequence.k_begin + tile * TILE_K, work.hk": "work.sequence.k_begin + (tile + 1) * TILE_K, work.hk"},
    ),
    "a tile too few": Mistake("deadlock", "causal", {"tile >= run.first": "tile > run.first"}),
    "a mask one key off": Mistake(WRONG, "causal", {"(first + i) * 8 + e);": "(first + i) * 8 + e + 1);"}),
    # Softmax.
    "no rescale of row_sum": Mistake(
        WRONG, "cliff", {"row_sum[half] *= rescale[half];\n            if (moves)": "if (moves)"},
    ),
    "no rescale of acc": Mistake(
        WRONG, "steep", {"        rescale_acc(rescale);\n        pack_p();\n    }": "        pack_p();\n    }"},
    ),
    "no rescale of acc after a tile computed again": Mistake(
        WRONG, "cliff", {"if (needed) rescale_acc(rescale);\n            pack_p();": "pack_p();"},
    ),
    "weights not packed again": Mistake(
        WRONG, "steep", {"rescale_acc(rescale);\n        pack_p();\n    }": "rescale_acc(rescale);\n    }"},
    ),
    "all sums taken as ordinary": Mistake(WRONG, "cliff", {"rows.is_ordinary(sums, rows_left)": "true"}),
    "all sums taken as safe": Mistake(WRONG, "cliff", {"if (rows.is_safe(sums, rows_left))": "if (true)"}),
    "the sum of a tamed tile as it was": Mistake(WRONG, "steep", {"sums[half] *= rescale[half];": ""}),
    "sums left out where a row is corrected": Mistake(WRONG, "rising", {"row_sum[half] += sums[half];": ""}),
    "all sums taken as numbers": Mistake(WRONG, "cliff", {"if (rows.is_finite(sums, rows_left))": "if (true)"}),
    "float16's range forgotten": Mistake(WRONG, "steep, in float16", {"0x1p31f : 0x1p14f": "0x1p31f : 0x1p31f"}),
    "another row of k the second time": Mistake(
        WRONG, "late", {"(lane / 16 * 8 + lane % 8) * ROW_BYTES;": "(lane / 16 * 8 + lane % 7) * ROW_BYTES;"},
    ),
    "sums of one half only": Mistake(WRONG, "causal", {"rows.row_sum[1] += sums[1];": ""}),
}  # fmt: skip


def test_all_mistakes_can_be_planted() -> None:
    check_all_can_be_planted(FILES, MISTAKES)


@pytest.mark.parametrize("mistake", some(MISTAKES))
def test_a_mistake_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, problem, edits = MISTAKES[mistake]
    plant(monkeypatch, FILES, edits)
    expect_told(expected, partial(_check, problem))


# -- speculation ------------------------------------------------------------------------------------------------------

RARE = {"tamed": "rows.tame(sums, rescale);", "again": "            multiply_q_k_again();"}


@pytest.mark.parametrize(
    ("problem", "runs"),
    [
        ("flat", []), ("rising", ["tamed"]), ("steep", ["tamed"]), ("steep, in float16", ["tamed"]),
        ("cliff", ["again"]), ("late", ["again"]),
    ],
)  # fmt: skip
def test_what_is_rare_runs_where_it_should(problem: str, runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That the results are right is seen above; here, that they came about so."""
    seen = []
    for name, call in RARE.items():
        plant(monkeypatch, FILES, {call: f'simulator::fail(line_of_call(), "{name}");\n{call}'})
        report = told(lambda: _check(problem, Order.FORWARD))
        seen += [name] if name in report else []
        assert name in report or report == SOUND
    assert seen == runs


@pytest.mark.parametrize("order", Order)
def test_a_warpgroup_without_tiles_at_either_end(order: Order) -> None:
    """Two stages, and turns. If it left out a tile at both ends, the other would hold its turn and wait for v, whose
    place this one lets go in a turn of its own."""
    rng = np.random.default_rng(1)
    call = _call(*(rng.standard_normal((1, 1, n, 192)) for n in (561, 250, 250)), mask=~tw.window(128))
    done = CudaSimKernel("forward_sm90", order).forward(call.spec, call.q, call.k, call.v)
    check_results(expected_forward(call), forward_results(done))


# -- extremes ---------------------------------------------------------------------------------------------------------


def _checked(call: Call) -> Partial:
    done = CudaSimKernel("forward_sm90").forward(call.spec, call.q, call.k, call.v, TILE)
    check_results(expected_forward(call), forward_results(done))
    return done


def test_large_values_under_weights_that_rise() -> None:
    """Weights that were not rescaled yet multiply them."""
    call = _steep(25.0)
    _checked(_call(*(arrays.widen(x, np.float32) for x in (call.q, call.k, 1e27 * arrays.widen(call.v, np.float32))),
                   scale=1.0))  # fmt: skip


@pytest.mark.parametrize("divisor", [41.0, 47.0, 61.0])
def test_quotients_of_positions_decide_as_numpys(divisor: float) -> None:
    """A product with a reciprocal would be off in the last place, and let one key more in."""
    rng = np.random.default_rng(1)
    mask = (K / divisor < 1.0) & (K >= int(divisor))
    _checked(_call(*(rng.standard_normal((1, 1, 130, 16)) for _ in range(3)), mask=mask))


def test_the_least_of_scales() -> None:
    rng = np.random.default_rng(1)
    _checked(_call(*(rng.standard_normal((1, 1, 130, 16)) for _ in range(3)), causal=True, scale=1e-50))


def test_a_sequence_has_its_bits_whatever_follows() -> None:
    """Rows beyond its last query are computed too, and must decide nothing."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((100, 2, 16)) for _ in range(3))
    lengths = np.array([0, 40, 100])
    results = []
    for loudness in (1.0, 300.0):
        louder = q.copy()
        louder[40:] *= loudness
        call = _call(4 * louder, k, v, lengths=lengths, causal=True, batch_invariant=True)
        done = CudaSimKernel("forward_sm90").forward(call.spec, call.q, call.k, call.v, TILE)
        results.append([arrays.widen(x, np.float64)[:, :, :40] for x in (done.out, done.lse)])
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_lse_of_huge_scores_keeps_its_last_bits() -> None:
    """Scores of up to 65280, exact: those of a query lie far apart, so lse is the largest."""
    sizes, places = np.arange(128, 256) * 256.0, 1 - np.arange(48) / 64
    q, k = np.zeros((1, 1, 128, 16)), np.zeros((1, 1, 48, 16))
    q[..., 0], k[..., 0] = sizes, places
    call = _call(q, k, k, scale=1.0)
    lse = CudaSimKernel("forward_sm90").forward(call.spec, call.q, call.k, call.v).lse
    assert float(np.abs(lse[0, 0] - sizes).max()) <= 2.0**-8 / 2  # half of what lies between two numbers
