// What Hopper's backward pass needs to know of each query, by the consumers, a share of a head's query tiles at a time, before
// its key tiles are met: by what exponents are shifted, and delta. Blocks do it at different times, so that memory is read for
// it while others multiply. So many lanes share a row that each reads 16 bytes of it, side by side.
#pragma once

struct alignas(16) Eight {
    Element numbers[8];
};

struct Rows {
    const Launch& launch;
    const int number, thread;  // of the warpgroup; in it. The compiler does not know them, as in DQuery

    static constexpr int EIGHTS = D_V / 8, LANES = EIGHTS > 16 ? 32 : EIGHTS > 8 ? 16 : EIGHTS > 4 ? 8 : 4;
    static constexpr int ROWS_AT_ONCE = 128 / LANES, PASSES = TILE_Q / 2 / ROWS_AT_ONCE;
    static constexpr int AT_ONCE = PASSES > 4 ? 1 : 2;  // tiles that are read at a time: some 128 registers hold them
    static_assert(D_V % 8 == 0 && EIGHTS <= 32 && 2 * ROWS_AT_ONCE * PASSES == TILE_Q, "rows are shared evenly");

    struct Tile {
        int h, of_all, first_query;
        const Sequence* sequence;
        Eight d_out[PASSES], out[PASSES];
    };

    __device__ __forceinline__ Rows(const Launch& launch, int number)
        : launch(launch), number(hw::anew(number)), thread(hw::anew(threadIdx.x) % 128) {}

    // A share of the query tiles of all heads that have this key head; of each the warpgroup has half of the queries.
    __device__ __forceinline__ void round(const Shared::Item& item) const {
        const int first = item.j * launch.share, all = launch.backward.params.group * launch.q_tiles;
        const int last = min(first + launch.share, all);
#pragma unroll 1
        for (int i = first; i < last; i += AT_ONCE) {
            Tile tiles[AT_ONCE];
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) read(tiles[n], item, min(i + n, last - 1));
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++)
                if (i + n < last) write(tiles[n], item.b);
        }
        hw::barrier_sync(Shared::to_store(number), 128);  // all threads have written theirs
        if (thread == 0) hw::add_release(ready_of(launch, item.b, item.hk), 1);
    }
    __device__ __forceinline__ int row(int pass) const {
        return (number * PASSES + pass) * ROWS_AT_ONCE + thread / LANES;
    }
    __device__ __forceinline__ void read(Tile& tile, const Shared::Item& item, int i) const {
        const Params& params = launch.backward.params;
        const int q_tiles = hw::anew(launch.q_tiles), lane = thread % LANES;
        tile.h = params.group * item.hk + i / q_tiles;
        tile.of_all = i % q_tiles;
        tile.sequence = launch.sequences + sequence_of_tile(launch.sequences, params.n_sequences, tile.of_all);
        tile.first_query = (tile.of_all - tile.sequence->first_tile) * TILE_Q;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            tile.d_out[pass] = tile.out[pass] = Eight{};
            if (tile.first_query + row(pass) >= tile.sequence->n_q || lane >= EIGHTS) continue;
            const int query = tile.sequence->q_begin + tile.first_query + row(pass);
            const Element* const d_out = row_of<const Element>(launch.backward.d_out, item.b, tile.h, query);
            const Element* const out = row_of<const Element>(params.out, item.b, tile.h, query);
            tile.d_out[pass] = reinterpret_cast<const Eight*>(d_out)[lane];
            tile.out[pass] = reinterpret_cast<const Eight*>(out)[lane];
        }
    }
    // 0 delta = sum(d_out * out) - d_lse
    __device__ __forceinline__ void write(const Tile& tile, int b) const {
        const Backward& backward = launch.backward;
        const int64 at = tile_of(launch, b, tile.h, tile.of_all);
        float* const rows = launch.rows + at * (2 * TILE_Q);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            float delta = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) delta += widen(tile.d_out[pass].numbers[i]) * widen(tile.out[pass].numbers[i]);
#pragma unroll
            for (int apart = 1; apart < LANES; apart *= 2) delta += __shfl_xor_sync(~0u, delta, apart);
            if (thread % LANES != pass % LANES) continue;  // one of those that have the sum
            const int query = tile.sequence->q_begin + tile.first_query + row(pass);
            const bool inside = tile.first_query + row(pass) < tile.sequence->n_q;
            const float lse = inside ? *row_of<const float>(backward.params.lse, b, tile.h, query) : -INFINITY;
            if (inside && backward.d_lse.data) delta -= *row_of<const float>(backward.d_lse, b, tile.h, query);
            if (inside) *row_of<float>(backward.delta, b, tile.h, query) = delta;
            rows[row(pass)] = lse == -INFINITY ? lse : -lse;  // a row without keys has weights of 0
            rows[TILE_Q + row(pass)] = -delta;
        }
        if (number == 0 && thread < TURNS) launch.turns[at * TURNS + thread] = FIRST_STORES ? 0 : 1;
        if (FIRST_STORES) return;
        float4* const sums = reinterpret_cast<float4*>(launch.sums + (at * 2 + number) * (HALF_BYTES / 4));
        for (int i = thread; i < HALF_BYTES / 16; i += 128) sums[i] = make_float4(0, 0, 0, 0);
    }
};
