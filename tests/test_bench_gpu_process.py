"""The GPU suite's processes and its command, without a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests import fake_stage as fakes  # noqa: E402
from tests.test_bench_gpu import FAST, small  # noqa: E402
from tilewise import cli  # noqa: E402
from tilewise.bench.gpu import first, run, suite  # noqa: E402
from tilewise.bench.gpu.contestants import NO_GRAD  # noqa: E402
from tilewise.bench.gpu.judge import ALLOWED  # noqa: E402
from tilewise.bench.gpu.timing import Settings  # noqa: E402
from tilewise.cli import bench_gpu  # noqa: E402

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _working_device() -> Any:
    fakes.broken.clear()
    yield
    fakes.broken.clear()


@pytest.fixture
def fake_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "STAGE", "tests.fake_stage:FakeStage")


def section_of(*peers: str, variants: tuple[str, ...] = ("full", "causal"), name: str = "gqa") -> suite.Section:
    every = tuple(small(variant) for variant in variants)
    return suite.Section(name, "a test", every, every, tuple(f"tests.fake_stage:{peer}" for peer in peers))


def test_a_contestant_that_breaks_the_gpu_costs_one_case(fake_stage: None) -> None:
    section = section_of("breaking", "right", "absent")
    with run.Suite("cpu", FAST) as playing:
        results = playing.section(section, section.cases, {"quick": False})
    full, causal = results["records"][:3], results["records"][3:]
    assert {r["status"] for r in full} == {"failed"} and {r["status"] for r in causal} == {"ok"}
    assert full[0]["reason"].startswith("tests.fake_stage:breaking left the GPU unusable: RuntimeError: an illegal")
    assert [r["ours"] for r in full] == [True, False, False]
    assert results["missing"] == {"tests.fake_stage:absent": "not installed"}
    assert results["machine"]["gpu"] == "Fake H200" and results["machine"]["matmul_tflops"] == 700.0
    assert causal[0]["fraction"] == pytest.approx(causal[0]["tflops"] / 700)
    assert json.loads(json.dumps(results, allow_nan=False)) == results


def test_results_say_how_and_of_which_sources(fake_stage: None) -> None:
    section = section_of(variants=("full",))
    with run.Suite("cpu", FAST) as playing:
        results = playing.section(section, section.cases, {"quick": False})
    assert results["method"] == {
        "rounds": 2, "warm": 0.05, "timed": 0.03, "chunk": 0.004, "most_calls": 20, "host_calls": 3,
    }  # fmt: skip
    assert set(results["source"]) == {"commit", "dirty"}


def test_first_calls_have_processes_and_caches_of_their_own(fake_stage: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "CALLER", "tests.fake_stage:FakeCaller")
    cases_of = (small("full"), small("full", backward=True))
    section = replace(section_of(variants=("full",), name="first"), first=True)
    for case in (small("causal"), small("causal", backward=True)):
        assert section.who("cpu", case) == ["tilewise cpu", "tilewise triton"]
    monkeypatch.setattr(suite.Section, "who", lambda self, kernel, case: ["tilewise cpu"])
    with run.Suite("cpu", Settings(rounds=5)) as playing:
        results = playing.section(section, cases_of, {"quick": False})
    assert results["method"] == {"rounds": first.MOST_ROUNDS}
    forward, backward = results["records"]
    for r in (forward, backward):
        assert r["status"] == "ok" and r["compiled"] == 1 and r["how"] == "first call", r
        assert r["rounds_ms"] == [3000.0, 3000.0] and r["warm_rounds_ms"] == [2000.0, 2000.0]  # no file is left over
        assert (r["median_ms"], r["warm_ms"], r["spread"], r["tflops"]) == (3000.0, 2000.0, 0.0, None)
        assert 0 < r["error"] < ALLOWED


def test_a_first_call_that_fails_is_a_result() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = first.measured(small("full"), "tilewise cpu", 1)
    assert found["status"] == "failed" and found["median_ms"] is None


def test_the_command_runs_and_writes_its_sections(
    fake_stage: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_gpu, "check_gpu", lambda option: None)
    for name in ("gqa", "launch"):
        section = section_of("right", variants=("causal",), name=name)
        monkeypatch.setitem(suite.SECTIONS, name, replace(section, host=name == "launch"))
    target = tmp_path / "gpu"
    assert (
        cli.main(
            ["bench", "--gpu", "gqa", "launch", "--kernel", "cpu", "--repeat", "2", "--quick", "--json", str(target)]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert err == "" and "causal, d 8, n 32" in out and "met. " in out
    gqa, launch = (json.loads((target / f"{name}.json").read_text()) for name in ("gqa", "launch"))
    assert gqa["options"] == {"section": "gqa", "kernel": "cpu", "rounds": 2, "quick": True}
    assert launch["records"][1]["contestant"] == "tilewise cpu" + NO_GRAD


def test_a_section_that_was_stopped_is_not_written(
    fake_stage: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(self: run.Suite, *args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_gpu, "check_gpu", lambda option: None)
    monkeypatch.setattr(run.Suite, "section", stopped)
    assert cli.main(["bench", "--gpu", "gqa", "--kernel", "cpu", "--json", str(tmp_path)]) == 130
    assert "stopped in gqa" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gpu", "--n", "64"], "--n: the suite of --gpu has its own cells; leave out --n, or --gpu"),
        (["--gpu", "--device", "cuda"], "--device: the suite of --gpu"),
        (["--gpu", "--json", "results.json"], "--json: with --gpu a folder is expected"),
        (["--gpu", "--from", "/no/such"], "with --gpu a folder with forward.json, stress.json"),
        (["--gpu"], "--gpu needs PyTorch with CUDA"),
        (["--device", "cuda"], "--device cuda needs PyTorch with CUDA"),
    ],
)
def test_wrong_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert cli.main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err


def test_results_of_another_suite_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(ROOT / "results" / "cpu" / "forward.json", tmp_path)
    assert cli.main(["bench", "--gpu", "--from", str(tmp_path)]) == 2
    assert "(schema gpu 1), got schema 2" in capsys.readouterr().err


def test_importing_the_suite_needs_neither_torch_nor_a_gpu() -> None:
    modules = "cases, contestants, counters, first, limits, plot, report, run, stage, suite, targets, timing"
    code = f"import sys; from tilewise.bench.gpu import {modules}; print({{'torch', 'triton'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
