"""The backward pass in Triton: weights are recomputed from lse, and every sum has one program, so its order is fixed.

A program of `d_query` has the queries of one tile, a program of `d_keys` the keys of one; both compute, with
delta = sum(d_out * out) - d_lse:  d_score = p * (d_out v^T - delta),  d_s = d_score * d score/d S.
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


@triton.jit
def prepare(
    out, d_out, d_lse, delta, out_steps, d_out_steps, d_lse_steps, delta_steps, n,
    HAS_D_LSE: tl.constexpr, ROWS: tl.constexpr, D_V: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """delta = sum(d_out * out) - d_lse, of some rows. In float32 it is summed as d_out v^T will be, from which it is
    taken away: where a row has one key, or as good as one, their errors are the same."""
    h, b = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    a = load_rows(matrix(out, out_steps, b, h, 0), out_steps[2], row, n, D_V, COLUMNS)
    c = load_rows(matrix(d_out, d_out_steps, b, h, 0), d_out_steps[2], row, n, D_V, COLUMNS)
    if a.dtype == tl.float32:
        products = tl.dot(c, tl.trans(a), input_precision="ieee")
        made = tl.sum(tl.where(tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :], products, 0.0), 1)
    else:
        made = tl.sum(a.to(tl.float32) * c.to(tl.float32), 1)
    if HAS_D_LSE:
        at = matrix(d_lse, d_lse_steps, b, h, 0) + row.to(tl.int64) * d_lse_steps[2]
        made -= tl.load(at, mask=row < n, other=0.0).to(tl.float32)
    tl.store(matrix(delta, delta_steps, b, h, 0) + row, made, mask=row < n)


@triton.jit
def weights(
    product, d_p, shift, delta, query, key, kind, n_q, n_k, place, loaded, scale,
    RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """p and d_score of a tile, from q k^T and d_out v^T; queries down and keys across, or the other way round."""
    # 3 score
    # 4 mask (PARTIAL tiles only)
    s = scores(product, query, key, kind, n_q, n_k, place, loaded, scale, RAW, SCORE, MASK)
    # 5 p, from the lse that forward saved; products are rounded as forward did, so that delta is the mean of d_p
    p = tl.exp2(fused(s, binary(scale, RAW), -shift))
    return p, p * (d_p - delta)


@triton.jit
def passed_on(d_score, SLOPE: tl.constexpr, product, query, key, place, loaded, scale):
    """d_score times a derivative of the score; a key of weight 0 passes nothing on, whatever its slope."""
    if SLOPE is not None:
        slope = at_scores(SLOPE, product * scale, query, key, place, loaded)
        d_score = tl.where(d_score == 0, 0.0, d_score * slope)
    return d_score


@triton.jit
def saved_of(lse, delta, steps, b, h, begin, query, n_q):
    """Of some rows: lse as an exponent of 2, and delta."""
    at = matrix(lse, steps, b, h, begin) + query
    row_lse = tl.load(at, mask=query < n_q, other=0.0)
    row_delta = tl.load(matrix(delta, steps, b, h, begin) + query, mask=query < n_q, other=0.0)
    return finite(row_lse) * LOG2_E, row_delta


@triton.jit
def load_queries(
    rows, b, h, begin, first, n_q, turns, TILE_Q: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """q, d_out and what forward saved, of the rows from `first` on."""
    q, d_out, lse, delta, q_steps, d_out_steps, row_steps, q_map, d_out_map = rows
    q_tile = load_head(q, q_steps, q_map, b, h, begin, first, n_q, turns, QUERIES, TILE_Q, D, DEPTH, PAIRS, INTERLEAVED)
    d_out_tile = load_tile(d_out, d_out_steps, d_out_map, b, h, begin, first, n_q, TILE_Q, D_V, COLUMNS)
    query = first + tl.arange(0, TILE_Q)
    return q_tile, d_out_tile, saved_of(lse, delta, row_steps, b, h, begin, query, n_q)


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
    q, k, v, d_out, lse, delta, d_q, q_steps, k_steps, v_steps, d_out_steps, row_steps, d_q_steps,
    records, record_steps, runs, loaded, group, scale, turns, k_map, v_map,
    RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, SLOPE: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2)
    first, q_begin, k_begin, n_q, n_k, first_run, last_run, place = tile_of(records, record_steps, b, h, group)
    rows = q, d_out, lse, delta, q_steps, d_out_steps, row_steps, None, None
    columns = k, v, k_steps, v_steps, k_map, v_map
    # 1 load q, d_out, lse, delta
    query = first + tl.arange(0, TILE_Q)
    q_tile, d_out_tile, saved = load_queries(
        rows, b, h, q_begin, first, n_q, turns, TILE_Q, D, D_V, DEPTH, COLUMNS, PAIRS, INTERLEAVED
    )
    shift, row_delta = saved
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
            product = tl.dot(q_tile.to(DOT), tl.trans(k_tile).to(DOT), input_precision=PRECISION)
            d_p = tl.dot(d_out_tile.to(DOT), tl.trans(v_tile).to(DOT), input_precision=PRECISION)
            _p, d_score = weights(
                product, d_p, shift[:, None], row_delta[:, None], query[:, None], key[None, :], kind,
                n_q, n_k, place, loaded, scale, RAW, SCORE, MASK,
            )  # fmt: skip
            d_s = passed_on(d_score, SLOPE, product, query[:, None], key[None, :], place, loaded, scale)
            # 6 d_q += d_s @ k
            acc = tl.dot(narrow(d_s, k_tile.dtype).to(DOT), k_tile.to(DOT), acc, input_precision=PRECISION)
    store_d_head(d_q, d_q_steps, b, h, q_begin, query, n_q, acc * scale, turns, QUERIES, D, DEPTH, PAIRS, INTERLEAVED)


@triton.jit
def d_keys(
    q, k, v, d_out, lse, delta, d_k, d_v, q_steps, k_steps, v_steps, d_out_steps, row_steps, d_k_steps, d_v_steps,
    records, record_steps, runs, loaded, group, scale, turns, q_map, d_out_map,
    RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, SLOPE: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    hk, b = tl.program_id(1), tl.program_id(2)
    first, q_begin, k_begin, n_q, n_k, first_run, last_run, place = tile_of(records, record_steps, b, hk * group, group)
    # 1 load k, v
    key = first + tl.arange(0, TILE_K)
    columns = k, v, k_steps, v_steps, None, None
    k_tile, v_tile = load_keys(
        columns, b, hk, k_begin, first, n_k, turns, TILE_K, D, D_V, DEPTH, COLUMNS, PAIRS, INTERLEAVED
    )
    acc_k = tl.zeros([TILE_K, DEPTH], tl.float32)
    acc_v = tl.zeros([TILE_K, COLUMNS], tl.float32)
    for h in range(hk * group, (hk + 1) * group):
        first, q_begin, k_begin, n_q, n_k, first_run, last_run, place = tile_of(records, record_steps, b, h, group)
        # for each q tile of the schedule:
        for run in range(first_run, last_run):
            first_tile, last_tile = tl.load(runs + run * 3), tl.load(runs + run * 3 + 1)
            rows = (q, d_out, lse, delta, q_steps, d_out_steps, row_steps, q_map, d_out_map), b, h, q_begin
            if tl.load(runs + run * 3 + 2) == PARTIAL:
                acc_k, acc_v = visit_queries(
                    acc_k, acc_v, k_tile, v_tile, key, first_tile, last_tile, PARTIAL, rows, n_q, n_k, place, loaded,
                    scale, turns, RAW, SCORE, MASK, SLOPE, TILE_Q, D, D_V, DEPTH, COLUMNS, DOT, PRECISION, PAIRS,
                    INTERLEAVED,
                )  # fmt: skip
            else:
                acc_k, acc_v = visit_queries(
                    acc_k, acc_v, k_tile, v_tile, key, first_tile, last_tile, FULL, rows, n_q, n_k, place, loaded,
                    scale, turns, RAW, SCORE, MASK, SLOPE, TILE_Q, D, D_V, DEPTH, COLUMNS, DOT, PRECISION, PAIRS,
                    INTERLEAVED,
                )  # fmt: skip
    store_d_head(d_k, d_k_steps, b, hk, k_begin, key, n_k, acc_k * scale, turns, KEYS, D, DEPTH, PAIRS, INTERLEAVED)
    store_rows(matrix(d_v, d_v_steps, b, hk, k_begin), d_v_steps[2], key, n_k, acc_v, D_V, COLUMNS)


@triton.jit
def visit_queries(
    acc_k, acc_v, k_tile, v_tile, key, first_tile, last_tile, KIND: tl.constexpr, rows, n_q, n_k, place, loaded,
    scale, turns, RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, SLOPE: tl.constexpr,
    TILE_Q: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """A run of query tiles, all of one kind, as in forward."""
    rows, b, h, q_begin = rows
    for tile in tl.range(first_tile, last_tile, num_stages=1 if KIND == PARTIAL else None):
        query = tile * TILE_Q + tl.arange(0, TILE_Q)
        q_tile, d_out_tile, saved = load_queries(
            rows, b, h, q_begin, tile * TILE_Q, n_q, turns, TILE_Q, D, D_V, DEPTH, COLUMNS, PAIRS, INTERLEAVED
        )
        shift, row_delta = saved
        # 2 s.T = k @ q.T: keys down and queries across, as the sums want their weights
        product = tl.dot(k_tile.to(DOT), tl.trans(q_tile).to(DOT), input_precision=PRECISION)
        d_p = tl.dot(v_tile.to(DOT), tl.trans(d_out_tile).to(DOT), input_precision=PRECISION)
        p, d_score = weights(
            product, d_p, shift[None, :], row_delta[None, :], query[None, :], key[:, None], KIND,
            n_q, n_k, place, loaded, scale, RAW, SCORE, MASK,
        )  # fmt: skip
        d_s = passed_on(d_score, SLOPE, product, query[None, :], key[:, None], place, loaded, scale)
        # 6 d_v += p.T @ d_out, d_k += d_s.T @ q
        p = narrow(p, d_out_tile.dtype).to(DOT)
        acc_v = tl.dot(p, d_out_tile.to(DOT), acc_v, input_precision=PRECISION)
        d_s = narrow(d_s, q_tile.dtype).to(DOT)
        acc_k = tl.dot(d_s, q_tile.to(DOT), acc_k, input_precision=PRECISION)
    return acc_k, acc_v
