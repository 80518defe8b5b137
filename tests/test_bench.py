"""The benchmark's method: turns, medians, judgement, memory, and what is said when something does not run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise import reference
from tilewise.bench import contestants, judge, measure, memory, peers, run, table
from tilewise.bench.contestants import Contestant, Entry, RefusedError
from tilewise.bench.judge import Judge
from tilewise.bench.problem import VARIANTS, Cell, Problem
from tilewise.cli import UserError
from tilewise.cli import bench as command

FAST = run.Settings(repeat=3, budget=0.2, memory=False)
NOW = measure.wall_timer()


def cli(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", *argv])
    return int(args.run(args))


def sweep(*who: Contestant, settings: run.Settings = FAST) -> run.Sweep:
    return run.Sweep(who, settings, NOW)


def made_up(name: str, answer: Any, ours: bool = False) -> Contestant:
    return Contestant(name, lambda problem: Entry(lambda d_out: answer(problem), lambda x: x), ours=ours)


def exact(problem: Problem) -> tuple[Any, ...]:
    return (reference.forward(problem.spec, problem.q, problem.k, problem.v).out.astype(np.float32),)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the command, read back from its JSON."""
    path = tmp_path_factory.mktemp("bench") / "r.json"
    assert (
        cli(
            "--quick",
            "--n",
            "64,96",
            "--variants",
            "causal,softcap",
            "--repeat",
            "3",
            "--no-memory",
            "--json",
            str(path),
        )
        == 0
    )
    return dict(json.loads(path.read_text()))


# -- the command ------------------------------------------------------------------------------------------------------


def test_json_has_a_record_for_every_cell_and_contestant(results: dict[str, Any]) -> None:
    assert results["schema"] == run.SCHEMA
    assert {"cpu", "cores", "memory_bytes", "os", "python", "numpy", "blas", "torch", "torch_threads", "gpu"} <= set(
        results["machine"]
    )
    who = {"tilewise numpy", "torch sdpa", "torch naive", "numpy naive"} - set(results["missing"])
    keys = {(r["variant"], r["n"], r["contestant"]) for r in results["records"]}
    assert {(v, n, c) for v in ("causal", "softcap") for n in (64, 96) for c in who} <= keys
    assert len({tuple(sorted(r)) for r in results["records"]}) == 1  # the same fields in all
    for r in results["records"]:
        if r["status"] == "ok":
            assert 0 < r["min_ms"] <= r["p10_ms"] <= r["median_ms"] <= r["p90_ms"]
            assert r["repetitions"] >= 1 and r["gflops"] > 0 and r["error"] < 1e-5


def test_json_names_no_place_or_person(results: dict[str, Any]) -> None:
    text = json.dumps(results)
    assert str(Path.home()) + "/" not in text and str(Path.cwd()) not in text and os.uname().nodename not in text
    assert run._failure(OSError("no /home/someone/x.so")).reason.endswith("/home/someone/x.so")
    record = run._record(Cell("full", 8, 8).describe(), made_up("a", exact), RefusedError("failed", "no /home/me/x.so"))
    assert record["reason"] == "no <path>"


def test_a_peer_that_cannot_express_a_variant_says_so(results: dict[str, Any]) -> None:
    refused = [r for r in results["records"] if r["contestant"] == "torch sdpa" and r["variant"] == "softcap"]
    assert all(r["status"] == "cannot express" and r["median_ms"] is None for r in refused)
    assert "torch sdpa" in results["missing"] or len(refused) == 2


def test_memory_is_measured_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    assert cli("--quick", "--n", "512", "--kernel", "numpy", "--repeat", "3", "--json", str(path)) == 0
    shown = capsys.readouterr()
    assert "geometric mean of 1 cells" in shown.out and "extra memory" in shown.out and shown.err == ""
    found = {r["contestant"]: r for r in json.loads(path.read_text())["records"]}
    matrix = found["numpy naive"]["matrix_bytes"]
    assert matrix == 2 * 512 * 512 * 4
    assert found["numpy naive"]["extra_bytes"] >= 0.9 * matrix
    assert all(r["memory_reason"] is None for r in found.values())


