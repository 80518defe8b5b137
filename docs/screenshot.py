"""The picture of `tilewise explain` in the docs, taken of the real page: python -m docs.screenshot."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.browser import PROGRAMS, Browser, program
from tilewise import cli

TO = Path(__file__).parent / "images" / "explain.png"
STEP, ROW = 25, 9  # a FULL tile, after others of its row


def main() -> None:
    if program() is None:
        raise SystemExit(
            f"no browser ({', '.join(PROGRAMS)}): the picture stays as it is (Debian: apt install chromium)"
        )
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        cli.main(["explain", "-o", str(page)])
        with Browser(Path(folder, "browser")) as browser:
            browser.size(1280, 745)
            browser.open(page.as_uri())
            for key, times in (("ArrowRight", STEP), ("ArrowDown", ROW)):
                for _ in range(times):
                    browser.press(key)
            browser.value("new Promise(done => setTimeout(done, 500))")  # the frame has come to its tile
            browser.screenshot(TO, whole=False)


if __name__ == "__main__":
    main()
