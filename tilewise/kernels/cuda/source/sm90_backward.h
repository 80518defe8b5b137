// What the kernels of Hopper's backward pass share: what they are told, shared memory and its barriers, and which query
// tiles a key tile meets.
#pragma once

#include "sm90_tiles.h"

// Two warpgroups compute, each with 64 keys. If heads are wide, they have the same 64 keys, and each half of the columns.
constexpr int WARPGROUPS = 2, THREADS = (WARPGROUPS + 1) * 128, CONSUMER_WARPS = WARPGROUPS * 4;
constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
constexpr bool WIDE = TILE_K == 64;
static_assert(WIDE ? TILE_Q == 64 : TILE_K == 128 && (TILE_Q == 64 || TILE_Q == 128), "as warpgroups share them");
constexpr int QUERIES = WIDE ? TILE_Q / 2 : TILE_Q;  // of which a warpgroup has scores

// Columns are halved, so that three parts count as four: what is beyond the last is 0.
__host__ __device__ constexpr int halved(int parts) { return parts == 3 ? 4 : parts; }
constexpr int K_PARTS = halved(Q_PARTS), O_PARTS = halved(V_PARTS);  // of q and k, of d_out and v
constexpr int K_BYTES = TILE_K * K_PARTS * ROW_BYTES, V_BYTES = TILE_K * O_PARTS * ROW_BYTES,
              Q_BYTES = TILE_Q * K_PARTS * ROW_BYTES, O_BYTES = TILE_Q * O_PARTS * ROW_BYTES,
              S_BYTES = TILE_Q * TILE_K * 2, ROWS_BYTES = TILE_Q * 4;
constexpr int Q_STAGES = 2, O_STAGES = WIDE ? 1 : 2;
constexpr int TABLE_TILE_BYTES = USES_TABLE ? TILE_Q * TILE_K * 2 : 0;  // cells of 2 bytes that scores read
// d_q of a step: a warpgroup has half of it, 64 of 128 queries, or of 64 queries half of the columns. It goes to its sums by
// halves, or, if heads are wide, by quarters.
constexpr bool HALVES_QUERIES = TILE_Q == 128;
constexpr int HALF = HALVES_QUERIES ? K_PARTS * PART : K_PARTS * PART / 2;
constexpr int PIECES = 2, PIECE = WIDE ? HALF / 2 : HALF;  // that a storer takes one after the other
constexpr int HALF_BYTES = 64 * HALF * 4, PIECE_BYTES = 64 * PIECE * 4;
// Storers have both halves of every second step, or, if heads are wide, a half of every step, its pieces in one place.
constexpr int TURNS = WIDE ? 2 : 1;  // of each query tile: wide heads' halves have their own
// Whether the first key tile of a query tile stores its part of d_q, for which the others wait, or all add to sums of 0.
constexpr bool FIRST_STORES = ORDERED || !WIDE;
constexpr float LOG2_E = 1.4426950408889634f;

struct Launch {  // as in ../structs.py
    TensorMap q, k, v, d_out, d_q, d_k, d_v, table;
    Backward backward;  // its plan is by keys
    const Sequence* sequences;  // the same plan by queries
    const int* offsets;
    const Run* runs;
    float* rows;  // of each query tile of each head: -lse, by which exponents are shifted, then -delta, with which d_p begins
    float* sums;  // of each query tile of each head: d_q / scale, in the order in which threads hold it
    int* turns;  // of each of those, or of each half: how many key tiles were added; without an order, whether one was
    int* counts;  // of each key head, 0 at first: two for each share of its rows that is there; two for each key tile whose
                  // part of d_q is in the sums
    int q_tiles, offsets_apart;  // query tiles of all sequences; from one tile's offsets to the next one's, in both plans
    int* next_item;
    int items, section, sections, heads;  // as in sm90.h, of key heads; items are key tiles, and shares of d_q
    int share, shares, behind;  // query tiles of a share, shares of a key head; sections from its key tiles to its d_q
    int ahead;  // heads whose rows come before all key tiles
};

