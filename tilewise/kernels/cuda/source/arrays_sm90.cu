// Gradients of arrays that a score reads, in Hopper's own way. A block walks tiles of scores (arrays.h) and adds them up in
// registers: two warpgroups, each with 64 queries, multiply s = q @ k.T and d_p = d_out @ v.T of tiles that the copy engine
// brings. What is loaded for one product, rows and columns together, is a slot of a ring: those of the next tile come while
// this one's scores become weights. A tile of the array that the score adds, if it is one of queries and keys, stays as long
// as the walk stays in it.
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
#include "sm90_tiles.h"
#include "sm90_table.h"
#include "arrays.h"

constexpr int WARPGROUPS = 2, CONSUMERS = WARPGROUPS * 128, THREADS = CONSUMERS + 128, CONSUMER_WARPS = CONSUMERS / 32;
static_assert(TILE_Q == WARPGROUPS * 64, "a warpgroup has 64 queries");
constexpr int SLOT_PARTS = Q_PARTS > V_PARTS ? Q_PARTS : V_PARTS;
constexpr int ROWS_BYTES = TILE_Q * SLOT_PARTS * ROW_BYTES, SLOT_BYTES = ROWS_BYTES + TILE_K * SLOT_PARTS * ROW_BYTES;
constexpr float LOG2_E = 1.4426950408889634f;

struct Launch {  // as in ../structs.py
    TensorMap q, k, v, d_out, table;
    Sums sums;
};

struct Shared {
    uint32 base;
    unsigned char* memory;

    static constexpr int TABLE = STAGES * SLOT_BYTES, BARRIERS = TABLE + (USES_TABLE ? TABLE_BYTES : 0),
                         TOLD = BARRIERS + 128, END = TOLD + 768;
    // The tile of a step, and how many tables it takes until then; EMPTY if there are no more. Steps are at most half as many
    // ahead as there are slots: what is told of one stays until it is over.
    struct Told {
        Place place;
        int tables;
    };
    static_assert(8 * (2 * STAGES + 2) <= TOLD - BARRIERS && STAGES * sizeof(Told) <= END - TOLD, "all have room");
    static_assert(END + 1024 == SHARED_BYTES, "as the host reckons it");

    __device__ __forceinline__ explicit Shared(unsigned char* given) {
        const uint32 at = hw::shared_address(given);
        base = (at + 1023) & ~1023u;  // what 128-byte swizzling needs
        memory = given + (base - at);
    }
    __device__ __forceinline__ uint32 rows(int stage) const { return base + stage * SLOT_BYTES; }  // q or d_out
    __device__ __forceinline__ uint32 columns(int stage) const { return rows(stage) + ROWS_BYTES; }  // k or v
    __device__ __forceinline__ Told& told(uint32 step) const { return reinterpret_cast<Told*>(memory + TOLD)[step % STAGES]; }
    __device__ __forceinline__ uint32 barrier(int i) const { return base + BARRIERS + 8 * i; }
    __device__ __forceinline__ uint32 full(int stage) const { return barrier(stage); }
    __device__ __forceinline__ uint32 free(int stage) const { return barrier(STAGES + stage); }
    __device__ __forceinline__ uint32 table_full() const { return barrier(2 * STAGES); }
    __device__ __forceinline__ uint32 table_free() const { return barrier(2 * STAGES + 1); }

    __device__ __forceinline__ void init_barriers() const {
        for (int stage = 0; stage < STAGES; stage++) {
            hw::mbarrier_init(full(stage), 1);
            hw::mbarrier_init(free(stage), CONSUMER_WARPS);
        }
        hw::mbarrier_init(table_full(), 1);
        hw::mbarrier_init(table_free(), CONSUMER_WARPS);
        hw::fence_mbarrier_init();
    }
    static constexpr int CONSUMERS_MEET = 1;  // a named barrier
};

// A tile of totals, four numbers more a row, so that neighbouring rows differ in banks.
struct Totals {
    static constexpr int STEP = TILE_K + 4;
    float* data;

    __device__ __forceinline__ float& at(int row, int column) const { return data[row * STEP + column]; }
    __device__ __forceinline__ float one(int row, int column) const { return at(row, column); }
};
static_assert(TILE_Q * Totals::STEP * 4 <= STAGES * SLOT_BYTES, "they have room");

// A warp that has the copy engine bring tiles.
struct Producer {
    const Launch& launch;
    const Shared& shared;
    const int lane;
    Ring<STAGES> ring;
    uint32 steps = 0;
    int tables = 0;  // that were loaded
    int2 at = {-1, -1}, tile = {-1, -1};  // the last of them: its other indices, and its queries and keys

    __device__ __forceinline__ Producer(const Launch& launch, const Shared& shared)
        : launch(launch), shared(shared), lane(threadIdx.x % 32) {
        ring.parity = 1;  // all places are free
    }