def test_missing_torch_is_named_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    present, missing = contestants.installed()
    assert [c.name for c in present][-1] == "numpy naive"
    assert set(missing) >= {"torch sdpa", "torch naive"} and "pip install" in missing["torch sdpa"]
    assert "not here: torch sdpa" in table.text(run.results([], {}, missing, "cpu"))
    with pytest.raises(UserError, match=r"--gpu needs PyTorch; pip install"):
        cli("--gpu")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--n", "12,x"], "--n: expected a whole number of at least 1, got 'x'"),
        (["--n", ","], "--n: expected a list such as 512"),
        (["--n", "0"], "got '0'"),
        (["--d", "1024"], "--d: expected a whole number from 1 to 512, got '1024'"),
        (["--variants", "casual"], "there is no 'casual'; expected some of full, causal"),
        (["--dtype", "int8"], "there is no 'int8'; expected some of float32"),
        (["--heads", "4", "--heads-k", "3"], "expected a divisor of the 4 query heads, got 3"),
        (["--kernel", "cobol"], "there is no 'cobol'; expected one of cpu, numpy"),
        (["--budget", "nan"], "expected a number of seconds above 0, got 'nan'"),
        (["--repeat", "-1"], "got '-1'"),
        (["--json", "/no/such/folder/x.json"], "there is no folder"),
        (["--plot", "picture.jpeg"], "ending in .png"),
        (["--from", "nothing.json"], "cannot read 'nothing.json'"),
    ],
)
def test_wrong_options(argv: list[str], message: str) -> None:
    with pytest.raises(UserError) as told:
        cli(*argv)
    assert message in str(told.value)


