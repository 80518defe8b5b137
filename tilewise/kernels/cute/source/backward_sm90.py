"""The backward pass in Hopper's own way: weights are recomputed from lse, and every sum has one warpgroup, so its order
is fixed.

A block of `d_query` has the queries of one tile, a block of `d_keys` the keys of one; both compute, with
delta = sum(d_out * out) - d_lse:  d_score = p * (d_out v^T - delta),  d_s = d_score * d score/d S.
d_query comes first, and leaves delta and what it makes of lse to the other.

As in forward_sm90.py a producer warp keeps the copy engine busy, and a consumer warpgroup has 64 rows of the block's
tile: scores lie queries down in d_query, keys down in d_keys, so that p and d_s stay in registers as the first operand
of what is summed up. Exponentials run beside the product that makes d_p.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from tilewise.kernels.cute.source.forward_sm90 import (
    AROUND,
    CONSUMER_REGISTERS,
    MOST_STAGES,
    PRODUCER_REGISTERS,
    SHARED,
    clear_rows,
    multiply,
    parts,
    store,
)
from tilewise.kernels.cute.source.operations import minimum
from tilewise.kernels.cute.source.tiles import (
    LOG2_E,
    PARTIAL,
    binary,
    exp2,
    finite,
    fused,
    mask,
    matrix,
    multiply_by_slopes,
    score,
    sum_of_quad,
    work_of,
)
from tilewise.kernels.cute.source.vocabulary import (
    WARPGROUP,
    by_rows,
    copy_engine,
    operand_of_product,
    products_sm90,
    role_of,
    seen_across,
    stages,
    swizzled_tiles,
    transposed,
)

AT_ONCE = 8  # numbers of a row, 16 bytes
BOTH_SUMS = 256  # columns of d_k and d_v that a warpgroup's registers have room for


def stages_of(held, visited, build, element):
    """As many of the tiles that are visited, of so many rows, as shared memory has room for beside those held."""
    row_bytes = (build.depth + build.columns) * element.width // 8
    return min((SHARED - AROUND - held * row_bytes) // (visited * row_bytes), MOST_STAGES)


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, d_out: cute.Tensor,
    d_q: cute.Tensor, d_k: cute.Tensor, d_v: cute.Tensor,
    lse: cute.Tensor, d_lse: cute.Tensor, shift: cute.Tensor, delta: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, records_by_key: cute.Tensor, runs_by_key: cute.Tensor, arrays: tuple,
    scale: Float32, build: cutlass.Constexpr, stream,
):  # fmt: skip
    """q, k, v, out and gradients: (batch, heads, n, d); lse to delta: (batch, heads, n). The plan, both ways round."""
    group = q.shape[1] // k.shape[1]

    tile, by_key = build.tile, build.by_key
    count = stages_of(tile.q, tile.k, build, q.element_type)
    layouts, maps, rows = mapped((q, d_out), tile.q, 1, (k, v), tile.k, count, build)
    d_query(*maps, *rows, *layouts, out, d_out, lse, d_lse, shift, delta, d_q, records, runs, arrays, scale, group,
            build).launch(
        grid=(records.shape[2], q.shape[1], records.shape[0]), block=threads_of(tile.q), min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip

    count = stages_of(by_key.k, by_key.q, build, q.element_type)
    layouts, maps, rows = mapped((q, d_out), by_key.q, count, (k, v), by_key.k, 1, build)
    for summed in cutlass.range_constexpr(len(sums_at_a_time(build))):
        d_keys(*maps, *rows, *layouts, shift, delta, d_k, d_v, records_by_key, runs_by_key, arrays, scale, group,
               build, sums_at_a_time(build)[summed]).launch(
            grid=(records_by_key.shape[2], k.shape[1], records_by_key.shape[0]), block=threads_of(by_key.k),
            min_blocks_per_mp=1, stream=stream,
        )  # fmt: skip


def sums_at_a_time(build):
    """Gradients that a run of d_keys sums up: of k and v, or one after the other if registers have no room for both."""
    return ("kv",) if build.depth + build.columns <= BOTH_SUMS else ("k", "v")


def mapped(of_queries, tile_q, stages_q, of_keys, tile_k, stages_k, build):
    """How tiles of q, d_out, k and v lie in shared memory; maps of these arrays, and the arrays as maps see them."""
    element, widths = of_queries[0].element_type, (build.depth, build.columns)
    layouts = [swizzled_tiles(element, tile_q, width, stages_q) for width in widths]
    layouts += [swizzled_tiles(element, tile_k, width, stages_k) for width in widths]
    made = [copy_engine(x, layout) for x, layout in zip((*of_queries, *of_keys), layouts, strict=True)]
    return layouts, [map_ for map_, _ in made], [rows for _, rows in made]


def threads_of(rows):
    return (WARPGROUP + rows // 64 * WARPGROUP, 1, 1)


def tiles_and_stages(layouts, element, consumers):
    """Tiles of q, d_out, k and v in shared memory, and the barriers of each."""
    memory = SmemAllocator()
    tiles = [memory.allocate_tensor(element, layout.outer, 1024, layout.inner) for layout in layouts]
    return tiles, [stages(tile, consumers) for tile in tiles]


# -- by query tiles ---------------------------------------------------------------------------------------------------


@cute.kernel
def d_query(
    q_map: cute.CopyAtom, d_out_map: cute.CopyAtom, k_map: cute.CopyAtom, v_map: cute.CopyAtom,
    q_rows: cute.Tensor, d_out_rows: cute.Tensor, k_rows: cute.Tensor, v_rows: cute.Tensor,
    q_tiles: cute.ComposedLayout, d_out_tiles: cute.ComposedLayout, k_tiles: cute.ComposedLayout,
    v_tiles: cute.ComposedLayout,
    out: cute.Tensor, d_out: cute.Tensor, lse: cute.Tensor, d_lse: cute.Tensor, shift: cute.Tensor, delta: cute.Tensor,
    d_q: cute.Tensor, records: cute.Tensor, runs: cute.Tensor, arrays: tuple, scale: Float32, group: Int32,
    build: cutlass.Constexpr,
):  # fmt: skip
    number, h, b = cute.arch.block_idx()
    layouts = q_tiles, d_out_tiles, k_tiles, v_tiles
    tiles, rings = tiles_and_stages(layouts, d_q.element_type, build.tile.q // 64)
    warpgroup_number, is_producer = role_of()
    if warpgroup_number == 0:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if is_producer:
            work = work_of(records, number, b, h, group)
            hk = work.place.hk
            rows = (q_rows[None, None, h, b], d_out_rows[None, None, h, b],
                    k_rows[None, None, hk, b], v_rows[None, None, hk, b])  # fmt: skip
            produce_keys((q_map, d_out_map, k_map, v_map), rows, tiles, *rings, work, runs, build)
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        work = work_of(records, number, b, h, group)
        saved = matrix(out, b, h, work.q_begin), matrix(d_out, b, h, work.q_begin), lse, d_lse
        consume_keys(*tiles, *rings, warpgroup_number - 1, work, runs, b, h, saved, shift, delta, d_q, arrays, scale,
                     build)  # fmt: skip


@cute.jit
def produce_keys(maps, rows, tiles, q_stages, d_out_stages, k_stages, v_stages, work, runs, build: cutlass.Constexpr):
    """One warp: tiles come as soon as there is a place for them."""
    (q_map, d_out_map, k_map, v_map), (q_rows, d_out_rows, k_rows, v_rows) = maps, rows
    (q_tile, d_out_tile, k_tile, v_tile), query = tiles, work.q_begin + work.first
    q_from, q_to = parts_from(query, q_map, q_rows, q_tile)
    d_out_from, d_out_to = parts_from(query, d_out_map, d_out_rows, d_out_tile)
    k_from, k_to = parts_from(work.k_begin, k_map, k_rows, k_tile)
    v_from, v_to = parts_from(work.k_begin, v_map, v_rows, v_tile)
    q_producer, d_out_producer = q_stages.make_producer(), d_out_stages.make_producer()
    k_producer, v_producer = k_stages.make_producer(), v_stages.make_producer()

    # 1 load q, d_out
    place = q_producer.acquire_and_advance()
    cute.copy(q_map, q_from[None, 0], q_to[None, place.index], tma_bar_ptr=place.barrier)
    place = d_out_producer.acquire_and_advance()
    cute.copy(d_out_map, d_out_from[None, 0], d_out_to[None, place.index], tma_bar_ptr=place.barrier)
    # for each kv tile of the schedule:
    for run in cutlass.range(work.first_run, work.last_run, unroll=1):
        for tile in cutlass.range(runs[run, 0], runs[run, 1], unroll=1):
            place = k_producer.acquire_and_advance()
            cute.copy(k_map, k_from[None, tile], k_to[None, place.index], tma_bar_ptr=place.barrier)
            place = v_producer.acquire_and_advance()
            cute.copy(v_map, v_from[None, tile], v_to[None, place.index], tma_bar_ptr=place.barrier)


def parts_from(begin, map_, rows, tile):
    """Tiles of a matrix from a row on, and their places."""
    size = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    return parts(map_, cute.domain_offset((begin, 0), rows), tile, size, (None, 0))


@cute.jit
def consume_keys(
    q_tile, d_out_tile, k_tile, v_tile, q_stages, d_out_stages, k_stages, v_stages, number, work, runs, b, h, saved,
    shift, delta, d_q, arrays, scale, build: cutlass.Constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of the query tile, of which a thread has two (and shares them with its quad)."""
    element, thread = q_tile.element_type, cute.arch.thread_idx()[0] - WARPGROUP
    scores, sums = products_sm90(element, build.tile.q, build.tile.k, build.depth)
    ours, ours_of_sums = (x[0].get_slice(number * WARPGROUP) for x in (scores, sums))
    k_across, v_across = seen_across(k_tile), seen_across(v_tile)
    q, d_o = (scores[0].make_fragment_A(ours.partition_A(x)) for x in (q_tile, d_out_tile))
    k, v = (scores[0].make_fragment_B(ours.partition_B(x)) for x in (k_tile, v_tile))
    k_summed = sums[0].make_fragment_B(ours_of_sums.partition_B(k_across))
    s, d_p = (scores[0].make_fragment_C(scores[0].partition_shape_C((build.tile.q, build.tile.k))) for _ in range(2))
    acc = sums[0].make_fragment_C(sums[0].partition_shape_C((build.tile.q, build.depth)))
    d_s = cute.make_rmem_tensor(operand_of_product(s), element)
    product = product_of(s, build)
    at = scores[0].get_slice(thread).partition_C(cute.make_identity_tensor((build.tile.q, build.tile.k)))
    acc.fill(0.0)
    q_consumer, d_out_consumer = q_stages.make_consumer(), d_out_stages.make_consumer()
    k_consumer, v_consumer = k_stages.make_consumer(), v_stages.make_consumer()

    # 0 delta = sum(d_out * out) - d_lse
    row_shift, row_delta = prepared(saved, by_rows(at), work, thread, b, h, build)
    leave(shift, row_shift, by_rows(at), work, b, h)
    leave(delta, row_delta, by_rows(at), work, b, h)
    # 1 load q, d_out
    q_consumer.wait_and_advance()
    d_out_consumer.wait_and_advance()
    # for each kv tile of the schedule:
    for run in cutlass.range(work.first_run, work.last_run, unroll=1):
        kind = runs[run, 2]
        for tile in cutlass.range(runs[run, 0], runs[run, 1], unroll=1):
            first_key = tile * build.tile.k
            place_k = k_consumer.wait_and_advance()
            place_v = v_consumer.wait_and_advance()
            if cutlass.const_expr(build.packed):
                clear_rows(k_across[None, None, place_k.index], work.n_k - first_key, thread, build.tile.q)
                clear_rows(v_across[None, None, place_v.index], work.n_k - first_key, thread, build.tile.q)
            # 2 s = q @ k.T, d_p = d_out @ v.T
            warpgroup.fence()
            multiply(scores, s, q[None, None, None, 0], k[None, None, None, place_k.index], False)
            multiply(scores, d_p, d_o[None, None, None, 0], v[None, None, None, place_v.index], False)
            warpgroup.wait_group(1)
            keep(product, s)
            # 3 score
            score(s, at, first_key, work, arrays, scale, build)
            # 4 mask (PARTIAL tiles only: one that ends beyond the last key or query is such a tile)
            if kind == PARTIAL:
                mask(s, at, first_key, work, arrays, build)
            # 5 p, from the lse that forward saved
            weigh(by_rows(s), row_shift, binary(scale, build))
            warpgroup.wait_group(0)
            place_v.release()
            # 6 d_score = p * (d_p - delta), d_s = d_score * slope, d_q += d_s @ k
            differentiate(by_rows(s), by_rows(d_p), row_delta)
            pass_on(s, product, at, first_key, work, arrays, scale, build)
            narrow(d_s, s)
            warpgroup.fence()
            multiply(sums, acc, d_s, k_summed[None, None, None, place_k.index], True)
            warpgroup.wait_group(0)
            place_k.release()

    # 7 finish: d_q, of scores that were scaled
    rows = matrix(d_q, b, h, work.q_begin + work.first)
    store(scaled(acc, scale), rows, work.n_q - work.first, sums[0], thread, (build.tile.q, build.depth))


