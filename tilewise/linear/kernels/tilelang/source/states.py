"""The states of segments: each by itself, and then what all those before it come to."""

import tilelang.language as T

from tilewise.kernels.tilelang.source.tiles import Memory, after_kernels_before, array, load_rows
from tilewise.linear.kernels.tilelang.source.chunks import (
    SIDE,
    RowWeights,
    Segment,
    Sizes,
    add_to_lanes,
    decay_all,
    left,
    load_decays,
    load_weights,
    map_rows,
    numbers,
    segments_of,
    shift_rows,
    states_of,
    store_lanes,
    store_state,
    store_z,
    weigh_rows,
)


def segment_states(build, spec):
    """What the keys of a segment add to the state."""
    n = Sizes()
    shared, fragment, _ = Memory.of(build)
    chunk, depth, columns, dtype, operand = build.chunk, build.depth, build.columns, build.dtype, build.operand

    @T.prim_func
    def segment_states(
        k: array(build, "k", (n.batch, n.heads_k, n.n, build.d), dtype),
        v: array(build, "v", (n.batch, n.heads_k, n.n, build.d_v), dtype),
        decays: numbers(build, n, "decays", n.heads_k),
        states: states_of(build, n, n.heads_k, n.slots),
        segments: segments_of(n),
        per_batch: T.int32,
    ):
        with T.Kernel(n.n_segments, n.heads_k, n.batch, threads=build.threads) as (number, hk, b):
            k_tile = shared([chunk, depth], operand)
            v_tile = shared([chunk, columns], operand)
            narrow = shared([chunk, depth], operand)
            c_tile = shared([chunk], "float32")
            total = fragment([depth], "float32")
            lanes = fragment([build.row_lanes, depth], "float32")
            f_k = fragment([chunk, depth], "float32")
            state = fragment([depth, columns], "float32")
            after_kernels_before(build)
            segment = Segment.of(segments, number)
            begin = segment.begin
            end = segment.end
            T.fill(state, 0)
            T.fill(lanes, 0)
            for i in T.Pipelined(T.ceildiv(end - begin, chunk), num_stages=build.stages):
                row = begin + i * chunk
                load_rows(build, k, k_tile, b, hk, 0, row, end)
                load_rows(build, v, v_tile, b, hk, 0, row, end)
                load_decays(build, decays, c_tile, b, hk, row, end)
                map_rows(build, spec.feature, k_tile, f_k, lambda r: left(build, c_tile, r), row, end)
                decay_all(build, state, c_tile)
                decay_all(build, lanes, c_tile)
                add_to_lanes(build, f_k, lanes)
                if build.raw_keys and not build.decays:
                    T.gemm(k_tile, v_tile, state, transpose_A=True)
                else:
                    T.copy(f_k, narrow)
                    T.gemm(narrow, v_tile, state, transpose_A=True)
            store_state(build, state, states, b * per_batch + segment.slot, hk)
            store_lanes(build, lanes, total, states, b * per_batch + segment.slot, hk)

    return segment_states


