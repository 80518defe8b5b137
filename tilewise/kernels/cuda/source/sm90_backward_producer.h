// The producer warpgroup of Hopper's backward pass: two warps have the copy engine bring tiles, as soon as consumers have
// freed their places, and two hand it what they add to d_q.
#pragma once

// Where tiles are, looked up before there is room for them: each number is a way to memory and back.
struct QueryPlace {
    int first_query, left;
    const float* rows;

    __device__ __forceinline__ explicit QueryPlace(const Visits& at)
        : first_query(at.first_query()), left(at.queries_left()), rows(at.launch.rows + at.tile_of_all() * (2 * TILE_Q)) {}
};

// A warp that has the copy engine bring tiles: one takes items and brings k, q and what exponents are shifted by, the other v,
// d_out and what d_p begins with.
struct Loader {
    const Launch& launch;
    const Params& params;
    const Shared& shared;
    const int number, lane;
    uint32 items = 0, tails = 0;  // until now: places and parities follow from them
    Ring<1> table_ring;

    __device__ __forceinline__ Loader(const Launch& launch, const Shared& shared)
        : launch(launch), params(launch.backward.params), shared(shared), number(threadIdx.x / 32), lane(threadIdx.x % 32) {
        table_ring.parity = 1;  // its place is free
    }

    template <int ROWS, int PARTS>
    __device__ __forceinline__ void load(uint32 to, const TensorMap* map, uint32 full, int row, int h, int b, int left,
                                         const float* more = nullptr, uint32 more_to = 0) {
        const bool clears = params.n_sequences > 1 && left < ROWS;
        const uint32 told = clears ? shared.tail(number) : full;
        if (lane == 0) {
            hw::mbarrier_arrive_expect(told, ROWS * PARTS * ROW_BYTES + (more ? ROWS_BYTES : 0));
            for (int part = 0; part < PARTS; part++)
                hw::tma_load_4d(to + part * ROWS * ROW_BYTES, map, told, part * PART, row, h, b);
            if (more) hw::bulk_load(more_to, more, ROWS_BYTES, told);
        }
        if (!clears) return;
        wait_together(told, tails++ % 2);
        clear_rows<ROWS, PARTS>(shared.memory + (to - shared.base), left, lane);
        hw::fence_async();
        __syncwarp();
        tell_of(full);
    }
    __device__ __forceinline__ void tell_of(uint32 full) const {
        if (lane == 0) hw::mbarrier_arrive(full);
    }

    // In order, each by a block that runs: whatever this one will wait for was begun before. The last to ask leaves 0 for the
    // next launch.
    __device__ __forceinline__ int next_index() const {
        int index = 0;
        if (lane == 0) {
            index = atomicAdd(launch.next_item, 1);
            if (index == launch.items + int(gridDim.x) - 1) *launch.next_item = 0;
        }
        return __shfl_sync(~0u, index, 0);
    }
    __device__ __forceinline__ Shared::Item item_of(const Taken& at) const {
        const int heads_k = params.heads / params.group, b = at.head / heads_k, hk = at.head % heads_k;
        if (at.kind != KEYS) return {at.number, 0, b, hk, at.kind == ROWS ? Shared::OF_ROWS : Shared::OF_D_Q, 0, 0};
        const int number = sequence_of_tile(params.sequences, params.n_sequences, at.number);
        const Sequence& sequence = params.sequences[number];
        const int j = at.number - __ldg(&sequence.first_tile), first = j * TILE_K;
        return {j, number, b, hk, 0, __ldg(&sequence.k_begin) + first, __ldg(&sequence.n_k) - first};
    }

    // What scores of a query tile and a key tile read, if it is an array of queries and keys.
    __device__ __forceinline__ void load_table(const Visits& at, const Shared::Item& item) {
        Work work;
        work.sequence = params.sequences[item.sequence];
        work.b = item.b;
        work.h = at.h;
        work.hk = item.hk;
        work.tile = at.tile;
        work.first_query = at.tile * TILE_Q;
        const int2 others = variant::table_at(variant::head(params, work));
        wait_together(shared.table_free(), table_ring.parity);
        table_ring.advance();
        if (lane != 0) return;
        hw::mbarrier_arrive_expect(shared.table_full(), TABLE_BYTES);
        for (int part = 0; part < TABLE_PARTS; part++)
            hw::tma_load_4d(shared.table() + part * TILE_Q * ROW_BYTES, &launch.table, shared.table_full(),
                            work.sequence.origin_k + item.j * TILE_K + part * TABLE_COLUMNS,
                            work.sequence.origin_q + work.first_query, others.x, others.y);
    }

