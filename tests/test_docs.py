"""The pages tell the truth: their Python runs, text after it is what it prints, and their links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from docs import tables
from tilewise.bench.plot_parts import DRAWN_FROM, digest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PICTURES = sorted((ROOT / "results").glob("*/*.png"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page: Path) -> None:
    """In order and in one namespace, where q, k and v already are arrays, as a reader takes them to be."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 64, 16))
    names = {"q": q, "k": k, "v": v}
    for code, expected in re.findall(
        r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", page.read_text(), flags=re.DOTALL
    ):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), names)
        if expected:
            assert printed.getvalue() == expected, code


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_current(page: Path) -> None:
    """What stands in the pages is what docs/tables.py makes of results/*.json, and of what kernel systems answer."""
    text = page.read_text()
    assert text.count("<!-- end -->") > 0
    assert tables.fill(page) == text, f"{page.name}: run python docs/tables.py"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_pictures_show_the_results(picture: Path) -> None:
    """Each says which results it was drawn from: those that are there now."""
    image = pytest.importorskip("PIL.Image")
    names = {"scaling": ("window", "memory")}.get(picture.stem, (picture.stem,))
    results = [json.loads(picture.with_name(f"{name}.json").read_text()) for name in names]
    drawn_from = image.open(picture).text.get(DRAWN_FROM)
    assert drawn_from == digest(*results), f"{picture.name} is older than its results: run make pictures"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
