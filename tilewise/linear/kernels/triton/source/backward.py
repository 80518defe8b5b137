"""The backward pass: forwards through the chunks for d_q, with the state, and backwards for d_k and d_v, with the
state's gradient. Each number is written by one program, so that the same call gives the same bits."""

import triton
import triton.language as tl

from tilewise.linear.kernels.triton.source.chunks import (
    added,
    after,
    decayed,
    decays,
    features,
    kept,
    load_head,
    load_numbers,
    mapped,
    place_of,
    product,
    row_gradients,
    scaled,
    segment_at,
    state_of,
    store_head,
    store_numbers,
    store_state,
    sum_of,
    within,
)


@triton.jit
def linear_d_query(
    q, k, v, raw, decay, sums, states, initial, out, norm, d_out, d_q, shift, d_rows,
    q_steps, k_steps, v_steps, raw_steps, decay_steps, sums_steps, out_steps, d_out_steps, d_q_steps,
    segments, n_segments, heads, group, n, scale, d_scale, one,
    FEATURE: tl.constexpr, SLOPE: tl.constexpr, CAUSAL: tl.constexpr,
    TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """raw: q, whose slopes count. shift: the gradient of each row's sum of weights, which is left there if d_out is to
    be divided by norm yet; d_rows: where that of what its weights decayed by is left."""
    b, h, block = place_of(heads, BLOCKS)
    hk = h // group
    begin, end = segment_at(segments)
    i, j = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    kv, z = state_of(states, initial, n_segments, b, hk, heads // group, i, j, D, D_V)
    for first in tl.range(begin, end, CHUNK):
        # 1 load d_out
        c, total = decays(decay, decay_steps, b, hk, first, end, CHUNK)
        g = row_gradients(d_out, d_out_steps, norm, b, h, heads, n, first, end, j, TYPE, CHUNK, D_V)
        # 2 what came before the chunk
        d_f = product(g, tl.trans(kv), TYPE)
        if norm is not None:
            out_rows = load_head(out, out_steps, b, h, first, end, j, CHUNK, D_V).to(tl.float32)
            e = -tl.sum(g.to(tl.float32) * out_rows, 1)
            if block == 0:
                store_numbers(shift, b, h, heads, n, first, end, e, CHUNK)
        elif shift is not None:
            e = load_numbers(shift, b, h, heads, n, first, end, CHUNK)
        if shift is not None:
            d_f += e[:, None] * z[None, :]
        d_f = decayed(d_f, c, decay)
        if CAUSAL:
            # 3 weights within the chunk
            f_k = features(k, k_steps, b, hk, first, end, i, None, FEATURE, TYPE, CHUNK, D)
            v_rows = load_head(v, v_steps, b, hk, first, end, j, CHUNK, D_V)
            d_w = product(g, tl.trans(v_rows), TYPE)
            if shift is not None:
                d_w += e[:, None]
            d_f = added(d_f, product(within(d_w, c, decay, CHUNK), f_k, TYPE), one)
            # 4 the state after it
            kv, z = after(
                kv, z, f_k, v_rows, c, total, decay, sums, sums_steps, b, hk, first, i, TYPE, CHUNK, D,
                SUMS=shift is not None,
            )  # fmt: skip
        # 5 finish: d_q
        if d_rows is not None:
            f_q = features(q, q_steps, b, h, first, end, i, scale, FEATURE, TYPE, CHUNK, D).to(tl.float32)
            part = d_rows + block * (tl.num_programs(0) // BLOCKS).to(tl.int64) * n
            store_numbers(part, b, h, heads, n, first, end, tl.sum(f_q * d_f, 1), CHUNK)
        if SLOPE is not None:
            d_f *= mapped(load_head(raw, raw_steps, b, h, first, end, i, CHUNK, D), SLOPE, first, end, i, CHUNK, D)
        store_head(d_q, d_q_steps, b, h, first, end, i, scaled(d_f, d_scale), CHUNK, D)


@triton.jit
def key_rows(
    d_f, kv, z, v_rows, q, d_out, norm, shift, decay, c, sums, q_steps, d_out_steps, sums_steps, b, h, heads, n, first,
    end, i, j, scale, one,
    FEATURE: tl.constexpr, TYPE: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
):  # fmt: skip
    """One head's queries: what they add to the gradient of a chunk's keys, and to that of the state."""
    # 3 weights within the chunk
    f_q = features(q, q_steps, b, h, first, end, i, scale, FEATURE, TYPE, CHUNK, D)
    g = row_gradients(d_out, d_out_steps, norm, b, h, heads, n, first, end, j, TYPE, CHUNK, D_V)
    d_w = product(v_rows, tl.trans(g), TYPE)
    if shift is not None:
        e = load_numbers(shift, b, h, heads, n, first, end, CHUNK)
        d_w += e[None, :]
    d_f = added(d_f, product(within(d_w, c, decay, CHUNK, TURNED=True), f_q, TYPE), one)
    # 4 the gradient of the state before it
    f_q = decayed(f_q, c, decay)
    kv += product(tl.trans(f_q), g, TYPE)
    if shift is not None:
        z += sum_of(f_q.to(tl.float32) * e[:, None], sums, sums_steps, b, h, first, i, CHUNK, D)
    return d_f, kv, z


@triton.jit
def linear_d_keys(
    q, k, v, raw, decay, sums, states, d_state, norm, d_out, shift, d_k, d_columns, d_initial,
    q_steps, k_steps, v_steps, raw_steps, decay_steps, sums_steps, d_out_steps, d_k_steps,
    segments, n_segments, heads_k, n, scale, one,
    GROUP: tl.constexpr, FEATURE: tl.constexpr, SLOPE: tl.constexpr, SUMS: tl.constexpr, CAUSAL: tl.constexpr,
    TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """raw: k, whose slopes count. sums: of e f_q over each chunk's rows, if they were made before. states: gradients of
    the states behind each segment; d_state: that of the last. d_columns: of what keys decay by,
    as d_rows is of rows. SUMS: z has a gradient. d_initial: where that of the state before the first segment goes, if
    it is wanted."""
    b, hk, block = place_of(heads_k, BLOCKS)
    heads = heads_k * GROUP
    begin, end = segment_at(segments)
    i, j = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    kv, z = state_of(states, d_state, n_segments, b, hk, heads_k, i, j, D, D_V)
    chunks = tl.cdiv(end - begin, CHUNK)
    for chunk in tl.range(0, chunks):
        # 1 load v
        first = begin + (chunks - 1 - chunk) * CHUNK
        c, total = decays(decay, decay_steps, b, hk, first, end, CHUNK)
        v_rows = load_head(v, v_steps, b, hk, first, end, j, CHUNK, D_V)
        # 2 what comes behind the chunk
        d_f = product(v_rows, tl.trans(kv), TYPE)
        if SUMS:
            d_f += z[None, :]
        d_f = decayed(d_f, total - c, decay)
        if CAUSAL:
            kv, z = kept(kv, total, decay), kept(z, total, decay)
            if GROUP == 1:  # no loop in the loop: what comes next is loaded meanwhile
                d_f, kv, z = key_rows(
                    d_f, kv, z, v_rows, q, d_out, norm, shift, decay, c, sums, q_steps, d_out_steps, sums_steps, b, hk,
                    heads, n, first, end, i, j, scale, one, FEATURE, TYPE, CHUNK, D, D_V,
                )  # fmt: skip
            else:
                for h in range(hk * GROUP, (hk + 1) * GROUP):
                    d_f, kv, z = key_rows(
                        d_f, kv, z, v_rows, q, d_out, norm, shift, decay, c, sums, q_steps, d_out_steps, sums_steps, b,
                        h, heads, n, first, end, i, j, scale, one, FEATURE, TYPE, CHUNK, D, D_V,
                    )  # fmt: skip
        # 5 finish: d_k
        if d_columns is not None:
            f_k = features(k, k_steps, b, hk, first, end, i, None, FEATURE, TYPE, CHUNK, D).to(tl.float32)
            part = d_columns + block * (tl.num_programs(0) // BLOCKS).to(tl.int64) * n
            store_numbers(part, b, hk, heads_k, n, first, end, tl.sum(f_k * d_f, 1), CHUNK)
        if SLOPE is not None:
            d_f *= mapped(load_head(raw, raw_steps, b, hk, first, end, i, CHUNK, D), SLOPE, first, end, i, CHUNK, D)
        store_head(d_k, d_k_steps, b, hk, first, end, i, d_f, CHUNK, D)
    if d_initial is not None:  # noqa: SIM102 - known when it is compiled, and the next is not
        if begin == 0:
            slot = tl.cast(b, tl.int64) * heads_k + hk
            store_state(d_initial[0] + slot * (D * D_V), d_initial[1] + slot * D, kv, z, i, j, True, D, D_V)


@triton.jit
def value_rows(
    acc, kv, f_k, q, d_out, norm, decay, c, q_steps, d_out_steps, b, h, heads, n, first, end, i, j, scale,
    one, FEATURE: tl.constexpr, TYPE: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
):  # fmt: skip
    """One head's queries: what they add to the gradient of a chunk's values, and to that of the state."""
    # 3 weights within the chunk
    f_q = features(q, q_steps, b, h, first, end, i, scale, FEATURE, TYPE, CHUNK, D)
    g = row_gradients(d_out, d_out_steps, norm, b, h, heads, n, first, end, j, TYPE, CHUNK, D_V)
    w = within(product(f_k, tl.trans(f_q), TYPE), c, decay, CHUNK, TURNED=True)
    acc = added(acc, product(w, g, TYPE), one)
    # 4 the gradient of the state before it
    kv += product(tl.trans(decayed(f_q, c, decay)), g, TYPE)
    return acc, kv


@triton.jit
def d_values(
    q, k, decay, states, d_state, norm, d_out, d_v, q_steps, k_steps, decay_steps, d_out_steps, d_v_steps,
    segments, n_segments, heads_k, n, scale, one, GROUP: tl.constexpr, FEATURE: tl.constexpr, CAUSAL: tl.constexpr,
    TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`outputs` with time turned round: keys are the queries, and rows' gradients the values."""
    b, hk, block = place_of(heads_k, BLOCKS)
    heads = heads_k * GROUP
    begin, end = segment_at(segments)
    i, j = tl.arange(0, DEPTH), block * BLOCK + tl.arange(0, BLOCK)
    kv, _ = state_of(states, d_state, n_segments, b, hk, heads_k, i, j, D, D_V)
    chunks = tl.cdiv(end - begin, CHUNK)
    for chunk in tl.range(0, chunks):
        # 1 load k
        first = begin + (chunks - 1 - chunk) * CHUNK
        c, total = decays(decay, decay_steps, b, hk, first, end, CHUNK)
        f_k = features(k, k_steps, b, hk, first, end, i, None, FEATURE, TYPE, CHUNK, D)
        # 2 what comes behind the chunk
        acc = decayed(product(f_k, kv, TYPE), total - c, decay)
        if CAUSAL:
            kv = kept(kv, total, decay)
            if GROUP == 1:
                acc, kv = value_rows(
                    acc, kv, f_k, q, d_out, norm, decay, c, q_steps, d_out_steps, b, hk, heads, n, first, end, i, j,
                    scale, one, FEATURE, TYPE, CHUNK, D, D_V,
                )  # fmt: skip
            else:
                for h in range(hk * GROUP, (hk + 1) * GROUP):
                    acc, kv = value_rows(
                        acc, kv, f_k, q, d_out, norm, decay, c, q_steps, d_out_steps, b, h, heads, n, first, end, i, j,
                        scale, one, FEATURE, TYPE, CHUNK, D, D_V,
                    )  # fmt: skip
        # 5 finish: d_v
        store_head(d_v, d_v_steps, b, hk, first, end, j, acc, CHUNK, D_V)
