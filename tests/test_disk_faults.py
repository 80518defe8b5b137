"""Every cache, with a disk whose nth step fails, or that others may write: calls go on, and later ones are right."""

from __future__ import annotations

import ctypes
import errno
import json
import multiprocessing
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.faults import every_step, failing
from tilewise.cli import bench, main
from tilewise.kernels import disk, toolchain
from tilewise.kernels.cuda import compiler, simulator
from tilewise.kernels.cuda.source import Source
from tilewise.kernels.disk import Files

ERRORS = [errno.ENOSPC, errno.EROFS, errno.EACCES]
_COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
needs_cc = pytest.mark.skipif(_COMPILER is None, reason="it loads a library, and there is no C compiler to make one")
# What loaders of the simulator, of TileLang's and of CuTe's libraries look for.
_LIBRARY = """
const char* get_last_error(void) { return ""; }
const char* tilewise_signature(void) { return "int* x"; }
int init(void) { return 0; }
int call(int* x) { *x = 42; return 0; }
void* tilewise_simulate(void) { return 0; }
void* tilewise_events(void) { return 0; }
void tilewise_kernel(void) {}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache, and a process that remembers nothing."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    _forget_all(monkeypatch)
    yield tmp_path / "cache"
    simulator.compile_source.cache_clear()


def _forget_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process would know nothing."""
    monkeypatch.setattr(disk, "_own", disk._Own())
    monkeypatch.setattr(disk, "_told", set())
    monkeypatch.setattr(compiler, "_compiled", set())
    simulator.compile_source.cache_clear()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("library")
    (folder / "made.c").write_text(_LIBRARY)
    assert _COMPILER is not None
    subprocess.run([_COMPILER, "-shared", "-fPIC", "-o", "made.so", "made.c"], cwd=folder, check=True)
    return (folder / "made.so").read_bytes()


# -- those who have a cache -------------------------------------------------------------------------------------------


class User:
    """Someone who compiles something, keeps it, and finds it again: act() gives 42. `made` counts compilations."""

    made = 0
    part = ""
    name = "kernel.so"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, library: bytes) -> None:
        self.monkeypatch, self.library = monkeypatch, library
        self.prepare()

    def prepare(self) -> None:
        raise NotImplementedError

    def act(self) -> int:
        raise NotImplementedError

    def again(self) -> int:
        """In a new process."""
        _forget_all(self.monkeypatch)
        return self.act()

    def compiled(self, *_: Any) -> bytes:
        self.made += 1
        return self.library


class Cubins(User):
    part = "cuda"

    def prepare(self) -> None:
        self.monkeypatch.setattr(compiler, "by_nvrtc", self.compiled)
        self.monkeypatch.setattr(compiler, "version", lambda: "nvrtc 13.0")

    def act(self) -> int:
        code = compiler.machine_code(Source("kernel", "tiled", 128, 0), "sm_90a")
        return 42 if code == self.library else 0


class Simulator(User):
    part = "simulator"

    def prepare(self) -> None:
        def run(command: list[str], folder: Path, result: str) -> Path:
            (folder / result).write_bytes(self.compiled())
            return folder / result

        self.monkeypatch.setattr(simulator, "_run", run)

    def act(self) -> int:
        return _answer(simulator.compile_source("a kernel")._library)


class TileLang(User):
    part = "tilelang"

    def prepare(self) -> None:
        from tilewise.kernels.tilelang import compiler

        self.monkeypatch.setattr(compiler, "not_installed", lambda target: None)
        self.monkeypatch.setattr(compiler, "as_target", lambda target: failing(Path("/nowhere"), 0, 0))
        self.monkeypatch.setattr(compiler, "library", lambda *_: compiler.Compiled(self.compiled()))

    def act(self) -> int:
        from tilewise.kernels.tilelang import library

        self.monkeypatch.setattr(library, "_loaded", {})
        x = ctypes.c_int()
        library.kernel(_Build(self.name), lambda: None).launch({"x": ctypes.addressof(x)})
        return x.value


class _Build(NamedTuple):
    name: str
    target: str = "c"


