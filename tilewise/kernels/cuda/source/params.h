// What every kernel is told, field by field as in ../structs.py. Sizes of tiles and heads are constants of the source.
#pragma once

typedef long long int64;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Array {  // (batch, heads, n, d) or (batch, heads, n) numbers, the last dimension side by side
    char* data;
    int64 batch, head, row;  // steps, counted in numbers
};

struct Slot {  // an array that an expression loads from
    const char* data;
    int64 step[MAX_RANK];
    int64 size[MAX_RANK];
};

struct Run {  // key tiles first, first + 1 ... last - 1, all of one kind
    int first, last, kind;
};
constexpr int EMPTY = 0, PARTIAL = 1, FULL = 2;

struct Sequence {  // the whole of a dense call, or one of the packed sequences
    int first_tile;  // of its queries, in the count of all sequences' query tiles
    int q_begin, k_begin, n_q, n_k;
    int batch, origin_q, origin_k, total_q, total_k, packed_q, packed_k;  // what variables begin at, as in spec.Shape
    int offsets, offsets_batch, offsets_head;  // where its part of Params.offsets begins, and its steps
};

struct Params {
    Array q, k, v, out, lse;
    Array remainder;  // what rounding takes from out; only where KEEPS_REMAINDER
    const char* sinks;
    int64 sinks_step;
    const Sequence* sequences;
    const int* offsets;  // runs of query tile i are runs[offsets[i]] to runs[offsets[i + 1]]
    const Run* runs;
    int n_sequences, tiles, heads, group;  // query tiles of all sequences; query heads, and how many share a key head
    float scale;
    int constants[MAX_CONSTANTS];  // of the variant's bounds: they decide over keys, not over what is compiled
    Slot arrays[N_ARRAYS > 0 ? N_ARRAYS : 1];
};

struct Backward {  // what the kernels of a backward pass are told
    Params params;  // out and lse are those that forward saved
    Array d_out, d_lse, delta, d_q, d_k, d_v, remainder;  // d_lse and what out lost have no data if there is none
};

// A block's share of the work: one query tile of one head.
struct Work {
    Sequence sequence;
    int b, h, hk;
    int tile, first_query;  // within the sequence
};

__device__ __forceinline__ int sequence_of_tile(const Sequence* sequences, int count, int tile) {
    int low = 0, high = count;  // the last sequence that begins at or before the tile: empty ones have none
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (sequences[middle].first_tile <= tile) low = middle;
        else high = middle;
    }
    return low;
}

__device__ __forceinline__ Work work_of(const Params& params, int tile, int head) {  // of all tiles and heads of the call
    Work work;
    work.h = head % params.heads;
    work.b = head / params.heads;
    work.hk = work.h / params.group;
    work.sequence = params.sequences[sequence_of_tile(params.sequences, params.n_sequences, tile)];
    work.tile = tile - work.sequence.first_tile;
    work.first_query = work.tile * TILE_Q;
    return work;
}
__device__ __forceinline__ Work work_of_block(const Params& params, int block) {
    return work_of(params, block % params.tiles, block / params.tiles);
}

// The first and last run (exclusive) of key tiles that a query tile visits.
__device__ __forceinline__ int2 runs_of_tile(const Params& params, const Work& work) {
    const int* offsets = params.offsets + work.sequence.offsets + int64(work.b) * work.sequence.offsets_batch +
                         int64(work.h) * work.sequence.offsets_head + work.tile;
    return make_int2(offsets[0], offsets[1]);
}

template <class T> __device__ __forceinline__ T* row_of(const Array& array, int b, int h, int row) {
    return reinterpret_cast<T*>(array.data) + int64(b) * array.batch + int64(h) * array.head + int64(row) * array.row;
}
