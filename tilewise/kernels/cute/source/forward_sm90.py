"""Hopper's own way: a producer warp keeps the copy engine (TMA) busy with tiles of q, k and v; consumer warpgroups,
each with 64 queries of the tile, multiply them with wgmma and do the softmax in between.

The products of a step run while the exponentials of the step before are taken: s of one key tile is issued together
with acc += p @ v of the tile before it. Where heads are large, one warpgroup multiplies while the other takes
exponentials.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from tilewise.kernels.cute.source.tiles import (
    PARTIAL,
    binary,
    finish,
    mask,
    matrix,
    multiply_rows,
    online_softmax,
    rows_of,
    score,
    work_of,
)
from tilewise.kernels.cute.source.vocabulary import (
    WARPGROUP,
    by_rows,
    consumers_meet,
    copy_engine,
    operand_of_product,
    products_sm90,
    role_of,
    stages,
    swizzled_tiles,
)

SHARED, AROUND = 227 << 10, 2048  # bytes of shared memory that a block has, and those that are for barriers
MOST_STAGES = 4
TURNS = 2  # the first of the barriers by which warpgroups take turns
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # of a thread


def stages_of(build, element):
    """As many as shared memory has room for."""
    q_bytes = build.tile.q * build.depth * element.width // 8
    stage_bytes = build.tile.k * (build.depth + build.columns) * element.width // 8
    return min((SHARED - AROUND - q_bytes) // stage_bytes, MOST_STAGES)


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, sinks: cute.Tensor, arrays: tuple, scale: Float32,
    build: cutlass.Constexpr, stream,
):  # fmt: skip
    """q, k, v, out: (batch, heads, n, d); lse: (batch, heads, n). A block a query tile, as records has them."""
    element, tile = q.element_type, build.tile
    q_tiles = swizzled_tiles(element, tile.q, build.depth, 1)
    k_tiles = swizzled_tiles(element, tile.k, build.depth, stages_of(build, element))
    v_tiles = swizzled_tiles(element, tile.k, build.columns, stages_of(build, element), transposed=True)
    q_map, q_rows = copy_engine(q, q_tiles)
    k_map, k_rows = copy_engine(k, k_tiles)
    v_map, v_rows = copy_engine(v, v_tiles, transposed=True)
    batch, heads, count = records.shape[0], records.shape[1], records.shape[2]
    attention(
        q_map, k_map, v_map, q_rows, k_rows, v_rows, q_tiles, k_tiles, v_tiles, out, lse, records, runs, sinks, arrays,
        scale, q.shape[1] // k.shape[1], build,
    ).launch(
        grid=(count, heads, batch), block=(WARPGROUP + tile.q // 64 * WARPGROUP, 1, 1), min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip


@cute.kernel
def attention(
    q_map: cute.CopyAtom, k_map: cute.CopyAtom, v_map: cute.CopyAtom,
    q_rows: cute.Tensor, k_rows: cute.Tensor, v_rows: cute.Tensor,
    q_tiles: cute.ComposedLayout, k_tiles: cute.ComposedLayout, v_tiles: cute.ComposedLayout,
    out: cute.Tensor, lse: cute.Tensor, records: cute.Tensor, runs: cute.Tensor, sinks: cute.Tensor, arrays: tuple,
    scale: Float32, group: cutlass.Int32, build: cutlass.Constexpr,
):  # fmt: skip
    number, h, b = cute.arch.block_idx()
    element, consumers = out.element_type, build.tile.q // 64

    memory = SmemAllocator()
    q_tile, k_tile, v_tile = (
        memory.allocate_tensor(element, layout.outer, 1024, layout.inner) for layout in (q_tiles, k_tiles, v_tiles)
    )
    q_stages = stages(q_tile, consumers)
    k_stages = stages(k_tile, consumers)
    v_stages = stages(v_tile, consumers)

    warpgroup_number, is_producer = role_of()
    if warpgroup_number == 0:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if is_producer:
            work = work_of(records, number, b, h, group)
            hk = work.place.hk
            produce(q_map, q_rows[None, None, h, b], q_tile, q_stages, k_map, k_rows[None, None, hk, b], k_tile,
                    k_stages, v_map, v_rows[None, None, hk, b], v_tile, v_stages, work, runs, build)  # fmt: skip
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        work = work_of(records, number, b, h, group)
        consume(q_tile, k_tile, v_tile, q_stages, k_stages, v_stages, warpgroup_number - 1, work, runs, b, h,
                out, lse, sinks, arrays, scale, build)  # fmt: skip


@cute.jit
def produce(
    q_map, q_rows, q_tile, q_stages, k_map, k_rows, k_tile, k_stages, v_map, v_rows, v_tile, v_stages, work, runs,
    build: cutlass.Constexpr,
):  # fmt: skip
    """One warp: tiles come as soon as there is a place for them."""
    q_rows = cute.domain_offset((work.q_begin + work.first, 0), q_rows)
    k_rows = cute.domain_offset((work.k_begin, 0), k_rows)
    v_rows = cute.domain_offset((0, work.k_begin), v_rows)
    q_from, q_to = parts(q_map, q_rows, q_tile, (build.tile.q, build.depth), (None, 0))
    k_from, k_to = parts(k_map, k_rows, k_tile, (build.tile.k, build.depth), (None, 0))
    v_from, v_to = parts(v_map, v_rows, v_tile, (build.columns, build.tile.k), (0, None))
    q_producer, k_producer, v_producer = (x.make_producer() for x in (q_stages, k_stages, v_stages))

    # 1 load q
    place = q_producer.acquire_and_advance()
    cute.copy(q_map, q_from[None, 0], q_to[None, place.index], tma_bar_ptr=place.barrier)
    # for each kv tile of the schedule:
    for run in cutlass.range(work.first_run, work.last_run, unroll=1):
        for tile in cutlass.range(runs[run, 0], runs[run, 1], unroll=1):
            place = k_producer.acquire_and_advance()
            cute.copy(k_map, k_from[None, tile], k_to[None, place.index], tma_bar_ptr=place.barrier)
            place = v_producer.acquire_and_advance()
            cute.copy(v_map, v_from[None, tile], v_to[None, place.index], tma_bar_ptr=place.barrier)


def parts(map_, rows, tile, size, which):
    """Tiles of a matrix and their places, as the copy engine takes them: (numbers of a tile, tile or place)."""
    matrix = cute.local_tile(rows, size, which)
    to, from_ = cute.nvgpu.cpasync.tma_partition(
        map_, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(matrix, 0, 2)
    )
    return from_, to


@cute.jit
def consume(
    q_tile, k_tile, v_tile, q_stages, k_stages, v_stages, number, work, runs, b, h, out, lse, sinks, arrays, scale,
    build: cutlass.Constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of the query tile, of which a thread has two (and shares them with its quad)."""
    element, thread = q_tile.element_type, cute.arch.thread_idx()[0] - WARPGROUP
    qk, pv = products_sm90(element, build.tile.q, build.tile.k, build.columns)
    mine, ours, ours_of_v = qk[0].get_slice(thread), *(x[0].get_slice(number * WARPGROUP) for x in (qk, pv))
    q = qk[0].make_fragment_A(ours.partition_A(q_tile))
    k = qk[0].make_fragment_B(ours.partition_B(k_tile))
    v = pv[0].make_fragment_B(ours_of_v.partition_B(v_tile))
    s = qk[0].make_fragment_C(qk[0].partition_shape_C((build.tile.q, build.tile.k)))
    acc = pv[0].make_fragment_C(pv[0].partition_shape_C((build.tile.q, build.columns)))
    p = cute.make_rmem_tensor(operand_of_product(s), element)
    narrow = cute.make_tensor(p.iterator, s.layout)  # the same registers, in the order of s
    at = mine.partition_C(cute.make_identity_tensor((build.tile.q, build.tile.k)))
    acc.fill(0.0)
    rows = rows_of(acc, binary(scale, build))
    q_consumer, k_consumer, v_consumer = (x.make_consumer() for x in (q_stages, k_stages, v_stages))

    # 1 load q
    q_consumer.wait_and_advance()
    # for each kv tile of the schedule:
    held = (q, k, v, s, acc, p, narrow, at, rows, v_tile, thread, number, qk, pv, work, arrays, scale, build)
    if work.first_run < work.last_run:
        pass_first_turn(number, build)
        # The first tile: no product of its weights is under way yet.
        tile = runs[work.first_run, 0]
        place = k_consumer.wait_and_advance()
        take_turn(number, build)
        warpgroup.fence()
        multiply(qk, s, q[None, None, None, 0], k[None, None, None, place.index], False)
        pass_turn(number, build)
        warpgroup.wait_group(0)
        place.release()
        score(s, at, tile * build.tile.k, work, arrays, scale, build)
        if runs[work.first_run, 2] == PARTIAL:
            mask(s, at, tile * build.tile.k, work, arrays, build)
        online_softmax(rows, s)
        narrow.store(s.load().to(element))

        first_key = tile * build.tile.k  # of the tile that p has the weights of
        for run in cutlass.range(work.first_run, work.last_run, unroll=1):
            first_tile, last_tile = runs[run, 0], runs[run, 1]
            if run == work.first_run:
                first_tile = first_tile + 1
            # A loop for each kind: in one for both every tile would go through the mask's selections.
            if runs[run, 2] == PARTIAL:
                for tile in cutlass.range(first_tile, last_tile, unroll=1):
                    place, place_v = k_consumer.wait_and_advance(), v_consumer.wait_and_advance()
                    step(place, place_v, tile, first_key, True, *held)
                    first_key = tile * build.tile.k
            else:
                for tile in cutlass.range(first_tile, last_tile, unroll=1):
                    place, place_v = k_consumer.wait_and_advance(), v_consumer.wait_and_advance()
                    step(place, place_v, tile, first_key, False, *held)
                    first_key = tile * build.tile.k
        place_v = v_consumer.wait_and_advance()
        if cutlass.const_expr(build.packed):
            clear_rows(v_tile[None, None, place_v.index], work.n_k - first_key, thread, build.tile.q)
        warpgroup.fence()
        multiply(pv, acc, p, v[None, None, None, place_v.index], True)
        warpgroup.wait_group(0)
        place_v.release()

    # 7 finish: acc / row_sum, lse
    sink = sinks[h] if build.has_sinks else None
    done = finish(rows, acc, element, sink)
    for row in cutlass.range_constexpr(cute.size(done)):
        query = work.first + by_rows(at)[row, 0][0]
        if (at[0][1] == 0) & (query < work.n_q):  # the first thread of a quad
            lse[b, h, work.q_begin + query] = done[row]
    out_rows = matrix(out, b, h, work.q_begin + work.first)
    store(acc, out_rows, work.n_q - work.first, pv[0], thread, (build.tile.q, build.columns))


