"""The forward pass in Triton: a program has the queries of one tile, and visits the key tiles of its plan."""

import triton
import triton.language as tl

from tilewise.kernels.triton.source.rope import KEYS, QUERIES, load_head
from tilewise.kernels.triton.source.tiles import (
    FULL,
    PARTIAL,
    binary,
    finite,
    fused,
    load_tile,
    lse_of,
    matrix,
    narrow,
    scores,
    store_rows,
    tile_of,
)


@triton.jit
def forward(
    q, k, v, out, lse, sinks, q_steps, k_steps, v_steps, out_steps, lse_steps,
    records, runs, loaded, group, scale, remainder, turns, k_map, v_map,
    RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, HAS_SINKS: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2)
    first, q_begin, k_begin, n_q, n_k, first_run, last_run, place = tile_of(records, b, h, group, TILE_Q)

    # 1 load q
    query = first + tl.arange(0, TILE_Q)
    q_tile = load_head(
        q, q_steps, None, b, h, q_begin, first, n_q, turns, QUERIES, TILE_Q, D, DEPTH, PAIRS, INTERLEAVED
    )
    row_max = tl.full([TILE_Q], float("-inf"), tl.float32)
    largest = row_max  # before it was an exponent of 2
    row_sum = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, COLUMNS], tl.float32)
    keys = k, v, k_steps, v_steps, k_map, v_map, b, h // group, k_begin
    # for each kv tile of the schedule:
    for run in range(first_run, last_run):
        first_tile, last_tile, kind = tl.load(runs + run * 3), tl.load(runs + run * 3 + 1), tl.load(runs + run * 3 + 2)
        if kind == PARTIAL:
            acc, row_max, largest, row_sum = visit(
                acc, row_max, largest, row_sum, q_tile, query, first_tile, last_tile, PARTIAL, keys, n_q, n_k, place,
                loaded, scale, turns, RAW, SCORE, MASK, TILE_K, D, D_V, DEPTH, COLUMNS, DOT, PAIRS,
                INTERLEAVED,
            )  # fmt: skip
        else:
            acc, row_max, largest, row_sum = visit(
                acc, row_max, largest, row_sum, q_tile, query, first_tile, last_tile, FULL, keys, n_q, n_k, place,
                loaded, scale, turns, RAW, SCORE, MASK, TILE_K, D, D_V, DEPTH, COLUMNS, DOT, PAIRS,
                INTERLEAVED,
            )  # fmt: skip

    # 7 finish: acc / row_sum, lse
    done = lse_of(row_max, row_sum)
    multiplied = row_sum + narrowing(finite(largest), binary(scale, RAW), -finite(row_max), v.dtype.element_ty)
    # It is 0 or infinite where row_max was rounded by more than half precision holds.
    is_number = (multiplied > 0) & (multiplied < float("inf"))
    weight = 1 / tl.where(is_number, multiplied, tl.where(row_sum == 0, 1.0, row_sum))
    if HAS_SINKS:
        joint = with_sink(done, tl.load(sinks + h).to(tl.float32))
        weight = weight * tl.exp(done - finite(joint))
        done = joint
    acc *= weight[:, None]
    store_rows(matrix(out, out_steps, b, h, q_begin), out_steps[2], query, n_q, acc, D_V, COLUMNS)
    if remainder is not None:
        rest = remainder_of(acc, out.dtype.element_ty)
        store_rows(matrix(remainder, out_steps, b, h, q_begin), out_steps[2], query, n_q, rest, D_V, COLUMNS)
    tl.store(matrix(lse, lse_steps, b, h, q_begin) + query, done, mask=query < n_q)


@triton.jit
def remainder_of(x, TYPE: tl.constexpr):
    """What rounding to a type takes from x; nothing of what is not finite."""
    rest = x - narrow(x, TYPE).to(tl.float32)
    return tl.where(tl.abs(rest) < float("inf"), rest, 0.0)


@triton.jit
def narrowing(largest, factor, shift, TYPE: tl.constexpr):
    """By how much the weight of the largest score changed before it was multiplied.

    It is 1, unless scores are so large that row_max was rounded by much. Of a row whose weight is all on one key the
    result is that key's v, to the last bit: gradients are differences of such numbers.
    """
    heaviest = tl.exp2(fused(largest, factor, shift))
    return narrow(heaviest, TYPE).to(tl.float32) - heaviest


@triton.jit
def visit(
    acc, row_max, largest, row_sum, q_tile, query, first_tile, last_tile, KIND: tl.constexpr, keys, n_q, n_k, place,
    loaded, scale, turns, RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, TILE_K: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """A run of key tiles, all of one kind: a loop of its own, without what only the other needs, is the faster one.

    PARTIAL tiles are few. They are loaded when they are needed, so that all of shared memory is there for FULL ones.
    """
    k, v, k_steps, v_steps, k_map, v_map, b, hk, k_begin = keys
    factor = binary(scale, RAW)
    for tile in tl.range(first_tile, last_tile, num_stages=1 if KIND == PARTIAL else None):
        first = tile * TILE_K
        key = first + tl.arange(0, TILE_K)
        # 2 s = q @ k.T
        k_tile = load_head(
            k, k_steps, k_map, b, hk, k_begin, first, n_k, turns, KEYS, TILE_K, D, DEPTH, PAIRS, INTERLEAVED
        )
        s = tl.dot(q_tile.to(DOT), tl.trans(k_tile).to(DOT), input_precision="ieee")
        # 3 score
        # 4 mask (PARTIAL tiles only)
        s = scores(s, query[:, None], key[None, :], KIND, n_q, n_k, place, loaded, scale, RAW, SCORE, MASK)
        # 5 row_max, rescale, p, row_sum
        largest_here = tl.max(s, 1)
        largest = tl.maximum(largest, largest_here)
        new_max = tl.maximum(row_max, largest_here * factor)
        shift = finite(new_max)
        rescale = tl.exp2(row_max - shift)
        p = tl.exp2(fused(s, factor, -shift[:, None]))
        row_sum = row_sum * rescale + tl.sum(p, 1)
        row_max = new_max
        # 6 acc = acc * rescale + p @ v
        v_tile = load_tile(v, v_steps, v_map, b, hk, k_begin, first, n_k, TILE_K, D_V, COLUMNS)
        acc = acc * rescale[:, None]
        acc = tl.dot(narrow(p, v_tile.dtype).to(DOT), v_tile.to(DOT), acc, input_precision="ieee")
    return acc, row_max, largest, row_sum


@triton.jit
def with_sink(lse, sink):
    """log(exp(lse) + exp(sink))"""
    larger = tl.maximum(lse, sink)
    joint = larger + tl.log(tl.exp(lse - finite(larger)) + tl.exp(sink - finite(larger)))
    return tl.where(larger == float("-inf"), larger, joint)
