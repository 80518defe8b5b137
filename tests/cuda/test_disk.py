"""Compiled kernels on disk, and when a kernel is compiled at all."""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path

import pytest

from tilewise.kernels.cuda import compiler, disk
from tilewise.kernels.cuda.disk import Files
from tilewise.kernels.cuda.source import Source


def test_what_is_added_is_found(tmp_path: Path) -> None:
    files = Files(tmp_path / "deep" / "folder")
    assert files.read("kernel") is None
    path = files.add("kernel", b"machine code")
    assert files.read("kernel") == b"machine code"
    assert files.path("kernel") == path
    assert path.read_bytes().startswith(b"machine code"), "loaders read the file itself"


@pytest.mark.parametrize("damage", [b"", b"machine", b"x" * 200])
def test_a_damaged_file_is_removed(tmp_path: Path, damage: bytes) -> None:
    files = Files(tmp_path)
    files.add("kernel", b"machine code").write_bytes(damage)
    assert files.read("kernel") is None
    assert list(tmp_path.iterdir()) == []


def test_one_flipped_bit_is_seen(tmp_path: Path) -> None:
    files = Files(tmp_path)
    path = files.add("kernel", bytes(1000))
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    assert files.read("kernel") is None


def _write_often(folder: str, letter: bytes) -> None:
    for _ in range(200):
        Files(Path(folder)).add("kernel", letter * 100_000)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.add("kernel", b"a" * 100_000)
    writers = [
        multiprocessing.get_context("fork").Process(target=_write_often, args=(str(tmp_path), x)) for x in (b"b", b"c")
    ]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        content = files.read("kernel")
        assert content is not None
        assert len(content) == 100_000
        seen |= set(content)
    for writer in writers:
        writer.join()
    assert seen <= set(b"abc")
    assert [path.name for path in tmp_path.iterdir()] == ["kernel"], "nothing unfinished is left"


def test_the_oldest_are_forgotten(tmp_path: Path) -> None:
    import os

    files = Files(tmp_path, most=3)
    for i in range(5):
        path = files.add(str(i), b"code")
        os.utime(path, (i, i))
    assert files.read("0") is None
    assert files.read("4") == b"code"
    assert len(list(tmp_path.iterdir())) == 3


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    assert disk.user_cache("cuda").folder == tmp_path / "cuda"
    monkeypatch.delenv("TILEWISE_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk.user_cache("cuda").folder == tmp_path / "xdg" / "tilewise" / "cuda"


# -- compiling --------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The architectures that a compiler, which is not there, was asked for."""
    asked: list[str] = []

    def pretend(source: Source, arch: str) -> bytes:
        asked.append(arch)
        return f"{source.text} for {arch}".encode()

    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_compile", pretend)
    monkeypatch.setattr(compiler, "version", lambda: "nvrtc 13.0")
    return asked


SOURCE = Source("kernel", "tiled", 128, 0)


def test_a_kernel_is_compiled_once_and_announced_once(compiled: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tilewise")
    assert compiler.machine_code(SOURCE, "sm_90a") == b"kernel for sm_90a"
    assert "compiling the CUDA kernel 'tiled' for sm_90a" in caplog.text
    caplog.clear()
    assert compiler.machine_code(SOURCE, "sm_90a") == b"kernel for sm_90a"
    assert caplog.text == ""
    assert compiled == ["sm_90a"]


def test_what_makes_another_kernel(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, architecture, options and the compiler's version; each compiles anew."""
    compiler.machine_code(SOURCE, "sm_90a")
    compiler.machine_code(SOURCE, "sm_80")
    compiler.machine_code(Source("another", "tiled", 128, 0), "sm_90a")
    monkeypatch.setattr(compiler, "version", lambda: "nvrtc 13.1")
    compiler.machine_code(SOURCE, "sm_90a")
    monkeypatch.setitem(compiler.OPTIONS, "fma", False)
    compiler.machine_code(SOURCE, "sm_90a")
    assert len(compiled) == 5


def test_a_cache_that_cannot_be_written_is_told(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "a file"))
    assert compiler.machine_code(SOURCE, "sm_90a") == b"kernel for sm_90a"
    assert "the compiled kernel is not kept" in caplog.text