def step(
    place, place_v, tile, previous_key, masked, q, k, v, s, acc, p, narrow, at, rows, v_tile, thread, number, qk, pv, work,
    arrays, scale, build,
):  # fmt: skip
    # 2 s = q @ k.T, and the product of the tile before
    if build.packed:
        clear_rows(v_tile[None, None, place_v.index], work.n_k - previous_key, thread, build.tile.q)
    take_turn(number, build)
    warpgroup.fence()
    multiply(qk, s, q[None, None, None, 0], k[None, None, None, place.index], False)
    multiply(pv, acc, p, v[None, None, None, place_v.index], True)
    pass_turn(number, build)
    warpgroup.wait_group(1)
    place.release()
    first_key = tile * build.tile.k

    # 3 score
    score(s, at, first_key, work, arrays, scale, build)

    # 4 mask (PARTIAL tiles only: one that ends beyond the last key is such a tile)
    if masked:
        mask(s, at, first_key, work, arrays, build)

    # 5 row_max, rescale, p, row_sum
    rescale = online_softmax(rows, s)
    warpgroup.wait_group(0)
    place_v.release()

    # 6 acc = acc * rescale + p @ v: its first half; the product comes with the next tile's scores
    multiply_rows(acc, rescale)
    narrow.store(s.load().to(narrow.element_type))


