"""What commands and tuning keep, and what they say where they cannot."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.disk.users import ERRORS, Cubins
from tests.faults import every_step, failing
from tilewise.cli import main
from tilewise.kernels import disk
from tilewise.kernels.cuda import compiler


def test_tuned_choices_with_every_step_failing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept, or it is told that they are not; what was there before stays."""
    from tilewise.kernels.triton import tuned
    from tilewise.kernels.triton.choices import Calls, Choice, Pass
    from tilewise.spec import Tile

    monkeypatch.setattr(tuned, "gpu_name", lambda device: "A GPU")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.9"))
    plain, masked = (Pass.FORWARD, Calls.PLAIN, 64), (Pass.FORWARD, Calls.MASKED, 64)
    old, new = Choice(Tile(16, 16), 4, 1), Choice(Tile(32, 16), 4, 2)
    for error in ERRORS:
        shutil.rmtree(cache, ignore_errors=True)
        tuned.save("A GPU", {plain: old})
        for _, found in every_step(cache, lambda: tuned.save("A GPU", {masked: new}), error):
            tuned.choices.cache_clear()
            choices = tuned.choices("cuda:0")
            assert isinstance(found, OSError) or choices[masked] == new
            assert choices.get(plain, old) == old
    tuned.choices.cache_clear()
    (cache / "triton").chmod(0o777)
    assert tuned.choices("cuda:0") == {}
    with pytest.raises(disk.UntrustedError, match="chmod"):
        tuned.save("A GPU", {plain: old})
    tuned.choices.cache_clear()


def test_warmup_says_that_nothing_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library: bytes
) -> None:
    Cubins(monkeypatch, b"code")
    monkeypatch.setattr(compiler, "without_nvrtc", lambda: None)
    monkeypatch.setattr(compiler, "prebuilt", lambda source, arch: None)
    cache.touch()
    assert main(["warmup", "--arch", "sm_90a", "--variants", "full", "--n", "512"]) == 2
    assert f"{cache} cannot be written; set TILEWISE_CACHE" in capsys.readouterr().err


def test_a_command_tells_which_file_it_could_not_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    with failing(tmp_path, errno.ENOSPC, at=1):
        assert main(["explain", "--n", "8", "--out", str(out)]) == 1
    assert capsys.readouterr().err == f"tilewise: {out}: No space left on device\n"


def test_doctor_tells_which_cache_is_used_and_why_one_is_not(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewise.cli.doctor import _caches

    monkeypatch.delenv("TILEWISE_CUTE_KERNELS", raising=False)
    assert list(_caches()) == [f"cache: {cache}: 0 files, 0 B"]
    disk.user_cache("cute/4.8").add("kernel.so", bytes(1000))
    disk.user_cache("cuda").add("kernel.cubin", bytes(1000))
    assert list(_caches()) == [f"cache: {cache}: 2 files, 2.0 KiB"]
    (cache / "cute").chmod(0o777)
    (told,) = _caches()
    assert told.startswith(f"cache: {cache} is not used: other users may write {cache}/cute (mode 0777)")
    assert told.endswith("or `chmod -R go-w` it if nobody else wrote there")
    (cache / "cute").chmod(0o700)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (told,) = _caches()
    assert told.startswith(f"cache: {cache}: 2 files, 2.0 KiB; nothing more is kept there: {cache} cannot be written")
    monkeypatch.undo()
    monkeypatch.setenv("TILEWISE_CACHE", str(cache))
    (tmp_path / "kernels").mkdir(mode=0o700)
    monkeypatch.setenv("TILEWISE_CUTE_KERNELS", str(tmp_path / "kernels"))
    assert list(_caches())[1] == f"kernels built ahead (TILEWISE_CUTE_KERNELS): {tmp_path / 'kernels'}: 0 files, 0 B"
    monkeypatch.delenv("TILEWISE_CACHE")
    monkeypatch.setattr(disk, "cache_root", lambda: None)
    assert "this user has no home folder; set TILEWISE_CACHE" in next(_caches())
