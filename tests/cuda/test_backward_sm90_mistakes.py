"""Mistakes that are planted in Hopper's backward pass, one at a time: the simulator tells of each."""

from __future__ import annotations

from functools import partial

import pytest

from tests.cuda.backward_problems import FILES, LAST_FIRST, ROWS_LAST, check, small_shares, unwritten  # noqa: F401
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

# Most problems have heads of up to 64 columns, and tiles of 128 queries: d_s has one place, and warpgroups halve the
# queries of d_q. "d 128" has tiles of 64: d_s has two places, and warpgroups halve the columns of d_q.

FREE_Q = "        arrive(shared.q_free(q_stage()));\n"
FREE_V = "        if (LAST) arrive(shared.v_free());\n"
FREE_UNMET_V = "        this->arrive(this->shared.v_free());\n"
FREE_D_OUT = "        arrive(shared.d_out_free(d_out_stage()));\n"
FREE_K = "        this->arrive(this->shared.k_free());\n"
FREE_D_S = "        if (S_STAGES == 1) arrive(shared.d_s_free());\n"
FREE_D_Q = "        hw::mbarrier_arrive(shared.d_q_free(number));\n"
FREE_ADDITION = "            hw::mbarrier_arrive(shared.d_out_free(stage));\n"
AWAIT_ITEM_FREE = "        wait_together(shared.item_free(place), items / 2 % 2 ^ 1);\n"
AWAIT_K = "            hw::mbarrier_wait(this->shared.k_full(), this->keys % 2);\n"
AWAIT_Q = "        hw::mbarrier_wait(shared.q_full(q_stage()), steps / Q_STAGES % 2);\n"
AWAIT_V = "        hw::mbarrier_wait(this->shared.v_full(), this->keys % 2);\n"
AWAIT_D_OUT = "        hw::mbarrier_wait(shared.d_out_full(d_out_stage()), steps / O_STAGES % 2);\n"
AWAIT_D_S_FREE = "        if (S_STAGES == 1) hw::mbarrier_wait(shared.d_s_free(), steps % 2 ^ 1);\n"
AWAIT_D_Q_FREE = "        hw::mbarrier_wait(shared.d_q_free(storer), parity);\n"
AWAIT_ADDITION = "        wait_together(shared.d_out_full(stage), step / O_STAGES % 2);\n"
AWAIT_STORE = "        hw::tma_store_wait<0>();\n"
AWAIT_D_V = "        hw::wgmma_wait<1>();\n        hw::pin(p);\n"
AWAIT_D_K = "        hw::wgmma_wait<0>();\n        hw::pin(d_s);\n"
AWAIT_TABLE = "        if (USES_TABLE) hw::mbarrier_wait(shared.table_full(), steps % 2);\n"
FREE_TABLE = "            arrive(shared.table_free());\n"
FREE_TABLE_EARLY = "        if (USES_TABLE) arrive(shared.table_free());\n"
LATER_P = "            if (k >= SOONER / 2) exponentiate(k);\n"
PACK_P = "            if (!WIDE) pack(p[k], k);\n"
FIND_SLOPES = "        if (variant::HAS_SLOPE) {\n            multiply_by_slopes();\n"
KEYS_OF_D_S = "first_row() + lane / 8 % 2 * 8, query = first_query() + lane"
KEYS_OF_CELLS = "first_row() + lane / 8 % 2 * 8, query = first_query() + n"
OF_DELTA = "delta = two_of(shared.delta(d_out_stage()), n);\n#pragma unroll\n            for (int i"
DELTA = "(i % 2 ? delta.y : delta.x)"
MULTIPLY_S = "        multiply_rows<DEPTH, false, 0>(s, shared.k(), shared.q(q_stage()));\n"
MULTIPLY_D_Q = "        begin_d_q();\n"
WRITE_D_S = "        write_turned(d_s_tile(), d_s);\n"
MEET_OTHER = "        hw::barrier_sync(Shared::D_S_WRITTEN, 256);\n"
TELL_LATE = "        if (TELLS_LATE && owes) tell_of(steps - 1);\n"
MEET_ITSELF = "        hw::barrier_sync(Shared::D_S_WRITTEN + 6 * number, 128);\n"
SEND = "        hw::fence_async();\n        meet();\n"
MEET_AT_THE_END = (
    "        hw::barrier_sync(Shared::D_S_WRITTEN, 256);  // both have multiplied all d_s: its places are free\n"
)
UNMET = f"{UNFENCED}|{ISSUED}"
FENCE_D_Q = "        hw::fence_async();\n        tell_of(step);\n"
HAND_OVER = "        if (TELLS_LATE) owes = true;\n        else hand_over(steps);\n"
WRITE_D_Q = "        write_d_q(d_q, steps % 2, number, steps / 2 % 2 ^ 1);\n"
ROOM = "                wait_together(shared.d_out_free(o_ring.stage), o_ring.parity);\n"
TELL_ADDITION = ("                if (lane == 0) {\n"
                 "                    shared.addition(o_ring.stage).tile = tile;\n"
                 "                    shared.addition(o_ring.stage).turn = turn;\n"
                 "                }\n")  # fmt: skip
