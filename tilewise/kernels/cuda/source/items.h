// What a persistent kernel works on, one after the other; the host makes records of them (../marshal.py).
#pragma once

// A query tile of one head. Its runs are those of the plan, the first few at hand; a run has a kind for each warpgroup,
// two bits each.
constexpr int RUNS_AT_HAND = 3;
struct Item {
    Work work;
    int n_runs, first_run;  // no runs: there are no more items
    Run runs[RUNS_AT_HAND];
    int unused;
};
static_assert(sizeof(Item) == 128, "a warp copies an item at once");
constexpr int B_WORD = sizeof(Sequence) / 4;  // which of its numbers is work.b; h and hk follow
