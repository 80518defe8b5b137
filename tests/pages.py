"""Pages as programs: their Python blocks run in order and in one namespace, and text after one is what it prints.

A block that begins with the name of a file is that file; a diff says what changes in one. `needs: NAME` in a comment
says what a page cannot do without.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK = re.compile(r"```python\n(?P<code>.*?)```(?:\n\n```text\n(?P<printed>.*?)```)?", re.DOTALL)
_FILE = re.compile(r"```(?:python|cuda)\n(?P<text>(?:#|//) (?P<path>[\w/]+\.(?:py|cu))\n.*?)```", re.DOTALL)
_DIFF = re.compile(r"```diff\n--- (?P<path>\S+)\n(?P<hunks>.*?)```", re.DOTALL)


def needed(page: Path) -> list[str]:
    return re.findall(r"<!-- needs: (\w+) -->", page.read_text())


def run(page: Path) -> None:
    """q, k and v already are arrays, as a reader takes them to be."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 64, 16))
    names: dict[str, Any] = {"q": q, "k": k, "v": v}
    for block in _BLOCK.finditer(page.read_text()):
        if _FILE.match(block[0]):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], page.name, "exec"), names)
        if block["printed"]:
            assert printed.getvalue() == block["printed"], f"{block['code']}\nprints:\n{printed.getvalue()}"


def apply(page: Path, folder: Path) -> None:
    """Write the page's files into a folder, and make its changes there."""
    text = page.read_text()
    for file in _FILE.finditer(text):
        path = folder / file["path"]
        path.parent.mkdir(exist_ok=True)
        path.write_text(file["text"])
    for diff in _DIFF.finditer(text):
        path = folder / diff["path"]
        path.write_text(_changed(path.read_text(), diff["hunks"]))


def _changed(text: str, hunks: str) -> str:
    for hunk in hunks.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert text.count(old) == 1, f"the diff's place is there {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    return text
