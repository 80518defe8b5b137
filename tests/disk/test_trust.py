"""Files and folders that others may write: nothing is loaded from them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.disk.users import Cute, User, needs_cc
from tilewise.kernels import disk
from tilewise.kernels.disk import Files


@needs_cc
@pytest.mark.parametrize("what", ["file", "folder", "root"])
@pytest.mark.parametrize("how", ["mode", "owner"])
def test_what_others_may_write_is_not_loaded(
    user: User, cache: Path, what: str, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert user.again() == 42
    planted = list(cache.rglob("*.so")) or list(cache.rglob("*.cubin"))
    for path in planted:
        Files(path.parent).add(path.name, b"planted")
        target = {"file": path, "folder": path.parent, "root": cache}[what]
        _open_to_others(target, how, monkeypatch)
    before = user.made
    assert user.again() == 42, "not what was planted"
    assert user.made > before
    told = "\n".join(caplog.messages)
    assert "is passed over: " in told
    assert ("chmod -R go-w" if how == "mode" else "make a copy of your own") in told
    if what != "file":
        assert all(path.read_bytes().startswith(b"planted") for path in planted), "nor written to"


def _open_to_others(path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "mode":
        path.chmod(0o777)
        return
    try:
        os.chown(path, 54321, -1)
    except PermissionError:  # not the superuser: then it is only said to be someone else's
        look = disk._written_by_others

        def given_away(found: Path, about: os.stat_result) -> str | None:
            return look(found, os.stat_result((*about[:4], 54321, *about[5:10])) if found == path else about)

        monkeypatch.setattr(disk, "_written_by_others", given_away)


@needs_cc
def test_a_cache_of_the_superuser_is_trusted(user: User, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an image of a container has it; only its owner may write it, and kernels are read."""
    assert user.again() == 42
    before = user.made
    if os.getuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert user.again() == 42
    assert user.made == before


@needs_cc
def test_caches_are_made_for_their_owner_alone(user: User, cache: Path) -> None:
    before = os.umask(0o002)
    try:
        assert user.again() == 42
    finally:
        os.umask(before)
    for path in (cache, *cache.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    made = user.made
    assert user.again() == 42 and user.made == made


@needs_cc
def test_what_was_built_ahead_is_guarded_and_stays(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that the user named: a library that does not load here may load elsewhere."""
    user = Cute(monkeypatch, library)
    ahead = Files(tmp_path / "kernels", guarded=False)
    monkeypatch.setenv("TILEWISE_CUTE_KERNELS", str(ahead.folder))
    ahead.add("kernel.so", library)
    assert user.again() == 42 and user.made == 0
    ahead.folder.chmod(0o775)
    assert user.again() == 42 and user.made == 1
    assert "chmod -R go-w" in caplog.text
    ahead.folder.chmod(0o755)
    user.name = "another.so"
    bad = ahead.add(user.name, b"of another machine")
    assert user.again() == 42 and user.made == 2
    assert "does not load, and is passed over" in caplog.text
    assert bad.exists()
