"""Exercise: the loop of the naive CUDA kernel, run on the simulator."""

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
The first CUDA kernel of the project, tilewise/kernels/cuda/source/naive.cu, without the heart of
its loop. A thread has one query: it holds the query's row q[D], already scaled, and acc[D_V] in
registers, and goes through all keys. Nothing is shared between threads. It runs on the CPU
simulator: a C++ compiler is enough.

Write what is missing of the loop:

2  float s: the product of q with the row of this key. Rows of k are found as that of q in step 1
   was, in params.k, but of head work.hk, in row sequence.k_begin + key. widen(x) makes a float of
   what is stored, which may be half precision.
5  with s after score and mask: the new maximum, rescale, p, row_sum, row_max. expf, fmaxf. finite()
   keeps NaN away.
6  acc[c] = acc[c] * rescale + p * (column c of this key's row of params.v).

Steps 3 and 4 are there: they apply the variant, a mask or a bias say, to s.
"""

HINTS = (
    "The row of a key: const Element* k_row = row_of<const Element>(params.k, work.b, work.hk, "
    "sequence.k_begin + key). Then a loop over c < D sums q[c] * widen(k_row[c]) into s.",
    "Step 5 for one score: new_max = fmaxf(row_max, s), shift = finite(new_max), rescale = expf(row_max - "
    "shift), p = expf(s - shift). Then row_sum, and row_max last.",
    "Step 6 is a loop over c < D_V. Its row of v is found as that of k.",
)


def grade(path: Path) -> Iterator[str]:
    nan = "A masked score is -inf: is the shift finite(new maximum), so that -inf - -inf never comes up?"
    problems = (
        Problem.random("one head", (1, 1, 20, 30, 16, 16), block=1),
        Problem.large((1, 1, 20, 30, 16, 16), block=1),
        Problem.random("causal, two heads", (1, 2, 12, 8, 16, 8), "float16", block=1, causal=True, told=nan),
    )
    yield from checked(path, "naive", problems, Tile(32, 32))


EXERCISE = Exercise(
    title="a CUDA kernel, a thread a query",
    task=TASK,
    source=Source("kernels/cuda/source/naive.cu", cut=("2", "5", "6")),
    hints=HINTS,
    grade=grade,
    unavailable=simulator.unavailable,
)
