// Gradients of arrays that a score reads: a score passes d_score * (d score / d cell) on to its cell. A block walks tiles of
// scores of which those at the same place share a cell, but for what is summed at the end: those of a row, of a column, or
// of a distance q - k. So it adds tile to tile, and each sum has one block and one order.
#pragma once

constexpr int OF_ROWS = 0, OF_COLUMNS = 1, OF_PAIRS = 2, OF_DISTANCES = 3;  // SHARING: what a block's sums belong to

struct Sums {  // what these kernels are told
    Backward backward;  // the variant's slope is that of the score by the cell
    // (batch, heads, n) of rows and columns; (batch, heads, queries, keys) of pairs; (batch, heads, RANGES, distances): those
    // of a diagonal of tiles are ranges of TILE_K, of which the next diagonal has all but the first too. Packed sequences are
    // a batch.
    Array sums;
    int most_q, most_k, q_tiles, k_tiles;  // of the longest sequences
    // Of pairs: batch indices and heads that the array tells apart, and how many share a cell; into how many parts these are
    // split, each with sums of its own, where tiles are fewer than blocks that run at once.
    int kept_batch, kept_heads, summed_batch, summed_heads, splits;
};

// A tile of scores. It begins at the tiles' multiples of TILE_Q and TILE_K in its sequence.
struct Place {
    Work work;
    int q_tile, k_tile, kind;
};

// What the plan says of a tile of keys, seen from its tile of queries, which is work.tile.
__device__ __forceinline__ int kind_of_tile(const Params& params, const Work& work, int k_tile) {
    if (work.tile * TILE_Q >= work.sequence.n_q || k_tile * TILE_K >= work.sequence.n_k) return EMPTY;
    const int2 runs = runs_of_tile(params, work);
    int low = runs.x, high = runs.y;  // the first run that ends beyond it
    while (low < high) {
        const int middle = (low + high) / 2;
        if (params.runs[middle].last <= k_tile) low = middle + 1;
        else high = middle;
    }
    return low < runs.y && params.runs[low].first <= k_tile ? params.runs[low].kind : EMPTY;
}

// Packed sequences are a batch of one to the arrays.
__device__ __forceinline__ void enter(Work& work, const Params& params, int sequence, int head) {
    const bool packed = params.n_sequences > 1;
    work.sequence = params.sequences[packed ? sequence : 0];
    work.b = packed ? 0 : sequence;
    work.h = head;
    work.hk = head / params.group;
}

// The tiles that the plan has for one tile of queries, or of keys.
struct AlongRuns {
    const Params& params;
    Place place;
    int2 runs;
    Run run;
    int tile;

    __device__ __forceinline__ AlongRuns(const Sums& sums, int block)
        : params(sums.backward.params), run{0, 0, EMPTY}, tile(-1) {
        place.work = work_of_block(params, block);
        runs = runs_of_tile(params, place.work);
    }
    __device__ __forceinline__ bool next() {
        if (++tile >= run.last) {
            if (runs.x == runs.y) return false;
            run = params.runs[runs.x++];
            tile = run.first;
        }
        place.q_tile = SHARING == OF_COLUMNS ? tile : place.work.tile;
        place.k_tile = SHARING == OF_COLUMNS ? place.work.tile : tile;
        place.kind = run.kind;
        return true;
    }
};

// One tile of the array, read by several batch indices, or packed sequences, and heads, or by a part of them.
struct OverHeads {
    const Sums& sums;
    Place place;
    int part, head;  // of sums: which of all splits and batch indices, and which head
    int shared, end;

    __device__ __forceinline__ OverHeads(const Sums& sums, int block) : sums(sums) {
        const int kept = block / (sums.q_tiles * sums.k_tiles);
        part = kept / sums.kept_heads;
        head = kept % sums.kept_heads;
        place.q_tile = block / sums.k_tiles % sums.q_tiles;
        place.k_tile = block % sums.k_tiles;
        const int split = part / sums.kept_batch, count = sums.summed_batch * sums.summed_heads;
        shared = int(int64(count) * split / sums.splits) - 1;
        end = int(int64(count) * (split + 1) / sums.splits);
    }
    __device__ __forceinline__ bool next() {
        while (++shared < end) {
            enter(place.work, sums.backward.params,
                  part % sums.kept_batch * sums.summed_batch + shared / sums.summed_heads,
                  head * sums.summed_heads + shared % sums.summed_heads);
            place.work.tile = place.q_tile;
            place.kind = kind_of_tile(sums.backward.params, place.work, place.k_tile);
            if (place.kind != EMPTY) return true;
        }
        return false;
    }
};

