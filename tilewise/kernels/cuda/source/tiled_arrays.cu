// Gradients of arrays that a score reads, on any GPU: a block walks tiles of scores (arrays.h), whose products it makes of
// slices of their operands. Threads have the scores that they have in tiled.cu.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "operations.h"
#include "variant.h"
#include "softmax.h"
#include "backward.h"
#include "tiles.h"
#include "arrays.h"

constexpr int THREADS = 128, LANES = 16, GROUPS = THREADS / LANES;
constexpr int ROWS = ceil_div(TILE_Q, GROUPS), KEYS = ceil_div(TILE_K, LANES);  // of one thread

typedef Tile<ROWS * GROUPS, SLICE> RowSlice;  // of q or d_out
typedef Tile<KEYS * LANES, SLICE> KeySlice;  // of k or v
typedef Tile<ROWS * GROUPS, KEYS * LANES> Totals;  // in their place, at the end
constexpr int SLICE_BYTES = RowSlice::BYTES + KeySlice::BYTES;
static_assert((SLICE_BYTES > Totals::BYTES ? SLICE_BYTES : Totals::BYTES) == SHARED_BYTES,
              "what the host asks for is what is used");

// product += rows @ keys.T, of so many columns; rows are multiplied by a factor first.
template <int COLUMNS>
__device__ __forceinline__ void add_product(float (&product)[ROWS][KEYS], unsigned char* memory, const Element* rows,
                                            int64 row_step, int rows_left, float factor, const Element* keys, int64 key_step,
                                            int keys_left) {
    const RowSlice row_slice(memory);
    const KeySlice key_slice(memory + RowSlice::BYTES);
#pragma unroll 1
    for (int first = 0; first < COLUMNS; first += SLICE) {
        __syncthreads();  // the slices before are no longer read
        fill<THREADS>(row_slice, rows + first, row_step, rows_left, COLUMNS - first, factor);
        fill<THREADS>(key_slice, keys + first, key_step, keys_left, COLUMNS - first, 1.0f);
        __syncthreads();
        multiply<GROUPS, LANES, SLICE>(product, row_slice, 0, key_slice, 0, threadIdx.x / LANES, threadIdx.x % LANES);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ Sums sums) {
    SHARED_MEMORY(memory);
    const Backward& backward = sums.backward;
    const Params& params = backward.params;
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    float total[ROWS][KEYS] = {};

    Walk walk(sums, blockIdx.x);
    while (walk.next()) {
        const Work& work = walk.place.work;
        const Sequence& sequence = work.sequence;
        const int first_query = walk.place.q_tile * TILE_Q, rows_left = sequence.n_q - first_query;
        const int first_key = walk.place.k_tile * TILE_K, keys_left = sequence.n_k - first_key;
        const int first_row = sequence.q_begin + first_query, first_column = sequence.k_begin + first_key;

        // 2 s = q @ k.T, d_p = d_out @ v.T
        float s[ROWS][KEYS] = {}, d_p[ROWS][KEYS] = {};
        add_product<D>(s, memory, row_of<const Element>(params.q, work.b, work.h, first_row), params.q.row, rows_left,
                       params.scale, row_of<const Element>(params.k, work.b, work.hk, first_column), params.k.row, keys_left);
        add_product<D_V>(d_p, memory, row_of<const Element>(backward.d_out, work.b, work.h, first_row), backward.d_out.row,
                         rows_left, 1.0f, row_of<const Element>(params.v, work.b, work.hk, first_column), params.v.row,
                         keys_left);

        // 3 score
        // 4 mask (PARTIAL tiles only), and rows beyond the last query, which no mask tells
        // 5 p, and what it passes on
        const variant::Head head = variant::head(params, work);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = group + i * GROUPS;
            const bool is_row = row < TILE_Q && row < rows_left;
            Saved saved = {0, 0};
            if (is_row) saved = {finite(*row_of<const float>(params.lse, work.b, work.h, first_row + row)),
                                 *row_of<const float>(backward.delta, work.b, work.h, first_row + row)};
            const variant::RowInTile here = variant::seen_from(variant::row(params, head, first_query + row), first_key);
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
                const int column = lane + j * LANES;
                const variant::Key key = variant::key(params, head, first_key, column);
                total[i][j] += weight_of(params, head, here, key, is_row && column < TILE_K, walk.place.kind == PARTIAL, saved,
                                         s[i][j], d_p[i][j]).d_s;
            }
        }
    }

    // 7 finish
    const Totals totals(memory);
    __syncthreads();  // slices are no longer read
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < KEYS; j++) totals.set(group + i * GROUPS, lane + j * LANES, total[i][j]);
    __syncthreads();
    store_sums<THREADS>(sums, walk, totals);
}