class Cute(User):
    part = "cute"

    def prepare(self) -> None:
        from tilewise.kernels.cute import compiler, library

        made = SimpleNamespace(library=lambda runtime: self.compiled(), call=lambda: 42)
        self.monkeypatch.setattr(compiler, "not_installed", lambda: None)
        self.monkeypatch.setattr(compiler, "compile", lambda wanted, arch: made)
        self.monkeypatch.setattr(library, "load", lambda path: _answering(ctypes.CDLL(str(path))))
        self.find = library._find

    def act(self) -> int:
        wanted: Any = SimpleNamespace(name=lambda arch, runtime: self.name)
        return int(self.find(wanted, "sm_90a")())  # type: ignore[call-arg, func-returns-value]


def _answering(library: Any) -> Callable[[], int]:
    library.tilewise_signature  # noqa: B018 - which is looked up, and is not there in what is no library
    return lambda: _answer(library)


def _answer(library: Any) -> int:
    x = ctypes.c_int()
    library.call(ctypes.byref(x))
    return x.value


USERS = [Cubins, Simulator, TileLang, Cute]


@pytest.fixture(params=USERS, ids=lambda kind: kind.__name__)
def user(request: pytest.FixtureRequest, cache: Path, monkeypatch: pytest.MonkeyPatch, library: bytes) -> User:
    found: User = request.param(monkeypatch, library)
    return found


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


# -- what names depend on ---------------------------------------------------------------------------------------------


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


# -- a driver that does not take what was kept ------------------------------------------------------------------------


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
    _forget_all(monkeypatch)
    assert launcher._load(source, "sm_90a").function == "function"
    assert user.made == 2 and "does not load, and is made again" in caplog.text
    assert Files(path.parent).read(path.name) == b"for this driver"
    user.library = b"nothing"
    path.unlink()
    with pytest.raises(launcher.LaunchError, match="INVALID_IMAGE"):
        launcher._load(source, "sm_90a")
    assert user.made == 3, "what was compiled now is not compiled again"


# -- where the cache is -----------------------------------------------------------------------------------------------


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


