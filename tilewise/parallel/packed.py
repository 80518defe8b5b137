"""Packed sequences as one: a variant's own B, Q, K, NQ, NK become arrays that are read by the place in the pack.

So a rank may have a part of a sequence, the end of one and the beginning of another, and nothing else has to know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.expr import KP, NK, NQ, QP, B, Expr, K, Q, load, substitute
from tilewise.spec import Lengths


def same_sequence(lengths: Lengths, like: Any) -> Expr:
    """A mask: the query and the key are of one sequence."""
    return load(_numbers(lengths.q, like), Q) == load(_numbers(lengths.k, like), K)


def within(lengths: Lengths, like: Any) -> Callable[[Expr], Expr]:
    """Expressions over a sequence's own positions, as expressions over those of the pack. like: an array of the
    library and on the device that arrays are to be of."""
    size_q, size_k = np.diff(lengths.q), np.diff(lengths.k)

    def by_query(each: Any) -> Expr:
        return load(_placed(np.repeat(each, size_q), like), Q)

    first_k = load(_placed(np.repeat(lengths.k[:-1], size_k), like), K)
    meaning = {
        B: load(_numbers(lengths.q, like), Q), NQ: by_query(size_q), NK: by_query(size_k),
        Q: Q - by_query(lengths.q[:-1]), K: K - first_k, QP: Q, KP: K,
    }  # fmt: skip
    return lambda expr: substitute(expr, meaning)


def _numbers(lengths: Any, like: Any) -> Any:
    """Which sequence each row is of."""
    return _placed(np.repeat(np.arange(len(lengths) - 1), np.diff(lengths)), like)


def _placed(values: Any, like: Any) -> Any:
    values = np.asarray(values, np.int32)
    return arrays.as_tensor(values).to(like.device) if arrays.is_torch(like) else values
