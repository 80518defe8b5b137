"""A cache of each test's own, and those who use it."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disk.users import COMPILER, LIBRARY, USERS, User, forget_all
from tilewise.kernels.cuda import simulator


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache, and a process that remembers nothing."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    forget_all(monkeypatch)
    yield tmp_path / "cache"
    simulator.compile_source.cache_clear()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("library")
    (folder / "made.c").write_text(LIBRARY)
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", "made.so", "made.c"], cwd=folder, check=True)
    return (folder / "made.so").read_bytes()


@pytest.fixture(params=USERS, ids=lambda kind: kind.__name__)
def user(request: pytest.FixtureRequest, cache: Path, monkeypatch: pytest.MonkeyPatch, library: bytes) -> User:
    found: User = request.param(monkeypatch, library)
    return found