    __device__ __forceinline__ void run() {
        Walk walk(launch.sums, blockIdx.x);
        while (walk.next()) {
            const Place& place = walk.place;
            const bool changes = USES_TABLE && is_another_table(place);
            wait_together(shared.free(ring.stage), ring.parity);
            if (lane == 0) shared.told(steps++) = {place, tables + changes};
            load<Q_PARTS>(&launch.q, &launch.k, place);
            wait_together(shared.free(ring.stage), ring.parity);
            load<V_PARTS>(&launch.d_out, &launch.v, place);
            if (changes) load_table();
        }
        wait_together(shared.free(ring.stage), ring.parity);
        if (lane == 0) {
            shared.told(steps).place.kind = EMPTY;
            hw::mbarrier_arrive(shared.full(ring.stage));
        }
    }
    template <int PARTS>
    __device__ __forceinline__ void load(const TensorMap* rows, const TensorMap* columns, const Place& place) {
        const Work& work = place.work;
        if (lane == 0) {
            const uint32 full = shared.full(ring.stage);
            hw::mbarrier_arrive_expect(full, (TILE_Q + TILE_K) * PARTS * ROW_BYTES);
            for (int part = 0; part < PARTS; part++) {
                hw::tma_load_4d(shared.rows(ring.stage) + part * TILE_Q * ROW_BYTES, rows, full, part * PART,
                                work.sequence.q_begin + place.q_tile * TILE_Q, work.h, work.b);
                hw::tma_load_4d(shared.columns(ring.stage) + part * TILE_K * ROW_BYTES, columns, full, part * PART,
                                work.sequence.k_begin + place.k_tile * TILE_K, work.hk, work.b);
            }
        }
        ring.advance();
    }
    __device__ __forceinline__ bool is_another_table(const Place& place) {
        const int2 before = at, tile_before = tile;
        at = variant::table_at(variant::head(launch.sums.backward.params, place.work));
        const Sequence& sequence = place.work.sequence;
        tile = make_int2(sequence.origin_q + place.q_tile * TILE_Q, sequence.origin_k + place.k_tile * TILE_K);
        return at.x != before.x || at.y != before.y || tile.x != tile_before.x || tile.y != tile_before.y;
    }
    __device__ __forceinline__ void load_table() {
        wait_together(shared.table_free(), tables++ % 2 ^ 1);
        if (lane != 0) return;
        hw::mbarrier_arrive_expect(shared.table_full(), TABLE_BYTES);
        for (int part = 0; part < TABLE_PARTS; part++)
            hw::tma_load_4d(shared.base + Shared::TABLE + part * TILE_Q * ROW_BYTES, &launch.table, shared.table_full(),
                            tile.y + part * TABLE_COLUMNS, tile.x, at.x, at.y);
    }
};

// A warpgroup: 64 queries, of which a thread has two (g and g + 8 of its warp's 16). Of each eight keys it has two:
// s[n * 4 + half * 2 + e] is query g + half * 8, key n * 8 + lane % 4 * 2 + e.
struct Consumer {
    const Launch& launch;
    const Params& params;
    const Shared& shared;
    const int number, lane;
    Ring<STAGES> ring;
    uint32 steps = 0;
    int tables = 0;  // that were read
    float total[TILE_K / 2], s[TILE_K / 2], d_p[TILE_K / 2];

    __device__ __forceinline__ Consumer(const Launch& launch, const Shared& shared)
        : launch(launch), params(launch.sums.backward.params), shared(shared), number(threadIdx.x / 128),
          lane(threadIdx.x % 32) {}

    __device__ __forceinline__ int first_row() const { return number * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4; }
    __device__ __forceinline__ void arrive(uint32 bar) const {
        if (lane == 0) hw::mbarrier_arrive(bar);
    }

    __device__ __forceinline__ void run() {
#pragma unroll
        for (int i = 0; i < TILE_K / 2; i++) total[i] = 0;
        while (true) {
            wait_together(shared.full(ring.stage), ring.parity);
            if (__shfl_sync(~0u, shared.told(steps).place.kind, 0) == EMPTY) break;
            add(shared.told(steps).place);
            steps++;
        }
        store();
    }

