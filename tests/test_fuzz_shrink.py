"""Failing questions made small: what is left out, what stays, and within what time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.fuzzing.drawing import language
from tests.fuzzing.drawing.draw import Wanted, draw
from tests.fuzzing.judging.exact import answer
from tests.fuzzing.question import Cache, Given, Layout, LinearQuestion, Question
from tests.fuzzing.running.asking import ask, ask_linear
from tests.fuzzing.running.failures import described
from tests.fuzzing.running.memory import Memory
from tests.fuzzing.running.shrink import shrunk
from tests.fuzzing.running.sizes import resized, sizes_of

WANTED = Wanted(shapes=1, backward_share=0.5, linear_share=0.1)
MEMORY = Memory()


def _is_right(question: Any) -> bool:
    """It can be asked and judged: what every smaller question must be as well."""
    MEMORY.clear()
    try:
        (ask_linear if isinstance(question, LinearQuestion) else ask)(question, MEMORY, "cpu")
        return answer(question).unfit is None
    except (ValueError, TypeError):
        return False


def _reads(question: Any, op: str) -> bool:
    """As if a kernel were wrong on this operation alone."""
    if not isinstance(question, Question) or not _is_right(question):
        return False
    kinds = [language.kind_of(given.dtype) for given in question.arrays]
    texts = [text for text in (question.mask, question.score) if text is not None]
    return any(node.op == op for text in texts for node in language.nodes(language.parse(text, kinds)))


@pytest.mark.parametrize("op", ["floordiv", "load", "where", "not"])
def test_what_fails_on_an_operation_ends_as_little_more_than_that(op: str) -> None:
    seed = next(seed for seed in range(2000) if _reads(draw(seed, WANTED), op))
    small = shrunk(draw(seed, WANTED), lambda question: _reads(question, op), seconds=30)
    assert isinstance(small, Question) and _reads(small, op)
    assert sum(small.q.values.shape) <= 4 and small.k.values.shape[2] == 0
    assert small.dtype == "float32" and small.d_out is None and small.lengths is None and small.cache is None
    texts = [text for text in (small.mask, small.score) if text is not None]
    assert len(texts) == 1 and len(texts[0]) < 25, texts
    assert len(small.arrays) == (op == "load")
    assert all(given.layout == Layout() for given in (small.q, small.k, small.v, *small.arrays))


def test_a_smaller_size_is_a_question_still() -> None:
    """Every array that has the size is cut, tables that are read by position too."""
    made = right = 0
    for seed in range(25):
        question = draw(seed, WANTED)
        found = sizes_of(question)
        for name, size in found.items():
            for fewer in {1, size // 2, size - 1} & set(range(1, size)):
                if name == "batch" and question.lengths is not None:
                    continue
                smaller = resized(question, found, name, fewer, at_end=seed % 2 == 0)
                assert sizes_of(smaller)[name] == fewer
                made += 1
                right += _is_right(smaller)
    assert made > 100 and right > 0.8 * made


def _given(*shape: int) -> Given:
    return Given(np.arange(float(np.prod(shape))).reshape(shape) % 7, "float32")


def test_tables_lengths_and_caches_are_cut_with_the_call() -> None:
    q, k = _given(1, 4, 6, 3), _given(1, 2, 9, 3)
    table, slopes = _given(4, 6, 9), _given(2)
    packed = Question(q, k, k, 1.0, score="S + load(a0, H, QP, KP) + load(a1, HK)", arrays=(table, slopes),
                      lengths=((0, 2, 6), (0, 5, 9)))  # fmt: skip
    sizes = sizes_of(packed)
    fewer = resized(packed, sizes, "n_k", 3, at_end=True)
    assert fewer.lengths == ((0, 2, 6), (0, 0, 3))
    assert np.array_equal(fewer.arrays[0].values, table.values[:, :, 6:]) and fewer.arrays[1] is slopes
    heads = resized(packed, sizes, "heads_k", 1, at_end=True)
    assert np.array_equal(heads.q.values, q.values[:, 2:]) and np.array_equal(heads.arrays[1].values, [1])
    assert resized(packed, sizes, "group", 1, at_end=False).arrays[0].values.shape == (2, 6, 9)
    decoding = Question(_given(3, 2, 1, 3), _given(3, 2, 9, 3), _given(3, 2, 9, 3), 1.0, cache=Cache((9, 2, 5)))
    assert resized(decoding, sizes_of(decoding), "n_k", 4, at_end=False).cache == Cache((4, 2, 4))
    assert resized(decoding, sizes_of(decoding), "batch", 1, at_end=True).cache == Cache((5,))


def test_values_layouts_and_types_become_plain() -> None:
    rng = np.random.default_rng(0)
    layout = Layout((0, 2, 1, 3), (1, 1, 3, 1), (1,), aside=2, at_page="end")
    q = Given(rng.standard_normal((1, 2, 3, 4)), "float64", layout)
    small = shrunk(Question(q, q, q, 0.3, tile=(3, 5), threads=4), lambda question: question.v.values.any(), 30)
    assert small.q.layout == small.v.layout == Layout() and small.dtype == "float32"
    assert small.v.values.size == 1 and not small.q.values.any()
    assert (small.scale, small.tile, small.threads) == (1.0, None, 1)


def test_a_linear_attention_becomes_small() -> None:
    question = next(x for x in (draw(s, WANTED) for s in range(500)) if isinstance(x, LinearQuestion) and x.decay
                    and x.d_out and x.state and x.q.values.shape[2] > 3 and _is_right(x))  # fmt: skip
    small = shrunk(question, lambda x: _is_right(x) and x.decay is not None, 30)
    assert small.d_out is None and small.state is None and small.feature == "S"
    assert max(small.q.values.shape) <= 1


def test_the_time_is_kept() -> None:
    began = time.monotonic()

    def slow(question: Any) -> bool:
        time.sleep(0.05)
        return True

    shrunk(draw(0, WANTED), slow, seconds=0.5)
    assert time.monotonic() - began < 3


def test_questions_are_told_in_words() -> None:
    told = described(draw(1, Wanted()))
    assert "q: float" in told and "threads" in told
    linear = next(x for x in (draw(s, WANTED) for s in range(200)) if isinstance(x, LinearQuestion))
    assert "feature: " in described(linear)