def test_a_file_of_which_the_disk_takes_a_part(tmp_path: Path) -> None:
    """By a limit that the system itself keeps: the write ends in the middle, and nothing is left of it."""
    code = (
        "import resource, sys\nfrom tilewise.kernels.disk import Files, Path\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        f"files = Files(Path({str(tmp_path)!r}))\nfiles.add('small', bytes(100))\n"
        "try:\n    files.add('large', bytes(100_000))\nexcept OSError as error:\n    print(error.strerror)\n"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout == "File too large\n", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


# -- two processes ----------------------------------------------------------------------------------------------------


def _load_often(folder: str, good: bytes, bad: bytes, told: Any) -> None:
    """As two machines that share a cache do, each of which takes the other's file for bad."""
    files, made = Files(Path(folder)), 0

    def load(path: Path) -> bytes:
        content = path.read_bytes()
        if content.startswith(bad):
            raise OSError("wrong ELF class")
        return content

    for _ in range(100):
        if files.loaded("kernel", load) is None:
            files.keep("kernel", good)
            made += 1
    told.put(made)


def test_two_machines_with_one_cache_only_take_longer(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    kinds = (b"a" * 1000, b"b" * 1000)
    both = [context.Process(target=_load_often, args=(str(tmp_path), *x, told)) for x in (kinds, kinds[::-1])]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    assert told.get() >= 1 and told.get() >= 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


# -- forgetting -------------------------------------------------------------------------------------------------------


def test_forgetting_goes_on_where_a_folder_is(tmp_path: Path) -> None:
    files = Files(tmp_path, most=3)
    (tmp_path / "__pycache__").mkdir()
    os.utime(tmp_path / "__pycache__", (0, 0))
    for i in range(9):
        os.utime(files.add(str(i), b"code"), (i, i))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "7", "8", "__pycache__"]


def test_what_a_process_left_unfinished_goes_in_time(tmp_path: Path) -> None:
    old, new = tmp_path / ".kernel.old", tmp_path / ".kernel.new"
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    Files(tmp_path).add("kernel", b"code")
    assert not old.exists() and new.exists()


# -- what is tuned, and commands --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_users_file_is_as_it_was_or_whole(tmp_path: Path, error: int) -> None:
    """Results of a long run are written again after each part of it."""
    out = tmp_path / "results.json"
    for _, found in every_step(tmp_path, lambda: bench.write({"new": 1}, out), error):
        told = {"old": 0} if isinstance(found, OSError) else {"new": 1}
        assert not isinstance(found, OSError) or found.filename == str(out)
        assert not out.exists() or json.loads(out.read_text()) == told
        bench.write({"old": 0}, out)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_users_file_of_which_the_disk_takes_a_part(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    out.write_text("as it was")
    code = (
        "import resource\nfrom tilewise.kernels.disk import Path, write_whole\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        f"out = Path({str(out)!r})\n"
        "try:\n    write_whole(out, bytes(100_000))\nexcept OSError as error:\n    print(error.filename)\n"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout == f"{out}\n", done.stderr
    assert out.read_text() == "as it was"
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_pipes_links_and_files_in_closed_folders_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write_whole(Path(os.devnull), b"nothing")
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    disk.write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"new"
    with failing(tmp_path, errno.EACCES, at=1):
        disk.write_whole(tmp_path / "file", b"newer")
    assert (tmp_path / "file").read_bytes() == b"newer"


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


# -- for real ---------------------------------------------------------------------------------------------------------

_CALL = """
import numpy as np, tilewise as tw
q = np.random.default_rng(0).standard_normal((1, 2, 9, 8)).astype(np.float32)
for _ in range(2):
    got = tw.attention(q, q, q, causal=True, kernel={kernel!r})
    assert abs(got - tw.attention(q, q, q, causal=True, kernel="numpy")).max() < 1e-5
"""
_REAL = {"cuda-sim/naive": "c++", "tilelang-c/simple": "tilelang", "cute": "cutlass"}


@pytest.mark.parametrize(
    "kernel", ["cuda-sim/naive", *(pytest.param(x, marks=pytest.mark.slow) for x in list(_REAL)[1:])]
)
def test_real_compilers_where_no_cache_can_be_written(tmp_path: Path, kernel: str) -> None:
    """In a container that is read-only but for its temporary folder, of which nothing is left."""
    needed = _REAL[kernel]
    if (shutil.which(needed) if needed == "c++" else find_spec(needed)) is None:
        pytest.skip(f"{kernel} needs {needed}")
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    root = str(Path(__file__).parent.parent)
    environment = {
        **os.environ, "TILEWISE_CACHE": str(tmp_path / "file" / "cache"), "TMPDIR": str(tmp_path / "temporary"),
        "PYTHONPATH": root, "CUTE_DSL_ARCH": "sm_90a",
    }  # fmt: skip
    what = ["-m", "tests.cute.compiled_once"] if kernel == "cute" else ["-c", _CALL.format(kernel=kernel)]
    done = subprocess.run(
        [sys.executable, *what], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the compiled kernel is not kept" in done.stderr
    assert kernel != "cute" or '"compiled": 1' in done.stdout
    assert not list((tmp_path / "temporary").glob("tilewise-*"))


# -- on a GPU ---------------------------------------------------------------------------------------------------------

_ON_GPU = """
import torch, tilewise as tw
q, k, v = (torch.randn(1, 2, 200, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
options = dict(causal=True, score=tw.softcap(9.25))
got = tw.attention(q, k, v, kernel={kernel!r}, **options)
got.float().sum().backward()
want = tw.attention(*(x.detach().cpu().float() for x in (q, k, v)), kernel="numpy", **options)
assert (got.detach().cpu().float() - want).abs().max() < 0.05
assert q.grad.isfinite().all()
"""


def _on_gpu(kernel: str, **environment: str) -> str:
    """What it tells, of a process of its own."""
    from tilewise import dispatch

    pytest.importorskip("torch")  # which is asked for GPUs
    reason = dispatch.kernel(kernel).unavailable()
    if reason is not None:
        pytest.skip(reason)
    root = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", _ON_GPU.format(kernel=kernel)]
    given = {**os.environ, "PYTHONPATH": root, **environment}
    done = subprocess.run(command, env=given, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cuda", "triton", "cute", "tilelang"])
def test_gpu_kernels_where_no_cache_can_be_written(tmp_path: Path, kernel: str) -> None:
    (tmp_path / "file").touch()
    told = _on_gpu(kernel, TILEWISE_CACHE=str(tmp_path / "file" / "cache"))
    assert ("is not kept" in told) == (kernel != "triton"), told


@pytest.mark.gpu
def test_a_cubin_that_the_driver_refuses_is_compiled_again(tmp_path: Path) -> None:
    for turn, (refused, told) in enumerate([(False, False), (True, True), (False, False)]):
        if refused:
            for path in list((tmp_path / "cuda").iterdir()):
                Files(path.parent).add(path.name, b"\x7fELF of another architecture")
        assert ("does not load, and is made again" in _on_gpu("cuda", TILEWISE_CACHE=str(tmp_path))) == told, turn
