"""Where the cache is, and what serves where there is none."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from tests.disk.users import USERS, Cubins, User, needs_cc
from tilewise.kernels import disk


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_no_relative_path_is_a_cache(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.delenv("TILEWISE_CACHE")
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(disk, "_home_of_user", lambda: "/home/someone")
    below = Path("/home/someone", *(("Library", "Caches") if system == "darwin" else (".cache",)), "tilewise")
    for home in (None, "", ".", "home"):
        for named in (None, "", ".", "cache"):
            for name, value in (("HOME", home), ("XDG_CACHE_HOME", named)):
                if value is None:
                    monkeypatch.delenv(name, raising=False)
                else:
                    monkeypatch.setenv(name, value)
            assert disk.cache_root() == below
    monkeypatch.setenv("TILEWISE_CACHE", "here")
    assert disk.cache_root() == Path.cwd() / "here", "which the user asked for"
    monkeypatch.delenv("TILEWISE_CACHE")
    monkeypatch.setenv("HOME", "/home/other")
    assert disk.cache_root() == Path("/home/other", *below.parts[3:])


@needs_cc
@pytest.mark.parametrize("kind", USERS)
def test_without_a_home_a_process_has_its_own(
    kind: type[User], cache: Path, monkeypatch: pytest.MonkeyPatch, library: bytes, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A user that the system does not know, as containers have them."""

    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 54321")

    monkeypatch.delenv("TILEWISE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(disk, "_home_of_user", unknown)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    user = kind(monkeypatch, library)
    assert user.act() == 42
    assert "no home folder; set TILEWISE_CACHE" in caplog.text
    assert list((tmp_path / "work").iterdir()) == []
    own = list((tmp_path / "temporary").iterdir())
    assert kind is Cubins or len(own) == 1
    for folder in own:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        disk._remove(folder, os.getpid() + 1)
        assert folder.is_dir(), "the child of a fork leaves it alone"
        disk._remove(folder, os.getpid())
        assert not folder.exists()


def test_a_process_alone_goes_on_if_its_folder_went(cache: Path, tmp_path: Path) -> None:
    """A parent that forked has ended, and removed it."""
    cache.touch()
    files = disk.user_cache("simulator")
    first = files.keep("kernel", b"code")
    shutil.rmtree(first.parent.parent)
    assert files.read("kernel") is None
    assert files.keep("kernel", b"code") != first
    assert files.read("kernel") == b"code"
