"""The report in a real browser: it fits, can be read and reached by keyboard, and shows the results' own numbers.

Screenshots go to the folder that TILEWISE_SCREENSHOTS names, at both widths and in both themes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import PROGRAMS, Browser, program
from tests.fake_results import made_up
from tests.test_explain_browser import CHECKS, THEMES, WIDTHS
from tilewise import cli

pytestmark = pytest.mark.skipif(
    program() is None, reason=f"no browser ({', '.join(PROGRAMS)}); Debian: apt install chromium"
)

# From slowest to fastest, so that every colour of a ratio is on the page.
RATIOS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.3, 2.0)
READING = "document.getElementById('reading')"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for name in ("forward", "decode", "memory"):
        made = made_up(name, lambda cell: RATIOS[(cell.n_k // 512 + cell.d // 64) % len(RATIOS)])
        (folder / f"{name}.json").write_text(json.dumps(made))
    old = made_up("forward", lambda cell: 2 * RATIOS[(cell.n_k // 512 + cell.d // 64) % len(RATIOS)])
    (folder / "old").mkdir()
    (folder / "old" / "forward.json").write_text(json.dumps(old))
    files = [str(folder / f"{name}.json") for name in ("forward", "decode", "memory")]
    assert (
        cli.main(["bench", "--report", *files, "-o", str(folder / "page.html"), "--against", str(folder / "old")]) == 1
    )
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as made:
        yield made
        assert made.errors == []


def test_it_fits_and_can_be_read(browser: Browser, stored: Path) -> None:
    address = (stored / "page.html").as_uri()
    for width, height in WIDTHS.items():
        for theme in THEMES:
            browser.requests.clear()
            browser.size(width, height, theme)
            browser.open(address)
            assert browser.requests == [address], "it asks for nothing but itself"
            browser.value("document.querySelectorAll('details').forEach(one => (one.open = true))")
            assert browser.value("document.documentElement.scrollWidth") == width, "nothing is wider than the screen"
            assert browser.value(CHECKS) == {"faint": [], "unnamed": []}
            folder = os.environ.get("TILEWISE_SCREENSHOTS")
            if folder:
                Path(folder).mkdir(parents=True, exist_ok=True)
                browser.screenshot(Path(folder) / f"report-{width}-{theme}.png")


def test_charts_tell_the_results_own_numbers(browser: Browser, stored: Path) -> None:
    """By the keyboard and by the mouse; and every mark has a row."""
    browser.size(1280, 900)
    browser.open((stored / "page.html").as_uri())
    lost = "[...document.querySelectorAll('[data-row]')].filter(x => !document.getElementById(x.dataset.row)).length"
    assert browser.value(lost) == 0
    _scroll_to(browser, "document.querySelector('svg.chart')")
    browser.value("document.querySelector('svg.chart').focus()")
    assert browser.value(f"{READING}.hidden")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp"):
        browser.press(key)
    told = browser.value(f"{READING}.innerText")
    records = json.loads((stored / "forward.json").read_text())["records"]
    marked = browser.value("document.querySelector('.read').dataset.row")
    row = browser.value(f"document.getElementById('{marked}').cells[0].textContent")
    assert row == "full, d 64, n 2048"
    who = browser.value(f"document.getElementById('{marked}').cells[1].textContent")
    of = next(r for r in records if (r["variant"], r["d"], r["n_k"], r["contestant"]) == ("full", 64, 2048, who))
    exact = f"[...document.getElementById('{marked}').querySelectorAll('[data-value]')].map(x => +x.dataset.value)"
    assert {of["median_ms"], of["gflops"], of["error"]} <= set(browser.value(exact))
    assert f"{of['gflops']:,.0f}" in told or f"{of['gflops']:#.3g}" in told
    browser.press("Escape")
    assert browser.value(f"{READING}.hidden")
    cell = "document.querySelector('table.heat td[data-value]')"
    _scroll_to(browser, cell)
    box = browser.value(f"{cell}.getBoundingClientRect().toJSON()")
    browser.point(box["left"] + 5, box["top"] + 5)
    assert not browser.value(f"{READING}.hidden")
    first = next(r for r in records if r["ours"])
    assert browser.value(f"{cell}.textContent") == f"{first['ratio']:.2f}×"


def _scroll_to(browser: Browser, element: str) -> None:
    """And wait until the page has heard of it."""
    browser.value(f"{element}.scrollIntoView({{block: 'center'}})")
    browser.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_the_theme_can_be_switched(browser: Browser, stored: Path) -> None:
    browser.open((stored / "page.html").as_uri())
    ground = "getComputedStyle(document.body).backgroundColor"
    before = browser.value(ground)
    browser.click("#theme")
    assert browser.value(ground) != before
