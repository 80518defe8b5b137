// d_q from its sums, by the consumers, when all key tiles of a head have added to them. Sums lie as threads held them: of a
// query tile each warpgroup has a half, and each thread the numbers that it would hold as a consumer.
#pragma once

struct DQuery {
    const Launch& launch;
    const Shared& shared;
    // Of the warpgroup; in it, of the thread. The compiler does not know them: what follows from them would be reckoned before
    // the first key tile, and registers held for it all the time.
    const int number, thread, warp = thread / 32, lane = thread % 32;
    int sent = 0;  // tiles, by the copy engine

    struct Tile {
        int b, h, of_all, first_query, turns;
        const Sequence* sequence;
        float held[HALF / 2];
    };

    __device__ __forceinline__ DQuery(const Launch& launch, const Shared& shared, int number)
        : launch(launch), shared(shared), number(hw::anew(number)), thread(hw::anew(threadIdx.x) % 128) {}

    // Tiles that are read at a time: some 128 registers hold them, for the cache answers late.
    static constexpr int AT_ONCE = HALF > 64 ? 2 : 4;

    // A share of the query tiles of all heads that have this key head. While one is stored the next ones are read.
    __device__ __forceinline__ void round(const Shared::Item& item) {
        const Params& params = launch.backward.params;
        if (lane == 0) {
            wait_until_ready(launch, item.b, item.hk);  // which key tiles that meet no query did not wait for
            hw::wait_for_number(done_of(launch, item.b, item.hk), 2 * params.tiles);
        }
        __syncwarp();
        if (SENDS) hw::barrier_sync(Shared::D_S_WRITTEN, 256);  // both have multiplied all d_s: its places are free
        const int first = item.j * launch.share, last = min(first + launch.share, params.group * launch.q_tiles);
        Tile tiles[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) read(tiles[n], item, min(first + n, last - 1));
#pragma unroll 1
        for (int i = first; i < last; i += AT_ONCE) {
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                if (i + n < last) store(tiles[n]);
                if (i + n + AT_ONCE < last) read(tiles[n], item, i + n + AT_ONCE);
            }
        }
    }
    __device__ __forceinline__ void read(Tile& tile, const Shared::Item& item, int i) const {
        const Params& params = launch.backward.params;
        tile.b = item.b;
        const int q_tiles = hw::anew(launch.q_tiles);
        tile.h = item.hk * params.group + i / q_tiles;
        tile.of_all = i % q_tiles;
        tile.sequence = launch.sequences + sequence_of_tile(launch.sequences, params.n_sequences, tile.of_all);
        tile.first_query = (tile.of_all - tile.sequence->first_tile) * TILE_Q;
        const int64 at = tile_of(launch, tile.b, tile.h, tile.of_all);
        tile.turns = launch.turns[at * TURNS];
        const float4* const sums = reinterpret_cast<const float4*>(launch.sums + (at * 2 + number) * (HALF_BYTES / 4)) + thread;
#pragma unroll
        for (int n = 0; n < HALF / 8; n++) {
            const float4 x = sums[n * 128];
            tile.held[n * 4] = x.x;
            tile.held[n * 4 + 1] = x.y;
            tile.held[n * 4 + 2] = x.z;
            tile.held[n * 4 + 3] = x.w;
        }
    }
    // If the query tile met no key tile, nothing was stored, and what was read is anything.
    __device__ __forceinline__ void store(Tile& tile) {
        if (tile.turns == 0)
#pragma unroll
            for (int n = 0; n < HALF / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) tile.held[n * 4 + e] = 0;
        const int left = tile.sequence->n_q - tile.first_query;  // beyond are the next sequence's
        const bool ends = launch.backward.params.n_sequences > 1 && left < TILE_Q;
        if (SENDS && !ends) send(tile);
        else store_rows(tile, left);
    }
    // Whether the warpgroup has 64 columns of 64 queries, and a place for them, from which the copy engine stores them.
    static constexpr bool SENDS = !WIDE && HALF == PART;
    __device__ __forceinline__ void send(const Tile& tile) {
        const Outbox box{shared, number, thread};
        const float scale = launch.backward.params.scale;
        const uint32 place = box.place(sent++);
        box.await<Outbox::PLACES - 1>();
        box.write(place, tile.held, 0, scale);
        const int column = HALVES_QUERIES ? 0 : number * PART, row = tile.first_query + (HALVES_QUERIES ? number * 64 : 0);
        box.send(&launch.d_q, place, column, tile.sequence->q_begin + row, tile.h, tile.b);
    }
    __device__ __forceinline__ void store_rows(const Tile& tile, int left) const {
        const int column = HALVES_QUERIES ? 0 : number * HALF;
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            const int query = (HALVES_QUERIES ? number * 64 : 0) + warp * 16 + lane / 4 + lower * 8;
            const int at = tile.sequence->q_begin + tile.first_query + query;
            Element* const row = row_of<Element>(launch.backward.d_q, tile.b, tile.h, at) + column;
            store_row<HALF>(row, &tile.held[lower * 2], launch.backward.params.scale, lane % 4, query < left, D - column);
        }
    }
};
