"""The results of one attention: forward, and backward if it has a gradient to pull."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.fuzzing.judging.attended import Attended, Store
from tests.fuzzing.judging.bounded import Bounds
from tests.fuzzing.judging.parts import Problem
from tests.fuzzing.judging.results import Exact, remembered
from tests.fuzzing.judging.widths import HALF, ROUNDING, STORED, coarser, unrounded, wide
from tests.fuzzing.question import Given, Numbers, Question


def attention_results(question: Question) -> list[Exact] | str:
    problem = Problem(question)
    reason = problem.misfit()
    if reason is not None:
        return reason
    bounds = Bounds(problem)
    reason = bounds.unfit()
    return _Computed(problem, bounds).results() if reason is None else reason


@dataclass(frozen=True, eq=False)
class _InOneType:
    """All sequences of a question, computed in one type of floats."""

    problem: Problem
    dtype: Any
    store: Store
    sequences: Sequence[Attended]

    @classmethod
    def of(cls, problem: Problem, dtype: Any, store: Store) -> _InOneType:
        return cls(problem, dtype, store, [Attended(problem, part, dtype, store) for part in problem.parts])

    def forward(self) -> dict[str, Numbers]:
        rows, d_v = self.problem.question.q.values.shape[:3], self.problem.question.v.values.shape[3]
        out, lse = np.zeros((*rows, d_v), self.dtype), np.full(rows, -np.inf, self.dtype)
        for one in self.sequences:
            out[one.part.batch, :, one.part.rows] = one.out
            lse[one.part.batch, :, one.part.rows] = one.lse
        return {"out": out, "lse": lse}

    def backward(self, has_remainder: bool = False) -> dict[str, Numbers]:
        into = {what: np.zeros(given.values.shape, self.dtype) for what, given in _differentiated(self.problem).items()}
        for one in self.sequences:
            one.gradients(into, has_remainder)
        return {what: self.store(x) if what in ("d_q", "d_k", "d_v") else x for what, x in into.items()}


def _differentiated(problem: Problem) -> dict[str, Given]:
    """What has a gradient, by the gradient's name."""
    question = problem.question
    given = {"d_q": question.q, "d_k": question.k, "d_v": question.v}
    if question.sinks is not None:
        given["d_sinks"] = question.sinks
    return given | {f"d_array {i}": question.arrays[number] for i, number in enumerate(problem.wanted)}


class _Computed:
    """A question's results in the exact type and in a kernel's."""

    def __init__(self, problem: Problem, bounds: Bounds) -> None:
        self.problem, self.bounds, self.dtype = problem, bounds, problem.question.dtype
        if self.dtype == "float64":
            self.exact = _InOneType.of(problem, np.longdouble, unrounded)
        else:  # values were found with their errors
            self.exact = _InOneType(problem, np.float64, unrounded, bounds.parts)
        # Float64's own error cannot be measured with float64: float32's is, and the contract scales it down.
        self.dense = _InOneType.of(problem, np.float32, STORED["float32" if self.dtype == "float64" else self.dtype])

    def results(self) -> list[Exact]:
        exact, dense = self.exact.forward(), self.dense.forward()
        types = {"out": self.dtype, "lse": wide(self.dtype)}
        of = remembered(self.bounds.forward)
        made = [Exact(what, t, t, exact[what], dense[what], 0.0, of) for what, t in types.items()]
        return made if self.problem.question.d_out is None else made + self._gradients(exact["lse"])

    def _gradients(self, lse: Numbers) -> list[Exact]:
        exact, dense = self.exact.backward(), self.dense.backward()
        types = {what: given.dtype for what, given in _differentiated(self.problem).items()}
        of = remembered(lambda: self.bounds.backward(exact, types))
        remainders = remembered(lambda: self.dense.backward(has_remainder=True)) if self.dtype in HALF else None
        # Weights are computed again from an lse that was rounded.
        saved = ROUNDING[wide(self.dtype)] * float(np.abs(lse[np.isfinite(lse)]).max(initial=0))
        return [  # sums over many scores, which carry the rounding of the inputs' type
            Exact(what, t, coarser(self.dtype, t), exact[what], dense[what], saved, of, remainders)
            for what, t in types.items()
        ]