// Tiles at the same distance q - k, from the first on. A tile of queries is as long as STEPS tiles of keys.
constexpr int STEPS = SHARING == OF_DISTANCES ? TILE_Q / TILE_K : 1, RANGES = STEPS + 1;
static_assert(SHARING != OF_DISTANCES || TILE_Q % TILE_K == 0, "the next tile of queries begins where one of keys does");
struct AlongDiagonal {
    const Params& params;
    Place place;
    int diagonal, sequence;

    __device__ __forceinline__ AlongDiagonal(const Sums& sums, int block) : params(sums.backward.params) {
        const int diagonals = STEPS * (sums.q_tiles - 1) + sums.k_tiles, head = block / diagonals;
        diagonal = block % diagonals;
        sequence = head / params.heads;
        enter(place.work, params, sequence, head % params.heads);
        const int apart = diagonal - (sums.k_tiles - 1);
        place.q_tile = ceil_div(max(apart, 0), STEPS) - 1;
        place.k_tile = STEPS * place.q_tile - apart;
    }
    __device__ __forceinline__ bool next() {
        while (true) {
            place.work.tile = ++place.q_tile;
            place.k_tile += STEPS;
            const Sequence& sequence = place.work.sequence;
            if (place.q_tile * TILE_Q >= sequence.n_q || place.k_tile * TILE_K >= sequence.n_k) return false;
            place.kind = kind_of_tile(params, place.work, place.k_tile);
            if (place.kind != EMPTY) return true;
        }
    }
};

template <int> struct WalkOf {
    typedef AlongRuns Type;
};
template <> struct WalkOf<OF_PAIRS> {
    typedef OverHeads Type;
};
template <> struct WalkOf<OF_DISTANCES> {
    typedef AlongDiagonal Type;
};
typedef typename WalkOf<SHARING>::Type Walk;

// The end of a walk: what places of the tile have together, from a tile in shared memory, with all threads.
template <int THREADS, class Totals>
__device__ __forceinline__ void store_sums(const Sums& sums, const AlongRuns& walk, const Totals& totals) {
    const Work& work = walk.place.work;
    constexpr bool of_rows = SHARING == OF_ROWS;
    constexpr int count = of_rows ? TILE_Q : TILE_K, others = of_rows ? TILE_K : TILE_Q;
    const int first = work.tile * count, left = (of_rows ? work.sequence.n_q : work.sequence.n_k) - first;
    const int begin = of_rows ? work.sequence.q_begin : work.sequence.k_begin;
    for (int i = threadIdx.x; i < min(count, left); i += THREADS) {
        float sum = 0;
        for (int j = 0; j < others; j++) sum += of_rows ? totals.one(i, j) : totals.one(j, i);
        *row_of<float>(sums.sums, work.b, work.h, begin + first + i) = sum;
    }
}
template <int THREADS, class Totals>
__device__ __forceinline__ void store_sums(const Sums& sums, const AlongDiagonal& walk, const Totals& totals) {
    for (int i = threadIdx.x; i < RANGES * TILE_K; i += THREADS) {  // distances from the least on, and none at last
        const int apart = i - (TILE_K - 1), range = i / TILE_K;
        float sum = 0;
        for (int row = max(apart, 0); row < min(TILE_Q, TILE_K + apart); row++) sum += totals.one(row, row - apart);
        row_of<float>(sums.sums, walk.sequence, walk.place.work.h, range)[walk.diagonal * TILE_K + i] = sum;
    }
}
template <int THREADS, class Totals>
__device__ __forceinline__ void store_sums(const Sums& sums, const OverHeads& walk, const Totals& totals) {
    const int first_query = walk.place.q_tile * TILE_Q, first_key = walk.place.k_tile * TILE_K;
    for (int i = threadIdx.x; i < TILE_Q * TILE_K; i += THREADS) {
        const int row = i / TILE_K, column = i % TILE_K;
        if (first_query + row < sums.most_q && first_key + column < sums.most_k)
            row_of<float>(sums.sums, walk.part, walk.head, first_query + row)[first_key + column] = totals.one(row, column);
    }
}
