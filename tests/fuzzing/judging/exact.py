"""What a question's results are, by rules of its own: the judge of the random calls. Nothing of the package is here.

Exact values are dense, in float64, or in longdouble for float64 inputs. `dense` is the same in the precision that a
kernel computes in, rounded where a kernel must: the contract's limit comes of both. The bound is what rounding can do
to each number at most, whatever the order of sums.
"""

from __future__ import annotations

import numpy as np

from tests.fuzzing.judging.exact_attention import attention_results
from tests.fuzzing.judging.exact_linear import linear_results
from tests.fuzzing.judging.results import Answer, Exact, beyond_its_type
from tests.fuzzing.question import LinearQuestion, Question

__all__ = ["Answer", "Exact", "answer"]


def answer(question: Question | LinearQuestion) -> Answer:
    """What a kernel should answer. Whether a question is fit depends on the question alone, never on a kernel."""
    with np.errstate(all="ignore"):
        linear = isinstance(question, LinearQuestion)
        found = linear_results(question) if linear else attention_results(question)
        if isinstance(found, str):
            return Answer(found, {})
        reason = next((why for x in found if (why := beyond_its_type(x)) is not None), None)
        return Answer(reason, {} if reason else {x.what: x for x in found})
