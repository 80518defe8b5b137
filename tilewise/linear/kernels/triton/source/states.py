"""The states of segments: each by itself, and then what all those before it come to."""

import triton
import triton.language as tl

from tilewise.linear.kernels.triton.source.chunks import (
    after,
    decays,
    features,
    load_head,
    load_numbers,
    product,
    row_gradients,
    segment_at,
    state_at,
    store_state,
)


@triton.jit
def segment_states(
    k, v, decay, states, totals, k_steps, v_steps, decay_steps, segments, heads_k,
    FEATURE: tl.constexpr, TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What the keys of a segment add to the state, and by how much it decays meanwhile."""
    b, hk = tl.program_id(1) // heads_k, tl.program_id(1) % heads_k
    begin, end = segment_at(segments)
    i, j = tl.arange(0, DEPTH), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    kv, z = tl.zeros([DEPTH, BLOCK], tl.float32), tl.zeros([DEPTH], tl.float32)
    log_decay = tl.cast(0.0, tl.float32)
    for first in tl.range(begin, end, CHUNK):
        row = first + tl.arange(0, CHUNK)
        f_k = features(k, k_steps, b, hk, row, end, i, 1.0, FEATURE, TYPE, D)
        v_rows = load_head(v, v_steps, b, hk, row, end, j, D_V)
        c, total = decays(decay, decay_steps, b, hk, row, end, CHUNK)
        kv, z = after(kv, z, f_k, v_rows, c, total, TYPE)
        log_decay += total
    store_state(state_at(states, b, hk, heads_k, D, D_V), kv, z, i, j, D, D_V)
    tl.store(totals + (b * tl.num_programs(0) + tl.program_id(0)) * heads_k + hk, log_decay)


@triton.jit
def d_segment_states(
    q, d_out, norm, shift, decay, states, q_steps, d_out_steps, decay_steps, segments, heads_k, group, n, scale,
    FEATURE: tl.constexpr, TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What the rows of a segment add to the gradient of the state before it."""
    b, hk = tl.program_id(1) // heads_k, tl.program_id(1) % heads_k
    heads = heads_k * group
    begin, end = segment_at(segments)
    i, j = tl.arange(0, DEPTH), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    kv, z = tl.zeros([DEPTH, BLOCK], tl.float32), tl.zeros([DEPTH], tl.float32)
    log_decay = tl.cast(0.0, tl.float32)
    for first in tl.range(begin, end, CHUNK):
        row = first + tl.arange(0, CHUNK)
        c, total = decays(decay, decay_steps, b, hk, row, end, CHUNK)
        for h in range(hk * group, (hk + 1) * group):
            f_q = features(q, q_steps, b, h, row, end, i, scale, FEATURE, TYPE, D)
            f_q = f_q.to(tl.float32) * tl.exp(log_decay + c)[:, None]
            g = row_gradients(d_out, d_out_steps, norm, b, h, heads, n, row, end, j, TYPE, CHUNK, D_V)
            kv += product(tl.trans(f_q), g, TYPE)
            if norm is not None:
                z += tl.sum(f_q * load_numbers(shift, b, h, heads, n, row, end)[:, None], 0)
        log_decay += total
    store_state(state_at(states, b, hk, heads_k, D, D_V), kv, z, i, j, D, D_V)


@triton.jit
def scan(
    states, totals, initial, final, firsts, n_segments, heads_k, size,
    PACKED: tl.constexpr, BACKWARDS: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each segment's state becomes that before it (BACKWARDS: behind it); of all of a sequence if not CAUSAL.

    A program has some numbers of one sequence's states. final: the state after all, from that before all, initial.
    """
    sequence, hk = tl.program_id(0) // heads_k, tl.program_id(0) % heads_k
    first, last = 0, n_segments
    if PACKED:
        first, last = tl.load(firsts + sequence), tl.load(firsts + sequence + 1)
    base = 0 if PACKED else sequence * n_segments
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = number < size
    slot = tl.program_id(0).to(tl.int64) * size + number
    state = tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        state = tl.load(initial + slot, mask=inside, other=0.0)
    for i in range(first, last):
        segment = (base + (first + last - 1 - i if BACKWARDS else i)) * heads_k + hk
        at = states + tl.cast(segment, tl.int64) * size + number
        added = tl.load(at, mask=inside, other=0.0)
        if CAUSAL:
            tl.store(at, state, mask=inside)
        state = state * tl.exp(tl.load(totals + segment)) + added
    tl.store(final + slot, state, mask=inside)
    if not CAUSAL:
        for i in range(first, last):
            tl.store(states + tl.cast((base + i) * heads_k + hk, tl.int64) * size + number, state, mask=inside)
