"""The states of segments: each by itself, and then what all those before it come to."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewise.linear.kernels.triton.source.chunks import (
    decayed,
    decays,
    features,
    kept,
    load_head,
    load_numbers,
    place_of,
    product,
    row_gradients,
    segment_at,
    state_at,
    store_state,
    sum_of,
)


@triton.jit
def decayed_sum(rows, log_decay, decay, sums, steps, b, h, first, i, CHUNK: tl.constexpr, D: tl.constexpr):
    """Over a chunk's rows, which are decayed by all that they are to be; a sum that was made before is not."""
    total = sum_of(rows, sums, steps, b, h, first, i, CHUNK, D)
    if sums is not None:
        total = kept(total, log_decay, decay)
    return total


@triton.jit
def segment_states(
    k, v, decay, sums, states, totals, k_steps, v_steps, decay_steps, sums_steps, segments, n_segments, heads_k,
    FEATURE: tl.constexpr, SUMS: tl.constexpr, EARLY: tl.constexpr, TYPE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What the keys of a segment add to the state, and by how much it decays meanwhile. The last come first, so that
    what the L2 cache has at the end is what `outputs` begins with. EARLY: `scan` may start beside this kernel, and
    waits for it there; this one waits for none, and so may not start beside the one before it."""
    if EARLY:
        gdc_launch_dependents()
    b, hk, block = place_of(heads_k, BLOCKS)
    begin, end = segment_at(segments)
    i, j = tl.arange(0, DEPTH), block * BLOCK + tl.arange(0, BLOCK)
    kv, z = tl.zeros([DEPTH, BLOCK], tl.float32), tl.zeros([DEPTH], tl.float32)
    log_decay = tl.cast(0.0, tl.float32)
    chunks = tl.cdiv(end - begin, CHUNK)
    for chunk in tl.range(0, chunks):
        first = begin + (chunks - 1 - chunk) * CHUNK
        f_k = features(k, k_steps, b, hk, first, end, i, None, FEATURE, TYPE, CHUNK, D)
        v_rows = load_head(v, v_steps, b, hk, first, end, j, CHUNK, D_V)
        c, total = decays(decay, decay_steps, b, hk, first, end, CHUNK)
        f_k = decayed(f_k, log_decay + (total - c), decay)
        kv += product(tl.trans(f_k), v_rows, TYPE)
        if SUMS:
            z += decayed_sum(f_k, log_decay, decay, sums, sums_steps, b, hk, first, i, CHUNK, D)
        log_decay += total
    at = state_at(states, n_segments, b, hk, heads_k, D, D_V)
    store_state(at, at + D * D_V, kv, z, i, j, block == 0, D, D_V)
    if decay is not None:
        tl.store(totals + (b * n_segments + tl.program_id(1)) * heads_k + hk, log_decay)


@triton.jit
def row_state(
    kv, z, q, d_out, norm, shift, decay, sums, c, log_decay, q_steps, d_out_steps, sums_steps, b, h, heads, n, first,
    end, i, j, scale,
    FEATURE: tl.constexpr, TYPE: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
):  # fmt: skip
    """With what one head's rows add. c and log_decay: by how much each decays in this chunk, and in those before."""
    f_q = features(q, q_steps, b, h, first, end, i, scale, FEATURE, TYPE, CHUNK, D)
    f_q = decayed(f_q, log_decay + c, decay)
    g = row_gradients(d_out, d_out_steps, norm, b, h, heads, n, first, end, j, TYPE, CHUNK, D_V)
    kv += product(tl.trans(f_q), g, TYPE)
    if shift is not None:
        e = load_numbers(shift, b, h, heads, n, first, end, CHUNK)
        z += decayed_sum(f_q.to(tl.float32) * e[:, None], log_decay, decay, sums, sums_steps, b, h, first, i, CHUNK, D)
    return kv, z


@triton.jit
def d_segment_states(
    q, d_out, norm, shift, decay, sums, states, q_steps, d_out_steps, decay_steps, sums_steps,
    segments, n_segments, heads_k, n, scale,
    GROUP: tl.constexpr, FEATURE: tl.constexpr, EARLY: tl.constexpr, TYPE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What the rows of a segment add to the gradient of the state before it."""
    if EARLY:
        gdc_launch_dependents()
    b, hk, block = place_of(heads_k, BLOCKS)
    heads = heads_k * GROUP
    begin, end = segment_at(segments)
    i, j = tl.arange(0, DEPTH), block * BLOCK + tl.arange(0, BLOCK)
    kv, z = tl.zeros([DEPTH, BLOCK], tl.float32), tl.zeros([DEPTH], tl.float32)
    log_decay = tl.cast(0.0, tl.float32)
    for first in tl.range(begin, end, CHUNK):
        c, total = decays(decay, decay_steps, b, hk, first, end, CHUNK)
        if GROUP == 1:  # no loop in the loop: what comes next is loaded meanwhile
            kv, z = row_state(
                kv, z, q, d_out, norm, shift, decay, sums, c, log_decay, q_steps, d_out_steps, sums_steps, b, hk,
                heads, n, first, end, i, j, scale, FEATURE, TYPE, CHUNK, D, D_V,
            )  # fmt: skip
        else:
            for h in range(hk * GROUP, (hk + 1) * GROUP):
                kv, z = row_state(
                    kv, z, q, d_out, norm, shift, decay, sums, c, log_decay, q_steps, d_out_steps, sums_steps, b, h,
                    heads, n, first, end, i, j, scale, FEATURE, TYPE, CHUNK, D, D_V,
                )  # fmt: skip
        log_decay += total
    at = state_at(states, n_segments, b, hk, heads_k, D, D_V)
    store_state(at, at + D * D_V, kv, z, i, j, block == 0, D, D_V)


@triton.jit
def segment_of(states, totals, segment, size, number, left):
    """What a segment adds to these numbers of the state, and by how much it decays each; 0 if no segment is left."""
    none = number * 0
    there = (number < size) & (none < left)
    added = tl.load(states + tl.cast(segment, tl.int64) * size + number, mask=there, other=0.0)
    total = none.to(tl.float32)
    if totals is not None:
        total = tl.load(totals + segment + none, mask=there, other=0.0)
    return added, total


@triton.jit
def both(given, slot, number, size, D: tl.constexpr):
    """Where these numbers are in kv and z, and which of them are."""
    kv_size = size - D
    kv, z = given[0] + slot * kv_size + number, given[1] + slot * D + (number - kv_size)
    return kv, z, number < kv_size, (number >= kv_size) & (number < size)


@triton.jit
def scan(
    states, totals, initial, final, firsts, n_segments, heads_k, size,
    PACKED: tl.constexpr, BACKWARDS: tl.constexpr, CAUSAL: tl.constexpr, EARLY: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each segment's state becomes that before it (BACKWARDS: behind it); of all of a sequence if not CAUSAL.

    A program has some numbers of one sequence's states. final (kv, z): the state after all, if it is wanted; initial
    (kv, z): that before all. Without final the segment that is visited last may have no state yet, and is not read.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    sequence, hk = tl.program_id(0) // heads_k, tl.program_id(0) % heads_k
    first, last = 0, n_segments
    if PACKED:
        first, last = tl.load(firsts + sequence), tl.load(firsts + sequence + 1)
    base = 0 if PACKED else sequence * n_segments
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = number < size
    slot = tl.program_id(0).to(tl.int64)
    state = tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        kv, z, in_kv, in_z = both(initial, slot, number, size, D)
        state = tl.load(kv, mask=in_kv, other=0.0) + tl.load(z, mask=in_z, other=0.0)
    # Segments are visited from `begin` on; each is read four ahead, as memory takes longer to answer than a step does.
    begin, step = (last - 1, -1) if BACKWARDS else (first, 1)
    segment, apart = (base + begin) * heads_k + hk, step * heads_k
    counts = last if final is not None or not CAUSAL else last - 1
    added_0, total_0 = segment_of(states, totals, segment, size, number, counts - first)
    added_1, total_1 = segment_of(states, totals, segment + apart, size, number, counts - first - 1)
    added_2, total_2 = segment_of(states, totals, segment + 2 * apart, size, number, counts - first - 2)
    for i in range(first, last):
        added, total = added_0, total_0
        added_0, added_1, total_0, total_1 = added_1, added_2, total_1, total_2
        added_2, total_2 = segment_of(states, totals, segment + 3 * apart, size, number, counts - i - 3)
        if CAUSAL:
            tl.store(states + tl.cast(segment, tl.int64) * size + number, state, mask=inside)
        if totals is not None:
            state *= tl.exp(total)
        state += added
        segment += apart
    if final is not None:
        kv, z, in_kv, in_z = both(final, slot, number, size, D)
        tl.store(kv, state, mask=in_kv)
        tl.store(z, state, mask=in_z)
    if not CAUSAL:
        for i in range(first, last):
            tl.store(states + tl.cast((base + i) * heads_k + hk, tl.int64) * size + number, state, mask=inside)
