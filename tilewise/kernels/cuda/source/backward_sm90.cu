// The backward pass in Hopper's own way. A block takes one key tile after the other, with its k and v, and meets the query
// tiles of its schedule; two warpgroups, each with 64 keys, keep d_k and d_v in registers. Scores lie keys down, queries
// across: s = k @ q.T. What a key tile adds to d_q goes to float32 sums in memory, by the copy engine, each query tile's in
// the order of its key tiles: a storing warp waits for its turn, so that every sum has the same bits each time.
//
// Of the five products of a step, those that need no result of the step run beside its exponentials: d_k of the step before
// and d_p. s of the next step is issued behind d_q, and d_k is still under way when the next step begins. Where shared memory
// has room, d_q is multiplied a step late, when the other warpgroup's d_s is long there: one computes exponentials while the
// other multiplies. Shared memory is what products wait for, and who reads it waits with them: -lse is read a while before
// it is needed, d_p begins with -delta, and d_q is handed over when its writing is long done.
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
constexpr bool HELD = Q_PARTS == 1 && V_PARTS == 1;  // whether registers have room for k and v, which saves reading them
constexpr bool LATE = S_STAGES == 2;  // whether d_q is multiplied a step late

// Of a query tile a warpgroup has all scores of its 64 keys.
struct Consumer : Scores {
    bool d_q_waits = false;  // to be handed over
    float d_k[DEPTH / 2], d_v[COLUMNS / 2], d_q[HALF / 2];
    uint32 p[TILE_Q / 16][4];
    uint32 k_held[HELD ? DEPTH / 16 : 1][4], v_held[HELD ? COLUMNS / 16 : 1][4];

    using Scores::Scores;

    // This warpgroup's rows of k or v, as products take them from registers.
    template <int N> __device__ __forceinline__ void hold(uint32 (&to)[N][4], uint32 rows) const {
        const uint32 row = rows + (first_row() + lane % 16) * ROW_BYTES;
#pragma unroll
        for (int k = 0; k < N; k++) hw::load_matrices(to[k], row + ((k * 2 + lane / 16) ^ lane % 8) * 16);
        __syncwarp();  // all lanes have read theirs
    }
    // 2 s = k @ q.T, d_p = v @ d_out.T: of this warpgroup's keys
    template <int PARTS_DEPTH, bool ADD, int N>
    __device__ __forceinline__ void multiply_rows(float (&to)[TILE_Q / 2], const uint32 (&held)[N][4], uint32 keys,
                                                  uint32 queries) const {
        const uint64 a_at = swizzled_128(hw::anew(keys) + number * 64 * ROW_BYTES, 8 * ROW_BYTES, 16);
        const uint64 b_at = swizzled_128(queries, 8 * ROW_BYTES, 16);
#pragma unroll
        for (int k = 0; k < PARTS_DEPTH / 16; k++) {
            const uint64 a = a_at + ((k / 4) * TILE_K * ROW_BYTES + k % 4 * 32) / 16;
            const uint64 b = b_at + ((k / 4) * TILE_Q * ROW_BYTES + k % 4 * 32) / 16;
            if constexpr (HELD) {
                if (k == 0) hw::wgmma<TILE_Q, ADD>(to, held[k], b);
                else hw::wgmma<TILE_Q, true>(to, held[k], b);
            } else {
                if (k == 0) hw::wgmma<TILE_Q, ADD>(to, a, b);
                else hw::wgmma<TILE_Q, true>(to, a, b);
            }
        }
        hw::wgmma_commit();
    }
    __device__ __forceinline__ void multiply_k_q() {
        hw::wgmma_fence();
        multiply_rows<DEPTH, false>(s, k_held, k(), shared.q(q));
    }

    __device__ __forceinline__ void pack_p() {
#pragma unroll
        for (int i = 0; i < TILE_Q / 4; i++) p[i / 4][i % 4] = pair(i / 4, i % 4);
    }
    __device__ __forceinline__ uint32 d_s() const { return shared.d_s(steps % S_STAGES); }

