"""The command line and silly or hostile arguments: an exit code and a line, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewise import cli
from tilewise.bench import ranks, roofline, run
from tilewise.bench.accuracy import run as accuracy
from tilewise.cli import explain_server
from tilewise.kernels.cuda import compiler
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel
from tilewise.linear import bench as linear
from tilewise.referee import results as trials

NUMBERS = (
    "-1", "0", "9" * 30, "9" * 5000, "", "nan", "inf", "1e400", "٣", "1_0", "0x10", "1.5", "abc", "💥", "\udcff",
    ",", " ",
)  # fmt: skip
TEXTS = (
    "", "(", ")", "S", "Q", "K<=", "💥", "\udcff", "lambda: 0", "'a'", "[1]", "[[1]]", "document([])",
    "document([1,2])",
    "alibi(0)", "alibi(1e9)", "alibi(99999999)", f"window({'9' * 30})", "window(nan)", f"t5([1,2],{'9' * 30})",
    "load([1],99)", "load([],K)", "load([1,2],K)", "K//0", "1/0", "inf", "S*1e38*1e38", "exp(S*1000)", "log(S)",
    "where(K<Q,S,inf)", "(" * 300 + "S" + ")" * 300, "~" * 3000 + "(K<Q)", "S" + "+S" * 20000, "K<1;K<2", "t0=K", "a0",
    "K<Q<H", "S**2", "f'{S}'", "softcap(1e-320)", "causal(**{})", "window(1,1,1)", "min()", "load([True,False],Q%2)",
    "load([1,2],Q%2)==load([1,2],K%2)", f"document([{','.join('1' * 1024)}])",
)  # fmt: skip
FILES = (
    "", "nope/x.json", "/proc/self/mem", "💥/💥", "a" * 5000, ".", "bad.json", "list.json", "deep.json", "bytes.json",
    "old.json", "linear.json", "ranks.json", "accuracy.json", "trial.json",
)  # fmt: skip
BROKEN = {
    "bad.json": "{", "list.json": "[1]", "deep.json": "[" * 100_000, "bytes.json": "\udcff",
    "old.json": json.dumps({"schema": run.SCHEMA, "records": [{}]}),
    "linear.json": json.dumps({"schema": linear.SCHEMA, "records": [{}]}),
    "accuracy.json": json.dumps({"schema": accuracy.SCHEMA, "records": [{}]}),
    "ranks.json": json.dumps({"schema": ranks.SCHEMA, "records": 5}),
    "trial.json": json.dumps({"schema": trials.SCHEMA, "records": [{}], "faults": 5}),
}  # fmt: skip
_SMALL = {
    "plan": (), "explain": ("--n", "16", "--block", "8", "-o", "page.html"), "bench": ("--n", "16", "--no-memory"),
    "bench --linear": ("--n", "16", "--repeat", "1"), "demo": (), "tune": (), "warmup": (), "lab check": (),
    "build cute": ("--arch", "sm_90a", "--out", "kernels"), "judge": ("numpy",),
}  # fmt: skip
_SIZES = {
    "plan": ("--n", "--n-q", "--n-k", "--block", "--d", "--batch", "--heads", "--heads-k", "--head", "--arch"),
    "explain": ("--n", "--n-q", "--block", "--d", "--heads", "--head", "--magnitude", "--seed", "--port"),
    "bench": ("--n", "--d", "--variants", "--dtype", "--batch", "--heads-k", "--kernel", "--threads", "--repeat",
              "--budget", "--tolerance", "--parallel", "--cpu", "--gpu"),
    "bench --linear": ("--n", "--d", "--heads", "--kernel", "--repeat"),
    "demo": ("--kernel",),
    "tune": ("--d", "--passes", "--device"),
    "warmup": ("--variants", "--d", "--d-v", "--dtype", "--n", "--arch"),
    "lab check": ("--limit",),
    "build cute": ("--arch", "--d", "--variants", "--dtype", "--projection"),
    "judge": ("--calls", "--seed", "--features", "--dtype", "--only", "--threads", "--timeout", "--budget", "--jobs",
              "--split"),
}  # fmt: skip
_PLACES = (
    "bench --from", "bench --json", "bench --plot", "bench --report", "bench --linear --from",
    "bench --linear --n 16 --repeat 1 --json", "bench --cpu --from", "bench --gpu --from", "bench --parallel --from",
    "bench --report . --against", "bench --accuracy --from", "bench --accuracy --from accuracy.json --json",
    "judge numpy --json", "explain --n 16 --block 8 -o", "lab check", "lab hint", "lab solution", "lab start",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Arguments are looked at for real; what would then be measured, compiled or served is left out."""

    def stopped(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(CudaSimKernel, "unavailable", lambda self: "left out by this test")
    monkeypatch.setattr(run.Sweep, "run", lambda self, cells: [])
    monkeypatch.setattr(roofline, "measured", lambda threads: roofline.UNKNOWN)
    monkeypatch.setattr(linear, "medians", lambda repeat, *calls: [1.0] * len(calls))
    monkeypatch.setattr(ranks, "results", stopped)
    monkeypatch.setattr(compiler, "without_nvrtc", lambda: "left out by this test")
    monkeypatch.setattr("tilewise.kernels.cute.compiler.not_installed", lambda: "left out by this test")
    monkeypatch.setattr("tilewise.lab.exercises.grading.graded", stopped)
    monkeypatch.setattr("tilewise.cli.demo.run", stopped, raising=True)
    monkeypatch.setattr("tilewise.cli.judge.sessions", stopped)
    monkeypatch.setattr(explain_server._Server, "serve_forever", stopped)
    for name, text in BROKEN.items():
        (tmp_path / name).write_text(text, errors="surrogateescape")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning tells a user nothing
        warnings.filterwarnings("default", "Tilewise computes with NumPy")
        yield


def _ends_well(capsys: pytest.CaptureFixture[str], *argv: str) -> None:
    try:
        code: Any = cli.main(argv)
    except SystemExit as error:  # argparse
        code = error.code
    out, err = capsys.readouterr()
    assert code in (0, 1, 2, 130), argv
    assert "Traceback" not in out + err, argv
    assert code == 0 or out or err, f"{argv}: nothing says why"


@pytest.mark.parametrize("number", NUMBERS, ids=ascii)
@pytest.mark.parametrize("command", _SIZES)
def test_numbers(capsys: pytest.CaptureFixture[str], command: str, number: str) -> None:
    for option in _SIZES[command]:
        given = [option, number] if option != "--port" else [f"--port={number}", "--serve"]
        _ends_well(capsys, *command.split(), *_SMALL[command], *given)


@pytest.mark.parametrize("text", TEXTS, ids=lambda x: ascii(x[:40]))
def test_expressions(capsys: pytest.CaptureFixture[str], text: str) -> None:
    for option in ("--mask", "--score"):
        _ends_well(capsys, "plan", f"{option}={text}")
        _ends_well(capsys, "plan", f"{option}={text}", "--n", "0", "--json")
        _ends_well(capsys, "explain", *_SMALL["explain"], f"{option}={text}")


@pytest.mark.parametrize("file", FILES, ids=lambda x: ascii(x[:40]))
@pytest.mark.parametrize("command", _PLACES)
def test_files(capsys: pytest.CaptureFixture[str], command: str, file: str) -> None:
    _ends_well(capsys, *command.split(), file)


def test_a_folder_of_an_exercises_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Its hint was looked for in that folder, and all exercises were asked for."""
    assert cli.main(["lab", "start", "."]) == 0
    Path("online_softmax").mkdir()
    assert cli.main(["lab", "hint", "online_softmax"]) == 0
    assert "hint 1 of " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["old.json", "linear.json", "ranks.json", "accuracy.json"])
def test_a_file_that_lacks_what_its_schema_has(capsys: pytest.CaptureFixture[str], name: str) -> None:
    suite = {"linear.json": ["--linear"], "ranks.json": ["--parallel"], "accuracy.json": ["--accuracy"]}.get(name, [])
    assert cli.main(["bench", *suite, "--from", name]) == 2
    assert capsys.readouterr().err.startswith(f"tilewise: --from: '{name}' is not as its schema has it: ")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
@pytest.mark.parametrize(
    "arguments",
    ["--help", "plan --n 4096", "nonsense"]
    + [pytest.param(x, marks=pytest.mark.slow) for x in ("doctor", "lab --help", "demo --trace")],
)
def test_a_reader_that_went_away(arguments: str) -> None:
    script = f"{sys.executable} -m tilewise {arguments} | true"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert "Exception" not in done.stderr and "Traceback" not in done.stderr
    assert ("nonsense" in done.stderr) == (arguments == "nonsense")


def test_without_an_output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As `tilewise ... >&-` starts it."""
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["explain", "--n", "8", "--block", "8", "-o", "nope/page.html"]) == 1
    assert capsys.readouterr().err.endswith("nope/page.html: No such file or directory\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_is_told_once() -> None:
    script = f"{sys.executable} -m tilewise plan > /dev/full"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "tilewise: No space left on device\n")
