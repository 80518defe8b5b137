// Before Hopper's backward pass: what it needs to know of each query, in tiles as long as its own. A block has a query tile
// of one head. So many lanes share a row that each reads 16 bytes of it, side by side, or a few times that.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "hopper.h"
#include "sm90_backward.h"

struct alignas(16) Eight {
    Element numbers[8];
};

constexpr int THREADS_OF_ROWS = 4 * TILE_Q, EIGHTS = D_V / 8;
constexpr int LANES = EIGHTS > 16 ? 32 : EIGHTS > 8 ? 16 : EIGHTS > 4 ? 8 : 4;
constexpr int ROWS_AT_ONCE = THREADS_OF_ROWS / LANES, PASSES = TILE_Q / ROWS_AT_ONCE;
static_assert(D_V % 8 == 0 && ROWS_AT_ONCE * PASSES == TILE_Q, "rows are shared evenly");

extern "C" __global__ void __launch_bounds__(THREADS_OF_ROWS) attention(const __grid_constant__ Launch launch) {
    const Backward& backward = launch.backward;
    const Params& params = backward.params;
    const int tile = blockIdx.x % launch.q_tiles, head = blockIdx.x / launch.q_tiles;
    const Sequence& sequence = launch.sequences[sequence_of_tile(launch.sequences, params.n_sequences, tile)];
    const int first_query = (tile - sequence.first_tile) * TILE_Q;
    const int b = head / params.heads, h = head % params.heads, lane = threadIdx.x % LANES;
    const int64 at = tile_of(launch, b, h, tile);

    float delta[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        const int row = pass * ROWS_AT_ONCE + threadIdx.x / LANES, query = sequence.q_begin + first_query + row;
        delta[pass] = 0;
        if (first_query + row >= sequence.n_q) continue;
        const Element* d_out = row_of<const Element>(backward.d_out, b, h, query);
        const Element* out = row_of<const Element>(params.out, b, h, query);
        const Element* remainder = row_of<const Element>(backward.remainder, b, h, query);
#pragma unroll
        for (int c = lane; c < EIGHTS; c += LANES) {
            const Eight x = reinterpret_cast<const Eight*>(d_out)[c], y = reinterpret_cast<const Eight*>(out)[c];
            const Eight rest = backward.remainder.data ? reinterpret_cast<const Eight*>(remainder)[c] : Eight{};
#pragma unroll
            for (int i = 0; i < 8; i++)
                delta[pass] += widen(x.numbers[i]) * (widen(y.numbers[i]) + widen(rest.numbers[i]));
        }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
#pragma unroll
        for (int apart = 1; apart < LANES; apart *= 2) delta[pass] += __shfl_xor_sync(~0u, delta[pass], apart);
        const int row = pass * ROWS_AT_ONCE + threadIdx.x / LANES, query = sequence.q_begin + first_query + row;
        const bool inside = first_query + row < sequence.n_q;
        if (lane != pass % LANES) continue;  // one of those that have the sum
        const float lse = inside ? *row_of<const float>(params.lse, b, h, query) : -INFINITY;
        if (inside && backward.d_lse.data) delta[pass] -= *row_of<const float>(backward.d_lse, b, h, query);
        if (inside) *row_of<float>(backward.delta, b, h, query) = delta[pass];
        float* const rows = launch.rows + at * (2 * TILE_Q);
        rows[row] = lse == -INFINITY ? lse : -lse;  // a row without keys has weights of 0
        rows[TILE_Q + row] = -delta[pass];
    }
    if (tile == 0 && h % params.group == 0 && threadIdx.x == 0) *done_of(launch, b, h / params.group) = 0;
    if (threadIdx.x < TURNS) launch.turns[at * TURNS + threadIdx.x] = FIRST_STORES ? 0 : 1;
    if (FIRST_STORES) return;
    float4* const sums = reinterpret_cast<float4*>(launch.sums + at * (2 * HALF_BYTES / 4));
    for (int i = threadIdx.x; i < 2 * HALF_BYTES / 16; i += THREADS_OF_ROWS) sums[i] = make_float4(0, 0, 0, 0);
}
