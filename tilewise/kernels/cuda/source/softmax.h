// The ends of the online softmax (softmax.py is its defining version).
#pragma once

// The shift of the exponent: row_max, or 0 for a row that has no key yet (-inf - -inf would be NaN).
__device__ __forceinline__ float finite(float row_max) { return row_max == -INFINITY ? 0.0f : row_max; }

struct Finished {
    float weight, lse;  // what acc is multiplied by
};

// A row that saw no key has output 0 and lse -inf. A sink joins the row sum with its logit and has no value.
__device__ __forceinline__ Finished finish(float row_max, float row_sum, float sink) {
    if (row_sum == 0) return {0.0f, sink};
    float lse = finite(row_max) + logf(row_sum);
    float larger = fmaxf(lse, sink), smaller = fminf(lse, sink);
    float joint = sink == -INFINITY ? lse : larger + log1pf(expf(smaller - larger));
    return {expf(lse - joint) / row_sum, joint};
}

__device__ __forceinline__ float sink_of(const Params& params, int h) {
    if (!HAS_SINKS) return -INFINITY;
    return widen(reinterpret_cast<const Sink*>(params.sinks)[h * params.sinks_step]);
}
