"""Every cache, with a disk whose nth step fails: calls go on, and later ones are right."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from tests.disk.users import ERRORS, User, needs_cc
from tests.faults import every_step, failing
from tilewise.kernels import disk
from tilewise.kernels.cuda import simulator


@needs_cc
@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_a_call_goes_on_whichever_step_fails(user: User, cache: Path, error: int, forever: bool) -> None:
    """With an empty cache, and with one that has the kernel. The next process finds it, or makes it, and is right."""
    for has_it in (False, True):

        def act(has_it: bool = has_it) -> int:
            with failing(Path("/nowhere"), 0, 0):  # what is done before does not count
                shutil.rmtree(cache, ignore_errors=True)
                if has_it:
                    assert user.again() == 42
            return user.again()

        for step, found in every_step(cache, act, error, forever):
            assert found == 42, f"step {step}: {found}"
            assert user.again() == user.again() == 42
            whole = user.made
            assert user.again() == 42 and user.made == whole, "kept, once nothing fails"
            assert forever or not list(cache.rglob(".*")), "nothing unfinished is left, if it can be removed"


@needs_cc
def test_a_call_goes_on_where_nothing_can_be_made(
    user: User, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder below a file cannot be made by the superuser either. It is told once."""
    cache.touch()
    for _ in range(2):
        assert user.act() == 42
        simulator.compile_source.cache_clear()
    assert user.made <= 2 or user.part == "cuda", "found again by this process"
    assert len([x for x in caplog.messages if "is not kept" in x]) == 1
    assert cache.read_bytes() == b""


@needs_cc
def test_where_nothing_at_all_can_be_written_the_error_says_what_to_do(user: User, cache: Path, tmp_path: Path) -> None:
    """The cache and temporary folders alike. Cubins need no file, nor what CuTe has compiled in memory."""
    with failing(tmp_path, errno.EROFS, at=1, forever=True):
        if user.part in ("cuda", "cute"):
            assert user.act() == 42
        else:
            with pytest.raises(disk.NoRoomError, match=r"Read-only file system.*set (TILEWISE_CACHE or )?TMPDIR"):
                user.act()
    assert user.again() == 42


@needs_cc
def test_every_step_in_temporary_folders(user: User, cache: Path, tmp_path: Path) -> None:
    """A compiler's own: a full disk there is told as such."""
    for step, found in every_step(tmp_path / "temporary", user.again, errno.ENOSPC):
        assert found == 42 or (isinstance(found, disk.NoRoomError) and "set TMPDIR" in str(found)), (step, found)
        assert user.again() == 42
        shutil.rmtree(cache)
