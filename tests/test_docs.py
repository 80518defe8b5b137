"""The pages tell the truth: their Python runs, text after it is what it prints, and their links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


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


def test_tables_quote_the_results() -> None:
    """What stands in the pages is what docs/tables.py makes of results/*.json."""
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    for page in tables["PAGES"]:
        text = page.read_text()
        assert text.count("<!-- end -->") > 0
        assert tables["fill"](page) == text, f"{page.name}: run python docs/tables.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
