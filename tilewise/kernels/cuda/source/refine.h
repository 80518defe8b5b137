// What looks at masks before an attention, or before its gradients: tiles are looked at score by score, and what was found is
// joined to runs.
#pragma once

constexpr int WARPS = TILE_Q / 32;
constexpr int GROUPS = THREADS / TILE_Q;  // of threads, a thread a query: a block looks at so many key tiles
constexpr int SOME = 1, ALL = 2;  // what holds for the rows of a warp
constexpr bool SHARES_KEYS = sizeof(variant::Key) <= KEY_ROOM;

// Each group has a key tile of `work`, and its kinds in the plan, of each 64 queries, EMPTY if there is none. What is found goes
// to a byte for each of its warps.
__device__ __forceinline__ void look_at(const Params& params, const Work& work, int key_tile, int kinds, unsigned char* found,
                                        unsigned char* memory) {
    const int group = threadIdx.x / TILE_Q, thread = threadIdx.x % TILE_Q;
    const variant::Head head = variant::head(params, work);
    const int first_key = key_tile * TILE_K, query = work.first_query + thread;

    // What a key alone decides is computed once.
    variant::Key* const keys = reinterpret_cast<variant::Key*>(memory) + group * TILE_K;
    if (SHARES_KEYS && kinds != EMPTY)
        for (int column = thread; column < TILE_K; column += TILE_Q)
            keys[column] = variant::key(params, head, first_key, column);
    __syncthreads();
    if (kinds == EMPTY) return;

    int seen = 0;
    const int known = kinds >> thread / 64 * 2 & 3;
    if (known == FULL) seen = SOME | ALL;
    if (known == PARTIAL) {
        const variant::RowInTile row = variant::seen_from(variant::row(params, head, query), first_key);
        bool some = false, all = true;
#pragma unroll 8
        for (int column = 0; column < TILE_K; column++) {
            const variant::Key key = SHARES_KEYS ? keys[column] : variant::key(params, head, first_key, column);
            const bool counts = variant::mask(params, head, row, key, variant::near_cells(row, key));
            some |= counts;
            all &= counts;
        }
        const bool exists = query < work.sequence.n_q;
        seen = (__any_sync(~0u, exists && some) ? SOME : 0) | (__any_sync(~0u, exists && !all) ? 0 : ALL);
    }
    if (thread % 32 == 0) found[thread / 32] = seen;
}
// The kind of a tile, from what warps found.
template <int COUNT> __device__ __forceinline__ int kind_of(const unsigned char* found) {
    int any = 0, every = ALL;
    for (int warp = 0; warp < COUNT; warp++) {
        any |= found[warp];
        every &= found[warp];
    }
    return !(any & SOME) ? EMPTY : every ? FULL : PARTIAL;
}

// Tiles of one kind side by side become a run; a lane has a tile.
struct Runs {
    Run* const runs;
    const int lane;
    int count = 0;
    int before = EMPTY, tile_before = -1;  // the last tile's kind

    __device__ Runs(Run* runs, int lane) : runs(runs), lane(lane) {}

    // Up to 32 tiles from the first on; a lane gives the kind of its own, EMPTY beyond the last.
    __device__ void add(int first, int tiles, int kind) {
        const int tile = first + lane, last = min(tiles, 32) - 1;
        const int left = __shfl_up_sync(~0u, kind, 1), right = __shfl_down_sync(~0u, kind, 1);
        const int previous = lane > 0 ? left : tile_before + 1 == tile ? before : EMPTY;
        const bool starts = kind != EMPTY && kind != previous, ends = kind != EMPTY && (lane == 31 || right != kind);
        const unsigned all = __ballot_sync(~0u, starts);
        const int at = count - 1 + __popc(all & ((2u << lane) - 1));
        if (starts) {
            runs[at].first = tile;
            runs[at].kind = kind;
        }
        if (ends) runs[at].last = tile + 1;
        count += __popc(all);
        before = __shfl_sync(~0u, kind, last);
        tile_before = first + last;
    }
};
