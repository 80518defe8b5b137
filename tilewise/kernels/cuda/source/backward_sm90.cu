// The backward pass in Hopper's own way. A block takes one key tile after the other, with its k and v, and meets the query
// tiles of its schedule; two warpgroups, each with 64 keys, keep d_k and d_v in registers. Scores lie keys down, queries
// across: s = k @ q.T. What a key tile adds to d_q goes to float32 sums in memory, by the copy engine, each query tile's in
// the order of its key tiles: a storing warp waits for its turn, so that every sum has the same bits each time.
//
// Of the five products of a step, those that need no result of the step run beside its exponentials: d_k of the step before
// and d_p. d_q is multiplied a step late, when the other warpgroup's d_s has mostly come: they need not go in step, and one
// computes exponentials while the other multiplies. s of the next step is issued behind d_q, and d_k is still under way when
// the next step begins.
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

static_assert(Shared::END + 1024 == SHARED_BYTES, "as the host reckons it");
constexpr bool SCORED = variant::HAS_SCORE || !RAW_SCORES;  // whether scores change before the softmax, in every tile

// A warpgroup: 64 keys of the tile, of which a thread has two (g and g + 8 of its warp's 16). Of each eight queries it has
// two: s[n * 4 + half * 2 + e] is key g + half * 8, query n * 8 + lane % 4 * 2 + e.
struct Consumer {
    const Launch& launch;
    const Params& params;
    const Shared& shared;
    const int number, lane;
    uint32 keys = 0, steps = 0;  // key tiles and query tiles until now: stages and parities follow from them
    float d_k[DEPTH / 2], d_v[COLUMNS / 2];
    float s[TILE_Q / 2], d_p[TILE_Q / 2], d_q[HALF / 2];
    uint32 p[TILE_Q / 16][4];

    __device__ __forceinline__ Consumer(const Launch& launch, const Shared& shared, int number)
        : launch(launch), params(launch.backward.params), shared(shared), number(number), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ void arrive(uint32 bar) const {
        if (lane == 0) hw::mbarrier_arrive(bar);
    }
    __device__ __forceinline__ int first_key() const { return number * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4; }

    // 2 s = k @ q.T, d_p = v @ d_out.T: of this warpgroup's keys
    template <int PARTS_DEPTH>
    __device__ __forceinline__ void multiply_rows(float (&to)[TILE_Q / 2], uint32 keys, uint32 queries) const {
        const uint64 a_at = swizzled_128(keys + number * 64 * ROW_BYTES, 8 * ROW_BYTES, 16);
        const uint64 b_at = swizzled_128(queries, 8 * ROW_BYTES, 16);
#pragma unroll
        for (int k = 0; k < PARTS_DEPTH / 16; k++) {
            const uint64 a = a_at + ((k / 4) * TILE_K * ROW_BYTES + k % 4 * 32) / 16;
            const uint64 b = b_at + ((k / 4) * TILE_Q * ROW_BYTES + k % 4 * 32) / 16;
            if (k == 0) hw::wgmma<TILE_Q, false>(to, a, b);
            else hw::wgmma<TILE_Q, true>(to, a, b);
        }
        hw::wgmma_commit();
    }
    __device__ __forceinline__ uint32 k() const { return shared.k(keys % K_STAGES); }
    __device__ __forceinline__ void multiply_k_q(uint32 step) {
        hw::mbarrier_wait(shared.q_full(step % 2), step / 2 % 2);
        hw::wgmma_fence();
        multiply_rows<DEPTH>(s, k(), shared.q(step % 2));
    }

