// After Hopper's backward pass: d_q from its sums, which lie as threads held them. A block has a query tile of one head; 128
// threads have half of it, each the numbers that it would hold as a consumer.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "hopper.h"
#include "sm90_backward.h"

extern "C" __global__ void __launch_bounds__(256) attention(const __grid_constant__ Launch launch) {
    const Params& params = launch.backward.params;
    const int tile = blockIdx.x % launch.q_tiles, head = blockIdx.x / launch.q_tiles;
    const Sequence& sequence = launch.sequences[sequence_of_tile(launch.sequences, params.n_sequences, tile)];
    const int first_query = (tile - sequence.first_tile) * TILE_Q;
    const int b = head / params.heads, h = head % params.heads;
    const int half = threadIdx.x / 128, lane = threadIdx.x % 32, quarter = lane % 4;
    const int column = HALVES_QUERIES ? 0 : half * HALF;
    const int64 at = tile_of(launch, b, h, tile);
    const bool any = !ORDERED || launch.turns[at * TURNS] > 0;  // else the query tile met no key tile, and nothing was stored
    const float4* const sums = reinterpret_cast<const float4*>(launch.sums + (at * 2 + half) * (HALF_BYTES / 4)) + threadIdx.x % 128;
    float held[HALF / 8][4];
#pragma unroll
    for (int n = 0; n < HALF / 8; n++) {
        const float4 x = any ? sums[n * 128] : make_float4(0, 0, 0, 0);
        held[n][0] = x.x;
        held[n][1] = x.y;
        held[n][2] = x.z;
        held[n][3] = x.w;
    }
#pragma unroll
    for (int lower = 0; lower < 2; lower++) {
        const int query = first_query + (HALVES_QUERIES ? half * 64 : 0) + threadIdx.x / 32 % 4 * 16 + lane / 4 + lower * 8;
        Element* const row = row_of<Element>(launch.backward.d_q, b, h, sequence.q_begin + query) + column;
        store_row<HALF>(row, &held[0][lower * 2], params.scale, quarter, query < sequence.n_q, D - column);
    }
}
