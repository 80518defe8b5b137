"""Rings of places in shared memory, and where a role stands in one.

Each place has two barriers: a full one, by which whoever fills it tells that it is filled, and a free one, by which
readers tell that it was read. A phase of a barrier ends when as many have arrived as it was made for, and all bytes
that it was told to expect.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from tilewise.kernels.cute.source.operations import where


class Barriers(NamedTuple):
    """Of a ring: count full ones and then count free ones."""

    first: cute.Pointer
    count: int

    @property
    def free(self):
        return self.first + self.count


class Ring(NamedTuple):
    """Where a role stands: the place that is next, and the parity of its barriers' phase. It may have only some of the
    places: from one on each that many further."""

    barriers: Barriers
    stage: cute.Tensor
    parity: cute.Tensor
    begins: Int32
    step: int


def barriers(memory, count, fillers, readers):
    """In shared memory, for so many places; fillers and readers: how many of them arrive."""
    made = Barriers(memory.allocate_array(Int64, 2 * count), count)
    return made, fillers, readers


def begin(*all_barriers):
    """By one thread; the others wait for it afterwards."""
    for made, fillers, readers in all_barriers:
        for i in range(made.count):
            cute.arch.mbarrier_init(made.first + i, fillers)
            cute.arch.mbarrier_init(made.free + i, readers)


def reading(made, begins=0, step=1):
    """A ring whose places are yet to be filled."""
    return _ring(made, 0, begins, step)


def filling(made):
    """A ring whose places are all free: the phase before the first is taken for over."""
    return _ring(made, 1)


def _ring(made, parity, begins=0, step=1):
    ring = Ring(made, *(cute.make_rmem_tensor((1,), Int32) for _ in range(2)), Int32(begins), step)
    ring.stage[0], ring.parity[0] = Int32(begins), Int32(parity)
    return ring


def stage_of(ring):
    """The number of the next place."""
    return ring.stage[0]


def full_of(ring):
    """The barrier of the next place."""
    return ring.barriers.first + ring.stage[0]


def wait_until_full(ring):
    cute.arch.mbarrier_wait(full_of(ring), ring.parity[0])


def wait_until_free(ring):
    cute.arch.mbarrier_wait(ring.barriers.free + ring.stage[0], ring.parity[0])


def free(ring):
    """A warp has read the next place, and goes on to the one after it."""
    free_place(ring, ring.stage[0])
    advance(ring)


def free_place(ring, stage):
    cute.arch.sync_warp()  # all lanes have
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.barriers.free + stage)


def advance(ring):
    is_last = ring.stage[0] == ring.barriers.count - ring.step + ring.begins
    ring.parity[0] = where(is_last, ring.parity[0] ^ 1, ring.parity[0])
    ring.stage[0] = where(is_last, ring.begins, ring.stage[0] + ring.step)


def copy_to_place(ring, map_, rows, place, size):
    """The copy engine fills the next place, which is free, with size bytes."""
    full = full_of(ring)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    cute.copy(map_, rows, place, tma_bar_ptr=full)
    advance(ring)
