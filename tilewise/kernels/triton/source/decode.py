"""Decoding in Triton: few queries over a long cache, whose keys are read once.

A program of `decode` has one key head. Its rows are all queries of all query heads that share it; its keys are a share
of the sequence's, one of `splits`, so that a single sequence fills a GPU. `merge` makes one result of the shares.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewise.kernels.triton.source.forward import with_sink
from tilewise.kernels.triton.source.pages import gather_rows, gather_turned, place_of_tile, scatter_rows
from tilewise.kernels.triton.source.tiles import LOG2_E, at_scores, finite, matrix, narrow


@triton.jit
def decode(
    q, k, v, out, lse, sinks, lengths, table, q_steps, k_steps, v_steps, out_steps, lse_steps, table_step,
    reach, loaded, group, n_q, units, capacity, splits, scale, turn,
    SCORE: tl.constexpr, MASK: tl.constexpr, HAS_SINKS: tl.constexpr, PAGE: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, DOT: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    COUNTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:  # this was started beside the kernel before it, and the next one may be beside this
        gdc_wait()
        gdc_launch_dependents()
    split, hk, b = tl.program_id(0) % splits, tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) // splits * TILE_Q + tl.arange(0, TILE_Q)
    inside, h, query = row < group * n_q, hk * group + row // n_q, row % n_q
    n_k = tl.minimum(tl.maximum(tl.load(lengths + b), 0), capacity)  # whatever lengths hold, keys are within the cache
    first, last, first_full, last_full = share(n_k, reach, split, splits, TILE_K)

    # 1 load q, turned as the keys were when they came
    place = tl.maximum(n_k - n_q + query, 0) if COUNTED else query
    q_tile = gather_turned(matrix(q, q_steps, b, h, query), inside, turn, b, place, D, DEPTH, PAIRS, INTERLEAVED)
    row_max = tl.full([TILE_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, COLUMNS], tl.float32)
    # for each kv tile of this share: the FULL ones, then those before and behind them
    place = (b, h[:, None], hk, 0, 0, n_q, n_k, 0, 0)
    cache = (k, v, table + tl.cast(b, tl.int64) * table_step, k_steps, v_steps, units)
    for tile in range(first_full, last_full):
        acc, row_max, row_sum = visit(
            tile, acc, row_max, row_sum, q_tile, query, cache, n_k, place, loaded, scale,
            SCORE, MASK, False, PAGE, TILE_K, D, D_V, DEPTH, COLUMNS, DOT,
        )  # fmt: skip
    for i in range(last - first - (last_full - first_full)):
        tile = first + i + tl.where(first + i < first_full, 0, last_full - first_full)
        acc, row_max, row_sum = visit(
            tile, acc, row_max, row_sum, q_tile, query, cache, n_k, place, loaded, scale,
            SCORE, MASK, True, PAGE, TILE_K, D, D_V, DEPTH, COLUMNS, DOT,
        )  # fmt: skip

    # 7 finish: acc / row_sum, lse
    empty = row_sum == 0
    row_sum = tl.where(empty, 1.0, row_sum)
    done = tl.where(empty, float("-inf"), finite(row_max) + tl.log(row_sum))
    weight = 1 / row_sum
    if HAS_SINKS:
        joint = with_sink(done, tl.load(sinks + h, mask=inside, other=0.0).to(tl.float32))
        weight = weight * tl.exp(done - finite(joint))
        done = joint
    at = matrix(out, out_steps, b, h, query) + split * out_steps[3]
    scatter_rows(at, narrow(acc * weight[:, None], out.dtype.element_ty), inside, D_V, COLUMNS)
    tl.store(matrix(lse, lse_steps, b, h, query) + split * lse_steps[3], done, mask=inside)


@triton.jit
def share(n_k, reach, split, splits, TILE_K: tl.constexpr):
    """The first of this share's key tiles and the one behind the last; and the same of those that are FULL."""
    far, far_full, near_full = reach  # how far from the end keys may count, and from where to where all of them do
    begin = tl.maximum(n_k - far, 0) // TILE_K
    tiles = tl.cdiv(n_k, TILE_K) - begin
    first, last = begin + tiles * split // splits, begin + tiles * (split + 1) // splits
    first_full = tl.cdiv(tl.maximum(n_k - far_full, 0), TILE_K)
    last_full = tl.maximum(n_k - near_full, 0) // TILE_K
    first_full = tl.minimum(tl.maximum(first_full, first), last)
    return first, last, first_full, tl.maximum(tl.minimum(last_full, last), first_full)


