"""Mistakes that are planted in Hopper's backward pass for wide heads, where it differs: the simulator tells of each."""

from __future__ import annotations

from functools import partial

import pytest

from tests.cuda.backward_problems import WIDE_FILES, check, small_shares, unwritten  # noqa: F401
from tests.cuda.mistakes import (
    EARLY,
    ISSUED,
    UNFENCED,
    WRONG,
    Mistake,
    check_all_can_be_planted,
    expect_told,
    plant,
    some,
)
from tests.cuda.test_ops import needs_compiler

pytestmark = needs_compiler

FREE_D_OUT = "        arrive(shared.d_out_free(0));\n"
FREE_Q = "        arrive(shared.q_free(q_stage()));\n"
AWAIT = "        hw::wgmma_wait<1>();\n"
AWAIT_SECOND = "        hw::wgmma_wait<0>();\n        hand_over_d_q(1);\n"
BEGIN_D_P = "        if (WIDE) clear_to_delta();\n"
AWAIT_D_OUT = "        hw::mbarrier_wait(shared.d_out_full(d_out_stage()), steps / O_STAGES % 2);\n"
HOLD_V = "        this->hold_v();\n"
AWAIT_V = "        await_v();\n"
WRITE_P = "        write(shared.p(), p);\n"
WRITE_D_S = "        write(d_s_tile(), d_s);\n"
MEET = "        hw::barrier_sync(Shared::D_S_WRITTEN, 256);\n"
LET_GO = "                if (WIDE || piece == PIECES - 1) let_go();\n"

