"""The pictures of our HTML pages in the docs, taken of the real pages: python -m docs.screenshot."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.browser import PROGRAMS, Browser, program
from tilewise import cli

IMAGES = Path(__file__).parent / "images"
RESULTS = Path(__file__).parent.parent / "results"
STEP, ROW = 25, 9  # a FULL tile, after others of its row


def main() -> None:
    if program() is None:
        raise SystemExit(
            f"no browser ({', '.join(PROGRAMS)}): the pictures stay as they are (Debian: apt install chromium)"
        )
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder, "browser")) as browser:
        explained(browser, Path(folder, "explain.html"))
        reported(browser, Path(folder, "report.html"))


def explained(browser: Browser, page: Path) -> None:
    cli.main(["explain", "-o", str(page)])
    browser.size(1280, 745)
    browser.open(page.as_uri())
    for key, times in (("ArrowRight", STEP), ("ArrowDown", ROW)):
        for _ in range(times):
            browser.press(key)
    browser.value("new Promise(done => setTimeout(done, 500))")  # the frame has come to its tile
    browser.screenshot(IMAGES / "explain.png", whole=False)


def reported(browser: Browser, page: Path) -> None:
    """The first section, and a mark of its fifth chart that is being read."""
    cli.main(["bench", "--report", str(RESULTS), "-o", str(page)])
    browser.size(1280, 1100)
    browser.open(page.as_uri())
    browser.value("document.querySelector('.run').scrollIntoView()")
    browser.value("document.querySelectorAll('svg.chart')[4].focus({preventScroll: true})")
    browser.value("new Promise(done => setTimeout(done, 200))")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        browser.press(key)
    browser.screenshot(IMAGES / "report.png", whole=False)


if __name__ == "__main__":
    main()
