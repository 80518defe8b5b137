// Which keys count: masks as bytes. A mask needs no scores, so it comes before them, and what no query of a few rows may
// attend to is not computed.
#pragma once
#include "program.h"

namespace {

struct Range {
    int from, to;
    bool empty() const { return from >= to; }
};

// Whether key j of the tile counts for its query row + r: counts[r * LD + j], for these rows and n keys, LD at most.
// Returns the range of keys outside of which none counts for any of them.
template <int LD, class T>
Range counting_keys(Interpreter<T>& mask, int mask_at, int row, int rows, int n, uint8_t* counts) {
    uint8_t any[LD] = {};
    for (int r = 0; r < rows; r++, counts += LD) {
        for (int j = 0; j < n; j += LANES) {
            int m = smaller(LANES, n - j);
            mask.enter_scores(row + r, j, m, nullptr);
            mask.take(mask_at, row + r, j, m, counts + j);
        }
        for (int j = 0; j < n; j++) any[j] |= counts[j];
    }
    Range keys = {0, n};
    while (!keys.empty() && !any[keys.from]) keys.from++;
    while (!keys.empty() && !any[keys.to - 1]) keys.to--;
    return keys;
}

// Scores of keys that do not count are -inf.
template <class T> void hide(const uint8_t* counts, int n, T* s) {
    for (int j = 0; j < n; j++) s[j] = counts[j] ? s[j] : -INF<T>;
}

}  // namespace
