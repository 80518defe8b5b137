"""Rows as products take them, made before the kernels that multiply: features, gradients of rows, sums over chunks.

A kernel that has a state in registers has little room for anything else, and multiplies nothing meanwhile. Here a
program has one chunk, many are on a processor at a time, and all of it takes as long as memory does.
"""

import triton
import triton.language as tl

from tilewise.linear.kernels.triton.source.chunks import (
    decayed,
    decays,
    features,
    load_head,
    row_gradients,
    segment_at,
    store_head,
    store_numbers,
    sums_at,
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
    x, decay, mapped, sums, x_steps, decay_steps, mapped_steps, sums_steps, segments, heads, chunks, scale,
    FEATURE: tl.constexpr, TYPE: tl.constexpr, CHUNK: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Features of q or k, and the sums of a chunk's rows, each decayed to its end; None of what is not wanted."""
    b, h, first, end = chunk_of(heads, chunks, segments, CHUNK)
    i = tl.arange(0, DEPTH)
    if first < end:
        f = features(x, x_steps, b, h, first, end, i, scale, FEATURE, TYPE, CHUNK, D)
        if mapped is not None:
            store_head(mapped, mapped_steps, b, h, first, end, i, f, CHUNK, D)
        if sums is not None:
            c, total = decays(decay, decay_steps, b, h, first, end, CHUNK)
            added = tl.sum(decayed(f, total - c, decay).to(tl.float32), 0)
            tl.store(sums_at(sums, sums_steps, b, h, first, CHUNK) + i, added, mask=i < D)


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
