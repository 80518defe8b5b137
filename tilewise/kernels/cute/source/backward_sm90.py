"""The backward pass in Hopper's own way, with five products. A block takes one key tile after the other, with its k and
v, and meets the query tiles of its schedule; two warpgroups, each with 64 keys, keep d_k and d_v in registers. Scores
lie keys down, queries across: s.T = k @ q.T. What a key tile adds to d_q goes to float32 sums in memory, by the copy
engine, each query tile's in the order of its key tiles: a storing warp waits for its turn, so that every sum has the
same bits each time.

With delta = sum(d_out * out) - d_lse:  d_score = p * (d_out v^T - delta),  d_s = d_score * d score/d S.

Of the five products of a step, s and d_p are issued together: exponentials run beside d_p. p and d_s stay in registers
for d_v and d_k; d_s also goes to shared memory, for d_q needs all keys of it, and both warpgroups meet there, once a
step. d_v runs while they do, d_k while d_q is handed over. Nothing is under way when a step ends.

Two small kernels are around it, in backward_sm90_rows.py: one leaves what is to be known of each query, one makes d_q
of its sums. Where registers have no room for all this, backward_sm90_twice.py goes over the scores twice.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.memory import SmemAllocator

from tilewise.kernels.cute.source.backward_sm90_producer import (
    D_OUT_FREE,
    D_OUT_FULL,
    D_Q_FREE,
    FIELDS,
    KEYS_FREE,
    KEYS_FULL,
    Q_FREE,
    Q_FULL,
    STAGES,
    Item,
    Meeting,
    Shared,
    bring_tiles,
    d_q_written,
    init_barriers,
    next_item,
    store_sums,
    told,
)
from tilewise.kernels.cute.source.backward_sm90_rows import (
    d_query,
    prepare,
    product_of_d_q,
    store_rows,
)
from tilewise.kernels.cute.source.forward_sm90 import (
    clear_rows,
    multiply,
)
from tilewise.kernels.cute.source.hopper import anew, arrive, wait_in_place
from tilewise.kernels.cute.source.tiles import PARTIAL, binary, exp2, fused, mask, matrix, score, work_of
from tilewise.kernels.cute.source.vocabulary import (
    FIRST_STORER,
    PRODUCER,
    WARPGROUP,
    consumers_meet,
    copy_engine,
    operand_of_product,
    products_sm90,
    role_of,
    seen_across,
    swizzled_tiles,
    transposed,
)

CONSUMERS = 2  # warpgroups
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # of a thread: no more than all have at first, 3 * 168


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, remainder: cute.Tensor, d_out: cute.Tensor,
    d_q: cute.Tensor, d_k: cute.Tensor, d_v: cute.Tensor,
    lse: cute.Tensor, d_lse: cute.Tensor, delta: cute.Tensor,
    rows: cute.Tensor, sums: cute.Tensor, turns: cute.Tensor,
    records: cute.Tensor, records_by_key: cute.Tensor, runs: cute.Tensor,
    section: Int32, blocks: Int32, arrays: tuple, scale: Float32, build: cutlass.Constexpr, stream,
):  # fmt: skip
    """q, k, v, out, its remainder and gradients: (batch, heads, n, d); lse, d_lse and delta: (batch, heads, n). Of each
    query tile of each head rows has (shift, delta), sums what is added to d_q, in two pieces, turns how many key tiles
    were added; its last is the next item. section: heads that take turns; blocks: so many run at a time."""
    element, size, group = q.element_type, build.tile, q.shape[1] // k.shape[1]
    by_query = (records.shape[2], q.shape[1], records.shape[0])
    prepare(out, remainder, d_out, lse, d_lse, delta, rows, turns, records, build).launch(
        grid=by_query, block=(4 * size.q, 1, 1), stream=stream
    )
    layouts = [swizzled_tiles(element, size.q, width, STAGES) for width in (build.depth, build.columns)]
    layouts += [swizzled_tiles(element, size.k, width, 1) for width in (build.depth, build.columns)]
    made = [copy_engine(x, layout) for x, layout in zip((q, d_out, k, v), layouts, strict=True)]
    gradients(
        *(map_ for map_, _ in made), *(of_map for _, of_map in made), *layouts,
        swizzled_tiles(element, size.k, size.q, STAGES),
        rows, sums, turns, d_k, d_v, records_by_key, runs, section, arrays, scale, group, build,
    ).launch(
        grid=(blocks, 1, 1), block=((1 + CONSUMERS) * WARPGROUP, 1, 1), min_blocks_per_mp=1, stream=stream
    )  # fmt: skip
    d_query(sums, turns, d_q, records, scale, build).launch(
        grid=by_query, block=(CONSUMERS * WARPGROUP, 1, 1), stream=stream
    )


@cute.kernel
def gradients(
    q_map: cute.CopyAtom, d_out_map: cute.CopyAtom, k_map: cute.CopyAtom, v_map: cute.CopyAtom,
    q_rows: cute.Tensor, d_out_rows: cute.Tensor, k_rows: cute.Tensor, v_rows: cute.Tensor,
    q_tiles: cute.ComposedLayout, d_out_tiles: cute.ComposedLayout, k_tiles: cute.ComposedLayout,
    v_tiles: cute.ComposedLayout, d_s_tiles: cute.ComposedLayout,
    rows: cute.Tensor, sums: cute.Tensor, turns: cute.Tensor, d_k: cute.Tensor, d_v: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, section: Int32, arrays: tuple, scale: Float32, group: Int32,
    build: cutlass.Constexpr,
):  # fmt: skip
    layouts = q_tiles, d_out_tiles, k_tiles, v_tiles, d_s_tiles
    shared = shared_memory(layouts, d_k.element_type, build)
    init_barriers(shared.barriers)
    warpgroup_number, role = role_of()
    if warpgroup_number == 0:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if role == PRODUCER:
            maps, of_maps = (q_map, d_out_map, k_map, v_map), (q_rows, d_out_rows, k_rows, v_rows)
            bring_tiles(shared, maps, of_maps, rows, turns, records, runs, section, group, build)
        if role >= FIRST_STORER:
            store_sums(shared, sums, turns, role - FIRST_STORER)
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        consume(shared, warpgroup_number - 1, group, d_k, d_v, arrays, scale, build)


def shared_memory(layouts, element, build):
    """Tiles, each query's numbers, d_q on its way to its sums, what is told, barriers."""
    memory = SmemAllocator()
    tiles = [memory.allocate_tensor(element, layout.outer, 1024, layout.inner) for layout in layouts]
    piece = build.tile.q * build.depth // 2
    d_q = memory.allocate_tensor(Float32, cute.make_layout((piece, 2, STAGES)), 1024)
    rows = memory.allocate_tensor(Float32, cute.make_layout((build.tile.q, 2, STAGES)), 128)
    barriers = memory.allocate_array(cutlass.Int64, D_Q_FREE + STAGES)
    items = memory.allocate_tensor(Int32, cute.make_layout((len(Item._fields), 2)), 16)
    meetings = memory.allocate_tensor(Int32, cute.make_layout((len(Meeting._fields), STAGES)), 16)
    records = memory.allocate_tensor(Int32, cute.make_layout((FIELDS, 2)), 16)
    of_all_heads = cute.make_layout((1, 1, 2, FIELDS), stride=(0, 0, FIELDS, 1))
    return Shared(*tiles, d_q, rows, barriers, items, meetings, cute.make_tensor(records.iterator, of_all_heads))


