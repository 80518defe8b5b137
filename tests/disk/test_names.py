"""What names of compiled files depend on: compilers, their versions, the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.disk.users import Simulator, TileLang, needs_cc
from tilewise.kernels import disk, toolchain
from tilewise.kernels.cuda import simulator
from tilewise.kernels.disk import Files


@needs_cc
def test_libraries_of_another_machine_are_others(cache: Path, monkeypatch: pytest.MonkeyPatch, library: bytes) -> None:
    """Two machines with one home folder; and two versions side by side."""
    from tilewise.kernels.tilelang import compiler as tilelang

    versions = {"tilelang": "0.1.15"}
    monkeypatch.setattr(tilelang, "_version", lambda package: versions.get(package, "1"))
    for kind in (Simulator, TileLang):
        user = kind(monkeypatch, library)
        changes: list[Callable[[], None]] = [
            lambda: monkeypatch.setattr(toolchain, "_features", lambda: "avx512f"),
            lambda: monkeypatch.setattr(toolchain, "_libc", lambda: ("glibc", "2.99")),
            lambda: monkeypatch.setattr(toolchain, "version", lambda command: "c++ 99"),
        ]
        if kind is TileLang:
            changes.append(lambda: versions.update(tilelang="0.1.16"))
        one = 1 if kind is TileLang else 2  # the simulator has a runtime, too
        for i, change in enumerate((lambda: None, *changes)):
            change()
            for name in (toolchain.machine, simulator._runtime_key, tilelang._made_by):
                name.cache_clear()
            user.again()
            user.again()
            assert user.made == one * (i + 1), i
        monkeypatch.undo()
        monkeypatch.setenv("TILEWISE_CACHE", str(cache))
        monkeypatch.setattr(tilelang, "_version", lambda package: versions.get(package, "1"))


def test_nvcc_is_a_part_of_names(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.kernels.tilelang import compiler as tilelang

    names = set()
    for release in ("13.0", "13.1"):
        folder = tmp_path / release
        folder.mkdir()
        (folder / "nvcc").write_text(f"#!/bin/sh\necho release {release}\n")
        (folder / "nvcc").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        names.add(tilelang.made_by("sm_90a"))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O1")
    names.add(tilelang.made_by("sm_90a"))
    assert len(names) == 3
    assert all(name.startswith(f"{platform.machine()}-") for name in names)


def test_a_compiler_that_says_nothing_is_told_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cc").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    told = toolchain.version(("cc",))
    (tmp_path / "cc").write_text("#!/bin/sh\n# newer\nexit 1\n")
    assert told.startswith(str(tmp_path)) and toolchain.version(("cc",)) != told
    assert toolchain.version(("no such compiler",)) == "none"


def test_without_a_compiler_a_library_of_any_compiler_is_taken(
    cache: Path, monkeypatch: pytest.MonkeyPatch, library: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """One that does not load here stays for those who made it."""
    from tilewise.kernels.tilelang import compiler as tilelang

    user = TileLang(monkeypatch, library)
    made_here = toolchain.ARCHITECTURE
    disk.user_cache(f"tilelang/{made_here}-9-newest").add("kernel.so", b"not for this machine")
    disk.user_cache(f"tilelang/{made_here}-1-older").add("kernel.so", library)
    disk.user_cache("tilelang/vax-10-other").add("kernel.so", library)
    monkeypatch.setattr(tilelang, "not_installed", lambda target: "it needs tilelang")
    assert user.again() == 42 and user.made == 0
    assert "does not load, and is passed over" in caplog.text
    assert Files(cache / "tilelang" / f"{made_here}-9-newest").path("kernel.so") is not None
