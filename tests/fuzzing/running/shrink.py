"""A failing question made small: whatever can be left out, halved or made plain while it fails in the same way.

Steps are tried from the largest to the smallest, again and again, until none of them still fails or the time is up. A
step may make a question that nobody can ask (arrays that no longer fit): whoever tries it says that it does not fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np

from tests.fuzzing.drawing import language
from tests.fuzzing.drawing.language import Node
from tests.fuzzing.question import Given, Layout, LinearQuestion, Question
from tests.fuzzing.running.sizes import Sizes, resized, sizes_of

Asked = Question | LinearQuestion
Fails = Callable[[Asked], bool]
Step = Callable[[], Asked]  # ValueError, TypeError or IndexError: it cannot be made


def shrunk(question: Asked, fails: Fails, seconds: float, most: int = 5000) -> Asked:
    """The smallest that was found. fails: whether a question still fails, in the same way."""
    until, tried = time.monotonic() + seconds, 0
    smaller = True
    while smaller:
        smaller = False
        for step in _steps(question):
            if time.monotonic() > until or tried == most:
                return question
            try:
                candidate = step()
            except (ValueError, TypeError, IndexError):
                continue
            tried += 1
            if fails(candidate):
                question, smaller = candidate, True
                break
    return question


def _steps(question: Asked) -> Iterator[Step]:
    """Those worth most first. Each is made when it is tried."""
    yield from _left_out(question)
    yield from _smaller(question)
    if isinstance(question, Question):
        yield from _simpler_texts(question)
    yield from _plainer(question)


_AS_TEXTS = {"mask_as_written": None, "score_as_written": None, "causal": False, "array_as_mask": None}

# -- what can be left out ---------------------------------------------------------------------------------------------


def _left_out(question: Asked) -> Iterator[Step]:
    if isinstance(question, LinearQuestion):
        for change in ({"d_out": None, "d_state": None}, {"state": None, "d_state": None}, {"decay": None},
                       {"feature": "S", "feature_as_written": None}, {"normalize": False}, {"scale": 1.0}):  # fmt: skip
            yield from _changed(question, change)
        return
    changes: list[dict[str, Any]] = [
        {"d_out": None, "d_lse": None, "saved_elsewhere": False}, {"d_lse": None},
        {"mask": None, **_AS_TEXTS}, {"score": None, **_AS_TEXTS}, _AS_TEXTS,
        {"sinks": None}, {"lengths": None},
        {"cache": None}, {"origin": (0, 0), "total": None}, {"total": None}, {"batch_invariant": False},
        {"saved_elsewhere": False}, {"tile": None}, {"threads": 1}, {"scale": 1.0},
    ]  # fmt: skip
    if not question.causal and question.array_as_mask is None:  # else what options say would be said twice
        changes += [{"mask_as_written": None}, {"score_as_written": None}]
    for change in changes:
        yield from _changed(question, change)
    if question.cache is not None and question.cache.page is not None:
        yield lambda: replace(question, cache=replace(question.cache, page=None))  # type: ignore[type-var]
    yield from _unread_arrays(question)


def _changed(question: Asked, change: dict[str, Any]) -> Iterator[Step]:
    if any(getattr(question, name) != value for name, value in change.items()):
        yield lambda: replace(question, **change)


def _unread_arrays(question: Question) -> Iterator[Step]:
    read = sorted(_read(question), key=lambda name: int(name[1:]))
    named = question.mask_as_written or question.score_as_written or question.array_as_mask is not None
    if len(read) == len(question.arrays) or named:
        return
    names = {name: f"a{i}" for i, name in enumerate(read)}
    texts = {
        what: language.text(language.renamed(tree, names)) for what, tree in _trees(question).items()
    }  # fmt: skip
    yield lambda: replace(question, arrays=tuple(question.arrays[int(name[1:])] for name in read), **texts)


def _read(question: Question) -> set[str]:
    return {name for tree in _trees(question).values() for name in language.arrays(tree)}


def _trees(question: Question) -> dict[str, Node]:
    kinds = [language.kind_of(given.dtype) for given in question.arrays]
    texts = {"mask": question.mask, "score": question.score}
    return {name: language.parse(text, kinds) for name, text in texts.items() if text is not None}


# -- sizes ------------------------------------------------------------------------------------------------------------


def _smaller(question: Asked) -> Iterator[Step]:
    found = sizes_of(question)
    for name, size in sorted(found.items(), key=lambda item: -item[1]):
        least = 0 if name in ("n_q", "n_k", "n") else 1
        for fewer in dict.fromkeys((least, 1, 2, size // 4, size // 2, size - size // 4, size - 16, size - 1)):
            if least <= fewer < size:
                for at_end in (False, True):
                    yield _resizing(question, found, name, fewer, at_end)


def _resizing(question: Asked, found: Sizes, name: str, fewer: int, at_end: bool) -> Step:
    return lambda: resized(question, found, name, fewer, at_end)


# -- texts ------------------------------------------------------------------------------------------------------------

_CONSTANTS = {
    language.BOOL: (True, False), language.INT: (0, 1, 2), language.FLOAT: (0.0, 1.0),
}  # fmt: skip


def _simpler_texts(question: Question) -> Iterator[Step]:
    """A node replaced by one of its own arguments, or by a constant; from the root on, where most is left out."""
    for what, tree in _trees(question).items():
        if getattr(question, f"{what}_as_written") is not None:
            continue  # leave that out first
        for path, node in sorted(language.places(tree), key=lambda place: len(place[0])):
            for new in _simpler(node):
                yield _rewriting(question, what, tree, path, new)


def _rewriting(question: Question, what: str, tree: Node, path: language.Path, new: Node) -> Step:
    def rewritten() -> Asked:
        made = language.text(language.replaced(tree, path, new))
        if len(made) >= len(language.text(tree)) and new.op != "const":
            raise ValueError("no shorter")
        return replace(question, **{what: made})

    return rewritten


def _simpler(node: Node) -> Iterator[Node]:
    if node.op == "const":
        if node.kind != language.BOOL:
            yield from (language.constant(x) for x in _CONSTANTS[node.kind] if abs(x) < abs(node.value))
        return
    below = sorted((x for _, x in language.places(node) if x is not node), key=lambda x: len(language.text(x)))
    yield from (x for x in (*node.args, *below[:4]) if x.kind == node.kind)
    if node.kind == language.FLOAT and not (node.op == "var" and node.value == "S"):
        yield language.S
    yield from map(language.constant, _CONSTANTS[node.kind])


# -- arrays -----------------------------------------------------------------------------------------------------------

_TOGETHER = ("q", "k", "v", "d_out")  # of one type, mostly


def _plainer(question: Asked) -> Iterator[Step]:
    def given(name: str) -> Any:
        return getattr(question, name)

    if question.dtype != "float32":
        yield lambda: _as_float32(question)
    single = [f.name for f in fields(question) if isinstance(given(f.name), Given)]
    for name in single:
        for made in _plainer_given(given(name)):
            yield _with(question, name, made)
    for name in ("arrays", "state", "d_state"):
        several = getattr(question, name, None) or ()
        for i, one in enumerate(several):
            for made in _plainer_given(one):
                yield _with(question, name, (*several[:i], made, *several[i + 1 :]))


def _with(question: Asked, name: str, value: Any) -> Step:
    return lambda: replace(question, **{name: value})


def _plainer_given(given: Given) -> Iterator[Given]:
    if given.layout != Layout():
        yield replace(given, layout=Layout())
    for name, value in (("writeable", True), ("at_page", ""), ("aside", 0), ("padding", 0), ("expanded", ()),
                        ("reversed", ()), ("step", ()), ("order", ())):  # fmt: skip
        if getattr(given.layout, name) != value:
            yield replace(given, layout=replace(given.layout, **{name: value}))
    if given.wants_gradient:
        yield replace(given, wants_gradient=False)
    values = given.values
    if values.dtype.kind == "f":
        rounded = np.round(values)
        for simple in (np.zeros_like(values), np.ones_like(values), rounded, np.round(values * 2) / 2):
            finite = np.where(np.isfinite(values), simple, values)
            if not np.array_equal(finite, values, equal_nan=True) and _is_simpler(finite, values):
                yield replace(given, values=finite)
    elif np.any(values):
        yield replace(given, values=np.zeros_like(values))


def _is_simpler(new: Any, old: Any) -> bool:
    """Fewer different numbers: so that zeros and ones do not take each other's place for ever."""
    return len(np.unique(new)) < len(np.unique(old)) or (not np.any(new) and bool(np.any(old)))


def _as_float32(question: Asked) -> Asked:
    """Of half precision exactly the same numbers; of float64 they are rounded."""
    changed = {
        name: replace(given, dtype="float32", values=given.values.astype(np.float32).astype(np.float64))
        for name in _TOGETHER
        if (given := getattr(question, name)) is not None
    }
    return replace(question, **changed)