@cute.jit
def consume(shared, number, group, d_k, d_v, arrays, scale, build: cutlass.Constexpr):
    """A warpgroup: 64 rows of the key tile, of which a thread has two (and shares them with its quad)."""
    element, thread, size = d_k.element_type, cute.arch.thread_idx()[0] - WARPGROUP, build.tile
    q_tile, d_out_tile, k_tile, v_tile, d_s_tile = shared.q, shared.d_out, shared.k, shared.v, shared.d_s
    scores, sums_v = products_sm90(element, size.k, size.q, build.columns)
    _, sums_k = products_sm90(element, size.k, size.q, build.depth)
    sums_q = product_of_d_q(element, size, build.depth)
    ours, ours_of_v, ours_of_k, ours_of_q = (
        x[0].get_slice(number * WARPGROUP) for x in (scores, sums_v, sums_k, sums_q)
    )
    q_across, d_out_across, k_across, v_across = (seen_across(x) for x in (q_tile, d_out_tile, k_tile, v_tile))
    k, v = (scores[0].make_fragment_A(ours.partition_A(x)) for x in (k_tile, v_tile))
    q, d_o = (scores[0].make_fragment_B(ours.partition_B(x)) for x in (q_tile, d_out_tile))
    q_summed = sums_k[0].make_fragment_B(ours_of_k.partition_B(q_across))
    d_o_summed = sums_v[0].make_fragment_B(ours_of_v.partition_B(d_out_across))
    d_s_across = sums_q[0].make_fragment_A(ours_of_q.partition_A(seen_across(d_s_tile)))
    k_summed = sums_q[0].make_fragment_B(ours_of_q.partition_B(k_across))
    acc_k = sums_k[0].make_fragment_C(sums_k[0].partition_shape_C((size.k, build.depth)))
    acc_v = sums_v[0].make_fragment_C(sums_v[0].partition_shape_C((size.k, build.columns)))
    writing = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), element), scores[0])

    items, steps = Int32(0), Int32(0)
    item = next_item(shared, items)
    while item.number >= 0:
        acc_k.fill(0.0)
        acc_v.fill(0.0)
        # 1 load k, v
        cute.arch.mbarrier_wait(shared.barriers + KEYS_FULL, items % 2)
        if cutlass.const_expr(build.packed):
            tile = work_of(shared.records, items % 2, item.b, item.hk * group, group)
            clear_rows(k_across[None, None, 0], tile.n_k - tile.first, thread, size.k)
            clear_rows(v_across[None, None, 0], tile.n_k - tile.first, thread, size.k)
        # for each q tile of the schedule:
        for _ in cutlass.range(item.visits, unroll=1):
            stage, parity = steps % STAGES, steps // STAGES % 2
            cute.arch.mbarrier_wait(shared.barriers + Q_FULL + stage, parity)
            meeting = told(Meeting, shared.meetings, stage)
            work = work_of(shared.records, items % 2, item.b, meeting.h, group)
            first_key, here = work.first, work._replace(first=meeting.tile * size.q)
            if cutlass.const_expr(build.packed):
                cute.arch.mbarrier_wait(shared.barriers + D_OUT_FULL + stage, parity)
                clear_rows(q_across[None, None, stage], here.n_q - here.first, thread, size.k)
                clear_rows(d_out_across[None, None, stage], here.n_q - here.first, thread, size.k)
            # Registers of this step: what would be kept from step to step has none.
            s, d_p = (scores[0].make_fragment_C(scores[0].partition_shape_C((size.k, size.q))) for _ in range(2))
            acc_q = sums_q[0].make_fragment_C(sums_q[0].partition_shape_C((size.q, build.depth)))
            p, d_s = (cute.make_rmem_tensor(operand_of_product(s), element) for _ in range(2))
            # 2 s.T = k @ q.T, d_p.T = v @ d_out.T: keys down and queries across, as the sums want their weights
            warpgroup.fence()
            multiply(scores, s, k[None, None, None, 0], q[None, None, None, stage], False)
            cute.arch.mbarrier_wait(shared.barriers + D_OUT_FULL + stage, parity)
            warpgroup.fence()
            multiply(scores, d_p, v[None, None, None, 0], d_o[None, None, None, stage], False)
            warpgroup.wait_group(1)
            # Where each score is, as (query, key), though keys lie down and queries across.
            at = scores[0].get_slice(anew(thread)).partition_C(transposed(cute.make_identity_tensor((size.q, size.k))))
            # 3 score
            score(s, at, first_key, here, arrays, scale, build)
            # 4 mask (PARTIAL tiles only: one that ends beyond the last key or query is such a tile)
            if meeting.kind == PARTIAL:
                mask(s, at, first_key, here, arrays, build)
            # 5 p, d_s, from the lse that forward saved
            weigh(s, two_by_two(shared.rows[None, 0, stage], thread), binary(scale, build))
            wait_in_place(0, group > 0)
            differentiate(p, d_s, s, d_p, two_by_two(shared.rows[None, 1, stage], thread))
            ours_of_s = writing.get_slice(anew(thread))
            d_s_by_matrices = ours_of_s.retile(cute.make_tensor(d_s.iterator, s.layout))
            cute.copy(writing, d_s_by_matrices, ours_of_s.partition_D(d_s_tile[None, None, stage]))
            # 6 d_v += p.T @ d_out, d_q = d_s @ k, d_k += d_s.T @ q
            warpgroup.fence()
            multiply(sums_v, acc_v, p, d_o_summed[None, None, None, stage], True)
            cute.arch.fence_view_async_shared()
            consumers_meet(CONSUMERS * WARPGROUP)
            warpgroup.fence()
            multiply(sums_q, acc_q, d_s_across[None, None, None, stage], k_summed[None, None, None, 0], False)
            warpgroup.wait_group(1)
            arrive(shared.barriers + D_OUT_FREE + stage)
            warpgroup.fence()
            multiply(sums_k, acc_k, d_s, q_summed[None, None, None, stage], True)
            warpgroup.wait_group(1)
            hand_over(acc_q, shared, stage, number, parity ^ 1, thread)
            warpgroup.wait_group(0)
            arrive(shared.barriers + Q_FREE + stage)
            steps += 1
        item = told(Item, shared.items, items % 2)  # again: registers had no room for it
        done = work_of(shared.records, items % 2, item.b, item.hk * group, group)
        begin, count = done.k_begin + done.first, done.n_k - done.first
        cute.arch.sync_warp()  # all lanes have read the item
        arrive(shared.barriers + KEYS_FREE)

        # 7 finish: d_k, of scores that were scaled, and d_v
        store_rows(acc_k, matrix(d_k, item.b, item.hk, begin), count, sums_k[0], thread, (size.k, build.depth), scale)
        store_rows(acc_v, matrix(d_v, item.b, item.hk, begin), count, sums_v[0], thread, (size.k, build.columns), 1.0)
        items += 1
        item = next_item(shared, items)


