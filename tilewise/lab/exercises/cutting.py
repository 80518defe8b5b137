"""Sources of the project, with what a learner is to write cut out of them: skeleton and solution are one text."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import tilewise
from tilewise.steps import starts

PACKAGE = Path(tilewise.__file__).parent
YOUR_CODE_HERE = {".py": 'raise NotImplementedError("your code here")', ".cu": '#error "your code here"'}


class Cut(NamedTuple):
    """Lines first to end - 1 of a source, counted from 0, and what stands in their place."""

    first: int
    end: int
    instead: list[str]


@dataclass(frozen=True)
class Source:
    """A file of the project: definitions of it, or all but its opening words.

    cut: labels of steps ("5"), whose label stays; or names of functions, of which signature, docstring and labels stay.
    """

    file: str  # under tilewise/
    cut: tuple[str, ...]
    definitions: tuple[str, ...] = ()  # "finite", or "State: init step" for a class with these methods alone

    def text(self, *, cut: bool) -> str:
        """What the learner gets, or with cut=False the same with the project's own lines in their place."""
        instead = {place.first: place.instead for place in self.cuts} if cut else {}
        hidden = {number for place in self.cuts for number in range(place.first, place.end)} if cut else set()
        lines: list[str] = []
        for number in self._kept:
            lines += instead.get(number, [])
            if number not in hidden:
                lines.append("" if number == _BLANK else self._lines[number])
        return "\n".join(lines) + "\n"

    @cached_property
    def cuts(self) -> list[Cut]:
        """What is taken out, in order."""
        made: list[Cut] = []
        for name in self.cut:
            found = [cut for cut in self._cut_out(name) if cut.first in self._kept and cut.first < cut.end]
            if not found:
                raise ValueError(f"{self.file} has nothing more to cut that is called {name!r}")
            made += found
        return sorted(made)

    def solution(self) -> str:
        """The lines that were taken out, with their places."""
        parts = []
        for first, end, _ in self.cuts:
            parts.append(f"{self.where(first, end)}:\n\n" + "\n".join(self._lines[self._labelled(first) : end]))
        return "\n\n".join(parts) + "\n"

    def _labelled(self, first: int) -> int:
        """From the label on, if there is one."""
        return first - 1 if self._lines[first - 1].strip().startswith(("# ", "// ")) else first

    def where(self, first: int | None = None, end: int | None = None) -> str:
        """The place of some lines, or of all that is cut."""
        first = self.cuts[0].first if first is None else first
        end = self.cuts[-1].end if end is None else end
        return f"tilewise/{self.file}, " + (f"line {end}" if end == first + 1 else f"lines {first + 1} to {end}")

    @property
    def path(self) -> Path:
        return PACKAGE / self.file

    @cached_property
    def _lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    @cached_property
    def _tree(self) -> ast.Module:
        return ast.parse("\n".join(self._lines) if self.path.suffix == ".py" else "")

    @cached_property
    def _kept(self) -> list[int]:
        if self.definitions:
            return _joined([self._definition(*asked.partition(": ")[::2]) for asked in self.definitions], blanks=2)
        opening = next((i for i, line in enumerate(self._lines) if not line.startswith("//")), 0)
        if ast.get_docstring(self._tree) is not None:
            opening = self._tree.body[0].end_lineno or 0
        return list(range(opening, len(self._lines)))

    def _definition(self, name: str, methods: str) -> list[int]:
        node = self._named(name)
        if not methods:
            return _lines_of(node)
        functions = [x for x in _body(node) if isinstance(x, ast.FunctionDef)]
        head = [number for number in _lines_of(node) if number < _lines_of(functions[0])[0] - 1]
        return _joined([head, *(_lines_of(x) for x in functions if x.name in methods.split())], blanks=1)

    def _named(self, name: str) -> ast.stmt:
        return next(x for x in self._tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name == name)

    def _cut_out(self, name: str) -> Iterator[Cut]:
        return self._step(name) if name.isdigit() else self._body(name)

    def _step(self, name: str) -> Iterator[Cut]:
        for (label, step), (end, _) in pairwise([*starts(self._lines), (len(self._lines), "")]):
            if step == name:
                while not self._lines[end - 1].strip():
                    end -= 1
                yield Cut(label + 1, end, [_indent(self._lines[label]) + self._marker])

    def _body(self, name: str) -> Iterator[Cut]:
        statements = _body(self._named(name))[1:]  # the first is the docstring
        first, end = statements[0].lineno - 1, statements[-1].end_lineno or 0
        labels = [self._lines[i].strip() for i, step in starts(self._lines) if step and first <= i < end]
        yield Cut(first, end, [_indent(self._lines[first]) + line for line in (*labels, self._marker)])

    @property
    def _marker(self) -> str:
        return YOUR_CODE_HERE[self.path.suffix]


_BLANK = -1


def _joined(parts: Sequence[list[int]], blanks: int) -> list[int]:
    joined = parts[0]
    for part in parts[1:]:
        joined = [*joined, *[_BLANK] * blanks, *part]
    return joined


def _lines_of(node: ast.stmt) -> list[int]:
    decorators = getattr(node, "decorator_list", [])
    return list(range(min(x.lineno for x in (*decorators, node)) - 1, node.end_lineno or 0))


def _body(node: ast.stmt) -> list[ast.stmt]:
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return node.body


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
