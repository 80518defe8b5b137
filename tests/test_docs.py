"""The pages tell the truth: their Python runs, text after it is what it prints, and their links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs import tables
from docs.navigation import NAVIGATION
from tests import pages
from tilewise.bench.plot_parts import DRAWN_FROM, digest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
EXTENDING = DOCS / "extending.md"
IMAGES = DOCS / "images"
PICTURES = sorted((ROOT / "results").glob("*/*.png"))


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if page != EXTENDING], ids=_name)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in pages.needed(page):
        pytest.importorskip(module)
    pages.apply(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    pages.run(page)


def test_extending_does_what_it_says(tmp_path: Path) -> None:
    """A variant and a kernel system are added to a copy of the package, and are judged there."""
    shutil.copytree(ROOT / "tilewise", tmp_path / "tilewise", ignore=shutil.ignore_patterns("__pycache__"))
    pages.apply(EXTENDING, tmp_path)
    script = f"import pathlib; from tests import pages; pages.run(pathlib.Path({str(EXTENDING)!r}))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # behind the folder it runs in, which has the copy
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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


def test_a_picture_shows_the_measured_rates() -> None:
    image, _ = pytest.importorskip("PIL.Image"), pytest.importorskip("matplotlib")
    from docs.tutorial_figures import measured_rates

    drawn_from = image.open(IMAGES / "gpu_kernel.png").text.get(DRAWN_FROM)
    assert drawn_from == digest(measured_rates()), "gpu_kernel.png is older than results/gpu: run make pictures"


def test_the_overview_shows_the_results() -> None:
    image, _ = pytest.importorskip("PIL.Image"), pytest.importorskip("matplotlib")
    from docs.figures import RATES

    drawn_from = image.open(IMAGES / "overview.png").text.get(DRAWN_FROM)
    assert drawn_from == digest(json.loads(RATES.read_text())), (
        "overview.png is older than its results: run make pictures"
    )


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file that is there, and to a heading of it; the docs to no page outside of the site."""
    for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", _prose(page)):
        if target.startswith("http"):
            continue
        to = (page.parent / target).resolve() if target else page
        assert to.exists(), f"{page.name} links to {target}"
        assert not heading or heading in _anchors(to), f"{page.name} links to {target}#{heading}"
        if page.is_relative_to(DOCS):
            assert to.suffix != ".md" or to.is_relative_to(DOCS), f"{page.name} links to {target}, no page of the site"


def test_every_page_is_in_the_menu() -> None:
    there = [page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES if page.is_relative_to(DOCS)]
    named = ["index", *(name for names in NAVIGATION.values() for name in names)]
    assert sorted(named) == sorted(there)


def test_every_picture_is_shown() -> None:
    text = "".join(map(_prose, PAGES))
    assert [path.name for path in sorted(IMAGES.iterdir()) if f"images/{path.name})" not in text] == []


def _prose(page: Path) -> str:
    """Without code, in which brackets mean other things."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)


def _anchors(page: Path) -> list[str]:
    """Of its headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