def two_by_two(rows, thread):
    """The numbers of a thread's queries: of each eight it has two, and of both two keys."""
    pairs = cute.make_tensor(rows.iterator, cute.make_layout((2, 4, cute.size(rows) // 8)))
    return pairs[None, thread % 4, None]


def numbers_of_two(pairs, n):
    """Read where they are used: registers have no room for all of them."""
    two = cute.make_rmem_tensor((2,), Float32)
    cute.autovec_copy(pairs[None, n], two)
    return two


def weigh(s, shifts, factor):
    """Scores become weights p; products are rounded as forward did, so that delta is the mean of d_p."""
    for n in range(cute.size(shifts, mode=[1])):
        shift, of_two = numbers_of_two(shifts, n), s[(None, None, n), 0, 0]
        for key in range(2):
            for query in range(2):
                of_two[query, key] = exp2(fused(of_two[query, key], factor, shift[query]))


def differentiate(p, d_s, weights, d_p, deltas):
    """p, the weights narrowed, and d_s = weights * (d_p - delta), as first operands of products. Two queries at a time,
    which free the registers that the next take."""
    p, d_s = (cute.make_tensor(x.iterator, weights.layout) for x in (p, d_s))
    for n in range(cute.size(deltas, mode=[1])):
        delta, two = numbers_of_two(deltas, n), ((None, None, n), 0, 0)
        d_score, of_two, d_weights = cute.make_rmem_tensor((2, 2), Float32), weights[two], d_p[two]
        for key in range(2):
            for query in range(2):
                d_score[query, key] = of_two[query, key] * (d_weights[query, key] - delta[query])
        p[two].store(of_two.load().to(p.element_type))
        d_s[two].store(d_score.load().to(d_s.element_type))


@cute.jit
def hand_over(acc_q, shared, storer, piece, parity, thread):
    """A piece of d_q to a storer, in the order in which threads hold it, when it has stored the one before."""
    held = cute.make_tensor(acc_q.iterator, cute.make_layout((4, cute.size(acc_q) // 4)))
    room = cute.make_tensor(
        shared.d_q[None, piece, storer].iterator,
        cute.make_layout((4, WARPGROUP, cute.size(acc_q) // 4)),
    )[None, thread % WARPGROUP, None]
    cute.arch.mbarrier_wait(shared.barriers + D_Q_FREE + storer, parity)
    for i in cutlass.range_constexpr(cute.size(held, mode=[1])):
        cute.autovec_copy(held[None, i], room[None, i])
    cute.arch.fence_view_async_shared()
    cute.arch.barrier_arrive(barrier_id=d_q_written(storer, piece), number_of_threads=WARPGROUP + 32)
