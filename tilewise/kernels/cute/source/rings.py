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
    """Where a role stands: at the place that is next, of two rounds, as the parity of barriers' phases has two."""

    barriers: Barriers
    at: cute.Tensor


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


def reading(made):
    """A ring whose places are yet to be filled."""
    return _ring(made, 0)


def filling(made):
    """A ring whose places are all free: the phase before the first is taken for over."""
    return _ring(made, made.count)


def _ring(made, at):
    ring = Ring(made, cute.make_rmem_tensor((1,), Int32))
    ring.at[0] = Int32(at)
    return ring


def stage_of(ring):
    """The number of the next place."""
    count = ring.barriers.count
    return where(ring.at[0] < count, ring.at[0], ring.at[0] - count)


def full_of(ring):
    """The barrier of the next place."""
    return ring.barriers.first + stage_of(ring)


def wait_until_full(ring):
    cute.arch.mbarrier_wait(full_of(ring), _parity(ring))


def wait_until_free(ring):
    cute.arch.mbarrier_wait(ring.barriers.free + stage_of(ring), _parity(ring))


def _parity(ring):
    return where(ring.at[0] < ring.barriers.count, Int32(0), Int32(1))


def free(ring):
    """A warp has read the next place, and goes on to the one after it."""
    free_place(ring, stage_of(ring))
    advance(ring)


def free_place(ring, stage):
    cute.arch.sync_warp()  # all lanes have
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.barriers.free + stage)


def advance(ring):
    after = ring.at[0] + 1
    ring.at[0] = where(after == 2 * ring.barriers.count, Int32(0), after)


def copy_to_place(ring, map_, rows, place, size):
    """The copy engine fills the next place, which is free, with size bytes."""
    full = full_of(ring)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    cute.copy(map_, rows, place, tma_bar_ptr=full)
    advance(ring)