MISTAKES: dict[str, Mistake] = {
    # Places are let go.
    "d_out never let go": Mistake("deadlock", "d 256", {FREE_D_OUT: ""}),
    "d_out let go before d_v is done": Mistake(EARLY, "d 256", {AWAIT + FREE_D_OUT: FREE_D_OUT + AWAIT}),
    "q never let go": Mistake("deadlock", "d 256", {FREE_Q: ""}),
    "q let go before d_k is done": Mistake(EARLY, "d 256", {AWAIT + FREE_Q: FREE_Q + AWAIT}),
    "an addition that one storer need not have read": Mistake(
        "deadlock|arrivals",
        "d 256",
        {"CONSUMER_WARPS + TURNS": "CONSUMER_WARPS + 1"},
    ),
    # What warpgroups hand to each other.
    "a warpgroup that does not meet the other": Mistake(
        f"{UNFENCED}|{ISSUED}",
        "d 256",
        {MEET: "        hw::barrier_sync(Shared::D_S_WRITTEN + 6 * number, 128);\n"},
    ),
    "no fence after p and d_s": Mistake(UNFENCED, "d 256", {f"        hw::fence_async();\n{MEET}": MEET}),
    "p where d_s is": Mistake(f"{EARLY}|{UNFENCED}", "d 256", {"return base + P;": "return base + D_S;"}),
    "one place for d_s": Mistake(
        f"{WRONG}|{ISSUED}|{UNFENCED}",
        "d 256",
        {"base + D_S + stage * S_BYTES": "base + D_S"},
    ),
    "p never written": Mistake(WRONG, "d 256", {WRITE_P: ""}),
    "d_s never written": Mistake(WRONG, "d 256", {WRITE_D_S: ""}),
    # d_q and its storers.
    "a parity of the steps": Mistake(
        "deadlock|more often", "d 256", {"(d_q, number, piece, piece ^ 1)": "(d_q, number, piece, steps % 2 ^ 1)"}
    ),
    "a place let go for both pieces at once": Mistake(
        "deadlock", "d 256", {LET_GO: "                if (piece == 1) let_go();\n"}
    ),
    "pieces in another order": Mistake(
        WRONG,
        "d 256",
        {"(tile * PIECES + piece) * (PIECE_BYTES / 4)": "(tile * PIECES + 1 - piece) * (PIECE_BYTES / 4)"},
    ),
    "the other half of the sums": Mistake(
        WRONG, "d 256", {"* TURNS + (WIDE ? number : 0)": "* TURNS + (WIDE ? 1 - number : 0)"}
    ),
    "both halves in one": Mistake(f"{WRONG}|deadlock", "d 256", {"* TURNS + (WIDE ? number : 0)": "* TURNS"}),
    "turns of the first half begin at 0": Mistake(
        "deadlock.*for another block", "d 256", {"thread < TURNS)": "thread < 1)"}
    ),
    "a place of the other storer": Mistake(
        f"{WRONG}|{UNFENCED}",
        "d 256",
        {"(WIDE ? storer : storer * 2 + piece)": "(WIDE ? 0 : storer * 2 + piece)"},
    ),
    # Products.
    "no wait for the first piece": Mistake(
        f"{WRONG}|written to before", "d 256", {f"{AWAIT}        hand_over_d_q(0);\n": "        hand_over_d_q(0);\n"}
    ),
    "no wait for the second piece": Mistake(
        f"{WRONG}|written to|before its wgmma", "d 256", {AWAIT_SECOND: "        hand_over_d_q(1);\n"}
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
    "cells of the other queries": Mistake(
        WRONG, "a table, d 256", {"query = first_query() + n * 8 + lane / 16": "query = n * 8 + lane / 16"}
    ),
    "no delta": Mistake(WRONG, "d 256", {"d_p[n * 4] = d_p[n * 4 + 2] = delta.x;": "d_p[n * 4] = d_p[n * 4 + 2] = 0;"}),
    "v held of the key tile before": Mistake(
        WRONG, "d 256", {HOLD_V: "        if (this->keys == 0) this->hold_v();\n"}
    ),
    "v held before it is there": Mistake(WRONG, "d 256", {AWAIT_V + HOLD_V: HOLD_V + AWAIT_V}),
    "the other eight of v's columns": Mistake(
        WRONG, "d 256", {"(k % 4 * 2 + lane / 16) ^ row % 8": "(k % 4 * 2 + 1 - lane / 16) ^ row % 8"}
    ),
    "d_p that begins with what was there": Mistake(WRONG, "d 256", {BEGIN_D_P: ""}),
    "d_p begun before delta arrives": Mistake(WRONG, "d 256", {AWAIT_D_OUT + BEGIN_D_P: BEGIN_D_P + AWAIT_D_OUT}),
    "shifts of the other queries": Mistake(
        WRONG, "d 256", {"(first_query() + n * 8 + lane % 4 * 2) * 4": "(n * 8 + lane % 4 * 2) * 4"}
    ),
    "a mask of the other queries": Mistake(
        WRONG, "d 256, causal", {"tile * TILE_Q + first_query(), tile": "tile * TILE_Q, tile"}
    ),
    "d_k stored by the other warpgroup": Mistake(
        WRONG, "d 256", {"d_k, number * HALF, D": "d_k, (1 - number) * HALF, D"}
    ),
    "d_v as wide as d_k": Mistake(WRONG, "d 192, d_v 128", {"d_v, number * V_HALF, D_V": "d_v, number * HALF, D_V"}),
}

# Where there is no order: all key tiles add.
UNORDERED: dict[str, Mistake] = {
    "sums that do not begin at 0": Mistake(WRONG, "d 256", {"sums[i] = make_float4(0, 0, 0, 0)": "sums[i] = sums[i]"}),
    "half of the sums begin at 0": Mistake(WRONG, "d 256", {"i < HALF_BYTES / 16; i +=": "i < HALF_BYTES / 32; i +="}),
    "a sum that is stored": Mistake(WRONG, "d 256", {"!FIRST_STORES ? 1 :": "!FIRST_STORES ? 0 :"}),
    "sums taken for empty": Mistake(WRONG, "d 256", {"FIRST_STORES ? 0 : 1;": "0;"}),
}


def test_all_mistakes_can_be_planted() -> None:
    check_all_can_be_planted(WIDE_FILES, MISTAKES | UNORDERED)


@pytest.mark.parametrize("mistake", UNORDERED)
def test_a_mistake_without_an_order_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, problem, edits = UNORDERED[mistake]
    plant(monkeypatch, WIDE_FILES, edits)
    expect_told(expected, partial(check, problem, name="unordered"))


@pytest.mark.parametrize("mistake", some(MISTAKES))
def test_a_mistake_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, problem, edits = MISTAKES[mistake]
    plant(monkeypatch, WIDE_FILES, edits)
    expect_told(expected, partial(check, problem))
