"""The producer warpgroup of backward_sm90.py: one warp has the copy engine bring tiles, as soon as consumers have freed
their places, and two hand it what they add to d_q."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from tilewise.kernels.cute.source.gradients_sm90 import parts_from
from tilewise.kernels.cute.source.hopper import (
    arrive,
    bulk_add,
    bulk_store,
    first_lane,
    give_turn_away,
    take_turn,
    wait_together,
)
from tilewise.kernels.cute.source.operations import minimum, where
from tilewise.kernels.cute.source.tiles import work_of
from tilewise.kernels.cute.source.vocabulary import WARPGROUP

STAGES = 2  # of q and d_out; each has its storer
CONSUMER_WARPS = 8

# Barriers. A full one tells that a tile is there, or what was told, a free one that it was read.
KEYS_FULL, KEYS_FREE, ITEM_FULL, ITEM_FREE = 0, 1, 2, 4
Q_FULL, Q_FREE = 6, 6 + STAGES
D_OUT_FULL, D_OUT_FREE = 6 + 2 * STAGES, 6 + 3 * STAGES
D_Q_FREE = 6 + 4 * STAGES

FIELDS = 14  # of a record, which work_of reads
TILES_BEFORE, VISITS = FIELDS, FIELDS + 1  # and two more, as in turns.py


class Item(NamedTuple):
    """A key tile: its record, or -1 if there are no more, of which key head, and how many query tiles it meets."""

    number: Int32
    b: Int32
    hk: Int32
    visits: Int32


class Meeting(NamedTuple):
    """A query tile that a key tile meets: where its sums are, and after how many other key tiles' they are added."""

    tile: Int32
    h: Int32
    kind: Int32
    sums: Int32
    turn: Int32


class Shared(NamedTuple):
    """Shared memory."""

    q: cute.Tensor
    d_out: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    d_s: cute.Tensor
    d_q: cute.Tensor  # (numbers, pieces, storers)
    rows: cute.Tensor  # (queries, shift or delta, stages)
    barriers: cute.Pointer
    items: cute.Tensor  # the one at hand and the next
    meetings: cute.Tensor  # a stage each
    records: cute.Tensor  # of both items, in place of the plan's: (any batch index, any head, items, fields)


def told(kind, place, number):
    """What was told there, the same for all of a warp as compilers see it."""
    return kind(*(cute.arch.make_warp_uniform(place[i, number]) for i in range(len(kind._fields))))


