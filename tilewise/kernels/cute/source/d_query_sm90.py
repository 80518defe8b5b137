"""The backward pass by query tiles: d_q, and before it delta, which d_keys_sm90.py reads again. How the two work
together is said in backward_sm90_twice.py."""

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
from tilewise.kernels.cute.source.tiles import (
    LOG2_E,
    PARTIAL,
    binary,
    finite,
    fused,
    mask,
    matrix,
    score,
    sum_of_quad,
    work_of,
)
from tilewise.kernels.cute.source.vocabulary import (
    PRODUCER,
    WARPGROUP,
    by_rows,
    operand_of_product,
    products_sm90,
    role_of,
    seen_across,
)

AT_ONCE = 8  # numbers of a row, 16 bytes


@cute.kernel
def d_query(
    q_map: cute.CopyAtom, d_out_map: cute.CopyAtom, k_map: cute.CopyAtom, v_map: cute.CopyAtom,
    q_rows: cute.Tensor, d_out_rows: cute.Tensor, k_rows: cute.Tensor, v_rows: cute.Tensor,
    q_tiles: cute.ComposedLayout, d_out_tiles: cute.ComposedLayout, k_tiles: cute.ComposedLayout,
    v_tiles: cute.ComposedLayout,
    out: cute.Tensor, remainder: cute.Tensor, d_out: cute.Tensor, lse: cute.Tensor, d_lse: cute.Tensor,
    shift: cute.Tensor, delta: cute.Tensor, d_q: cute.Tensor, records: cute.Tensor, runs: cute.Tensor, arrays: tuple,
    scale: Float32, group: Int32, build: cutlass.Constexpr,
):  # fmt: skip
    number, h, b = cute.arch.block_idx()
    layouts = q_tiles, d_out_tiles, k_tiles, v_tiles
    tiles, rings = tiles_and_stages(layouts, d_q.element_type, build.tile.q // 64)
    warpgroup_number, role = role_of()
    if warpgroup_number == 0:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if role == PRODUCER:
            work = work_of(records, number, b, h, group)
            hk = work.place.hk
            rows = (q_rows[None, None, h, b], d_out_rows[None, None, h, b],
                    k_rows[None, None, hk, b], v_rows[None, None, hk, b])  # fmt: skip
            produce((q_map, d_out_map, k_map, v_map), rows, tiles, *rings, work, runs)
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        work = work_of(records, number, b, h, group)
        saved = *(matrix(x, b, h, work.q_begin) for x in (out, remainder, d_out)), lse, d_lse
        consume(*tiles, *rings, warpgroup_number - 1, work, runs, b, h, saved, shift, delta, d_q, arrays, scale,
                build)  # fmt: skip


@cute.jit
def produce(maps, rows, tiles, q_stages, d_out_stages, k_stages, v_stages, work, runs):
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


@cute.jit
def consume(
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
    acc = sums[0].make_fragment_C(sums[0].partition_shape_C((build.tile.q, build.depth)))
    at = scores[0].get_slice(thread).partition_C(cute.make_identity_tensor((build.tile.q, build.tile.k)))
    acc.fill(0.0)
    q_consumer, d_out_consumer = q_stages.make_consumer(), d_out_stages.make_consumer()
    k_consumer, v_consumer = k_stages.make_consumer(), v_stages.make_consumer()

    # 0 delta = sum(d_out * (out + remainder)) - d_lse
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
            # 2 s = q @ k.T, d_p = d_out @ v.T, in registers of this step: what is kept from step to step has none
            s, d_p = (
                scores[0].make_fragment_C(scores[0].partition_shape_C((build.tile.q, build.tile.k))) for _ in range(2)
            )
            d_s = cute.make_rmem_tensor(operand_of_product(s), element)
            product = product_of(s, build)
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
            wait_in_place(0, work.n_k > 0)
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
    *rows, lse, d_lse = saved  # out, what rounding took from it, d_out
    shift, delta = (cute.make_rmem_tensor((cute.size(at, mode=[0]),), Float32) for _ in range(2))
    shift.fill(0.0)
    delta.fill(0.0)
    for row in cutlass.range_constexpr(cute.size(delta)):
        query = work.first + at[row, 0][0]
        if query < work.n_q:
            for i in cutlass.range_constexpr(build.columns // (4 * AT_ONCE)):
                part = 4 * i + thread % 4
                if part * AT_ONCE < rows[0].shape[1]:
                    delta[row] = delta[row] + delta_of_part(*(x[query, None] for x in rows), part)
            shift[row] = -finite(lse[b, h, work.q_begin + query]) * LOG2_E
        delta[row] = sum_of_quad(delta[row])
        if query < work.n_q:
            delta[row] = delta[row] - d_lse[b, h, work.q_begin + query]
    return shift, delta


def delta_of_part(out, remainder, d_out, number):
    """The sum of d_out * (out + remainder), of some numbers of a row, side by side."""
    rows = out, remainder, d_out
    loaded = [cute.make_rmem_tensor((AT_ONCE,), row.element_type) for row in rows]
    for row, to in zip(rows, loaded, strict=True):
        cute.autovec_copy(cute.local_tile(row, (AT_ONCE,), (number,)), to)
    total = Float32(0.0)
    for i in range(AT_ONCE):
        rounded, rest, gradient = (x[i].to(Float32) for x in loaded)
        total = fused(rounded + rest, gradient, total)
    return total


@cute.jit
def leave(rows, numbers, at, work, b, h):
    """For d_keys: by the first thread of a quad."""
    for row in cutlass.range_constexpr(cute.size(numbers)):
        query = work.first + at[row, 0][0]
        if (at[0, 0][1] == 0) & (query < work.n_q):
            rows[b, h, work.q_begin + query] = numbers[row]
