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

static_assert(Shared::END + 1024 == SHARED_BYTES, "as the host reckons it");
constexpr bool SCORED = variant::HAS_SCORE || !RAW_SCORES;  // whether scores change before the softmax, in every tile
constexpr bool HELD = Q_PARTS == 1 && V_PARTS == 1;  // whether registers have room for k and v, which saves reading them
constexpr bool LATE = S_STAGES == 2;  // whether d_q is multiplied a step late

// A warpgroup: 64 keys of the tile, of which a thread has two (g and g + 8 of its warp's 16). Of each eight queries it has
// two: s[n * 4 + half * 2 + e] is key g + half * 8, query n * 8 + lane % 4 * 2 + e.
struct Consumer {
    const Launch& launch;
    const Params& params;
    const Shared& shared;
    const int number, lane;
    uint32 keys = 0, steps = 0;  // key tiles and query tiles until now: stages and parities follow from them
    bool d_q_waits = false;  // to be handed over
    Ring<Q_STAGES> next_q;
    int q = 0, q_before = 0;  // stages of the query tile that s is of, and of the one before
    float d_k[DEPTH / 2], d_v[COLUMNS / 2];
    float s[TILE_Q / 2], d_p[TILE_Q / 2], d_q[HALF / 2];
    float2 shift[TILE_Q / 8];
    uint32 p[TILE_Q / 16][4];
    uint32 k_held[HELD ? DEPTH / 16 : 1][4], v_held[HELD ? COLUMNS / 16 : 1][4];
    bool is_partial = false;  // the query tile that s is of

    __device__ __forceinline__ Consumer(const Launch& launch, const Shared& shared, int number)
        : launch(launch), params(launch.backward.params), shared(shared), number(number), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ void arrive(uint32 bar) const {
        if (lane == 0) hw::mbarrier_arrive(bar);
    }
    __device__ __forceinline__ int first_key() const { return number * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4; }

    // The numbers of two neighbouring queries.
    __device__ __forceinline__ float2 two_of(uint32 rows, int n) const {
        return *reinterpret_cast<const float2*>(shared.memory + (rows - shared.base) + (n * 8 + lane % 4 * 2) * 4);
    }
    // This warpgroup's rows of k or v, as products take them from registers.
    template <int N> __device__ __forceinline__ void hold(uint32 (&to)[N][4], uint32 rows) const {
        const uint32 row = rows + (number * 64 + threadIdx.x / 32 % 4 * 16 + lane % 16) * ROW_BYTES;
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
    __device__ __forceinline__ uint32 k() const { return shared.k(keys % K_STAGES); }
    __device__ __forceinline__ void begin_s() {
        hw::mbarrier_wait(shared.q_full(next_q.stage), next_q.parity);
        q = next_q.stage;
        next_q.advance();
        is_partial = shared.meeting(q).kind == PARTIAL;
#pragma unroll
        for (int n = 0; n < TILE_Q / 8; n++) shift[n] = two_of(shared.shift(q), n);
    }
    __device__ __forceinline__ void multiply_k_q() {
        hw::wgmma_fence();
        multiply_rows<DEPTH, false>(s, k_held, k(), shared.q(q));
    }

    // 3 score
    // 4 mask (PARTIAL tiles only)
    // 5 p, d_s. Rows that see no key, and those beyond the last query, are shifted by infinity: their weights are 0.
    __device__ __forceinline__ Work work() const {
        const volatile Shared::Item& item = shared.item(keys % K_STAGES);
        const volatile Shared::Meeting& meeting = shared.meeting(q);
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
    template <class Act> __device__ __forceinline__ void for_each(Act act) {
        const Work work = this->work();
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
    __device__ __forceinline__ void score() {
        if (!SCORED && !is_partial) return;
        const int n_q = params.sequences[shared.item(keys % K_STAGES).sequence].n_q;  // of what is beyond, a variant may make anything
        for_each([&](int i, int query, const variant::Head& head, const variant::Row& row, const variant::Key& key,
                     const variant::Near& near) {
            if (SCORED) s[i] = variant::score(params, head, row, key, near, s[i] * params.scale);
            if (query >= n_q || (is_partial && !variant::mask(params, head, row, key, near))) s[i] = -INFINITY;
        });
    }
    // lse is subtracted first: as a power of 2 it would be rounded, by much where scores are large. Nor may products be added
    // to it: it is of scores that were rounded as these are.
    template <int FROM, int TO> __device__ __forceinline__ void exponentiate() {
        const float scale = SCORED ? 1.0f : params.scale;
#pragma unroll
        for (int i = FROM / 2; i < TO / 2; i++)
            s[i] = exp2_approximate(LOG2_E * fmaf(s[i], scale, i % 2 ? shift[i / 4].y : shift[i / 4].x));
    }
    __device__ __forceinline__ void pack_p() {
#pragma unroll
        for (int i = 0; i < TILE_Q / 4; i++) p[i / 4][i % 4] = hw::packed<Element>(s[2 * i], s[2 * i + 1]);
    }
    // Of all keys each query's -delta, to which products are added.
    __device__ __forceinline__ void begin_d_p(int stage) {
#pragma unroll
        for (int n = 0; n < TILE_Q / 8; n++) {
            const float2 delta = two_of(shared.delta(stage), n);
            d_p[n * 4] = d_p[n * 4 + 2] = delta.x;
            d_p[n * 4 + 1] = d_p[n * 4 + 3] = delta.y;
        }
    }
    // d_s takes the place of s. delta is already subtracted.
    __device__ __forceinline__ void weigh() {
#pragma unroll
        for (int i = 0; i < TILE_Q / 2; i++) s[i] *= d_p[i];
    }
    // To shared memory, keys down; 16 x 16 scores of a warp at a time.
    __device__ __forceinline__ void write_d_s() const {
        const int row = number * 64 + threadIdx.x / 32 % 4 * 16 + lane % 16;
        const uint32 at = d_s() + row * ROW_BYTES;
#pragma unroll
        for (int k = 0; k < TILE_Q / 16; k++) {
            uint32 words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) words[i] = hw::packed<Element>(s[k * 8 + 2 * i], s[k * 8 + 2 * i + 1]);
            hw::store_matrices(at + ((k * 2 + lane / 16) ^ row % 8) * 16, words);
        }
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
        if constexpr (variant::HAS_SLOPE)
            for_each([&](int i, int, const variant::Head& head, const variant::Row& row, const variant::Key& key,
                         const variant::Near& near) {
                if (s[i] != 0) s[i] *= variant::slope(params, head, row, key, near, plain[i]);
            });
        hw::mbarrier_wait(shared.d_s_free(steps % S_STAGES), steps / S_STAGES % 2 ^ 1);
        write_d_s();
        const int q = this->q_before = this->q;
        if (!LAST) begin_s();
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
        if (warp >= 2) Storer(launch, shared, warp - 2).run();
    } else {
        hw::registers_take<CONSUMER_REGISTERS>();
        Consumer(launch, shared, warpgroup - 1).run();
    }
}
