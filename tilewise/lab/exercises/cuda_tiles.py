"""Exercise: the loop of the tiled CUDA kernel: shared memory, and threads that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tilewise.kernels.cuda import simulator
from tilewise.lab.exercises.cuda import checked
from tilewise.lab.exercises.cutting import Source
from tilewise.lab.exercises.exercise import Exercise
from tilewise.lab.exercises.problem import Problem
from tilewise.spec import Tile

TASK = """
The second CUDA kernel of the project, tilewise/kernels/cuda/source/tiled.cu, without the heart of
its loop. A block of 128 threads has a tile of queries, and goes through tiles of keys. Tiles lie in
shared memory, where all threads of the block write and read them. The simulator finds what is wrong
with that: a thread that reads what another writes, without a __syncthreads() between, is told of as
a race, by its lines.

128 threads are 8 groups of 16 lanes. A group has rows group, group + 8 ... of the tile, ROWS of
them. Of each, a lane has the scores of keys lane, lane + 16 ..., KEYS of them, and two columns of
acc in each slice of v.

Write what is missing of the loop:

2  float s[ROWS][KEYS]: the products. k comes in Q_SLICES slices of SLICE columns, one after the
   other, through the one tile kv. All threads fill it together, and then each adds to its own s:

       fill<THREADS>(kv, k + slice * SLICE, params.k.row, keys_left, D - slice * SLICE, 1.0f);
       multiply<GROUPS, LANES, SLICE>(s, q, slice * SLICE, kv, 0, group, lane);

   Nobody may read kv before all have filled it, and nobody fill it while others read it:
   two __syncthreads() a slice.
5  for each row i the new maximum: of row_max[i], of this lane's s[i][j], and then of the group,
   largest_in_group(x). Then rescale; row_sum[i], of this lane's keys alone (step 7 adds up lanes);
   acc[slice][i][0] and [1] of every slice, times rescale; and the weights, which the whole group
   will read: p.set(group + i * GROUPS, lane + j * LANES, weight).
6  acc[slice] += p @ v, for V_SLICES slices. kv is filled as in step 2, from v, and with the same
   two barriers:

       fill<THREADS>(kv, v + slice * SLICE, params.v.row, keys_left, D_V - slice * SLICE, 1.0f);
       add_weighted<GROUPS, KEYS * LANES>(acc[slice], p, kv, group, lane);
"""

HINTS = (
    "Step 2: float s[ROWS][KEYS] = {}; then a loop over slices of four lines: __syncthreads (the slice before"
    " is no longer read), fill, __syncthreads (all of it is there), multiply.",
    "Step 5 is State.step of exercise 1 for one row i at a time. All lanes of a group must agree on the "
    "maximum before any of them takes an exp: largest_in_group comes between the loop over j that finds it "
    "and the loop that uses it.",
    "Step 6 is the loop of step 2 over V_SLICES. Its first barrier also lets p be complete before others read it.",
)


def grade(path: Path) -> Iterator[str]:
    usual = (
        "Is the maximum that of the whole group (largest_in_group), and is acc rescaled in every slice, both columns?"
    )
    problems = (
        Problem.random("one head, several tiles", (1, 1, 40, 70, 40, 40), block=32, told=usual),
        Problem.large((1, 1, 40, 70, 40, 40), block=32),
        Problem.random("causal, two heads", (1, 2, 20, 37, 16, 24), block=32, causal=True),
    )
    yield from checked(path, "tiled", problems, Tile(16, 32))


EXERCISE = Exercise(
    title="a CUDA kernel with tiles in shared memory",
    task=TASK,
    source=Source("kernels/cuda/source/tiled.cu", cut=("2", "5", "6")),
    hints=HINTS,
    grade=grade,
    unavailable=simulator.unavailable,
)
