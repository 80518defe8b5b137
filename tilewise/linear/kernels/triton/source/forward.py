"""The forward pass: a program has a segment of one head and some columns of v, and goes through the chunks with its
columns of the state in registers."""

import triton
import triton.language as tl

from tilewise.linear.kernels.triton.source.chunks import (
    after,
    decays,
    features,
    inverse,
    load_head,
    load_state,
    product,
    segment_at,
    state_at,
    store_head,
    store_numbers,
    within,
)


@triton.jit
def outputs(
    q, k, v, decay, states, out, norm, q_steps, k_steps, v_steps, decay_steps, out_steps, segments, heads, group, n,
    scale, FEATURE: tl.constexpr, CAUSAL: tl.constexpr, TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    hk = h // group
    begin, end = segment_at(segments)
    i, j = tl.arange(0, DEPTH), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    kv, z = load_state(state_at(states, b, hk, heads // group, D, D_V), i, j, D, D_V)
    for first in tl.range(begin, end, CHUNK):
        # 1 load q
        row = first + tl.arange(0, CHUNK)
        f_q = features(q, q_steps, b, h, row, end, i, scale, FEATURE, TYPE, D)
        c, total = decays(decay, decay_steps, b, hk, row, end, CHUNK)
        # 2 what came before the chunk
        past = tl.exp(c)
        acc = product(f_q, kv, TYPE) * past[:, None]
        sums = tl.sum(f_q.to(tl.float32) * z[None, :], 1) * past
        if CAUSAL:
            # 3 weights within the chunk
            f_k = features(k, k_steps, b, hk, row, end, i, 1.0, FEATURE, TYPE, D)
            v_rows = load_head(v, v_steps, b, hk, row, end, j, D_V)
            w = within(product(f_q, tl.trans(f_k), TYPE), c, decay, CHUNK)
            acc += product(w, v_rows, TYPE)
            sums += tl.sum(w, 1)
            # 4 the state after it
            kv, z = after(kv, z, f_k, v_rows, c, total, TYPE)
        # 5 finish: acc / sums
        if norm is not None:
            if tl.program_id(2) == 0:
                store_numbers(norm, b, h, heads, n, row, end, sums)
            acc *= inverse(sums)[:, None]
        store_head(out, out_steps, b, h, row, end, j, acc, D_V)