    // An item is taken once all queries of the one before are on their way, and looked up and told while they are met: it is
    // room for its keys that this one waits for then, and nothing else.
    __device__ __forceinline__ void bring_keys_and_queries() {
        Ring<Q_STAGES> q_ring;
        q_ring.parity = 1;  // all places are free
        while (true) {
            const int index = next_index();
            if (index >= launch.items) break;
            const Taken taken = taken_at(launch, index);
            if (taken.head < 0) continue;
            Shared::Item item = item_of(taken);
            if (taken.kind != KEYS) {
                tell(item);
                bring_nothing(shared.k_free(), shared.k_full());
                items++;
                continue;
            }
            Visits at(launch, item.sequence, item.b, item.hk, item.j);
            item.visits = count_of(at);
            tell(item);
            fetch_keys<K_PARTS>(&launch.k, item);
            bool is_met = at.next();
            QueryPlace place(at);
            await_rows(item);
            wait_together(shared.k_free(), items % 2 ^ 1);
            // 1 load k
            load<TILE_K, K_PARTS>(shared.k(), &launch.k, shared.k_full(), item.first_key, item.hk, item.b, item.left);
            // for each q tile of the schedule: q
            while (is_met) {
                wait_together(shared.q_free(q_ring.stage), q_ring.parity);
                volatile Shared::Meeting& meeting = shared.meeting(q_ring.stage);
                if (lane == 0) {
                    meeting.tile = at.tile;
                    meeting.h = at.h;
                    meeting.kind = at.kind;
                }
                load<TILE_Q, K_PARTS>(shared.q(q_ring.stage), &launch.q, shared.q_full(q_ring.stage), place.first_query, at.h,
                                      at.b, place.left, place.rows, shared.shift(q_ring.stage));
                q_ring.advance();
                if (USES_TABLE) load_table(at, item);
                is_met = at.next();
                place = QueryPlace(at);
            }
            items++;
        }
        tell({-1, 0, 0, 0, 0, 0, 0});
        bring_nothing(shared.k_free(), shared.k_full());
    }
    // The rows of its queries, which the copy engine is to bring.
    __device__ __forceinline__ void await_rows(const Shared::Item& item) const {
        if (lane == 0) {
            wait_until_ready(launch, item.b, item.hk);
            hw::fence_async_global();
        }
        __syncwarp();
    }
    // To a place of keys, or of values: that the item is there is all there is to know.
    __device__ __forceinline__ void bring_nothing(uint32 free, uint32 full) const {
        wait_together(free, items % 2 ^ 1);
        tell_of(full);
    }
    __device__ __forceinline__ void tell(const Shared::Item& item) const {
        const int place = items % 2;
        wait_together(shared.item_free(place), items / 2 % 2 ^ 1);
        if (lane != 0) return;
        volatile Shared::Item& told = shared.item(place);
        told.j = item.j;
        told.sequence = item.sequence;
        told.b = item.b;
        told.hk = item.hk;
        told.visits = item.visits;
        told.first_key = item.first_key;
        told.left = item.left;
        hw::mbarrier_arrive(shared.item_full(place));
    }
    // To the L2 cache, while there is no room for them yet.
    template <int PARTS> __device__ __forceinline__ void fetch_keys(const TensorMap* map, const Shared::Item& item) const {
        if (lane < PARTS) hw::tma_prefetch_4d(map, lane * PART, item.first_key, item.hk, item.b);
        __syncwarp();
    }

    __device__ __forceinline__ void bring_values() {
        Ring<O_STAGES> o_ring;
        o_ring.parity = 1;
        for (;; items++) {
            wait_together(shared.item_full(items % 2), items / 2 % 2);
            const Shared::Item item = shared.copy_of_item(items % 2);
            if (item.j < 0) return;
            __syncwarp();  // all lanes have read the item
            if (lane == 0) hw::mbarrier_arrive(shared.item_free(items % 2));
            if (item.visits < 0) {
                bring_nothing(shared.v_free(), shared.v_full());
                continue;
            }
            fetch_keys<O_PARTS>(&launch.v, item);
            Visits at(launch, item.sequence, item.b, item.hk, item.j);
            bool is_met = at.next();
            QueryPlace place(at);
            await_rows(item);
            wait_together(shared.v_free(), items % 2 ^ 1);
            // 1 load v
            load<TILE_K, O_PARTS>(shared.v(), &launch.v, shared.v_full(), item.first_key, item.hk, item.b, item.left);
            // for each q tile of the schedule: d_out
            while (is_met) {
                const int64 tile = at.tile_of_all();
                const int turn = !FIRST_STORES ? 1 : ORDERED ? turn_of(at) : min(turn_of(at), 1);
                wait_together(shared.d_out_free(o_ring.stage), o_ring.parity);
                if (lane == 0) {
                    shared.addition(o_ring.stage).tile = tile;
                    shared.addition(o_ring.stage).turn = turn;
                }
                load<TILE_Q, O_PARTS>(shared.d_out(o_ring.stage), &launch.d_out, shared.d_out_full(o_ring.stage),
                                      place.first_query, at.h, at.b, place.left, place.rows + TILE_Q,
                                      shared.delta(o_ring.stage));
                o_ring.advance();
                is_met = at.next();
                place = QueryPlace(at);
            }
        }
    }
};

