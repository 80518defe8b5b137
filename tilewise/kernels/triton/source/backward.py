"""The backward pass in Triton: weights are recomputed from lse, and every sum has one program, so its order is fixed.

A program of `d_query` has the queries of one tile, a program of `d_keys` the keys of one; both compute, with
delta = sum(d_out * (out + remainder)) - d_lse:  d_score = p * (d_out v^T - delta),  d_s = d_score * d score/d S.
d_query comes first, and leaves delta and what it makes of lse to the others.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.source.rope import KEYS, QUERIES, load_head, store_d_head
from tilewise.kernels.triton.source.tiles import (
    FULL,
    LOG2_E,
    PARTIAL,
    at_scores,
    binary,
    finite,
    fused,
    load_rows,
    load_tile,
    matrix,
    narrow,
    scores,
    store_rows,
    tile_of,
)

# Heads up to this wide leave registers for two tiles of products, of q and k and of d_out and v, at a time.
BOTH_PRODUCTS: tl.constexpr = tl.constexpr(64)


@triton.jit
def prepared(
    saved, saved_steps, b, h, begin, row, n, d_out_tile, D_V: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What weights are recomputed with, of some rows: shift, which is -lse as an exponent of 2, and delta.

    delta is summed as d_out v^T will be, from which it is taken away: where a row has one key, or as good as one, their
    errors are the same. So it is on the diagonal of a product, the rest of which nobody needs. What rounding took from
    out is added to it, if forward kept that.
    """
    out, remainder, lse, d_lse = saved
    out_steps, remainder_steps, lse_steps, d_lse_steps = saved_steps
    out_tile = load_rows(matrix(out, out_steps, b, h, begin), out_steps[2], row, n, D_V, COLUMNS)
    products = tl.dot(d_out_tile.to(DOT), tl.trans(out_tile).to(DOT), input_precision="ieee")
    if remainder is not None:
        at = matrix(remainder, remainder_steps, b, h, begin)
        rest = load_rows(at, remainder_steps[2], row, n, D_V, COLUMNS)
        products = tl.dot(d_out_tile.to(DOT), tl.trans(rest).to(DOT), products, input_precision="ieee")
    number = tl.arange(0, row.shape[0])
    delta = tl.sum(tl.where(number[:, None] == number[None, :], products, 0.0), 1)
    if d_lse is not None:
        at = matrix(d_lse, d_lse_steps, b, h, begin) + row.to(tl.int64) * d_lse_steps[2]
        delta -= tl.load(at, mask=row < n, other=0.0).to(tl.float32)
    row_lse = tl.load(matrix(lse, lse_steps, b, h, begin) + row, mask=row < n, other=0.0)
    return -finite(row_lse) * LOG2_E, delta


