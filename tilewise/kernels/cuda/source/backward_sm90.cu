// The backward pass in Hopper's own way. A block takes one key tile after the other, with its k and v, and meets the query
// tiles of its schedule; two warpgroups, each with 64 keys, keep d_k and d_v in registers. Scores lie keys down, queries
// across: s = k @ q.T. What a key tile adds to d_q goes to float32 sums in memory, by the copy engine, each query tile's in
// the order of its key tiles: a storing warp waits for its turn, so that every sum has the same bits each time.
//
// Of the five products of a step, s and d_p are issued together: exponentials run beside d_p. p and d_s stay in registers for
// d_v and d_k; d_s also goes to shared memory, for d_q needs all keys of it, and both warpgroups meet there, once a step. d_v
// runs while they do, d_k while d_q is handed over. No product is under way when a step ends.
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

// Of a query tile a warpgroup has all scores of its 64 keys.
struct Narrow : Scores {
    // Where no other block waits for it, a storer is told of d_q when both warpgroups meet in the next step: one fence is enough
    // for d_s and d_q then, and the copy engine reads while products read the least of shared memory.
    static constexpr bool TELLS_LATE = !ORDERED && HALVES_QUERIES;
    float d_k[DEPTH / 2], d_v[COLUMNS / 2], d_q[HALF / 2];
    bool owes = false;

    using Scores::Scores;

    // 6 d_v += p @ d_out, d_k += d_s @ q
    template <int N>
    __device__ __forceinline__ void add_product(float (&to)[N / 2], const uint32 (&weights)[TILE_Q / 16][4],
                                                uint32 queries) const {
        const uint64 b_at = swizzled_128(queries, 8 * ROW_BYTES, TILE_Q * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < TILE_Q / 16; k++) hw::wgmma<N, true, true>(to, weights[k], further(b_at, k * 16 * ROW_BYTES));
        hw::wgmma_commit();
    }
    // A half of d_q: of its queries, or of its columns: a part of k, or half of its only one.
    __device__ __forceinline__ void begin_d_q() {
        const int columns = HALVES_QUERIES ? 0 : number * (Q_PARTS == 2 ? TILE_K * ROW_BYTES : ROW_BYTES / 2);
        const uint32 d_s = hw::anew(d_s_tile()) + (HALVES_QUERIES ? number * 64 * ROW_BYTES : 0);
        const uint32 k_columns = hw::anew(shared.k()) + columns;
        multiply_d_q<HALF, false>(d_q, d_s, k_columns);
    }

    template <bool LAST> __device__ __forceinline__ void step() {
        find_p();
        find_d_s<LAST>();
        if (S_STAGES == 1) hw::mbarrier_wait(shared.d_s_free(), steps % 2 ^ 1);
        write_turned(d_s_tile(), d_s);
        hw::wgmma_fence();
        add_product<COLUMNS>(d_v, p, shared.d_out(d_out_stage()));
        hw::fence_async();
        hw::barrier_sync(Shared::D_S_WRITTEN, 256);
        if (TELLS_LATE && owes) tell_of(steps - 1);
        hw::wgmma_fence();
        begin_d_q();
        hw::wgmma_wait<1>();
        hw::pin(p);
        arrive(shared.d_out_free(d_out_stage()));
        hw::wgmma_fence();
        add_product<DEPTH>(d_k, d_s, shared.q(q_stage()));
        hw::wgmma_wait<1>();
        if (S_STAGES == 1) arrive(shared.d_s_free());
        write_d_q(d_q, steps % 2, number, steps / 2 % 2 ^ 1);
        if (TELLS_LATE) owes = true;
        else hand_over(steps);
        hw::wgmma_wait<0>();
        hw::pin(d_s);
        arrive(shared.q_free(q_stage()));
        next_step();
    }
    __device__ __forceinline__ void tell_of(uint32 step) const { tell(step % 2, number); }
    __device__ __forceinline__ void hand_over(uint32 step) const {
        hw::fence_async();
        tell_of(step);
    }
    __device__ __forceinline__ void finish(const Shared::Item& item) {
        if (owes) hand_over(steps - 1);
        owes = false;
        hw::barrier_sync(Shared::D_S_WRITTEN, 256);  // both have multiplied all d_s: its places are free
        if (params.n_sequences > 1 && item.left < first_of_64() + 64) {  // the next sequence's keys follow
            store(launch.backward.d_k, d_k, 0, D, item, params.scale);
            store(launch.backward.d_v, d_v, 0, D_V, item, 1.0f);
        } else {
            store_parts<0, COLUMNS>(&launch.d_v, d_v, item, 1.0f);
            store_parts<ceil_div(COLUMNS, PART), DEPTH>(&launch.d_k, d_k, item, params.scale);
        }
    }
    // 64 columns at a time. What comes after BEFORE others may have to wait for a place.
    template <int BEFORE, int N>
    __device__ __forceinline__ void store_parts(const TensorMap* to, const float (&sums)[N / 2], const Shared::Item& item,
                                                float scale) const {
        const Outbox box = outbox();
#pragma unroll
        for (int part = 0; part < ceil_div(N, PART); part++) {
            const uint32 place = box.place(BEFORE + part);
            if (BEFORE + part >= Outbox::PLACES) box.await<Outbox::PLACES - 1>();
            box.write(place, sums, part * PART, scale);
            box.send(to, place, part * PART, item.first_key + first_of_64(), item.hk, item.b);
        }
    }
    // Before anything is written to the places of d_s again.
    __device__ __forceinline__ void settle() const { outbox().await<0>(); }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ Launch launch) {
    SHARED_MEMORY(memory);
    produce_and_consume<Consumer<Narrow>>(launch, memory);
}
