// What the kernels of the backward pass share. Weights are recomputed from lse; with
// delta = sum(d_out * out) - d_lse, a score's gradient is p * (d_out v^T - delta). Every sum has a fixed order.
#pragma once

// A block's share of the work on keys: one key tile of one key head. The sequences' tiles are of keys here.
__device__ __forceinline__ Work work_of_keys(const Params& params, int block) {
    const int heads_k = params.heads / params.group, head = block / params.tiles;
    Work work = work_of(params, block % params.tiles, 0);
    work.b = head / heads_k;
    work.hk = head % heads_k;
    return work;
}

// A row's lse, as what exponents are shifted by, and delta.
struct Saved {
    float shift, delta;
};

// p, and the gradient of s: of a product of q and k. A score of weight 0 passes nothing on.
struct Weight {
    float p, d_s;
};
__device__ __forceinline__ Weight weight_of(const Params& params, const variant::Head& head, const variant::RowInTile& row,
                                            const variant::Key& key, bool counts, bool is_partial, const Saved& saved,
                                            float s, float d_p) {
    const variant::Near near = variant::near_cells(row, key);
    float x = s;
    if (variant::HAS_SCORE) x = variant::score(params, head, row, key, near, s);
    if (is_partial) counts = counts && variant::mask(params, head, row, key, near);
    const float p = counts ? expf(x - saved.shift) : 0.0f;
    float d_s = p == 0 ? 0.0f : p * (d_p - saved.delta);
    if (variant::HAS_SLOPE && d_s != 0) d_s *= variant::slope(params, head, row, key, near, s);
    return {p, d_s};
}
