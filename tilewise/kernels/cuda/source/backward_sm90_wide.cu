// Hopper's backward pass for wide heads, of up to 256 columns. Registers hold d_k and d_v of 64 keys, if two warpgroups share
// their columns: of every product with d columns each has half. Of the scores each has half of the queries, with all columns;
// p and d_s go through shared memory, where both find them whole.
//
// d_v, d_k and the first piece of d_q of a step run beside the next one's exponentials. The second piece, when the first has
// left its registers, runs with d_p and with the s that follows, which hides how d_s becomes known to both warpgroups. Shared
// memory has room for one d_out: the next is brought while d_k and d_q are computed.
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
#include "sm90_backward_producer.h"
#include "sm90_backward_scores.h"

static_assert(Shared::END + 1024 == SHARED_BYTES, "as the host reckons it");
constexpr int V_HALF = O_PARTS * PART / 2;  // columns of d_v that a warpgroup has; of d_k it has HALF

struct Consumer : Scores {
    float d_k[HALF / 2], d_v[V_HALF / 2], d_q[PIECE / 2];
    float next_s[QUERIES / 2];

    using Scores::Scores;

    // Where this warpgroup's columns begin: with a part, or in the middle of the only one.
    template <int ROWS, int PARTS> __device__ __forceinline__ uint32 columns(uint32 tile) const {
        return hw::anew(tile) + number * (PARTS == 1 ? ROW_BYTES / 2 : PARTS / 2 * ROWS * ROW_BYTES);
    }
    // 2 s = k @ q.T, d_p = v @ d_out.T: of this warpgroup's queries
    template <int PARTS_DEPTH, bool ADD>
    __device__ __forceinline__ void multiply_rows(float (&to)[QUERIES / 2], uint32 keys, uint32 queries) const {
        const uint64 a_at = swizzled_128(hw::anew(keys), 8 * ROW_BYTES, 16);
        const uint64 b_at = swizzled_128(hw::anew(queries) + first_query() * ROW_BYTES, 8 * ROW_BYTES, 16);
#pragma unroll
        for (int k = 0; k < PARTS_DEPTH / 16; k++) {
            const uint64 a = a_at + ((k / 4) * TILE_K * ROW_BYTES + k % 4 * 32) / 16;
            const uint64 b = b_at + ((k / 4) * TILE_Q * ROW_BYTES + k % 4 * 32) / 16;
            if (k == 0) hw::wgmma<QUERIES, ADD>(to, a, b);
            else hw::wgmma<QUERIES, true>(to, a, b);
        }
        hw::wgmma_commit();
    }
    // 6 d_v += p @ d_out, d_k += d_s @ q: of all keys
    template <int N, int PARTS>
    __device__ __forceinline__ void add_product(float (&to)[N / 2], uint32 weights, uint32 queries) const {
        const uint64 a_at = swizzled_128(weights, 8 * ROW_BYTES, 16);
        const uint64 b_at = swizzled_128(columns<TILE_Q, PARTS>(queries), 8 * ROW_BYTES, TILE_Q * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < TILE_Q / 16; k++)
            hw::wgmma<N, true, false, true>(to, a_at + k * 32 / 16, b_at + k * 16 * ROW_BYTES / 16);
        hw::wgmma_commit();
    }
    // d_q = d_s.T @ k, a piece of its columns
    __device__ __forceinline__ void multiply_d_q(uint32 step, int piece) {
        const uint32 half = columns<TILE_K, K_PARTS>(k());
        const uint64 a_at = swizzled_128(shared.d_s(step % 2), 8 * ROW_BYTES, 16);
        const uint64 b_at = swizzled_128(half + piece * (PIECE == PART ? TILE_K * ROW_BYTES : PIECE * 2), 8 * ROW_BYTES,
                                         TILE_K * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++) {
            const uint64 a = a_at + k * 16 * ROW_BYTES / 16, b = b_at + k * 16 * ROW_BYTES / 16;
            if (k == 0) hw::wgmma<PIECE, false, true, true>(d_q, a, b);
            else hw::wgmma<PIECE, true, true, true>(d_q, a, b);
        }
        hw::wgmma_commit();
    }
    __device__ __forceinline__ void hand_over_d_q(int piece) {
        hw::pin(d_q);
        hw::mbarrier_wait(shared.d_q_free(number), piece ^ 1);  // two pieces a step: parities are the same each time
        unsigned char* const to = shared.memory + (shared.d_q(number, piece) - shared.base) + threadIdx.x % 128 * 16;
#pragma unroll
        for (int n = 0; n < PIECE / 8; n++)
            *reinterpret_cast<float4*>(to + n * 2048) = make_float4(d_q[n * 4], d_q[n * 4 + 1], d_q[n * 4 + 2], d_q[n * 4 + 3]);
        hw::fence_async();
        hw::barrier_arrive(Shared::d_q_written(number, piece), 160);
    }

