"""Exercise: which blocks a causal mask lets nobody see, and which it leaves whole."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.lab.blocks import blocks, count_blocks
from tilewise.lab.exercises.cutting import Source
from tilewise.lab.exercises.exercise import Exercise
from tilewise.lab.exercises.grading import load
from tilewise.lab.exercises.judging import WrongError
from tilewise.lab.exercises.problem import Problem
from tilewise.lab.loops import queries_outer

TASK = """
In causal attention a query sees its own key and those before it. Of the blocks in which scores are
computed almost half lie wholly in the future: they are skipped. Of the others most are wholly
visible and need no mask. Only blocks on the diagonal do.

Write visible_causal: rows and cols are slices, the queries and the keys of a block. Query i sees
the keys up to i + offset, where offset = n_k - n_q: the last query sees the last key, whatever the
lengths. Three answers:

    False        not one query of the block sees a key of it: skipped
    True         every query sees every key: no mask
    booleans     (rows, cols), True where the query sees the key

With blocks of 4 queries and 2 keys (#: seen), n_q = n_k = 4, offset 0, there is one block of
queries and two of keys:

             keys 0 1 | 2 3
    query 0       #   |
    query 1       # # |
    query 2       # # | #
    query 3       # # | # #

The first query sees nothing of the second block, yet the block may not be skipped.
"""

IMPORTS = """
from __future__ import annotations

import numpy as np

from tilewise.arrays import Array
"""

HINTS = (
    "rows.start is the first query, rows.stop - 1 the last one, and cols alike. A block is skipped when even "
    "the query that sees most sees nothing of it. Which query is that, and which key comes first?",
    "The last query, rows.stop - 1, sees the keys up to rows.stop - 1 + offset. If that is less than "
    "cols.start: False. The other way round, if even the first query sees the last key: True.",
    "The booleans are one comparison that broadcasts: np.arange over the keys <= np.arange over the queries "
    "as a column, [:, None], + offset.",
)


def grade(path: Path) -> Iterator[str]:
    visible = load(path, "visible_causal").visible_causal
    sizes = list(product(range(1, 5), range(1, 5)))
    for about, lengths in (
        ("as many queries as keys", [(n, n) for n in range(1, 9)]),
        ("more keys than queries", [(n, n + more) for n in range(1, 6) for more in (1, 3)]),
        ("more queries than keys", [(n + more, n) for n in range(1, 6) for more in (1, 3)]),
    ):
        for (n_q, n_k), (size_q, size_k) in product(lengths, sizes):
            for rows, cols in product(blocks(n_q, size_q), blocks(n_k, size_k)):
                _check_block(visible, about, n_k - n_q, rows, cols)
        yield f"{about}, every block"
    yield _attention(visible)


def _check_block(visible: Any, about: str, offset: int, rows: slice, cols: slice) -> None:
    """In all cases that are small, so that nothing is left to chance."""
    queries, keys = np.arange(rows.start, rows.stop), np.arange(cols.start, cols.stop)
    seen = keys <= queries[:, None] + offset
    got = visible(offset, rows, cols)
    here = f"{about}: queries {_range(rows)}, keys {_range(cols)}, offset {offset}"
    if got is False or got is np.False_:
        if seen.any():
            query, key = np.argwhere(seen)[0]
            raise WrongError(f"{here}: it skips the block, but query {queries[query]} sees key {keys[key]}{_why(seen)}")
    elif got is True or got is np.True_:
        if not seen.all():
            query, key = np.argwhere(~seen)[0]
            raise WrongError(
                f"{here}: it says that everything is seen, but query {queries[query]} may not see key {keys[key]}.\n"
                "It looks as if the mask is forgotten: this block needs one."
            )
    else:
        _check_mask(here, seen, got, offset)


def _check_mask(here: str, seen: Any, got: Any, offset: int) -> None:
    if not isinstance(got, np.ndarray) or got.dtype != np.bool_ or got.shape != seen.shape:
        came = f"{got.dtype} {got.shape}" if isinstance(got, np.ndarray) else repr(got)
        raise WrongError(f"{here}: expected True, False or booleans of shape {seen.shape}, came {came}")
    if not np.array_equal(got, seen):
        forgotten = "\nIs offset added to the queries?" if offset else ""
        raise WrongError(f"{here}: expected\n{seen.astype(int)}\ncame\n{got.astype(int)}{forgotten}")
    if not seen.any():
        raise WrongError(
            f"{here}: nobody sees anything here, and it gives a mask of False.\n"
            "It looks as if no block is skipped: answer False, and the block costs nothing."
        )
    if seen.all():
        raise WrongError(f"{here}: every query sees every key, and it gives a mask: answer True, and none is needed")


def _why(seen: Any) -> str:
    first_sees_nothing = not seen[0].any()
    return (
        ".\nIt looks as if the first query of the block is asked: it is the last one that sees most"
        if first_sees_nothing
        else ""
    )


def _range(x: slice) -> str:
    return f"{x.start}" if x.stop == x.start + 1 else f"{x.start} to {x.stop - 1}"


def _attention(visible: Any) -> str:
    about = "attention that skips by it"
    problem = Problem.random(about, (1, 1, 50, 70, 8, 8), block=8, causal=True)
    out = np.empty((50, 8), np.float32)
    computed = queries_outer(problem.q[0, 0], problem.k[0, 0], problem.v[0, 0], 16, 8, partial(visible, 20), out)
    problem.check(out[None, None])
    counted = count_blocks(50, 70, 16, 8, causal=True)
    assert computed == counted.computed
    return f"{about}: {counted.skipped} of {counted.total} blocks skipped"


EXERCISE = Exercise(
    title="skipping what causal attention cannot see",
    task=TASK,
    imports=IMPORTS,
    source=Source("lab/blocks.py", cut=("visible_causal",), definitions=("visible_causal",)),
    hints=HINTS,
    grade=grade,
)