@cute.jit
def prepared(saved, at, work, thread, b, h, build: cutlass.Constexpr):
    """What weights are recomputed with, of a thread's rows: shift, which is -lse as an exponent of 2, and delta, of
    which each thread of a quad has a quarter of the columns."""
    out, d_out, lse, d_lse = saved
    shift, delta = (cute.make_rmem_tensor((cute.size(at, mode=[0]),), Float32) for _ in range(2))
    shift.fill(0.0)
    delta.fill(0.0)
    for row in cutlass.range_constexpr(cute.size(delta)):
        query = work.first + at[row, 0][0]
        if query < work.n_q:
            for i in cutlass.range_constexpr(build.columns // (4 * AT_ONCE)):
                part = 4 * i + thread % 4
                if part * AT_ONCE < out.shape[1]:
                    delta[row] = delta[row] + product_of_parts(out[query, None], d_out[query, None], part)
            shift[row] = -finite(lse[b, h, work.q_begin + query]) * LOG2_E
        delta[row] = sum_of_quad(delta[row])
        if query < work.n_q:
            delta[row] = delta[row] - d_lse[b, h, work.q_begin + query]
    return shift, delta


def product_of_parts(x, y, number):
    """The sum of x * y, of some numbers side by side."""
    loaded = [cute.make_rmem_tensor((AT_ONCE,), row.element_type) for row in (x, y)]
    for row, to in zip((x, y), loaded, strict=True):
        cute.autovec_copy(cute.local_tile(row, (AT_ONCE,), (number,)), to)
    total = Float32(0.0)
    for i in range(AT_ONCE):
        total = fused(loaded[0][i].to(Float32), loaded[1][i].to(Float32), total)
    return total


@cute.jit
def leave(rows, numbers, at, work, b, h):
    """For d_keys: by the first thread of a quad."""
    for row in cutlass.range_constexpr(cute.size(numbers)):
        query = work.first + at[row, 0][0]
        if (at[0, 0][1] == 0) & (query < work.n_q):
            rows[b, h, work.q_begin + query] = numbers[row]


# -- by key tiles -----------------------------------------------------------------------------------------------------


@cute.kernel
def d_keys(
    q_map: cute.CopyAtom, d_out_map: cute.CopyAtom, k_map: cute.CopyAtom, v_map: cute.CopyAtom,
    q_rows: cute.Tensor, d_out_rows: cute.Tensor, k_rows: cute.Tensor, v_rows: cute.Tensor,
    q_tiles: cute.ComposedLayout, d_out_tiles: cute.ComposedLayout, k_tiles: cute.ComposedLayout,
    v_tiles: cute.ComposedLayout,
    shift: cute.Tensor, delta: cute.Tensor, d_k: cute.Tensor, d_v: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, arrays: tuple, scale: Float32, group: Int32, build: cutlass.Constexpr,
    summed: cutlass.Constexpr,
):  # fmt: skip
    number, hk, b = cute.arch.block_idx()
    layouts = q_tiles, d_out_tiles, k_tiles, v_tiles
    tiles, rings = tiles_and_stages(layouts, d_k.element_type, build.by_key.k // 64)
    warpgroup_number, is_producer = role_of()
    if warpgroup_number == 0:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if is_producer:
            rows = q_rows, d_out_rows, k_rows[None, None, hk, b], v_rows[None, None, hk, b]
            produce_queries((q_map, d_out_map, k_map, v_map), rows, tiles, *rings, records, runs, number, b, hk, group)
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        consume_queries(*tiles, *rings, warpgroup_number - 1, records, runs, number, b, hk, group, shift, delta, d_k,
                        d_v, arrays, scale, build, summed)  # fmt: skip


@cute.jit
def produce_queries(
    maps, rows, tiles, q_stages, d_out_stages, k_stages, v_stages, records, runs, number, b, hk, group: Int32
):
    """One warp: tiles come as soon as there is a place for them."""
    (q_map, d_out_map, k_map, v_map), (q_rows, d_out_rows, k_rows, v_rows) = maps, rows
    q_tile, d_out_tile, k_tile, v_tile = tiles
    work = work_of(records, number, b, hk * group, group)
    k_from, k_to = parts_from(work.k_begin + work.first, k_map, k_rows, k_tile)
    v_from, v_to = parts_from(work.k_begin + work.first, v_map, v_rows, v_tile)
    q_producer, d_out_producer = q_stages.make_producer(), d_out_stages.make_producer()
    k_producer, v_producer = k_stages.make_producer(), v_stages.make_producer()

    # 1 load k, v
    place = k_producer.acquire_and_advance()
    cute.copy(k_map, k_from[None, 0], k_to[None, place.index], tma_bar_ptr=place.barrier)
    place = v_producer.acquire_and_advance()
    cute.copy(v_map, v_from[None, 0], v_to[None, place.index], tma_bar_ptr=place.barrier)
    for h in cutlass.range(hk * group, (hk + 1) * group, unroll=1):
        here = work_of(records, number, b, h, group)
        q_from, q_to = parts_from(here.q_begin, q_map, q_rows[None, None, h, b], q_tile)
        d_out_from, d_out_to = parts_from(here.q_begin, d_out_map, d_out_rows[None, None, h, b], d_out_tile)
        # for each q tile of the schedule:
        for run in cutlass.range(here.first_run, here.last_run, unroll=1):
            for tile in cutlass.range(runs[run, 0], runs[run, 1], unroll=1):
                place = q_producer.acquire_and_advance()
                cute.copy(q_map, q_from[None, tile], q_to[None, place.index], tma_bar_ptr=place.barrier)
                place = d_out_producer.acquire_and_advance()
                cute.copy(d_out_map, d_out_from[None, tile], d_out_to[None, place.index], tma_bar_ptr=place.barrier)


@cute.jit
def consume_queries(
    q_tile, d_out_tile, k_tile, v_tile, q_stages, d_out_stages, k_stages, v_stages, number, records, runs, block, b, hk,
    group, shift, delta, d_k, d_v, arrays, scale, build: cutlass.Constexpr, summed: cutlass.Constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of the key tile, of which a thread has two (and shares them with its quad)."""
    of_k, of_v = "k" in summed, "v" in summed
    element, thread, size = q_tile.element_type, cute.arch.thread_idx()[0] - WARPGROUP, build.by_key
    scores, sums_v = products_sm90(element, size.k, size.q, build.columns)
    _, sums_k = products_sm90(element, size.k, size.q, build.depth)
    ours, ours_of_v, ours_of_k = (x[0].get_slice(number * WARPGROUP) for x in (scores, sums_v, sums_k))
    q_across, d_out_across = seen_across(q_tile), seen_across(d_out_tile)
    k, v = (scores[0].make_fragment_A(ours.partition_A(x)) for x in (k_tile, v_tile))
    q, d_o = (scores[0].make_fragment_B(ours.partition_B(x)) for x in (q_tile, d_out_tile))
    q_summed = sums_k[0].make_fragment_B(ours_of_k.partition_B(q_across))
    d_o_summed = sums_v[0].make_fragment_B(ours_of_v.partition_B(d_out_across))
    s, d_p = (scores[0].make_fragment_C(scores[0].partition_shape_C((size.k, size.q))) for _ in range(2))
    acc_k = sums_k[0].make_fragment_C(sums_k[0].partition_shape_C((size.k, build.depth)))
    acc_v = sums_v[0].make_fragment_C(sums_v[0].partition_shape_C((size.k, build.columns)))
    p, d_s = (cute.make_rmem_tensor(operand_of_product(s), element) for _ in range(2))
    product = product_of(s, build)
    # Where each score is, as (query, key), though keys lie down and queries across.
    at = scores[0].get_slice(thread).partition_C(transposed(cute.make_identity_tensor((size.q, size.k))))
    acc_k.fill(0.0)
    acc_v.fill(0.0)
    q_consumer, d_out_consumer = q_stages.make_consumer(), d_out_stages.make_consumer()
    k_consumer, v_consumer = k_stages.make_consumer(), v_stages.make_consumer()
    work = work_of(records, block, b, hk * group, group)
    first_key = work.first

    # 1 load k, v
    k_consumer.wait_and_advance()
    v_consumer.wait_and_advance()
    for h in cutlass.range(hk * group, (hk + 1) * group, unroll=1):
        of_head = work_of(records, block, b, h, group)
        # for each q tile of the schedule:
        for run in cutlass.range(of_head.first_run, of_head.last_run, unroll=1):
            kind = runs[run, 2]
            for tile in cutlass.range(runs[run, 0], runs[run, 1], unroll=1):
                here = of_head._replace(first=tile * size.q)
                place_q = q_consumer.wait_and_advance()
                place_o = d_out_consumer.wait_and_advance()
                if cutlass.const_expr(build.packed):
                    clear_rows(q_across[None, None, place_q.index], here.n_q - here.first, thread, size.k)
                    clear_rows(d_out_across[None, None, place_o.index], here.n_q - here.first, thread, size.k)
                # 2 s.T = k @ q.T, d_p.T = v @ d_out.T: keys down and queries across, as the sums want their weights
                warpgroup.fence()
                multiply(scores, s, k[None, None, None, 0], q[None, None, None, place_q.index], False)
                if cutlass.const_expr(of_k):
                    multiply(scores, d_p, v[None, None, None, 0], d_o[None, None, None, place_o.index], False)
                row_shift = left(shift, by_columns(at), here, b, h)
                warpgroup.wait_group(1 if of_k else 0)
                keep(product, s)
                # 3 score
                score(s, at, first_key, here, arrays, scale, build)
                # 4 mask (PARTIAL tiles only: one that ends beyond the last key or query is such a tile)
                if kind == PARTIAL:
                    mask(s, at, first_key, here, arrays, build)
                # 5 p, from the lse that forward saved
                weigh(by_columns(s), row_shift, binary(scale, build))
                # 6 d_v += p.T @ d_out; d_score = p * (d_p - delta), d_s = d_score * slope, d_k += d_s.T @ q
                if cutlass.const_expr(of_v):
                    narrow(p, s)
                    warpgroup.fence()
                    multiply(sums_v, acc_v, p, d_o_summed[None, None, None, place_o.index], True)
                if cutlass.const_expr(of_k):
                    row_delta = left(delta, by_columns(at), here, b, h)
                    warpgroup.wait_group(1 if of_v else 0)
                    differentiate(by_columns(s), by_columns(d_p), row_delta)
                    pass_on(s, product, at, first_key, here, arrays, scale, build)
                    narrow(d_s, s)
                    warpgroup.fence()
                    multiply(sums_k, acc_k, d_s, q_summed[None, None, None, place_q.index], True)
                warpgroup.wait_group(0)
                place_o.release()
                place_q.release()

    # 7 finish: d_k, of scores that were scaled, and d_v
    begin, count = work.k_begin + first_key, work.n_k - first_key
    if cutlass.const_expr(of_k):
        store(scaled(acc_k, scale), matrix(d_k, b, hk, begin), count, sums_k[0], thread, (size.k, build.depth))
    if cutlass.const_expr(of_v):
        store(acc_v, matrix(d_v, b, hk, begin), count, sums_v[0], thread, (size.k, build.columns))


def by_columns(fragment):
    """A thread's numbers of a product that has keys down, as (queries, keys)."""
    return transposed(by_rows(fragment))


def left(rows, at, work, b, h):
    """What d_query left of the queries of a tile. Those beyond the last have no weight: any number serves them."""
    numbers = cute.make_rmem_tensor((cute.size(at, mode=[0]),), Float32)
    for i in range(cute.size(numbers)):
        query = minimum(work.first + at[i, 0][0], work.n_q - 1)
        numbers[i] = rows[b, h, work.q_begin + query]
    return numbers


# -- what both do with a tile of scores -------------------------------------------------------------------------------


def weigh(s, shift, factor):
    """Scores, (queries, keys), become weights p; products are rounded as forward did, so that delta is the mean of
    d_p."""
    for query in range(cute.size(s, mode=[0])):
        for key in range(cute.size(s, mode=[1])):
            s[query, key] = exp2(fused(s[query, key], factor, shift[query]))


def differentiate(p, d_p, delta):
    """d_score takes the place of p."""
    for query in range(cute.size(p, mode=[0])):
        for key in range(cute.size(p, mode=[1])):
            p[query, key] = p[query, key] * (d_p[query, key] - delta[query])


def product_of(s, build):
    """A place for the products of q and k, if the slope of a score depends on them: scores take theirs."""
    return cute.make_rmem_tensor_like(s) if has_slope(build) else None


def keep(product, s):
    if product is not None:
        product.store(s.load())


def pass_on(d_score, product, at, first_key, work, arrays, scale, build):
    """d_s takes the place of d_score."""
    if has_slope(build):
        multiply_by_slopes(d_score, product, at, first_key, work, arrays, scale, build)


def has_slope(build):
    return hasattr(build.variant, "slope")


def narrow(operand, numbers):
    """Numbers of a product as the first operand of another: the same registers, in the order of the product."""
    cute.make_tensor(operand.iterator, numbers.layout).store(numbers.load().to(operand.element_type))


def scaled(acc, scale):
    for i in range(cute.size(acc)):
        acc[i] = acc[i] * scale
    return acc
