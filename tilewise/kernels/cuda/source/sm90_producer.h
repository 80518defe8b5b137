// The producer warpgroup: one warp makes items ready, another has the copy engine bring their tiles, as soon as consumers
// have freed their places.
#pragma once

struct Scheduler {
    const Launch& launch;
    const Shared& shared;
    const int lane;
    int made = 0;  // items, each in the next place of ITEMS

    __device__ __forceinline__ Scheduler(const Launch& launch, const Shared& shared)
        : launch(launch), shared(shared), lane(threadIdx.x % 32) {}
    __device__ __forceinline__ void run() {
        Ring<1> begun;
        for (int index = blockIdx.x; index < launch.items; index = fetch_next() + gridDim.x) {
            make_ready(index);
            // No item is taken before the last one is begun: another block may be free earlier.
            wait_together(shared.item_begun(), begun.parity);
            begun.advance();
        }
        Item& end = free_place();
        if (lane == 0) end.n_runs = 0;
        hw::mbarrier_arrive(shared.item_full(made % ITEMS));
        for (int i = max(made - ITEMS + 1, 0); i < made; i++) shared.wait_until_free(i % ITEMS);  // no barrier is left half full
    }
    __device__ __forceinline__ Item& free_place() const {
        if (made >= ITEMS) shared.wait_until_free(made % ITEMS);
        return shared.item(made % ITEMS);
    }

    // Each block begins with the item of its own number; the rest are taken in the order in which blocks ask. The last
    // to ask leaves 0 for the next launch.
    __device__ __forceinline__ int fetch_next() const {
        int fetched = 0;
        if (lane == 0) {
            fetched = atomicAdd(launch.next_item, 1);
            if (fetched == launch.items - 1) *launch.next_item = 0;
        }
        return __shfl_sync(~0u, fetched, 0);
    }

    // Each lane copies a word of the record, and says so; what depends on the head is filled in.
    __device__ __forceinline__ void make_ready(int index) {
        const Params& params = launch.params;
        const HeadAndTile at = in_turns(index, launch.items, params.tiles, launch.section, launch.sections);
        const int b = at.head / params.heads, h = at.head % params.heads;
        const int64 record = int64(b) * launch.record_batch + int64(h) * launch.record_head + at.tile;
        int word = launch.records[record * 32 + lane];
        if (lane == B_WORD) word = b;
        if (lane == B_WORD + 1) word = h;
        if (lane == B_WORD + 2) word = h / params.group;
        reinterpret_cast<int*>(&free_place())[lane] = word;
        hw::mbarrier_arrive(shared.item_full(made % ITEMS));
        made++;
    }
};

struct Loader {
    const Launch& launch;
    const Shared& shared;
    const int lane;
    Ring<1> q_ring;
    Ring<STAGES> k_ring, v_ring;
    Ring<ITEMS> items;
    Ring<1> tail_ring;
    Ring<TABLE_STAGES> table_ring;
    // The tile whose v is still to come: consumers need it a step after its k.
    int v_tile, v_row, v_left, v_head, v_batch;

    __device__ __forceinline__ Loader(const Launch& launch, const Shared& shared)
        : launch(launch), shared(shared), lane(threadIdx.x % 32), v_tile(-1) {
        q_ring.parity = k_ring.parity = v_ring.parity = table_ring.parity = 1;  // all places are free
    }

