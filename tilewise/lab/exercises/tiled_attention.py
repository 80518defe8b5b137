"""Exercise: the loops of tiled attention."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.arrays import Array
from tilewise.lab.blocks import count_blocks, visible_causal
from tilewise.lab.exercises.cutting import Source
from tilewise.lab.exercises.exercise import Exercise
from tilewise.lab.exercises.grading import load
from tilewise.lab.exercises.judging import WrongError
from tilewise.lab.exercises.problem import Problem
from tilewise.lab.memory import peak

TASK = """
Attention is softmax(q k^T / sqrt(d)) v. The matrix in the middle has n_q x n_k numbers. Here it is
never made: a block of size_q queries meets one block of size_kv keys after the other, and the
online softmax of exercise 1 adds them up.

Write queries_outer for one head: q (n_q, d), k (n_k, d), v (n_k, d_v), and out (n_q, d_v), which it
fills. The queries are the outer loop. visible(rows, cols), of two slices, says what a block of
queries may see of a block of keys: False is nothing, so that the block is skipped; True is
everything; or booleans (rows, cols). Return how many blocks were computed.

- The last blocks may be shorter: sizes need not divide lengths.
- A row that sees no key at all gives 0, never NaN.
- float16 is computed with in float32: compute_dtype names the type, widen and narrow convert.

What is there for you: blocks(n, size) gives slices; init(rows, d_v, dtype) gives row_max, row_sum
and acc at the start; scores(q, k, seen) the scaled scores of a block with -inf where a key may not
be seen; update_block is State.step as a function; State(row_max, row_sum, acc).finish().out is acc
/ row_sum, or 0 for a row without keys.
"""

IMPORTS = """
from __future__ import annotations

import numpy as np

from tilewise.arrays import Array, compute_dtype, narrow, widen
from tilewise.lab.blocks import Visible, blocks
from tilewise.lab.loops import init, scores, update_block
from tilewise.softmax import State
"""

HINTS = (
    "Two loops: for rows in blocks(len(q), size_q), and in it for cols in blocks(len(k), size_kv). What "
    "belongs to a block of queries, q[rows] and the three statistics, is made before the inner loop and "
    "finished after it.",
    "In the inner loop: ask visible(rows, cols) first, and go on with the next block if it is False. Then the"
    " scores of the block, then update_block, whose three results replace the three statistics.",
    "widen(q[rows], dtype) before computing, narrow(..., str(out.dtype)) before storing, where dtype is "
    "compute_dtype(str(q.dtype)).",
)
MEMORY_N, MEMORY_BLOCK = 768, 32


def grade(path: Path) -> Iterator[str]:
    loops = load(path, "queries_outer").queries_outer
    zero = "The first queries see no key at all: their output is 0. finish() divides by row_sum only where it is not 0."
    wide = "Is everything summed in float32? widen before computing, narrow before storing."
    for size_q, problem in (
        (8, Problem.random("one block", (1, 1, 8, 8, 4, 4), block=8)),
        (8, Problem.random("several blocks", (1, 1, 32, 48, 8, 8), block=16)),
        (7, Problem.random("sizes that do not divide lengths", (1, 1, 37, 53, 8, 5), block=16)),
        (8, Problem.large((1, 1, 16, 24, 8, 8), block=8)),
        (16, Problem.random("a causal mask", (1, 1, 40, 40, 8, 8), block=8, causal=True, skipped_by=16)),
        (4, Problem.random("more queries than keys", (1, 1, 12, 9, 4, 4), block=2, causal=True, told=zero)),
        (8, Problem.random("float16", (1, 1, 24, 200, 16, 16), "float16", block=4, told=wide)),
    ):
        _check(loops, problem, size_q)
        yield problem.about
    yield _memory(loops)


def _check(loops: Any, problem: Problem, size_q: int) -> None:
    """The output, and how many blocks were asked for and computed."""
    call, asked = problem.call(), []
    n_q, n_k = call.shape.n_q, call.shape.n_k

    def visible(rows: slice, cols: slice) -> Array | bool:
        asked.append((rows, cols))
        return visible_causal(n_k - n_q, rows, cols) if problem.causal else True

    out = np.full((n_q, call.shape.d_v), np.nan, call.q.dtype)
    computed = loops(call.q[0, 0], call.k[0, 0], call.v[0, 0], size_q, problem.block, visible, out)
    problem.check(out[None, None])
    counted = count_blocks(n_q, n_k, size_q, problem.block, causal=problem.causal)
    if len(asked) != counted.total:
        raise WrongError(
            f"{problem.about}: visible was asked of {len(asked)} blocks, and there are {counted.total}: once of each"
        )
    if computed != counted.computed:
        skips = f"; visible said False of {counted.skipped}, which are skipped" if counted.skipped else ""
        raise WrongError(
            f"{problem.about}: it returned {computed!r} as the number of blocks computed, "
            f"expected {counted.computed}{skips}"
        )


def _memory(loops: Any) -> str:
    """The output is there before: what is held beside it must not grow with n * n."""
    n = MEMORY_N
    q = np.random.default_rng(0).standard_normal((n, 16), dtype=np.float32)
    out = np.empty_like(q)
    held, matrix = peak(lambda: loops(q, q, q, MEMORY_BLOCK, MEMORY_BLOCK, lambda rows, cols: True, out)), 4 * n * n
    if held > matrix / 4:
        raise WrongError(
            f"memory: with n = {n} it held {held >> 10} KiB at once; the whole matrix of scores has {matrix >> 10}.\n"
            "It looks as if n x n scores are stored: O(N^2) memory. A block has "
            f"{MEMORY_BLOCK} x {MEMORY_BLOCK} of them, and is forgotten when the next one comes."
        )
    return "memory that does not grow with n x n"


EXERCISE = Exercise(
    title="tiled attention",
    task=TASK,
    imports=IMPORTS,
    source=Source("lab/loops.py", cut=("queries_outer",), definitions=("queries_outer",)),
    hints=HINTS,
    grade=grade,
)
