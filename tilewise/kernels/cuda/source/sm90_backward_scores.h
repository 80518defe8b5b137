// What warpgroups of Hopper's backward pass do with scores, from the query tile's arrival to p and d_s.
#pragma once

constexpr bool SCORED = variant::HAS_SCORE || !RAW_SCORES;  // whether scores change before the softmax, in every tile

// A warpgroup: 64 keys, of which a thread has two (g and g + 8 of its warp's 16). Of each eight queries it has two:
// s[n * 4 + half * 2 + e] is key g + half * 8, query n * 8 + lane % 4 * 2 + e.
struct Scores {
    const Launch& launch;
    const Params& params;
    const Shared& shared;
    const int number, lane;
    uint32 keys = 0, steps = 0;  // key tiles and query tiles until now: stages and parities follow from them
    Ring<Q_STAGES> next_q;
    int q = 0, q_before = 0;  // stages of the query tile that s is of, and of the one before
    float s[QUERIES / 2], d_p[QUERIES / 2];
    float2 shift[QUERIES / 8];
    bool is_partial = false;  // the query tile that s is of

    __device__ __forceinline__ Scores(const Launch& launch, const Shared& shared, int number)
        : launch(launch), params(launch.backward.params), shared(shared), number(number), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ void arrive(uint32 bar) const {
        if (lane == 0) hw::mbarrier_arrive(bar);
    }
    // Of the warp, in the tile.
    __device__ __forceinline__ int first_row() const { return (WIDE ? 0 : number * 64) + threadIdx.x / 32 % 4 * 16; }
    __device__ __forceinline__ int first_key() const { return first_row() + lane / 4; }
    __device__ __forceinline__ int first_query() const { return WIDE ? number * QUERIES : 0; }
    __device__ __forceinline__ uint32 k() const { return shared.k(keys % K_STAGES); }

    // The numbers of two neighbouring queries.
    __device__ __forceinline__ float2 two_of(uint32 rows, int n) const {
        return *reinterpret_cast<const float2*>(shared.memory + (rows - shared.base) +
                                                (first_query() + n * 8 + lane % 4 * 2) * 4);
    }
    __device__ __forceinline__ void begin_s() {
        hw::mbarrier_wait(shared.q_full(next_q.stage), next_q.parity);
        q = next_q.stage;
        next_q.advance();
        is_partial = shared.meeting(q).kind == PARTIAL;
    }
    __device__ __forceinline__ void read_shift() {
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) shift[n] = two_of(shared.shift(q), n);
    }

    // 3 score
    // 4 mask (PARTIAL tiles only)
    // 5 p, d_s. Rows that see no key, and those beyond the last query, are shifted by infinity: their weights are 0.
    __device__ __forceinline__ Work work(int stage) const {
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
    // For each of the thread's scores of this stage's query tile, with the query's and the key's values of the variant.
    template <class Act> __device__ __forceinline__ void for_each(int stage, Act act) {
        const Work work = this->work(stage);
        const variant::Head head = variant::head(params, work);
        const int tile = shared.item(keys % K_STAGES).j * TILE_K;
        const variant::Key key[2] = {variant::key(params, head, tile, first_key()),
                                     variant::key(params, head, tile, first_key() + 8)};
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int query = work.first_query + first_query() + n * 8 + lane % 4 * 2 + e;
                const variant::Row row = variant::seen_from(variant::row(params, head, query), tile);
#pragma unroll
                for (int half = 0; half < 2; half++)
                    act(n * 4 + half * 2 + e, query, head, row, key[half], variant::near_cells(row, key[half]));
            }
    }
    __device__ __forceinline__ void score() {
        if (!SCORED && !is_partial) return;
        const int n_q = params.sequences[shared.item(keys % K_STAGES).sequence].n_q;  // of what is beyond, a variant may make anything
        for_each(q, [&](int i, int query, const variant::Head& head, const variant::Row& row, const variant::Key& key,
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
    // Of all keys each query's -delta, to which products are added.
    __device__ __forceinline__ void begin_d_p(int stage) {
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const float2 delta = two_of(shared.delta(stage), n);
            d_p[n * 4] = d_p[n * 4 + 2] = delta.x;
            d_p[n * 4 + 1] = d_p[n * 4 + 3] = delta.y;
        }
    }
    // d_s takes the place of s. delta is already subtracted.
    __device__ __forceinline__ void weigh() {
#pragma unroll
        for (int i = 0; i < QUERIES / 2; i++) s[i] *= d_p[i];
    }
    // Of scores as they were, of this stage's query tile.
    template <int N> __device__ __forceinline__ void multiply_by_slopes(const float (&plain)[N], int stage) {
        if constexpr (variant::HAS_SLOPE)
            for_each(stage, [&](int i, int, const variant::Head& head, const variant::Row& row, const variant::Key& key,
                                const variant::Near& near) {
                if (s[i] != 0) s[i] *= variant::slope(params, head, row, key, near, plain[i]);
            });
    }
    // Two narrowed numbers of s, as products take it from registers: of queries k * 16 and following.
    __device__ __forceinline__ uint32 pair(int k, int i) const {
        return hw::packed<Element>(s[k * 8 + 2 * i], s[k * 8 + 2 * i + 1]);
    }
    // To shared memory, keys down; 16 x 16 scores of a warp at a time.
    __device__ __forceinline__ void write_s(uint32 tile) const {
        const int row = first_row() + lane % 16;
        const uint32 at = tile + row * ROW_BYTES;
#pragma unroll
        for (int k = 0; k < QUERIES / 16; k++) {
            const uint32 words[4] = {pair(k, 0), pair(k, 1), pair(k, 2), pair(k, 3)};
            hw::store_matrices(at + ((first_query() / 8 + k * 2 + lane / 16) ^ row % 8) * 16, words);
        }
    }

    // 7 finish: d_k, of scores that were scaled, and d_v; from a column on
    template <int N>
    __device__ __forceinline__ void store(const Array& to, const float (&sums)[N], int column, int width,
                                          const Shared::Item& item, float scale) const {
        const Sequence& sequence = params.sequences[item.sequence];
        const int quarter = lane % 4, key = item.j * TILE_K + first_key();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool inside = key + half * 8 < sequence.n_k;
            Element* row = row_of<Element>(to, item.b, item.hk, sequence.k_begin + key + half * 8);
            store_row<2 * N>(row + column, &sums[half * 2], scale, quarter, inside, width - column);
        }
    }
};

// Before a key tile's first product.
template <int N> __device__ __forceinline__ void clear(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) sums[i] = 0;
    hw::pin(sums);
}
