"""`tilewise lab` as a learner meets it: start, check, hint, solution; the project's own code solves every exercise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cuda.test_ops import needs_compiler
from tests.triton.test_ops import needs_triton
from tilewise import cli
from tilewise.cli import lab
from tilewise.lab.exercises import NAMES, exercise, skeleton, solved


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["lab", *argv])
    out, err = capsys.readouterr()
    return code, out, err


@needs_triton
@needs_compiler
def test_the_projects_own_code_solves_every_exercise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a learner would: by commands, in processes, and with nothing set for Triton."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in NAMES:
        (tmp_path / exercise(name).file).write_text(solved(name))
    assert cli.main(["lab", "check", str(tmp_path), "--limit", "600"]) == 0
    told = capsys.readouterr().out
    assert re.findall(r"^✓ (\w+): \d+ checks", told, re.MULTILINE) == list(NAMES)
    assert told.endswith(f"{len(NAMES)} of {len(NAMES)} done\n")


def test_a_learners_way(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = _run(capsys, "start", str(tmp_path / "new"))
    assert code == 0
    assert out.count("wrote ") == len(NAMES)
    assert "Then: tilewise lab check" in out
    monkeypatch.chdir(tmp_path / "new")
    code, out, _ = _run(capsys, "check", "online_softmax", "causal_skipping.py")
    assert code == 1
    assert out.startswith('✗ online_softmax: not done yet: "your code here" stands in lines ')
    assert out.endswith("0 of 2 done; a hint: tilewise lab hint online_softmax\n")
    Path("causal_skipping.py").write_text(solved("causal_skipping"))
    Path("online_softmax.py").write_text(
        solved("online_softmax").replace("        p = s -", "        print('at', s.shape)\n        p = 1 / 0 -")
    )
    code, out, _ = _run(capsys, "check", "./online_softmax.py", "causal_skipping")
    assert code == 1
    assert "ZeroDivisionError" in out and "your code printed:\n      at (5, 24)" in out
    assert "✓ causal_skipping: 4 checks" in out
    assert "1 of 2 done" in out


def test_an_endless_loop_and_a_crash_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "online_softmax.py"
    for line, limit, told in (
        ("while True: pass", "0.8", "it does not end: stopped after 0.8 s"),
        ("__import__('os').abort()", "600", "its process ended with SIGABRT"),
    ):
        file.write_text(solved("online_softmax").replace("        p = s -", f"        {line}\n        p = s -"))
        code, out, _ = _run(capsys, "check", str(tmp_path), "online_softmax", "--limit", limit)
        assert (code, told in out) == (1, True), out


def test_work_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(capsys, "start", str(tmp_path))
    file = tmp_path / "tiled_attention.py"
    file.write_text("my work")
    code, out, err = _run(capsys, "start", str(tmp_path))
    assert (code, out) == (2, "")
    assert "there is work of yours in it; nothing was written" in err
    assert "tiled_attention --force" in err
    assert _run(capsys, "start", str(tmp_path), "online_softmax")[0] == 0
    assert file.read_text() == "my work"
    code, out, _ = _run(capsys, "start", str(tmp_path), "tiled_attention", "--force")
    assert code == 0 and "kept" in out
    assert file.read_text() == skeleton("tiled_attention")
    assert file.with_name("tiled_attention.py.old").read_text() == "my work"


def test_hints_open_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(tmp_path)
    _run(capsys, "start", where)
    assert "no hint is open" in _run(capsys, "hint", "cuda_tiles", where, "--again")[1]
    count = len(exercise("cuda_tiles").all_hints())
    for number in range(1, count + 1):
        told = _run(capsys, "hint", "cuda_tiles", where)[1]
        assert told.startswith(f"hint {number} of {count}: ") and told.count("hint ") == 1
    assert "tiled.cu, lines" in told and "`tilewise lab solution cuda_tiles`" in told
    assert "all 4 hints are open" in _run(capsys, "hint", "cuda_tiles", where)[1]
    assert _run(capsys, "hint", "cuda_tiles", where, "--again")[1].count("hint ") == count
    assert _run(capsys, "hint", "online_softmax", where)[1].startswith("hint 1 of")
    assert _run(capsys, "hint", "online_softmax", where, "--all")[1].count(" of 4: ") == 4
    _run(capsys, "start", where, "cuda_tiles")  # begun anew: so are its hints
    assert _run(capsys, "hint", "cuda_tiles", where)[1].startswith("hint 1 of")


def test_what_is_not_installed_is_not_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cuda_kernel.cu").write_text(solved("cuda_kernel"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, out, _ = _run(capsys, "check", str(tmp_path), "cuda_kernel")
    assert code == 1
    assert "· cuda_kernel: not checked: it compiles CUDA sources with a C++ compiler and finds none" in out
    assert "install one" in out and "0 of 1 done" in out


def test_solution_is_printed_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "solution", "online_softmax")
    assert code == 0
    assert re.match(r"tilewise/softmax.py, lines \d+ to \d+:\n\n +# 5 row_max", out)
    assert "rescale = np.exp(self.row_max - shift)" in out


@pytest.mark.parametrize(
    "argv, told",
    [
        (["check", "nonsense"], "expected a folder or one of online_softmax, .* got 'nonsense'"),
        (["check", "."], r"'\.' has no exercises; `tilewise lab start \.` writes them"),
        (["check", ".", "--limit", "0"], "--limit: expected seconds, more than 0, got 0"),
        (["hint", "softmax"], "EXERCISE: expected one of .* got 'softmax'"),
        (["start", "a-file"], "DIR: expected a folder, got the file 'a-file'"),
    ],
)
def test_mistakes_on_the_command_line(
    argv: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    code, _, err = _run(capsys, *argv)
    assert code == 2
    assert re.search(told, err)


def test_help_names_every_exercise() -> None:
    assert lab.EXERCISES == ", ".join(NAMES)
