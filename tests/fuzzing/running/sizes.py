"""The sizes of a question, and the same question with one of them smaller: every array that has it is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.fuzzing.drawing import language
from tests.fuzzing.question import Cache, Given, LinearQuestion, Question

Sizes = dict[str, int]

# Which sizes the axes of an array have.
_AXES = {
    "q": ("batch", "heads", "n_q", "d"), "k": ("batch", "heads_k", "n_k", "d"), "v": ("batch", "heads_k", "n_k", "d_v"),
    "d_out": ("batch", "heads", "n_q", "d_v"), "d_lse": ("batch", "heads", "n_q"), "sinks": ("heads",),
}  # fmt: skip
_LINEAR_AXES = {
    "q": ("batch", "heads", "n", "d"), "k": ("batch", "heads_k", "n", "d"), "v": ("batch", "heads_k", "n", "d_v"),
    "d_out": ("batch", "heads", "n", "d_v"), "decay": ("batch", "heads_k", "n"),
    "state": ("batch", "heads_k", "d", "d_v"), "d_state": ("batch", "heads_k", "d", "d_v"),
}  # fmt: skip
_OF_VARIABLES = {"B": "batch", "H": "heads", "HK": "heads_k", "Q": "n_q", "K": "n_k", "QP": "n_q", "KP": "n_k"}


def sizes_of(question: Question | LinearQuestion) -> Sizes:
    """heads: query heads, which a key head's group of them makes up: they are cut by whole groups, or the group is."""
    batch, heads, n_q, d = question.q.values.shape
    heads_k, n_k, d_v = question.k.values.shape[1], question.k.values.shape[2], question.v.values.shape[3]
    shared = {"batch": batch, "heads_k": heads_k, "group": heads // max(heads_k, 1), "d": d, "d_v": d_v}
    if isinstance(question, LinearQuestion):
        return {**shared, "n": n_q}
    return {**shared, "n_q": n_q, "n_k": n_k}


def resized(question: Any, found: Sizes, name: str, fewer: int, at_end: bool) -> Any:
    """That size cut to the first numbers of it, or the last. ValueError where that would be another question."""
    kept, before = _kept(found, name, fewer, at_end), {**found, "heads": found["heads_k"] * found["group"]}
    axes = _LINEAR_AXES if isinstance(question, LinearQuestion) else _AXES
    changes: dict[str, Any] = {}
    for what, names in axes.items():
        given = getattr(question, what)
        if isinstance(given, tuple):  # a state: kv, z and log_decay have fewer and fewer axes
            changes[what] = tuple(_cut(x, names[: x.values.ndim], kept, before) for x in given)
        elif given is not None:
            # Of decay by head there are heads alone.
            fits = ("heads_k",) if what == "decay" and given.values.ndim == 1 else names[: given.values.ndim]
            changes[what] = _cut(given, fits, kept, before)
    changes["lengths"] = _lengths(question, name, kept)
    if isinstance(question, Question):
        changes["arrays"] = _arrays(question, before, kept)
        changes["cache"] = _cache(question.cache, name, kept)
    return replace(question, **changes)


def _kept(found: Sizes, name: str, fewer: int, at_end: bool) -> dict[str, Any]:
    """Which numbers stay along each axis that is cut."""

    def part(size: int, few: int) -> Any:
        return np.arange(size)[size - few :] if at_end else np.arange(few)

    if name not in ("heads_k", "group"):
        return {name: part(found[name], fewer)}
    heads = np.arange(found["heads_k"] * found["group"]).reshape(found["heads_k"], found["group"])
    if name == "group":
        return {"heads": heads[:, part(found["group"], fewer)].ravel()}
    keys = part(found["heads_k"], fewer)
    return {"heads": heads[keys].ravel(), "heads_k": keys}


def _cut(given: Given, names: tuple[str, ...], kept: dict[str, Any], before: Sizes) -> Given:
    """Cut where it is as long as the call was; a table by position may be longer."""
    values = given.values
    for axis, name in enumerate(names):
        if name in kept and values.shape[axis] == before[name]:
            values = np.take(values, kept[name], axis)
    return given if values is given.values else replace(given, values=values)


def _lengths(question: Any, name: str, kept: dict[str, Any]) -> Any:
    """Cumulative lengths over what is left; a sequence less is none of their sizes."""
    if question.lengths is None:
        return None
    if name == "batch":
        raise ValueError("packed sequences are a batch of one")

    def over(ends: tuple[int, ...], rows: Any) -> tuple[int, ...]:
        return tuple(int(np.searchsorted(rows, end)) for end in ends) if rows is not None else ends

    if isinstance(question, LinearQuestion):
        return over(question.lengths, kept.get("n"))
    return over(question.lengths[0], kept.get("n_q")), over(question.lengths[1], kept.get("n_k"))


def _cache(cache: Cache | None, name: str, kept: dict[str, Any]) -> Cache | None:
    if cache is None:
        return None
    lengths = tuple(cache.lengths[i] for i in kept["batch"]) if "batch" in kept else cache.lengths
    if "n_k" in kept:
        lengths = tuple(int(np.searchsorted(kept["n_k"], n)) for n in lengths)
    return replace(cache, lengths=lengths)


def _arrays(question: Question, before: Sizes, kept: dict[str, Any]) -> tuple[Given, ...]:
    """Those that are read by a plain variable have as many numbers there as the call has of it."""
    kinds = [language.kind_of(given.dtype) for given in question.arrays]
    axes: dict[str, dict[int, str]] = {}
    for text in (question.mask, question.score):
        for node in language.nodes(language.parse(text, kinds)) if text is not None else ():
            if node.op == "load":
                by = {i: _OF_VARIABLES[x.value] for i, x in enumerate(node.args) if x.op == "var"}
                axes.setdefault(node.value, {}).update(by)
    return tuple(
        _cut(given, tuple(axes.get(f"a{i}", {}).get(axis, "") for axis in range(given.values.ndim)), kept, before)
        for i, given in enumerate(question.arrays)
    )  # fmt: skip
