// What the producer and the consumers of a Hopper kernel share: sizes, shared memory and its barriers, the item at hand.
#pragma once

#include "items.h"
#include "sm90_tiles.h"
#include "sm90_table.h"

constexpr int Q_BYTES = TILE_Q * Q_PARTS * ROW_BYTES, K_BYTES = TILE_K * Q_PARTS * ROW_BYTES,
              V_BYTES = TILE_K * V_PARTS * ROW_BYTES;
constexpr int WARPGROUPS = TILE_Q / 64, THREADS = (WARPGROUPS + 1) * 128, CONSUMER_WARPS = WARPGROUPS * 4;

struct Launch {  // as in ../structs.py
    TensorMap q, k, v, table;
    Params params;
    const int* records;  // an Item for each query tile, those with the most key tiles first, but for the head
    int record_batch, record_head;  // steps between the records of batch indices and heads whose plans differ
    int* next_item;  // which item a block takes when it is done with one; 0 before and after
    int items;  // query tiles of all heads
    int section, sections;  // heads whose tiles are taken in turns; how many sections: the last takes the rest
    float binary_scale;  // what makes a score as it is kept a power of 2
    float natural, natural_rest;  // what makes a power of 2 one of e, for lse, in two parts
};

constexpr int ITEMS = 4;  // one is stored, one computed, one loaded and one made ready at a time

struct Shared {
    uint32 base;
    unsigned char* memory;

    static constexpr int K = Q_BYTES, V = K + STAGES * K_BYTES, TABLE = V + STAGES * V_BYTES,
                         BARRIERS = TABLE + (USES_TABLE ? TABLE_STAGES * TABLE_BYTES : 0), ITEM = BARRIERS + 256,
                         END = BARRIERS + 1024;
    static_assert(8 * (4 + ITEMS + 4 * STAGES + 2 * TABLE_STAGES) <= ITEM - BARRIERS, "barriers have room");
    static_assert(ITEM + ITEMS * sizeof(Item) <= END && END + 1024 == SHARED_BYTES, "as the host reckons it");

    __device__ __forceinline__ explicit Shared(unsigned char* given) {
        const uint32 at = hw::shared_address(given);
        base = (at + 1023) & ~1023u;  // what 128-byte swizzling needs
        memory = given + (base - at);
    }
    __device__ __forceinline__ uint32 q() const { return base; }
    __device__ __forceinline__ uint32 k(int stage) const { return base + K + stage * K_BYTES; }
    __device__ __forceinline__ uint32 v(int stage) const { return base + V + stage * V_BYTES; }
    __device__ __forceinline__ uint32 table(int stage) const { return base + TABLE + stage * TABLE_BYTES; }
    __device__ __forceinline__ Item& item(int i) const { return reinterpret_cast<Item*>(memory + ITEM)[i]; }

    // A full barrier tells consumers that a tile is there, a free one tells the producer that it was read.
    __device__ __forceinline__ uint32 barrier(int i) const { return base + BARRIERS + 8 * i; }
    __device__ __forceinline__ uint32 q_full() const { return barrier(0); }
    __device__ __forceinline__ uint32 q_free() const { return barrier(1); }
    __device__ __forceinline__ uint32 v_tail() const { return barrier(2); }
    __device__ __forceinline__ uint32 item_begun() const { return barrier(3); }
    __device__ __forceinline__ uint32 k_full(int stage) const { return barrier(4 + stage); }
    __device__ __forceinline__ uint32 k_free(int stage) const { return barrier(4 + STAGES + stage); }
    __device__ __forceinline__ uint32 v_full(int stage) const { return barrier(4 + 2 * STAGES + stage); }
    __device__ __forceinline__ uint32 v_free(int stage) const { return barrier(4 + 3 * STAGES + stage); }
    __device__ __forceinline__ uint32 item_full(int i) const { return barrier(4 + 4 * STAGES + i); }
    __device__ __forceinline__ uint32 table_full(int stage) const { return barrier(4 + 4 * STAGES + ITEMS + stage); }
    __device__ __forceinline__ uint32 table_free(int stage) const { return table_full(TABLE_STAGES + stage); }

    __device__ __forceinline__ void init_barriers() const {
        hw::mbarrier_init(q_full(), 1);
        hw::mbarrier_init(q_free(), CONSUMER_WARPS);
        hw::mbarrier_init(v_tail(), 1);
        hw::mbarrier_init(item_begun(), 1);
        for (int stage = 0; stage < STAGES; stage++) {
            hw::mbarrier_init(k_full(stage), 1);
            hw::mbarrier_init(k_free(stage), CONSUMER_WARPS);
            hw::mbarrier_init(v_full(stage), 1);
            hw::mbarrier_init(v_free(stage), CONSUMER_WARPS);
        }
        for (int stage = 0; stage < TABLE_STAGES; stage++) {
            hw::mbarrier_init(table_full(stage), 1);
            hw::mbarrier_init(table_free(stage), CONSUMER_WARPS);
        }
        for (int i = 0; i < ITEMS; i++) hw::mbarrier_init(item_full(i), 32);
        hw::fence_mbarrier_init();
    }

    // Whoever has read an item says so at a named barrier, where the scheduler waits: a warp at a time, at no cost.
    static constexpr int FREE_ITEM = WARPGROUPS + 1, READERS_AND_SCHEDULER = (CONSUMER_WARPS + 2) * 32;
    __device__ __forceinline__ static void free_item(int i) { hw::barrier_arrive(FREE_ITEM + i, READERS_AND_SCHEDULER); }
    __device__ __forceinline__ static void wait_until_free(int i) { hw::barrier_sync(FREE_ITEM + i, READERS_AND_SCHEDULER); }
};

// The key tiles of an item, from the last to the first: a causal row meets its masked tiles, and its nearest keys, first.
struct KeyTiles {
    int run, tile, first, kind;

    __device__ __forceinline__ bool next_run(const Params& params, const Item& item, int warpgroup) {
        if (--run < 0) return false;
        const Run now = run < RUNS_AT_HAND ? item.runs[run] : params.runs[item.first_run + run];
        tile = __shfl_sync(~0u, now.last, 0);
        first = __shfl_sync(~0u, now.first, 0);
        kind = __shfl_sync(~0u, now.kind, 0) >> 2 * warpgroup & 3;
        return true;
    }
    __device__ __forceinline__ bool has_tile() const { return tile > first; }
    __device__ __forceinline__ int take_tile() { return --tile; }
};
