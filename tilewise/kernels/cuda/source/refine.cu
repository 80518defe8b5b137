// Before an attention whose mask reads arrays that the host has not seen: the mask is evaluated for every score of the PARTIAL
// key tiles, and each query tile's record is written again with what was found. A score takes a few operations here, where
// attention takes hundreds; nothing waits for the host, and the arrays may change from call to call.
//
// It is launched twice: first blocks look at tiles, then a warp for each record joins what they found to runs.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "operations.h"
#include "variant.h"
#include "items.h"
#include "refine.h"

struct Refinement {  // as in ../structs.py
    Params params;
    const int* records;
    int record_batch, record_head;
    int* refined;  // records, after them room for as many runs as key tiles, and after these what was found
    int n_records, most_tiles, joins;
};

constexpr int WARPGROUPS = TILE_Q / 64;

struct Record {
    const Refinement& call;
    const int number;
    const Item& item;

    __device__ Record(const Refinement& call, int number)
        : call(call), number(number), item(reinterpret_cast<const Item*>(call.records)[number]) {}

    __device__ Work work() const {
        const Params& params = call.params;
        const int plan = number / params.tiles, heads = call.record_head ? params.heads : 1;  // whose plans differ
        Work work = item.work;
        work.b = call.record_batch ? plan / heads : 0;
        work.h = plan % heads;
        work.hk = work.h / params.group;
        return work;
    }
    __device__ Run run(int i) const { return call.params.runs[item.first_run + i]; }
    // The key tile that is visited as the index-th, and its run's kind; EMPTY if there are not so many.
    __device__ int2 tile_of(int index) const {
        for (int r = 0; r < item.n_runs; r++) {
            const Run now = run(r);
            if (index < now.last - now.first) return make_int2(now.first + index, now.kind);
            index -= now.last - now.first;
        }
        return make_int2(0, EMPTY);
    }
    __device__ int tiles() const {
        int count = 0;
        for (int r = 0; r < item.n_runs; r++) count += run(r).last - run(r).first;
        return count;
    }
    __device__ Item* refined() const { return reinterpret_cast<Item*>(call.refined) + number; }
    __device__ int first_run() const { return number * call.most_tiles; }
    __device__ Run* runs() const { return reinterpret_cast<Run*>(call.refined + 32 * call.n_records) + first_run(); }
    __device__ unsigned char* found() const {  // [tile][warp]
        int* const behind = call.refined + (32 + 3 * call.most_tiles) * int64(call.n_records);
        return reinterpret_cast<unsigned char*>(behind) + int64(number) * call.most_tiles * WARPS;
    }
};

// -- look ---------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void look(const Refinement& call, unsigned char* memory) {
    const int parts = (call.most_tiles + GROUPS - 1) / GROUPS;
    const Record record(call, blockIdx.x / parts);
    const int index = blockIdx.x % parts * GROUPS + threadIdx.x / TILE_Q;
    const int2 tile = record.tile_of(index);
    look_at(call.params, record.work(), tile.x, tile.y, record.found() + index * WARPS, memory);
}

// -- join ---------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ int largest_of_warp(int x) {
    for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// As schedule.Plan.joined has it: a warpgroup leaves out the last tile that is visited, if it has others.
struct Joiner {
    const unsigned char* found;
    int last[WARPGROUPS], last_visited;

    __device__ Joiner(const unsigned char* found, int tiles, int lane) : found(found), last_visited(-1) {
        for (int w = 0; w < WARPGROUPS; w++) {
            last[w] = -1;
            for (int i = lane; i < tiles; i += 32)
                if (kind(i, w) != EMPTY) last[w] = i;
            last[w] = largest_of_warp(last[w]);
            last_visited = max(last_visited, last[w]);
        }
    }
    __device__ int kind(int i, int w) const { return kind_of<2>(found + i * WARPS + 2 * w); }
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

__device__ __forceinline__ void join(const Refinement& call) {
    const int lane = threadIdx.x;
    const Record record(call, blockIdx.x);
    const Joiner joiner(record.found(), record.tiles(), lane);
    Runs runs(record.runs(), lane);
    int index = lane;
    for (int r = 0; r < record.item.n_runs; r++) {
        const Run run = record.run(r);
        for (int first = run.first; first < run.last; first += 32) {
            const bool inside = first + lane < run.last;
            runs.add(first, run.last - first, inside ? joiner.joined(index + first - run.first) : EMPTY);
        }
        index += run.last - run.first;
    }
    Item* const refined = record.refined();
    reinterpret_cast<int*>(refined)[lane] = reinterpret_cast<const int*>(&record.item)[lane];
    __syncwarp();
    if (lane == 0) {
        refined->first_run = record.first_run();
        refined->n_runs = runs.count;
        for (int r = 0; r < min(runs.count, RUNS_AT_HAND); r++) refined->runs[r] = record.runs()[r];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ Refinement call) {
    SHARED_MEMORY(memory);
    if (call.joins) join(call);
    else look(call, memory);
}