@triton.jit
def weights(
    product, shift, query, key, kind, n_q, n_k, place, loaded, scale,
    RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """p of a tile, from q k^T; queries down and keys across, or the other way round."""
    # 3 score
    # 4 mask (PARTIAL tiles only)
    s = scores(product, query, key, kind, n_q, n_k, place, loaded, scale, RAW, SCORE, MASK)
    # 5 p, from the lse that forward saved; products are rounded as forward did, so that delta is the mean of d_p
    return tl.exp2(fused(s, binary(scale, RAW), shift))


@triton.jit
def passed_on(d_score, SLOPE: tl.constexpr, product, query, key, place, loaded, scale):
    """d_score times a derivative of the score; a key of weight 0 passes nothing on, whatever its slope."""
    if SLOPE is not None:
        slope = at_scores(SLOPE, product * scale, query, key, place, loaded)
        d_score = tl.where(d_score == 0, 0.0, d_score * slope)
    return d_score


@triton.jit
def load_numbers(x, steps, map_, b, h, begin, first, n, ROWS: tl.constexpr):
    """Numbers of rows, one each, as load_tile has the rows."""
    if map_ is not None:
        numbers = map_.load([b, h, begin + first]).reshape(ROWS)
    else:
        row = first + tl.arange(0, ROWS)
        numbers = tl.load(matrix(x, steps, b, h, begin) + row, mask=row < n, other=0.0)
    return numbers


@triton.jit
def load_queries(
    rows, b, h, begin, first, n_q, turns, TILE_Q: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """q, d_out, shift and delta, of the rows from `first` on."""
    q, d_out, shift, delta, q_steps, d_out_steps, row_steps, q_map, d_out_map, shift_map, delta_map = rows
    q_tile = load_head(q, q_steps, q_map, b, h, begin, first, n_q, turns, QUERIES, TILE_Q, D, DEPTH, PAIRS, INTERLEAVED)
    d_out_tile = load_tile(d_out, d_out_steps, d_out_map, b, h, begin, first, n_q, TILE_Q, D_V, COLUMNS)
    row_shift = load_numbers(shift, row_steps, shift_map, b, h, begin, first, n_q, TILE_Q)
    return q_tile, d_out_tile, row_shift, load_numbers(delta, row_steps, delta_map, b, h, begin, first, n_q, TILE_Q)


@triton.jit
def load_keys(
    columns, b, hk, begin, first, n_k, turns, TILE_K: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """k and v, of the rows from `first` on."""
    k, v, k_steps, v_steps, k_map, v_map = columns
    k_tile = load_head(k, k_steps, k_map, b, hk, begin, first, n_k, turns, KEYS, TILE_K, D, DEPTH, PAIRS, INTERLEAVED)
    return k_tile, load_tile(v, v_steps, v_map, b, hk, begin, first, n_k, TILE_K, D_V, COLUMNS)


@triton.jit
def d_query(
    q, k, v, d_out, shift, delta, saved, d_q, q_steps, k_steps, v_steps, d_out_steps, row_steps, saved_steps, d_q_steps,
    records, runs, loaded, group, scale, turns, k_map, v_map,
    RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, SLOPE: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2)
    first, q_begin, k_begin, n_q, n_k, first_run, last_run, place = tile_of(records, b, h, group, TILE_Q)
    columns = k, v, k_steps, v_steps, k_map, v_map
    # 1 load q, d_out, out, lse
    query = first + tl.arange(0, TILE_Q)
    q_tile = load_head(
        q, q_steps, None, b, h, q_begin, first, n_q, turns, QUERIES, TILE_Q, D, DEPTH, PAIRS, INTERLEAVED
    )
    d_out_tile = load_rows(matrix(d_out, d_out_steps, b, h, q_begin), d_out_steps[2], query, n_q, D_V, COLUMNS)
    row_shift, row_delta = prepared(saved, saved_steps, b, h, q_begin, query, n_q, d_out_tile, D_V, COLUMNS, DOT)
    tl.store(matrix(shift, row_steps, b, h, q_begin) + query, row_shift, mask=query < n_q)
    tl.store(matrix(delta, row_steps, b, h, q_begin) + query, row_delta, mask=query < n_q)
    acc = tl.zeros([TILE_Q, DEPTH], tl.float32)
    # for each kv tile of the schedule:
    for run in range(first_run, last_run):
        kind = tl.load(runs + run * 3 + 2)
        for tile in range(tl.load(runs + run * 3), tl.load(runs + run * 3 + 1)):
            key = tile * TILE_K + tl.arange(0, TILE_K)
            k_tile, v_tile = load_keys(
                columns, b, h // group, k_begin, tile * TILE_K, n_k, turns, TILE_K, D, D_V, DEPTH, COLUMNS, PAIRS,
                INTERLEAVED,
            )  # fmt: skip
            # 2 s = q @ k.T
            product = tl.dot(q_tile.to(DOT), tl.trans(k_tile).to(DOT), input_precision="ieee")
            d_p = tl.dot(d_out_tile.to(DOT), tl.trans(v_tile).to(DOT), input_precision="ieee")
            p = weights(
                product, row_shift[:, None], query[:, None], key[None, :], kind, n_q, n_k, place, loaded, scale,
                RAW, SCORE, MASK,
            )  # fmt: skip
            d_score = p * (d_p - row_delta[:, None])
            d_s = passed_on(d_score, SLOPE, product, query[:, None], key[None, :], place, loaded, scale)
            # 6 d_q += d_s @ k
            acc = tl.dot(narrow(d_s, k_tile.dtype).to(DOT), k_tile.to(DOT), acc, input_precision="ieee")
    store_d_head(d_q, d_q_steps, b, h, q_begin, query, n_q, acc * scale, turns, QUERIES, D, DEPTH, PAIRS, INTERLEAVED)


@triton.jit
def d_keys(
    q, k, v, d_out, shift, delta, d_k, d_v, q_steps, k_steps, v_steps, d_out_steps, row_steps, d_k_steps, d_v_steps,
    records, runs, loaded, group, scale, turns, q_map, d_out_map, shift_map, delta_map,
    RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, SLOPE: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    hk, b = tl.program_id(1), tl.program_id(2)
    first, q_begin, k_begin, n_q, n_k, first_run, last_run, place = tile_of(records, b, hk * group, group, TILE_K)
    # 1 load k, v
    key = first + tl.arange(0, TILE_K)
    columns = k, v, k_steps, v_steps, None, None
    k_tile, v_tile = load_keys(
        columns, b, hk, k_begin, first, n_k, turns, TILE_K, D, D_V, DEPTH, COLUMNS, PAIRS, INTERLEAVED
    )
    acc_k = tl.zeros([TILE_K, DEPTH], tl.float32)
    acc_v = tl.zeros([TILE_K, COLUMNS], tl.float32)
    for h in range(hk * group, (hk + 1) * group):
        first, q_begin, k_begin, n_q, n_k, first_run, last_run, place = tile_of(records, b, h, group, TILE_K)
        # for each q tile of the schedule:
        for run in range(first_run, last_run):
            first_tile, last_tile = tl.load(runs + run * 3), tl.load(runs + run * 3 + 1)
            rows = q, d_out, shift, delta, q_steps, d_out_steps, row_steps, q_map, d_out_map, shift_map, delta_map
            rows = rows, b, h, q_begin
            if tl.load(runs + run * 3 + 2) == PARTIAL:
                acc_k, acc_v = visit_queries(
                    acc_k, acc_v, k_tile, v_tile, key, first_tile, last_tile, PARTIAL, rows, n_q, n_k, place, loaded,
                    scale, turns, RAW, SCORE, MASK, SLOPE, TILE_Q, D, D_V, DEPTH, COLUMNS, DOT, PAIRS,
                    INTERLEAVED,
                )  # fmt: skip
            else:
                acc_k, acc_v = visit_queries(
                    acc_k, acc_v, k_tile, v_tile, key, first_tile, last_tile, FULL, rows, n_q, n_k, place, loaded,
                    scale, turns, RAW, SCORE, MASK, SLOPE, TILE_Q, D, D_V, DEPTH, COLUMNS, DOT, PAIRS,
                    INTERLEAVED,
                )  # fmt: skip
    store_d_head(d_k, d_k_steps, b, hk, k_begin, key, n_k, acc_k * scale, turns, KEYS, D, DEPTH, PAIRS, INTERLEAVED)
    store_rows(matrix(d_v, d_v_steps, b, hk, k_begin), d_v_steps[2], key, n_k, acc_v, D_V, COLUMNS)


@triton.jit
def visit_queries(
    acc_k, acc_v, k_tile, v_tile, key, first_tile, last_tile, KIND: tl.constexpr, rows, n_q, n_k, place, loaded,
    scale, turns, RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, SLOPE: tl.constexpr,
    TILE_Q: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """A run of query tiles, all of one kind, as in forward."""
    rows, b, h, q_begin = rows
    for tile in tl.range(first_tile, last_tile, num_stages=1 if KIND == PARTIAL else None):
        query = tile * TILE_Q + tl.arange(0, TILE_Q)
        q_tile, d_out_tile, row_shift, row_delta = load_queries(
            rows, b, h, q_begin, tile * TILE_Q, n_q, turns, TILE_Q, D, D_V, DEPTH, COLUMNS, PAIRS, INTERLEAVED
        )
        # 2 s.T = k @ q.T: keys down and queries across, as the sums want their weights
        product = tl.dot(k_tile.to(DOT), tl.trans(q_tile).to(DOT), input_precision="ieee")
        if COLUMNS <= BOTH_PRODUCTS:
            d_p = tl.dot(v_tile.to(DOT), tl.trans(d_out_tile).to(DOT), input_precision="ieee")
        p = weights(
            product, row_shift[None, :], query[None, :], key[:, None], KIND, n_q, n_k, place, loaded, scale,
            RAW, SCORE, MASK,
        )  # fmt: skip
        # 6 d_v += p.T @ d_out, d_k += d_s.T @ q
        acc_v = tl.dot(narrow(p, d_out_tile.dtype).to(DOT), d_out_tile.to(DOT), acc_v, input_precision="ieee")
        if COLUMNS > BOTH_PRODUCTS:
            d_p = tl.dot(v_tile.to(DOT), tl.trans(d_out_tile).to(DOT), input_precision="ieee")
        d_score = p * (d_p - row_delta[None, :])
        d_s = passed_on(d_score, SLOPE, product, query[None, :], key[:, None], place, loaded, scale)
        acc_k = tl.dot(narrow(d_s, q_tile.dtype).to(DOT), q_tile.to(DOT), acc_k, input_precision="ieee")
    return acc_k, acc_v