    // d_v, d_k and the first piece of d_q, of the step before.
    __device__ __forceinline__ void begin_products(uint32 step, int q) {
        hw::wgmma_fence();
        add_product<V_HALF, O_PARTS>(d_v, shared.p(step % 2), shared.d_out(0));
        add_product<HALF, K_PARTS>(d_k, shared.d_s(step % 2), shared.q(q));
        multiply_d_q(step, 0);
    }
    __device__ __forceinline__ void end_products(int q) {
        hw::wgmma_wait<2>();
        arrive(shared.d_out_free(0));
        hw::wgmma_wait<1>();
        arrive(shared.q_free(q));
        hw::wgmma_wait<0>();
        hand_over_d_q(0);
    }

    // A query tile. s is there. Unless this is the first, products of the step before are under way.
    template <bool FIRST, bool LAST> __device__ __forceinline__ void step() {
        float plain[variant::HAS_SLOPE ? QUERIES / 2 : 1];  // scores as they were, for their slopes
        if (variant::HAS_SLOPE)
#pragma unroll
            for (int i = 0; i < QUERIES / 2; i++) plain[i] = s[i] * params.scale;
        score();
        read_shift();
        exponentiate<0, QUERIES>();
        write_s(shared.p(steps % 2));
        if (!FIRST) end_products(q_before);
        hw::mbarrier_wait(shared.d_out_full(0), steps % 2);
        begin_d_p(0);
        hw::pin(d_p);
        const int q = q_before = this->q;
        if (!LAST) begin_s();
        hw::wgmma_fence();
        if (!FIRST) multiply_d_q(steps - 1, 1);
        multiply_rows<COLUMNS, true>(d_p, shared.v(), shared.d_out(0));
        if (!LAST) multiply_rows<DEPTH, false>(next_s, k(), shared.q(this->q));
        if (!FIRST) {
            hw::wgmma_wait<LAST ? 1 : 2>();
            hand_over_d_q(1);
        }
        hw::wgmma_wait<LAST ? 0 : 1>();
        hw::pin(d_p);
        if (LAST) arrive(shared.v_free());
        weigh();
        multiply_by_slopes(plain, q);
        write_s(shared.d_s(steps % 2));
        hw::fence_async();
        hw::barrier_sync(Shared::d_s_written(0), 256);
        begin_products(steps, q);
        if (!LAST) {
            hw::wgmma_wait<3>();
            hw::pin(next_s);
#pragma unroll
            for (int i = 0; i < QUERIES / 2; i++) s[i] = next_s[i];
        }
        steps++;
    }

    // One key tile.
    __device__ __forceinline__ void meet_queries(int visits) {
        clear(d_k);
        clear(d_v);
        hw::mbarrier_wait(shared.v_full(), keys % 2);
        if (visits == 0) {  // none sees these keys
            __syncwarp();  // all lanes know that v is there
            arrive(shared.v_free());
            return;
        }
        begin_s();
        hw::wgmma_fence();
        multiply_rows<DEPTH, false>(s, k(), shared.q(q));
        hw::wgmma_wait<0>();
        hw::pin(s);
        if (visits == 1) {
            step<true, true>();
        } else {
            step<true, false>();
#pragma unroll 1
            for (int i = 2; i < visits; i++) step<false, false>();
            step<false, true>();
        }
        end_products(q);
        hw::wgmma_fence();
        multiply_d_q(steps - 1, 1);
        hw::wgmma_wait<0>();
        hw::pin(d_k);
        hw::pin(d_v);
        hand_over_d_q(1);
    }

    __device__ __forceinline__ void run() {
        while (true) {
            hw::mbarrier_wait(shared.k_full(0), keys % 2);
            if (__shfl_sync(~0u, shared.item(0).j, 0) < 0) return;
            meet_queries(__shfl_sync(~0u, shared.item(0).visits, 0));
            const Shared::Item item = shared.copy_of_item(0);
            __syncwarp();  // all lanes have read the item
            arrive(shared.k_free(0));
            keys++;
            store(launch.backward.d_k, d_k, number * HALF, D, item, params.scale);
            store(launch.backward.d_v, d_v, number * V_HALF, D_V, item, 1.0f);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ Launch launch) {
    SHARED_MEMORY(memory);
    produce_and_consume<Consumer>(launch, memory);
}
