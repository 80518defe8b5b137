"""Rows as products take them, made before the kernels that multiply: features, gradients of rows, sums.

A kernel that has a state in registers has little room for anything else, and multiplies nothing meanwhile. Here a
program has one chunk, many are on a processor at a time, and all of it takes as long as memory does.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewise.linear.kernels.triton.source.chunks import (
    decayed,
    decays,
    features,
    inverse,
    load_head,
    product,
    row_gradients,
    segment_at,
    store_head,
    store_numbers,
    sums_at,
    within,
    z_of,
)


@triton.jit
def chunk_of(heads, chunks, segments, CHUNK: tl.constexpr):
    """This program's batch index and head, the first row of its chunk, and the one behind its segment's last. chunks:
    how many a segment has at most."""
    head = tl.program_id(0) // chunks
    begin, end = segment_at(segments)
    return head // heads, head % heads, begin + tl.program_id(0) % chunks * CHUNK, end


@triton.jit
def map_rows(
    x, decay, made, sums, totals, x_steps, decay_steps, made_steps, sums_steps, totals_steps,
    segments, heads, chunks, scale,
    FEATURE: tl.constexpr, TYPE: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """made: features of q or k; sums: of a chunk's rows, each decayed to its end; totals: the log that all of it decays
    by. What is not wanted is None."""
    b, h, first, end = chunk_of(heads, chunks, segments, CHUNK)
    i = tl.arange(0, DEPTH)
    if first < end:
        f = features(x, x_steps, b, h, first, end, i, scale, FEATURE, TYPE, CHUNK, D)
        if made is not None:
            store_head(made, made_steps, b, h, first, end, i, f, CHUNK, D)
        if sums is not None:
            c, total = decays(decay, decay_steps, b, h, first, end, CHUNK)
            added = tl.sum(decayed(f, total - c, decay).to(tl.float32), 0)
            tl.store(sums_at(sums, sums_steps, b, h, first, CHUNK) + i, added, mask=i < D)
            if totals is not None:
                tl.store(sums_at(totals, totals_steps, b, h, first, CHUNK), total)


@triton.jit
def chained(factor, x, next_factor, next_x):
    return factor * next_factor, x * next_factor + next_x


@triton.jit
def z_rows(
    sums, totals, states, initial, z_before, sums_steps, totals_steps, segments, n_segments, heads_k,
    EARLY: tl.constexpr, TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """z_before: z before each chunk, from what each adds to it; as sums lie."""
    b, hk = tl.program_id(0) // heads_k, tl.program_id(0) % heads_k
    begin, end = segment_at(segments)
    chunks = tl.cdiv(end - begin, CHUNK)
    i, chunk = tl.arange(0, DEPTH), tl.arange(0, CHUNK)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    z = z_of(states, initial, n_segments, b, hk, heads_k, i, D, D_V)
    at = sums_at(z_before, sums_steps, b, hk, begin, CHUNK)
    tl.store(at + i, z, mask=i < D)
    for first in range(0, chunks, CHUNK):
        there = (chunk < chunks - first)[:, None] & (i < D)[None, :]
        place = (first + chunk)[:, None] * sums_steps[2] + i[None, :]
        x = tl.load(sums_at(sums, sums_steps, b, hk, begin, CHUNK) + place, mask=there, other=0.0)
        if totals is None:
            behind = tl.cumsum(x, 0) + z[None, :]
        else:
            of_chunk = sums_at(totals, totals_steps, b, hk, begin, CHUNK) + (first + chunk) * totals_steps[2]
            kept = tl.exp(tl.load(of_chunk, mask=chunk < chunks - first, other=0.0))
            kept, behind = tl.associative_scan((tl.broadcast_to(kept[:, None], x.shape), x), 0, chained)
            behind += kept * z[None, :]
        # Behind a chunk is before the next one of the segment, if there is one.
        tl.store(at + sums_steps[2] + place, behind, mask=there & (chunk < chunks - first - 1)[:, None])
        z = tl.sum(tl.where((chunk == CHUNK - 1)[:, None], behind, 0.0), 0)


@triton.jit
def weigh_rows(
    q, k, decay, z_before, made, norm, inverses, q_steps, k_steps, decay_steps, sums_steps, made_steps,
    segments, heads, group, n, chunks, scale,
    EARLY: tl.constexpr, FEATURE: tl.constexpr, TYPE: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """norm: the sum of each row's weights; inverses: 1 over it; made: features of q, or None if it has them. k has
    features."""
    b, h, first, end = chunk_of(heads, chunks, segments, CHUNK)
    hk = h // group
    i = tl.arange(0, DEPTH)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if first < end:
        # 1 load q; and k, which then comes meanwhile
        f_k = features(k, k_steps, b, hk, first, end, i, None, None, TYPE, CHUNK, D)
        f_q = features(q, q_steps, b, h, first, end, i, scale, FEATURE, TYPE, CHUNK, D)
        if made is not None:
            store_head(made, made_steps, b, h, first, end, i, f_q, CHUNK, D)
        # 2 what came before the chunk
        c, _ = decays(decay, decay_steps, b, hk, first, end, CHUNK)
        z = tl.load(sums_at(z_before, sums_steps, b, hk, first, CHUNK) + i, mask=i < D, other=0.0)
        row_sums = tl.sum(decayed(f_q, c, decay).to(tl.float32) * z[None, :], 1)
        # 3 weights within the chunk
        row_sums += tl.sum(within(product(f_q, tl.trans(f_k), TYPE), c, decay, CHUNK), 1)
        # 4 finish
        store_numbers(norm, b, h, heads, n, first, end, row_sums, CHUNK)
        store_numbers(inverses, b, h, heads, n, first, end, inverse(row_sums), CHUNK)


@triton.jit
def pull_rows(
    q, decay, out, norm, d_out, g, shift, sums, q_steps, decay_steps, out_steps, d_out_steps, g_steps, sums_steps,
    segments, heads, group, n, chunks, scale,
    TYPE: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """g: gradients of a row's sum of weighted values; shift: e, that of its sum of weights; sums: of e f_q over a
    chunk's rows, each decayed since its beginning. q has features."""
    b, h, first, end = chunk_of(heads, chunks, segments, CHUNK)
    i, j = tl.arange(0, DEPTH), tl.arange(0, COLUMNS)
    if first < end:
        g_rows = row_gradients(d_out, d_out_steps, norm, b, h, heads, n, first, end, j, TYPE, CHUNK, D_V)
        store_head(g, g_steps, b, h, first, end, j, g_rows, CHUNK, D_V)
        out_rows = load_head(out, out_steps, b, h, first, end, j, CHUNK, D_V).to(tl.float32)
        e = -tl.sum(g_rows.to(tl.float32) * out_rows, 1)
        store_numbers(shift, b, h, heads, n, first, end, e, CHUNK)
        c, _ = decays(decay, decay_steps, b, h // group, first, end, CHUNK)
        f_q = features(q, q_steps, b, h, first, end, i, scale, None, TYPE, CHUNK, D)
        added = tl.sum(decayed(f_q, c, decay).to(tl.float32) * e[:, None], 0)
        tl.store(sums_at(sums, sums_steps, b, h, first, CHUNK) + i, added, mask=i < D)
