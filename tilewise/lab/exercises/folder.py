"""A learner's folder: the exercises in it, and which hints were opened."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tilewise.lab.exercises import NAMES, exercise, skeleton

NOTES = ".tilewise-lab.json"


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, name: str) -> Path:
        return self.path / exercise(name).file

    @property
    def exists(self) -> bool:
        return (self.path / NOTES).is_file() or any(self.file(name).is_file() for name in NAMES)

    def with_work(self, names: Iterable[str]) -> list[str]:
        """Those whose file is there, and is not the skeleton any more."""
        files = {name: self.file(name) for name in names}
        return [name for name, file in files.items() if file.exists() and _text(file) != skeleton(name)]

    def write(self, names: Iterable[str]) -> list[str]:
        """Skeletons of exercises. A file that has someone's work is kept as NAME.old; returns the names of those."""
        self.path.mkdir(parents=True, exist_ok=True)
        kept = self.with_work(names)
        for name in names:
            file = self.file(name)
            if name in kept:
                file.replace(file.with_name(f"{file.name}.old"))
            file.write_text(skeleton(name))
        self._note({name: count for name, count in self._opened().items() if name not in names})
        return kept

    def hints(self, name: str, more: int) -> tuple[list[str], int]:
        """The hints of an exercise that are open, after `more` were opened; and how many there are."""
        every, opened = exercise(name).all_hints(), self._opened()
        opened[name] = min(opened.get(name, 0) + more, len(every))
        self._note(opened)
        return every[: opened[name]], len(every)

    def _opened(self) -> dict[str, int]:
        try:
            noted = json.loads((self.path / NOTES).read_text())["hints"]
            return {name: int(count) for name, count in noted.items()}
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ):  # not there, or edited: none is open
            return {}

    def _note(self, opened: dict[str, int]) -> None:
        (self.path / NOTES).write_text(json.dumps({"hints": opened}) + "\n")


def _text(file: Path) -> str:
    return file.read_text(errors="replace")