TURN = "hw::wait_for_number(turns, turn);"
AWAIT_ROWS = "            wait_until_ready(launch, item.b, item.hk);\n"
ROWS_READY = "hw::add_release(ready_of(launch, item.b, item.hk), 1);"
AWAIT_DONE = "            hw::wait_for_number(done_of(launch, item.b, item.hk), 2 * params.tiles);\n"

# Each is one kind of mistake.
MISTAKES: dict[str, Mistake] = {
    # Tiles arrive.
    "no wait for k": Mistake("deadlock", "full", {AWAIT_K: ""}),
    "no wait for q": Mistake("more often", "full", {AWAIT_Q: ""}),
    "no wait for v": Mistake(WRONG, "full", {AWAIT_V: ""}),
    "no wait for d_out": Mistake("more often", "full", {AWAIT_D_OUT: ""}),
    "a parity that never changes": Mistake("more often", "full", {"parity ^= 1;": ""}),
    "the parity of q changes too often": Mistake(
        "deadlock|more often", "full", {"steps / Q_STAGES % 2);": "steps % 2);"},
    ),
    "the parity of v of a ring of two": Mistake(
        "deadlock", "full", {"shared.v_full(), this->keys % 2": "shared.v_full(), this->keys / 2 % 2"},
    ),
    "the parity of k of a ring of two": Mistake(
        "deadlock", "full", {"shared.k_full(), this->keys % 2": "shared.k_full(), this->keys / 2 % 2"},
    ),
    "v not free at first": Mistake(
        "deadlock", "full", {"shared.v_free(), items % 2 ^ 1": "shared.v_free(), items % 2"},
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
    "keys of another sequence": Mistake(WRONG, "packed", {"item.hk, item.first_key + key)": "item.hk, key)"}),
    "keys of the next sequence": Mistake(
        WRONG, "packed", {"params.n_sequences > 1 && item.left": "false && item.left"},
    ),
    "queries of another sequence": Mistake(
        WRONG, "packed", {"tile.sequence->q_begin + tile.first_query + query": "tile.first_query + query"},
    ),
    # Places are let go.
    "q never let go": Mistake("deadlock", "full", {FREE_Q: ""}),
    "q let go before d_k is done": Mistake(EARLY, "full", {AWAIT_D_K + FREE_Q: FREE_Q + AWAIT_D_K}),
    "d_out let go before d_v is done": Mistake(EARLY, "full", {AWAIT_D_V + FREE_D_OUT: FREE_D_OUT + AWAIT_D_V}),
    "v never let go": Mistake("deadlock", "full", {FREE_V: ""}),
    "v never let go by a key tile that meets none": Mistake("deadlock", "tiles that meet none", {FREE_UNMET_V: ""}),
    "k let go before it is multiplied": Mistake(
        EARLY, "one query tile",
        {FREE_K: f"        if (item.visits < 0)\n{FREE_K}",
         FREE_V: f"{FREE_V}        if (LAST) arrive(shared.k_free());\n"},
    ),
    "too few to let q go": Mistake(
        f"deadlock|{ISSUED}", "full",
        {"init(q_free(stage), CONSUMER_WARPS)": "init(q_free(stage), CONSUMER_WARPS / 2)"},
    ),
    "too many to let k go": Mistake(
        "deadlock", "full", {"init(k_free(), CONSUMER_WARPS)": "init(k_free(), CONSUMER_WARPS + 1)"},
    ),
    "too many to let an item go": Mistake(
        "deadlock", "d 128", {"init(item_free(stage), 3)": "init(item_free(stage), 4)"},
    ),
    "the parity of items of one place": Mistake(
        "deadlock|more often", "d 128", {AWAIT_ITEM_FREE: AWAIT_ITEM_FREE.replace("items / 2 % 2", "items % 2")},
    ),
    # What threads hand to each other, to products and to the copy engine.
    "no fence after d_s": Mistake(UNFENCED, "full", {f"        hw::fence_async();\n{MEET_OTHER}": MEET_OTHER}),
    "a warpgroup that does not meet the other": Mistake(
        UNMET, "d 128", {MEET_OTHER: MEET_ITSELF},
    ),
    "a warpgroup that does not meet the other, of 128 queries": Mistake(
        UNMET, "full", {MEET_OTHER: MEET_ITSELF},
    ),
    "d_s told of before it is written": Mistake(
        UNMET, "full", {MEET_OTHER: "", WRITE_D_S: f"{MEET_OTHER}{WRITE_D_S}"},
    ),
    "the only d_s written while the other warpgroup multiplies it": Mistake(
        f"{UNFENCED}|{ISSUED}", "full", {AWAIT_D_S_FREE: ""},
    ),
    "one place for d_s of 64 queries": Mistake(
        f"{UNFENCED}|{ISSUED}|{WRONG}", "d 128", {"shared.d_s(steps % S_STAGES)": "shared.d_s(0)"},
    ),
    "d_s let go before it is multiplied": Mistake(
        f"{UNFENCED}|{ISSUED}", "full", {FREE_D_S: "", MULTIPLY_D_Q: f"{MULTIPLY_D_Q}{FREE_D_S}"},
    ),
    "d_s written keys down": Mistake(WRONG, "d 128", {"hw::store_matrices_turned(at": "hw::store_matrices(at"}),
    "d_s of the same keys": Mistake(
        WRONG, "d 128", {KEYS_OF_D_S: KEYS_OF_D_S.replace(" + lane / 8 % 2 * 8", "")},
    ),
    "d_s of the other warpgroup's keys": Mistake(
        WRONG, "d 128", {"(key / PART * TILE_Q + query)": "((1 - key / PART) * TILE_Q + query)"},
    ),
    "d_s never let go": Mistake("deadlock", "full", {FREE_D_S: ""}),
    "d_s of another step": Mistake(WRONG, "d 128", {"hw::anew(d_s_tile())": "hw::anew(shared.d_s(1 - steps % 2))"}),
    "no fence after d_q": Mistake(UNFENCED, "full", {FENCE_D_Q: FENCE_D_Q.split("\n", 1)[1]}),
    "d_q handed over before it is written": Mistake(
        UNFENCED, "full", {HAND_OVER: "", WRITE_D_Q: f"        hand_over(steps);\n{WRITE_D_Q}"},
    ),
    "d_q that is not handed over": Mistake("deadlock.*named barrier", "full", {HAND_OVER: ""}),
    "d_q handed over to the other storer": Mistake(
        "deadlock.*named barrier", "full", {"d_q_written(storer, piece), 160": "d_q_written(1 - storer, piece), 160"},
    ),
    "d_q overwritten before it was read": Mistake(f"{WRONG}|{UNFENCED}", "full", {AWAIT_D_Q_FREE: ""}),
    "d_q stored before it is written": Mistake(
        f"{UNFENCED}|{WRONG}|deadlock", "full",
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
        f"{UNFENCED}|{WRONG}", "full", {"shared.d_q(number, piece), turn": "shared.d_q(1 - number, piece), turn"},
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
        "deadlock.*for another block", "full", {"tell_done(launch.turns + tile);": "{}"},
    ),
    "a turn too late": Mistake(
        "deadlock.*for another block", "full", {"min(at.j, __ldg(&run->last))": "min(at.j + 1, __ldg(&run->last))"},
    ),
    "a turn too late after tiles that are skipped": Mistake(
        "deadlock.*for another block", "window", {" - __ldg(&run->first), 0": ", 0"},
    ),
    "plans of another head": Mistake(WRONG, "heads differ", {"int64(h) * __ldg(&here.offsets_head)": "0"}),
    "plans of another batch": Mistake(WRONG, "heads differ", {"int64(b) * __ldg(&here.offsets_batch)": "0"}),
    "turns that do not begin at 0": Mistake(
        "deadlock.*for another block", "full",
        {"thread < TURNS)": "thread < TURNS && tile.of_all == 0)"},
    ),
    "a first turn that adds": Mistake(WRONG, "full", {"piece), turn == 0);": "piece), turn < 0);"}),
    "turns that only store": Mistake(WRONG, "full", {"piece), turn == 0);": "piece), turn >= 0);"}),
    "sums of a query tile that met none": Mistake(
        WRONG, "tiles that meet none", {"if (tile.turns == 0)": "if (tile.turns < 0)"},
    ),
    # d_q from its sums.
    "d_q of which the last sums are missing": Mistake(WRONG, "full", {AWAIT_DONE: ""}),
    "a key tile that is never done": Mistake(
        "deadlock.*for another block", "full", {"tell_done(done_of(launch, item.b, item.hk));": "{}"},
    ),
    "a key tile of another head that is done": Mistake(
        "deadlock.*for another block", "grouped",
        {"tell_done(done_of(launch, item.b, item.hk));": "tell_done(done_of(launch, item.b, 0));"},
    ),
    "rows that are not waited for": Mistake(f"{WRONG}|deadlock", "full", {AWAIT_ROWS: "", **ROWS_LAST}),
    "rows that are never ready": Mistake("deadlock.*for another block", "full", {ROWS_READY: "{}"}),
    "the same share of rows for all": Mistake(
        f"{WRONG}|deadlock", "full", {"first = item.j * launch.share, all": "first = 0, all"}
    ),
    "the same share of d_q for all": Mistake(
        WRONG, "d 128", {"first = item.j * launch.share, last": "first = 0, last"},
    ),
    "d_q of another head": Mistake(
        WRONG, "grouped", {"item.hk * params.group + i / q_tiles": "item.hk * params.group"},
    ),
    "d_q written over that of a tile before": Mistake(
        f"{WRONG}|{UNFENCED}", "d 128", {"        box.await<Outbox::PLACES - 1>();\n": ""},
    ),
    "d_q of the tile before's queries": Mistake(
        WRONG, "d 128", {"row = tile.first_query + (H": "row = tile.first_query - TILE_Q + (H"},
    ),
    # d_k and d_v by the copy engine.
    "d_k and d_v written over d_s that the other warpgroup multiplies": Mistake(
        f"{UNFENCED}|{ISSUED}", "d 128", {MEET_AT_THE_END: ""},
    ),
    "no fence after d_k": Mistake(UNFENCED, "d 128", {SEND: "        meet();\n"}),
    "d_k stored before all have written it": Mistake(
        f"{WRONG}|{UNFENCED}", "d 128", {SEND: "        hw::fence_async();\n"},
    ),
    "d_k written over d_v that is not stored": Mistake(
        f"{WRONG}|{UNFENCED}", "d 128", {"if (BEFORE + part >= Outbox::PLACES)": "if (false)"},
    ),
    "stores that nobody waits for": Mistake(
        "the block ends while this copy is under way", "one query tile", {"            this->settle();\n": ""},
    ),
    "d_k of the other keys": Mistake(
        WRONG, "d 128", {"item.first_key + first_of_64(), item.hk": "item.first_key + 64 - first_of_64(), item.hk"},
    ),
    "the same columns of d_k twice": Mistake(WRONG, "d 128", {"place, part * PART, item": "place, 0, item"}),
    # Products.
    "wrong swizzle of d_s": Mistake(WRONG, "full", {"^ query % 8) * 16;\n#": "^ query % 4) * 16;\n#"}),
    "wrong step along d_s": Mistake(
        WRONG, "full", {"k / 4 * TILE_Q * ROW_BYTES + k % 4 * 32), b": "k * 32), b"},
    ),
    "wrong step along k": Mistake(
        WRONG, "full", {"b = further(b_at, row);": "b = further(b_at, row / 2);"},
    ),
    "the other half of k's columns": Mistake(
        WRONG, "d 80, d_v 128", {"HALVES_QUERIES ? 0 : number * (Q": "HALVES_QUERIES ? 0 : (1 - number) * (Q"},
    ),
    "the other half of d_s": Mistake(
        WRONG, "whole tiles", {"HALVES_QUERIES ? number * 64 * R": "HALVES_QUERIES ? (1 - number) * 64 * R"},
    ),
    "the other part of k's columns": Mistake(
        WRONG, "d 128", {"Q_PARTS == 2 ? TILE_K * ROW_BYTES": "Q_PARTS == 2 ? ROW_BYTES / 2"},
    ),
    "the other half of d_q": Mistake(
        WRONG, "d 128", {"column = HALVES_QUERIES ? 0 : number * PART": "column = (1 - number) * PART"},
    ),
    "the other queries of d_q": Mistake(
        WRONG, "whole tiles", {"(HALVES_QUERIES ? number * 64 : 0);": "(HALVES_QUERIES ? (1 - number) * 64 : 0);"},
    ),
    "the last rows of a packed sequence's d_q in another order": Mistake(
        WRONG, "packed", {"lane / 4 + lower * 8": "lane / 4 + (1 - lower) * 8"},
    ),
    "the other warpgroup's keys": Mistake(
        WRONG, "full", {"hw::anew(keys) + first_of_64()": "hw::anew(keys) + (64 - first_of_64())"},
    ),
    "no fence before products": Mistake(
        "wgmma.fence is missing", "full", {f"hw::wgmma_fence();\n{MULTIPLY_S}": MULTIPLY_S},
    ),
    "no wait for d_p": Mistake(
        f"{WRONG}|written to before", "full", {"        hw::wgmma_wait_in_place<0>(launch.items > 0);\n": ""},
    ),
    "no wait for d_q": Mistake(
        f"{WRONG}|written to before", "full",
        {f"        hw::wgmma_wait<1>();\n{FREE_D_S}": f"        hw::wgmma_wait<2>();\n{FREE_D_S}"},
    ),
    "no wait for s": Mistake("written to before", "full", {"        hw::wgmma_wait<1>();\n        hw::pin(s);\n": ""}),
    "no wait for d_k": Mistake(f"{EARLY}|written to before", "full", {AWAIT_D_K: ""}),
    "no wait for d_v": Mistake(f"{EARLY}|written to before", "full", {AWAIT_D_V: ""}),
    "d_k that does not begin at 0": Mistake(WRONG, "full", {"clear(this->d_k);": ""}),
    "d_v that does not begin at 0": Mistake(WRONG, "tiles that meet none", {"clear(this->d_v);": ""}),
    # Scores and weights.
    "no mask": Mistake(WRONG, "causal", {"(is_partial && !variant::mask(params, head, row, key, near))": "false"}),
    "a mask one query off": Mistake(
        WRONG, "causal", {"n * 8 + lane % 4 * 2 + e;\n": "n * 8 + lane % 4 * 2 + e + 1;\n"},
    ),
    "the kind of another query tile": Mistake(
        WRONG, "causal", {"shared.meeting(q_stage()).kind": "shared.meeting(1 - q_stage()).kind"},
    ),
    "scores beyond the last query": Mistake(WRONG, "no number beyond the last query", {"query >= seen.n_q || ": ""}),
    "s that begins with what was there": Mistake(
        WRONG, "full", {"multiply_rows<DEPTH, false, 0>": "multiply_rows<DEPTH, true, 0>"},
    ),
    "the shift of another query tile": Mistake(
        WRONG, "full", {"shifts[n] = two_of(shared.shift(q_stage())": "shifts[n] = two_of(shared.shift(1 - q_stage())"},
    ),
    "the later shifts of another query tile": Mistake(
        WRONG, "full", {"shifts[n] : two_of(shared.shift(q_stage())": "shifts[n] : two_of(shared.shift(1 - q_stage())"},
    ),
    "no later exponentials": Mistake(WRONG, "full", {LATER_P: ""}),
    "p narrowed before its last exponentials": Mistake(
        WRONG, "full", {LATER_P + PACK_P: PACK_P + LATER_P},
    ),
    "a shift of every other query": Mistake(WRONG, "full", {"i % 2 ? shift.y : ": ""}),
    "scores that are scaled once more": Mistake(WRONG, "a slope", {"scale = SCORED ? 1.0f : ": "scale = "}),
    "no shift beyond the last query": Mistake(
        WRONG, "a slope", {"rows[row(pass)] = lse": "if (inside) rows[row(pass)] = lse"},
    ),
    "no shift of rows without keys": Mistake(
        WRONG, "every other row, a slope", {"lse == -INFINITY ? lse : -lse;": "!inside ? lse : -lse;"},
    ),
    "powers of 2": Mistake(WRONG, "full", {"exp2_approximate(LOG2_E * fmaf": "exp2_approximate(fmaf"}),
    "no delta": Mistake(WRONG, "full", {DELTA: "0"}),
    "a delta of every other query": Mistake(WRONG, "full", {DELTA: "delta.x"}),
    "the delta of another query tile": Mistake(
        WRONG, "full", {OF_DELTA: OF_DELTA.replace("d_out_stage", "1 - d_out_stage")},
    ),
    "d_p that begins with what was there": Mistake(
        WRONG, "full", {"multiply_rows<COLUMNS, WIDE, HELD>": "multiply_rows<COLUMNS, true, HELD>"},
    ),
    "delta of half of the columns": Mistake(WRONG, "whole tiles", {"apart < LANES; apart": "apart < LANES / 2; apart"}),
    "d_lse added": Mistake(WRONG, "full", {"delta -= *row_of": "delta += *row_of"}),
    "no slope": Mistake(
        WRONG, "a slope", {"s[i] *= variant::slope(params, seen.head, row, key, near, plain[i]);": "s[i] *= 1;"},
    ),
    "a slope of scores without scale": Mistake(
        WRONG, "a slope", {"plain[i] = s[i] * params.scale;": "plain[i] = s[i];"},
    ),
    "no scale of d_k": Mistake(WRONG, "full", {"&launch.d_k, d_k, item, params.scale": "&launch.d_k, d_k, item, 1.0f"}),
    "no scale of d_q": Mistake(
        WRONG, "full", {"const float scale = launch.backward.params.scale;": "const float scale = 1.0f;"},
    ),
    "no scale of d_q's last rows": Mistake(
        WRONG, "packed", {"&tile.held[lower * 2], launch.backward.params.scale": "&tile.held[lower * 2], 1.0f"},
    ),
    # Tables.
    "no wait for a table": Mistake(f"{WRONG}|more often", "a table, d 128", {AWAIT_TABLE: ""}),
    "a table that is never let go": Mistake("deadlock", "a table, d 128", {FREE_TABLE: ""}),
    "a table let go before it is read": Mistake(
        WRONG, "a table, d 128", {FREE_TABLE: "", AWAIT_TABLE: AWAIT_TABLE + FREE_TABLE_EARLY},
    ),
    "a table let go before slopes are known": Mistake(
        WRONG, "a table, a slope, packed",
        {FREE_TABLE: "", FIND_SLOPES: FREE_TABLE_EARLY + FIND_SLOPES},
    ),
    "a table that is not waited for": Mistake(
        f"{WRONG}|more often", "a table, d 128",
        {"        wait_together(shared.table_free(), table_ring.parity);\n": ""},
    ),
    "the table's first keys for all": Mistake(
        WRONG, "a table, d 128", {"+ item.j * TILE_K + part * TABLE_COLUMNS": "+ part * TABLE_COLUMNS"},
    ),
    "cells of the same queries": Mistake(
        WRONG, "a table, d 128", {"first_query() + n * 8 + lane / 16 * 8": "first_query() + n * 8"},
    ),
    "cells of the same keys": Mistake(
        WRONG, "a table, d 128", {KEYS_OF_CELLS: KEYS_OF_CELLS.replace(" + lane / 8 % 2 * 8", "")},
    ),
    "cells that are not turned": Mistake(
        WRONG, "a table, d 128", {"load_matrices_turned(cells": "load_matrices(cells"},
    ),
    "one cell of two": Mistake(WRONG, "a table, d 128", {"(&two)[which]": "(&two)[0]"}),
    "the only d_s of 64 queries written while it is multiplied": Mistake(
        f"{UNFENCED}|{ISSUED}|{WRONG}", "a table, d 128", {AWAIT_D_S_FREE: ""},
    ),
    # Which tiles meet.
    "a head too few of a group": Mistake(
        WRONG, "grouped",
        {"last_head(h + launch.backward.params.group)": "last_head(h + launch.backward.params.group - 1)"},
    ),
    "the last run only": Mistake(
        WRONG, "runs", {"first_run = __ldg(offsets);": "first_run = __ldg(offsets + 1) - 1;"},
    ),
    "a visit too few": Mistake("deadlock", "full", {"at.tile + 1 - at.first": "at.tile - at.first"}),
    "keys of another head": Mistake(
        WRONG, "tiles that meet none",
        {"shared.k_full(), item.first_key, item.hk": "shared.k_full(), item.first_key, 0"},
    ),
}  # fmt: skip


# Where there is no order.
UNORDERED: dict[str, Mistake] = {
    "sums added to before the first is there": Mistake(WRONG, "full", {TURN: "", **LAST_FIRST}),
    "sums that are stored again": Mistake(WRONG, "full", {": min(turn_of(at), 1)": ": 0"}),
    "a first sum of which nobody is told": Mistake(
        "deadlock.*for another block", "full", {"(ORDERED || turn == 0) && leads": "ORDERED && leads"},
    ),
    "d_q of the section at hand": Mistake(
        f"{WRONG}|deadlock.*for another block", "grouped", {"before - launch.behind * section": "before"},
    ),
    # Storers are told a step later.
    "the storer of the step at hand is told": Mistake(
        "deadlock|more often", "full", {TELL_LATE: TELL_LATE.replace("steps - 1", "steps")},
    ),
    "no storer is told of the last step": Mistake(
        "deadlock", "full", {"        if (owes) hand_over(steps - 1);\n": ""},
    ),
    "no fence after the last step": Mistake(UNFENCED, "one query tile", {FENCE_D_Q: FENCE_D_Q.split("\n", 1)[1]}),
    "the last step is owed for ever": Mistake(
        "deadlock|arrivals|barrier", "one query tile", {"        owes = false;\n": ""},
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", UNORDERED)
def test_a_mistake_without_order_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, problem, edits = UNORDERED[mistake]
    plant(monkeypatch, FILES, edits)
    expect_told(expected, partial(check, problem, name="unordered"))


def test_all_mistakes_can_be_planted() -> None:
    check_all_can_be_planted(FILES, MISTAKES)


@pytest.mark.parametrize("mistake", some(MISTAKES))
def test_a_mistake_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, problem, edits = MISTAKES[mistake]
    plant(monkeypatch, FILES, edits)
    expect_told(expected, partial(check, problem))
