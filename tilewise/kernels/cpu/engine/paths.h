// What an instruction set's path offers to the engine. Each path is this table, filled in by isa.cpp.
#pragma once
#include <stddef.h>
#include "engine.h"
#include "linear_call.h"
#include "pause.h"

// Keys and values of one key head of one sequence, in the order the micro-kernel reads them.
struct Packed {
    const Sequence* sequence;
    int64_t b, hk;
    void* k;  // panels of NR keys, each (d, NR)
    void* v;  // panels of NR columns, each (n_k, NR)
};

// The same for the backward pass. _columns: panels of NR columns; the others: panels of NR keys or MR queries, turned.
struct PackedBackward {
    const Sequence* sequence;
    int64_t b, hk, splits;
    int64_t first_copy;  // of the arrays' totals: that of the first split
    void *k, *v, *k_columns, *q, *d_out, *q_columns, *d_out_columns;
    void* d_q;  // a sum for each split
};

struct Path {
    const char* name;
    size_t (*lay_out)(const Call&, Packed&, void* memory);  // returns the bytes; memory may be null
    size_t (*pack_scratch)(const Call&);
    void (*pack)(const Call&, const Packed&, int64_t begin, int64_t end, void* scratch);  // begin: a multiple of PACK_ROWS
    size_t (*forward_scratch)(const Call&);
    void (*forward)(const Call&, const Packed&, int64_t h, int64_t tile, void* scratch);
    size_t (*decode_scratch)(const Call&);
    size_t (*decode_partial_bytes)(const Call&);  // of one split
    void (*decode)(const Call&, const Packed&, int64_t begin, int64_t end, void* partials, void* scratch);
    void (*decode_merge)(const Call&, const Packed&, int64_t splits, void* partials);
    size_t (*lay_out_backward)(const BackwardCall&, PackedBackward&, void* memory);
    size_t (*pack_backward_scratch)(const BackwardCall&);
    void (*pack_backward_keys)(const BackwardCall&, const PackedBackward&, int64_t begin, int64_t end, void* scratch);
    void (*pack_backward_queries)(const BackwardCall&, const PackedBackward&, int64_t g, int64_t begin, int64_t end, void* scratch);
    void (*add_delta)(const BackwardCall&, const PackedBackward&, int64_t g, int64_t begin, int64_t end);
    size_t (*backward_scratch)(const BackwardCall&);
    void (*backward)(const BackwardCall&, const PackedBackward&, int64_t split, void* scratch, const Pause&);
    double (*multiply_add)(bool is_double, int64_t rounds);  // on registers alone; returns how many operations
    uint64_t (*read_bytes)(const char*, int64_t);
    void (*sum_splits)(const BackwardCall&, const PackedBackward&, int64_t g, int64_t begin, int64_t end);
    size_t (*linear_forward_scratch)(const LinearCall&);
    void (*linear_forward)(const LinearCall&, const LinearTask&, void* scratch, const Pause&);
    size_t (*linear_backward_scratch)(const LinearBackwardCall&);
    void (*linear_backward)(const LinearBackwardCall&, const LinearTask&, void* scratch, const Pause&);
};

constexpr int64_t PACK_ROWS = 480;  // rows that a packing task takes: a multiple of every NR and MR
