"""The check of installs tells what does not resolve, and what it could not ask."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import check_install

ROOT = Path(__file__).parent.parent
PYPROJECT = """
[project]
name = "probe"
version = "1"
requires-python = ">=3.10"
dependencies = ["numpy>=1.24"]

[project.optional-dependencies]
broken = ["torch==2.13.0", "triton==3.9.0"]
"""


def run(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tests" / "check_install.py", *script.split()],
        capture_output=True, text=True, check=False, cwd=folder, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.slow  # a minute of waiting for the index; `make test` resolves the real extras beside the tests
@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's wheels name a Triton on Linux alone")
def test_pins_that_exclude_each_other_are_told(tmp_path: Path) -> None:
    """PyTorch 2.13.0 names Triton 3.7.1. Its CPU wheels name none, and hide the conflict where pip finds one."""
    if not check_install.index_answers(tmp_path):
        pytest.skip("the package index cannot be reached")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    for name in ("setup.py", "README.md", "LICENSE", "tilewise/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    told = check_install.failures(tmp_path)
    names = [name for name, _, _ in check_install.resolutions(check_install.read_project(tmp_path))]
    assert [line.partition(": ")[0] for line in told] == names
    assert all("triton" in line for line in told)


def test_the_machine_s_own_indexes_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.setenv("UV_INDEX_URL", "file:///wheels")
    kept = check_install.environment()
    assert [name for name in kept if name.startswith(("PIP_", "UV_"))] == ["PIP_CONFIG_FILE"]
    assert kept["PIP_CONFIG_FILE"] == os.devnull


def test_every_extra_is_resolved_in_every_way() -> None:
    project = check_install.read_project(ROOT)
    names = [name for name, _, _ in check_install.resolutions(project)]
    assert names[0] == "uv lock"
    for extra in project["optional-dependencies"]:
        assert f"extra {extra}, pip" in names
        assert f"extra {extra}, lowest versions, Python 3.10" in names
        assert f"extra {extra}, lowest versions, Python 3.14" in names


def test_without_a_network_it_passes_and_says_so_or_fails_where_it_must(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens: a connection is refused at once
        proxy = f"http://127.0.0.1:{taken.getsockname()[1]}"
        offline = {"HTTPS_PROXY": proxy, "https_proxy": proxy, "ALL_PROXY": proxy, "NO_PROXY": "", "no_proxy": ""}
        stamp = tmp_path / "resolved"
        done = run(str(stamp), tmp_path, **offline, TILEWISE_REQUIRE_INDEX="0")
        assert (done.returncode, "make check-install" in done.stderr) == (0, True), done.stderr
        assert not stamp.exists(), "what was not checked is checked the next time"
        done = run(str(stamp), tmp_path, **offline, TILEWISE_REQUIRE_INDEX="1")
        assert done.returncode == 1
        assert "TILEWISE_REQUIRE_INDEX is set, and the package index cannot be reached" in done.stderr
