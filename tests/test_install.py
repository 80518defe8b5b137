"""What a user installs: one wheel for all Python versions, with the native engine, or without it and saying why."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests import make_wheel
from tilewise import dispatch
from tilewise.kernels.cpu.engine import build

ROOT = Path(__file__).parent.parent
ENGINE = "tilewise/kernels/cpu/engine"

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)), reason=f"no C++ compiler: {', '.join(build.COMPILERS)}"
)
WITH_COMPILER = {"PATH": os.environ["PATH"], "TILEWISE_REQUIRE_ENGINE": "1"}

ATTENTION = """
import numpy as np, tilewise as tw
q, k, v = np.random.default_rng(0).standard_normal((3, 2, 33, 16))
p = np.exp(q @ k.swapaxes(1, 2) / 4)
want = p @ v / p.sum(-1, keepdims=True)
print(np.abs(tw.attention(q, k, v, kernel={kernel!r}) - want).max() < 1e-12)
"""


def _copy_sources(folder: Path, with_objects: bool) -> Path:
    """The project as a user gets it; with_objects: what is compiled here already need not be compiled again."""
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder)
    unwanted = shutil.ignore_patterns("__pycache__", build.LIBRARY, build.REASON)
    shutil.copytree(ROOT / "tilewise", folder / "tilewise", ignore=unwanted)
    if with_objects:
        with build.alone_in(build.OBJECTS):
            shutil.copytree(build.OBJECTS, folder / build.OBJECTS.relative_to(ROOT))
    return folder


def _wheel_of(source: Path, folder: Path, **environment: str) -> tuple[Path, str]:
    """A wheel, and what pip said; the build finds setuptools where the tests run, so that no network is needed."""
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--no-index", "-w"]
    here = folder.parent
    done = subprocess.run(
        [*command, folder, source], capture_output=True, text=True, check=False, env=environment, cwd=here
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    (wheel,) = folder.iterdir()
    return wheel, told


class Environment:
    """A virtual environment with NumPy, one wheel, and nothing on the PATH."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder, self.python = folder, folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        site = subprocess.run(
            [self.python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
        subprocess.run([*pip, "--target", site, wheel], check=True)
        numpy = Path(np.__file__).parent
        for path in (numpy, numpy.with_name("numpy.libs")):
            if path.exists():
                Path(site, path.name).symlink_to(path)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder, env={"PATH": ""})

    def printed(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


def _check_engine(environment: Environment) -> None:
    """The native library of this environment computes."""
    assert environment.printed("-c", ATTENTION.format(kernel="cpu")).strip() == "True"
    script = "from tilewise.kernels.cpu import library; print(library.__file__, library.isa())"
    place, isa = environment.printed("-c", script).split()
    assert place.startswith(str(environment.folder))
    assert isa in environment.printed("-m", "tilewise", "doctor").split("✓ cpu")[1]


@pytest.mark.skipif(
    not build.is_set("TILEWISE_REQUIRE_ENGINE"), reason="without TILEWISE_REQUIRE_ENGINE=1 it is optional"
)
def test_a_required_engine_is_there() -> None:
    """Else CI would skip every test of the cpu system, and be green."""
    assert dispatch.kernel("cpu").unavailable() is None


@needs_compiler
def test_a_wheel_brings_the_engine_along(tmp_path: Path) -> None:
    build.compile_objects()
    source = _copy_sources(tmp_path / "source", with_objects=True)
    wheel, _ = _wheel_of(source, tmp_path / "wheels", **WITH_COMPILER)
    assert re.fullmatch(r"tilewise-[\d.]+-py3-none-(linux|macosx)_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert f"tilewise/kernels/cpu/{build.LIBRARY}" in names
    shown = f"{ENGINE}/forward.h"  # by `tilewise explain`
    assert [name for name in names if name.startswith(ENGINE) or name.endswith(build.REASON)] == [shown]
    assert "tilewise/explainer/assets/page.html" in names
    _check_engine(Environment(tmp_path / "venv", wheel))


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="tags of the C library are Linux's")
def test_a_wheel_to_hand_on_is_named_after_the_oldest_c_library_and_built_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("auditwheel")
    build.compile_objects()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    made = []
    for name in ("first", "another-place"):
        (tmp_path / name).mkdir()
        source = _copy_sources(tmp_path / name / "source", with_objects=True)
        (source / build.OBJECTS.relative_to(ROOT) / build.LIBRARY).unlink(missing_ok=True)  # it is linked there
        made.append(make_wheel.make(source, tmp_path / name))
    first, again = made
    assert first.name == again.name
    assert first.read_bytes() == again.read_bytes()
    assert {entry.date_time[0] for entry in zipfile.ZipFile(first).infolist()} == {2023}
    show = [sys.executable, "-m", "auditwheel", "show", first]
    told = " ".join(subprocess.run(show, capture_output=True, text=True, check=True).stdout.split())
    allowed = re.search(r'consistent with the following platform tag: "(\w+)"', told)
    assert allowed, told
    assert allowed[1].startswith("manylinux_")
    assert re.fullmatch(rf"tilewise-[\d.]+-py3-none-{allowed[1]}\.whl", first.name)
    _check_engine(Environment(tmp_path / "venv", first))


def test_a_wheel_has_the_time_of_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert abs(int(make_wheel.epoch(tmp_path)) - time.time()) < 60, "outside a checkout it is now"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    when = {**os.environ, "GIT_COMMITTER_DATE": "1700000000 +0000"}
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True, env=when)
    assert make_wheel.epoch(tmp_path) == "1700000000"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1600000000")
    assert make_wheel.epoch(tmp_path) == "1600000000"