def next_item(shared, items):
    """Of a block's items the one of that number."""
    wait_together(shared.barriers + ITEM_FULL + items % 2, items // 2 % 2)
    return told(Item, shared.items, items % 2)


def tell(place, number, what):
    for i, value in enumerate(what):
        place[i, number] = value


def d_q_written(storer, piece):
    """The named barrier by which a warpgroup hands a piece over."""
    return 2 + storer * 2 + piece


@cute.jit
def init_barriers(barriers):
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.mbarrier_init(barriers + KEYS_FULL, 1)
        cute.arch.mbarrier_init(barriers + KEYS_FREE, CONSUMER_WARPS)
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(barriers + ITEM_FULL + stage, 1)
            cute.arch.mbarrier_init(barriers + ITEM_FREE + stage, STAGES)  # storers: others are done with its keys
            cute.arch.mbarrier_init(barriers + Q_FULL + stage, 1)
            cute.arch.mbarrier_init(barriers + Q_FREE + stage, CONSUMER_WARPS + 1)  # and the storer
            cute.arch.mbarrier_init(barriers + D_OUT_FULL + stage, 1)
            cute.arch.mbarrier_init(barriers + D_OUT_FREE + stage, CONSUMER_WARPS)
            cute.arch.mbarrier_init(barriers + D_Q_FREE + stage, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def size_of(tile):
    """Bytes of one stage."""
    return cute.size_in_bytes(tile.element_type, cute.select(tile.layout, [0, 1]))


def numbers_of(rows, sums, which, size):
    """Of all queries of a tile: what exponents are shifted by, or delta."""
    return cute.local_tile(rows[sums, which, None], (size.q,), (0,))


@cute.jit
def bring_tiles(shared, maps, of_maps, rows, turns, records, runs, section, group, build: cutlass.Constexpr):
    """One warp: it takes items and tells them, and tiles come as soon as there is a place for them."""
    (q_map, d_out_map, k_map, v_map), (q_rows, d_out_rows, k_rows, v_rows) = maps, of_maps
    size, barriers = build.tile, shared.barriers
    heads_k, tiles = k_rows.shape[2], records.shape[2]
    count = heads_k * records.shape[0] * tiles
    q_tiles = rows.shape[0] // (q_rows.shape[2] * records.shape[0])  # of a head
    load_rows = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    items, steps = Int32(0), Int32(0)

    index = next_index(turns)
    while index < count:
        head, number = in_turns(index, heads_k * records.shape[0], tiles, section)
        b, hk = head // heads_k, head % heads_k
        work = work_of(records, number, b, hk * group, group)
        visits = Int32(0)
        for h in cutlass.range(hk * group, (hk + 1) * group, unroll=1):
            visits += records[b, h, number, VISITS]
        wait_together(barriers + ITEM_FREE + items % 2, items // 2 % 2 ^ 1)
        lane = cute.arch.lane_idx()
        if lane < FIELDS:
            shared.records[0, 0, items % 2, lane] = records[b, hk * group, number, lane]
        cute.arch.sync_warp()
        if first_lane():
            tell(shared.items, items % 2, Item(number, b, hk, visits))
            cute.arch.mbarrier_arrive(barriers + ITEM_FULL + items % 2)
        # 1 load k, v
        wait_together(barriers + KEYS_FREE, items % 2 ^ 1)
        if first_lane():
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + KEYS_FULL, size_of(shared.k) + size_of(shared.v))
        cute.arch.sync_warp()
        k_from, k_to = parts_from(work.k_begin + work.first, k_map, k_rows[None, None, hk, b], shared.k)
        v_from, v_to = parts_from(work.k_begin + work.first, v_map, v_rows[None, None, hk, b], shared.v)
        cute.copy(k_map, k_from[None, 0], k_to[None, 0], tma_bar_ptr=barriers + KEYS_FULL)
        cute.copy(v_map, v_from[None, 0], v_to[None, 0], tma_bar_ptr=barriers + KEYS_FULL)
        for h in cutlass.range(hk * group, (hk + 1) * group, unroll=1):
            here = work_of(records, number, b, h, group)
            first_sums = (b * q_rows.shape[2] + h) * q_tiles + records[b, h, number, TILES_BEFORE]
            q_from, q_to = parts_from(here.q_begin, q_map, q_rows[None, None, h, b], shared.q)
            d_out_from, d_out_to = parts_from(here.q_begin, d_out_map, d_out_rows[None, None, h, b], shared.d_out)
            # for each q tile of the schedule:
            for run in cutlass.range(here.first_run, here.last_run, unroll=1):
                last, kind, turn = runs[run, 0], runs[run, 2], runs[run, 3]
                for i in cutlass.range(runs[run, 1], unroll=1):
                    tile, stage, parity = last - i, steps % STAGES, steps // STAGES % 2 ^ 1
                    sums = first_sums + tile
                    wait_together(barriers + Q_FREE + stage, parity)
                    if first_lane():
                        tell(shared.meetings, stage, Meeting(tile, h, kind, sums, turn))
                        cute.arch.mbarrier_arrive_and_expect_tx(
                            barriers + Q_FULL + stage, size_of(shared.q) + 4 * size.q
                        )
                        cute.copy(load_rows, numbers_of(rows, sums, 0, size), shared.rows[None, 0, stage],
                                  mbar_ptr=barriers + Q_FULL + stage)  # fmt: skip
                    cute.arch.sync_warp()
                    cute.copy(q_map, q_from[None, tile], q_to[None, stage], tma_bar_ptr=barriers + Q_FULL + stage)
                    wait_together(barriers + D_OUT_FREE + stage, parity)
                    if first_lane():
                        cute.arch.mbarrier_arrive_and_expect_tx(
                            barriers + D_OUT_FULL + stage, size_of(shared.d_out) + 4 * size.q
                        )
                        cute.copy(load_rows, numbers_of(rows, sums, 1, size), shared.rows[None, 1, stage],
                                  mbar_ptr=barriers + D_OUT_FULL + stage)  # fmt: skip
                    cute.arch.sync_warp()
                    cute.copy(
                        d_out_map, d_out_from[None, tile], d_out_to[None, stage],
                        tma_bar_ptr=barriers + D_OUT_FULL + stage,
                    )  # fmt: skip
                    steps += 1
        items += 1
        index = next_index(turns)
    wait_together(barriers + ITEM_FREE + items % 2, items // 2 % 2 ^ 1)
    if first_lane():
        tell(shared.items, items % 2, Item(Int32(-1), Int32(0), Int32(0), Int32(0)))
        cute.arch.mbarrier_arrive(barriers + ITEM_FULL + items % 2)


@cute.jit
def next_index(turns):
    """In order, each by a block that runs: whatever this one will wait for was begun before."""
    index = Int32(0)
    if first_lane():
        index = cute.arch.atomic_add(turns.iterator + (turns.shape[0] - 1), Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(index, 0)


def in_turns(index, heads, tiles, section):
    """Which head an item is of, and which of its tiles: the heads of a section take turns, their tiles in order; the
    last section has the rest."""
    sections = heads // section
    number = minimum(index // (section * tiles), sections - 1)
    before = number * section
    in_section = where(number == sections - 1, heads - before, section)
    rest = index - before * tiles
    return before + rest % in_section, rest // in_section


@cute.jit
def store_sums(shared, sums, turns, number):
    """A warp that adds d_q to its sums, from places of its own. One has even steps, the other odd ones: while one waits
    until it is this key tile's turn, or for the copy engine, the other's work goes on. The first key tile of a query
    tile need not add. Who owes others a turn waits for nothing but the copy engine."""
    barriers = shared.barriers
    items, step, steps = Int32(0), Int32(number), Int32(0)  # the next of this one's, and all of the key tiles until now
    item = next_item(shared, items)
    while item.number >= 0:
        cute.arch.sync_warp()  # all lanes have read the item
        arrive(barriers + ITEM_FREE + items % 2)
        steps += item.visits
        while step < steps:
            add(shared, sums, turns, number, step)
            step += STAGES
        items += 1
        item = next_item(shared, items)


@cute.jit
def add(shared, sums, turns, number, step):
    """A step's d_q."""
    barriers = shared.barriers
    wait_together(barriers + Q_FULL + number, step // STAGES % 2)
    meeting = told(Meeting, shared.meetings, number)
    cute.arch.sync_warp()
    size = cute.size(shared.d_q, mode=[0]) * 4
    turn_at = turns.iterator + meeting.sums
    if first_lane():
        cute.arch.mbarrier_arrive(barriers + Q_FREE + number)
        take_turn(turn_at, meeting.turn)
    cute.arch.sync_warp()
    for piece in cutlass.range_constexpr(2):
        cute.arch.barrier(barrier_id=d_q_written(number, piece), number_of_threads=WARPGROUP + 32)
        if first_lane():
            to, from_ = sums[meeting.sums, piece, None].iterator, shared.d_q[None, piece, number].iterator
            if meeting.turn == 0:
                bulk_store(to, from_, size)
            else:
                bulk_add(to, from_, size)
    if first_lane():
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.mbarrier_arrive(barriers + D_Q_FREE + number)
        give_turn_away(turn_at)
    cute.arch.sync_warp()
