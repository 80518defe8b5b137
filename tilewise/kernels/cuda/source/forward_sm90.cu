// Hopper's own way: a producer warp keeps the copy engine (TMA) busy with tiles of q, k and v; consumer warpgroups, each
// with 64 queries of the tile, multiply them with wgmma and do the softmax in between. A block takes one query tile after
// the other, and the next tile's first product runs beside the last one's last.
//
// The products of a step run while the exponentials of the step before are taken: s of one key tile is issued together
// with acc += p @ v of the tile before it. With two warpgroups one multiplies while the other takes exponentials.
//
// Softmax is speculative where no mask is needed: exponentials are taken with the row_max known before the tile, so that
// nothing waits for a new one. The sums tell whether that was safe; if not, the tile is rescaled or computed again.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "operations.h"
#include "variant.h"
#include "softmax.h"
#include "hopper.h"
#include "wgmma.h"
#include "sm90.h"
#include "sm90_producer.h"
#include "sm90_softmax.h"

// A warpgroup of consumers: 64 rows of the query tile, of which a thread has two (g and g + 8 of its warp's 16).
struct Consumer {
    const Launch& launch;
    const Shared& shared;
    const int number, lane;  // which warpgroup of consumers this is
    Ring<1> q_ring;
    Ring<STAGES> k_ring, v_ring;
    Ring<TABLE_STAGES> table_ring;
    Ring<ITEMS> items;
    KeyTiles keys;
    Softmax<TILE_K> rows;
    float acc[COLUMNS / 2];
    uint32 p[TILE_K / 16][4];
    uint32 q[Q_IN_REGISTERS ? DEPTH / 16 : 1][4];
    int rows_left;  // of the sequence, from the thread's first row
    bool skipped = false;  // a tile's k was, and its v not yet
    bool cautious;  // scores of this warp's rows differ too much for speculation: the maximum comes first
    Places places;  // of the item, if scores need them in every tile

    __device__ __forceinline__ Consumer(const Launch& launch, const Shared& shared, int number)
        : launch(launch), shared(shared), number(number), lane(threadIdx.x % 32) {}

    // -- the pipeline ---------------------------------------------------------------------------------------------------
    __device__ __forceinline__ void arrive(uint32 bar) const {
        if (lane == 0) hw::mbarrier_arrive(bar);
    }
    // Warpgroups take turns to issue products, so that one's exponentials run beside the other's products.
    __device__ __forceinline__ void take_turn() const {
        if (PING_PONG) hw::barrier_sync(threadIdx.x / 128, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (PING_PONG) hw::barrier_arrive(threadIdx.x / 128 % WARPGROUPS + 1, 256);
    }
    // k, and what came with it.
    __device__ __forceinline__ void free_k() {
        arrive(shared.k_free(k_ring.stage));
        k_ring.advance();
        if (USES_TABLE) {
            __syncwarp();  // all lanes have read their cells
            arrive(shared.table_free(table_ring.stage));
            table_ring.advance();
        }
    }
    __device__ __forceinline__ void free_v() {
        arrive(shared.v_free(v_ring.stage));
        v_ring.advance();
    }
    // A tile that counts for another warpgroup only. Its k is let go at once, its v when that of the tile before was read.
    __device__ __forceinline__ void skip_k() {
        wait_together(shared.k_full(k_ring.stage), k_ring.parity);
        if (USES_TABLE) wait_together(shared.table_full(table_ring.stage), table_ring.parity);
        take_turn();
        pass_turn();
        free_k();
        skipped = true;
    }
    __device__ __forceinline__ void skip_v() {
        if (!skipped) return;
        wait_together(shared.v_full(v_ring.stage), v_ring.parity);
        free_v();
        skipped = false;
    }

    // 1 load q (to registers, if they have room)
    __device__ __forceinline__ uint32 q_row() const {  // of the lane's address for load_matrices
        return shared.q() + (threadIdx.x / 32 * 16 - 64 + lane % 16) * ROW_BYTES;
    }
    __device__ __forceinline__ void load_q(uint32 (&to)[4], int k) const {
        hw::load_matrices(to, q_row() + (k / 4) * TILE_Q * ROW_BYTES + ((k % 4 * 2 + lane / 16) ^ lane % 8) * 16);
    }
    __device__ __forceinline__ const Item& item() const { return shared.item(items.stage); }
    __device__ __forceinline__ void begin_item() {
        rows_left = item().work.sequence.n_q - item().work.first_query - first_row();
        if constexpr (Q_IN_REGISTERS) {
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) load_q(q[k], k);
            __syncwarp();  // all lanes have read theirs
            free_q();
        }
        if constexpr (SCORED) places = places_of(launch.params, item(), first_row());
        begin_keys();
    }
    __device__ __forceinline__ void free_q() {
        arrive(shared.q_free());
        q_ring.advance();
    }
    __device__ __forceinline__ int first_row() const { return threadIdx.x / 32 * 16 - 64 + lane / 4; }