    // 6 d_v += p @ d_out, d_k += d_s @ q, d_q = d_s.T @ k
    __device__ __forceinline__ void add_to_d_v(int stage) {
        const uint64 b_at = swizzled_128(shared.d_out(stage), 8 * ROW_BYTES, TILE_Q * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < TILE_Q / 16; k++) hw::wgmma<COLUMNS, true, true>(d_v, p[k], b_at + k * 16 * ROW_BYTES / 16);
        hw::wgmma_commit();
    }
    __device__ __forceinline__ void add_to_d_k(int q) {
        const uint64 a_at = swizzled_128(d_s() + number * 64 * ROW_BYTES, 8 * ROW_BYTES, 16);
        const uint64 b_at = swizzled_128(shared.q(q), 8 * ROW_BYTES, TILE_Q * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < TILE_Q / 16; k++)
            hw::wgmma<DEPTH, true, false, true>(d_k, a_at + k * 32 / 16, b_at + k * 16 * ROW_BYTES / 16);
        hw::wgmma_commit();
    }
    // Of all keys, and of half of the columns: a part of k, or half of its only one.
    __device__ __forceinline__ void multiply_d_s_k(uint32 d_s) {
        const uint32 columns = hw::anew(k()) + number * (Q_PARTS == 2 ? TILE_K * ROW_BYTES : ROW_BYTES / 2);
        const uint64 a_at = swizzled_128(d_s, 8 * ROW_BYTES, 16);
        const uint64 b_at = swizzled_128(columns, 8 * ROW_BYTES, TILE_K * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++) {
            const uint64 a = a_at + k * 16 * ROW_BYTES / 16, b = b_at + k * 16 * ROW_BYTES / 16;
            if (k == 0) hw::wgmma<HALF, false, true, true>(d_q, a, b);
            else hw::wgmma<HALF, true, true, true>(d_q, a, b);
        }
        hw::wgmma_commit();
    }
    // d_q of a step, when both warpgroups have written its d_s.
    __device__ __forceinline__ void multiply_d_q(uint32 step) {
        if (LATE) hw::mbarrier_wait(shared.d_s_full(step % 2), step / 2 % 2);
        hw::wgmma_fence();
        multiply_d_s_k(shared.d_s(step % S_STAGES));
    }
    __device__ __forceinline__ void write_d_q(uint32 step) {
        hw::pin(d_q);
        arrive(shared.d_s_free(step % S_STAGES));
        hw::mbarrier_wait(shared.d_q_free(step % 2), step / 2 % 2 ^ 1);
        unsigned char* const to = shared.memory + (shared.d_q(step % 2, number) - shared.base) + threadIdx.x % 128 * 16;
#pragma unroll
        for (int n = 0; n < HALF / 8; n++)
            *reinterpret_cast<float4*>(to + n * 2048) = make_float4(d_q[n * 4], d_q[n * 4 + 1], d_q[n * 4 + 2], d_q[n * 4 + 3]);
        d_q_waits = true;
    }
    __device__ __forceinline__ void hand_over_d_q(uint32 step) {
        if (!d_q_waits) return;
        hw::fence_async();
        hw::barrier_arrive(Shared::d_q_written(step % 2, number), 160);
        d_q_waits = false;
    }

