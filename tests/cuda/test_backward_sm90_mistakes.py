"""Mistakes that are planted in Hopper's backward pass, one at a time: the simulator tells of each."""

from __future__ import annotations

from functools import partial

import pytest

from tests.cuda.backward_problems import FILES, LAST_FIRST, check, unwritten  # noqa: F401
from tests.cuda.mistakes import EARLY, ISSUED, UNFENCED, WRONG, Mistake, expect_told, plant
from tests.cuda.test_ops import needs_compiler

pytestmark = needs_compiler

# Most problems have heads of up to 64 columns: k and d_s have two stages, k and v are held in registers, and d_q is
# multiplied a step late. "d 128" has none of this.

FREE_Q = "            arrive(shared.q_free(q_before));\n"
FREE_LAST_Q = "        arrive(shared.q_free(q));\n"
FREE_V = "        if (LAST && !HELD) arrive(shared.v_free());\n"
FREE_HELD_V = "            arrive(shared.v_free());\n"
FREE_D_OUT = "        arrive(shared.d_out_free(stage));\n"
FREE_K = "            arrive(shared.k_free(stage));\n"
FREE_D_S = "        arrive(shared.d_s_free(step % S_STAGES));\n"
FREE_D_Q = "        hw::mbarrier_arrive(shared.d_q_free(number));\n"
FREE_ADDITION = "            hw::mbarrier_arrive(shared.d_out_free(stage));\n"
AWAIT_K = "            hw::mbarrier_wait(shared.k_full(stage), keys / K_STAGES % 2);\n"
AWAIT_Q = "        hw::mbarrier_wait(shared.q_full(next_q.stage), next_q.parity);\n"
AWAIT_V = "        hw::mbarrier_wait(shared.v_full(), keys % 2);\n"
AWAIT_D_OUT = "        hw::mbarrier_wait(shared.d_out_full(stage), steps / 2 % 2);\n"
AWAIT_D_S_FREE = "        hw::mbarrier_wait(shared.d_s_free(steps % S_STAGES), steps / S_STAGES % 2 ^ 1);\n"
AWAIT_ADDITION = "        wait_together(shared.d_out_full(stage), step / O_STAGES % 2);\n"
AWAIT_STORE = "        hw::tma_store_wait<0>();\n"
HOLD_K = "            hold(k_held, k());\n"
HOLD = "        if constexpr (HELD) {\n            hold"
HELD = "        if (HELD || visits == 0) {\n"
READ_SHIFT = ("#pragma unroll\n"
              "        for (int n = 0; n < QUERIES / 8; n++) shift[n] = two_of(shared.shift(q), n);\n")  # fmt: skip
BEGIN_D_P = "        begin_d_p(stage);\n"
MULTIPLY_V = "        multiply_rows<COLUMNS, true>(d_p, v_held, shared.v(), shared.d_out(stage));\n"
MULTIPLY_D_S = "        multiply_d_s_k(shared.d_s(step % S_STAGES));\n"
WRITE_D_S = "        write_s(d_s());\n"
TELL_D_S = "        if (LATE) arrive(shared.d_s_full(stage));\n"
WAITS = "        d_q_waits = true;\n"
WRITE_D_Q = "        unsigned char* const to = shared.memory + (shared.d_q(step % 2, number) - shared.base)"
MEET = "            meet_queries(__shfl_sync(~0u, shared.item(stage).visits, 0));\n"
ITEM = "            const Shared::Item item = shared.copy_of_item(stage);\n"
ROOM = "                wait_together(shared.d_out_free(o_ring.stage), o_ring.parity);\n"
TELL_ADDITION = ("                if (lane == 0) {\n"
                 "                    shared.addition(o_ring.stage).tile = tile;\n"
                 "                    shared.addition(o_ring.stage).turn = turn;\n"
                 "                }\n")  # fmt: skip
TURN = "hw::wait_for_number(turns, turn);"

