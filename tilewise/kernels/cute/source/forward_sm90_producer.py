"""The producer warps of Hopper's forward kernel, which have the copy engine bring tiles."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from tilewise.kernels.cute.source.items import BATCH, run_of_item, wait_for_item, work_of_item
from tilewise.kernels.cute.source.operations import clamped
from tilewise.kernels.cute.source.rings import copy_to_place, free, stage_of, wait_until_free


class Arrays(NamedTuple):
    """An array in the copy engine's coordinates, and where its tiles go."""

    map: cute.CopyAtom
    rows: cute.Tensor
    places: cute.Tensor
    ring: Any


@cute.jit
def load(q, k, v, items, item_ring, begun, runs, group, build: cutlass.Constexpr, q_waits: cutlass.Constexpr):
    """One warp: tiles come as soon as there is a place for them. A tile's v comes after the next one's k, as consumers
    need it a step later. q_waits: its only place is free last of all, when its item's last scores were multiplied; so
    what is free before comes before."""
    for array in (q, k, v):
        cpasync.prefetch_descriptor(array.map)  # while the first item is made ready
    next_v = cute.make_rmem_tensor((4,), Int32)  # its tile, where its sequence begins, its head and batch index
    next_v[0] = Int32(-1)
    n_runs = wait_for_item(items, item_ring)
    while n_runs > 0:
        stage = stage_of(item_ring)
        work, b = work_of_item(items, stage, group), items[BATCH, stage]
        if cutlass.const_expr(not q_waits):
            load_q(q, work, b, begun, build)
        # for each kv tile of the schedule:
        for i in cutlass.range(n_runs, unroll=1):
            first, last, _ = run_of_item(items, stage, runs, n_runs - 1 - i)
            for j in cutlass.range(last - first, unroll=1):
                tile = last - 1 - j
                wait_until_free(k.ring)
                copy_rows(k, tile, work.k_begin, work.place.hk, b, (build.tile.k, build.depth))
                if next_v[0] >= 0:
                    load_v(v, next_v, build)
                if cutlass.const_expr(q_waits):
                    is_first = (i == 0) & (j == 0)
                    if is_first:
                        load_q(q, work, b, begun, build)
                next_v[0], next_v[1], next_v[2], next_v[3] = tile, work.k_begin, work.place.hk, b
        free(item_ring)
        n_runs = wait_for_item(items, item_ring)
    load_v(v, next_v, build)


# 1 load q
def load_q(q, work, b, begun, build):
    wait_until_free(q.ring)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(begun.first)
    copy_rows(q, 0, work.q_begin + work.first, work.place.h, b, (build.tile.q, build.depth))


def load_v(v, next_v, build):
    wait_until_free(v.ring)
    tile, begins, hk, b = (next_v[i] for i in range(4))
    copy_rows(v, tile, begins, hk, b, (build.columns, build.tile.k), transposed=True)


@cute.jit
def load_table(table, items, item_ring, runs, group, build: cutlass.Constexpr):
    """Another warp, as places of a table's tiles are free at other times than those of k and v: the cells of each
    warpgroup's queries by themselves, which are read once."""
    cpasync.prefetch_descriptor(table.map)
    n_runs = wait_for_item(items, item_ring)
    while n_runs > 0:
        stage = stage_of(item_ring)
        rows = rows_of_table(table, work_of_item(items, stage, group), build)
        for i in cutlass.range(n_runs, unroll=1):
            first, last, _ = run_of_item(items, stage, runs, n_runs - 1 - i)
            for j in cutlass.range(last - first, unroll=1):
                for number in cutlass.range_constexpr(build.tile.q // 64):
                    wait_until_free(table.ring)
                    copy_tile(table, rows, (64, build.tile.k), (number, last - 1 - j))
        free(item_ring)
        n_runs = wait_for_item(items, item_ring)


def rows_of_table(table, work, build):
    """The cells of the item's head, from its first query and the sequence's first key on."""
    place, sizes = work.place, table.rows.shape
    values = {"B": place.b, "H": place.h, "HK": place.hk}
    others = [Int32(values.get(x, x)) for x in (0, 0, *build.table.others)[-2:]]
    b, h = (clamped(x, size) for x, size in zip(others, (sizes[3], sizes[2]), strict=True))
    return cute.domain_offset((place.origin_q + work.first, place.origin_k), table.rows[None, None, h, b])


def copy_rows(array, tile, begins, h, b, size, transposed=False):
    """The tile of that number, from a row on, to the next place."""
    offset, which = ((0, begins), (0, tile)) if transposed else ((begins, 0), (tile, 0))
    copy_tile(array, cute.domain_offset(offset, array.rows[None, None, h, b]), size, which)


def copy_tile(array, rows, size, which):
    from_, to = parts(array.map, rows, array.places, size, which)
    size_in_bytes = cute.size_in_bytes(array.places.element_type, cute.select(array.places.layout, [0, 1]))
    copy_to_place(array.ring, array.map, from_, to[None, stage_of(array.ring)], size_in_bytes)


def parts(map_, rows, tile, size, which):
    """Tiles of a matrix and their places, as the copy engine takes them: (numbers of a tile, tile or place)."""
    matrix = cute.local_tile(rows, size, which)
    to, from_ = cpasync.tma_partition(
        map_, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(matrix, 0, 2)
    )
    return from_, to
