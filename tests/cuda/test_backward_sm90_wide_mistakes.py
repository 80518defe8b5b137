"""Mistakes that are planted in Hopper's backward pass for wide heads, where it differs: the simulator tells of each."""

from __future__ import annotations

from functools import partial

import pytest

from tests.cuda.backward_problems import WIDE_FILES, check, unwritten  # noqa: F401
from tests.cuda.mistakes import EARLY, ISSUED, UNFENCED, WRONG, Mistake, expect_told, plant
from tests.cuda.test_ops import needs_compiler

pytestmark = needs_compiler

FREE_D_OUT = "        arrive(shared.d_out_free(0));\n"
FREE_Q = "        arrive(shared.q_free(q));\n"
FREE_V = "        if (LAST) arrive(shared.v_free());\n"
FREE_K = "            arrive(shared.k_free(0));\n"
AWAIT_D_OUT = "        hw::mbarrier_wait(shared.d_out_full(0), steps % 2);\n"
AWAIT_PLACE = "        hw::mbarrier_wait(shared.d_q_free(number), piece ^ 1);"
AWAIT_D_V, AWAIT_D_K = "        hw::wgmma_wait<2>();\n", "        hw::wgmma_wait<1>();\n"
AWAIT_PIECE = "        hw::wgmma_wait<0>();\n        hand_over_d_q(0);\n"
BEGIN_D_P = "        begin_d_p(0);\n"
WRITE_P = "        write_s(shared.p(steps % 2));\n"
WRITE_D_S = "        write_s(shared.d_s(steps % 2));\n"
MEET = "        hw::barrier_sync(Shared::d_s_written(0), 256);\n"
LET_GO = "                if (WIDE || piece == 1) let_go();\n"