def multiply(product, acc, a, b, adds):
    """acc = a @ b.T, or added to it; under way until it is waited for."""
    for i in range(cute.size(a, mode=[2])):
        cute.gemm(product[adds or i > 0], acc, a[None, None, i], b[None, None, i], acc)
    warpgroup.commit_group()


def take_turn(number, build):
    """Warpgroups take turns to issue products, so that one's exponentials run beside the other's products."""
    if in_turns(build):
        cute.arch.barrier(barrier_id=TURNS + number, number_of_threads=2 * WARPGROUP)


def pass_turn(number, build):
    if in_turns(build):
        cute.arch.barrier_arrive(barrier_id=TURNS + 1 - number, number_of_threads=2 * WARPGROUP)


@cute.jit
def pass_first_turn(number, build: cutlass.Constexpr):
    """The first warpgroup begins."""
    if number == 1:
        pass_turn(number, build)


def in_turns(build):
    return build.tile.q == 2 * 64 and build.depth > 64


@cute.jit
def clear_rows(tile, count, thread, consumed: cutlass.Constexpr):
    """Rows of a tile, which is seen from its side, become 0 from that one on: beyond the end of a packed sequence lie
    the next one's, which may be anything, and 0 * NaN would be NaN. consumed: by how many rows' warpgroups."""
    columns, rows = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    if count < rows:
        threads = consumed // 64 * WARPGROUP
        for i in cutlass.range(thread, (rows - count) * columns, threads):
            tile[i % columns, count + i // columns] = tile.element_type(0.0)
        cute.arch.fence_view_async_shared()
        consumers_meet(threads)


@cute.jit
def store(acc, rows, count, product, thread, size: cutlass.Constexpr):
    """Each thread its numbers of a tile of that size, two at a time, of the rows and columns that there are."""
    mine = product.get_slice(thread)
    target, at = (
        mine.partition_C(cute.local_tile(rows, size, (0, 0))),
        mine.partition_C(cute.make_identity_tensor(size)),
    )
    result = cute.make_rmem_tensor_like(acc, rows.element_type)
    result.store(acc.load().to(rows.element_type))
    for row in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(size[1] // 8):
            two = (None, row, i), 0, 0
            if cute.elem_less(at[(0, row, i), 0, 0], (count, rows.shape[1])):
                cute.autovec_copy(result[two], target[two])
