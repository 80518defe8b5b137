"""The first kernel: a program has one query, and goes through all keys. No tiles of queries, no plan, no products of
matrices: the online softmax and nothing else."""

import triton
import triton.language as tl

from tilewise.kernels.triton.source.forward import with_sink
from tilewise.kernels.triton.source.tiles import (
    PARTIAL,
    binary,
    finite,
    fused,
    load_rows,
    lse_of,
    matrix,
    narrow,
    scores,
    tile_of,
)


@triton.jit
def basic(
    q, k, v, out, lse, sinks, q_steps, k_steps, v_steps, out_steps, lse_steps,
    records, runs, loaded, group, scale,
    RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, HAS_SINKS: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2)
    query, q_begin, k_begin, n_q, n_k, _, _, place = tile_of(records, b, h, group, TILE_Q)
    k, v = matrix(k, k_steps, b, h // group, k_begin), matrix(v, v_steps, b, h // group, k_begin)
    column, column_v = tl.arange(0, DEPTH), tl.arange(0, COLUMNS)

    # 1 load q
    q_row = tl.load(matrix(q, q_steps, b, h, q_begin + query) + column, mask=column < D, other=0.0).to(tl.float32)
    row_max, row_sum = query * 0.0 + float("-inf"), query * 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    factor = binary(scale, RAW)
    # for some keys at a time:
    for first in range(0, n_k, TILE_K):
        key = first + tl.arange(0, TILE_K)
        # 2 s = q @ k.T
        s = tl.sum(q_row[None, :] * load_rows(k, k_steps[2], key, n_k, D, DEPTH).to(tl.float32), 1)
        # 3 score
        # 4 mask
        s = scores(s, query, key, PARTIAL, n_q, n_k, place, loaded, scale, RAW, SCORE, MASK)
        # 5 row_max, rescale, p, row_sum
        new_max = tl.maximum(row_max, tl.max(s, 0) * factor)
        shift = finite(new_max)
        rescale = tl.exp2(row_max - shift)
        p = tl.exp2(fused(s, factor, -shift))
        row_sum = row_sum * rescale + tl.sum(p, 0)
        row_max = new_max
        # 6 acc = acc * rescale + p @ v
        v_tile = load_rows(v, v_steps[2], key, n_k, D_V, COLUMNS).to(tl.float32)
        acc = acc * rescale + tl.sum(p[:, None] * v_tile, 0)

    # 7 finish: acc / row_sum, lse
    done = lse_of(row_max, row_sum)
    weight = 1 / tl.where(row_sum == 0, 1.0, row_sum)
    if HAS_SINKS:
        joint = with_sink(done, tl.load(sinks + h).to(tl.float32))
        weight = weight * tl.exp(done - finite(joint))
        done = joint
    at = matrix(out, out_steps, b, h, q_begin + query) + column_v
    tl.store(at, narrow(acc * weight, out.dtype.element_ty), mask=column_v < D_V)
    tl.store(matrix(lse, lse_steps, b, h, q_begin + query), done)
