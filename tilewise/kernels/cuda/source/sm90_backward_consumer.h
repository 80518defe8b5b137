// A consumer warpgroup of Hopper's backward pass: key tile after key tile, it meets the query tiles that the producer brings.
// What both kernels do with scores is here, from a query tile's arrival to p and d_s; what they make of these is their own.
#pragma once

static_assert(!USES_TABLE || TABLE_BYTES == TABLE_TILE_BYTES, "cells of 2 bytes");
constexpr bool SCORED = variant::HAS_SCORE || !RAW_SCORES;  // whether scores change before the softmax, in every tile

// Of 64 keys a thread has two (g and g + 8 of its warp's 16). Of each eight queries it has two:
// s[n * 4 + half * 2 + e] is key g + half * 8, query n * 8 + lane % 4 * 2 + e.
struct Scores {
    const Launch& launch;
    const Params& params;
    const Shared& shared;
    const int number, lane;
    uint32 keys = 0, steps = 0;  // key tiles and query tiles until now: stages and parities follow from them
    float s[QUERIES / 2], d_p[QUERIES / 2];
    float plain[variant::HAS_SLOPE ? QUERIES / 2 : 1];  // scores as they were, for their slopes
    uint32 p[QUERIES / 16][4], d_s[QUERIES / 16][4];  // narrowed, as products take them from registers
    // Of groups of eight queries: whose shifts are read ahead, and whose exponentials do not wait for d_p; the others' run beside
    // what makes d_s of it. How many is found by trying: registers have room for few.
    static constexpr int AHEAD = WIDE ? 0 : QUERIES / 16, SOONER = QUERIES == 128 ? 6 : 4;
    float2 shifts[AHEAD + 1];
    // Of v's columns, by 16: those that wide heads, whose products read the most of shared memory, hold in registers.
    static constexpr int HELD = !WIDE ? 0 : COLUMNS / 16 < 8 ? COLUMNS / 16 : 8;
    uint32 v[HELD + 1][4];
    bool is_partial = false;  // the query tile at hand

    __device__ __forceinline__ Scores(const Launch& launch, const Shared& shared, int number)
        : launch(launch), params(launch.backward.params), shared(shared), number(number), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ void arrive(uint32 bar) const {
        if (lane == 0) hw::mbarrier_arrive(bar);
    }
    // Of the warpgroup and of the warp, in the tile.
    __device__ __forceinline__ int first_query() const { return WIDE ? number * QUERIES : 0; }
    __device__ __forceinline__ int first_of_64() const { return WIDE ? 0 : number * 64; }
    __device__ __forceinline__ int first_row() const { return first_of_64() + threadIdx.x / 32 % 4 * 16; }
    __device__ __forceinline__ int first_key() const { return first_row() + lane / 4; }
    // Stages of the query tile at hand.
    __device__ __forceinline__ int q_stage() const { return steps % Q_STAGES; }
    __device__ __forceinline__ int d_out_stage() const { return steps % O_STAGES; }
    __device__ __forceinline__ uint32 d_s_tile() const { return shared.d_s(steps % S_STAGES); }
    __device__ __forceinline__ volatile Shared::Item& item() const { return shared.item(keys % 2); }
    // The same for all lanes, as the compiler knows by this: where operands lie is then reckoned once a warp.
    __device__ __forceinline__ void next_step() { steps = __shfl_sync(~0u, steps + 1, 0); }

