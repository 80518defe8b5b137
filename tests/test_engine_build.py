"""How the native library is built: what is compiled again, what a failure says, what the library shows and needs."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sanitize
from tilewise.kernels.cpu.engine import build

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)), reason=f"no C++ compiler: {', '.join(build.COMPILERS)}"
)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="speaks of ELF libraries and of g++'s sanitizers")

ENGINE_CPP = """
#include "sets.h"
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT const char* tilewise_sets() { return SETS; }
int not_shown() { return 1; }
"""
SETS_H = """
#ifdef TILEWISE_HAVE_AVX2
#define AVX2 " avx2"
#else
#define AVX2
#endif
#ifdef TILEWISE_HAVE_AVX512
#define AVX512 " avx512"
#else
#define AVX512
#endif
#define SETS "portable" AVX2 AVX512
"""
ISA_CPP = "namespace tilewise::TILEWISE_ISA { extern const int isa; const int isa = 1; }\n"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CXX", "CXXFLAGS", "LDFLAGS", "TILEWISE_NO_ENGINE", "TILEWISE_REQUIRE_ENGINE"):
        monkeypatch.delenv(name, raising=False)


class Engine:
    """A small engine in a folder of its own, and its build."""

    def __init__(self, folder: Path) -> None:
        self.sources, self.objects = folder / "sources", folder / "objects"
        self.sources.mkdir()
        for name, text in (("engine.cpp", ENGINE_CPP), ("sets.h", SETS_H), ("isa.cpp", ISA_CPP)):
            (self.sources / name).write_text(text)
        shutil.copy(build.ENGINE / "exports.map", self.sources)

    def build(self, sanitize: str = "") -> Path:
        made = build.compile_objects(self.sources, self.objects, sanitize)
        return build.link(made, self.sources, self.objects, sanitize)

    def rebuilt(self) -> set[str]:
        """What a build makes anew."""
        before = {path.name: path.stat().st_mtime_ns for path in self.objects.iterdir()}
        self.build()
        after = {path.name: path.stat().st_mtime_ns for path in self.objects.iterdir()}
        return {name for name in after if name.endswith((".o", build.LIBRARY)) and after[name] != before.get(name)}

    def append(self, name: str, text: str) -> None:
        with (self.sources / name).open("a") as file:
            file.write(text)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def _sets(library: Path) -> list[str]:
    loaded = ctypes.CDLL(str(library))
    loaded.tilewise_sets.restype = ctypes.c_char_p
    return str(loaded.tilewise_sets().decode()).split()


@needs_compiler
def test_only_what_changed_is_compiled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = _sets(engine.build())
    everything = {"engine.o", build.LIBRARY, *(f"isa-{name}.o" for name in sets)}
    assert engine.rebuilt() == set()
    engine.append("sets.h", "// a header that engine.cpp reads\n")
    assert engine.rebuilt() == {"engine.o", build.LIBRARY}
    engine.append("isa.cpp", "// of every instruction set\n")
    assert engine.rebuilt() == everything - {"engine.o"}
    (engine.sources / "more.cpp").write_text("")
    assert engine.rebuilt() == {"more.o", build.LIBRARY}
    (engine.sources / "more.cpp").unlink()
    assert engine.rebuilt() == {build.LIBRARY}
    monkeypatch.setenv("CXXFLAGS", "-DOTHER")
    assert engine.rebuilt() == everything, "other flags make other objects"


@needs_compiler
def test_a_folder_that_moved_stays_fresh(engine: Engine, tmp_path: Path) -> None:
    engine.build()
    moved = tmp_path / "moved"
    moved.mkdir()
    engine.sources, engine.objects = engine.sources.rename(moved / "sources"), engine.objects.rename(moved / "objects")
    assert engine.rebuilt() == set()


@needs_compiler
def test_a_refused_instruction_set_is_left_out(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "avx512" not in (sets := _sets(engine.build())):
        pytest.skip(f"the compiler here makes {', '.join(sets)} only")
    compiler = tmp_path / "old-compiler"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-mavx512*) exit 1;; esac\nexec {build.find_compiler()[0]} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    engine.objects = tmp_path / "others"
    assert _sets(engine.build()) == ["portable", "avx2"]
    assert not (engine.objects / "isa-avx512.o").exists()


@needs_compiler
def test_a_mistake_is_told_in_the_compilers_words(engine: Engine) -> None:
    engine.append("engine.cpp", "int broken = nothing_of_this_name;\n")
    with pytest.raises(build.BuildError, match="nothing_of_this_name") as failure:
        engine.build()
    assert "engine.cpp" in str(failure.value)
    assert len(str(failure.value).splitlines()) <= 7


def test_a_compiler_that_cannot_start_is_told(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF of no machine")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.BuildError, match="Exec format error"):
        engine.build()


def test_compilers_are_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"apt install g\+\+.*--force-reinstall"):
        build.find_compiler()
    for name in reversed(build.COMPILERS):
        (tmp_path / name).touch(mode=0o755)
        assert build.find_compiler() == [name]
    monkeypatch.setenv("CXX", "clang++ --target=any")
    assert build.find_compiler() == ["clang++", "--target=any"]
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(build.BuildError, match="'icpx'"):
        build.find_compiler()


def test_a_reason_stands_where_the_library_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / build.LIBRARY).touch()
    monkeypatch.setenv("PATH", "")
    build.install(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [build.REASON], "an old library does not outlive its sources"
    reason = (tmp_path / build.REASON).read_text().strip()
    assert "no C++ compiler" in reason
    assert reason in capsys.readouterr().err
    monkeypatch.setenv("TILEWISE_REQUIRE_ENGINE", "1")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.install(tmp_path)


@needs_compiler
def test_the_build_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_NO_ENGINE", "1")
    build.install(tmp_path)
    assert "TILEWISE_NO_ENGINE was set" in (tmp_path / build.REASON).read_text()
    monkeypatch.setenv("TILEWISE_NO_ENGINE", "0")
    build.install(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [build.LIBRARY]


def _told_by(tool: str, *arguments: object) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is missing (Debian: apt install binutils)")
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=True)
    return done.stdout


def _wrong_symbols(path: Path, isa: str) -> list[str]:
    """What an object of one instruction set must not have: the linker may take its weak code for every other's."""
    symbols = [line.split(maxsplit=2)[-2:] for line in _told_by("nm", "-C", "--defined-only", path).splitlines()]
    weak = [name for kind, name in symbols if kind in "WVu"]
    shown = [name for kind, name in symbols if kind.isupper() and kind not in "WV"]
    own = [name for name in shown if re.search(rf"\b{isa}\b|_{isa}(?![a-z0-9])", name)]
    return weak + [name for name in shown if name not in own] + own[1:]