# Each is one kind of mistake.
MISTAKES: dict[str, Mistake] = {
    # Tiles arrive.
    "no wait for k": Mistake("deadlock", "full", {AWAIT_K: ""}),
    "k held before it arrives": Mistake(
        WRONG, "full", {HOLD_K: "", AWAIT_K: f"            if constexpr (HELD) hold(k_held, k());\n{AWAIT_K}"},
    ),
    "no wait for q": Mistake("more often", "full", {AWAIT_Q: ""}),
    "no wait for v": Mistake(WRONG, "full", {AWAIT_V: ""}),
    "no wait for v that is not held": Mistake(WRONG, "d 128", {AWAIT_V: ""}),
    "v held before it arrives": Mistake(WRONG, "full", {AWAIT_V: "", HELD: f"{AWAIT_V}{HELD}"}),
    "no wait for d_out": Mistake("more often", "full", {AWAIT_D_OUT: ""}),
    "a parity that never changes": Mistake("more often", "full", {"parity ^= 1;": ""}),
    "the parity of q changes too often": Mistake(
        "deadlock", "full",
        {"q_full(next_q.stage), next_q.parity": "q_full(next_q.stage), next_q.parity ^ next_q.stage % 2"},
    ),
    "q read from two of its three places": Mistake("deadlock", "full", {"Ring<Q_STAGES> next_q;": "Ring<2> next_q;"}),
    "the parity of v of a ring of two": Mistake(
        "deadlock", "full", {"shared.v_full(), keys % 2": "shared.v_full(), keys / 2 % 2"},
    ),
    "the parity of k of a ring of two": Mistake(
        "deadlock", "d 128", {"shared.k_full(stage), keys / K_STAGES % 2": "shared.k_full(stage), keys / 2 % 2"},
    ),
    "v not free at first": Mistake(
        "deadlock", "full", {"v_ring.parity = o_ring.parity = 1;": "o_ring.parity = 1;"},
    ),
    "shifts and deltas that nobody waits for": Mistake(
        "more than were expected", "full", {" + (more ? ROWS_BYTES : 0)": ""},
    ),
    "too many bytes": Mistake(
        "deadlock.* 16384 bytes to come", "full",
        {"arrive_expect(told, ROWS * PARTS": "arrive_expect(told, 2 * ROWS * PARTS"},
    ),
    # Tails of packed sequences.
    "rows of the next sequence": Mistake(WRONG, "packed", {"params.n_sequences > 1 && left < ROWS": "false"}),
    "rows cleared before they come": Mistake(
        "more often", "packed", {"wait_together(told, tails++ % 2);": "tails++;"},
    ),
    "no fence after rows are cleared": Mistake(
        UNFENCED, "packed", {"hw::fence_async();\n        __syncwarp();": "__syncwarp();"},
    ),
    "the parity of tails": Mistake("more often", "packed", {"tails++ % 2": "tails % 2"}),
    "keys of another sequence": Mistake(WRONG, "packed", {"sequence.k_begin + key + half * 8": "key + half * 8"}),
    "queries of another sequence": Mistake(
        WRONG, "packed", {"row_of<Element>(launch.backward.d_q, b, h, sequence.q_begin + query)":
                          "row_of<Element>(launch.backward.d_q, b, h, query)"},
    ),
    # Places are let go.
    "q never let go": Mistake("deadlock", "full", {FREE_Q: ""}),
    "the last q never let go": Mistake("deadlock", "full", {FREE_LAST_Q: ""}),
    "q let go before d_k is done": Mistake(
        EARLY, "full",
        {FREE_Q: "", "        add_to_d_k(q);\n":
         "        add_to_d_k(q);\n        if (!LAST) arrive(shared.q_free(q));\n"},
    ),
    "q let go, and not the one before": Mistake(
        "deadlock", "full", {FREE_Q: "            arrive(shared.q_free(q));\n"},
    ),
    "the last q let go before d_k is done": Mistake(
        EARLY, "full",
        {FREE_LAST_Q: "", "            hand_over_d_q(steps - 2);\n":
         f"    {FREE_LAST_Q}            hand_over_d_q(steps - 2);\n"},
    ),
    "d_out let go before d_v is done": Mistake(
        EARLY, "full", {FREE_D_OUT: "", WRITE_D_S: f"{FREE_D_OUT}{WRITE_D_S}"},
    ),
    "v let go before it is held": Mistake(
        WRONG, "d 8, d_v 64", {FREE_HELD_V: "", HOLD: f"        if (HELD) arrive(shared.v_free());\n{HOLD}"},
    ),
    "v never let go once it is held": Mistake("deadlock", "full", {FREE_HELD_V: ""}),
    "v never let go by a key tile that meets none": Mistake(
        "deadlock", "d 128, tiles that meet none", {HELD: "        if (HELD) {\n"},
    ),
    "held v never let go by a key tile that meets none": Mistake(
        "deadlock", "tiles that meet none", {HELD: "        if (visits > 0) {\n"},
    ),
    "k let go before it is multiplied": Mistake(
        WRONG, "one query tile",
        {FREE_K: "", FREE_V: f"{FREE_V}        if (LAST) arrive(shared.k_free(keys % K_STAGES));\n",
         MEET + ITEM: ITEM + MEET},
    ),
    "k let go before it is multiplied, one stage": Mistake(
        WRONG, "d 128",
        {FREE_K: "", FREE_V: f"{FREE_V}        if (LAST) arrive(shared.k_free(keys % K_STAGES));\n",
         MEET + ITEM: ITEM + MEET},
    ),
    "too few to let q go": Mistake(
        f"deadlock|{ISSUED}", "full",
        {"init(q_free(stage), CONSUMER_WARPS)": "init(q_free(stage), CONSUMER_WARPS / 2)"},
    ),
    "too many to let k go": Mistake("deadlock", "full", {"CONSUMER_WARPS + 3)": "CONSUMER_WARPS + 4)"}),
    # What threads hand to each other, to products and to the copy engine.
    "no fence after d_s": Mistake(
        UNFENCED, "full",
        {"            read_shift();\n        }\n        hw::fence_async();": "            read_shift();\n        }"},
    ),
    "a warpgroup that does not wait for the other's d_s": Mistake(
        ISSUED, "packed",
        {"        if (LATE) hw::mbarrier_wait(shared.d_s_full(step % 2), step / 2 % 2);\n": ""},
    ),
    "a warpgroup that does not meet the other": Mistake(
        ISSUED, "d 128",
        {"d_s_written(LATE ? number : 0), LATE ? 128 : 256": "d_s_written(number), 128"},
    ),
    "d_s told of before it is written": Mistake(
        ISSUED, "full", {TELL_D_S: "", WRITE_D_S: f"{TELL_D_S}{WRITE_D_S}"},
    ),
    "d_s of which nobody is told": Mistake("deadlock", "full", {TELL_D_S: ""}),
    "d_s written while the other warpgroup multiplies it": Mistake(
        UNFENCED, "full", {AWAIT_D_S_FREE: ""},
    ),
    "the only d_s written while the other warpgroup multiplies it": Mistake(
        f"{UNFENCED}|{ISSUED}", "d 128", {AWAIT_D_S_FREE: ""},
    ),
    "d_s let go before it is multiplied": Mistake(
        ISSUED, "full", {FREE_D_S: "", MULTIPLY_D_S: f"{MULTIPLY_D_S}{FREE_D_S}"},
    ),
    "the only d_s let go before it is multiplied": Mistake(
        f"{UNFENCED}|{ISSUED}", "d 128", {FREE_D_S: "", MULTIPLY_D_S: f"{MULTIPLY_D_S}{FREE_D_S}"},
    ),
    "d_s never let go": Mistake("deadlock", "full", {FREE_D_S: ""}),
    "d_s of another step": Mistake(
        WRONG, "full", {MULTIPLY_D_S: "        multiply_d_s_k(shared.d_s((step + 1) % S_STAGES));\n"},
    ),
    "the second warpgroup waits for the first, which does not lead": Mistake(
        "deadlock.*named barrier 7", "full",
        {"        if (LATE && FIRST && number == 0) hw::barrier_arrive(Shared::FIRST_LEADS, 256);\n": ""},
    ),
    "no fence after d_q": Mistake(
        UNFENCED, "full", {"hw::fence_async();\n        hw::barrier_arrive": "hw::barrier_arrive"},
    ),
    "d_q handed over before it is written": Mistake(
        UNFENCED, "full", {WAITS: "", WRITE_D_Q: f"{WAITS}        hand_over_d_q(step);\n{WRITE_D_Q}"},
    ),
    "d_q that is not handed over": Mistake(
        "deadlock.*named barrier", "full", {"            hand_over_d_q(d_q_step - 1);\n": ""},
    ),
    "a last d_q that is not handed over": Mistake(
        "deadlock.*named barrier", "full", {"        hand_over_d_q(steps - 1);\n": ""},
    ),
    "a last d_q but one that is not handed over": Mistake(
        "deadlock.*named barrier", "full", {"            hand_over_d_q(steps - 2);\n": ""},
    ),
    "d_q handed over to the other storer": Mistake(
        UNFENCED, "full", {"d_q_written(step % 2, number), 160": "d_q_written((step + 1) % 2, number), 160"},
    ),
    "d_q overwritten before it was read": Mistake(
        f"{WRONG}|{UNFENCED}", "full",
        {"        hw::mbarrier_wait(shared.d_q_free(step % 2), step / 2 % 2 ^ 1);\n": ""},
    ),
    "d_q stored before it is written": Mistake(
        UNFENCED, "full",
        {"hw::barrier_sync(Shared::d_q_written(number, piece), 160);":
         "hw::barrier_arrive(Shared::d_q_written(number, piece), 160);"},
    ),
    "d_q let go before the copy engine has read it": Mistake(
        f"{WRONG}|{UNFENCED}", "full", {AWAIT_STORE + FREE_D_Q: FREE_D_Q + AWAIT_STORE},
    ),
    "d_q of which nobody says that it was read": Mistake("deadlock", "full", {FREE_D_Q: ""}),
    # Additions.
    "an addition of which nobody says that it was read": Mistake(
        "deadlock.* 1 of 9 arrivals", "full", {FREE_ADDITION: ""},
    ),
    "an addition let go before it is read": Mistake(
        "deadlock.*for another block", "full",
        {FREE_ADDITION: "",
         AWAIT_ADDITION: f"{AWAIT_ADDITION}        if (leads) hw::mbarrier_arrive(shared.d_out_free(stage));\n"
                         "        __syncwarp();\n"},
    ),
    "an addition written before there is room": Mistake(
        "deadlock.*for another block", "full", {ROOM + TELL_ADDITION: TELL_ADDITION + ROOM},
    ),
    "the addition of the other storer": Mistake(
        "deadlock.*for another block", "full", {"shared.addition(stage).tile": "shared.addition(1 - stage).tile"},
    ),
    "the d_q of the other storer": Mistake(
        UNFENCED, "full", {"shared.d_q(number, piece), turn": "shared.d_q(1 - number, piece), turn"},
    ),
    "a storer that takes the other's steps": Mistake(
        "deadlock", "one query tile", {"uint32 step = WIDE ? 0 : number": "uint32 step = 1 - number"},
    ),
    "storers that take all steps": Mistake("deadlock", "full", {"step += WIDE ? 1 : 2)": "step++)"}),
    # Turns.
    # Key tiles in the order in which blocks at once may come to add theirs.
    "no wait for the turn": Mistake(WRONG, "full", {TURN: "", **LAST_FIRST}),
    "a turn given away once d_q was read": Mistake(
        WRONG, "full", {"hw::bulk_wait_done<0>();": "hw::tma_store_wait<0>();"},
    ),
    "a turn never given away": Mistake(
        "deadlock.*for another block", "full", {"hw::add_release(turns, 1);": ""},
    ),
    "a turn too late": Mistake(
        "deadlock.*for another block", "full", {"min(at.j, run.last)": "min(at.j + 1, run.last)"},
    ),
    "a turn too late after tiles that are skipped": Mistake(
        "deadlock.*for another block", "window", {"min(at.j, run.last) - run.first": "min(at.j, run.last)"},
    ),
    "plans of another head": Mistake(WRONG, "heads differ", {"int64(h) * here.offsets_head": "0"}),
    "plans of another batch": Mistake(WRONG, "heads differ", {"int64(b) * here.offsets_batch": "0"}),
    "turns that do not begin at 0": Mistake(
        "deadlock.*for another block", "full",
        {"if (threadIdx.x < TURNS)": "if (threadIdx.x < TURNS && tile == 0)"},
    ),
    "a first turn that adds": Mistake(WRONG, "full", {"piece), turn == 0);": "piece), turn < 0);"}),
    "turns that only store": Mistake(WRONG, "full", {"piece), turn == 0);": "piece), turn >= 0);"}),
    "sums of a query tile that met none": Mistake(
        WRONG, "tiles that meet none", {"launch.turns[at * TURNS] > 0;": "true;"},
    ),
    # Products.
    "wrong swizzle of d_s": Mistake(WRONG, "full", {"^ row % 8)": "^ row % 4)"}),
    "wrong swizzle of what is held": Mistake(WRONG, "full", {"^ lane % 8)": "^ lane % 4)"}),
    "the other warpgroup's rows are held": Mistake(
        WRONG, "full", {"rows + (first_row() + ": "rows + ((first_row() + 64) % 128 + "},
    ),
    "wrong step along d_s": Mistake(
        WRONG, "full", {"a = a_at + k * 16 * ROW_BYTES / 16, b": "a = a_at + k * 32 / 16, b"},
    ),
    "wrong step along k": Mistake(
        WRONG, "full", {"b = b_at + k * 16 * ROW_BYTES / 16;": "b = b_at + k * 8 * ROW_BYTES / 16;"},
    ),
    "the other half of k's columns": Mistake(
        WRONG, "whole tiles", {"hw::anew(k()) + number * (": "hw::anew(k()) + (1 - number) * ("},
    ),
    "the other part of k's columns": Mistake(
        WRONG, "d 128", {"Q_PARTS == 2 ? TILE_K * ROW_BYTES": "Q_PARTS == 2 ? ROW_BYTES / 2"},
    ),
    "the other half of d_q": Mistake(WRONG, "whole tiles", {"query) + half * HALF;": "query) + (1 - half) * HALF;"}),
    "d_q's rows in another order": Mistake(
        WRONG, "whole tiles", {"lane / 4 + lower * 8": "lane / 4 + (1 - lower) * 8"},
    ),
    "the other warpgroup's keys": Mistake(
        WRONG, "full", {"d_s() + number * 64 * ROW_BYTES": "d_s() + (1 - number) * 64 * ROW_BYTES"},
    ),
    "the other warpgroup's keys, of those not held": Mistake(
        WRONG, "d 128", {"hw::anew(keys) + number * 64": "hw::anew(keys) + (1 - number) * 64"},
    ),
    "d_k of the query tile after": Mistake(
        WRONG, "full", {"        add_to_d_k(q);\n": "        add_to_d_k(this->q);\n"},
    ),
    "no fence before d_p": Mistake("wgmma.fence is missing", "full", {f"hw::wgmma_fence();\n{MULTIPLY_V}": MULTIPLY_V}),
    "no wait for d_p": Mistake(
        WRONG, "full", {"hw::wgmma_wait<1>();\n        hw::pin(d_p);": "hw::wgmma_wait<2>();"},
    ),
    "no wait for d_q": Mistake(
        WRONG, "full", {"hw::wgmma_wait<LAST ? 1 : 2>();": "hw::wgmma_wait<LAST ? 2 : 3>();"},
    ),
    "no wait for the first s": Mistake(
        "written to before", "full", {"        hw::wgmma_wait<0>();\n        hw::pin(s);\n": ""},
    ),
    "no wait for s": Mistake(
        "written to before", "full", {"hw::wgmma_wait<1>();\n            hw::pin(s);": ""},
    ),
    "no wait for d_k": Mistake(
        "written to before", "full",
        {"hw::wgmma_wait<0>();\n        hw::pin(d_k);": "hw::pin(d_k);"},
    ),
    "no wait for d_k of the step before": Mistake(
        EARLY, "full", {"            hw::wgmma_wait_in_place<1>(launch.items > 0);\n": ""},
    ),
    "no wait for d_v": Mistake(
        EARLY, "full",
        {"hw::wgmma_wait<HAS_D_Q ? 1 : 0>();": "hw::wgmma_wait<HAS_D_Q ? 2 : 1>();"},
    ),
    "d_k that does not begin at 0": Mistake(WRONG, "full", {"clear(d_k);": ""}),
    "d_v that does not begin at 0": Mistake(WRONG, "tiles that meet none", {"clear(d_v);": ""}),
    # Scores and weights.
    "no mask": Mistake(WRONG, "causal", {"(is_partial && !variant::mask(params, head, row, key, near))": "false"}),
    "a mask one query off": Mistake(
        WRONG, "causal", {"n * 8 + lane % 4 * 2 + e;\n": "n * 8 + lane % 4 * 2 + e + 1;\n"},
    ),
    "the kind of another query tile": Mistake(
        WRONG, "causal", {"shared.meeting(q).kind": "shared.meeting(q_before).kind"},
    ),
    "scores beyond the last query": Mistake(WRONG, "no number beyond the last query", {"query >= n_q || ": ""}),
    "s that begins with what was there": Mistake(
        WRONG, "full", {"multiply_rows<DEPTH, false>": "multiply_rows<DEPTH, true>"},
    ),
    "the shift of another query tile": Mistake(
        WRONG, "full", {"shift[n] = two_of(shared.shift(q), n);": "shift[n] = two_of(shared.shift(q_before), n);"},
    ),
    "a shift read before it arrives": Mistake(
        WRONG, "full", {READ_SHIFT: "", AWAIT_Q: READ_SHIFT.replace("shift(q)", "shift(next_q.stage)") + AWAIT_Q},
    ),
    "a shift of every other query": Mistake(WRONG, "full", {"i % 2 ? shift[i / 4].y : ": ""}),
    "scores that are scaled once more": Mistake(WRONG, "a slope", {"scale = SCORED ? 1.0f : ": "scale = "}),
    "no shift beyond the last query": Mistake(WRONG, "a slope", {"rows[row] = lse": "if (inside) rows[row] = lse"}),
    "no shift of rows without keys": Mistake(
        WRONG, "every other row, a slope", {"lse == -INFINITY ? lse : -lse;": "!inside ? lse : -lse;"},
    ),
    "powers of 2": Mistake(WRONG, "full", {"exp2_approximate(LOG2_E * fmaf": "exp2_approximate(fmaf"}),
    "weights of half of the queries": Mistake(WRONG, "full", {"        exponentiate<TILE_Q / 2, TILE_Q>();\n": ""}),
    "no delta": Mistake(WRONG, "full", {"multiply_rows<COLUMNS, true>": "multiply_rows<COLUMNS, false>"}),
    "d_p that begins with what was there": Mistake(WRONG, "full", {BEGIN_D_P: ""}),
    "d_p begun before delta arrives": Mistake(WRONG, "full", {AWAIT_D_OUT + BEGIN_D_P: BEGIN_D_P + AWAIT_D_OUT}),
    "delta of half of the columns": Mistake(WRONG, "whole tiles", {"delta += __shfl_xor_sync(~0u, delta, 2);": ""}),
    "d_lse added": Mistake(WRONG, "full", {"delta -= *row_of": "delta += *row_of"}),
    "no slope": Mistake(
        WRONG, "a slope", {"s[i] *= variant::slope(params, head, row, key, near, plain[i]);": "s[i] *= 1;"},
    ),
    "a slope of scores without scale": Mistake(
        WRONG, "a slope", {"plain[i] = s[i] * params.scale;": "plain[i] = s[i];"},
    ),
    "no scale of d_k": Mistake(WRONG, "full", {"d_k, 0, D, item, params.scale": "d_k, 0, D, item, 1.0f"}),
    "no scale of d_q": Mistake(
        WRONG, "full", {"&held[0][lower * 2], params.scale": "&held[0][lower * 2], 1.0f"},
    ),
    # Which tiles meet.
    "a head too few of a group": Mistake(
        WRONG, "grouped",
        {"last_head(h + launch.backward.params.group)": "last_head(h + launch.backward.params.group - 1)"},
    ),
    "the last run only": Mistake(
        "deadlock.*for another block", "runs", {"first_run = offsets[0];": "first_run = offsets[1] - 1;"},
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
        WRONG, "full",
        {"                h = last_head - launch.backward.params.group;\n": ""},
    ),
    "a visit too few": Mistake("deadlock", "full", {"if (left == 0) return false;": "if (left <= 1) return false;"}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", UNORDERED)
def test_a_mistake_without_order_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, problem, edits = UNORDERED[mistake]
    plant(monkeypatch, FILES, edits)
    expect_told(expected, partial(check, problem, name="unordered"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, problem, edits = MISTAKES[mistake]
    plant(monkeypatch, FILES, edits)
    expect_told(expected, partial(check, problem))
