// One thread a query: it walks all keys, reads k and v from global memory, and keeps its row in registers.
// The first rung of the ladder: nothing is shared and nothing is skipped, so that only the logic is left to read.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "operations.h"
#include "variant.h"
#include "softmax.h"

extern "C" __global__ void __launch_bounds__(TILE_Q) attention(const __grid_constant__ Params params) {
    const Work work = work_of_block(params, blockIdx.x);
    const Sequence& sequence = work.sequence;
    const int query = work.first_query + threadIdx.x;
    if (query >= sequence.n_q) return;
    const variant::Head head = variant::head(params, work);
    const variant::Row row = variant::row(params, head, query);

    // 1 load q
    float q[D], acc[D_V], row_max = -INFINITY, row_sum = 0;
    const Element* q_row = row_of<const Element>(params.q, work.b, work.h, sequence.q_begin + query);
    for (int c = 0; c < D; c++) q[c] = widen(q_row[c]) * params.scale;
    for (int c = 0; c < D_V; c++) acc[c] = 0;

    // for each key (a tile of one):
    for (int key = 0; key < sequence.n_k; key++) {
        // 2 s = q @ k.T
        const Element* k_row = row_of<const Element>(params.k, work.b, work.hk, sequence.k_begin + key);
        float s = 0;
        for (int c = 0; c < D; c++) s += q[c] * widen(k_row[c]);
        // 3 score
        const variant::RowInTile here = variant::seen_from(row, key);
        const variant::Key place = variant::key(params, head, key, 0);
        const variant::Near near = variant::near_cells(here, place);
        s = variant::score(params, head, here, place, near, s);
        // 4 mask
        if (!variant::mask(params, head, here, place, near)) s = -INFINITY;
        // 5 row_max, rescale, p, row_sum
        const float new_max = fmaxf(row_max, s), shift = finite(new_max);
        const float rescale = expf(row_max - shift), p = expf(s - shift);
        row_sum = row_sum * rescale + p;
        row_max = new_max;
        // 6 acc = acc * rescale + p @ v
        const Element* v_row = row_of<const Element>(params.v, work.b, work.hk, sequence.k_begin + key);
        for (int c = 0; c < D_V; c++) acc[c] = acc[c] * rescale + p * widen(v_row[c]);
    }

    // 7 finish: acc / row_sum, lse
    const Finished done = finish(row_max, row_sum, sink_of(params, work.h));
    Out* out = row_of<Out>(params.out, work.b, work.h, sequence.q_begin + query);
    for (int c = 0; c < D_V; c++) out[c] = narrow<Out>(acc[c] * done.weight);
    if (KEEPS_REMAINDER) {
        Out* remainder = row_of<Out>(params.remainder, work.b, work.h, sequence.q_begin + query);
        for (int c = 0; c < D_V; c++) remainder[c] = narrow<Out>(lost(acc[c] * done.weight, out[c]));
    }
    *row_of<float>(params.lse, work.b, work.h, sequence.q_begin + query) = done.lse;
}
