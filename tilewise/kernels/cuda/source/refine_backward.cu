// As refine.cu, before gradients: Hopper's backward pass visits the query tiles of each key tile, and knows of each query tile
// which key tiles it meets. Both plans are written again with what was found.
//
// It is launched twice: first blocks look at the key tiles of query tiles, then a warp for each tile of either kind joins what
// they found to runs. A tile's runs have room of their own, so that it has a pair of numbers: where they begin and end.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "operations.h"
#include "variant.h"
#include "refine.h"

struct Plan {
    const Sequence* sequences;
    const int* offsets;
    const Run* runs;
    int tiles, n_offsets, most;  // of all sequences; of all plans; that a tile meets
};

struct Refinement {  // as in ../structs.py
    Params params;
    Plan by_query, by_key;
    int batches, heads;  // whose plans differ
    int* refined;  // by query, then by key: pairs, and after them runs; then what was found
    int joins;
};

// A tile of a plan: its number in the sequence, and where its offsets are.
struct Place {
    const Plan& plan;
    int sequence, b, h, tile, at;

    __device__ Place(const Plan& plan, int sequence, int b, int h, int tile)
        : plan(plan), sequence(sequence), b(b), h(h), tile(tile) {
        const Sequence& here = plan.sequences[sequence];
        at = here.offsets + b * here.offsets_batch + h * here.offsets_head + tile;
    }
    // The number-th of all tiles, batch indices and heads.
    static __device__ Place of(const Plan& plan, const Refinement& call, int number) {
        const int tile = number % plan.tiles, head = number / plan.tiles;
        const int sequence = sequence_of_tile(plan.sequences, call.params.n_sequences, tile);
        return Place(plan, sequence, head / call.heads, head % call.heads, tile - plan.sequences[sequence].first_tile);
    }
    __device__ int first_run() const { return plan.offsets[at]; }
    __device__ int last_run() const { return plan.offsets[at + 1]; }
    // The tile that is met as the index-th, and its run's kind; EMPTY if there are not so many.
    __device__ int2 met(int index) const {
        for (int r = first_run(); r < last_run(); r++) {
            const Run now = plan.runs[r];
            if (index < now.last - now.first) return make_int2(now.first + index, now.kind);
            index -= now.last - now.first;
        }
        return make_int2(0, EMPTY);
    }
    // The other way round.
    __device__ int index_of(int tile) const {
        int index = 0;
        for (int r = first_run(); r < last_run(); r++) {
            const Run now = plan.runs[r];
            if (tile < now.last) return index + tile - now.first;
            index += now.last - now.first;
        }
        return index;
    }
};

__device__ __forceinline__ int* refined_of(const Refinement& call, bool by_key) {
    const Plan& first = call.by_query;
    return call.refined + (by_key ? first.n_offsets * (2 + 3 * int64(first.most)) : 0);
}
// What the warps of a query tile found of a key tile.
__device__ __forceinline__ unsigned char* found_at(const Refinement& call, const Place& query, int index) {
    int* const behind = refined_of(call, true) + call.by_key.n_offsets * (2 + 3 * int64(call.by_key.most));
    return reinterpret_cast<unsigned char*>(behind) + (int64(query.at) * call.by_query.most + index) * WARPS;
}

__device__ __forceinline__ void look(const Refinement& call, unsigned char* memory) {
    const int parts = (call.by_query.most + GROUPS - 1) / GROUPS;
    const Place place = Place::of(call.by_query, call, blockIdx.x / parts);
    const int index = blockIdx.x % parts * GROUPS + threadIdx.x / TILE_Q;
    const int2 key = place.met(index);
    Work work;
    work.sequence = call.by_query.sequences[place.sequence];
    work.b = place.b;
    work.h = place.h;
    work.hk = place.h / call.params.group;
    work.tile = place.tile;
    work.first_query = place.tile * TILE_Q;
    int kinds = 0;
    for (int row = 0; row < TILE_Q; row += 64) kinds |= key.y << row / 64 * 2;
    look_at(call.params, work, key.x, kinds, found_at(call, place, index), memory);
}

// Of a tile that `place` meets.
__device__ __forceinline__ int kind_found(const Refinement& call, const Place& place, int tile, bool by_key) {
    const Place query(call.by_query, place.sequence, place.b, place.h, by_key ? tile : place.tile);
    return kind_of<WARPS>(found_at(call, query, query.index_of(by_key ? place.tile : tile)));
}
__device__ __forceinline__ void join(const Refinement& call) {
    const int queries = call.batches * call.heads * call.by_query.tiles, lane = threadIdx.x;
    const bool by_key = blockIdx.x >= queries;
    const Plan& plan = by_key ? call.by_key : call.by_query;
    const Place place = Place::of(plan, call, blockIdx.x - (by_key ? queries : 0));
    int* const pairs = refined_of(call, by_key);
    const int first_run = place.at * plan.most;
    Runs runs(reinterpret_cast<Run*>(pairs + 2 * plan.n_offsets) + first_run, lane);
    for (int r = place.first_run(); r < place.last_run(); r++) {
        const Run run = plan.runs[r];
        for (int first = run.first; first < run.last; first += 32) {
            const int tile = first + lane;
            runs.add(first, run.last - first, tile < run.last ? kind_found(call, place, tile, by_key) : EMPTY);
        }
    }
    if (lane == 0) {
        pairs[2 * place.at] = first_run;
        pairs[2 * place.at + 1] = first_run + runs.count;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ Refinement call) {
    SHARED_MEMORY(memory);
    if (call.joins) join(call);
    else look(call, memory);
}