    // 3 score
    // 4 mask (PARTIAL tiles only)
    // 5 p, d_s. Rows that see no key, and those beyond the last query, are shifted by infinity: their weights are 0.
    __device__ __forceinline__ Work work_of(int stage) const {
        const volatile Shared::Item& item = shared.item(keys % K_STAGES);
        const volatile Shared::Meeting& meeting = shared.meeting(stage);
        Work work;
        work.sequence = params.sequences[item.sequence];
        work.b = item.b;
        work.h = meeting.h;
        work.hk = item.hk;
        work.tile = meeting.tile;
        work.first_query = meeting.tile * TILE_Q;
        return work;
    }
    // For each of the thread's scores, with the query's and the key's values of the variant.
    template <class Act> __device__ __forceinline__ void for_each(int stage, Act act) {
        const Work work = work_of(stage);
        const variant::Head head = variant::head(params, work);
        const int tile = shared.item(keys % K_STAGES).j * TILE_K;
        const variant::Key key[2] = {variant::key(params, head, tile, first_key()),
                                     variant::key(params, head, tile, first_key() + 8)};
#pragma unroll
        for (int n = 0; n < TILE_Q / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int query = work.first_query + n * 8 + lane % 4 * 2 + e;
                const variant::Row row = variant::seen_from(variant::row(params, head, query), tile);
#pragma unroll
                for (int half = 0; half < 2; half++)
                    act(n * 4 + half * 2 + e, query, head, row, key[half], variant::near_cells(row, key[half]));
            }
    }
    __device__ __forceinline__ void score(int stage) {
        const bool is_partial = shared.meeting(stage).kind == PARTIAL;
        if (!SCORED && !is_partial) return;
        const int n_q = params.sequences[shared.item(keys % K_STAGES).sequence].n_q;  // of what is beyond, a variant may make anything
        for_each(stage, [&](int i, int query, const variant::Head& head, const variant::Row& row, const variant::Key& key,
                         const variant::Near& near) {
            if (SCORED) s[i] = variant::score(params, head, row, key, near, s[i] * params.scale);
            if (query >= n_q || (is_partial && !variant::mask(params, head, row, key, near))) s[i] = -INFINITY;
        });
    }
    __device__ __forceinline__ void exponentiate(int stage) {
        const float scale = SCORED ? 1.0f : params.scale;
#pragma unroll
        for (int n = 0; n < TILE_Q / 8; n++) {
            const float2 lse = two_of(shared.shift(stage), n);
#pragma unroll
            for (int i = 0; i < 4; i++) {  // lse first: as a power of 2 it would be rounded, by much where scores are large
                float& x = s[n * 4 + i];
                x = exp2_approximate(LOG2_E * fmaf(x, scale, -(i % 2 ? lse.y : lse.x)));
            }
        }
    }
    // The numbers of two neighbouring queries.
    __device__ __forceinline__ float2 two_of(uint32 rows, int n) const {
        return *reinterpret_cast<const float2*>(shared.memory + (rows - shared.base) + (n * 8 + lane % 4 * 2) * 4);
    }
    __device__ __forceinline__ void pack_p() {
#pragma unroll
        for (int i = 0; i < TILE_Q / 4; i++) p[i / 4][i % 4] = hw::packed<Element>(s[2 * i], s[2 * i + 1]);
    }
    // d_s takes the place of s.
    __device__ __forceinline__ void weigh(int stage) {
#pragma unroll
        for (int n = 0; n < TILE_Q / 8; n++) {
            const float2 delta = two_of(shared.delta(stage), n);
#pragma unroll
            for (int i = 0; i < 4; i++) s[n * 4 + i] *= d_p[n * 4 + i] - (i % 2 ? delta.y : delta.x);
        }
    }
    // To shared memory, keys down; 16 x 16 scores of a warp at a time.
    __device__ __forceinline__ void write_d_s(int stage) const {
        const int row = number * 64 + threadIdx.x / 32 % 4 * 16 + lane % 16;
        const uint32 at = shared.d_s(stage) + row * ROW_BYTES;
#pragma unroll
        for (int k = 0; k < TILE_Q / 16; k++) {
            uint32 words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) words[i] = hw::packed<Element>(s[k * 8 + 2 * i], s[k * 8 + 2 * i + 1]);
            hw::store_matrices(at + ((k * 2 + lane / 16) ^ row % 8) * 16, words);
        }
    }

    // 6 d_v += p @ d_out, d_k += d_s @ q, d_q = d_s.T @ k
    __device__ __forceinline__ void add_to_d_v(int stage) {
        const uint64 b_at = swizzled_128(shared.d_out(stage), 8 * ROW_BYTES, TILE_Q * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < TILE_Q / 16; k++) hw::wgmma<COLUMNS, true, true>(d_v, p[k], b_at + k * 16 * ROW_BYTES / 16);
        hw::wgmma_commit();
    }
    __device__ __forceinline__ void add_to_d_k(int stage) {
        const uint64 a_at = swizzled_128(shared.d_s(stage) + number * 64 * ROW_BYTES, 8 * ROW_BYTES, 16);
        const uint64 b_at = swizzled_128(shared.q(stage), 8 * ROW_BYTES, TILE_Q * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < TILE_Q / 16; k++)
            hw::wgmma<DEPTH, true, false, true>(d_k, a_at + k * 32 / 16, b_at + k * 16 * ROW_BYTES / 16);
        hw::wgmma_commit();
    }
    // Of all keys, and of half of the columns: a part of k, or half of its only one.
    __device__ __forceinline__ void multiply_d_s_k(int stage) {
        const uint32 columns = k() + number * (Q_PARTS == 2 ? TILE_K * ROW_BYTES : ROW_BYTES / 2);
        const uint64 a_at = swizzled_128(shared.d_s(stage), 8 * ROW_BYTES, 16);
        const uint64 b_at = swizzled_128(columns, 8 * ROW_BYTES, TILE_K * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++) {
            const uint64 a = a_at + k * 16 * ROW_BYTES / 16, b = b_at + k * 16 * ROW_BYTES / 16;
            if (k == 0) hw::wgmma<HALF, false, true, true>(d_q, a, b);
            else hw::wgmma<HALF, true, true, true>(d_q, a, b);
        }
        hw::wgmma_commit();
    }
    __device__ __forceinline__ void hand_over_d_q(uint32 step) const {
        hw::barrier_sync(Shared::d_q_room(step, number), 160);
        unsigned char* const to = shared.memory + (shared.d_q(number) - shared.base) + threadIdx.x % 128 * 16;
#pragma unroll
        for (int n = 0; n < HALF / 8; n++)
            *reinterpret_cast<float4*>(to + n * 2048) = make_float4(d_q[n * 4], d_q[n * 4 + 1], d_q[n * 4 + 2], d_q[n * 4 + 3]);
        hw::fence_async();
        hw::barrier_arrive(Shared::d_q_written(step, number), 160);
    }

    // d_q of a query tile, when both warpgroups have written its d_s.
    __device__ __forceinline__ void multiply_d_q(uint32 step) {
        hw::mbarrier_wait(shared.d_s_full(step % 2), step / 2 % 2);
        hw::wgmma_fence();
        multiply_d_s_k(step % 2);
    }
    __device__ __forceinline__ void finish_d_q(uint32 step) {
        hw::pin(d_q);
        arrive(shared.d_s_free(step % 2));
        hand_over_d_q(step);
    }

    // A query tile. s is there; d_k of the step before is under way, and d_q of it still to be multiplied, unless this is the
    // first. It waits a step, so that the other warpgroup's d_s has mostly come: they need not go in step.
    template <bool FIRST, bool LAST> __device__ __forceinline__ void step() {
        const int stage = steps % 2;
        hw::mbarrier_wait(shared.d_out_full(stage), steps / 2 % 2);
        hw::wgmma_fence();
        multiply_rows<COLUMNS>(d_p, shared.v(), shared.d_out(stage));
        float plain[variant::HAS_SLOPE ? TILE_Q / 2 : 1];  // scores as they were, for their slopes
        if (variant::HAS_SLOPE)
#pragma unroll
            for (int i = 0; i < TILE_Q / 2; i++) plain[i] = s[i] * params.scale;
        score(stage);
        exponentiate(stage);
        hw::pin(s);
        if (!FIRST) {
            hw::wgmma_wait<1>();
            arrive(shared.q_free(stage ^ 1));  // that of the step before
        }
        pack_p();
        hw::wgmma_fence();
        add_to_d_v(stage);
        hw::wgmma_wait<1>();
        hw::pin(d_p);
        if (LAST) arrive(shared.v_free());
        hw::mbarrier_wait(shared.d_s_free(stage), steps / 2 % 2 ^ 1);
        weigh(stage);
        if constexpr (variant::HAS_SLOPE)
            for_each(stage, [&](int i, int, const variant::Head& head, const variant::Row& row, const variant::Key& key,
                             const variant::Near& near) {
                if (s[i] != 0) s[i] *= variant::slope(params, head, row, key, near, plain[i]);
            });
        write_d_s(stage);
        hw::fence_async();
        hw::barrier_sync(Shared::d_s_written(number), 128);
        arrive(shared.d_s_full(stage));
        if (!FIRST) multiply_d_q(steps - 1);
        hw::wgmma_wait<FIRST ? 0 : 1>();
        hw::pin(p);
        arrive(shared.d_out_free(stage));
        if (!LAST) multiply_k_q(steps + 1);
        hw::wgmma_fence();
        add_to_d_k(stage);
        if (!FIRST) {
            hw::wgmma_wait<LAST ? 1 : 2>();
            finish_d_q(steps - 1);
        }
        if (!LAST) {
            hw::wgmma_wait<1>();
            hw::pin(s);
        }
        steps++;
    }

    // 7 finish: d_k, of scores that were scaled, and d_v
    template <int N>
    __device__ __forceinline__ void store(const Array& to, const float (&sums)[N], int width, const Shared::Item& item,
                                          float scale) const {
        const Sequence& sequence = params.sequences[item.sequence];
        const int quarter = lane % 4, key = item.j * TILE_K + first_key();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool inside = key + half * 8 < sequence.n_k;
            Element* row = row_of<Element>(to, item.b, item.hk, sequence.k_begin + key + half * 8);
            store_row<2 * N>(row, &sums[half * 2], scale, quarter, inside, width);
        }
    }

    // One key tile.
    __device__ __forceinline__ void meet_queries(int visits) {
#pragma unroll
        for (int i = 0; i < DEPTH / 2; i++) d_k[i] = 0;
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) d_v[i] = 0;
        hw::pin(d_k);
        hw::pin(d_v);
        hw::mbarrier_wait(shared.v_full(), keys % 2);
        if (visits == 0) {  // none sees these keys
            __syncwarp();  // all lanes know that v is there
            arrive(shared.v_free());
            return;
        }
        multiply_k_q(steps);
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
        multiply_d_q(steps - 1);
        hw::wgmma_wait<0>();
        hw::pin(d_k);
        hw::pin(d_v);
        arrive(shared.q_free((steps - 1) % 2));
        finish_d_q(steps - 1);
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
            store(launch.backward.d_k, d_k, D, item, params.scale);
            store(launch.backward.d_v, d_v, D_V, item, 1.0f);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ Launch launch) {
    SHARED_MEMORY(memory);
    const Shared shared(memory);
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        hw::registers_give_back<PRODUCER_REGISTERS>();
        const int warp = threadIdx.x / 32;
        if (warp == 0) Loader(launch, shared).bring_keys_and_queries();
        if (warp == 1) Loader(launch, shared).bring_values();
        if (warp >= 2) store_d_query(launch, shared, warp - 2);
    } else {
        hw::registers_take<CONSUMER_REGISTERS>();
        Consumer(launch, shared, warpgroup - 1).run();
    }
}
