"""Compiled kernels on disk, and when a kernel is compiled at all."""

from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path

import pytest

import tilewise as tw
from tilewise.expr import Expr
from tilewise.kernels import disk
from tilewise.kernels.cuda import compiler, prebuild
from tilewise.kernels.cuda.backward_rungs import BACKWARD_SM90
from tilewise.kernels.cuda.choice import HOPPER, backward_sources_of, source_of
from tilewise.kernels.cuda.source import Source
from tilewise.kernels.disk import Files
from tilewise.spec import Attention, Shape


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


def test_text_is_just_that(tmp_path: Path) -> None:
    """For people to read: nothing behind it."""
    files = Files(tmp_path)
    path = files.add_text("a.json", "[1]\n")
    assert path.read_text() == files.text("a.json") == "[1]\n"
    path.write_text("[2]\n")
    assert files.text("a.json") == "[2]\n", "people may change it"


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
    files = Files(tmp_path, most=3)
    for i in range(5):
        path = files.add(str(i), b"code")
        os.utime(path, (i, i))
    assert files.read("0") is None
    assert files.read("4") == b"code"
    assert len(list(tmp_path.iterdir())) == 3


def test_what_is_in_use_is_not_the_oldest(tmp_path: Path) -> None:
    files = Files(tmp_path, most=2)
    for i in range(2):
        os.utime(files.add(str(i), b"code"), (i, i))
    assert files.read("0") == b"code"
    files.add("2", b"code")
    assert (files.read("0"), files.read("1")) == (b"code", None)


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
    monkeypatch.setattr(compiler, "by_nvrtc", pretend)
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


# -- compiled ahead ---------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Files:
    files = Files(tmp_path / "prebuilt")
    monkeypatch.setattr(compiler, "PREBUILT", files)
    return files


def test_kernels_compiled_ahead_are_found_whatever_the_compiler(
    shipped: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compiler.prebuilt(SOURCE, "sm_90a") is None
    prebuild.build([SOURCE], "sm_90a", lambda source, arch: b"code of " + source.text.encode())
    assert "1 kernels for sm_90a" in capsys.readouterr().out
    monkeypatch.setattr(compiler, "version", lambda: "another")
    assert compiler.prebuilt(SOURCE, "sm_90a") == b"code of kernel"
    assert compiler.prebuilt(SOURCE, "sm_80") is None
    assert compiler.prebuilt(Source("another", "tiled", 128, 0), "sm_90a") is None


def test_kernels_of_old_sources_go(shipped: Files, capsys: pytest.CaptureFixture[str]) -> None:
    compiled: list[str] = []

    def pretend(source: Source, arch: str) -> bytes:
        compiled.append(source.text)
        return b"code"

    new = Source("new", "tiled", 128, 0)
    prebuild.build([SOURCE], "sm_90a", pretend)
    prebuild.build([SOURCE, new], "sm_90a", pretend)
    prebuild.build([new], "sm_90a", pretend)
    assert compiled == ["kernel", "new"], "what is there is not compiled again"
    assert compiler.prebuilt(SOURCE, "sm_90a") is None
    assert compiler.prebuilt(new, "sm_90a") == b"code"


@pytest.mark.parametrize("mask", [None, tw.causal(), tw.window(77), tw.window(5, 9), tw.causal() & tw.window(300)])
def test_common_calls_have_kernels_compiled_ahead(mask: Expr | None) -> None:
    texts = {source.text for source in prebuild.common()}
    for d, n in ((64, 300), (64, 5000), (128, 1), (256, 100_000)):
        shape = Shape(2, 8, 4, n, n, d, d, "bfloat16", "cuda:0")
        assert source_of(Attention(0.3, mask), shape, HOPPER).text in texts
        assert source_of(Attention(0.3, mask, keeps_remainder=True), shape, HOPPER).text in texts
        assert {x.text for x in backward_sources_of(BACKWARD_SM90, Attention(0.3, mask), shape)} <= texts


def test_without_a_compiler_make_kernels_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiler, "without_nvrtc", lambda: "NVRTC is away")
    monkeypatch.setenv("PATH", "")
    assert prebuild.main() == 2
    assert "no compiler: NVRTC is away, or the CUDA toolkit for nvcc" in capsys.readouterr().err


def test_the_version_of_a_compiler_comes_without_loading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.metadata, "version", lambda name: {"nvidia-cuda-nvrtc": "13.0.88"}[name])
    assert compiler.version.__wrapped__() == "nvrtc 13.0.88"

    def missing(name: str) -> str:
        raise compiler.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(compiler.metadata, "version", missing)
    monkeypatch.setattr(compiler, "loaded_version", lambda: "12.4")
    assert compiler.version.__wrapped__() == "nvrtc 12.4"
