// Before an attention whose mask reads arrays that the host has not seen: a block evaluates the mask for every score of a
// query tile's PARTIAL key tiles, and writes the tile's record again with what it found. A score takes a few operations
// here, where attention takes hundreds; nothing waits for the host, and the arrays may change from call to call.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "operations.h"
#include "variant.h"
#include "items.h"

struct Refinement {  // as in ../structs.py
    Params params;
    const int* records;
    int record_batch, record_head;
    int* refined;  // records, and after them room for as many runs as key tiles
    int most_tiles;
};

constexpr int WARPS = TILE_Q / 32, WARPGROUPS = TILE_Q / 64;
constexpr int GROUPS = THREADS / TILE_Q;  // of threads, a thread a query; each takes every so manyth key tile
constexpr int SOME = 1, ALL = 2;  // what holds for the rows of a warp

__device__ __forceinline__ int look(const Refinement& call, const variant::Head& head, const variant::Row& row, bool exists,
                                    int tile) {
    bool some = false, all = true;
    const variant::Row here = variant::seen_from(row, tile * TILE_K);
#pragma unroll 4
    for (int column = 0; column < TILE_K; column++) {
        const variant::Key key = variant::key(call.params, head, tile * TILE_K, column);
        const bool counts = variant::mask(call.params, head, here, key, variant::near_cells(here, key));
        some |= counts;
        all &= counts;
    }
    return (__any_sync(~0u, exists && some) ? SOME : 0) | (__any_sync(~0u, exists && !all) ? 0 : ALL);
}

// The kinds of one warpgroup's tile, from what its two warps found.
__device__ __forceinline__ int kind_of(const unsigned char* found) {
    if (!((found[0] | found[1]) & SOME)) return EMPTY;
    return found[0] & found[1] & ALL ? FULL : PARTIAL;
}

// As schedule.Plan.joined has it: a warpgroup leaves out the last tile that is visited, if it has others.
struct Joiner {
    const unsigned char* found;  // [tile][warp]
    int last[WARPGROUPS], last_visited;

    __device__ Joiner(const unsigned char* found, int tiles) : found(found), last_visited(-1) {
        for (int w = 0; w < WARPGROUPS; w++) {
            last[w] = -1;
            for (int i = 0; i < tiles; i++)
                if (kind(i, w) != EMPTY) last[w] = i;
            last_visited = max(last_visited, last[w]);
        }
    }
    __device__ int kind(int i, int w) const { return kind_of(found + i * WARPS + 2 * w); }
    __device__ int joined(int i) const {
        int kinds = 0, forced = 0;
        for (int w = 0; w < WARPGROUPS; w++) {
            const int own = kind(i, w);
            const bool left_out = i == last_visited && last[w] >= 0;
            kinds |= own << 2 * w;
            forced |= (own == EMPTY && !left_out ? PARTIAL : 0) << 2 * w;
        }
        if (last_visited < 0) return i == 0 ? forced : EMPTY;  // no key counts, and yet there must be a tile
        return kinds == 0 ? EMPTY : kinds | forced;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ Refinement call) {
    SHARED_MEMORY(found);
    const Params& params = call.params;
    const int record = blockIdx.x, plan = record / params.tiles;
    const Item item = reinterpret_cast<const Item*>(call.records)[record];
    Work work = item.work;
    const int heads = call.record_head ? params.heads : 1;  // whose plans differ
    work.b = call.record_batch ? plan / heads : 0;
    work.h = plan % heads;
    work.hk = work.h / params.group;
    const variant::Head head = variant::head(params, work);
    const int group = threadIdx.x / TILE_Q, thread = threadIdx.x % TILE_Q;
    const int query = work.first_query + thread;
    const variant::Row row = variant::row(params, head, query);
    const bool exists = query < work.sequence.n_q;

    int tiles = 0;
    for (int r = 0; r < item.n_runs; r++) {
        const Run run = params.runs[item.first_run + r];
        for (int tile = run.first; tile < run.last; tile++) {
            if (tiles++ % GROUPS != group) continue;
            const int known = run.kind >> thread / 64 * 2 & 3;
            const int seen = known == PARTIAL ? look(call, head, row, exists, tile) : known == FULL ? SOME | ALL : 0;
            if (thread % 32 == 0) found[(tiles - 1) * WARPS + thread / 32] = seen;
        }
    }
    __syncthreads();
    if (threadIdx.x > 0) return;

    const Joiner joiner(found, tiles);
    Item* const refined = reinterpret_cast<Item*>(call.refined) + record;
    Run* const runs = reinterpret_cast<Run*>(call.refined + 32 * int64(gridDim.x)) + int64(record) * call.most_tiles;
    *refined = item;
    refined->first_run = record * call.most_tiles;
    int n_runs = 0, at = 0;
    for (int r = 0; r < item.n_runs; r++) {
        const Run run = params.runs[item.first_run + r];
        for (int tile = run.first; tile < run.last; tile++) {
            const int kind = joiner.joined(at++);
            if (kind == EMPTY) continue;
            Run& before = runs[max(n_runs - 1, 0)];
            if (n_runs > 0 && before.last == tile && before.kind == kind) before.last++;
            else runs[n_runs++] = {tile, tile + 1, kind};
        }
    }
    refined->n_runs = n_runs;
    for (int r = 0; r < min(n_runs, RUNS_AT_HAND); r++) refined->runs[r] = runs[r];
}
