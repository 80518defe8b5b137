"""Which query tile a block computes next. A warp of the producer takes one number after the other and writes down what
the others need to know of its tile: an item.

Heads take turns in sections, so that what a section's tiles read stays in the cache; of each, tiles come in the order
of their records, those with the most keys first. No item is taken before the last one is begun: another block may be
free earlier.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from tilewise.kernels.cute.source.operations import maximum, minimum, where
from tilewise.kernels.cute.source.rings import advance, full_of, stage_of, wait_until_free, wait_until_full
from tilewise.kernels.cute.source.tiles import FIELDS, work_of_fields

WORDS = 32  # of an item: its record, batch index and head, and runs
BATCH, HEAD, RUNS = FIELDS, FIELDS + 1, FIELDS + 2
N_RUNS = 6  # which field of the record; the last item, which is none, has -1
AT_HAND = (WORDS - RUNS) // 3  # runs that an item has room for; others are read where they are
PLACES = 4  # one is stored, one computed, one loaded and one made ready at a time


class Order(NamedTuple):
    """next_item: which a block takes when it is done with one; 0 before and after a launch. sections: of so many heads
    (section), the last with the rest."""

    next_item: cute.Tensor
    section: Int32
    sections: Int32


@cute.jit
def schedule(items, ring, begun, records, runs, order):
    """By a warp: each block begins with the item of its own number; the rest go to whoever asks first."""
    lane, block, blocks = cute.arch.lane_idx(), cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    batch, heads, tiles, _ = records.shape
    count = batch * heads * tiles
    index = block
    while index < count:
        wait_until_free(ring)
        head, tile = in_turns(index, batch * heads, tiles, order)
        items[lane, stage_of(ring)] = word_of(lane, head // heads, head % heads, tile, records, runs)
        cute.arch.mbarrier_arrive(full_of(ring))
        advance(ring)
        wait_until_full(begun)
        advance(begun)
        taken = Int32(0)
        if lane == 0:
            taken = cute.arch.atomic_add(order.next_item.iterator, Int32(1))
            if taken == count - 1:  # the last to ask leaves 0 for the next launch
                order.next_item[0] = Int32(0)
        index = cute.arch.shuffle_sync(taken, 0) + blocks
    wait_until_free(ring)
    items[lane, stage_of(ring)] = Int32(-1)
    cute.arch.mbarrier_arrive(full_of(ring))


def in_turns(index, heads, tiles, order):
    """The head of an item, and which of its tiles."""
    number = minimum(index // (order.section * tiles), order.sections - 1)
    before = number * order.section
    taking_turns = where(number == order.sections - 1, heads - before, order.section)
    rest = index - before * tiles
    return before + rest % taking_turns, rest // taking_turns


def word_of(lane, b, h, tile, records, runs):
    """Each lane copies one."""
    field = records[b, h, tile, minimum(lane, Int32(FIELDS - 1))]
    first_run, at = cute.arch.shuffle_sync(field, N_RUNS - 1), maximum(lane - RUNS, Int32(0))
    run = runs[minimum(first_run + at // 3, runs.shape[0] - 1), at % 3]
    return where(lane < BATCH, field, where(lane == BATCH, b, where(lane == HEAD, h, run)))


def wait_for_item(items, ring):
    """How many runs the next item has; -1 if there is none."""
    wait_until_full(ring)
    return cute.arch.make_warp_uniform(items[N_RUNS, stage_of(ring)])


def work_of_item(items, stage, group):
    return work_of_fields([items[i, stage] for i in range(FIELDS)], items[BATCH, stage], items[HEAD, stage], group)


@cute.jit
def run_of_item(items, stage, runs, i):
    """The first tile of a run, the one after the last, and what kind they are."""
    first, last, kind = Int32(0), Int32(0), Int32(0)
    if i < AT_HAND:
        first, last, kind = (items[RUNS + 3 * i + field, stage] for field in range(3))
    else:
        first, last, kind = (runs[items[N_RUNS - 1, stage] + i, field] for field in range(3))
    return tuple(cute.arch.make_warp_uniform(x) for x in (first, last, kind))