    // A query tile. s is there. Unless this is the first, d_k of the step before is under way, and a d_q may be to hand over.
    template <bool FIRST, bool LAST> __device__ __forceinline__ void step() {
        const uint32 d_q_step = LATE ? steps - 1 : steps;
        constexpr bool HAS_D_Q = !LATE || !FIRST;
        const int stage = steps % 2, q_before = this->q_before;
        hw::mbarrier_wait(shared.d_out_full(stage), steps / 2 % 2);
        begin_d_p(stage);
        hw::wgmma_fence();
        multiply_rows<COLUMNS, true>(d_p, v_held, shared.v(), shared.d_out(stage));
        float plain[variant::HAS_SLOPE ? TILE_Q / 2 : 1];  // scores as they were, for their slopes
        if (variant::HAS_SLOPE)
#pragma unroll
            for (int i = 0; i < TILE_Q / 2; i++) plain[i] = s[i] * params.scale;
        score();
        exponentiate<0, TILE_Q / 2>();
        if (LATE && FIRST && number == 0) hw::barrier_arrive(Shared::FIRST_LEADS, 256);
        if (!FIRST) {
            hw::wgmma_wait_in_place<1>(launch.items > 0);
            arrive(shared.q_free(q_before));
            hand_over_d_q(d_q_step - 1);
        }
        exponentiate<TILE_Q / 2, TILE_Q>();
        pack_p();
        hw::wgmma_fence();
        add_to_d_v(stage);
        hw::wgmma_wait<1>();
        hw::pin(d_p);
        if (LAST && !HELD) arrive(shared.v_free());
        weigh();
        multiply_by_slopes(plain, this->q);
        hw::mbarrier_wait(shared.d_s_free(steps % S_STAGES), steps / S_STAGES % 2 ^ 1);
        write_s(d_s());
        const int q = this->q_before = this->q;
        if (!LAST) {
            begin_s();
            read_shift();
        }
        hw::fence_async();
        hw::barrier_sync(Shared::d_s_written(LATE ? number : 0), LATE ? 128 : 256);
        if (LATE) arrive(shared.d_s_full(stage));
        if (HAS_D_Q) multiply_d_q(d_q_step);
        hw::wgmma_wait<HAS_D_Q ? 1 : 0>();
        hw::pin(p);
        arrive(shared.d_out_free(stage));
        if (!LAST) multiply_k_q();
        hw::wgmma_fence();
        add_to_d_k(q);
        if (HAS_D_Q) {
            hw::wgmma_wait<LAST ? 1 : 2>();
            write_d_q(d_q_step);
        }
        if (!LAST) {
            hw::wgmma_wait<1>();
            hw::pin(s);
        }
        steps++;
    }

    // One key tile.
    __device__ __forceinline__ void meet_queries(int visits) {
        clear(d_k);
        clear(d_v);
        hw::mbarrier_wait(shared.v_full(), keys % 2);
        if constexpr (HELD) {
            hold(k_held, k());
            hold(v_held, shared.v());
        }
        if (HELD || visits == 0) {
            __syncwarp();  // all lanes know that v is there
            arrive(shared.v_free());
        }
        if (visits == 0) return;  // none sees these keys
        begin_s();
        read_shift();
        multiply_k_q();
        hw::wgmma_wait<0>();
        hw::pin(s);
        if (LATE && number == 1) hw::barrier_sync(Shared::FIRST_LEADS, 256);
        if (visits == 1) {
            step<true, true>();
        } else {
            step<true, false>();
#pragma unroll 1
            for (int i = 2; i < visits; i++) step<false, false>();
            step<false, true>();
        }
        if (LATE) {
            hand_over_d_q(steps - 2);
            multiply_d_q(steps - 1);
        }
        hw::wgmma_wait<0>();
        hw::pin(d_k);
        hw::pin(d_v);
        if (LATE) write_d_q(steps - 1);
        hand_over_d_q(steps - 1);
        arrive(shared.q_free(q));
    }

    __device__ __forceinline__ void run() {
        while (true) {
            const int stage = keys % K_STAGES;
            hw::mbarrier_wait(shared.k_full(stage), keys / K_STAGES % 2);
            if (__shfl_sync(~0u, shared.item(stage).j, 0) < 0) return;
            meet_queries(__shfl_sync(~0u, shared.item(stage).visits, 0));
            const Shared::Item item = shared.copy_of_item(stage);
            __syncwarp();  // all lanes have read the item
            arrive(shared.k_free(stage));
            keys++;
            store(launch.backward.d_k, d_k, 0, D, item, params.scale);
            store(launch.backward.d_v, d_v, 0, D_V, item, 1.0f);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ Launch launch) {
    SHARED_MEMORY(memory);
    produce_and_consume<Consumer>(launch, memory);
}