    __device__ __forceinline__ void hold_v() {
        const int row = first_row() + lane % 16;
#pragma unroll
        for (int k = 0; k < HELD; k++)
            hw::load_matrices(v[k], shared.v() + (k / 4 * TILE_K + row) * ROW_BYTES + ((k % 4 * 2 + lane / 16) ^ row % 8) * 16);
    }
    // 2 s = k @ q.T, d_p = v @ d_out.T: of this warpgroup's keys and queries; some columns of v are held
    template <int PARTS_DEPTH, bool ADD, int HELD>
    __device__ __forceinline__ void multiply_rows(float (&to)[QUERIES / 2], uint32 keys, uint32 queries) const {
        const uint64 a_at = swizzled_128(hw::anew(keys) + first_of_64() * ROW_BYTES, 8 * ROW_BYTES, 16);
        const uint64 b_at = swizzled_128(hw::anew(queries) + first_query() * ROW_BYTES, 8 * ROW_BYTES, 16);
#pragma unroll
        for (int k = 0; k < PARTS_DEPTH / 16; k++) {
            const uint64 a = further(a_at, k / 4 * TILE_K * ROW_BYTES + k % 4 * 32);
            const uint64 b = further(b_at, k / 4 * TILE_Q * ROW_BYTES + k % 4 * 32);
            if (k < HELD) hw::wgmma<QUERIES, true>(to, v[k], b);
            else if (k == 0) hw::wgmma<QUERIES, ADD>(to, a, b);
            else hw::wgmma<QUERIES, true>(to, a, b);
        }
        hw::wgmma_commit();
    }
    // s is on its way before anything of d_out is looked at.
    __device__ __forceinline__ void begin_s_and_d_p() {
        hw::mbarrier_wait(shared.q_full(q_stage()), steps / Q_STAGES % 2);
        hw::wgmma_fence();
        multiply_rows<DEPTH, false, 0>(s, shared.k(), shared.q(q_stage()));
        is_partial = shared.meeting(q_stage()).kind == PARTIAL;
        if (QUERIES == 64) read_ahead();
        hw::mbarrier_wait(shared.d_out_full(d_out_stage()), steps / O_STAGES % 2);
        if (WIDE) clear_to_delta();
        hw::wgmma_fence();
        multiply_rows<COLUMNS, WIDE, HELD>(d_p, shared.v(), shared.d_out(d_out_stage()));
    }
    // The numbers of two neighbouring queries.
    __device__ __forceinline__ float2 two_of(uint32 rows, int n) const {
        return *reinterpret_cast<const float2*>(shared.memory + (rows - shared.base) +
                                                (first_query() + n * 8 + lane % 4 * 2) * 4);
    }
    // Of all keys each query's -delta, to which products are added. Before it is set the compiler waits for s, which wide heads
    // can afford: their s is short.
    __device__ __forceinline__ void clear_to_delta() {
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const float2 delta = two_of(shared.delta(d_out_stage()), n);
            d_p[n * 4] = d_p[n * 4 + 2] = delta.x;
            d_p[n * 4 + 1] = d_p[n * 4 + 3] = delta.y;
        }
        hw::pin(d_p);
    }
    // 3 score
    // 4 mask (PARTIAL tiles only)
    // 5 p, d_s. Rows that see no key, and those beyond the last query, are shifted by infinity: their weights are 0.
    __device__ __forceinline__ Work work() const {
        const volatile Shared::Item& item = this->item();
        const volatile Shared::Meeting& meeting = shared.meeting(q_stage());
        Work work;
        work.sequence = params.sequences[item.sequence];
        work.b = item.b;
        work.h = meeting.h;
        work.hk = item.hk;
        work.tile = meeting.tile;
        work.first_query = meeting.tile * TILE_Q;
        return work;
    }
    // What a variant knows before it sees a score.
    struct Seen {
        int n_q;
        variant::Head head;
    };
    __device__ __forceinline__ Seen look() const {
        const Work work = this->work();
        return {work.sequence.n_q, variant::head(params, work)};
    }
    // For each of the thread's scores, with the query's and the key's values of the variant.
    template <class Act> __device__ __forceinline__ void for_each(const Seen& seen, Act act) {
        const int first = shared.meeting(q_stage()).tile * TILE_Q + first_query(), tile = item().j * TILE_K;
        const variant::Key key[2] = {variant::key(params, seen.head, tile, first_key()),
                                     variant::key(params, seen.head, tile, first_key() + 8)};
        uint32 cells[4];
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            if (USES_TABLE && n % 2 == 0) read_cells(cells, n);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int query = first + n * 8 + lane % 4 * 2 + e;
                const variant::RowInTile row = variant::seen_from(variant::row(params, seen.head, query), tile);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    variant::Near near = variant::near_cells(row, key[half]);
                    if (USES_TABLE) variant::set_table_cell(near, one_of(cells[n % 2 * 2 + half], e));
                    act(n * 4 + half * 2 + e, query, row, key[half], near);
                }
            }
        }
    }
    // Of 16 queries from n * 8 on, and of the warp's keys: cells[m * 2 + half] has two, of queries (n + m) * 8 + lane % 4 * 2 and
    // the next, and of key g + half * 8. The copy engine has brought them queries down; they are turned as they are loaded.
    __device__ __forceinline__ void read_cells(uint32 (&cells)[4], int n) const {
        const int key = first_row() + lane / 8 % 2 * 8, query = first_query() + n * 8 + lane / 16 * 8 + lane % 8;
        const uint32 row = shared.table() + (key / TABLE_COLUMNS * TILE_Q + query) * ROW_BYTES;
        hw::load_matrices_turned(cells, row + ((key % TABLE_COLUMNS / 8) ^ query % 8) * 16);
    }
    __device__ __forceinline__ float one_of(const uint32& two, int which) const {
        return widen(reinterpret_cast<const variant::TableCell*>(&two)[which]);
    }
    // Of what is beyond the last query, a variant may make anything.
    __device__ __forceinline__ void score(const Seen& seen) {
        const variant::Head& head = seen.head;
        for_each(seen, [&](int i, int query, const variant::RowInTile& row, const variant::Key& key, const variant::Near& near) {
            if (SCORED) s[i] = variant::score(params, head, row, key, near, s[i] * params.scale);
            if (query >= seen.n_q || (is_partial && !variant::mask(params, head, row, key, near))) s[i] = -INFINITY;
        });
    }
    // lse is subtracted first: as a power of 2 it would be rounded, by much where scores are large. Nor may products be added
    // to it: it is of scores that were rounded as these are.
    __device__ __forceinline__ void exponentiate(int k) {
        const float scale = SCORED ? 1.0f : params.scale;
#pragma unroll
        for (int n = 2 * k; n < 2 * k + 2; n++) {
            const float2 shift = n < AHEAD ? shifts[n] : two_of(shared.shift(q_stage()), n);
#pragma unroll
            for (int i = n * 4; i < n * 4 + 4; i++)
                s[i] = exp2_approximate(LOG2_E * fmaf(s[i], scale, i % 2 ? shift.y : shift.x));
        }
    }
    // d_s takes the place of s, of 16 queries. Wide heads' d_p has delta subtracted.
    __device__ __forceinline__ void weigh(int k) {
#pragma unroll
        for (int n = 2 * k; n < 2 * k + 2; n++) {
            const float2 delta = two_of(shared.delta(d_out_stage()), n);
#pragma unroll
            for (int i = n * 4; i < n * 4 + 4; i++) s[i] *= WIDE ? d_p[i] : d_p[i] + (i % 2 ? delta.y : delta.x);
        }
    }
    __device__ __forceinline__ void multiply_by_slopes() {
        if constexpr (variant::HAS_SLOPE) {
            const Seen seen = look();
            for_each(seen, [&](int i, int, const variant::RowInTile& row, const variant::Key& key, const variant::Near& near) {
                if (s[i] != 0) s[i] *= variant::slope(params, seen.head, row, key, near, plain[i]);
            });
        }
    }
    // s of 16 queries, narrowed.
    __device__ __forceinline__ void pack(uint32 (&to)[4], int k) const {
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = hw::packed<Element>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    }
    __device__ __forceinline__ void pack_p() {
#pragma unroll
        for (int k = 0; k < QUERIES / 16; k++) pack(p[k], k);
    }
    // Before they are needed: shared memory answers after all products that were issued before.
    __device__ __forceinline__ void read_ahead() {
#pragma unroll
        for (int n = 0; n < AHEAD; n++) shifts[n] = two_of(shared.shift(q_stage()), n);
    }
    // p of the first queries, while d_p is multiplied. What scores need is looked up while s is: it is a way to memory and back.
    __device__ __forceinline__ void find_p() {
        begin_s_and_d_p();
        if (QUERIES == 128) read_ahead();
        const bool is_scored = SCORED || is_partial;
        Seen seen;
        if (is_scored && !WIDE) seen = look();
        hw::wgmma_wait<1>();
        hw::pin(s);
        if (is_scored && WIDE) seen = look();  // its registers have no room for it before
        if (variant::HAS_SLOPE)
#pragma unroll
            for (int i = 0; i < QUERIES / 2; i++) plain[i] = s[i] * params.scale;
        if (USES_TABLE) hw::mbarrier_wait(shared.table_full(), steps % 2);
        if (is_scored) score(seen);
#pragma unroll
        for (int k = 0; k < SOONER / 2; k++) exponentiate(k);
    }
    template <bool LAST> __device__ __forceinline__ void find_d_s() {
        hw::wgmma_wait_in_place<0>(launch.items > 0);
        hw::pin(d_p);
        if (LAST) arrive(shared.v_free());
        // 16 queries at a time: what is narrowed frees registers.
#pragma unroll
        for (int k = 0; k < QUERIES / 16; k++) {
            if (k >= SOONER / 2) exponentiate(k);
            if (!WIDE) pack(p[k], k);
            weigh(k);
            if (!variant::HAS_SLOPE) pack(d_s[k], k);
        }
        if (variant::HAS_SLOPE) {
            multiply_by_slopes();
#pragma unroll
            for (int k = 0; k < QUERIES / 16; k++) pack(d_s[k], k);
        }
        if (USES_TABLE) {
            __syncwarp();  // all lanes have read their cells
            arrive(shared.table_free());
        }
    }
    // To shared memory, queries down, as d_q takes it; 16 x 16 numbers of a warp at a time.
    __device__ __forceinline__ void write_turned(uint32 tile, const uint32 (&from)[QUERIES / 16][4]) const {
        const int key = first_row() + lane / 8 % 2 * 8, query = first_query() + lane / 16 * 8 + lane % 8;
        const uint32 at = tile + (key / PART * TILE_Q + query) * ROW_BYTES + ((key % PART / 8) ^ query % 8) * 16;
#pragma unroll
        for (int k = 0; k < QUERIES / 16; k++) hw::store_matrices_turned(at + k * 16 * ROW_BYTES, from[k]);
    }

    // 6 d_q = d_s.T @ k: of 64 queries, all keys and some columns. d_s lies queries down, or keys down, and is turned.
    template <int N, bool TURNED>
    __device__ __forceinline__ void multiply_d_q(float (&to)[N / 2], uint32 d_s, uint32 k_columns) const {
        const uint64 a_at = swizzled_128(d_s, 8 * ROW_BYTES, 16);
        const uint64 b_at = swizzled_128(k_columns, 8 * ROW_BYTES, TILE_K * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++) {
            const int row = k * 16 * ROW_BYTES;
            const uint64 a = further(a_at, TURNED ? row : k / 4 * TILE_Q * ROW_BYTES + k % 4 * 32), b = further(b_at, row);
            if (k == 0) hw::wgmma<N, false, TURNED, true>(to, a, b);
            else hw::wgmma<N, true, TURNED, true>(to, a, b);
        }
        hw::wgmma_commit();
    }
    // To a storer, a piece of its own, when it has stored the one before; parity: of that. Then it is told.
    template <int N> __device__ __forceinline__ void write_d_q(float (&d_q)[N], int storer, int piece, int parity) const {
        hw::pin(d_q);
        hw::mbarrier_wait(shared.d_q_free(storer), parity);
        unsigned char* const to = shared.memory + (shared.d_q(storer, piece) - shared.base) + threadIdx.x % 128 * 16;
#pragma unroll
        for (int n = 0; n < N / 4; n++)
            *reinterpret_cast<float4*>(to + n * 2048) = make_float4(d_q[n * 4], d_q[n * 4 + 1], d_q[n * 4 + 2], d_q[n * 4 + 3]);
    }
    __device__ __forceinline__ void tell(int storer, int piece) const {
        hw::barrier_arrive(Shared::d_q_written(storer, piece), 160);
    }

    // 7 finish: d_k, of scores that were scaled, and d_v; from a column on
    template <int N>
    __device__ __forceinline__ void store(const Array& to, const float (&sums)[N], int column, int width,
                                          const Shared::Item& item, float scale) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int key = first_key() + half * 8;
            Element* row = row_of<Element>(to, item.b, item.hk, item.first_key + key);
            store_row<2 * N>(row + column, &sums[half * 2], scale, lane % 4, key < item.left, width - column);
        }
    }
    __device__ __forceinline__ Outbox outbox() const { return {shared, number, int(threadIdx.x % 128)}; }
};

