"""Sources of kernels, changed for a test: an edit that finds nothing, or too much, is an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Edits = Mapping[str, Iterable[tuple[str, str]]]  # of each file: what is replaced, by what


def edited(edits: Edits, name: str, text: str) -> str:
    for old, new in edits.get(name, ()):
        if text.count(old) != 1:
            raise ValueError(f"{name} has no more: {old}")
        text = text.replace(old, new)
    return text