@needs_compiler
def test_an_instruction_set_shows_its_own_table_alone() -> None:
    made = build.compile_objects()
    sets = {name.removeprefix("isa-"): path for name, path in made.items() if name.startswith("isa-")}
    assert "portable" in sets
    assert {isa: wrong for isa, path in sets.items() if (wrong := _wrong_symbols(path, isa))} == {}


@needs_compiler
@pytest.mark.parametrize(
    "mistake",
    [
        "inline int shared(int x) { return x + 1; }\nint (*use)(int) = shared;\n",
        "int helper() { return 1; }\n",
        "namespace tilewise::TILEWISE_ISA { int second() { return 1; } }\n",
        "inline int counter = 1;\nint* use = &counter;\n",
    ],
)
def test_symbols_that_could_be_merged_are_seen(engine: Engine, mistake: str) -> None:
    assert _wrong_symbols(build.compile_objects(engine.sources, engine.objects)["isa-portable"], "portable") == []
    engine.append("isa.cpp", mistake)
    assert _wrong_symbols(build.compile_objects(engine.sources, engine.objects)["isa-portable"], "portable") != []


@on_linux
@needs_compiler
def test_the_library_shows_and_needs_little() -> None:
    """Only our names are seen, libstdc++ is inside, and every Linux has the rest."""
    library = build.link(build.compile_objects())
    shown = [line.split()[-1] for line in _told_by("nm", "-D", "--defined-only", library).splitlines()]
    assert "tilewise_isa" in shown
    assert [name for name in shown if not name.startswith("tilewise_")] == []
    needed = re.findall(r"NEEDED.*\[(.*?)\.so", _told_by("readelf", "-d", library))
    assert set(needed) <= {"libc", "libm", "libpthread", "libdl", "librt", "ld-linux-x86-64", "ld-linux-aarch64"}


MISTAKES = """
#include <thread>
#include <vector>
EXPORT int tilewise_read(int size, int i) { return std::vector<int>(size).data()[i]; }
EXPORT int tilewise_race() {
    static int shared = 0;
    auto count = [] { for (int i = 0; i < 1000; ++i) shared = shared + 1; };
    std::thread first(count), second(count);
    first.join(), second.join();
    return shared;
}
EXPORT int tilewise_shift(int by) { return 1 << by; }
EXPORT int tilewise_throw() {
    try { throw 3; } catch (int thrown) { return thrown; }
}
"""


@on_linux
@needs_compiler
@pytest.mark.parametrize(
    ("sanitizer", "harmless", "mistake", "report"),
    [
        ("address,undefined", "read(4, 3)", "read(4, 4)", "AddressSanitizer: heap-buffer-overflow"),
        ("address,undefined", "throw()", "shift(40)", "shift exponent 40 is too large"),
        ("thread", "read(4, 3)", "race()", "ThreadSanitizer: data race"),
    ],
)
def test_sanitizers_see_mistakes(engine: Engine, sanitizer: str, harmless: str, mistake: str, report: str) -> None:
    """`make sanitize` can fail: each sanitizer ends a run with its report, and lets a sound one pass."""
    try:
        sanitize.runtime(sanitize.RUNTIMES[sanitizer])
    except build.BuildError as missing:
        pytest.skip(str(missing))
    engine.append("engine.cpp", MISTAKES)
    library = engine.build(sanitizer)
    prefix, environment = sanitize.sanitized(sanitizer, library)

    def run(call: str) -> subprocess.CompletedProcess[str]:
        script = f"import ctypes, os; ctypes.CDLL(os.environ['TILEWISE_LIBRARY']).tilewise_{call}"
        command = [*prefix, sys.executable, "-c", script]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = run(harmless)
    assert (done.returncode, done.stderr) == (0, "")
    done = run(mistake)
    assert done.returncode != 0
    assert report in done.stderr
