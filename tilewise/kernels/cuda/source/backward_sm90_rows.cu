// Before Hopper's backward pass: what it needs to know of each query, in tiles as long as its own. A block has a query tile
// of one head, four threads a row.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "hopper.h"
#include "sm90_backward.h"

struct alignas(16) Eight {
    Element numbers[8];
};

extern "C" __global__ void __launch_bounds__(4 * TILE_Q) attention(const __grid_constant__ Launch launch) {
    const Backward& backward = launch.backward;
    const Params& params = backward.params;
    const int tile = blockIdx.x % launch.q_tiles, head = blockIdx.x / launch.q_tiles;
    const Sequence& sequence = launch.sequences[sequence_of_tile(launch.sequences, params.n_sequences, tile)];
    const int first_query = (tile - sequence.first_tile) * TILE_Q;
    const int b = head / params.heads, h = head % params.heads;
    const int row = threadIdx.x / 4, lane = threadIdx.x % 4, query = sequence.q_begin + first_query + row;
    const bool inside = first_query + row < sequence.n_q;

    float delta = 0;
    if (inside) {
        const Element* d_out = row_of<const Element>(backward.d_out, b, h, query);
        const Element* out = row_of<const Element>(params.out, b, h, query);
        for (int c = lane * 8; c < D_V; c += 32) {
            const Eight x = *reinterpret_cast<const Eight*>(d_out + c), y = *reinterpret_cast<const Eight*>(out + c);
#pragma unroll
            for (int i = 0; i < 8; i++) delta += widen(x.numbers[i]) * widen(y.numbers[i]);
        }
    }
    delta += __shfl_xor_sync(~0u, delta, 1);
    delta += __shfl_xor_sync(~0u, delta, 2);
    if (lane == 0) {
        const float lse = inside ? *row_of<const float>(params.lse, b, h, query) : -INFINITY;
        if (inside && backward.d_lse.data) delta -= *row_of<const float>(backward.d_lse, b, h, query);
        if (inside) *row_of<float>(backward.delta, b, h, query) = delta;
        float* const rows = launch.rows + tile_of(launch, b, h, tile) * (2 * TILE_Q);
        rows[row] = lse == -INFINITY ? lse : -lse;  // a row without keys has weights of 0
        rows[TILE_Q + row] = -delta;
    }
    const int64 at = tile_of(launch, b, h, tile);
    if (tile == 0 && h % params.group == 0 && threadIdx.x == 0) *done_of(launch, b, h / params.group) = 0;
    if (threadIdx.x < TURNS) launch.turns[at * TURNS + threadIdx.x] = 0;
}
