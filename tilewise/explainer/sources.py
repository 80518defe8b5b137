"""The forward sources of the kernel systems, cut at their step labels, so that any two can be laid side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tilewise
from tilewise.steps import starts

FILES = {
    "numpy": ("numpy/forward.py", "../softmax.py"),
    "cpu": ("cpu/engine/forward.h",),
    "cuda/naive": ("cuda/source/naive.cu",),
    "cuda/tiled": ("cuda/source/tiled.cu",),
    "cuda/forward_sm90": ("cuda/source/forward_sm90.cu", "cuda/source/sm90_softmax.h"),
    "triton/basic": ("triton/source/basic.py",),
    "triton": ("triton/source/forward.py",),
    "cute/basic": ("cute/source/basic.py",),
    "cute/forward_sm90": ("cute/source/forward_sm90.py", "cute/source/speculation.py"),
    "tilelang/simple": ("tilelang/source/simple.py",),
    "tilelang": ("tilelang/source/forward.py",),
}
_KERNELS = Path(tilewise.__file__).with_name("kernels")


@dataclass(frozen=True)
class Section:
    """Lines of a file that belong to one step; step "" is what is between."""

    step: str
    file: str
    line: int  # the number of its first line
    text: str


def sections(name: str) -> list[Section]:
    """A kernel's source, whole and in order; [] where its files are not installed."""
    paths = [_KERNELS / file for file in FILES[name]]
    return [section for path in paths if path.exists() for section in _cut(path.name, path.read_text())]


def _cut(file: str, text: str) -> Iterator[Section]:
    lines = text.splitlines()
    bounds = [(0, ""), *starts(lines), (len(lines), "")]
    for (first, step), (end, _) in pairwise(bounds):
        while first < end and not lines[first].strip():
            first += 1
        if first < end:
            yield Section(step, file, first + 1, "\n".join(lines[first:end]).rstrip())
