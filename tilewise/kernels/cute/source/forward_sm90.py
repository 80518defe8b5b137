"""Hopper's own way: a producer warp keeps the copy engine (TMA) busy with tiles of q, k and v; consumer warpgroups,
each with 64 queries of the tile, multiply them with wgmma and do the softmax in between. A block takes one query tile
after the other, and the next tile's first product runs beside the last one's last.

The products of a step run while the exponentials of the step before are taken: s of one key tile is issued together
with acc += p @ v of the tile before it. With two warpgroups one multiplies while the other takes exponentials.

Key tiles are taken from the last to the first: a causal row meets its masked tiles, and its nearest keys, first. From
there on no mask is needed, and the softmax is speculative: speculation.py.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from tilewise.kernels.cute.source import basic
from tilewise.kernels.cute.source.forward_sm90_producer import Arrays, load, load_table
from tilewise.kernels.cute.source.hopper import anew, pin, wait_in_place
from tilewise.kernels.cute.source.items import (
    BATCH,
    PLACES,
    WORDS,
    Order,
    run_of_item,
    schedule,
    wait_for_item,
    work_of_item,
)
from tilewise.kernels.cute.source.operations import where
from tilewise.kernels.cute.source.rings import (
    advance,
    barriers,
    begin,
    filling,
    free,
    free_place,
    reading,
    stage_of,
    wait_until_full,
)
from tilewise.kernels.cute.source.speculation import (
    FINITE_SUM,
    PATIENCE,
    add_narrowing,
    any_above,
    any_heavy,
    begin_rows,
    exact,
    safe_sum,
    speculate,
    tame,
)
from tilewise.kernels.cute.source.tiles import (
    PARTIAL,
    Rows,
    binary,
    finish,
    mask_by_variant,
    mask_from,
    matrix,
    multiply_rows,
    rows_of,
    score,
)
from tilewise.kernels.cute.source.vocabulary import (
    ELEMENTS,
    PRODUCER,
    SCHEDULER,
    TABLE_PRODUCER,
    WARPGROUP,
    by_rows,
    consumers_meet,
    copy_engine,
    first_operand,
    load_cells,
    loading_operand,
    operand_of_product,
    product,
    products_sm90,
    read_cells,
    role_of,
    row_bytes,
    row_of_matrices,
    store_in_quads,
    swizzled_tiles,
    table_tiles,
)

SHARED, AROUND = 227 << 10, 2048  # bytes of shared memory that a block has, and those for barriers and items
MOST_STAGES = 4
TURNS = 2  # the first of the barriers by which warpgroups take turns
# Of a thread that produces and one that consumes, by warpgroups that do. All together they must not be more than a
# block begins with, 168 a thread of three warpgroups and 128 of four: who asks for more waits for ever.
REGISTERS = {2: (40, 232), 3: (32, 160)}
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # the same where a single warp produces, for two warpgroups


class Room(NamedTuple):
    """How many places there are in shared memory."""

    q: int
    k: int
    v: int
    table: int


def holds_q(build):
    """In registers: products then read less of shared memory, and its place is free at once. Larger heads, and scores
    that are no plain products, have no room for it beside what computes a tile again: exponentials would wait for each
    other."""
    return build.depth <= 64 and is_plain(build)


def is_plain(build):
    """Whether scores are products alone, and masks read nothing."""
    return not hasattr(build.variant, "score") and not build.loaded


def holds_cells(build):
    """Of a table, in registers, before products are issued: what is read behind them waits for them. Wide ones have no
    room there."""
    return build.table is not None and ELEMENTS[build.table.dtype].width == 16


def room_of(build, element):
    """Two places for k and v each, and one for all else. If there is more, a second for a table comes first, then a
    third for k: a place is free at the end of a step, half a step before the other warpgroup wants k in it. Then a
    second for q, unless it is in registers: the next item's is to be there in time."""
    size, tile = element.width // 8, build.tile
    sizes = {"q": tile.q * build.depth * size, "k": tile.k * build.depth * size, "v": tile.k * build.columns * size}
    sizes["table"] = tile.q * tile.k * ELEMENTS[build.table.dtype].width // 8 if build.table else 0
    places = {"q": 1, "k": 2, "v": 2, "table": int(build.table is not None)}
    left = SHARED - AROUND - sum(sizes[name] * places[name] for name in places)
    for name, is_wanted in {"table": build.table is not None, "k": True, "q": not holds_q(build)}.items():
        if is_wanted and left >= sizes[name]:
            places[name], left = places[name] + 1, left - sizes[name]
    more = left // (sizes["k"] + sizes["v"])
    return Room(**places | {name: min(places[name] + more, MOST_STAGES) for name in ("k", "v")})


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, sinks: cute.Tensor, arrays: tuple, scale: Float32,
    next_item: cute.Tensor, blocks: Int32, section: Int32, sections: Int32, remainder: cute.Tensor,
    build: cutlass.Constexpr, stream,
):  # fmt: skip
    """q, k, v, out: (batch, heads, n, d); lse: (batch, heads, n). blocks: as many as run at once, at most one a query
    tile, of which records has one each; section, sections: items.Order. remainder: as out, what rounding took from it,
    if the build keeps it."""
    element, tile = q.element_type, build.tile
    room = room_of(build, element)
    q_tiles = swizzled_tiles(element, tile.q, build.depth, room.q)
    k_tiles = swizzled_tiles(element, tile.k, build.depth, room.k)
    v_tiles = swizzled_tiles(element, tile.k, build.columns, room.v, transposed=True)
    q_map, q_rows = copy_engine(q, q_tiles)
    k_map, k_rows = copy_engine(k, k_tiles)
    v_map, v_rows = copy_engine(v, v_tiles, transposed=True)
    table_map, table_rows, cells = None, None, None
    if cutlass.const_expr(build.table is not None):
        cells = table_tiles(arrays[-1].element_type, 64, tile.k, room.table * tile.q // 64)
        table_map, table_rows = copy_engine(arrays[-1], cells)
    attention(
        q_map, k_map, v_map, table_map, q_rows, k_rows, v_rows, table_rows, q_tiles, k_tiles, v_tiles, cells,
        out, remainder if build.remainder else None, lse, records, runs, sinks, arrays, scale, binary(scale, build),
        q.shape[1] // k.shape[1], next_item, section, sections, build,
    ).launch(
        grid=(blocks, 1, 1), block=(WARPGROUP + tile.q // 64 * WARPGROUP, 1, 1), min_blocks_per_mp=1, stream=stream,
    )  # fmt: skip


@cute.kernel
def attention(
    q_map: cute.CopyAtom, k_map: cute.CopyAtom, v_map: cute.CopyAtom, table_map: cute.CopyAtom | None,
    q_rows: cute.Tensor, k_rows: cute.Tensor, v_rows: cute.Tensor, table_rows: cute.Tensor | None,
    q_tiles: cute.ComposedLayout, k_tiles: cute.ComposedLayout, v_tiles: cute.ComposedLayout,
    cells: cute.ComposedLayout | None,
    out: cute.Tensor, remainder: cute.Tensor | None, lse: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, sinks: cute.Tensor, arrays: tuple,
    scale: Float32, factor: Float32, group: Int32, next_item: cute.Tensor, section: Int32, sections: Int32,
    build: cutlass.Constexpr,
):  # fmt: skip
    """factor: what makes scores exponents of 2; known before, or it would be reckoned again in every step."""
    element, consumers = out.element_type, build.tile.q // 64
    warps, (produces, consumes) = 4 * consumers, REGISTERS[consumers]

    memory = SmemAllocator()
    q_tile, k_tile, v_tile = (
        memory.allocate_tensor(element, layout.outer, 1024, layout.inner) for layout in (q_tiles, k_tiles, v_tiles)
    )
    table_tile = None
    if cutlass.const_expr(build.table is not None):
        table_tile = memory.allocate_tensor(arrays[-1].element_type, cells.outer, 1024, cells.inner)
    items = memory.allocate_tensor(Int32, cute.make_layout((WORDS, PLACES)), 16)
    of_q, of_k, of_v = (barriers(memory, cute.size(x, mode=[2]), 1, warps) for x in (q_tile, k_tile, v_tile))
    of_table = barriers(memory, consumers if table_tile is None else cute.size(table_tile, mode=[2]), 1, 4)
    readers = warps + (1 if table_tile is None else 2)
    of_items, of_begun = barriers(memory, PLACES, 32, readers), barriers(memory, 1, 1, 1)
    if cute.arch.thread_idx()[0] == 0:
        begin(of_q, of_k, of_v, of_table, of_items, of_begun)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    warpgroup_number, role = role_of()
    if warpgroup_number == 0:
        cute.arch.setmaxregister_decrease(produces)
        if role == PRODUCER:
            load(
                Arrays(q_map, q_rows, q_tile, filling(of_q[0])), Arrays(k_map, k_rows, k_tile, filling(of_k[0])),
                Arrays(v_map, v_rows, v_tile, filling(of_v[0])), items, reading(of_items[0]), of_begun[0], runs, group,
                build, q_waits=of_q[0].count == 1 and not holds_q(build),
            )  # fmt: skip
        if role == SCHEDULER:
            order = Order(next_item, section, sections)
            schedule(items, filling(of_items[0]), reading(of_begun[0]), records, runs, order)
        if cutlass.const_expr(table_tile is not None):
            table = Arrays(table_map, table_rows, table_tile, filling(of_table[0]))
            if role == TABLE_PRODUCER:
                load_table(table, items, reading(of_items[0]), runs, group, build)
    else:
        cute.arch.setmaxregister_increase(consumes)
        rings = Rings(
            *(reading(x[0]) for x in (of_q, of_k, of_v)), reading(of_table[0], warpgroup_number - 1, consumers),
            reading(of_items[0]),
        )  # fmt: skip
        consumer = consumer_of(
            q_tile, k_tile, v_tile, table_tile, rings, items, warpgroup_number - 1, runs, group, arrays, scale,
            factor if build.raw else binary(scale, build), build,
        )  # fmt: skip
        consume(consumer, out, remainder, lse, sinks)


# -- consumers --------------------------------------------------------------------------------------------------------


class Rings(NamedTuple):
    q: Any
    k: Any
    v: Any
    table: Any
    items: Any


class Consumer(NamedTuple):
    """A warpgroup: 64 rows of the query tile, of which a thread has two (and shares them with its quad)."""

    number: Int32
    thread: Int32  # of all that consume
    q_tile: cute.Tensor
    k_tile: cute.Tensor
    v_tile: cute.Tensor
    table_tile: cute.Tensor | None
    rings: Rings
    items: cute.Tensor
    runs: cute.Tensor
    group: Int32
    arrays: tuple
    scale: Float32
    build: Any
    qk: tuple  # products: that which forgets the result before, and that which adds to it
    pv: tuple
    q: cute.Tensor  # operands in shared memory; q in registers, if they have room
    k: cute.Tensor
    v: cute.Tensor
    s: cute.Tensor
    acc: cute.Tensor
    p: cute.Tensor
    narrow: cute.Tensor  # the same registers, in the order of s
    at: cute.Tensor  # where in the tile each score is
    first_cells: Int32 | None  # where those begin that it reads of a table's tile
    rows: Rows
    rows_left: cute.Tensor  # of the sequence, from the thread's first row on
    keys_left: cute.Tensor  # from the first key on of the tile that p has the weights of


def consumer_of(q_tile, k_tile, v_tile, table_tile, rings, items, number, runs, group, arrays, scale, factor, build):
    element, thread = q_tile.element_type, cute.arch.thread_idx()[0] - WARPGROUP
    qk, pv = products_sm90(element, build.tile.q, build.tile.k, build.columns, holds_q(build))
    mine, ours, ours_of_v = qk[0].get_slice(thread), *(x[0].get_slice(number * WARPGROUP) for x in (qk, pv))
    s = qk[0].make_fragment_C(qk[0].partition_shape_C((build.tile.q, build.tile.k)))
    acc = pv[0].make_fragment_C(pv[0].partition_shape_C((build.tile.q, build.columns)))
    p = cute.make_rmem_tensor(operand_of_product(s), element)
    if holds_q(build):
        q = cute.make_rmem_tensor(first_operand(build.depth // 16), element)
    else:
        q = qk[0].make_fragment_A(ours.partition_A(q_tile))
    return Consumer(
        number, thread, q_tile, k_tile, v_tile, table_tile, rings, items, runs, group, arrays, scale, build, qk, pv,
        q, qk[0].make_fragment_B(ours.partition_B(k_tile)),
        pv[0].make_fragment_B(ours_of_v.partition_B(v_tile)), s, acc, p, cute.make_tensor(p.iterator, s.layout),
        mine.partition_C(cute.make_identity_tensor((build.tile.q, build.tile.k))),
        row_of_matrices(thread, row_bytes(table_tile.element_type, build.tile.k)) if holds_cells(build) else None,
        rows_of(acc, factor),
        *(cute.make_rmem_tensor((1,), Int32) for _ in range(2)),
    )  # fmt: skip


@cute.jit
def consume(c, out, remainder, lse, sinks):
    """All items of a block; there is one at least."""
    pass_first_turn(c)
    # 1 load q
    n_runs = wait_for_item(c.items, c.rings.items)
    begin_q(c)
    cells = held_cells(c)
    wait_until_full(c.rings.k)
    take_turn(c)
    warpgroup.fence()
    multiply_q_k(c)
    pass_turn(c)
    warpgroup.wait_group(0)
    first_tile(c, n_runs, cells)
    pack(c)
    while n_runs > 0:
        zero(c.acc)
        # for each kv tile of the schedule:
        for i in cutlass.range(n_runs, unroll=1):
            first, last, kind = run_of_item(c.items, stage_of(c.rings.items), c.runs, n_runs - 1 - i)
            if i == 0:
                last = last - 1  # it was the item's first
            if kind == PARTIAL:
                for j in cutlass.range(last - first, unroll=1):
                    exact_step(c, last - 1 - j, True)
            else:
                for j in cutlass.range(last - first, unroll=1):
                    full_step(c, last - 1 - j)
        if cutlass.const_expr(not holds_q(c.build)):
            free(c.rings.q)

        # The last product of this item beside the first of the next.
        done, stage = copied(c.rows), stage_of(c.rings.items)
        advance(c.rings.items)
        n_runs = wait_for_item(c.items, c.rings.items)
        if n_runs > 0:
            begin_q(c)
            first_tile(c, n_runs, begin_products(c))
            warpgroup.wait_group(0)
            free(c.rings.v)
        else:
            wait_for_v(c)
            take_turn(c)
            warpgroup.fence()
            multiply_p_v(c)
            pass_turn(c)
            warpgroup.wait_group(0)
            free(c.rings.v)
        store_item(c, stage, done, out, remainder, lse, sinks)
        free_place(c.rings.items, stage)
        pack(c)


# 1 load q (to registers, if they have room)
def begin_q(c):
    wait_until_full(c.rings.q)
    if holds_q(c.build):
        loading = cute.make_tiled_copy_A(loading_operand(c.q.element_type), product(c.q.element_type))
        thread = anew(c.thread)  # what follows from it is not to take registers all the time
        mine = loading.get_slice(thread % WARPGROUP)
        cute.copy(loading, mine.partition_S(q_rows(c, thread)), mine.retile(c.q))
        free(c.rings.q)


def q_rows(c, thread):
    """Of a thread's warpgroup."""
    tile = c.q_tile[None, None, stage_of(c.rings.q)]
    return cute.local_tile(tile, (64, c.build.depth), (thread // WARPGROUP, 0))


def begin_products(c):
    """Issue this tile's s and the last tile's p @ v; wait for s. The cells of a table that were read before."""
    cells = held_cells(c)
    wait_until_full(c.rings.k)
    if c.build.packed:
        wait_for_v(c)
    take_turn(c)
    warpgroup.fence()
    multiply_q_k(c)
    if not c.build.packed:
        wait_for_v(c)
    multiply_p_v(c)
    pass_turn(c)
    warpgroup.wait_group(1)
    return cells


def wait_for_v(c):
    wait_until_full(c.rings.v)
    if c.build.packed:
        clear_rows(c.v_tile[None, None, stage_of(c.rings.v)], c.keys_left[0], c.thread, c.build.tile.q)


# 2 s = q @ k.T
def multiply_q_k(c):
    q = c.q if holds_q(c.build) else c.q[None, None, None, stage_of(c.rings.q)]
    multiply(c.qk, c.s, q, c.k[None, None, None, stage_of(c.rings.k)], False)


@cute.jit
def multiply_q_k_again(c):
    """The same for this warp's 16 rows alone, once more: k is still there."""
    mma = product(c.q_tile.element_type)
    k_tile, thread = c.k_tile[None, None, stage_of(c.rings.k)], anew(c.thread)
    s = cute.make_tensor(c.s.iterator, mma.make_fragment_C(mma.partition_shape_C((64, c.build.tile.k))).layout)
    zero(s)
    if cutlass.const_expr(holds_q(c.build)):
        multiply_held(mma, s, c.q, k_tile, thread % WARPGROUP)
    else:
        basic.multiply(mma, s, q_rows(c, thread), k_tile, thread % WARPGROUP, False)


def multiply_held(mma, s, q, k_tile, thread):
    """s += q @ k_tile.T, a slice at a time, of q in registers."""
    loading, mine = cute.make_tiled_copy_B(loading_operand(q.element_type), mma), mma.get_slice(thread)
    for i in range(cute.size(q, mode=[2])):
        k_slice = cute.local_tile(k_tile, (cute.size(k_tile, mode=[0]), 16), (0, i))
        k = mma.make_fragment_B(mine.partition_B(k_slice))
        cute.copy(loading, loading.get_slice(thread).partition_S(k_slice), loading.get_slice(thread).retile(k))
        cute.gemm(mma, s, q[None, None, i], k[None, None, 0], s)


# 3 score
def score_tile(c, tile, cells):
    """cells: of a table, if registers have them."""
    work = work_of_item(c.items, stage_of(c.rings.items), c.group)
    if c.build.table is not None and cells is None:
        cells = cells_in_place(c)
    score(c.s, c.at, tile * c.build.tile.k, work, c.arrays, c.scale, c.build, cells)


# 4 mask (PARTIAL tiles only: one that ends beyond the last key is such a tile)
@cute.jit
def mask_tile(c, tile):
    work, first_key = work_of_item(c.items, stage_of(c.rings.items), c.group), tile * c.build.tile.k
    if work.n_k - first_key < c.build.tile.k:
        mask_from(c.s, work.n_k - first_key - c.at[0][1])
    if cutlass.const_expr(hasattr(c.build.variant, "mask")):
        mask_by_variant(c.s, c.at, first_key, work, c.arrays, c.build)


def held_cells(c):
    """Those of this tile's scores, if there is a table and registers have room for them."""
    if not holds_cells(c.build):
        return None
    wait_until_full(c.rings.table)
    return load_cells(c.table_tile, stage_of(c.rings.table), c.first_cells)


def cells_in_place(c):
    """Each is read when it is asked for."""
    wait_until_full(c.rings.table)
    return read_cells(c.table_tile, stage_of(c.rings.table), c.at[0][0] % 64, cute.arch.lane_idx() % 4)


def free_k(c):
    """k, and what came with it."""
    free(c.rings.k)
    if c.build.table is not None:
        free(c.rings.table)


# 5 row_max, rescale, p, row_sum
@cute.jit
def first_tile(c, n_runs, cells):
    """Of an item: its last one. There is nothing to rescale yet."""
    stage = stage_of(c.rings.items)
    work = work_of_item(c.items, stage, c.group)
    _, last, kind = run_of_item(c.items, stage, c.runs, n_runs - 1)
    c.rows_left[0] = work.n_q - work.first - c.at[0][0]
    score_tile(c, last - 1, cells)
    if kind == PARTIAL:
        mask_tile(c, last - 1)
    begin_rows(c.rows, c.s, c.q_tile.element_type)
    free_k(c)
    c.keys_left[0] = work.n_k - (last - 1) * c.build.tile.k


@cute.jit
def exact_step(c, tile, masked: cutlass.Constexpr):
    """The online softmax as it is written everywhere."""
    score_tile(c, tile, begin_products(c))
    if cutlass.const_expr(masked):
        mask_tile(c, tile)
    free_k(c)
    rescale = exact(c.rows, c.s, PATIENCE, c.q_tile.element_type)
    warpgroup.wait_group(0)
    free(c.rings.v)
    # 6 acc = acc * rescale + p @ v: its first half; the product comes with the next tile's scores
    multiply_rows(c.acc, rescale)
    pack(c)
    next_is(c, tile)


def full_step(c, tile):
    """No registers are left to compute scores once more where heads are large and scores not plain products."""
    if c.build.columns <= 128 or is_plain(c.build):
        speculative_step(c, tile)
    else:
        exact_step(c, tile, False)


@cute.jit
def speculative_step(c, tile):
    """Some exponentials hide the product before, and the last ones run beside the work that follows."""
    score_tile(c, tile, begin_products(c))
    sums = cute.make_rmem_tensor((2,), Float32)
    zero(sums)
    columns = c.build.tile.k // 4
    before = columns * eighths_before_wait(c.build) // 8
    speculate(c.rows, c.s, sums, 0, before)
    pin(sums)
    if cutlass.const_expr(before < columns):
        wait_in_place(0, c.group > 0)
    else:
        warpgroup.wait_group(0)
    speculate(c.rows, c.s, sums, before, columns)
    pack(c)
    pin(cute.recast_tensor(c.narrow, Int32))
    element = c.q_tile.element_type
    if any_heavy(c.rows, sums, c.rows_left[0], element):
        weigh_again(c, tile, sums)
    else:
        add_to(c.rows.row_sum, sums)
    free_k(c)
    free(c.rings.v)
    next_is(c, tile)


@cute.jit
def weigh_again(c, tile, sums):
    """A weight may be most of its row: what it gained when it was narrowed counts, or speculation did not serve."""
    element = c.q_tile.element_type
    if any_above(safe_sum(element), sums, c.rows_left[0]):
        correct(c, tile, sums)
    else:
        add_to(c.rows.row_sum, sums)
        add_narrowing(c.rows, c.s, element)


@cute.jit
def correct(c, tile, sums):
    """Speculation did not serve: what p should have been."""
    element, rescale = c.q_tile.element_type, cute.make_rmem_tensor_like(c.rows.row_max)
    if any_above(FINITE_SUM, sums, c.rows_left[0]):
        multiply_q_k_again(c)
        score_tile(c, anew(tile), held_cells(c))  # nothing of the first time is kept for this
        copy(exact(c.rows, c.s, 0.0, element), rescale)
    else:
        copy(tame(c.rows, c.s, sums, element), rescale)
        add_narrowing(c.rows, c.s, element)
    multiply_rows(c.acc, rescale)
    pack(c)


def eighths_before_wait(build):
    """How many of a tile's exponentials are under way when the product before is waited for; if all, the compiler finds
    a better place for that wait."""
    return 4 if build.tile.q == 192 else 6 if build.depth > 64 else 8


def next_is(c, tile):
    """The tile that p has the weights of."""
    if c.build.packed:
        c.keys_left[0] = c.items[4, stage_of(c.rings.items)] - tile * c.build.tile.k


# 6 acc = acc * rescale + p @ v
def multiply_p_v(c):
    multiply(c.pv, c.acc, c.p, c.v[None, None, None, stage_of(c.rings.v)], True)


def pack(c):
    c.narrow.store(c.s.load().to(c.narrow.element_type))


def multiply(product, acc, a, b, adds):
    """acc = a @ b.T, or added to it; under way until it is waited for."""
    for i in range(cute.size(a, mode=[2])):
        cute.gemm(product[adds or i > 0], acc, a[None, None, i], b[None, None, i], acc)
    warpgroup.commit_group()


def take_turn(c):
    """Warpgroups take turns to issue products, so that one's exponentials run beside the other's products."""
    if in_turns(c.build):
        cute.arch.barrier(barrier_id=TURNS + c.number, number_of_threads=2 * WARPGROUP)


def pass_turn(c):
    if in_turns(c.build):
        cute.arch.barrier_arrive(barrier_id=TURNS + 1 - c.number, number_of_threads=2 * WARPGROUP)


@cute.jit
def pass_first_turn(c):
    """The first warpgroup begins."""
    if c.number == 1:
        pass_turn(c)


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


# 7 finish: acc / row_sum, lse
@cute.jit
def store_item(c, stage, rows, out, remainder, lse, sinks):
    """stage: of the item whose rows they are."""
    work, b = work_of_item(c.items, stage, c.group), c.items[BATCH, stage]
    h = work.place.h
    sink = sinks[h] if c.build.has_sinks else None
    done = finish(rows, c.acc, sink)
    for row in cutlass.range_constexpr(2):
        query = work.first + by_rows(c.at)[row, 0][0]
        if (c.at[0][1] == 0) & (query < work.n_q):  # the first thread of a quad
            lse[b, h, work.q_begin + query] = done[row]
    first_row = work.q_begin + work.first
    store_results(c, matrix(out, b, h, first_row), work.n_q - work.first)
    if cutlass.const_expr(c.build.remainder):
        take_rounded(c.acc, out.element_type)
        store_results(c, matrix(remainder, b, h, first_row), work.n_q - work.first)


def store_results(c, rows, count):
    if c.build.vector > 1:
        store_in_quads(c.acc, rows, count, c.at[0][0])
    else:
        store(c.acc, rows, count, c.pv[0], c.thread, (c.build.tile.q, c.build.columns))


def take_rounded(acc, element):
    """From results what was stored of them, rounded; what is not finite leaves nothing."""
    for i in range(cute.size(acc)):
        left = acc[i] - acc[i].to(element).to(Float32)
        acc[i] = where(left - left == 0.0, left, Float32(0.0))


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


def zero(x):
    x.fill(0.0)


def copy(from_, to):
    for i in range(cute.size(to)):
        to[i] = from_[i]


def add_to(sums, more):
    for i in range(cute.size(sums)):
        sums[i] = sums[i] + more[i]


def copied(rows):
    """As they are now."""
    made = [cute.make_rmem_tensor_like(x) for x in (rows.row_max, rows.row_sum, rows.narrowing)]
    for to, from_ in zip(made, (rows.row_max, rows.row_sum, rows.narrowing), strict=True):
        copy(from_, to)
    return Rows(*made, rows.total, rows.factor)