def test_without_a_compiler_it_installs_and_says_what_is_missing(tmp_path: Path) -> None:
    wheel, told = _wheel_of(_copy_sources(tmp_path / "source", with_objects=False), tmp_path / "wheels", PATH="")
    assert "Tilewise goes without its native engine: no C++ compiler" in told
    environment = Environment(tmp_path / "venv", wheel)
    doctor = environment.printed("-m", "tilewise", "doctor")
    assert "✗ cpu        no C++ compiler was there" in doctor
    assert "apt install g++" in doctor
    assert "--force-reinstall" in doctor
    assert environment.printed("-c", ATTENTION.format(kernel="auto")).strip() == "True"
    refused = environment.run("-c", ATTENTION.format(kernel="cpu"))
    assert "Unsupported: kernel 'cpu' cannot compute this call: no C++ compiler" in refused.stderr


def test_left_out_on_purpose_the_wheel_is_for_every_platform(tmp_path: Path) -> None:
    source = _copy_sources(tmp_path / "source", with_objects=False)
    wheel, _ = _wheel_of(source, tmp_path / "wheels", PATH="", TILEWISE_NO_ENGINE="1")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert f"tilewise/kernels/cpu/{build.REASON}" in zipfile.ZipFile(wheel).namelist()


def test_a_required_engine_that_cannot_be_built_is_an_error(tmp_path: Path) -> None:
    source = _copy_sources(tmp_path / "source", with_objects=False)
    with pytest.raises(AssertionError, match="native engine could not be built: no C\\+\\+ compiler"):
        _wheel_of(source, tmp_path / "wheels", PATH="", TILEWISE_REQUIRE_ENGINE="1")


@needs_compiler
def test_an_editable_install_puts_the_library_into_the_sources(tmp_path: Path) -> None:
    build.compile_objects()
    source = _copy_sources(tmp_path / "source", with_objects=True)
    script = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, cwd=source, env=WITH_COMPILER)
    assert (source / "tilewise" / "kernels" / "cpu" / build.LIBRARY).exists()


def _source_distribution(folder: Path) -> Path:
    source = _copy_sources(folder / "source", with_objects=False)
    (source / "tilewise" / "kernels" / "cpu" / build.LIBRARY).touch()  # as an editable install leaves it
    script = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, cwd=source)
    (made,) = folder.glob("*.tar.gz")
    return made


def test_a_source_distribution_has_the_sources_and_no_library(tmp_path: Path) -> None:
    with tarfile.open(_source_distribution(tmp_path)) as made:
        names = [name.partition("/")[2] for name in made.getnames()]
    for path in build.ENGINE.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            assert f"{ENGINE}/{path.relative_to(build.ENGINE)}" in names
    assert "setup.py" in names
    assert {"CHANGELOG.md", "SECURITY.md", "LICENSE", "README.md"} <= set(names)
    assert [name for name in names if name.endswith((build.LIBRARY, ".o")) or name.startswith("tests")] == []


def test_a_source_distribution_installs_what_a_checkout_does(tmp_path: Path) -> None:
    """Unpacked, and with no network: the same files, and they compute."""
    made = _source_distribution(tmp_path)
    without_engine = {"PATH": "", "TILEWISE_NO_ENGINE": "1"}
    of_sources, _ = _wheel_of(tmp_path / "source", tmp_path / "from-sources", **without_engine)
    with tarfile.open(made) as packed:
        packed.extractall(tmp_path / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    of_distribution, _ = _wheel_of(unpacked, tmp_path / "from-distribution", **without_engine)
    contents = [_contents(wheel) for wheel in (of_sources, of_distribution)]
    assert contents[0] == contents[1]
    environment = Environment(tmp_path / "venv", of_distribution)
    assert environment.printed("-c", ATTENTION.format(kernel="numpy")).strip() == "True"
    assert "✓ numpy" in environment.printed("-m", "tilewise", "doctor")


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


@needs_compiler
@pytest.mark.slow
def test_two_builds_from_nothing_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every object is compiled, in two folders."""
    pytest.importorskip("auditwheel")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    made = [
        make_wheel.make(_copy_sources(tmp_path / name, with_objects=False), tmp_path / f"wheel-{name}")
        for name in ("first", "another-place")
    ]
    assert made[0].read_bytes() == made[1].read_bytes()


@needs_compiler
@pytest.mark.slow
def test_a_source_distribution_builds_from_nothing(tmp_path: Path) -> None:
    """Every object is compiled, outside a checkout."""
    made = _source_distribution(tmp_path)
    wheel, _ = _wheel_of(made, tmp_path / "wheels", **WITH_COMPILER)
    _check_engine(Environment(tmp_path / "venv", wheel))


@needs_compiler
@pytest.mark.slow
def test_installs_into_a_fresh_environment(tmp_path: Path) -> None:
    """`pip install .` alone, which asks the network for setuptools and NumPy, gives a working tilewise."""
    source = _copy_sources(tmp_path / "source", with_objects=False)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", source], check=True)
    done = subprocess.run(
        [python, "-m", "tilewise", "doctor"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "✓ cpu" in done.stdout
    assert "✓ numpy" in done.stdout