// A query tile of one head, in the count of all; `tile` counts those of all sequences.
__device__ __forceinline__ int64 tile_of(const Launch& launch, int b, int h, int tile) {
    return (int64(b) * launch.backward.params.heads + h) * launch.q_tiles + tile;
}

// Of a key head: where it is counted which shares of its rows are ready, of which two warpgroups tell, and which of its key
// tiles are done, of each of which two storers tell.
__device__ __forceinline__ int* ready_of(const Launch& launch, int b, int hk) {
    const Params& params = launch.backward.params;
    return launch.counts + 2 * (b * (params.heads / params.group) + hk);
}
__device__ __forceinline__ int* done_of(const Launch& launch, int b, int hk) { return ready_of(launch, b, hk) + 1; }
__device__ __forceinline__ void wait_until_ready(const Launch& launch, int b, int hk) {
    hw::wait_for_number(ready_of(launch, b, hk), 2 * launch.shares);
}

// What a block takes: a key tile of a key head, or a share of its queries' rows, before, or of its d_q, behind. Rows of the first
// heads come first. Then the heads of a section take turns, their key tiles in order; around these come the rows of as many
// later heads, and d_q of a section before, whose key tiles should be done by now, or, if it is the last, of all that are left.
// The first sections have none before them, and to the last rows nothing is left: then there is nothing to do.
enum Work_kind { KEYS, ROWS, D_QUERY };
struct Taken {
    int head, number, kind;
};
__device__ __forceinline__ Taken taken_at(const Launch& launch, int index) {
    const int tiles = launch.backward.params.tiles, section = launch.section, shares = launch.shares;
    if (index < launch.ahead * shares) return {index / shares, index % shares, ROWS};
    index -= launch.ahead * shares;
    const int apart = section * (tiles + 2 * shares), number = min(index / apart, launch.sections - 1);
    const bool is_last = number == launch.sections - 1;
    const int before = number * section, here = is_last ? launch.heads - before : section;
    int rest = index - number * apart;
    if (!is_last && rest < section * shares) {
        const int head = launch.ahead + before + rest / shares;
        return {head < launch.heads ? head : -1, rest % shares, ROWS};
    }
    if (!is_last) rest -= section * shares;
    const int of_d_q = rest - here * tiles;
    if (of_d_q < 0) return {before + rest % here, rest / here, KEYS};
    return {before - launch.behind * section + of_d_q / shares, of_d_q % shares, D_QUERY};
}

// The query tiles that a key tile meets, head by head of its group, each from the last to the first. All key tiles go the
// same way, so that each comes to a query tile after those before it did.
struct Visits {
    const Launch& launch;
    int sequence, b, j, h, last_head;
    int run, first_run, tile, first, kind;

    __device__ __forceinline__ Visits(const Launch& launch, int sequence, int b, int hk, int j)
        : launch(launch), sequence(sequence), b(b), j(j), h(hk * launch.backward.params.group - 1),
          last_head(h + launch.backward.params.group), run(0), first_run(0), tile(0), first(0), kind(EMPTY) {}
    __device__ __forceinline__ bool next() {
        while (tile == first) {
            while (run == first_run) {
                if (h == last_head) return false;
                h++;
                const int* offsets = offsets_of(launch.backward.params.sequences, launch.backward.params.offsets, j);
                first_run = __ldg(offsets);
                run = __ldg(offsets + 1);
            }
            const Run* const now = launch.backward.params.runs + --run;
            first = __ldg(&now->first);
            tile = __ldg(&now->last);
            kind = __ldg(&now->kind);
        }
        tile--;
        return true;
    }
    // Where a plan has the runs of a tile of this sequence and head. Plans do not change while kernels follow them: they are
    // read by __ldg, for acquiring a turn empties the multiprocessor's cache of what is read otherwise.
    __device__ __forceinline__ const int* offsets_of(const Sequence* sequences, const int* offsets, int of) const {
        const Sequence& here = sequences[sequence];
        const int64 at = __ldg(&here.offsets) + int64(b) * __ldg(&here.offsets_batch) +
                         int64(h) * __ldg(&here.offsets_head) + of;
        return offsets + at * launch.offsets_apart;
    }
    __device__ __forceinline__ int first_query() const {
        return __ldg(&launch.backward.params.sequences[sequence].q_begin) + tile * TILE_Q;
    }
    __device__ __forceinline__ int queries_left() const {
        return __ldg(&launch.backward.params.sequences[sequence].n_q) - tile * TILE_Q;
    }
    __device__ __forceinline__ int64 tile_of_all() const {
        return tile_of(launch, b, h, __ldg(&launch.sequences[sequence].first_tile) + tile);
    }
};

