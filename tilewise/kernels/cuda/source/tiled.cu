// A block takes a tile of queries and walks the key tiles of its schedule. Tiles of q, k and v lie in shared memory,
// loaded by all threads together; scores, row statistics and acc are in registers. k and v come a slice of the head
// dimension at a time, so that any head fits.
//
// 128 threads are 8 groups of 16 lanes. A group has rows group, group + 8 ... of the tile; of those, a lane has the
// scores of keys lane, lane + 16 ... and two columns of acc in each slice of v.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "operations.h"
#include "variant.h"
#include "softmax.h"
#include "tiles.h"

constexpr int THREADS = 128, LANES = 16, GROUPS = THREADS / LANES;
constexpr int ROWS = ceil_div(TILE_Q, GROUPS), KEYS = ceil_div(TILE_K, LANES);  // of one thread
constexpr int Q_SLICES = ceil_div(D, SLICE), V_SLICES = ceil_div(D_V, SLICE);
static_assert(SLICE == 2 * LANES, "a lane has two columns of each slice");

typedef Tile<ROWS * GROUPS, Q_SLICES * SLICE> QTile;
typedef Tile<KEYS * LANES, SLICE> Slice;  // of k or v
typedef Tile<ROWS * GROUPS, KEYS * LANES> PTile;
static_assert(QTile::BYTES + Slice::BYTES + PTile::BYTES == SHARED_BYTES, "what the host asks for is what is used");

// The largest, or the sum, of the values in a group's lanes.
__device__ __forceinline__ float largest_in_group(float x) {
    for (int step = LANES / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
__device__ __forceinline__ float sum_in_group(float x) {
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ Params params) {
    SHARED_MEMORY(memory);
    const QTile q(memory);
    const Slice kv(memory + QTile::BYTES);
    const PTile p(memory + QTile::BYTES + Slice::BYTES);

    const Work work = work_of_block(params, blockIdx.x);
    const Sequence& sequence = work.sequence;
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const variant::Head head = variant::head(params, work);
    variant::Row rows[ROWS];
    float row_max[ROWS], row_sum[ROWS], acc[V_SLICES][ROWS][2];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        rows[i] = variant::row(params, head, work.first_query + group + i * GROUPS);
        row_max[i] = -INFINITY;
        row_sum[i] = 0;
#pragma unroll
        for (int slice = 0; slice < V_SLICES; slice++) acc[slice][i][0] = acc[slice][i][1] = 0;
    }

    // 1 load q
    fill<THREADS>(q, row_of<const Element>(params.q, work.b, work.h, sequence.q_begin + work.first_query),
                  params.q.row, sequence.n_q - work.first_query, D, params.scale);

    // for each kv tile of the schedule:
    const int2 runs = runs_of_tile(params, work);
    for (int r = runs.x; r < runs.y; r++) {
        const Run run = params.runs[r];
        for (int tile = run.first; tile < run.last; tile++) {
            const int first_key = tile * TILE_K, keys_left = sequence.n_k - first_key;
            const Element* k = row_of<const Element>(params.k, work.b, work.hk, sequence.k_begin + first_key);
            const Element* v = row_of<const Element>(params.v, work.b, work.hk, sequence.k_begin + first_key);

            // 2 s = q @ k.T
            float s[ROWS][KEYS] = {};
#pragma unroll 1
            for (int slice = 0; slice < Q_SLICES; slice++) {
                __syncthreads();  // the slice before is no longer read
                fill<THREADS>(kv, k + slice * SLICE, params.k.row, keys_left, D - slice * SLICE, 1.0f);
                __syncthreads();
                multiply<GROUPS, LANES, SLICE>(s, q, slice * SLICE, kv, 0, group, lane);
            }

            // 3 score
            // 4 mask (PARTIAL tiles only: one that ends beyond the last key is such a tile)
            if (variant::HAS_SCORE || run.kind == PARTIAL || TILE_K % LANES) {
#pragma unroll
                for (int j = 0; j < KEYS; j++) {
                    const int column = lane + j * LANES;
                    const variant::Key key = variant::key(params, head, first_key, column);
#pragma unroll
                    for (int i = 0; i < ROWS; i++) {
                        const variant::RowInTile row = variant::seen_from(rows[i], first_key);
                        const variant::Near near = variant::near_cells(row, key);
                        s[i][j] = variant::score(params, head, row, key, near, s[i][j]);
                        if (run.kind == PARTIAL && !variant::mask(params, head, row, key, near)) s[i][j] = -INFINITY;
                        if (column >= TILE_K) s[i][j] = -INFINITY;
                    }
                }
            }

            // 5 row_max, rescale, p, row_sum
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                float new_max = row_max[i];
#pragma unroll
                for (int j = 0; j < KEYS; j++) new_max = fmaxf(new_max, s[i][j]);
                new_max = largest_in_group(new_max);
                const float shift = finite(new_max), rescale = expf(row_max[i] - shift);
                row_max[i] = new_max;
                row_sum[i] *= rescale;  // of the lane's own keys; lanes are added up in step 7
#pragma unroll
                for (int j = 0; j < KEYS; j++) {
                    const float weight = expf(s[i][j] - shift);
                    row_sum[i] += weight;
                    p.set(group + i * GROUPS, lane + j * LANES, weight);
                }
#pragma unroll
                for (int slice = 0; slice < V_SLICES; slice++) {
                    acc[slice][i][0] *= rescale;
                    acc[slice][i][1] *= rescale;
                }
            }

            // 6 acc = acc * rescale + p @ v
#pragma unroll
            for (int slice = 0; slice < V_SLICES; slice++) {
                __syncthreads();
                fill<THREADS>(kv, v + slice * SLICE, params.v.row, keys_left, D_V - slice * SLICE, 1.0f);
                __syncthreads();
                add_weighted<GROUPS, KEYS * LANES>(acc[slice], p, kv, group, lane);
            }
        }
    }

    // 7 finish: acc / row_sum, lse
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = group + i * GROUPS, query = work.first_query + row;
        const Finished done = finish(row_max[i], sum_in_group(row_sum[i]), sink_of(params, work.h));
        if (row >= TILE_Q || query >= sequence.n_q) continue;
        Out* out = row_of<Out>(params.out, work.b, work.h, sequence.q_begin + query);
#pragma unroll
        for (int slice = 0; slice < V_SLICES; slice++)
            store_two(out, acc[slice][i], slice * SLICE + 2 * lane, D_V, done.weight);
        if (KEEPS_REMAINDER) {
            Out* remainder = row_of<Out>(params.remainder, work.b, work.h, sequence.q_begin + query);
#pragma unroll
            for (int slice = 0; slice < V_SLICES; slice++)
                store_two<true>(remainder, acc[slice][i], slice * SLICE + 2 * lane, D_V, done.weight);
        }
        if (lane == 0) *row_of<float>(params.lse, work.b, work.h, sequence.q_begin + query) = done.lse;
    }
}
