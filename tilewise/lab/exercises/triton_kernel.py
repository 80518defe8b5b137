"""Exercise: the loop of the first Triton kernel, run by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tilewise.kernels.triton import TritonKernel, not_installed
from tilewise.lab.exercises.cutting import Source
from tilewise.lab.exercises.exercise import Exercise
from tilewise.lab.exercises.grading import load
from tilewise.lab.exercises.problem import Problem
from tilewise.spec import Tile

TASK = """
A Triton kernel, `tilewise/kernels/triton/source/basic.py`, without the heart of its loop. A program
has one query of one head, loads it once (step 1), and goes through the keys, TILE_K at a time. It
runs in Triton's interpreter: no GPU is needed.

Write what is missing of the loop:

2  s, (TILE_K,): the products of q_row with the keys of this tile. load_rows(k, k_steps[2], key,
   n_k, D, DEPTH) loads them, (TILE_K, DEPTH), 0 where there is no key. Multiply and sum in float32:
   .to(tl.float32). Do not scale here.
5  new row_max, rescale, p, (TILE_K,), and new row_sum. Scores become exponents of 2, as GPUs have
   exp2: exp(x * scale) is exp2(x * factor), so a score's exponent is s * factor, and row_max is
   kept as the largest exponent. p = exp2(s * factor - shift), which fused(s, factor, -shift)
   computes with one rounding.
6  acc = acc * rescale + p @ v, (COLUMNS,). load_rows(v, v_steps[2], key, n_k, D_V, COLUMNS) loads
   the values.

Steps 3 and 4 are there: scores() applies the variant and makes s -inf where a key is masked, or
beyond the last one. finite() is the shift of exercise 1: 0 where row_max is still -inf.
"""

HINTS = (
    "Step 2 multiplies q_row as a row, q_row[None, :], with the keys' tile and sums over the columns: tl.sum(..., 1).",
    "Step 5 is State.step of exercise 1, with exp2: new_max = tl.maximum(row_max, tl.max(s, 0) * factor), "
    "shift = finite(new_max), rescale = tl.exp2(row_max - shift). row_max = new_max comes last.",
    "Step 6 is a sum over the keys: p[:, None] times the tile of v, tl.sum(..., 0), added to acc * rescale.",
)


def grade(path: Path) -> Iterator[str]:
    from tilewise.kernels.triton import launch

    launch.basic_kernel = load(path, "basic")  # type: ignore[attr-defined]
    kernel, tile = TritonKernel("basic"), Tile(1, 16)
    for problem in (
        Problem.random("one tile of keys", (1, 1, 3, 16, 16, 16), block=16,
                       told="Is every exponent s * factor, the maximum's too, and is it exp2 that takes it?"),
        Problem.random("several tiles, the last one short", (1, 1, 4, 53, 16, 16), block=16),
        Problem.random("causal, two heads, odd columns", (1, 2, 5, 37, 12, 20), block=16, causal=True),
        Problem.large((1, 1, 2, 40, 16, 16), block=16),
        Problem.random("float16", (1, 1, 2, 40, 16, 16), "float16", block=16),
        Problem.random("queries that see no key", (1, 1, 4, 2, 16, 16), block=16, causal=True,
                       told="row_max is still -inf there: shift by finite(new_max)."),
    ):  # fmt: skip
        call = problem.call()
        done = kernel.forward(call.spec, call.q, call.k, call.v, tile)
        problem.check(done.out, done.lse)
        yield problem.about


EXERCISE = Exercise(
    title="a Triton kernel",
    task=TASK,
    source=Source("kernels/triton/source/basic.py", cut=("2", "5", "6")),
    hints=HINTS,
    grade=grade,
    unavailable=not_installed,
    env={"TRITON_INTERPRET": "1"},
)
