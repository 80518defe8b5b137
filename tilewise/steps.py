"""The steps that every forward pass has, and where their labels stand in a source of any language."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

STEPS = {
    "1": "load q",
    "loop": "for each kv tile of the schedule",
    "2": "s = q @ k.T",
    "3": "score",
    "4": "mask (PARTIAL tiles only)",
    "5": "row_max, rescale, p, row_sum",
    "6": "acc = acc * rescale + p @ v",
    "7": "finish: acc / row_sum, lse",
}
_LABEL = re.compile(r"\s*(?:#|//) (?:(?P<step>[1-7]) (?=[a-z])|(?P<loop>for each k))")


def starts(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The lines where a part begins, and its step: at a label, and, with step "", where a line stands further left than
    the label before it."""
    step, indent = "", 0
    for number, line in enumerate(lines):
        label = _LABEL.match(line)
        if label is not None:
            step, indent = label["step"] or "loop", _indent(line)
            yield number, step
        elif step and line.strip() and not line.startswith("#") and _indent(line) < indent:  # "#pragma" is no end
            step = ""
            yield number, step


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