__device__ __forceinline__ int count_of(Visits at) {
    int count = 0;
    while (at.next()) {
        count += at.tile + 1 - at.first;
        at.tile = at.first;
    }
    return count;
}

// How many key tiles before this one meet the query tile.
__device__ __forceinline__ int turn_of(const Visits& at) {
    const int* offsets = at.offsets_of(at.launch.sequences, at.launch.offsets, at.tile);
    int before = 0;
    for (int r = __ldg(offsets); r < __ldg(offsets + 1); r++) {
        const Run* const run = at.launch.runs + r;
        before += max(min(at.j, __ldg(&run->last)) - __ldg(&run->first), 0);
    }
    return before;
}

struct Shared {
    uint32 base;
    unsigned char* memory;

    static constexpr int V = K_BYTES, Q = V + V_BYTES, D_OUT = Q + Q_STAGES * Q_BYTES,
                         D_S = D_OUT + O_STAGES * O_BYTES, P = D_S + S_STAGES * S_BYTES, D_Q = P + (WIDE ? S_BYTES : 0),
                         TABLE = D_Q + (WIDE ? 2 : 4) * PIECE_BYTES, SHIFT = TABLE + TABLE_TILE_BYTES,
                         DELTA = SHIFT + Q_STAGES * ROWS_BYTES,
                         BARRIERS = DELTA + O_STAGES * ROWS_BYTES, ITEM = BARRIERS + 192, MEETING = ITEM + 64,
                         ADDITION = MEETING + 64, END = BARRIERS + 384;

    __device__ __forceinline__ explicit Shared(unsigned char* given) {
        const uint32 at = hw::shared_address(given);
        base = (at + 1023) & ~1023u;  // what 128-byte swizzling needs
        memory = given + (base - at);
    }
    __device__ __forceinline__ uint32 k() const { return base; }
    __device__ __forceinline__ uint32 v() const { return base + V; }
    __device__ __forceinline__ uint32 q(int stage) const { return base + Q + stage * Q_BYTES; }
    __device__ __forceinline__ uint32 d_out(int stage) const { return base + D_OUT + stage * O_BYTES; }
    __device__ __forceinline__ uint32 d_s(int stage) const { return base + D_S + stage * S_BYTES; }
    __device__ __forceinline__ uint32 p() const { return base + P; }
    __device__ __forceinline__ uint32 d_q(int storer, int piece) const {
        return base + D_Q + (WIDE ? storer : storer * 2 + piece) * PIECE_BYTES;
    }
    __device__ __forceinline__ uint32 table() const { return base + TABLE; }
    __device__ __forceinline__ uint32 shift(int stage) const { return base + SHIFT + stage * ROWS_BYTES; }
    __device__ __forceinline__ uint32 delta(int stage) const { return base + DELTA + stage * ROWS_BYTES; }