@triton.jit
def visit(
    tile, acc, row_max, row_sum, q_tile, query, cache, n_k, place, loaded, scale,
    SCORE: tl.constexpr, MASK: tl.constexpr, PARTIAL: tl.constexpr, PAGE: tl.constexpr,
    TILE_K: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    k, v, pages, k_steps, v_steps, units = cache
    hk = place[2]
    key = tile * TILE_K + tl.arange(0, TILE_K)
    there = key < n_k if PARTIAL else None
    unit, slot = place_of_tile(pages, units, place[0], tile * TILE_K, key, there, PAGE, TILE_K)
    # 2 s = q @ k.T
    k_tile = gather_rows(matrix(k, k_steps, unit, hk, slot), there, D, DEPTH)
    s = tl.dot(q_tile.to(DOT), tl.trans(k_tile).to(DOT), input_precision="ieee") * scale
    # 3 score
    if SCORE is not None:
        s = at_scores(SCORE, s, query[:, None], key[None, :], place, loaded) + tl.zeros_like(s)
    # 4 mask (PARTIAL tiles only)
    if PARTIAL:
        counts = there[None, :]
        if MASK is not None:
            counts = counts & at_scores(MASK, s, query[:, None], key[None, :], place, loaded)
        s = tl.where(counts, s, float("-inf"))
    # 5 row_max, rescale, p, row_sum
    new_max = tl.maximum(row_max, tl.max(s, 1))
    shift = finite(new_max)
    rescale = tl.exp2((row_max - shift) * LOG2_E)
    p = tl.exp2((s - shift[:, None]) * LOG2_E)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    # 6 acc = acc * rescale + p @ v
    v_tile = gather_rows(matrix(v, v_steps, unit, hk, slot), there, D_V, COLUMNS)
    acc = acc * rescale[:, None]
    acc = tl.dot(narrow(p, v_tile.dtype).to(DOT), v_tile.to(DOT), acc, input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def merge(
    parts, parts_lse, out, lse, sinks, out_steps, lse_steps, n_q, splits,
    HAS_SINKS: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, D_V: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Results over shares of the keys as one, as softmax.merge has it: each weighs exp(its lse - the common lse)."""
    query, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.cast((b * tl.num_programs(1) + h) * n_q + query, tl.int64) * splits
    split = tl.arange(0, SPLITS)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    part_lse = tl.load(parts_lse + first + split, mask=split < splits, other=float("-inf"))
    row_max = tl.max(part_lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + h).to(tl.float32)
        row_max = tl.maximum(row_max, sink)
    shift = finite(row_max)
    row_sum = tl.sum(tl.exp(part_lse - shift), 0)
    if HAS_SINKS:
        row_sum = row_sum + tl.exp(sink - shift)

    acc = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, splits, AT_ONCE):
        some = begin + tl.arange(0, AT_ONCE)
        weight = tl.exp(tl.load(parts_lse + first + some, mask=some < splits, other=float("-inf")) - shift)
        part = gather_rows(parts + (first + some) * D_V, some < splits, D_V, COLUMNS)
        acc = acc + tl.sum(part * weight[:, None], 0)

    empty = row_sum == 0
    row_sum = tl.where(empty, 1.0, row_sum)
    column = tl.arange(0, COLUMNS)
    at = matrix(out, out_steps, b, h, query) + column
    tl.store(at, narrow(acc / row_sum, out.dtype.element_ty), mask=column < D_V)
    tl.store(matrix(lse, lse_steps, b, h, query), tl.where(empty, float("-inf"), shift + tl.log(row_sum)))
