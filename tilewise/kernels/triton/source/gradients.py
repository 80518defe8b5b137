"""Gradients of the arrays that a score reads: d_score * (d score / d cell), summed over the scores that read a cell.

A cell may be read by every query and key of some heads (slopes), by a query, a key, a pair of both (a bias), or by all
pairs of one distance (relative tables). Each sum has one program, so its order is fixed.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.source.backward import load_keys, load_queries, passed_on, weights
from tilewise.kernels.triton.source.tiles import (
    FIELDS,
    K_BEGIN,
    N_K,
    N_Q,
    PARTIAL,
    Q_BEGIN,
    at_head,
    matrix,
    place_of,
    tile_of,
)


@triton.jit
def part_of(
    q_tile, k_tile, v_tile, d_out_tile, row_shift, row_delta, query, key, kind, n_q, n_k, place, loaded, scale,
    RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, PART: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What each score of a tile passes on to the cell that it read: queries down and keys across."""
    product = tl.dot(q_tile.to(DOT), tl.trans(k_tile).to(DOT), input_precision="ieee")
    d_p = tl.dot(d_out_tile.to(DOT), tl.trans(v_tile).to(DOT), input_precision="ieee")
    p = weights(
        product, row_shift[:, None], query[:, None], key[None, :], kind, n_q, n_k, place, loaded, scale,
        RAW, SCORE, MASK,
    )  # fmt: skip
    return passed_on(p * (d_p - row_delta[:, None]), PART, product, query[:, None], key[None, :], place, loaded, scale)


