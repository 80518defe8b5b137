"""The backward pass by key tiles: d_k and d_v, after d_query_sm90.py. How the two work together is said in
backward_sm90_twice.py."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from tilewise.kernels.cute.source.forward_sm90 import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    clear_rows,
    multiply,
    store,
)
from tilewise.kernels.cute.source.gradients_sm90 import (
    differentiate,
    keep,
    narrow,
    parts_from,
    pass_on,
    product_of,
    scaled,
    tiles_and_stages,
    weigh,
)
from tilewise.kernels.cute.source.hopper import wait_in_place
from tilewise.kernels.cute.source.operations import minimum
from tilewise.kernels.cute.source.tiles import PARTIAL, binary, mask, matrix, score, work_of
from tilewise.kernels.cute.source.vocabulary import (
    PRODUCER,
    WARPGROUP,
    by_rows,
    operand_of_product,
    products_sm90,
    role_of,
    seen_across,
    transposed,
)


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
    warpgroup_number, role = role_of()
    if warpgroup_number == 0:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if role == PRODUCER:
            rows = q_rows, d_out_rows, k_rows[None, None, hk, b], v_rows[None, None, hk, b]
            produce((q_map, d_out_map, k_map, v_map), rows, tiles, *rings, records, runs, number, b, hk, group)
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        consume(*tiles, *rings, warpgroup_number - 1, records, runs, number, b, hk, group, shift, delta, d_k,
                d_v, arrays, scale, build, summed)  # fmt: skip


@cute.jit
def produce(maps, rows, tiles, q_stages, d_out_stages, k_stages, v_stages, records, runs, number, b, hk, group: Int32):
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
def consume(
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
    acc_k = sums_k[0].make_fragment_C(sums_k[0].partition_shape_C((size.k, build.depth)))
    acc_v = sums_v[0].make_fragment_C(sums_v[0].partition_shape_C((size.k, build.columns)))
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
                s, d_p = (scores[0].make_fragment_C(scores[0].partition_shape_C((size.k, size.q))) for _ in range(2))
                p, d_s = (cute.make_rmem_tensor(operand_of_product(s), element) for _ in range(2))
                product = product_of(s, build)
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
                    wait_in_place(1 if of_v else 0, group > 0)
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