MISTAKES: dict[str, Mistake] = {
    # Tiles arrive.
    "no wait for k": Mistake("deadlock", "d 256", {"            hw::mbarrier_wait(shared.k_full(0), keys % 2);\n": ""}),
    "no wait for v": Mistake(WRONG, "d 256", {"        hw::mbarrier_wait(shared.v_full(), keys % 2);\n": ""}),
    "no wait for d_out": Mistake(EARLY, "d 256", {AWAIT_D_OUT: ""}),
    "d_p begun before delta arrives": Mistake(WRONG, "d 256", {AWAIT_D_OUT + BEGIN_D_P: BEGIN_D_P + AWAIT_D_OUT}),
    # Places are let go.
    "d_out never let go": Mistake("deadlock", "d 256", {FREE_D_OUT: ""}),
    "d_out let go before d_v is done": Mistake(EARLY, "d 256", {AWAIT_D_V + FREE_D_OUT: FREE_D_OUT + AWAIT_D_V}),
    "q never let go": Mistake("deadlock", "d 256", {FREE_Q: ""}),
    "q let go before d_k is done": Mistake(EARLY, "d 256", {AWAIT_D_K + FREE_Q: FREE_Q + AWAIT_D_K}),
    "v never let go": Mistake("deadlock", "d 256", {FREE_V: ""}),
    "v never let go by a key tile that meets none": Mistake(
        "deadlock",
        "d 256, tiles that meet none",
        {"            arrive(shared.v_free());\n": ""},
    ),
    "k never let go": Mistake("deadlock", "d 256", {FREE_K: ""}),
    "an addition that one storer need not have read": Mistake(
        "deadlock|arrivals",
        "d 256",
        {"CONSUMER_WARPS + TURNS": "CONSUMER_WARPS + 1"},
    ),
    # What warpgroups hand to each other.
    "a warpgroup that does not meet the other": Mistake(
        ISSUED,
        "d 256",
        {"d_s_written(0), 256": "d_s_written(number), 128"},
    ),
    "no fence after p and d_s": Mistake(UNFENCED, "d 256", {f"        hw::fence_async();\n{MEET}": MEET}),
    "p where d_s of the step before is": Mistake(
        EARLY, "d 256", {"base + P + stage * S_BYTES": "base + D_S + stage * S_BYTES"}
    ),
    "one place for p": Mistake(
        f"{WRONG}|{ISSUED}|{UNFENCED}",
        "d 256",
        {"base + P + stage * S_BYTES": "base + P"},
    ),
    "one place for d_s": Mistake(
        f"{WRONG}|{ISSUED}|{UNFENCED}",
        "d 256",
        {"base + D_S + stage * S_BYTES": "base + D_S"},
    ),
    "p never written": Mistake(WRONG, "d 256", {WRITE_P: ""}),
    "d_s never written": Mistake(WRONG, "d 256", {WRITE_D_S: ""}),
    # d_q and its storers.
    "no fence after d_q": Mistake(
        UNFENCED, "d 256", {"hw::fence_async();\n        hw::barrier_arrive": "hw::barrier_arrive"}
    ),
    "a piece overwritten before it was read": Mistake(f"{WRONG}|{UNFENCED}", "d 256", {AWAIT_PLACE: "        //"}),
    "a parity of the steps": Mistake(
        "deadlock|more often", "d 256", {"d_q_free(number), piece ^ 1": "d_q_free(number), steps % 2 ^ 1"}
    ),
    "a place let go for both pieces at once": Mistake(
        "deadlock", "d 256", {LET_GO: "                if (piece == 1) let_go();\n"}
    ),
    "pieces in another order": Mistake(
        WRONG, "d 256", {"(tile * 2 + piece) * (PIECE_BYTES / 4)": "(tile * 2 + 1 - piece) * (PIECE_BYTES / 4)"}
    ),
    "the other half of the sums": Mistake(
        WRONG, "d 256", {"* TURNS + (WIDE ? number : 0)": "* TURNS + (WIDE ? 1 - number : 0)"}
    ),
    "both halves in one": Mistake(f"{WRONG}|deadlock", "d 256", {"* TURNS + (WIDE ? number : 0)": "* TURNS"}),
    "turns of the first half begin at 0": Mistake(
        "deadlock.*for another block", "d 256", {"if (threadIdx.x < TURNS)": "if (threadIdx.x < 1)"}
    ),
    "a place of the other storer": Mistake(
        f"{WRONG}|{UNFENCED}", "d 256", {"(WIDE ? storer : storer * 2 + piece)": "(WIDE ? 0 : storer * 2 + piece)"}
    ),
    # Products.
    "no wait for the first piece": Mistake(
        f"{WRONG}|written to before", "d 256", {AWAIT_PIECE: "        hand_over_d_q(0);\n"}
    ),
    "no wait for the second piece": Mistake(
        f"{WRONG}|written to before",
        "d 256",
        {"            hw::wgmma_wait<LAST ? 1 : 2>();\n": ""},
    ),
    "no wait for d_p": Mistake(
        f"{WRONG}|written to before",
        "d 256",
        {"        hw::wgmma_wait<LAST ? 0 : 1>();\n": ""},
    ),
    "no wait for the next s": Mistake(
        f"{WRONG}|written to before", "d 256", {"            hw::wgmma_wait<3>();\n": ""}
    ),
    "the second piece of the first columns": Mistake(
        WRONG, "d 256", {"half + piece * (PIECE == PART": "half + 0 * (PIECE == PART"}
    ),
    "the second piece in another part": Mistake(
        WRONG, "d 64, d_v 256, grouped", {"PIECE == PART ? TILE_K * ROW_BYTES : PIECE * 2": "TILE_K * ROW_BYTES"}
    ),
    "the other half of the columns": Mistake(
        WRONG, "d 256", {"hw::anew(tile) + number * (": "hw::anew(tile) + (1 - number) * ("}
    ),
    "half of a part, of several": Mistake(WRONG, "d 256", {"PARTS == 1 ? ROW_BYTES / 2 :": "true ? ROW_BYTES / 2 :"}),
    "the other queries": Mistake(
        WRONG, "d 256", {"hw::anew(queries) + first_query() * ROW_BYTES": "hw::anew(queries)"}
    ),
    "weights of the other queries": Mistake(WRONG, "d 256", {"((first_query() / 8 + k * 2": "((k * 2"}),
    "shifts of the other queries": Mistake(
        WRONG, "d 256", {"(first_query() + n * 8 + lane % 4 * 2) * 4": "(n * 8 + lane % 4 * 2) * 4"}
    ),
    "a mask of the other queries": Mistake(
        WRONG, "d 256, causal", {"work.first_query + first_query() + n * 8": "work.first_query + n * 8"}
    ),
    "a slope of the next query tile": Mistake(
        WRONG, "d 136, d_v 40, a slope", {"multiply_by_slopes(plain, q);": "multiply_by_slopes(plain, this->q);"}
    ),
    "d_k of the next query tile": Mistake(
        WRONG, "d 256", {"begin_products(steps, q);": "begin_products(steps, this->q);"}
    ),
    "d_k stored by the other warpgroup": Mistake(
        WRONG, "d 256", {"d_k, number * HALF, D": "d_k, (1 - number) * HALF, D"}
    ),
    "d_v as wide as d_k": Mistake(WRONG, "d 192, d_v 128", {"d_v, number * V_HALF, D_V": "d_v, number * HALF, D_V"}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, problem, edits = MISTAKES[mistake]
    plant(monkeypatch, WIDE_FILES, edits)
    expect_told(expected, partial(check, problem))