@triton.jit
def of_rows(
    q, k, v, d_out, shift, delta, sums, q_steps, k_steps, v_steps, d_out_steps, row_steps,
    records, runs, loaded, group, scale, turns,
    RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, PART: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Sums over keys: (batch, heads, n_q)."""
    h, b = tl.program_id(1), tl.program_id(2)
    first, q_begin, k_begin, n_q, n_k, first_run, last_run, place = tile_of(records, b, h, group, TILE_Q)
    rows = q, d_out, shift, delta, q_steps, d_out_steps, row_steps, None, None, None, None
    columns = k, v, k_steps, v_steps, None, None
    query = first + tl.arange(0, TILE_Q)
    q_tile, d_out_tile, row_shift, row_delta = load_queries(
        rows, b, h, q_begin, first, n_q, turns, TILE_Q, D, D_V, DEPTH, COLUMNS, PAIRS, INTERLEAVED
    )
    total = tl.zeros([TILE_Q], tl.float32)
    for run in range(first_run, last_run):
        kind = tl.load(runs + run * 3 + 2)
        for tile in range(tl.load(runs + run * 3), tl.load(runs + run * 3 + 1)):
            key = tile * TILE_K + tl.arange(0, TILE_K)
            k_tile, v_tile = load_keys(
                columns, b, h // group, k_begin, tile * TILE_K, n_k, turns, TILE_K, D, D_V, DEPTH, COLUMNS, PAIRS,
                INTERLEAVED,
            )  # fmt: skip
            part = part_of(
                q_tile, k_tile, v_tile, d_out_tile, row_shift, row_delta, query, key, kind, n_q, n_k, place, loaded,
                scale, RAW, SCORE, MASK, PART, DOT,
            )  # fmt: skip
            total += tl.sum(part, 1)
    tl.store(matrix(sums, row_steps, b, h, q_begin) + query, total, mask=query < n_q)


@triton.jit
def of_columns(
    q, k, v, d_out, shift, delta, sums, q_steps, k_steps, v_steps, d_out_steps, row_steps, sums_steps,
    records, runs, loaded, group, scale, turns,
    RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, PART: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Sums over queries: (batch, heads, n_k)."""
    h, b = tl.program_id(1), tl.program_id(2)
    first, q_begin, k_begin, n_q, n_k, first_run, last_run, place = tile_of(records, b, h, group, TILE_K)
    rows = q, d_out, shift, delta, q_steps, d_out_steps, row_steps, None, None, None, None
    columns = k, v, k_steps, v_steps, None, None
    key = first + tl.arange(0, TILE_K)
    k_tile, v_tile = load_keys(
        columns, b, h // group, k_begin, first, n_k, turns, TILE_K, D, D_V, DEPTH, COLUMNS, PAIRS, INTERLEAVED
    )
    total = tl.zeros([TILE_K], tl.float32)
    for run in range(first_run, last_run):
        kind = tl.load(runs + run * 3 + 2)
        for tile in range(tl.load(runs + run * 3), tl.load(runs + run * 3 + 1)):
            query = tile * TILE_Q + tl.arange(0, TILE_Q)
            q_tile, d_out_tile, row_shift, row_delta = load_queries(
                rows, b, h, q_begin, tile * TILE_Q, n_q, turns, TILE_Q, D, D_V, DEPTH, COLUMNS, PAIRS, INTERLEAVED
            )
            part = part_of(
                q_tile, k_tile, v_tile, d_out_tile, row_shift, row_delta, query, key, kind, n_q, n_k, place, loaded,
                scale, RAW, SCORE, MASK, PART, DOT,
            )  # fmt: skip
            total += tl.sum(part, 0)
    tl.store(matrix(sums, sums_steps, b, h, k_begin) + key, total, mask=key < n_k)


@triton.jit
def sequence_of(records, sequence):
    """One of packed sequences; the first is all there is where none are packed: where its rows begin, how many there
    are, and what variables begin at."""
    record = records[0] + sequence * FIELDS
    return (
        tl.load(record + Q_BEGIN), tl.load(record + K_BEGIN), tl.load(record + N_Q), tl.load(record + N_K),
        place_of(record, records[3]),
    )  # fmt: skip


@triton.jit
def of_pairs(
    q, k, v, d_out, shift, delta, grad, q_steps, k_steps, v_steps, d_out_steps, row_steps, grad_steps,
    records, loaded, group, scale, turns, q_map, d_out_map, k_map, v_map, most_q, most_k, key_tiles, kept_heads,
    summed_batch, summed_heads,
    RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, PART: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """A tile of a (batch or 1, heads or 1, most_q, most_k) gradient, summed over those that share it: batch indices, or
    packed sequences, and heads."""
    first_b, first_h = tl.program_id(1) // kept_heads, tl.program_id(1) % kept_heads
    rows = q, d_out, shift, delta, q_steps, d_out_steps, row_steps, q_map, d_out_map, None, None
    columns = k, v, k_steps, v_steps, k_map, v_map
    first_query, first_key = tl.program_id(0) // key_tiles * TILE_Q, tl.program_id(0) % key_tiles * TILE_K
    query, key = first_query + tl.arange(0, TILE_Q), first_key + tl.arange(0, TILE_K)
    total = tl.zeros([TILE_Q, TILE_K], tl.float32)
    q_begin, k_begin, n_q, n_k, place = sequence_of(records, 0)  # before the loop, which would wait for it each time
    for shared in range(summed_batch * summed_heads):
        b = first_b * summed_batch + shared // summed_heads
        h = first_h * summed_heads + shared % summed_heads
        if PACKED:
            q_begin, k_begin, n_q, n_k, place = sequence_of(records, b)
            b = 0
        q_tile, d_out_tile, row_shift, row_delta = load_queries(
            rows, b, h, q_begin, first_query, n_q, turns, TILE_Q, D, D_V, DEPTH, COLUMNS, PAIRS, INTERLEAVED
        )
        k_tile, v_tile = load_keys(
            columns, b, h // group, k_begin, first_key, n_k, turns, TILE_K, D, D_V, DEPTH, COLUMNS, PAIRS, INTERLEAVED
        )
        total += part_of(
            q_tile, k_tile, v_tile, d_out_tile, row_shift, row_delta, query, key, PARTIAL, n_q, n_k,
            at_head(place, b, h, group), loaded, scale, RAW, SCORE, MASK, PART, DOT,
        )  # fmt: skip
    at = matrix(grad, grad_steps, first_b, first_h, 0) + query[:, None].to(tl.int64) * grad_steps[2] + key[None, :]
    tl.store(at, total, mask=(query[:, None] < most_q) & (key[None, :] < most_k))


@triton.jit
def of_distances(
    q, k, v, d_out, shift, delta, sums, q_steps, k_steps, v_steps, d_out_steps, row_steps, sums_steps,
    records, loaded, group, scale, turns, least, count,
    RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Sums over all pairs of a distance q - k: (batch or sequences, heads, distances), from the least on.

    A program has TILE distances. Down each tile of queries they are a slanted band of keys, twice as wide.
    """
    h, sequence = tl.program_id(1), tl.program_id(2)
    if PACKED:
        q_begin, k_begin, n_q, n_k, place = sequence_of(records, sequence)
        b = 0
    else:
        q_begin, k_begin, n_q, n_k, place = sequence_of(records, 0)
        b = sequence
    place = at_head(place, b, h, group)
    rows = q, d_out, shift, delta, q_steps, d_out_steps, row_steps, None, None, None, None
    columns = k, v, k_steps, v_steps, None, None
    first = least + tl.program_id(0) * TILE  # the least distance of this program
    total = tl.zeros([TILE], tl.float32)
    row, across = tl.arange(0, TILE), tl.arange(0, 2 * TILE)
    # Queries whose keys are there: from 0 <= q - distance < n_k for some of the distances.
    begin = tl.maximum(first, 0) // TILE
    end = tl.minimum(n_q, n_k + first + TILE)
    for tile in range(begin, tl.maximum(end + TILE - 1, 0) // TILE):
        first_key = tile * TILE - first - (TILE - 1)  # may be below 0
        query, key = tile * TILE + row, first_key + across
        q_tile, d_out_tile, row_shift, row_delta = load_queries(
            rows, b, h, q_begin, tile * TILE, n_q, turns, TILE, D, D_V, DEPTH, COLUMNS, PAIRS, INTERLEAVED
        )
        k_tile, v_tile = load_keys(
            columns, b, h // group, k_begin, first_key, n_k, turns, 2 * TILE, D, D_V, DEPTH, COLUMNS, PAIRS, INTERLEAVED
        )
        part = part_of(
            q_tile, k_tile, v_tile, d_out_tile, row_shift, row_delta, query, key, PARTIAL, n_q, n_k, place, loaded,
            scale, RAW, SCORE, MASK, PART, DOT,
        )  # fmt: skip
        part = tl.where((key >= 0)[None, :], part, 0.0)
        # Distance first + i of row r is in column r + TILE - 1 - i.
        total += tl.sum(tl.gather(part, row[:, None] + (TILE - 1) - row[None, :], 1), 0)
    number = tl.program_id(0) * TILE + row
    tl.store(matrix(sums, sums_steps, sequence, h, 0) + number, total, mask=number < count)


@triton.jit
def of_cells(sums, cells, order, begins, sums_steps, cells_steps, AT_ONCE: tl.constexpr):
    """What rows or distances have, as sums of the cells that they read. order: readers, one cell's after another's."""
    cell, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(begins + cell + 1)
    total = tl.zeros([AT_ONCE], tl.float64)
    for first in range(tl.load(begins + cell), end, AT_ONCE):
        at = first + tl.arange(0, AT_ONCE)
        reader = tl.load(order + at, mask=at < end, other=0)
        total += tl.load(matrix(sums, sums_steps, b, h, 0) + reader, mask=at < end, other=0.0).to(tl.float64)
    tl.store(matrix(cells, cells_steps, b, h, 0) + cell, tl.sum(total, 0))