def d_segment_states(build, spec):
    """What the rows of a segment add to the gradient of the state before it. It goes through the chunks backwards."""
    n = Sizes()
    shared, fragment, _ = Memory.of(build)
    chunk, depth, columns, dtype, operand = build.chunk, build.depth, build.columns, build.dtype, build.operand

    @T.prim_func
    def d_segment_states(
        q: array(build, "q", (n.batch, n.heads, n.n, build.d), dtype),
        d_out: array(build, "d_out", (n.batch, n.heads, n.n, build.d_v), dtype),
        decays: numbers(build, n, "decays", n.heads_k),
        share: numbers(build, n, "share", n.heads),
        shift: numbers(build, n, "shift", n.heads),
        d_states: states_of(build, n, n.heads, n.slots),
        segments: segments_of(n),
        per_batch: T.int32,
        group: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(n.n_segments, n.heads, n.batch, threads=build.threads) as (number, h, b):
            q_tile = shared([chunk, depth], operand)
            d_out_tile = shared([chunk, columns], operand)
            narrow = shared([chunk, depth], operand)
            c_tile = shared([chunk], "float32")
            weights = RowWeights(build, shared([chunk], "float32"), shared([chunk], "float32"))
            z = shared([depth], "float32")
            total = fragment([depth], "float32")
            lanes = fragment([build.row_lanes, depth], "float32")
            f_q = fragment([chunk, depth], "float32")
            state = fragment([depth, columns], "float32")
            after_kernels_before(build)
            segment = Segment.of(segments, number)
            begin = segment.begin
            end = segment.end
            chunks = T.ceildiv(end - begin, chunk)
            T.fill(state, 0)
            if build.normalize:
                T.fill(lanes, 0)
            else:
                T.fill(z, 0)
            for i in T.Pipelined(chunks, num_stages=build.stages):
                row = begin + (chunks - 1 - i) * chunk
                load_rows(build, q, q_tile, b, h, 0, row, end)
                load_rows(build, d_out, d_out_tile, b, h, 0, row, end)
                load_decays(build, decays, c_tile, b, T.truncdiv(h, group), row, end)
                load_weights(build, share, shift, weights, b, h, row, end)
                decay_all(build, state, c_tile)
                if build.raw_queries and not (build.normalize or build.decays):
                    T.gemm(q_tile, d_out_tile, state, transpose_A=True)
                else:
                    map_rows(build, spec.feature, q_tile, f_q, lambda r: scale, row, end)
                    weigh_rows(build, f_q, narrow, weights, c_tile)
                    T.gemm(narrow, d_out_tile, state, transpose_A=True)
                if build.normalize:
                    decay_all(build, lanes, c_tile)
                    shift_rows(build, f_q, weights)
                    add_to_lanes(build, f_q, lanes)
            store_state(build, state, d_states, b * per_batch + segment.slot, h)
            if build.normalize:
                store_lanes(build, lanes, total, d_states, b * per_batch + segment.slot, h)
            else:
                store_z(build, z, d_states, b * per_batch + segment.slot, h)

    return d_segment_states


def scan(build, spec):
    """Each segment's state becomes that before it, or behind it if time is turned round; that after all of a sequence
    if queries see all. `final` has the state before all, and gets that after them if queries see all: else the last
    segment's block has it.
    """
    n = Sizes()
    _, fragment, parallel = Memory.of(build)
    size, block = build.depth * (build.columns + SIDE), build.threads * 4
    n_firsts = T.dynamic("n_firsts")

    @T.prim_func
    def scan(
        states: T.Tensor((n.slots, n.heads, size), "float32"),
        totals: T.Tensor((n.slots, n.heads), "float32"),
        final: T.Tensor((n.n_states, n.heads, size), "float32"),
        firsts: T.Tensor((n_firsts,), "int32"),
        backwards: T.int32,
    ):
        with T.Kernel(T.ceildiv(size, block), n.heads, n.n_states, threads=build.threads) as (number, h, sequence):
            state = fragment([block], "float32")
            added = fragment([block], "float32")
            after_kernels_before(build)
            first = firsts[sequence]
            count = firsts[sequence + 1] - first
            for x in parallel(block):
                state[x] = T.if_then_else(number * block + x < size, final[sequence, h, number * block + x], 0)
            for i in T.serial(count):
                slot = first + T.if_then_else(backwards == 1, count - 1 - i, i)
                for x in parallel(block):
                    added[x] = T.if_then_else(number * block + x < size, states[slot, h, number * block + x], 0)
                for x in parallel(block):
                    if number * block + x < size:
                        states[slot, h, number * block + x] = state[x]
                for x in parallel(block):
                    state[x] = added[x] + state[x] * (T.exp(totals[slot, h]) if build.decays else T.float32(1))
            if not build.causal:
                for i in T.serial(count + 1):
                    for x in parallel(block):
                        if number * block + x < size:
                            if i < count:
                                states[first + i, h, number * block + x] = state[x]
                            else:
                                final[sequence, h, number * block + x] = state[x]

    return scan
