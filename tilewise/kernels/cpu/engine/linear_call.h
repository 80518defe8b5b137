// What crosses from Python for linear attention. tilewise/linear/kernels/cpu.py has the same, field by field.
#pragma once
#include "engine.h"

// All numbers are of the type computed with: FLOAT32 or FLOAT64.
struct LinearCall {
    int32_t type, causal, normalize, packed;
    int64_t batch, heads, heads_k, n, d, d_v, chunk;
    double scale;
    Array q, k, v, out, norm;  // norm: one number a row
    Array decay;               // one log a row of (batch, key heads); no data: none
    const int64_t* lengths;    // of packed sequences: cumulative, n_states + 1
    int64_t n_states;          // a batch, or packed sequences
    void* states;              // (n_states, heads_k, d, d_v + 1): the initial ones; forward leaves the last ones
    Program feature, slope;
    int32_t feature_at, slope_at;
};

struct LinearBackwardCall {
    LinearCall forward;
    Array g;  // (batch, heads, n, d_v + 1): the gradient of each row of weights @ (v, 1)
    Array d_q, d_k, d_v;
    Array d_c;       // one number a row of (batch, key heads): 0 when it comes in
    void* d_states;  // gradients of the last states, and then of the initial ones
};

// A key head of one sequence: rows begin to end of batch index b.
struct LinearTask {
    int64_t b, hk, begin, end;
    int64_t state;  // its number among all (states, key heads)
};
