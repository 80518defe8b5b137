// Hopper's backward pass for wide heads, of up to 256 columns. Registers hold d_k and d_v of 64 keys, if two warpgroups share
// their columns: of every product with d columns each has half. Of the scores each has half of the queries, with all columns;
// p and d_s go through shared memory, where both find them whole.
//
// Shared memory has room for one d_out: the next is brought while d_k and d_q are computed, and once it is there, p has been
// read by both. d_q has two pieces, for registers have room for one: the second is multiplied when the first was handed over.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "operations.h"
#include "variant.h"
#include "softmax.h"
#include "backward.h"
#include "hopper.h"
#include "wgmma.h"
#include "sm90_backward.h"
#include "sm90_table.h"
#include "sm90_backward_producer.h"
#include "sm90_backward_outbox.h"
#include "sm90_backward_rows.h"
#include "sm90_backward_d_query.h"
#include "sm90_backward_consumer.h"

static_assert(Shared::END + 1024 == SHARED_BYTES, "as the host reckons it");
constexpr int V_HALF = O_PARTS * PART / 2;  // columns of d_v that a warpgroup has; of d_k it has HALF

struct Wide : Scores {
    float d_k[HALF / 2], d_v[V_HALF / 2], d_q[PIECE / 2];

    using Scores::Scores;

    // Where this warpgroup's columns begin: with a part, or in the middle of the only one.
    template <int ROWS, int PARTS> __device__ __forceinline__ uint32 columns(uint32 tile) const {
        return hw::anew(tile) + number * (PARTS == 1 ? ROW_BYTES / 2 : PARTS / 2 * ROWS * ROW_BYTES);
    }
    // To shared memory, keys down; 16 x 16 numbers of a warp at a time.
    __device__ __forceinline__ void write(uint32 tile, const uint32 (&from)[QUERIES / 16][4]) const {
        const int row = first_row() + lane % 16;
        const uint32 at = tile + row * ROW_BYTES;
#pragma unroll
        for (int k = 0; k < QUERIES / 16; k++)
            hw::store_matrices(at + ((first_query() / 8 + k * 2 + lane / 16) ^ row % 8) * 16, from[k]);
    }
    // 6 d_v += p @ d_out, d_k += d_s @ q: of all keys
    template <int N, int PARTS>
    __device__ __forceinline__ void add_product(float (&to)[N / 2], uint32 weights, uint32 queries) const {
        const uint64 a_at = swizzled_128(weights, 8 * ROW_BYTES, 16);
        const uint64 b_at = swizzled_128(columns<TILE_Q, PARTS>(queries), 8 * ROW_BYTES, TILE_Q * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < TILE_Q / 16; k++)
            hw::wgmma<N, true, false, true>(to, further(a_at, k * 32), further(b_at, k * 16 * ROW_BYTES));
        hw::wgmma_commit();
    }
    __device__ __forceinline__ void begin_d_q(int piece) {
        const uint32 half = columns<TILE_K, K_PARTS>(shared.k());
        multiply_d_q<PIECE, true>(d_q, d_s_tile(), half + piece * (PIECE == PART ? TILE_K * ROW_BYTES : PIECE * 2));
    }
    // Two pieces a step: parities are the same each time.
    __device__ __forceinline__ void hand_over_d_q(int piece) {
        write_d_q(d_q, number, piece, piece ^ 1);
        hw::fence_async();
        tell(number, piece);
    }

    template <bool LAST> __device__ __forceinline__ void step() {
        find_p();
        pack_p();
        write(shared.p(), p);
        find_d_s<LAST>();
        write(d_s_tile(), d_s);
        hw::fence_async();
        hw::barrier_sync(Shared::D_S_WRITTEN, 256);
        hw::wgmma_fence();
        add_product<V_HALF, O_PARTS>(d_v, shared.p(), shared.d_out(0));
        begin_d_q(0);
        hw::wgmma_wait<1>();
        arrive(shared.d_out_free(0));
        hw::wgmma_fence();
        add_product<HALF, K_PARTS>(d_k, d_s_tile(), shared.q(q_stage()));
        hw::wgmma_wait<1>();
        hand_over_d_q(0);
        hw::wgmma_fence();
        begin_d_q(1);
        hw::wgmma_wait<1>();
        arrive(shared.q_free(q_stage()));
        hw::wgmma_wait<0>();
        hand_over_d_q(1);
        next_step();
    }
    __device__ __forceinline__ void settle() const {}  // what it stores it holds in registers
    __device__ __forceinline__ void finish(const Shared::Item& item) const {
        store(launch.backward.d_k, d_k, number * HALF, D, item, params.scale);
        store(launch.backward.d_v, d_v, number * V_HALF, D_V, item, 1.0f);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ Launch launch) {
    SHARED_MEMORY(memory);
    produce_and_consume<Consumer<Wide>>(launch, memory);
}
