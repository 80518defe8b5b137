"""`tilewise explain`: the page as text, the command, and the server: what they hold, and what they refuse."""

from __future__ import annotations

import base64
import http.client
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise import cli, reference, schedule
from tilewise.cli import UserError, explain, explain_server
from tilewise.cli.explain import Asked
from tilewise.explainer import page as page_module
from tilewise.explainer.page import page
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel
from tilewise.spec import Attention, Shape, Tile
from tilewise.text import parse

SMALL = Asked(mask="causal() & window(20)", n_q=48, n_k=48, block="16", d=8)


@pytest.fixture(autouse=True)
def _no_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiler takes seconds for each variant; test_explainer_parts.py runs it."""
    monkeypatch.setattr(CudaSimKernel, "unavailable", lambda self: "left out by this test")


def _data(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="recording">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def _floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_asks_for_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    to = tmp_path / "page.html"
    assert cli.main(["explain", "--mask", "causal() & window(96)", "--n", "256", "--block", "64", "-o", str(to)]) == 0
    assert "16 tiles (7 EMPTY, 9 PARTIAL, 0 FULL)" in capsys.readouterr().out
    text = to.read_text(encoding="utf-8")
    assert len(text.encode()) < 2_000_000
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", text)
    assert "connect-src 'none'" in text
    assert "{{" not in text.split('id="recording"')[0]


def test_its_numbers_are_the_references() -> None:
    data = explain.recording(SMALL)
    rng = np.random.default_rng(SMALL.seed)
    q, k, v = (rng.standard_normal((1, 1, 48, 8), dtype=np.float32) for _ in range(3))
    spec = Attention(8**-0.5, parse(SMALL.mask))
    out, lse = reference.forward(spec, q * np.float32(SMALL.magnitude), k, v)
    np.testing.assert_allclose(_floats(data["out"]).reshape(48, 8), out[0, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(_floats(data["lse"]), lse[0, 0], rtol=1e-5)
    plan = schedule.plan(spec, Shape(1, 1, 1, 48, 48, 8, 8), Tile(16, 16))
    assert sum(data["steps"][-1]["tiled"]) == plan.bytes_tiled == data["plan"]["tiled"]
    assert sum(data["steps"][-1]["naive"]) == plan.bytes_naive == data["plan"]["naive"]


def test_a_text_cannot_end_the_script() -> None:
    data = explain.recording(SMALL)
    text = page({**data, "asked": {**data["asked"], "mask": "</script><script>alert(1)</script>"}})
    assert "<script>alert" not in text
    assert _data(text)["asked"]["mask"].startswith("</script>")


def test_every_asset_is_in_the_page() -> None:
    names = {path.name for path in page_module.ASSETS.iterdir()}
    assert names == {"page.html", "page.css", *page_module.SCRIPTS}
    assert all(len((page_module.ASSETS / name).read_text().splitlines()) < 400 for name in names)


@pytest.mark.parametrize("mask", ["", "K < 0", "causal()", "document([0, 0, 1, 1, 1, 2])"])
@pytest.mark.parametrize(("n_q", "n_k", "block"), [(6, 6, "4x2"), (1, 6, "16"), (6, 6, "1")])
def test_odd_shapes(mask: str, n_q: int, n_k: int, block: str) -> None:
    if mask.startswith("document") and n_q != n_k:
        mask = "document([0], [0, 0, 1, 1, 1, 2])"
    data = _data(page(explain.recording(Asked(mask=mask, n_q=n_q, n_k=n_k, block=block, d=4))))
    assert len(data["steps"]) == data["plan"]["grid"][0] * data["plan"]["grid"][1]


def test_the_size_is_known_before_it_is_recorded() -> None:
    data = explain.recording(SMALL)
    taken = sum(
        len(x) for step in data["steps"] if step["numbers"] is not None
        for x in [*step["numbers"]["bare"].values(), *(x for x in step["numbers"].values() if isinstance(x, str))]
    )  # fmt: skip
    plan = schedule.plan(Attention(1.0, parse(SMALL.mask)), Shape(1, 1, 1, 48, 48, 8, 8), Tile(16, 16))
    assert taken == pytest.approx(page_module.recorded_bytes(plan), rel=0.02)


# -- what is refused --------------------------------------------------------------------------------------------------

REFUSED = [
    (["--n", "0"], "--n-q: expected 1 to 4096, got 0"),
    (["--n-k", "5000"], "--n-k: expected 1 to 4096, got 5000"),
    (["--d", "0"], "--d: expected 1 to 256, got 0"),
    (["--head", "2", "--heads", "2"], "--head: expected 0 to 1, got 2"),
    (["--magnitude", "nan"], "--magnitude: expected a number above 0, at most 10000, got nan"),
    (["--block", "4xx4"], "--block: expected a size such as 128 or 64x128, got '4xx4'"),
    (["--block", "2"], "--block: 2 x 2 makes 128 x 128 tiles, 1024 in all is the most; take larger tiles"),
    (["--mask", "", "--n", "1024"], "--n-q: the recorded numbers would take"),
    (["--mask", "__import__('os')"], "--mask: in \"__import__('os')\""),
    (["--mask", "S > 0"], "reads the score S"),
    (["--score", "alibi(8)"], "--score: "),
    (["--serve", "--port", "70000"], "--port: expected 0 to 65535, got 70000"),
]


@pytest.mark.parametrize(("options", "told"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED])
def test_mistakes(options: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["explain", "-o", str(tmp_path / "page.html"), *options]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["explain", "--n", "16", "--block", "8", "-o", str(tmp_path / "missing" / "page.html")]) == 1
    assert "No such file" in capsys.readouterr().err


# -- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[int]:
    made = explain_server.server(0, explain.recording(SMALL), lambda form: explain.recording(Asked.of_fields(form)))
    assert made.server_address[0] == "127.0.0.1", "nobody else can reach it"
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made.server_port
    made.shutdown()
    thread.join()
    made.server_close()


def _get(port: int, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    told = answer.status, answer.read().decode()
    connection.close()
    return told


def test_the_server_records_what_is_asked_for(served: int) -> None:
    status, text = _get(served, "/")
    assert status == 200
    assert 'data-mode="live"' in text
    assert _data(text)["asked"]["mask"] == SMALL.mask
    status, text = _get(served, "/recording?mask=causal()&n_q=32&n_k=40&block=8x16&d=4&seed=7")
    data = json.loads(text)
    assert (status, data["plan"]["grid"], data["asked"]["seed"]) == (200, [4, 3], 7)
    status, text = _get(served, "/?mask=causal()&n_q=32&n_k=32&block=8")
    assert (status, _data(text)["call"]["nQ"]) == (200, 32)


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("mask=__import__('os').system('true')", "mask: in"),
        ("n_q=ten", "n_q: expected a whole number, got 'ten'"),
        ("magnitude=big", "magnitude: expected a number, got 'big'"),
        ("n_q=-1", "n_q: expected 1 to 4096, got -1"),
        ("out=/etc/passwd", "out: there is no such field"),
        ("block=1", "block: 1 x 1 makes 256 x 256 tiles"),
    ],
)
def test_the_server_refuses_with_a_reason(served: int, query: str, told: str) -> None:
    status, text = _get(served, f"/recording?{query}")
    assert status == 200
    assert json.loads(text)["refused"].startswith(told)
    assert _get(served, f"/?{query}")[0] == 400


def test_the_server_serves_nothing_else(served: int) -> None:
    assert _get(served, "/etc/passwd")[0] == 404
    assert _get(served, "/../pyproject.toml")[0] == 404
    assert _get(served, "/", Host="example.com")[0] == 403, "a name that leads here is not ours"
    assert _get(served, "/", Host=f"localhost:{served}")[0] == 200
    assert _get(served, f"/recording?mask={'x' * 20000}")[0] == 414
    with pytest.raises(UserError, match=f"--port: {served} cannot be served"):
        explain_server.server(served, {}, lambda form: {})


def _raw(port: int, *lines: str) -> str:
    """What comes back for these lines, which no HTTP library would send."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode("latin-1"))
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["GET http://[ HTTP/1.1", "Host: {host}"], 400),
        (["GET http://[::1/?x HTTP/1.1", "Host: {host}"], 400),
        (["GET /\x00\xff?%ff=%00 HTTP/1.1", "Host: {host}"], 404),
        (["POST /recording HTTP/1.1", "Host: {host}"], 501),
        (["GET /recording?mask=%ff%00 HTTP/1.1", "Host: {host}"], 200),
        (["GET /recording?seed=" + "9" * 5000 + " HTTP/1.1", "Host: {host}"], 200),
        (["GET / HTTP/1.1"], 403),
        (["GET / HTTP/1.1", "Host: "], 403),
        (["GET / HTTP/1.1", "Host: 127.0.0.1"], 403),
        (["GET / HTTP/1.1", "Host: evil.example:{port}"], 403),
        (["GET / HTTP/1.1", "Host: 127.0.0.1.evil.example:{port}"], 403),
        (["GET / HTTP/1.1", "Host: {host}", "Host: evil.example:{port}"], 403),
        (["GET / HTTP/1.1", "Host: {host}", "Origin: https://evil.example"], 403),
        (["GET / HTTP/1.1", "Host: {host}", "Origin: null"], 403),
        (["GET / HTTP/1.1", "Host: {host}", "Origin: http://127.0.0.1:1"], 403),
        (["GET / HTTP/1.1", "Host: {host}", "Origin: http://{host}", "Origin: https://evil.example"], 403),
        (["GET / HTTP/1.1", "Host: {host}", "Sec-Fetch-Site: cross-site"], 403),
        (["GET / HTTP/1.1", "Host: {host}", "Sec-Fetch-Site: same-site"], 403),
        (["GET / HTTP/1.1", "Host: {host}", "Origin: http://{host}", "Sec-Fetch-Site: same-origin"], 200),
        (["GET / HTTP/1.1", "Host: {host}", "Sec-Fetch-Site: none"], 200),
        (["GET / HTTP/1.1", "Host: localhost:9000"], 200),  # a forwarded port
    ],
)
def test_the_server_answers_hostile_lines(
    served: int, capfd: pytest.CaptureFixture[str], lines: list[str], status: int
) -> None:
    told = _raw(served, *(line.format(host=f"127.0.0.1:{served}", port=served) for line in lines))
    assert told.startswith(f"HTTP/1.0 {status} ")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("header", ["Origin: https://evil.example", "Sec-Fetch-Site: cross-site"])
def test_nothing_is_computed_for_another_site(header: str) -> None:
    asked: list[Any] = []
    made = explain_server.server(0, {}, lambda form: asked.append(form) or {})  # type: ignore[func-returns-value]
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        host = f"Host: 127.0.0.1:{made.server_port}"
        assert "HTTP/1.0 403 " in _raw(made.server_port, "GET /recording?mask=causal() HTTP/1.1", host, header)
        assert asked == []
        assert "HTTP/1.0 200 " in _raw(made.server_port, "GET /recording?mask=causal() HTTP/1.1", host)
        assert asked == [{"mask": "causal()"}]
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def test_a_browser_that_goes_away_is_no_error(served: int, capfd: pytest.CaptureFixture[str]) -> None:
    connection = socket.create_connection(("127.0.0.1", served), timeout=60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it resets it
    connection.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{served}\r\n".encode())
    connection.close()
    assert _get(served, "/")[0] == 200
    assert capfd.readouterr().err == ""


def test_without_a_compiler_the_page_says_why() -> None:
    told = explain.recording(SMALL)["timeline"]
    assert told == {"missing": "The timeline is the CUDA simulator's, which did not run: left out by this test."}
