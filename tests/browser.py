"""Chromium without a window, driven by its DevTools protocol over a pipe: nothing to install but the browser."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
PATIENCE = 60.0  # seconds for an answer, on a machine that others use
# No sandbox: it cannot be had by root, as which containers run. What is opened is our own page.
_FLAGS = (
    "--headless", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip


def program() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


def _pipe() -> tuple[int, int]:
    """Whose ends are not among the numbers that the browser is to find them at."""
    low = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return read, write


class Browser:
    """One page in one browser. `errors` are what its console would show in red, `requests` what it asked for."""

    def __init__(self, folder: Path) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        self._session: str | None = None  # until the page is there
        self._number = 0
        self._unread = b""
        read, self._to = _pipe()
        self._from, write = _pipe()
        command = [str(program()), *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        # It reads its orders from 3 and answers to 4; what it says of itself is of no interest.
        places = [(os.POSIX_SPAWN_DUP2, read, 3), (os.POSIX_SPAWN_DUP2, write, 4)]
        places += [(os.POSIX_SPAWN_OPEN, at, os.devnull, os.O_WRONLY, 0) for at in (1, 2)]
        self._process = os.posix_spawn(command[0], command, os.environ, file_actions=places)
        os.close(read)
        os.close(write)
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{part}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._to)  # which ends it
        end = time.monotonic() + 10
        while os.waitpid(self._process, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.kill(self._process, signal.SIGKILL)
                os.waitpid(self._process, 0)
                break
            time.sleep(0.05)
        os.close(self._from)

    # -- what a test does ---------------------------------------------------------------------------------------------
    def size(self, width: int, height: int, theme: str = "light") -> None:
        self._send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def open(self, address: str) -> None:
        self._loaded = False
        self._send("Page.navigate", url=address)
        self._until(lambda: self._loaded, f"{address} to load")

    def value(self, script: str) -> Any:
        """What a JavaScript expression gives; promises are waited for."""
        told = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait_for(self, script: str) -> None:
        self._until(lambda: bool(self.value(script)), script)

    def press(self, key: str) -> None:
        """A key of the keyboard, such as ArrowRight or " "."""
        for kind in ("keyDown", "keyUp"):
            self._send("Input.dispatchKeyEvent", type=kind, key=key, code="Space" if key == " " else key)

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def point(self, x: float, y: float) -> None:
        """Click with the mouse at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def choose(self, selector: str, value: Any, event: str = "change") -> None:
        """A value of a control, as if a user had chosen it."""
        script = "((e, value, event) => { e.value = value; e.dispatchEvent(new Event(event, {bubbles: true})); })"
        self.value(
            f"{script}(document.querySelector({json.dumps(selector)}), {json.dumps(value)}, {json.dumps(event)})"
        )

    def screenshot(self, to: Path, whole: bool = True) -> None:
        told = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        to.write_bytes(base64.b64decode(told["data"]))

    # -- the protocol -------------------------------------------------------------------------------------------------
    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        order = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            order["sessionId"] = self._session
        os.write(self._to, json.dumps(order).encode() + b"\0")
        answers: list[dict[str, Any]] = []
        while not answers:
            told = self._receive()
            if told.get("id") == self._number:
                answers.append(told)
            else:
                self._heard(told)
        assert "error" not in answers[0], (method, answers[0])
        result: dict[str, Any] = answers[0]["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], PATIENCE)
            assert ready, f"the browser said nothing for {PATIENCE} s"
            more = os.read(self._from, 1 << 20)
            assert more, "the browser has ended"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        return told

    def _heard(self, told: dict[str, Any]) -> None:
        method, params = told.get("method"), told.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(json.dumps(params["entry"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not is_so():
            assert time.monotonic() < end, f"waited {PATIENCE} s for {what}"
            self._send("Runtime.evaluate", expression="0")  # and hear what happened meanwhile
            time.sleep(0.02)
