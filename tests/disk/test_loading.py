"""Files that are damaged, or whole and not for this machine: they are made again, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.disk.users import Cubins, User, forget_all, needs_cc
from tilewise.kernels.cuda import compiler, simulator
from tilewise.kernels.cuda.source import Source
from tilewise.kernels.disk import Files


@needs_cc
def test_a_library_that_does_not_load_is_made_again_once(
    user: User, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole, and not for this machine, as another one left it. Cubins are loaded by a driver: see below."""
    if user.part == "cuda":
        return
    assert user.again() == 42
    before = user.made
    user.name = "another.so"  # a process that has a library of a name loaded takes that
    for path in list(cache.rglob("*.so")):
        for name in (path.name, user.name):
            Files(path.parent).add(name, b"\x7fELF of another machine")
    assert user.again() == 42
    assert user.made == before + 1
    assert any("does not load, and is made again" in x for x in caplog.messages)
    assert user.again() == 42
    assert user.made == before + 1, "it was replaced"


@needs_cc
def test_a_library_that_never_loads_is_an_error(user: User, cache: Path) -> None:
    """And not a loop."""
    if user.part == "cuda":
        return
    user.library = b"no library"
    if user.part == "cute":
        assert user.again() == 42, "it has it in memory"
    else:
        with pytest.raises(OSError, match=r"kernel\.so|file too short|invalid ELF"):
            user.again()
    assert user.made <= 2


@needs_cc
@pytest.mark.parametrize("length", [0, 10, 31, 32, 1000, -1])
def test_a_truncated_library_is_made_again(user: User, cache: Path, length: int) -> None:
    assert user.again() == 42
    for path in [path for path in cache.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        path.unlink()  # or the program that is loaded from it would lose it
        path.write_bytes(content[:length])
    assert user.again() == 42


def test_a_cubin_that_does_not_load_is_made_again_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch")
    from tilewise.kernels.cuda import launcher

    monkeypatch.setattr(launcher, "_not_in_a_graph", lambda: None)
    monkeypatch.setattr(compiler, "prebuilt", lambda source, arch: None)
    user, source = Cubins(monkeypatch, b"for this driver"), Source("kernel", "tiled", 128, 0)

    def load(code: bytes, entry: str) -> tuple[str, str]:
        if code != b"for this driver":
            raise launcher.LaunchError("loading a kernel: CUDA_ERROR_INVALID_IMAGE")
        return "module", "function"

    monkeypatch.setattr(launcher.gpu, "load", load)
    assert user.act() == 42
    (path,) = cache.rglob("*.cubin")
    Files(path.parent).add(path.name, b"for another one")
    forget_all(monkeypatch)
    assert launcher._load(source, "sm_90a").function == "function"
    assert user.made == 2 and "does not load, and is made again" in caplog.text
    assert Files(path.parent).read(path.name) == b"for this driver"
    user.library = b"nothing"
    path.unlink()
    with pytest.raises(launcher.LaunchError, match="INVALID_IMAGE"):
        launcher._load(source, "sm_90a")
    assert user.made == 3, "what was compiled now is not compiled again"


@pytest.mark.skipif(simulator.unavailable() is not None, reason="there is no C++ compiler for the simulator")
def test_a_simulator_that_does_not_link_is_made_again_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs are linked with an object, which is never loaded by itself."""
    runtime = simulator._runtime(tuple(simulator._compiler()))
    Files(runtime.parent).add(runtime.name, b"an object of another linker")
    made: list[str] = []
    run = simulator._run
    monkeypatch.setattr(simulator, "_run", lambda *given: (made.append(given[-1]), run(*given))[1])
    text = 'extern "C" void kernel(void*) {}\n'
    with pytest.raises(simulator.CompileError):
        simulator.compile_source(text + "no C++")
    assert made.count("runtime.o") == 1 and "does not load, and is made again" in caplog.text
    with pytest.raises(simulator.CompileError):
        simulator.compile_source(text + "no C++ either")
    assert made.count("runtime.o") == 1, "the source is wrong, not the simulator"
