"""The backward pass: forwards through the chunks for d_q, with the state, and backwards for d_k and d_v, with the
state's gradient. Each number is written by one program, so that the same call gives the same bits."""

import triton
import triton.language as tl

from tilewise.linear.kernels.triton.source.chunks import (
    after,
    decays,
    features,
    load_head,
    load_numbers,
    load_state,
    mapped,
    operand,
    product,
    row_gradients,
    segment_at,
    state_at,
    store_head,
    store_numbers,
    within,
)


@triton.jit
def linear_d_query(
    q, k, v, decay, states, out, norm, d_out, d_q, shift, d_rows,
    q_steps, k_steps, v_steps, decay_steps, out_steps, d_out_steps, d_q_steps,
    segments, heads, group, n, scale, FEATURE: tl.constexpr, SLOPE: tl.constexpr, CAUSAL: tl.constexpr,
    TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """shift: where the gradient of each row's sum of weights is left; d_rows: that of what its weights decayed by."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    hk = h // group
    begin, end = segment_at(segments)
    i, j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    kv, z = load_state(state_at(states, b, hk, heads // group, D, D_V), i, j, D, D_V)
    for first in tl.range(begin, end, CHUNK):
        # 1 load d_out
        row = first + tl.arange(0, CHUNK)
        c, total = decays(decay, decay_steps, b, hk, row, end, CHUNK)
        g = row_gradients(d_out, d_out_steps, norm, b, h, heads, n, row, end, j, TYPE, CHUNK, D_V)
        # 2 what came before the chunk
        d_f = product(g, tl.trans(kv), TYPE)
        if norm is not None:
            out_rows = load_head(out, out_steps, b, h, row, end, j, D_V).to(tl.float32)
            e = -tl.sum(g.to(tl.float32) * out_rows, 1)
            if tl.program_id(2) == 0:
                store_numbers(shift, b, h, heads, n, row, end, e)
            d_f += e[:, None] * z[None, :]
        d_f *= tl.exp(c)[:, None]
        if CAUSAL:
            # 3 weights within the chunk
            f_k = features(k, k_steps, b, hk, row, end, i, 1.0, FEATURE, TYPE, D)
            v_rows = load_head(v, v_steps, b, hk, row, end, j, D_V)
            d_w = product(g, tl.trans(v_rows), TYPE)
            if norm is not None:
                d_w += e[:, None]
            d_f += product(within(d_w, c, decay, CHUNK), f_k, TYPE)
            # 4 the state after it
            kv, z = after(kv, z, f_k, v_rows, c, total, TYPE)
        # 5 finish: d_q
        q_rows = load_head(q, q_steps, b, h, row, end, i, D)
        if d_rows is not None:
            f_q = operand(mapped(q_rows, FEATURE, row, end, i, D) * scale, TYPE).to(tl.float32)
            part = d_rows + tl.program_id(2) * tl.num_programs(1).to(tl.int64) * n
            store_numbers(part, b, h, heads, n, row, end, tl.sum(f_q * d_f, 1))
        d_f *= scale * mapped(q_rows, SLOPE, row, end, i, D)
        store_head(d_q, d_q_steps, b, h, row, end, i, d_f, D)


@triton.jit
def linear_d_keys(
    q, k, v, decay, states, norm, d_out, shift, d_k, d_columns,
    q_steps, k_steps, v_steps, decay_steps, d_out_steps, d_k_steps,
    segments, heads_k, group, n, scale, FEATURE: tl.constexpr, SLOPE: tl.constexpr, CAUSAL: tl.constexpr,
    TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """states: gradients of the states behind each segment. d_columns: of what keys decay by, as d_rows is of rows."""
    b, hk = tl.program_id(1) // heads_k, tl.program_id(1) % heads_k
    heads = heads_k * group
    begin, end = segment_at(segments)
    i, j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    kv, z = load_state(state_at(states, b, hk, heads_k, D, D_V), i, j, D, D_V)
    chunks = tl.cdiv(end - begin, CHUNK)
    for chunk in tl.range(0, chunks):
        # 1 load v
        row = begin + (chunks - 1 - chunk) * CHUNK + tl.arange(0, CHUNK)
        c, total = decays(decay, decay_steps, b, hk, row, end, CHUNK)
        v_rows = load_head(v, v_steps, b, hk, row, end, j, D_V)
        # 2 what comes behind the chunk
        d_f = (product(v_rows, tl.trans(kv), TYPE) + z[None, :]) * tl.exp(total - c)[:, None]
        if CAUSAL:
            kv, z = kv * tl.exp(total), z * tl.exp(total)
            for h in range(hk * group, (hk + 1) * group):
                # 3 weights within the chunk
                f_q = features(q, q_steps, b, h, row, end, i, scale, FEATURE, TYPE, D)
                g = row_gradients(d_out, d_out_steps, norm, b, h, heads, n, row, end, j, TYPE, CHUNK, D_V)
                d_w = product(g, tl.trans(v_rows), TYPE)
                if norm is not None:
                    e = load_numbers(shift, b, h, heads, n, row, end)
                    d_w += e[:, None]
                d_f += product(tl.trans(within(d_w, c, decay, CHUNK)), f_q, TYPE)
                # 4 the gradient of the state before it
                f_q = f_q.to(tl.float32) * tl.exp(c)[:, None]
                kv += product(tl.trans(f_q), g, TYPE)
                if norm is not None:
                    z += tl.sum(f_q * e[:, None], 0)
        # 5 finish: d_k
        k_rows = load_head(k, k_steps, b, hk, row, end, i, D)
        if d_columns is not None:
            f_k = operand(mapped(k_rows, FEATURE, row, end, i, D), TYPE).to(tl.float32)
            part = d_columns + tl.program_id(2) * tl.num_programs(1).to(tl.int64) * n
            store_numbers(part, b, hk, heads_k, n, row, end, tl.sum(f_k * d_f, 1))
        d_f *= mapped(k_rows, SLOPE, row, end, i, D)
        store_head(d_k, d_k_steps, b, hk, row, end, i, d_f, D)


@triton.jit
def d_values(
    q, k, decay, states, norm, d_out, d_v, q_steps, k_steps, decay_steps, d_out_steps, d_v_steps,
    segments, heads_k, group, n, scale, FEATURE: tl.constexpr, CAUSAL: tl.constexpr,
    TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`outputs` with time turned round: keys are the queries, and rows' gradients the values."""
    b, hk = tl.program_id(1) // heads_k, tl.program_id(1) % heads_k
    heads = heads_k * group
    begin, end = segment_at(segments)
    i, j = tl.arange(0, DEPTH), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    kv, _ = load_state(state_at(states, b, hk, heads_k, D, D_V), i, j, D, D_V)
    chunks = tl.cdiv(end - begin, CHUNK)
    for chunk in tl.range(0, chunks):
        # 1 load k
        row = begin + (chunks - 1 - chunk) * CHUNK + tl.arange(0, CHUNK)
        c, total = decays(decay, decay_steps, b, hk, row, end, CHUNK)
        f_k = features(k, k_steps, b, hk, row, end, i, 1.0, FEATURE, TYPE, D)
        # 2 what comes behind the chunk
        acc = product(f_k, kv, TYPE) * tl.exp(total - c)[:, None]
        if CAUSAL:
            kv *= tl.exp(total)
            for h in range(hk * group, (hk + 1) * group):
                # 3 weights within the chunk
                f_q = features(q, q_steps, b, h, row, end, i, scale, FEATURE, TYPE, D)
                g = row_gradients(d_out, d_out_steps, norm, b, h, heads, n, row, end, j, TYPE, CHUNK, D_V)
                w = within(product(f_q, tl.trans(f_k), TYPE), c, decay, CHUNK)
                acc += product(tl.trans(w), g, TYPE)
                # 4 the gradient of the state before it
                kv += product(tl.trans(f_q.to(tl.float32) * tl.exp(c)[:, None]), g, TYPE)
        # 5 finish: d_v
        store_head(d_v, d_v_steps, b, hk, row, end, j, acc, D_V)