// Key tiles, one after the other. How a kernel meets a query tile is its step; with the last one it lets v go.
template <class Kernel> struct Consumer : Kernel {
    using Kernel::Kernel;

    __device__ __forceinline__ void run() {
        while (true) {
            hw::mbarrier_wait(this->shared.k_full(), this->keys % 2);
            this->settle();
            if (__shfl_sync(~0u, this->item().j, 0) < 0) return;
            const int visits = __shfl_sync(~0u, this->item().visits, 0);
            if (visits == Shared::OF_D_Q) {
                pass_v();
                DQuery(this->launch, this->shared, this->number).round(let_go());
            } else {
                meet_queries(visits);
                this->finish(let_go());
            }
        }
    }
    // The item, whose keys are not needed any more.
    __device__ __forceinline__ Shared::Item let_go() {
        const Shared::Item item = this->shared.copy_of_item(this->keys % 2);
        __syncwarp();  // all lanes have read the item
        this->arrive(this->shared.k_free());
        this->keys++;
        return item;
    }
    // Its place is not needed, or not any more.
    __device__ __forceinline__ void pass_v() const {
        await_v();
        __syncwarp();  // all lanes know that it is there
        this->arrive(this->shared.v_free());
    }
    __device__ __forceinline__ void await_v() const {
        hw::mbarrier_wait(this->shared.v_full(), this->keys % 2);
    }
    __device__ __forceinline__ void meet_queries(int visits) {
        clear(this->d_k);
        clear(this->d_v);
        if (visits == 0) return pass_v();  // none sees these keys
        await_v();
        this->hold_v();
#pragma unroll 1
        for (int i = 1; i < visits; i++) this->template step<false>();
        this->template step<true>();
        hw::pin(this->d_k);
        hw::pin(this->d_v);
    }
    template <int N> static __device__ __forceinline__ void clear(float (&sums)[N]) {
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = 0;
        hw::pin(sums);
    }
};
