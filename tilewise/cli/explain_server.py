"""The explainer on this machine's own address: the page, and recordings of what its controls ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tilewise.cli import UserError
from tilewise.explainer.page import page, to_json
from tilewise.sharing import Lock

LOOPBACK = "127.0.0.1"
MOST_QUERY = 16384  # characters
_NAMES = (LOOPBACK, "localhost")
_OURS = ("same-origin", "none")  # our page asks, or whoever typed the address

Recorder = Callable[[Mapping[str, str]], dict[str, Any]]


def serve(port: int, first: dict[str, Any], recorder: Recorder) -> int:
    """Until Ctrl-C. `first` is shown to begin with; `recorder` makes others, or raises UserError."""
    with server(port, first, recorder) as made:
        print(f"http://{LOOPBACK}:{made.server_port}/ until Ctrl-C; nobody but this machine can reach it")
        sys.stdout.flush()
        made.serve_forever()
    return 0


def server(port: int, first: dict[str, Any], recorder: Recorder) -> ThreadingHTTPServer:
    if not 0 <= port <= 65535:
        raise UserError(f"--port: expected 0 to 65535, got {port}")
    try:
        return _Server((LOOPBACK, port), partial(_Handler, first, recorder, Lock()))
    except OSError as error:
        raise UserError(
            f"--port: {port} cannot be served ({error.strerror}); name another one, or 0 for any"
        ) from error


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away while it was answered is no error; anything else is one of ours, and is told."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """GET / is the page, GET /recording?mask=... a recording as JSON; there is nothing else."""

    timeout = 30  # seconds for a request to come: an idle connection holds no thread for long

    def __init__(self, first: dict[str, Any], recorder: Recorder, alone: Any, *given: Any) -> None:
        self._first, self._recorder, self._alone = first, recorder, alone
        super().__init__(*given)

    def do_GET(self) -> None:
        foreign = self._foreign()
        if foreign is not None:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", foreign)
            return
        try:
            asked = urlsplit(self.path)
        except ValueError as error:
            self._answer(HTTPStatus.BAD_REQUEST, "text/plain", f"the address cannot be read: {error}")
            return
        if len(asked.query) > MOST_QUERY:
            self._answer(HTTPStatus.REQUEST_URI_TOO_LONG, "text/plain", f"at most {MOST_QUERY} characters are read")
        elif asked.path == "/":
            self._page(asked.query)
        elif asked.path == "/recording":
            self._answer(HTTPStatus.OK, "application/json", to_json(self._recorded(asked.query)))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there are / and /recording")

    def _foreign(self) -> str | None:
        """Why a request is another site's, which shall neither read our answers nor have us compute; None: it is ours.

        A site's own name may lead to this machine (its Host tells), and its pages may ask for ours: browsers then say
        whence in Origin or Sec-Fetch-Site. Programs that are no browsers say neither.
        """
        hosts, origins, sites = (self.headers.get_all(name, []) for name in ("Host", "Origin", "Sec-Fetch-Site"))
        name, _, port = hosts[0].partition(":") if len(hosts) == 1 else ("", "", "")
        if name not in _NAMES or not (port.isdigit() and port.isascii()):
            return f"only http://{LOOPBACK} and its port are served"
        if any(origin != f"http://{hosts[0]}" for origin in origins) or any(site not in _OURS for site in sites):
            return f"another site asks for this; open http://{hosts[0]}/ by its address instead"
        return None

    def _page(self, query: str) -> None:
        data = self._recorded(query) if query else self._first
        if "refused" in data:
            self._answer(HTTPStatus.BAD_REQUEST, "text/plain", data["refused"])
        else:
            self._answer(HTTPStatus.OK, "text/html", page(data, live=True))

    def _recorded(self, query: str) -> dict[str, Any]:
        """One at a time. A refusal is an answer: browsers would write another status into their console."""
        try:
            with self._alone:
                return self._recorder(dict(parse_qsl(query, keep_blank_values=True)))
        except UserError as error:
            return {"refused": str(error)}
        except MemoryError as error:
            return {"refused": f"out of memory: {error}"}

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet: whoever watches the page needs no list of requests."""
