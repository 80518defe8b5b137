"""The same call said by options: causal=True in place of causal(), an array as mask in place of dense() or bias()."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.fuzzing.question import Question


def by_options(question: Question, takes_arrays: bool) -> Question:
    """What options can say of the constructors that it is written with. takes_arrays: as its mask."""
    question = _causal(question)
    return _array(question) if takes_arrays else question


def _causal(question: Question) -> Question:
    written = question.mask_as_written or ""
    found = re.fullmatch(r"causal\(\)()|\(causal\(\)\) & \((.*)\)", written)
    return replace(question, causal=True, mask_as_written=found[2] or "") if found else question


def _array(question: Question) -> Question:
    """Booleans are a mask; floats, which then are the call's only mask, are added to its score."""
    beside = question.mask if question.mask_as_written is None else question.mask_as_written
    mask = re.fullmatch(r"dense\(a(\d+)\)", beside or "")
    if mask:
        return replace(question, array_as_mask=int(mask[1]), mask_as_written="")
    score = re.fullmatch(r"(?:\((.*)\) >> \()?bias\(a(\d+)\)\)?", question.score_as_written or "")
    if beside or not score or question.arrays[int(score[2])].wants_gradient:
        return question
    return replace(question, array_as_mask=int(score[2]), score_as_written=score[1] or "")
