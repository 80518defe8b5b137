// After Hopper's backward pass: d_q from its sums, which lie as threads held them. A block has a query tile of one head; 128
// threads have half of it, each the numbers that it would hold as a consumer.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "hopper.h"
#include "sm90_backward.h"

struct DQuery {
    const Launch& launch;
    const Sequence& sequence;
    const int b, h, first_query;
    const int half = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float held[HALF / 8][4];

    // If the query tile met no key tile, nothing was stored.
    __device__ __forceinline__ void read(int tile) {
        const int64 at = tile_of(launch, b, h, tile);
        const bool any = !ORDERED || launch.turns[at * TURNS] > 0;
        const float4* const sums = reinterpret_cast<const float4*>(launch.sums + (at * 2 + half) * (HALF_BYTES / 4)) + threadIdx.x % 128;
#pragma unroll
        for (int n = 0; n < HALF / 8; n++) {
            const float4 x = any ? sums[n * 128] : make_float4(0, 0, 0, 0);
            held[n][0] = x.x;
            held[n][1] = x.y;
            held[n][2] = x.z;
            held[n][3] = x.w;
        }
    }
    __device__ __forceinline__ Element* row(int query) const {
        return row_of<Element>(launch.backward.d_q, b, h, sequence.q_begin + first_query + query);
    }
    __device__ __forceinline__ bool is_inside(int query) const { return first_query + query < sequence.n_q; }

    __device__ __forceinline__ void store() const {
        const int column = HALVES_QUERIES ? 0 : half * HALF;
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            const int query = (HALVES_QUERIES ? half * 64 : 0) + warp * 16 + lane / 4 + lower * 8;
            store_row<HALF>(row(query) + column, &held[0][lower * 2], launch.backward.params.scale, lane % 4, is_inside(query),
                            D - column);
        }
    }
    // Columns lie down, queries across: they are turned by way of shared memory.
    __device__ __forceinline__ void store_turned(unsigned char* memory) const {
        const float scale = launch.backward.params.scale;
        unsigned char* const part = memory + half * TILE_Q * ROW_BYTES;  // 64 columns
#pragma unroll
        for (int n = 0; n < HALF / 8; n += 2) {
            uint32 words[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                words[i] = hw::packed<Element>(held[n + i / 2][i % 2 * 2] * scale, held[n + i / 2][i % 2 * 2 + 1] * scale);
            const int query = n * 8 + lane / 16 * 8 + lane % 8, eight = warp * 2 + lane / 8 % 2;
            hw::store_matrices_turned(hw::shared_address(part) + place(query, eight), words);
        }
        __syncthreads();
        for (int i = threadIdx.x % 128; i < TILE_Q * 8; i += 128) {
            const int query = i / 8, eight = i % 8, column = half * PART + eight * 8;
            if (is_inside(query) && column < D)
                *reinterpret_cast<uint4*>(row(query) + column) = *reinterpret_cast<const uint4*>(part + place(query, eight));
        }
    }
    // Of eight columns of a query, swizzled as tiles are.
    static __device__ __forceinline__ int place(int query, int eight) { return query * ROW_BYTES + (eight ^ query % 8) * 16; }
};

extern "C" __global__ void __launch_bounds__(256) attention(const __grid_constant__ Launch launch) {
    SHARED_MEMORY(memory);
    const Params& params = launch.backward.params;
    const int tile = blockIdx.x % launch.q_tiles, head = blockIdx.x / launch.q_tiles;
    const Sequence& sequence = launch.sequences[sequence_of_tile(launch.sequences, params.n_sequences, tile)];
    DQuery d_query{launch, sequence, head / params.heads, head % params.heads, (tile - sequence.first_tile) * TILE_Q};
    d_query.read(tile);
    if constexpr (COLUMNS_DOWN) d_query.store_turned(memory);
    else d_query.store();
}
