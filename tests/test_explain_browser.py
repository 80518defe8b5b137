"""The explainer page in a real browser: it loads, steps, changes the variant, and shows NumPy's numbers.

Screenshots go to the folder that TILEWISE_SCREENSHOTS names, at both widths and in both themes.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser import PROGRAMS, Browser, program
from tilewise import cli
from tilewise.cli import explain, explain_server
from tilewise.cli.explain import Asked
from tilewise.explainer.page import page
from tilewise.explainer.record import Recording, record
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel
from tilewise.spec import Attention, Shape, Tile
from tilewise.text import parse

pytestmark = pytest.mark.skipif(
    program() is None, reason=f"no browser ({', '.join(PROGRAMS)}); Debian: apt install chromium"
)

ASKED = Asked(mask="causal() & window(40)", n_q=96, n_k=96, block="16x32", d=8, magnitude=8.0)
WIDTHS = {1280: 900, 390: 844}
THEMES = ("light", "dark")
CHECKS = Path(__file__).with_name("page_checks.js").read_text()
ROWS = "[...document.querySelectorAll('{0} tbody tr')]"
CELLS = f"{ROWS}.map(r => [...r.querySelectorAll('[data-value]')].map(c => Number(c.dataset.value)))"


@pytest.fixture(scope="module")
def recording() -> Recording:
    shape = Shape(1, 1, 1, ASKED.n_q, ASKED.n_k, ASKED.d, ASKED.d)
    return record(Attention(ASKED.d**-0.5, parse(ASKED.mask)), shape, Tile(16, 32), magnitude=ASKED.magnitude)


@pytest.fixture(scope="module")
def without_simulator() -> Iterator[None]:
    """The page is the same without the timeline's numbers, and no compiler is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaSimKernel, "unavailable", lambda self: "left out by this test")
        yield


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, without_simulator: None) -> str:
    to = tmp_path_factory.mktemp("page") / "page.html"
    to.write_text(page(explain.recording(ASKED)), encoding="utf-8")
    return to.as_uri()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def browser(chromium: Browser, address: str) -> Iterator[Browser]:
    """At the page's first step; afterwards, nothing may have gone wrong in it."""
    chromium.requests.clear()
    chromium.size(1280, 900)
    chromium.open(address)
    yield chromium
    assert chromium.errors == []


def _cells(browser: Browser, table: str) -> np.ndarray:
    return np.array(browser.value(CELLS.format(table)), np.float64)


def _status(browser: Browser) -> str:
    return str(browser.value("document.getElementById('status').textContent"))


def _go(browser: Browser, step: int) -> None:
    browser.choose("#scrub", step, "input")


def test_it_asks_for_nothing_but_itself(browser: Browser, address: str) -> None:
    assert browser.requests == [address]


def test_its_numbers_are_numpys(browser: Browser, recording: Recording) -> None:
    """Of every step: the running numbers, and a row beside its plain softmax."""
    for at, step in enumerate(recording.steps):
        _go(browser, at)
        place = f"query tile {step.query_tile}, key tile {step.key_tile}, {step.kind.name}"
        assert f"Step {at + 1} of {len(recording.steps)}: {place}" in _status(browser)
        if step.numbers is None:
            assert "skipped" in _status(browser)
            continue
        n, shown = step.numbers, _cells(browser, "#rows")
        wanted = np.column_stack([n.row_max, n.rescale, n.row_sum, n.acc[:, :4]])
        np.testing.assert_allclose(shown, np.where(np.isfinite(wanted), wanted, np.nan), rtol=1e-6)
        moved = browser.value(
            "[...document.querySelectorAll('#rows tbody tr')].map(r => r.classList.contains('moved'))"
        )
        assert moved == n.moved.astype(bool).tolist()
    ours, plain = _cells(browser, "#compare").T
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours[2:], recording.done.out[80, :4], rtol=1e-4, atol=1e-6)


def test_bytes_end_at_the_plans_totals(browser: Browser, recording: Recording) -> None:
    browser.press("End")
    (_, _, tiled, tiled_plan), (_, _, naive, naive_plan) = _cells(browser, "#bytes").tolist()
    assert tiled == tiled_plan == recording.plan.bytes_tiled
    assert naive == naive_plan == recording.plan.bytes_naive


def test_keys_buttons_and_the_mouse(browser: Browser) -> None:
    for act, step in (
        (lambda: browser.press("ArrowRight"), 2), (lambda: browser.press("ArrowRight"), 3),
        (lambda: browser.press("ArrowLeft"), 2), (lambda: browser.press("End"), 18), (lambda: browser.press("Home"), 1),
        (lambda: browser.click("#next"), 2), (lambda: browser.click("#last"), 18), (lambda: browser.click("#back"), 17),
        (lambda: browser.click("#first"), 1),
    ):  # fmt: skip
        act()
        assert _status(browser).startswith(f"Step {step} of 18")
    browser.press("ArrowDown")
    assert browser.value("document.getElementById('row-name').textContent") == "1"
    box = browser.value("document.getElementById('grid').getBoundingClientRect().toJSON()")
    browser.point(box["left"] + box["width"] * 0.5, box["top"] + box["height"] * 0.6)
    assert "query tile 3, key tile 1" in _status(browser)