    // A key tile: which one of which sequence and key head, how many query tiles it meets, which key of all is its first, and
    // how many are left from there on; -1 if there are no more. Or a share of rows or of d_q, that one of the key head's, with OF_ROWS
    // or OF_D_Q for visits. There is room for the one at hand and for the next. The query tile at hand, of each stage of q. And of each stage of d_out,
    // where what is added to d_q goes, and after how many other key tiles'.
    static constexpr int OF_D_Q = -1, OF_ROWS = -2;
    struct Item {
        int j, sequence, b, hk, visits, first_key, left;
    };
    struct Meeting {
        int tile, h, kind, unused;
    };
    struct Addition {
        int64 tile;
        int turn, unused;
    };
    static_assert(2 * sizeof(Item) <= MEETING - ITEM && Q_STAGES * sizeof(Meeting) <= ADDITION - MEETING &&
                  O_STAGES * sizeof(Addition) <= END - ADDITION, "all have room");
    __device__ __forceinline__ volatile Item& item(int place) const {
        return reinterpret_cast<volatile Item*>(memory + ITEM)[place];
    }
    __device__ __forceinline__ Item copy_of_item(int place) const {
        const volatile Item& at = item(place);
        return {at.j, at.sequence, at.b, at.hk, at.visits, at.first_key, at.left};
    }
    __device__ __forceinline__ volatile Meeting& meeting(int stage) const {
        return reinterpret_cast<volatile Meeting*>(memory + MEETING)[stage];
    }
    __device__ __forceinline__ volatile Addition& addition(int stage) const {
        return reinterpret_cast<volatile Addition*>(memory + ADDITION)[stage];
    }

    __device__ __forceinline__ uint32 barrier(int i) const { return base + BARRIERS + 8 * i; }
    __device__ __forceinline__ uint32 v_full() const { return barrier(0); }
    __device__ __forceinline__ uint32 v_free() const { return barrier(1); }
    __device__ __forceinline__ uint32 k_full() const { return barrier(2); }
    __device__ __forceinline__ uint32 k_free() const { return barrier(3); }
    __device__ __forceinline__ uint32 d_s_free() const { return barrier(4); }
    __device__ __forceinline__ uint32 q_full(int stage) const { return barrier(5 + stage); }
    __device__ __forceinline__ uint32 q_free(int stage) const { return barrier(7 + stage); }
    __device__ __forceinline__ uint32 d_out_full(int stage) const { return barrier(9 + stage); }
    __device__ __forceinline__ uint32 d_out_free(int stage) const { return barrier(11 + stage); }
    __device__ __forceinline__ uint32 tail(int loader) const { return barrier(13 + loader); }
    __device__ __forceinline__ uint32 d_q_free(int storer) const { return barrier(15 + storer); }
    __device__ __forceinline__ uint32 table_full() const { return barrier(17); }
    __device__ __forceinline__ uint32 table_free() const { return barrier(18); }
    __device__ __forceinline__ uint32 item_full(int place) const { return barrier(19 + place); }
    __device__ __forceinline__ uint32 item_free(int place) const { return barrier(21 + place); }

    __device__ __forceinline__ void init_barriers() const {
        hw::mbarrier_init(v_full(), 1);
        hw::mbarrier_init(v_free(), CONSUMER_WARPS);
        hw::mbarrier_init(k_full(), 1);
        hw::mbarrier_init(k_free(), CONSUMER_WARPS);
        hw::mbarrier_init(d_s_free(), CONSUMER_WARPS);
        hw::mbarrier_init(table_full(), 1);
        hw::mbarrier_init(table_free(), CONSUMER_WARPS);
        for (int stage = 0; stage < 2; stage++) {
            hw::mbarrier_init(q_full(stage), 1);
            hw::mbarrier_init(q_free(stage), CONSUMER_WARPS);
            hw::mbarrier_init(d_out_full(stage), 1);
            hw::mbarrier_init(d_out_free(stage), CONSUMER_WARPS + TURNS);  // and the storers that read the addition
            hw::mbarrier_init(tail(stage), 1);
            hw::mbarrier_init(d_q_free(stage), 1);
            hw::mbarrier_init(item_full(stage), 1);
            hw::mbarrier_init(item_free(stage), 3);  // who reads it beside consumers: the loader of v, two storers
        }
        hw::fence_mbarrier_init();
    }

    // Named barriers: both warpgroups have written their d_s; a piece of d_q for a storer; what a warpgroup stores by way of
    // shared memory.
    static constexpr int D_S_WRITTEN = 1;
    static __device__ __forceinline__ int d_q_written(int storer, int piece) { return 2 + storer * 2 + piece; }
    static __device__ __forceinline__ int to_store(int warpgroup) { return 6 + warpgroup; }
};
