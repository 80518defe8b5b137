// The backward pass of tiled.cu, for keys and values: a block takes a tile of them and walks the query tiles of its schedule,
// those of all heads that share the keys. Groups of threads have queries and lanes keys, as in tiled.cu, while they compute
// scores; for the sums groups have keys, and a lane two columns of each slice.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "operations.h"
#include "variant.h"
#include "softmax.h"
#include "backward.h"
#include "tiles.h"

constexpr int THREADS = 128, LANES = 16, GROUPS = THREADS / LANES;
constexpr int ROWS = ceil_div(TILE_Q, GROUPS), KEYS = ceil_div(TILE_K, LANES);  // of one thread, of the scores
constexpr int SUMS = KEYS * LANES / GROUPS;  // keys of one thread, of the sums
constexpr int Q_SLICES = ceil_div(D, SLICE), V_SLICES = ceil_div(D_V, SLICE);
static_assert(SLICE == 2 * LANES, "a lane has two columns of each slice");

typedef Tile<KEYS * LANES, Q_SLICES * SLICE> KTile;
typedef Tile<KEYS * LANES, V_SLICES * SLICE> VTile;
typedef Tile<ROWS * GROUPS, SLICE> Slice;  // of q or d_out
typedef Tile<KEYS * LANES, ROWS * GROUPS> PTile;  // of p or d_s, keys down
static_assert(KTile::BYTES + VTile::BYTES + Slice::BYTES + PTile::BYTES == SHARED_BYTES, "what the host asks for is what is used");

extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ Backward backward) {
    SHARED_MEMORY(memory);
    const KTile k(memory);
    const VTile v(memory + KTile::BYTES);
    const Slice slice_of(memory + KTile::BYTES + VTile::BYTES);
    const PTile weights(memory + KTile::BYTES + VTile::BYTES + Slice::BYTES);

    const Params& params = backward.params;
    Work work = work_of_keys(params, blockIdx.x);
    const Sequence& sequence = work.sequence;
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int first_key = work.tile * TILE_K, first_row = sequence.k_begin + first_key, keys_left = sequence.n_k - first_key;
    float d_k[Q_SLICES][SUMS][2] = {}, d_v[V_SLICES][SUMS][2] = {};

    // 1 load k, v
    fill<THREADS>(k, row_of<const Element>(params.k, work.b, work.hk, first_row), params.k.row, keys_left, D, params.scale);
    fill<THREADS>(v, row_of<const Element>(params.v, work.b, work.hk, first_row), params.v.row, keys_left, D_V, 1.0f);

    for (int h = work.hk * params.group; h < (work.hk + 1) * params.group; h++) {
        work.h = h;
        const variant::Head head = variant::head(params, work);
        // for each q tile of the schedule:
        const int2 runs = runs_of_tile(params, work);
        for (int r = runs.x; r < runs.y; r++) {
            const Run run = params.runs[r];
            for (int tile = run.first; tile < run.last; tile++) {
                const int first_query = tile * TILE_Q, rows_left = sequence.n_q - first_query;
                const Element* q = row_of<const Element>(params.q, work.b, h, sequence.q_begin + first_query);
                const Element* d_out = row_of<const Element>(backward.d_out, work.b, h, sequence.q_begin + first_query);

                // 2 s = q @ k.T, d_p = d_out @ v.T
                float s[ROWS][KEYS] = {}, d_p[ROWS][KEYS] = {};
#pragma unroll 1
                for (int slice = 0; slice < Q_SLICES; slice++) {
                    __syncthreads();  // the slice before is no longer read
                    fill<THREADS>(slice_of, q + slice * SLICE, params.q.row, rows_left, D - slice * SLICE, 1.0f);
                    __syncthreads();
                    multiply<GROUPS, LANES, SLICE>(s, slice_of, 0, k, slice * SLICE, group, lane);
                }
#pragma unroll 1
                for (int slice = 0; slice < V_SLICES; slice++) {
                    __syncthreads();
                    fill<THREADS>(slice_of, d_out + slice * SLICE, backward.d_out.row, rows_left, D_V - slice * SLICE, 1.0f);
                    __syncthreads();
                    multiply<GROUPS, LANES, SLICE>(d_p, slice_of, 0, v, slice * SLICE, group, lane);
                }

                // 3 score
                // 4 mask (PARTIAL tiles only), and rows beyond the last query, which no mask tells
                // 5 p, d_s
                float d_s[ROWS][KEYS];
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    const int row = group + i * GROUPS, at = sequence.q_begin + first_query + row;
                    const bool is_row = row < TILE_Q && row < rows_left;
                    Saved saved = {0, 0};
                    if (is_row) saved = {finite(*row_of<const float>(params.lse, work.b, h, at)),
                                         *row_of<const float>(backward.delta, work.b, h, at)};
                    const variant::RowInTile here = variant::seen_from(variant::row(params, head, first_query + row), first_key);
#pragma unroll
                    for (int j = 0; j < KEYS; j++) {
                        const int column = lane + j * LANES;
                        const variant::Key key = variant::key(params, head, first_key, column);
                        const Weight weight = weight_of(params, head, here, key, is_row && column < TILE_K,
                                                        run.kind == PARTIAL, saved, s[i][j], d_p[i][j]);
                        weights.set(column, row, weight.p);
                        d_s[i][j] = weight.d_s;
                    }
                }

                // 6 d_v += p.T @ d_out, d_k += d_s.T @ q
#pragma unroll
                for (int slice = 0; slice < V_SLICES; slice++) {
                    __syncthreads();
                    fill<THREADS>(slice_of, d_out + slice * SLICE, backward.d_out.row, rows_left, D_V - slice * SLICE, 1.0f);
                    __syncthreads();
                    add_weighted<GROUPS, ROWS * GROUPS>(d_v[slice], weights, slice_of, group, lane);
                }
                __syncthreads();  // p is no longer read
#pragma unroll
                for (int i = 0; i < ROWS; i++)
#pragma unroll
                    for (int j = 0; j < KEYS; j++) weights.set(lane + j * LANES, group + i * GROUPS, d_s[i][j]);
#pragma unroll
                for (int slice = 0; slice < Q_SLICES; slice++) {
                    __syncthreads();
                    fill<THREADS>(slice_of, q + slice * SLICE, params.q.row, rows_left, D - slice * SLICE, 1.0f);
                    __syncthreads();
                    add_weighted<GROUPS, ROWS * GROUPS>(d_k[slice], weights, slice_of, group, lane);
                }
            }
        }
    }

    // 7 finish: d_k, of scores that were scaled, and d_v
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const int key = group + i * GROUPS;
        if (key >= TILE_K || key >= keys_left) continue;
        Element* to_k = row_of<Element>(backward.d_k, work.b, work.hk, first_row + key);
        Element* to_v = row_of<Element>(backward.d_v, work.b, work.hk, first_row + key);
#pragma unroll
        for (int slice = 0; slice < Q_SLICES; slice++) store_two(to_k, d_k[slice][i], slice * SLICE + 2 * lane, D, params.scale);
#pragma unroll
        for (int slice = 0; slice < V_SLICES; slice++) store_two(to_v, d_v[slice][i], slice * SLICE + 2 * lane, D_V, 1.0f);
    }
}
