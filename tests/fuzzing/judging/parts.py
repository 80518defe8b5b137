"""The sequences of a question: which rows and keys each has, and what the variables are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from tests.fuzzing.judging.values import kind_of
from tests.fuzzing.judging.walk import BOOL, ExpressionError, Walk, plain_variable, read, read_score
from tests.fuzzing.question import Given, Numbers, Question


@dataclass(frozen=True, eq=False)
class Part:
    """One sequence, or a batch of equal ones: its place in the arrays, its size, its variables but S."""

    batch: slice
    rows: slice
    keys: slice
    shape: tuple[int, int, int, int]  # of its scores: (batch, heads, queries, keys)
    heads_k: int
    env: dict[str, Any]

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.shape[1] // self.heads_k


class Problem:
    """A question, its texts read."""

    def __init__(self, question: Question) -> None:
        self.question = question
        kinds = tuple(kind_of(given) for given in question.arrays)
        self.mask = None if question.mask is None else read(question.mask, kinds)
        self.score = None if question.score is None else read_score(question.score, kinds)
        if self.mask is not None and (self.mask.kind != BOOL or any(s.payload == "S" for s in self.mask.steps)):
            raise ExpressionError(f"a mask is a condition without S, got {question.mask!r}")
        self._as: dict[tuple[str, str], Numbers] = {}

    @property
    def walks(self) -> list[Walk]:
        return [walk for walk in (self.mask, self.score) if walk is not None]

    @cached_property
    def wanted(self) -> list[int]:
        """The arrays that want a gradient, in order of first appearance in the score."""
        read_ = [] if self.score is None else [self.score.steps[at].payload for at in self.score.loads()]
        return [number for number in dict.fromkeys(read_) if self.question.arrays[number].wants_gradient]

    def numbers(self, name: str, dtype: Any) -> Numbers:
        """q, k, v, d_out, d_lse or sinks, as numbers to compute with."""
        key = name, np.dtype(dtype).name
        if key not in self._as:
            given: Given = getattr(self.question, name)
            self._as[key] = given.values.astype(dtype)
        return self._as[key]

    @cached_property
    def parts(self) -> list[Part]:
        return list(parts(self.question))

    def misfit(self) -> str | None:
        """An array that is read by a plain variable and has not its size, which the package refuses."""
        sizes = _sizes(self.question)
        for walk in self.walks:
            for at in walk.loads():
                step = walk.steps[at]
                shape = self.question.arrays[step.payload].values.shape
                if len(shape) != len(step.args):
                    return f"a{step.payload} of shape {shape} read by {len(step.args)} indices"
                for axis, index in enumerate(step.args):
                    name = plain_variable(walk, index)
                    longer_table = self.question.lengths is not None and name in ("Q", "K")
                    if name in sizes and shape[axis] != sizes[name] and not (
                        longer_table and shape[axis] > sizes[name] and shape[axis] != sizes[name + "P"]
                    ):  # fmt: skip
                        return f"a{step.payload} of shape {shape} read by {name}, which needs {sizes[name]}"
        return None


def parts(question: Question) -> Iterator[Part]:
    (batch, heads, n_q, _), (_, heads_k, n_k, _) = question.q.values.shape, question.k.values.shape
    everything = slice(None)
    if question.lengths is not None:
        ends_q, ends_k = question.lengths
        for i in range(len(ends_q) - 1):
            rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
            size = (1, heads, rows.stop - rows.start, keys.stop - keys.start)
            env = _variables(size, heads_k, first_batch=i, packed=(rows.start, keys.start))
            yield Part(everything, rows, keys, size, heads_k, env)
    elif question.cache is not None:
        for i, length in enumerate(question.cache.lengths):
            size = (1, heads, n_q, length)
            yield Part(slice(i, i + 1), everything, slice(0, length), size, heads_k, _variables(size, heads_k, i))
    else:
        size = (batch, heads, n_q, n_k)
        env = _variables(size, heads_k, origin=question.origin, total=question.total)
        yield Part(everything, everything, everything, size, heads_k, env)


def _variables(
    size: tuple[int, int, int, int],
    heads_k: int,
    first_batch: int = 0,
    packed: tuple[int, int] = (0, 0),
    origin: tuple[int, int] = (0, 0),
    total: tuple[int, int] | None = None,
) -> dict[str, Any]:
    batch, heads, n_q, n_k = size
    total = (origin[0] + n_q, origin[1] + n_k) if total is None else total
    q, k, h = np.arange(n_q)[:, None], np.arange(n_k), np.arange(heads)[:, None, None]
    return {
        "B": first_batch + np.arange(batch)[:, None, None, None], "H": h, "HK": h // (heads // heads_k),
        "Q": origin[0] + q, "K": origin[1] + k, "NQ": np.int64(total[0]), "NK": np.int64(total[1]),
        "QP": packed[0] + q, "KP": packed[1] + k,
    }  # fmt: skip


def _sizes(question: Question) -> dict[str, int]:
    """How many there are of what a variable counts."""
    (batch, heads, n_q, _), (_, heads_k, n_k, _) = question.q.values.shape, question.k.values.shape
    sizes = {"B": batch, "H": heads, "HK": heads_k, "Q": n_q, "K": n_k, "QP": n_q, "KP": n_k}
    if question.lengths is not None:
        longest = [max((b - a for a, b in pairwise(x)), default=0) for x in question.lengths]
        sizes.update(B=len(question.lengths[0]) - 1, Q=longest[0], K=longest[1])
    elif question.total is not None:
        sizes.update(Q=question.total[0], K=question.total[1])
    else:
        sizes.update(Q=question.origin[0] + n_q, K=question.origin[1] + n_k)
    return sizes
