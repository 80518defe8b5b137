"""An exercise: what is asked, the source that it is cut out of, its hints, and who grades it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tilewise.lab.exercises.cutting import YOUR_CODE_HERE, Source


def _nothing_missing() -> str | None:
    return None


@dataclass(frozen=True)
class Exercise:
    title: str
    task: str
    source: Source
    hints: tuple[str, ...]
    grade: Callable[[Path], Iterator[str]]  # yields what was found right; WrongError at the first that is not
    imports: str = ""  # what the cut definitions need of their file
    unavailable: Callable[[], str | None] = _nothing_missing  # why it cannot be checked here, and what to do
    env: Mapping[str, str] = field(default_factory=dict)  # of the process that checks it

    @property
    def name(self) -> str:
        """That of the module it is written in."""
        return self.grade.__module__.rpartition(".")[2]

    @property
    def file(self) -> str:
        return self.name + self.source.path.suffix

    def skeleton(self, number: int, of: int) -> str:
        return self._text(number, of, cut=True)

    def solved(self, number: int, of: int) -> str:
        """The skeleton with the project's own lines put back."""
        return self._text(number, of, cut=False)

    def _text(self, number: int, of: int, *, cut: bool) -> str:
        opening = (
            f"Exercise {number} of {of}: {self.title}\n\n{self.task.strip()}\n\n"
            f'Replace each line that says "your code here". Then: tilewise lab check {self.name}\n'
            f"A hint, one more each time: tilewise lab hint {self.name}\n"
        )
        if self.source.path.suffix == ".py":
            opening = f'"""{opening}"""\n'
        else:
            opening = "".join(f"// {line}".rstrip() + "\n" for line in opening.splitlines())
        imports = f"\n{self.imports.strip()}\n\n\n" if self.imports else ""
        return opening + imports + self.source.text(cut=cut)

    def all_hints(self) -> list[str]:
        where = f"The project's own lines are in {self.source.where()}. `tilewise lab solution {self.name}` shows them."
        return [*self.hints, where]

    # -- what is refused before anything runs -------------------------------------------------------------------------

    def refused(self, text: str) -> str | None:
        """Why a learner's text is not run, in words for the learner."""
        marker = YOUR_CODE_HERE[self.source.path.suffix]
        open_lines = [str(i) for i, line in enumerate(text.splitlines(), start=1) if line.strip() == marker]
        if open_lines:
            lines = f"line{'s' * (len(open_lines) > 1)} {', '.join(open_lines)}"
            return f'not done yet: "your code here" stands in {lines} of {self.file}'
        if self.source.path.suffix != ".py":
            return None
        try:
            borrowed = sorted(_imports(text) - _imports(self.skeleton(1, 1)))
        except SyntaxError as error:
            return f"line {error.lineno}: {error.msg}: {(error.text or '').strip()}"
        if borrowed:
            return (
                f"it imports {', '.join(borrowed)}, which the exercise does not: the point is to write it yourself. "
                'To compare results with Tilewise, import it below `if __name__ == "__main__":`'
            )
        return None


def _imports(text: str) -> set[str]:
    """What a text takes from Tilewise, except where it is run as a program."""
    names: set[str] = set()
    for node in (node for x in ast.parse(text).body if not _is_program(x) for node in ast.walk(x)):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{x.name}" for x in node.names}
        elif isinstance(node, ast.Import):
            names |= {x.name for x in node.names}
    return {name for name in names if name.split(".")[0] == "tilewise"}


def _is_program(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
