"""The script that times versions of the CUDA sources: which texts it compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import compare_gpu
from tests.compare_gpu import Version, case_of, compile_ahead
from tilewise.bench.gpu.cases import Case
from tilewise.bench.gpu.contestants import Entry
from tilewise.kernels.cuda import compiler, source
from tilewise.kernels.cuda.source import Source


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    found: list[Source] = []
    monkeypatch.setattr(compiler, "machine_code", lambda made, arch: found.append(made))
    return found


def test_a_versions_files_stand_for_those_of_the_same_names(tmp_path: Path, compiled: list[Source]) -> None:
    own = (source.SOURCES / "sm90_softmax.h").read_text() + "// of this version alone\n"
    (tmp_path / "sm90_softmax.h").write_text(own)
    for folder in (None, tmp_path):
        compile_ahead("x", folder, case_of("causal,64,512", backward=False))
    assert ["of this version alone" in made.text for made in compiled] == [False, True]
    assert compiled[0].text == compiled[1].text.replace("// of this version alone\n", "")


def test_gradients_have_kernels_of_their_own(compiled: list[Source]) -> None:
    compile_ahead("today", None, case_of("full,128,4096", backward=True))
    assert [made.rung for made in compiled] == ["forward_sm90", "backward_sm90"]


def test_once_is_a_call_of_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def entry_of(version: Version, case: Case, inputs: list[str], unordered: bool) -> Entry:
        assert inputs == ["first"] and not unordered
        return Entry([lambda: called.append(f"{version.name}, d {case.d}")])

    monkeypatch.setattr(compare_gpu, "sets", lambda case: ["first", "second"])
    monkeypatch.setattr(compare_gpu, "entry_of", entry_of)
    monkeypatch.setattr(compare_gpu, "compile_ahead", print)  # what another process can find
    assert compare_gpu.main(["a/new", "--cases", "full,64,512", "full,128,512", "--once", "--jobs", "1"]) == 0
    assert called == ["today, d 64", "new, d 64", "today, d 128", "new, d 128"]


def test_a_version_is_used_inside_alone(tmp_path: Path) -> None:
    before = source._read, source._sources
    with Version("x", tmp_path).used():
        assert source._sources is not before[1]
    assert (source._read, source._sources) == before


def test_cases() -> None:
    case = case_of("full,64,4096,x64", backward=False)
    assert (case.variant, case.d, case.n, case.inputs) == ("full", 64, 4096, "x64")