// Two warps add d_q to the sums, each from a place of its own. One has even steps, the other odd ones: while one waits until it
// is this key tile's turn, or for the copy engine, the other's work goes on. Where heads are wide, each has a half of every
// step, and its place is for a piece at a time. The first key tile of a query tile need not add: nothing was there before. If
// there is no order, all others have the second turn; wide heads, whose storers have no time to wait, add to sums of 0.
// Who owes others a turn waits for nothing but the copy engine.
struct Storer {
    const Launch& launch;
    const Shared& shared;
    const int number;
    const bool leads;

    __device__ __forceinline__ Storer(const Launch& launch, const Shared& shared, int number)
        : launch(launch), shared(shared), number(number), leads(threadIdx.x % 32 == 0) {}

    __device__ __forceinline__ void run() const {
        uint32 step = WIDE ? 0 : number, steps = 0;  // the next of this one's, and all of the key tiles until now
        for (uint32 items = 0;; items++) {
            wait_together(shared.item_full(items % 2), items / 2 % 2);
            const Shared::Item item = shared.copy_of_item(items % 2);
            if (item.j < 0) return;
            __syncwarp();  // all lanes have read the item
            if (leads) hw::mbarrier_arrive(shared.item_free(items % 2));
            if (item.visits < 0) continue;
            steps += item.visits;
            for (; int(steps - step) > 0; step += WIDE ? 1 : 2) add(step);
            if (leads) tell_done(done_of(launch, item.b, item.hk));
            __syncwarp();
        }
    }
    __device__ __forceinline__ void add(uint32 step) const {
        const int stage = step % O_STAGES;
        wait_together(shared.d_out_full(stage), step / O_STAGES % 2);
        int64 tile = 0;  // or half of one
        int turn = 0;
        if (leads) {
            tile = shared.addition(stage).tile * TURNS + (WIDE ? number : 0);
            turn = shared.addition(stage).turn;
            hw::mbarrier_arrive(shared.d_out_free(stage));
            if (FIRST_STORES && turn > 0) take(launch.turns + tile, turn);
        }
        __syncwarp();
        for (int piece = 0; piece < PIECES; piece++) {
            hw::barrier_sync(Shared::d_q_written(number, piece), 160);
            if (leads) {
                add_piece(launch.sums + (tile * PIECES + piece) * (PIECE_BYTES / 4), shared.d_q(number, piece), turn == 0);
                if (WIDE || piece == PIECES - 1) let_go();
            }
            __syncwarp();
        }
        if ((ORDERED || turn == 0) && leads) tell_done(launch.turns + tile);
        __syncwarp();
    }
    __device__ __forceinline__ void add_piece(float* to, uint32 from, bool is_first) const {
        if (is_first) hw::bulk_store(to, from, PIECE_BYTES);
        else hw::bulk_add(to, from, PIECE_BYTES);
    }
    // When the copy engine has read it.
    __device__ __forceinline__ void let_go() const {
        hw::tma_store_commit();
        hw::tma_store_wait<0>();
        hw::mbarrier_arrive(shared.d_q_free(number));
    }
    __device__ __forceinline__ void take(const int* turns, int turn) const {
        hw::wait_for_number(turns, turn);
        hw::fence_async_global();
    }
    // One more of a number that others wait for, when what the copy engine was told is in memory: the next key tile's turn, or a
    // key tile that is done.
    __device__ __forceinline__ void tell_done(int* number) const {
        hw::bulk_wait_done<0>();
        hw::fence_async_global();
        hw::add_release(number, 1);
    }
};

template <class Consumer> __device__ __forceinline__ void produce_and_consume(const Launch& launch, unsigned char* memory) {
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