    // Up to its first tile that counts for this warpgroup; there is one.
    __device__ __forceinline__ void begin_keys() {
        keys.run = __shfl_sync(~0u, item().n_runs, 0);
        next_run();
        if (keys.kind == EMPTY) {  // one tile, as the plan has it
            skip_k();
            next_run();
        }
        keys.take_tile();
    }
    __device__ __forceinline__ bool next_run() { return keys.next_run(launch.params, item(), number); }

    // 2 s = q @ k.T
    __device__ __forceinline__ void multiply_q_k() {
        const uint64 k_at = swizzled_128(shared.k(k_ring.stage), 8 * ROW_BYTES, 16);
        const uint64 q_at = swizzled_128(shared.q() + number * 64 * ROW_BYTES, 8 * ROW_BYTES, 16);
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            const uint64 b = k_at + ((k / 4) * TILE_K * ROW_BYTES + k % 4 * 32) / 16;
            const uint64 a = q_at + ((k / 4) * TILE_Q * ROW_BYTES + k % 4 * 32) / 16;
            if constexpr (Q_IN_REGISTERS) {
                if (k == 0) hw::wgmma<TILE_K, false>(rows.s, q[k], b);
                else hw::wgmma<TILE_K, true>(rows.s, q[k], b);
            } else {
                if (k == 0) hw::wgmma<TILE_K, false>(rows.s, a, b);
                else hw::wgmma<TILE_K, true>(rows.s, a, b);
            }
        }
        hw::wgmma_commit();
    }
    // The same for this warp's 16 rows alone, once more: k is still there.
    __device__ __forceinline__ void multiply_q_k_again() {
        const uint32 k_row = shared.k(k_ring.stage) + (lane / 16 * 8 + lane % 8) * ROW_BYTES;
#pragma unroll
        for (int i = 0; i < TILE_K / 2; i++) rows.s[i] = 0;
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            uint32 a[4];
            if constexpr (Q_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[i] = q[k][i];
            } else {
                load_q(a, k);
            }
#pragma unroll
            for (int n = 0; n < TILE_K / 16; n++) {
                uint32 b[4];
                hw::load_matrices(b, k_row + (k / 4) * TILE_K * ROW_BYTES + n * 16 * ROW_BYTES +
                                         ((k % 4 * 2 + lane / 8 % 2) ^ lane % 8) * 16);
                hw::mma(&rows.s[n * 8], a, b[0], b[1]);
                hw::mma(&rows.s[n * 8 + 4], a, b[2], b[3]);
            }
        }
    }

    // 3 score
    // 4 mask (PARTIAL tiles only: one that ends beyond the last key is such a tile)
    template <bool MASKED> __device__ __forceinline__ void score() { score<MASKED>(keys.tile); }
    template <bool MASKED> __device__ __forceinline__ void score(int tile) {
        const Params& params = launch.params;
        const TableRows table{shared.memory + Shared::TABLE + table_ring.stage * TABLE_BYTES, first_row(), lane};
        if (USES_TABLE) hw::mbarrier_wait(shared.table_full(table_ring.stage), table_ring.parity);
        if constexpr (SCORED) rows.template score<MASKED>(params, places, tile, lane, table);
        else if constexpr (MASKED)
            rows.template score<true>(params, places_of(params, item(), first_row()), tile, lane, table);
    }

    // 5 row_max, rescale, p, row_sum: sm90_softmax.h
    // A row's first keys: nothing to rescale yet.
    __device__ __forceinline__ void first_tile() {
        if (SCORED || keys.kind == PARTIAL) score<true>();  // the mask of a FULL tile holds: one copy of long scores less
        rows.begin(launch, keys.kind == PARTIAL);
        cautious = rows.far_apart(rows_left);
        free_k();
    }

    // All warps of a warpgroup must wait for products at the same place of the program, whatever each has to compute.
    template <bool HELD = true> __device__ __forceinline__ void wait_for_p_v() {
        hw::pin(rows.s);
        if (HELD) hw::wgmma_wait_in_place<0>(launch.items > 0);
        else hw::wgmma_wait_together();
        hw::pin(acc);
        hw::pin(p);
    }
    // A tile with a mask: the online softmax as it is written everywhere.
    __device__ __forceinline__ void masked_step() {
        keys.take_tile();
        begin_products();
        score<true>();
        free_k();
        float rescale[2];
        const bool needed = rows.exact(launch, rescale);
        wait_for_p_v();
        if (needed) rescale_acc(rescale);
        free_v();
        pack_p();
    }
    // A tile without one: speculation, as long as it serves.
    __device__ __forceinline__ void full_step() {
        keys.take_tile();
        begin_products();
        score<false>();
        float rescale[2], sums[2] = {};
        bool needed = false;
        if (cautious) needed = rows.exact(launch, rescale);
        else rows.speculate_first(launch, sums);
        hw::pin(sums);
        wait_for_p_v<HOLDS_WAIT>();
        if (cautious) {
            if (needed) rescale_acc(rescale);
            pack_p();
        } else {
            rows.speculate_rest(launch, sums);
            pack_p();
            look_at(sums);
        }
        free_k();
        free_v();
    }
    // Whether speculation served; if not, what p should have been.
    __device__ __forceinline__ void look_at(float (&sums)[2]) {
        if (rows.is_ordinary(sums, rows_left)) {
            rows.row_sum[0] += sums[0];
            rows.row_sum[1] += sums[1];
            return;
        }
        float rescale[2] = {1, 1};
        if (rows.is_safe(sums, rows_left)) {
            if (rows.correct(sums, rescale)) rescale_acc(rescale);
            return;
        }
        if (rows.is_finite(sums, rows_left)) {
            rows.tame(sums, rescale);
            rows.correct(sums, rescale);
        } else {
            multiply_q_k_again();
            score<false>(hw::anew(keys.tile));  // nothing of the first time is kept for this
            rows.exact(launch, rescale);
            cautious = true;
        }
        rescale_acc(rescale);
        pack_p();
    }
    // Issue this tile's s and the last tile's p @ v; wait for s.
    __device__ __forceinline__ void begin_products() {
        hw::mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
        take_turn();
        hw::wgmma_fence();
        multiply_q_k();
        hw::mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
        multiply_p_v();
        pass_turn();
        hw::wgmma_wait<1>();
        hw::pin(rows.s);
    }

    // 6 acc = acc * rescale + p @ v
    __device__ __forceinline__ void multiply_p_v() {
        const uint64 v_at = swizzled_128(shared.v(v_ring.stage), 8 * ROW_BYTES, TILE_K * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++)
            hw::wgmma<COLUMNS, true, true>(acc, p[k], v_at + k * 16 * ROW_BYTES / 16);
        hw::wgmma_commit();
    }
    __device__ __forceinline__ void rescale_acc(const float (&rescale)[2]) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) acc[i] *= rescale[i / 2 % 2];
    }
    __device__ __forceinline__ void pack_p() {
#pragma unroll
        for (int i = 0; i < TILE_K / 4; i++) p[i / 4][i % 4] = hw::packed<Element>(rows.s[2 * i], rows.s[2 * i + 1]);
    }

    // 7 finish: acc / row_sum, lse
    __device__ __forceinline__ void store(const Item& item, const float (&row_max)[2], const float (&row_sum)[2],
                                          const float (&narrowing)[2]) const {
        const Work& work = item.work;
        const int row = work.sequence.q_begin + work.first_query + first_row(), quarter = lane % 4;
        const int left = work.sequence.n_q - work.first_query - first_row();
        const float sink = sink_of(launch.params, work.h);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Finished done = finished(launch, row_max[half], sum_of_quad(row_sum[half]), sum_of_quad(narrowing[half]), sink);
            const bool inside = half * 8 < left;
            if (inside && quarter == 0) *row_of<float>(launch.params.lse, work.b, work.h, row + half * 8) = done.lse;
            Out* out = row_of<Out>(launch.params.out, work.b, work.h, row + half * 8);
            store_row<COLUMNS>(out, &acc[half * 2], done.weight, quarter, inside, D_V);
            if constexpr (KEEPS_REMAINDER) {
                Element* remainder = row_of<Element>(launch.params.remainder, work.b, work.h, row + half * 8);
                store_row<COLUMNS, true>(remainder, &acc[half * 2], done.weight, quarter, inside, D_V);
            }
        }
    }

    // -- all items of a block -------------------------------------------------------------------------------------------
    __device__ __forceinline__ bool wait_for_item() {
        hw::mbarrier_wait(shared.item_full(items.stage), items.parity);
        hw::mbarrier_wait(shared.q_full(), q_ring.parity);
        return __shfl_sync(~0u, item().n_runs, 0) > 0;
    }
    __device__ __forceinline__ void run() {
        if (PING_PONG && number == WARPGROUPS - 1) pass_turn();  // the first one begins
        if (!wait_for_item()) return;
        begin_item();
        hw::mbarrier_wait(shared.k_full(k_ring.stage), k_ring.parity);
        take_turn();
        hw::wgmma_fence();
        multiply_q_k();
        pass_turn();
        hw::wgmma_wait<0>();
        hw::pin(rows.s);
        first_tile();
        skip_v();
        pack_p();
        while (true) {
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) acc[i] = 0;
#pragma unroll 1
            do {
                if (keys.kind == PARTIAL) {
#pragma unroll 1
                    while (keys.has_tile()) masked_step();
                } else {
#pragma unroll 1
                    while (keys.has_tile()) full_step();
                }
            } while (next_run());
            if (!Q_IN_REGISTERS) free_q();

            // The last product of this item beside the first of the next.
            const int done = items.stage;
            const float row_max[2] = {rows.row_max[0], rows.row_max[1]}, row_sum[2] = {rows.row_sum[0], rows.row_sum[1]};
            const float narrowing[2] = {rows.narrowing[0], rows.narrowing[1]};
            items.advance();
            const bool more = wait_for_item();
            if (more) {
                begin_item();
                begin_products();
                first_tile();
                wait_for_p_v();
                free_v();
                skip_v();
                pack_p();
            } else {
                hw::mbarrier_wait(shared.v_full(v_ring.stage), v_ring.parity);
                take_turn();
                hw::wgmma_fence();
                multiply_p_v();
                pass_turn();
                hw::wgmma_wait<0>();
                hw::pin(acc);
                free_v();
            }
            store(shared.item(done), row_max, row_sum, narrowing);
            shared.free_item(done);
            if (!more) return;
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
        if (warp == 0) Loader(launch, shared).run();
        if (warp == 1) Scheduler(launch, shared).run();
    } else {
        hw::registers_take<CONSUMER_REGISTERS>();
        Consumer(launch, shared, warpgroup - 1).run();
    }
}