    __device__ __forceinline__ void run() {
        if (lane == 0) {
            hw::tma_prefetch(&launch.q);
            hw::tma_prefetch(&launch.k);
            hw::tma_prefetch(&launch.v);
            if (USES_TABLE) hw::tma_prefetch(&launch.table);
        }
        while (true) {
            wait_together(shared.item_full(items.stage), items.parity);
            const Item& item = shared.item(items.stage);
            const int n_runs = __shfl_sync(~0u, item.n_runs, 0);
            wait_together(shared.q_free(), q_ring.parity);
            if (n_runs == 0) break;
            if (lane == 0) hw::mbarrier_arrive(shared.item_begun());
            load_q(item.work);
#pragma unroll 1
            for (int i = n_runs - 1; i >= 0; i--) {
                const Run run = i < RUNS_AT_HAND ? item.runs[i] : launch.params.runs[item.first_run + i];
#pragma unroll 1
                for (int tile = run.last - 1; tile >= run.first; tile--) {
                    load_k(item.work, tile);
                    if (USES_TABLE) load_table(item.work, tile);
                    load_v();
                    v_is_next(item.work, tile);
                }
            }
            __syncwarp();
            shared.free_item(items.stage);
            items.advance();
        }
        load_v();
        if (lane == 0) hw::mbarrier_arrive(shared.q_full());
    }

    __device__ __forceinline__ void load_q(const Work& work) {
        if (lane == 0) {
            hw::mbarrier_arrive_expect(shared.q_full(), Q_BYTES);
            const int row = work.sequence.q_begin + work.first_query;
            for (int part = 0; part < Q_PARTS; part++)
                hw::tma_load_4d(shared.q() + part * TILE_Q * ROW_BYTES, &launch.q, shared.q_full(), part * PART, row, work.h,
                                work.b);
        }
        q_ring.advance();
    }

    __device__ __forceinline__ void load_k(const Work& work, int tile) {
        wait_together(shared.k_free(k_ring.stage), k_ring.parity);
        if (lane == 0) {
            const uint32 full = shared.k_full(k_ring.stage);
            hw::mbarrier_arrive_expect(full, K_BYTES);
            for (int part = 0; part < Q_PARTS; part++)
                hw::tma_load_4d(shared.k(k_ring.stage) + part * TILE_K * ROW_BYTES, &launch.k, full, part * PART,
                                work.sequence.k_begin + tile * TILE_K, work.hk, work.b);
        }
        k_ring.advance();
    }

    __device__ __forceinline__ void load_table(const Work& work, int tile) {
        wait_together(shared.table_free(table_ring.stage), table_ring.parity);
        if (lane == 0) {
            const uint32 full = shared.table_full(table_ring.stage);
            const int2 at = variant::table_at(variant::head(launch.params, work));
            const int key = work.sequence.origin_k + tile * TILE_K, query = work.sequence.origin_q + work.first_query;
            hw::mbarrier_arrive_expect(full, TABLE_BYTES);
            for (int part = 0; part < TABLE_PARTS; part++)
                hw::tma_load_4d(shared.table(table_ring.stage) + part * TILE_Q * ROW_BYTES, &launch.table, full,
                                key + part * TABLE_COLUMNS, query, at.x, at.y);
        }
        table_ring.advance();
    }

    __device__ __forceinline__ void v_is_next(const Work& work, int tile) {
        v_tile = tile;
        v_row = work.sequence.k_begin + tile * TILE_K;
        v_left = work.sequence.n_k - tile * TILE_K;
        v_head = work.hk;
        v_batch = work.b;
    }
    __device__ __forceinline__ void load_v() {
        if (v_tile < 0) return;
        wait_together(shared.v_free(v_ring.stage), v_ring.parity);
        const bool clears = launch.params.n_sequences > 1 && v_left < TILE_K;
        const uint32 full = shared.v_full(v_ring.stage), told = clears ? shared.v_tail() : full;
        if (lane == 0) {
            hw::mbarrier_arrive_expect(told, V_BYTES);
            for (int part = 0; part < V_PARTS; part++)
                hw::tma_load_4d(shared.v(v_ring.stage) + part * TILE_K * ROW_BYTES, &launch.v, told, part * PART, v_row,
                                v_head, v_batch);
        }
        if (clears) {
            wait_together(told, tail_ring.parity);
            tail_ring.advance();
            clear_rows<TILE_K, V_PARTS>(shared.memory + Shared::V + v_ring.stage * V_BYTES, v_left, lane);
            hw::fence_async();
            __syncwarp();
            if (lane == 0) hw::mbarrier_arrive(full);
        }
        v_ring.advance();
    }
};