    // One tile of scores.
    __device__ __forceinline__ void add(const Place& place) {
        const Saved saved[2] = {saved_of(place, 0), saved_of(place, 8)};
        // 2 s = q @ k.T, d_p = d_out @ v.T
        const int first = ring.stage;
        multiply<DEPTH>(s, first);
        ring.advance();
        const int second = ring.stage;
        wait_together(shared.full(second), ring.parity);
        multiply<COLUMNS>(d_p, second);
        ring.advance();
        if (USES_TABLE && tables < shared.told(steps).tables) take_table();
        hw::wgmma_wait<1>();
        hw::pin(s);
        arrive(shared.free(first));
        const bool is_masked = place.kind == PARTIAL || place.work.sequence.n_q - place.q_tile * TILE_Q < TILE_Q;
        if (is_masked) weigh<true>(place, saved);
        else weigh<false>(place, saved);
        hw::wgmma_wait<0>();
        hw::pin(d_p);
        arrive(shared.free(second));
        // A score of weight 0 passes nothing on: beyond a packed sequence its d_p may be anything.
#pragma unroll
        for (int i = 0; i < TILE_K / 2; i++) total[i] += s[i] == 0 ? 0.0f : s[i] * (d_p[i] - saved[i / 2 % 2].delta);
    }
    // Of a query, 0 beyond the last one.
    __device__ __forceinline__ Saved saved_of(const Place& place, int below) const {
        const int query = place.q_tile * TILE_Q + first_row() + below, row = place.work.sequence.q_begin + query;
        if (query >= place.work.sequence.n_q) return {0, 0};
        return {finite(*row_of<const float>(params.lse, place.work.b, place.work.h, row)),
                *row_of<const float>(launch.sums.backward.delta, place.work.b, place.work.h, row)};
    }
    template <int PRODUCT_DEPTH> __device__ __forceinline__ void multiply(float (&to)[TILE_K / 2], int stage) const {
        const uint64 a_at = swizzled_128(shared.rows(stage) + number * 64 * ROW_BYTES, 8 * ROW_BYTES, 16);
        const uint64 b_at = swizzled_128(shared.columns(stage), 8 * ROW_BYTES, 16);
        hw::wgmma_fence();
#pragma unroll
        for (int k = 0; k < PRODUCT_DEPTH / 16; k++) {
            const uint64 a = a_at + ((k / 4) * TILE_Q * ROW_BYTES + k % 4 * 32) / 16;
            const uint64 b = b_at + ((k / 4) * TILE_K * ROW_BYTES + k % 4 * 32) / 16;
            if (k == 0) hw::wgmma<TILE_K, false>(to, a, b);
            else hw::wgmma<TILE_K, true>(to, a, b);
        }
        hw::wgmma_commit();
    }
    // The table before is no longer read, as the step before is over.
    __device__ __forceinline__ void take_table() {
        if (tables > 0) arrive(shared.table_free());
        wait_together(shared.table_full(), tables++ % 2);
    }

    // 3 score
    // 4 mask (PARTIAL tiles only), and rows beyond the last query, which no mask tells
    // 5 p, times the slope of the score by its cell
    template <bool MASKED> __device__ __forceinline__ void weigh(const Place& place, const Saved (&saved)[2]) {
        const int first_key = place.k_tile * TILE_K + lane % 4 * 2;  // so that columns below are constants
        const int query = place.q_tile * TILE_Q + first_row();
        const variant::Head head = variant::head(params, place.work);
        const variant::RowInTile rows[2] = {variant::seen_from(variant::row(params, head, query), first_key),
                                            variant::seen_from(variant::row(params, head, query + 8), first_key)};
        const TableRows table{shared.memory + Shared::TABLE, first_row(), lane};
#pragma unroll
        for (int n = 0; n < TILE_K / 8; n++) {
            const variant::Key keys[2] = {variant::key(params, head, first_key, n * 8),
                                          variant::key(params, head, first_key, n * 8 + 1)};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const variant::RowInTile& row = rows[half];
                variant::Near near[2];
                read_cells(near, row, keys, table, n, half);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& held = s[n * 4 + half * 2 + e];
                    const float plain = held * params.scale;
                    const float x = variant::score(params, head, row, keys[e], near[e], plain);
                    float p = exp2_approximate(LOG2_E * (x - saved[half].shift));
                    if (MASKED && !(query + half * 8 < place.work.sequence.n_q &&
                                    (place.kind != PARTIAL || variant::mask(params, head, row, keys[e], near[e]))))
                        p = 0;
                    if (variant::HAS_SLOPE && p != 0) p *= variant::slope(params, head, row, keys[e], near[e], plain);
                    held = p;
                }
            }
        }
    }
    __device__ __forceinline__ void read_cells(variant::Near (&near)[2], const variant::RowInTile& row, const variant::Key (&keys)[2],
                                               const TableRows& table, int n, int half) const {
        variant::near_cells(row, keys[0], keys[1], near);
        if constexpr (USES_TABLE) {
            float cells[2];
            table.read_two(n, half, cells[0], cells[1]);
            variant::set_table_cell(near[0], cells[0]);
            variant::set_table_cell(near[1], cells[1]);
        }
    }

    // 7 finish: what was loaded is no longer read, and gives its place to the totals
    __device__ __forceinline__ void store() const {
        const Totals totals{reinterpret_cast<float*>(shared.memory)};
        hw::barrier_sync(Shared::CONSUMERS_MEET, CONSUMERS);
#pragma unroll
        for (int i = 0; i < TILE_K / 2; i++)
            totals.at(first_row() + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2) = total[i];
        hw::barrier_sync(Shared::CONSUMERS_MEET, CONSUMERS);
        const Walk walk(launch.sums, blockIdx.x);
        store_sums<CONSUMERS>(launch.sums, walk, totals);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ Launch launch) {
    SHARED_MEMORY(memory);
    const Shared shared(memory);
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();
    if (__shfl_sync(~0u, threadIdx.x / 128, 0) == WARPGROUPS) {
        hw::registers_give_back<PRODUCER_REGISTERS>();
        if (threadIdx.x / 32 == CONSUMER_WARPS) Producer(launch, shared).run();
    } else {
        hw::registers_take<CONSUMER_REGISTERS>();
        Consumer(launch, shared).run();
    }
}
