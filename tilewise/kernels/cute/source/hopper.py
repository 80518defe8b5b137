"""What Hopper's kernels do by single instructions: barriers in shared memory, and sums in memory that blocks add to in
turns."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

WARP = 32


def first_lane():
    return cute.arch.thread_idx()[0] % WARP == 0


def wait_together(barrier, parity):
    """A lane that lags behind must not miss a phase: the others go on only with it."""
    cute.arch.mbarrier_wait(barrier, parity)
    cute.arch.sync_warp()


@cute.jit
def arrive(barrier):
    """One lane of a warp."""
    if first_lane():
        cute.arch.mbarrier_arrive(barrier)


def bulk_store(to, from_, size):
    """So many bytes of shared memory, by the copy engine."""
    _bulk("cp.async.bulk.global.shared::cta.bulk_group", to, from_, size)


def bulk_add(to, from_, size):
    """The same, added to the numbers that are there."""
    _bulk("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", to, from_, size)


def _bulk(instruction, to, from_, size):
    cute.arch.inline_ptx(
        f"{instruction} [{{$r0}}], [{{$r1}}], {{$r2}};", read_only_args=[to.toint(), from_.toint(), Int32(size)]
    )


def anew(x):
    """A number that compilers do not know to be the same: what follows from it is computed here, and not kept."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[type(x)], read_only_args=[x])


def pin(numbers):
    """Compilers may not move the computation of these across this place."""
    for i in range(cute.size(numbers)):
        numbers[i] = anew(numbers[i])


@cute.jit
def wait_in_place(left: cutlass.Constexpr, always):
    """Waits for all products but the last so many, just here: a compiler that finds a plain wait moves it up, above the
    work that should hide it. A branch holds it in place, as long as its sides differ. `always` must be beyond what it
    can know."""
    if always:
        warpgroup.wait_group(left)
    else:
        cute.arch.inline_ptx(f"wgmma.wait_group.sync.aligned {left}; // never")


@cute.jit
def take_turn(turns, turn):
    """When so many were given away; what those before added is then there for the copy engine."""
    given = cute.arch.load(turns, Int32, sem="relaxed", scope="gpu")
    while given != turn:
        given = cute.arch.load(turns, Int32, sem="relaxed", scope="gpu")
    cute.arch.load(turns, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")


def give_turn_away(turns):
    """When what the copy engine was told is in memory."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    cute.arch.fence_proxy("async.global")
    cute.arch.red(turns, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")
