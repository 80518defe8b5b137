"""The forward pass: a block has a segment of one head, and goes through its chunks with the state in registers."""

import tilelang.language as T

from tilewise.kernels.tilelang.source.tiles import Memory, after_kernels_before, array, load_rows
from tilewise.linear.kernels.tilelang.source.chunks import (
    Segment,
    Sizes,
    add_to_lanes,
    add_to_z,
    decay_all,
    inverse,
    left,
    load_decays,
    load_lanes,
    load_state,
    load_z,
    map_rows,
    numbers,
    one,
    past,
    segments_of,
    states_of,
    store_lanes,
    store_rows,
    store_state,
    store_z,
    within,
)


def outputs(build, spec):
    """Its last segments also leave the state after a sequence, if queries see no later keys."""
    n = Sizes()
    shared, fragment, parallel = Memory.of(build)
    chunk, depth, columns, dtype, operand = build.chunk, build.depth, build.columns, build.dtype, build.operand

    @T.prim_func
    def outputs(
        q: array(build, "q", (n.batch, n.heads, n.n, build.d), dtype),
        k: array(build, "k", (n.batch, n.heads_k, n.n, build.d), dtype),
        v: array(build, "v", (n.batch, n.heads_k, n.n, build.d_v), dtype),
        decays: numbers(build, n, "decays", n.heads_k),
        states: states_of(build, n, n.heads_k, n.slots),
        final: states_of(build, n, n.heads_k, n.n_states),
        out: array(build, "out", (n.batch, n.heads, n.n, build.d_v), dtype),
        norm: numbers(build, n, "norm", n.heads),
        segments: segments_of(n),
        per_batch: T.int32,
        group: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(n.n_segments, n.heads, n.batch, threads=build.threads) as (number, h, b):
            q_tile = shared([chunk, depth], operand)
            k_tile = shared([chunk, depth], operand)
            v_tile = shared([chunk, columns], operand)
            narrow_q = shared([chunk, depth], operand)
            narrow_k = shared([chunk, depth], operand)
            state_tile = shared([depth, columns], operand)
            w_tile = shared([chunk, chunk], operand)
            out_tile = shared([chunk, columns], operand)
            c_tile = shared([chunk], "float32")
            z = shared([depth], "float32")
            total = fragment([depth], "float32")
            lanes = fragment([build.row_lanes, depth], "float32")
            f_q = fragment([chunk, depth], "float32")
            f_k = fragment([chunk, depth], "float32")
            w = fragment([chunk, chunk], "float32")
            acc = fragment([chunk, columns], "float32")
            state = fragment([depth, columns], "float32")
            sums = shared([chunk], "float32")
            sum_before = fragment([chunk], "float32")
            sum_within = fragment([chunk], "float32")
            q_features = q_tile if build.raw_queries else narrow_q
            k_features = k_tile if build.raw_keys else narrow_k
            after_kernels_before(build)
            hk = T.truncdiv(h, group)
            segment = Segment.of(segments, number)
            begin = segment.begin
            end = segment.end
            load_state(build, states, b * per_batch + segment.slot, hk, state)
            if build.normalize:
                load_z(build, states, b * per_batch + segment.slot, hk, z)
            elif build.causal:
                load_lanes(build, states, b * per_batch + segment.slot, hk, lanes)
            for i in T.Pipelined(T.ceildiv(end - begin, chunk), num_stages=build.stages):
                # 1 load q
                row = begin + i * chunk
                load_rows(build, q, q_tile, b, h, 0, row, end)
                load_decays(build, decays, c_tile, b, hk, row, end)
                if build.normalize or not build.raw_queries:
                    map_rows(build, spec.feature, q_tile, f_q, lambda r: scale, row, end)
                if not build.raw_queries:
                    T.copy(f_q, narrow_q)
                # 2 what came before the chunk
                T.copy(state, state_tile)
                T.gemm(q_features, state_tile, acc, clear_accum=True)
                if build.normalize:
                    for r, c in parallel(chunk, depth):
                        f_q[r, c] *= z[c]
                    T.reduce_sum(f_q, sum_before, dim=1)
                    for r in parallel(chunk):
                        sums[r] = sum_before[r] * past(build, c_tile, r)
                if build.decays:
                    for r, c in parallel(chunk, columns):
                        acc[r, c] *= past(build, c_tile, r)
                if build.causal:
                    # 3 weights within the chunk
                    load_rows(build, k, k_tile, b, hk, 0, row, end)
                    load_rows(build, v, v_tile, b, hk, 0, row, end)
                    map_rows(build, spec.feature, k_tile, f_k, one, row, end)
                    if not build.raw_keys:
                        T.copy(f_k, narrow_k)
                    T.gemm(q_features, k_features, w, transpose_B=True, clear_accum=True)
                    for r, c in parallel(chunk, chunk):
                        w[r, c] *= within(build, c_tile, r, c)
                    T.copy(w, w_tile)
                    T.gemm(w_tile, v_tile, acc)
                    if build.normalize:
                        T.reduce_sum(w, sum_within, dim=1)
                        for r in parallel(chunk):
                            sums[r] += sum_within[r]
                    # 4 the state after it
                    decay_all(build, state, c_tile)
                    if build.decays:
                        for r, c in parallel(chunk, depth):
                            f_k[r, c] *= left(build, c_tile, r)
                        T.copy(f_k, narrow_k)
                    if build.normalize:
                        add_to_z(build, f_k, total, z, c_tile)
                    else:
                        decay_all(build, lanes, c_tile)
                        add_to_lanes(build, f_k, lanes)
                    T.gemm(narrow_k if build.decays else k_features, v_tile, state, transpose_A=True)
                # 5 finish: acc / sums
                if build.normalize:
                    for r in parallel(chunk):
                        if row + r < end:
                            norm[b, h, row + r] = sums[r]
                    for r, c in parallel(chunk, columns):
                        acc[r, c] *= inverse(sums[r])
                store_rows(build, acc, out_tile, out, b, h, row, end)
            if build.causal:  # noqa: SIM102 - the first is asked when the kernel is written, the second when it runs
                if (segment.is_last == 1) & (h % group == 0):
                    store_state(build, state, final, b + segment.sequence, hk)
                    if build.normalize:
                        store_z(build, z, final, b + segment.sequence, hk)
                    else:
                        store_lanes(build, lanes, total, final, b + segment.sequence, hk)

    return outputs
