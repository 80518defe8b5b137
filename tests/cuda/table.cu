// Writes what an expression gives at every query and key: a kernel for the tests of the op table.
#include "device.h"
#include "config.h"
#include "params.h"
#include "element.h"
#include "operations.h"
#include "variant.h"

extern "C" __global__ void attention(const __grid_constant__ Params params) {
    const Work work = work_of_block(params, blockIdx.x);
    const int query = work.first_query + threadIdx.x;
    if (query >= work.sequence.n_q) return;
    const variant::Head head = variant::head(params, work);
    const variant::Row row = variant::row(params, head, query);
    for (int key = 0; key < work.sequence.n_k; key++) {
        const int first = key / TILE_K * TILE_K;  // columns count from the first key of a tile
        const variant::RowInTile here = variant::seen_from(row, first);
        const variant::Key place = variant::key(params, head, first, key - first);
        const variant::Near near = variant::near_cells(here, place);
        const float s = row_of<float>(params.q, work.b, work.h, query)[key];
        row_of<float>(params.out, work.b, work.h, query)[key] = variant::score(params, head, here, place, near, s);
        row_of<float>(params.v, work.b, work.h, query)[key] = variant::mask(params, head, here, place, near);
    }
}