def test_results_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text, message in (("{", "is not JSON"), ("[]", "schema None"), ('{"schema": 99}', "schema 99")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            cli("--from", str(path))


def test_gpu_without_one_is_a_user_error() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(UserError, match="--gpu needs PyTorch with CUDA"):
        cli("--gpu")


def test_the_command_imports_neither_torch_nor_matplotlib() -> None:
    code = "import sys, tilewise.cli.bench; print(sorted({'torch', 'matplotlib', 'tilewise.bench'} & set(sys.modules)))"
    assert memory.in_child(code, "", 60) == "[]"


# -- time -------------------------------------------------------------------------------------------------------------


def test_contestants_take_turns_and_a_slow_one_stops_earlier() -> None:
    order: list[str] = []
    actions = {name: lambda name=name: order.append(name) for name in "ABC"}
    clock = iter(range(100))
    seconds, failed = measure.round_robin(
        actions, {"A": 3, "B": 1, "C": 3}, measure.wall_timer(lambda: float(next(clock))), 2, lambda action: action()
    )
    assert "".join(order) == "AAABBCCCAACC"
    assert seconds == {"A": [1, 1, 1], "B": [1], "C": [1, 1, 1]} and not failed


@pytest.mark.parametrize(("takes", "calls"), [(0.01, 5), (0.03, 3), (2.0, 1)])
def test_a_turn_begins_with_untimed_calls(takes: float, calls: int) -> None:
    now, made = [0.0], []

    def action() -> None:
        made.append(1)
        now[0] += takes

    measure.warm_up(action, lambda: now[0])
    assert len(made) == calls


def test_what_was_measured_before_ctrl_c_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    whole = run.Sweep.cell

    def stopped(self: run.Sweep, cell: Any) -> Any:
        if cell.n == 32:
            raise KeyboardInterrupt
        return whole(self, cell)

    monkeypatch.setattr(run.Sweep, "cell", stopped)
    assert cli("--quick", "--n", "16,32", "--no-memory") == 0
    out, err = capsys.readouterr()
    assert "causal, n 16" in out
    assert "stopped after 1 of 2 cells" in err


def test_a_failure_in_its_turn_leaves_the_others_alone() -> None:
    calls = iter([None, None])
    seconds, failed = measure.round_robin({"A": lambda: next(calls), "B": lambda: None}, {"A": 4, "B": 4}, NOW)
    assert len(seconds["B"]) == 4 and isinstance(failed["A"], StopIteration)


def test_times_are_medians_with_their_spread() -> None:
    times = measure.Times.of([5.0, 1.0, 2.0, 3.0, 100.0])
    assert (times.median, times.min, times.repetitions) == (3.0, 1.0, 5)
    assert times.p10 == pytest.approx(1.4) and times.p90 == pytest.approx(62.0)


def test_repetitions_follow_the_budget() -> None:
    assert measure.repetitions(0.001, budget=1, most=20) == 20
    assert measure.repetitions(0.1, budget=1, most=20) == 10
    assert measure.repetitions(0.9, budget=1, most=20) == measure.AT_LEAST
    assert measure.repetitions(1.1, budget=1, most=20) == 1


def test_a_call_expected_to_take_too_long_is_not_made() -> None:
    slow = made_up("slow", exact)
    s = sweep(slow, settings=replace(FAST, budget=1e-9))
    first, second = s.run([Cell("full", 16, 8), Cell("full", 64, 8)])
    assert first["status"] == "ok" and first["repetitions"] == 1
    assert second["status"] == "skipped" and "a call would take about" in second["reason"]


# -- right and wrong --------------------------------------------------------------------------------------------------


def test_wrong_failing_and_starved_contestants_are_shown_as_such() -> None:
    def broken(problem: Problem) -> Any:
        raise RuntimeError("it broke")

    def starved(problem: Problem) -> Any:
        raise MemoryError("64 GiB")

    who = {"right": exact, "off": lambda p: (exact(p)[0] + 0.01,), "nan": lambda p: (exact(p)[0] * np.nan,)}
    records = sweep(
        *(made_up(name, answer) for name, answer in (who | {"broken": broken, "starved": starved}).items())
    ).cell(Cell("causal", 40, 16))
    found = {r["contestant"]: r for r in records}
    statuses = {name: r["status"] for name, r in found.items()}
    assert statuses == {"right": "ok", "off": "wrong", "nan": "wrong", "broken": "failed", "starved": "out of memory"}
    assert found["off"]["error"] == pytest.approx(0.01, rel=0.01) and found["nan"]["error"] is None
    assert found["right"]["ratio"] == 1  # a wrong peer is not the best peer
    text = "\n".join(table._table(records))
    assert "WRONG" in text and "not finite" in text and "failed: RuntimeError: it broke" in text
    assert "off: wrong or failed in 1 cells" in table.summary(records)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sample_of_rows_judges_as_the_whole_would(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.make(Cell(variant, 90, 8, heads=2, heads_k=1, backward=True))
    whole = reference.forward(problem.spec, problem.q, problem.k, problem.v).out
    monkeypatch.setattr(judge, "SAMPLED", 24)
    sampled = Judge(problem)
    assert sampled.rows.tolist()[0] == 0 and sampled.rows.tolist()[-1] == 89 and sampled.rows.size == 24
    assert np.allclose(sampled.expected[0], whole[:, :, sampled.rows], rtol=0, atol=1e-12)
    grads = reference.backward(problem.spec, problem.q, problem.k, problem.v, sampled.d_out)
    for found, want in zip(sampled.expected[1:], (grads.q[:, :, sampled.rows], grads.k, grads.v), strict=True):
        assert np.allclose(found, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_installed_contestant_is_right(variant: str, dtype: str) -> None:
    """A peer that computes something else would make the comparison worthless."""
    who, _ = contestants.installed()
    for backward in (False, True):
        cell = Cell(variant, 70, 16, dtype, batch=2, heads=4, heads_k=2, backward=backward)
        problem = Problem.make(cell)
        against = Judge(problem)
        for contestant in who:
            if variant == "softcap" and contestant.name == "torch sdpa":
                continue
            entry = contestant.enter(problem)
            verdict = against.verdict(entry.run(entry.put(against.d_out)))
            assert not verdict.wrong, (contestant.name, verdict)


@pytest.mark.parametrize("variant", VARIANTS)
def test_visible_pairs_are_counted_exactly(variant: str) -> None:
    problem = Problem.make(Cell(variant, 600, 4, heads=2, heads_k=2))
    seen = 600 * 600 if problem.mask is None else int(problem.mask.sum())
    assert problem.visible == 2 * seen and problem.flops == 4 * 2 * seen * 4


def test_an_output_left_unwritten_is_found() -> None:
    """Without poisoned memory an allocator may hand the last contestant's right answer to one that writes nothing."""
    forgetful = made_up("forgetful", lambda p: (np.empty_like(p.q),))
    for n in (16, 700):
        records = sweep(made_up("right", exact), forgetful).cell(Cell("full", n, 16))
        assert [r["status"] for r in records] == ["ok", "wrong"]


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="peak memory is measured on Linux and macOS")
def test_a_child_that_takes_64_mib_is_measured_so() -> None:
    code = """
import numpy as np
from tilewise.bench.memory import peak_growth
np.ones(12 << 20)  # freed before the measurement, so that it must not hide what comes
print(peak_growth(lambda: np.ones(8 << 20)))
"""
    assert int(memory.in_child(code, "", 60)) == pytest.approx(64 << 20, rel=0.1)


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(RefusedError, match="ValueError: no good"):
        memory.in_child("raise ValueError('no good')", "", 60)
    with pytest.raises(RefusedError, match="took more than 1 s"):
        memory.in_child("import time; time.sleep(60)", "", 1)


def test_naive_attention_is_not_run_where_its_matrix_would_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.machine, "available_memory", lambda: 1 << 20)
    naive = peers.FROM_NUMPY[0]
    (record,) = sweep(naive).cell(Cell("full", 200, 8))
    assert record["status"] == "skipped" and str(3 * 4 * 200 * 200 * 4) in record["reason"]
    (record,) = sweep(naive).cell(Cell("bias", 2000, 8))
    assert record["status"] == "skipped" and record["reason"].startswith("the inputs")


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_results_are_drawn_without_running(results: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "r.json"
    source.write_text(json.dumps(results))
    assert cli("--from", str(source), "--plot", str(tmp_path / "out.png")) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert cli("--from", str(source), "--plot", str(tmp_path)) == 0
    assert (tmp_path / "bench-float32-forward.png").exists()


def test_a_plot_without_matplotlib_fails_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        cli("--plot", str(tmp_path / "x.png"))