def test_it_plays_and_pauses(browser: Browser) -> None:
    browser.choose("#speed", 15)
    browser.press(" ")
    assert browser.value("document.getElementById('play').getAttribute('aria-label')") == "Pause"
    browser.wait_for("document.getElementById('scrub').value > 2")
    browser.press(" ")
    stopped = _status(browser)
    browser.value("new Promise(done => setTimeout(done, 400))")
    assert _status(browser) == stopped


def test_without_the_running_maximum_overflows_are_shown(browser: Browser, recording: Recording) -> None:
    browser.click("#running-max")
    browser.click("#find-overflow")
    lost = [s.numbers is not None and bool(np.isinf(s.numbers.bare_sums["float16"]).any()) for s in recording.steps]
    at = lost.index(True)
    assert _status(browser).startswith(f"Step {at + 1} of")
    numbers = recording.steps[at].numbers
    assert numbers is not None
    rows = int(np.isinf(numbers.bare_sums["float16"]).sum())
    told = browser.value("document.getElementById('overflow').textContent")
    assert f"{rows} of {len(numbers.s)} rows have a sum of ∞" in told
    assert f"Without it {int((np.exp(numbers.s.astype(np.float64)) > 65504).sum())} of this tile's" in told
    assert browser.value("document.querySelectorAll('#rows td.alarm').length") == rows
    browser.click("#running-max")
    assert browser.value("document.querySelectorAll('#rows td.alarm').length") == 0


def test_sources_and_code_are_the_real_ones(browser: Browser) -> None:
    browser.choose("#right", "triton")
    text = browser.value("document.getElementById('aligned').textContent")
    for line in ("p, rescale = state.step(s, v)", "# 6 acc = acc * rescale + p @ v", "tl.dot"):
        assert line in text
    labels = browser.value("[...document.querySelectorAll('#aligned h3')].map(h => h.textContent)")
    assert [label.split(" ")[0] for label in labels] == ["1", "for", "2", "3", "4", "5", "6", "7"]
    for system, word in {
        "cuda": "namespace variant",
        "triton": "@triton.jit",
        "cute": "def mask(",
        "cpu": "along k",
    }.items():
        browser.click(f"#tab-{system}")
        assert word in browser.value("document.getElementById('code').textContent")
    assert browser.value("document.querySelector('#formulas math').getBoundingClientRect().width > 50")


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_can_be_read(browser: Browser, address: str, width: int, theme: str) -> None:
    browser.size(width, WIDTHS[width], theme)
    browser.open(address)
    _go(browser, 7)
    browser.choose("#placement", "cuda/forward_sm90")
    assert browser.value("document.documentElement.scrollWidth") == width, "nothing is wider than the screen"
    for _ in range(2):  # with the running maximum, and without
        assert browser.value(CHECKS) == {"faint": [], "unnamed": []}
        browser.click("#running-max")
    folder = os.environ.get("TILEWISE_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.screenshot(Path(folder) / f"explain-{width}-{theme}.png")


def test_the_theme_can_be_switched(browser: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    before = browser.value(ground)
    browser.click("#theme")
    assert browser.value(ground) != before


def test_the_variant_can_be_changed_live(chromium: Browser, without_simulator: None) -> None:
    made = explain_server.server(0, explain.recording(ASKED), lambda form: explain.recording(Asked.of_fields(form)))
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        chromium.open(f"http://127.0.0.1:{made.server_port}/")
        _submit(chromium, mask="causal()", n_q="40", n_k="40", block="8", seed="3")
        chromium.wait_for("document.getElementById('call').textContent.includes('40 queries')")
        assert _status(chromium).startswith("Step 1 of 25")
        expected = explain.recording(Asked("causal()", "", 40, 40, "8", ASKED.d, magnitude=ASKED.magnitude, seed=3))
        row_max = np.frombuffer(base64.b64decode(expected["steps"][0]["numbers"]["rowMax"]), "<f4")
        np.testing.assert_allclose(_cells(chromium, "#rows")[:, 0], row_max, rtol=1e-6)
        _submit(chromium, mask="import os")
        chromium.wait_for("document.getElementById('refusal').textContent.startsWith('mask: in ')")
        assert "40 queries" in chromium.value("document.getElementById('call').textContent"), "what was shown stays"
    finally:
        made.shutdown()
        thread.join()
        made.server_close()
    assert chromium.errors == []


def _submit(browser: Browser, **fields: Any) -> None:
    for name, value in fields.items():
        browser.value(f"document.getElementById('controls').elements.namedItem({name!r}).value = {value!r}")
    browser.click("#controls button")


def test_the_commands_own_page_opens(chromium: Browser, tmp_path: Path) -> None:
    """As a user has it, timeline included where there is a compiler."""
    to = tmp_path / "page.html"
    assert (
        cli.main(["explain", "--score", "softcap(20.0) >> alibi(2)", "--heads", "2", "--n", "64", "-o", str(to)]) == 0
    )
    chromium.open(to.as_uri())
    assert _status(chromium).startswith("Step 1 of 4")
    told = chromium.value("document.querySelectorAll('#timeline .span').length")
    assert told > 20 or "did not run" in chromium.value("document.getElementById('roles-note').textContent")
    assert chromium.errors == []
