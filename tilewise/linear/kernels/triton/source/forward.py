"""The forward pass: a program has a segment of one head and some columns of v, and goes through the chunks with its
columns of the state in registers."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tilewise.linear.kernels.triton.source.chunks import (
    added,
    after,
    decayed,
    decays,
    features,
    inverse,
    load_head,
    load_numbers,
    place_of,
    product,
    segment_at,
    state_of,
    store_columns,
    store_head,
    store_numbers,
    store_state,
    sum_of,
    within,
)


@triton.jit
def outputs(
    q, k, v, decay, sums, states, initial, out, norm, inverses, final,
    q_steps, k_steps, v_steps, decay_steps, sums_steps, out_steps, segments, n_segments, heads, group,
    n, scale, one, FEATURE: tl.constexpr, CAUSAL: tl.constexpr,
    EARLY: tl.constexpr, TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """norm: where the sums of rows' weights go, if they are not known yet; inverses: 1 over each, if they are; final:
    where the state after the last segment goes (kv, z), if it is wanted from here."""
    b, h, block = place_of(heads, BLOCKS)
    hk, heads_k = h // group, heads // group
    begin, end = segment_at(segments)
    i, j = tl.arange(0, DEPTH), block * BLOCK + tl.arange(0, BLOCK)
    if EARLY:  # this was started beside the kernel before it, whose results come next
        gdc_wait()
    kv, z = state_of(states, initial, n_segments, b, hk, heads_k, i, j, D, D_V)
    for first in tl.range(begin, end, CHUNK):
        # 1 load q
        f_q = features(q, q_steps, b, h, first, end, i, scale, FEATURE, TYPE, CHUNK, D)
        c, total = decays(decay, decay_steps, b, hk, first, end, CHUNK)
        # 2 what came before the chunk
        acc = decayed(product(f_q, kv, TYPE), c, decay)
        if norm is not None:
            row_sums = tl.sum(f_q.to(tl.float32) * z[None, :], 1) * tl.exp(c)
        if CAUSAL:
            # 3 weights within the chunk
            f_k = features(k, k_steps, b, hk, first, end, i, None, FEATURE, TYPE, CHUNK, D)
            v_rows = load_head(v, v_steps, b, hk, first, end, j, CHUNK, D_V)
            w = within(product(f_q, tl.trans(f_k), TYPE), c, decay, CHUNK)
            acc = added(acc, product(w, v_rows, TYPE), one)
            if norm is not None:
                row_sums += tl.sum(w, 1)
            # 4 the state after it
            kv, z = after(
                kv, z, f_k, v_rows, c, total, decay, sums, sums_steps, b, hk, first, i, TYPE, CHUNK, D,
                SUMS=norm is not None or final is not None,
            )  # fmt: skip
        # 5 finish: acc / row_sums
        if norm is not None:
            if block == 0:
                store_numbers(norm, b, h, heads, n, first, end, row_sums, CHUNK)
            acc *= inverse(row_sums)[:, None]
        if inverses is not None:
            acc *= load_numbers(inverses, b, h, heads, n, first, end, CHUNK)[:, None]
        store_head(out, out_steps, b, h, first, end, j, acc, CHUNK, D_V)
    if final is not None:  # noqa: SIM102 - known when it is compiled, and the next is not
        if (end == n) & (h % group == 0):
            slot = tl.cast(b, tl.int64) * heads_k + hk
            store_state(final[0] + slot * (D * D_V), final[1] + slot * D, kv, z, i, j, block == 0, D, D_V)


@triton.jit
def plain_outputs(
    q, k, v, sums, states, initial, out, inverses, final, q_steps, k_steps, v_steps, sums_steps, out_steps,
    segments, n_segments, heads, group, n, scale,
    EARLY: tl.constexpr, TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same for causal calls whose rows are features, without decay, and norms that are
    known: 1 over each, or None.

    Columns of the state lie as rows, and so do those of what is computed: tensor cores take a first operand from
    registers, where the state is, and the second from shared memory. The other way round, all of the state would go
    there for every chunk. What else a call may have would take registers that this has not: it is made before.
    """
    b, h, block = place_of(heads, BLOCKS)
    hk, heads_k = h // group, heads // group
    begin, end = segment_at(segments)
    i, j = tl.arange(0, DEPTH), block * BLOCK + tl.arange(0, BLOCK)
    if EARLY:  # as above
        gdc_wait()
    kv, z = state_of(states, initial, n_segments, b, hk, heads_k, i, j, D, D_V)
    kv = tl.trans(kv)
    for first in tl.range(begin, end, CHUNK):
        # 1 load q
        f_q = features(q, q_steps, b, h, first, end, i, scale, None, TYPE, CHUNK, D)
        if inverses is not None:  # here, so that they have come when they are asked for
            row_inverses = load_numbers(inverses, b, h, heads, n, first, end, CHUNK)
        # 2 what came before the chunk
        acc = product(kv, tl.trans(f_q), TYPE)
        # 3 weights within the chunk
        f_k = features(k, k_steps, b, hk, first, end, i, None, None, TYPE, CHUNK, D)
        v_rows = load_head(v, v_steps, b, hk, first, end, j, CHUNK, D_V)
        seen = tl.arange(0, CHUNK)[:, None] <= tl.arange(0, CHUNK)[None, :]  # keys down, queries across
        w = tl.where(seen, product(f_k, tl.trans(f_q), TYPE), 0.0)
        acc += product(tl.trans(v_rows), w, TYPE)
        # 4 the state after it
        kv += product(tl.trans(v_rows), f_k, TYPE)
        if final is not None:
            z += sum_of(f_k, sums, sums_steps, b, hk, first, i, CHUNK, D)
        # 5 finish: acc / row_sums
        if inverses is not None:
            acc *= row_inverses[None, :]
        store_columns(out, out_steps, b, h, first, end, j, acc, CHUNK, D_V)
    if final is not None:  # noqa: SIM102 - known when it is compiled, and the next is not
        if (end == n) & (h % group == 0):
            slot = tl.cast(b, tl.int64) * heads_k + hk
            store_state(final[0] + slot * (D * D_V), final[1] + slot * D, tl.trans(kv), z, i, j, block == 0, D, D_V)
