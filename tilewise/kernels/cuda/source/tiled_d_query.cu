// The backward pass of tiled.cu, for queries: a block takes a tile of them and walks the same key tiles. Threads have the
// same rows, scores and columns; the sums are gradients of q.
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
constexpr int ROWS = ceil_div(TILE_Q, GROUPS), KEYS = ceil_div(TILE_K, LANES);  // of one thread
constexpr int Q_SLICES = ceil_div(D, SLICE), V_SLICES = ceil_div(D_V, SLICE);
constexpr int MOST = ROWS * GROUPS > KEYS * LANES ? ROWS * GROUPS : KEYS * LANES;
static_assert(SLICE == 2 * LANES, "a lane has two columns of each slice");

typedef Tile<ROWS * GROUPS, Q_SLICES * SLICE> QTile;
typedef Tile<ROWS * GROUPS, V_SLICES * SLICE> OTile;  // of d_out
typedef Tile<MOST, SLICE> Slice;  // of k, v or out
typedef Tile<ROWS * GROUPS, KEYS * LANES> STile;
static_assert(QTile::BYTES + OTile::BYTES + Slice::BYTES + STile::BYTES == SHARED_BYTES, "what the host asks for is what is used");

extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ Backward backward) {
    SHARED_MEMORY(memory);
    const QTile q(memory);
    const OTile d_out(memory + QTile::BYTES);
    const Slice slice_of(memory + QTile::BYTES + OTile::BYTES);
    const STile d_s(memory + QTile::BYTES + OTile::BYTES + Slice::BYTES);

    const Params& params = backward.params;
    const Work work = work_of_block(params, blockIdx.x);
    const Sequence& sequence = work.sequence;
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int first_row = sequence.q_begin + work.first_query, rows_left = sequence.n_q - work.first_query;
    const variant::Head head = variant::head(params, work);
    variant::Row rows[ROWS];
    Saved saved[ROWS];
    float acc[Q_SLICES][ROWS][2];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        rows[i] = variant::row(params, head, work.first_query + group + i * GROUPS);
        saved[i] = {0, 0};
#pragma unroll
        for (int slice = 0; slice < Q_SLICES; slice++) acc[slice][i][0] = acc[slice][i][1] = 0;
    }

    // 1 load q, d_out, lse; delta, summed as d_out v^T will be: where a row has one key, their errors are the same
    fill<THREADS>(q, row_of<const Element>(params.q, work.b, work.h, first_row), params.q.row, rows_left, D, params.scale);
    fill<THREADS>(d_out, row_of<const Element>(backward.d_out, work.b, work.h, first_row), backward.d_out.row, rows_left, D_V,
                  1.0f);
    // (of what rounding took from out there is nothing then)
    const int halves = backward.remainder.data ? 2 : 1;
#pragma unroll 1
    for (int i = 0; i < halves * V_SLICES; i++) {
        const Array& half = i < V_SLICES ? params.out : backward.remainder;
        const int slice = i % V_SLICES;
        const Element* from = row_of<const Element>(half, work.b, work.h, first_row) + slice * SLICE;
        __syncthreads();
        fill<THREADS>(slice_of, from, half.row, rows_left, D_V - slice * SLICE, 1.0f);
        __syncthreads();
#pragma unroll
        for (int c = 0; c < SLICE; c += 4)
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const int row = group + i * GROUPS;
                saved[i].delta += dot(d_out.four(row, slice * SLICE + c), slice_of.four(row, c));
            }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = group + i * GROUPS;
        if (row >= TILE_Q || row >= rows_left) continue;
        saved[i].shift = finite(*row_of<const float>(params.lse, work.b, work.h, first_row + row));
        if (backward.d_lse.data) saved[i].delta -= *row_of<const float>(backward.d_lse, work.b, work.h, first_row + row);
        if (lane == 0) *row_of<float>(backward.delta, work.b, work.h, first_row + row) = saved[i].delta;
    }

    // for each kv tile of the schedule:
    const int2 runs = runs_of_tile(params, work);
    for (int r = runs.x; r < runs.y; r++) {
        const Run run = params.runs[r];
        for (int tile = run.first; tile < run.last; tile++) {
            const int first_key = tile * TILE_K, keys_left = sequence.n_k - first_key;
            const Element* k = row_of<const Element>(params.k, work.b, work.hk, sequence.k_begin + first_key);
            const Element* v = row_of<const Element>(params.v, work.b, work.hk, sequence.k_begin + first_key);

            // 2 s = q @ k.T, d_p = d_out @ v.T
            float s[ROWS][KEYS] = {}, d_p[ROWS][KEYS] = {};
#pragma unroll 1
            for (int slice = 0; slice < Q_SLICES; slice++) {
                __syncthreads();  // the slice before is no longer read
                fill<THREADS>(slice_of, k + slice * SLICE, params.k.row, keys_left, D - slice * SLICE, 1.0f);
                __syncthreads();
                multiply<GROUPS, LANES, SLICE>(s, q, slice * SLICE, slice_of, 0, group, lane);
            }
#pragma unroll 1
            for (int slice = 0; slice < V_SLICES; slice++) {
                __syncthreads();
                fill<THREADS>(slice_of, v + slice * SLICE, params.v.row, keys_left, D_V - slice * SLICE, 1.0f);
                __syncthreads();
                multiply<GROUPS, LANES, SLICE>(d_p, d_out, slice * SLICE, slice_of, 0, group, lane);
            }

            // 3 score
            // 4 mask (PARTIAL tiles only: one that ends beyond the last key is such a tile)
            // 5 p, d_s
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
                const int column = lane + j * LANES;
                const variant::Key key = variant::key(params, head, first_key, column);
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    const variant::RowInTile row = variant::seen_from(rows[i], first_key);
                    const Weight weight = weight_of(params, head, row, key, column < TILE_K, run.kind == PARTIAL, saved[i],
                                                    s[i][j], d_p[i][j]);
                    d_s.set(group + i * GROUPS, column, weight.d_s);
                }
            }

            // 6 d_q += d_s @ k
#pragma unroll
            for (int slice = 0; slice < Q_SLICES; slice++) {
                __syncthreads();
                fill<THREADS>(slice_of, k + slice * SLICE, params.k.row, keys_left, D - slice * SLICE, 1.0f);
                __syncthreads();
                add_weighted<GROUPS, KEYS * LANES>(acc[slice], d_s, slice_of, group, lane);
            }
        }
    }

    // 7 finish: d_q, of scores that were scaled
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = group + i * GROUPS;
        if (row >= TILE_Q || row >= rows_left) continue;
        Element* d_q = row_of<Element>(backward.d_q, work.b, work.h, first_row + row);
#pragma unroll
        for (int slice = 0; slice < Q_SLICES; slice++) store_two(d_q, acc[slice][i], slice * SLICE + 2 * lane, D, params.scale);
    }
}
