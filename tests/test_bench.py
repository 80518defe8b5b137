"""The benchmark's method: turns, medians, judgement, memory, and what is said when something does not run."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import fake_contestants as fakes
from tilewise import reference
from tilewise.bench import contestants, headline, judge, machine, measure, peers, run, table
from tilewise.bench.contestants import Contestant
from tilewise.bench.judge import Judge
from tilewise.bench.problem import VARIANTS, Cell, Problem
from tilewise.bench.refusal import RefusedError, refusal
from tilewise.cli import UserError, bench_options
from tilewise.cli import bench as command

FAST = run.Settings(repeat=3, budget=0.2, memory=False)


def cli(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", *argv])
    return int(args.run(args))


def sweep(*who: Contestant, cells: list[Cell], settings: run.Settings = FAST) -> list[dict[str, Any]]:
    return run.Sweep(who, settings).run(cells)


def square(variant: str, n: int, d: int, **options: Any) -> Cell:
    return Cell(variant, n, n, d, **options)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the command, read back from its JSON; one peer of PyTorch's, which takes long to start."""
    path = tmp_path_factory.mktemp("bench") / "r.json"
    small = ("--quick", "--n", "64,96", "--variants", "causal,softcap", "--repeat", "3", "--no-memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "FROM_TORCH", peers.FROM_TORCH[:1])
        assert cli(*small, "--threads", "1", "--json", str(path)) == 0
    return dict(json.loads(path.read_text()))


# -- the command ------------------------------------------------------------------------------------------------------


def test_json_has_a_record_for_every_cell_and_contestant(results: dict[str, Any]) -> None:
    assert results["schema"] == run.SCHEMA
    assert {"cpu", "cores", "memory_bytes", "os", "python", "numpy", "blas", "torch", "torch_threads", "gpu"} <= set(
        results["machine"]
    )
    who = {"tilewise numpy", "torch sdpa", "numpy naive"} - set(results["missing"])
    keys = {(r["variant"], r["n_k"], r["contestant"]) for r in results["records"]}
    assert {(v, n, c) for v in ("causal", "softcap") for n in (64, 96) for c in who} <= keys
    assert len({tuple(sorted(r)) for r in results["records"]}) == 1  # the same fields in all
    for r in results["records"]:
        if r["status"] == "ok":
            assert 0 < r["min_ms"] <= r["p10_ms"] <= r["median_ms"] <= r["p90_ms"]
            assert r["repetitions"] == 3 and r["gflops"] > 0 and r["error"] < 1e-5 and r["n_q"] == r["n_k"]
    assert results["machine"]["blas_threads"]["OMP_NUM_THREADS"] == "1"


def test_json_names_no_place_or_person(results: dict[str, Any]) -> None:
    text = json.dumps(results)
    assert str(Path.home()) + "/" not in text and str(Path.cwd()) not in text
    assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", text)  # a short name may be part of a word
    assert refusal(OSError("no /home/someone/x.so")).reason.endswith("/home/someone/x.so")
    cell = square("full", 8, 8).describe()
    record = run._record(cell, fakes.right, RefusedError("failed", "no /home/me/x.so"))
    assert record["reason"] == "no <path>"


def test_a_peer_that_cannot_express_a_variant_says_so(results: dict[str, Any]) -> None:
    refused = [r for r in results["records"] if r["contestant"] == "torch sdpa" and r["variant"] == "softcap"]
    assert all(r["status"] == "cannot express" and r["median_ms"] is None for r in refused)
    assert "torch sdpa" in results["missing"] or len(refused) == 2


def test_memory_is_measured_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "FROM_TORCH", ())
    monkeypatch.setattr(machine, "load", lambda: 0.0)
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
    assert "not here: torch sdpa" in table.text(run.results([], {}, missing))
    with pytest.raises(UserError, match=r"--device cuda needs PyTorch; pip install"):
        cli("--device", "cuda")


def test_gpus_are_looked_for_before_who_takes_part_is_told() -> None:
    """PyTorch, which knows of GPUs, is imported for the peers anyway: "not imported" would be no reason."""
    script = "from tilewise.bench import contestants; print(contestants.installed()[1])"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "is not imported" not in told


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
        (["--kernel", "cobol"], "--kernel: expected one of cpu, numpy"),
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
    with pytest.raises(UserError, match="--device cuda needs PyTorch with CUDA"):
        cli("--device", "cuda")


def test_the_command_imports_neither_torch_nor_matplotlib() -> None:
    code = "import sys, tilewise.cli.bench; print(sorted({'torch', 'matplotlib', 'tilewise.bench'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- time -------------------------------------------------------------------------------------------------------------


def test_contestants_take_turns_and_all_are_spread_over_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "BLOCK", 2)
    order: list[str] = []

    def turn(name: str, count: int) -> list[float]:
        order.append(name * count)
        return [1.0] * count

    turns = {name: partial(turn, name) for name in "ABC"}
    seconds, failed = measure.round_robin(turns, {"A": 6, "B": 2, "C": 4})
    assert order == ["AA", "B", "CC", "AA", "B", "C", "AA", "C"]
    assert {name: len(found) for name, found in seconds.items()} == {"A": 6, "B": 2, "C": 4} and not failed


@pytest.mark.parametrize(("takes", "calls"), [(0.0005, 40), (0.015, 2), (0.1, 1), (0.6, 0)])
def test_a_turn_begins_with_untimed_calls(takes: float, calls: int) -> None:
    now, made = [0.0], []

    def action() -> None:
        made.append(1)
        now[0] += takes

    measure.warm_up(action, takes, lambda: now[0])
    assert len(made) == pytest.approx(calls, abs=1 if calls > 2 else 0)


def test_a_call_is_timed_without_the_end_of_its_result() -> None:
    clock = iter([10.0, 13.0])
    assert measure.wall_timer(lambda: next(clock))(lambda: None) == 3


def test_what_was_measured_before_ctrl_c_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    whole = run.Sweep.cell

    def stopped(self: run.Sweep, cell: Any, team: Any) -> Any:
        if cell.n_k == 32:
            raise KeyboardInterrupt
        return whole(self, cell, team)

    monkeypatch.setattr(run.Sweep, "cell", stopped)
    monkeypatch.setattr(peers, "FROM_TORCH", ())
    assert cli("--quick", "--n", "16,32", "--no-memory") == 0
    out, err = capsys.readouterr()
    assert "causal, n 16" in out
    assert "stopped after 1 of 2 cells" in err


def test_a_failure_in_its_turn_leaves_the_others_alone() -> None:
    tired, right = sweep(fakes.tiring, fakes.right, cells=[square("full", 20, 8)])
    assert (tired["status"], tired["reason"]) == ("failed", "RuntimeError: it broke")
    assert right["status"] == "ok" and right["repetitions"] == 3


def test_times_are_medians_with_their_spread() -> None:
    times = measure.Times.of([5.0, 1.0, 2.0, 3.0, 100.0])
    assert (times.median, times.min, times.repetitions) == (3.0, 1.0, 5)
    assert times.p10 == pytest.approx(1.4) and times.p90 == pytest.approx(62.0)


def test_repetitions_follow_the_budget() -> None:
    assert measure.repetitions(0.001, budget=1, most=20) == 20
    assert measure.repetitions(0.1, budget=1, most=20) == 10
    assert measure.repetitions(0.9, budget=1, most=20) == measure.AT_LEAST
    assert measure.repetitions(1.1, budget=1, most=20) == 1
    assert measure.repetitions(1.1, budget=1, most=20, least=3) == 3


def test_a_call_expected_to_take_too_long_is_not_made() -> None:
    cells = [square("full", 16, 8), square("full", 64, 8)]
    first, second = sweep(fakes.right, cells=cells, settings=replace(FAST, budget=1e-9))
    assert first["status"] == "ok" and first["repetitions"] == 1
    assert second["status"] == "skipped" and "a call would take about" in second["reason"]


# -- what may be claimed ----------------------------------------------------------------------------------------------


def _timed(name: str, p10: float, median: float, p90: float, **changed: Any) -> dict[str, Any]:
    cell = dict.fromkeys(table.CELL, "same")
    times = {"median_ms": median, "p10_ms": p10, "p90_ms": p90}
    return {**cell, "contestant": name, "ours": name == "ours", "status": "ok", "ratio": None, **times, **changed}


@pytest.mark.parametrize(
    ("peer", "load", "line"),
    [
        ((1.9, 2.0, 2.1), 0.3, "ours: 2.00x the speed of the best peer, 1.81x to 2.21x by the spread (geometric mean"),
        ((1.9, 2.0, 2.1), None, "ours: 2.00x the speed of the best peer"),
        ((0.98, 1.01, 1.04), 0.3, "ours: as fast as the best peer, within the spread of 0.93x to 1.09x"),
        ((0.9, 32.81, 60.0), 0.3, "ours: 0.86x to 63.16x the speed of the best peer: repetitions differ too much"),
        ((31.0, 32.81, 35.0), 1.9, "The machine was busy: a load of 1.9 on 2 cores before the run, "),
    ],
)
def test_a_headline_says_what_the_spread_supports(
    peer: tuple[float, float, float], load: float | None, line: str
) -> None:
    records = [
        _timed("ours", 0.95, 1.0, 1.05),
        _timed("peer", *peer),
        _timed("slow peer", 50.0, 80.0, 90.0),
        _timed("wrong peer", 0.1, 0.1, 0.1, status="wrong"),
        _timed("refused", 0.0, 0.0, 0.0, median_ms=None, status="skipped"),
    ]
    told = table.summary({"records": records, "load": load, "machine": {"cores": 2}})
    assert told[0].startswith(line)
    assert len(told) == 2 and told[1] == "wrong peer: wrong or failed in 1 cells"
    if not line.startswith("ours: 2.00x"):
        assert not any(re.search(r"\d+x the speed", x) and " to " not in x for x in told), "there is no single number"


def test_the_mean_is_over_cells() -> None:
    cells = [
        [_timed("ours", 1, 1, 1, n_k=n), _timed("peer", ratio, ratio, ratio, n_k=n)] for n, ratio in ((1, 2), (2, 8))
    ]
    told = headline.lines(cells)
    assert told == ["ours: 4.00x the speed of the best peer, 4.00x to 4.00x by the spread (geometric mean of 2 cells)"]
    assert headline.by_cell([r for cell in cells for r in cell], table.CELL) == cells


def test_a_run_notes_how_busy_the_machine_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "FROM_TORCH", ())
    monkeypatch.setattr(machine, "load", lambda: 32.5)
    path = tmp_path / "r.json"
    small = ("--quick", "--n", "64", "--kernel", "numpy", "--repeat", "3", "--no-memory")
    assert cli(*small, "--json", str(path)) == 0
    out = capsys.readouterr().out
    assert f"The machine was busy: a load of 32.5 on {machine.cores()} cores before the run, " in out
    assert "the speed of the best peer" not in out
    assert json.loads(path.read_text())["load"] == 32.5
    assert cli("--from", str(path)) == 0
    assert "The machine was busy" in capsys.readouterr().out


# -- right and wrong --------------------------------------------------------------------------------------------------


def test_wrong_failing_and_starved_contestants_are_shown_as_such() -> None:
    who = (fakes.ours, fakes.right, fakes.off, fakes.undefined, fakes.broken, fakes.starved, fakes.forgetful)
    records = sweep(*who, cells=[square("causal", 40, 16)])
    found = {r["contestant"].partition(":")[2]: r for r in records}
    assert {name: r["status"] for name, r in found.items()} == {
        "ours": "ok", "right": "ok", "off": "wrong", "undefined": "wrong", "forgetful": "wrong",
        "broken": "failed", "starved": "out of memory",
    }  # fmt: skip
    assert found["off"]["error"] == pytest.approx(0.01, rel=0.01) and found["undefined"]["error"] is None
    assert found["right"]["ratio"] == 1  # a wrong peer is not the best peer
    text = table.text(run.results(records, {}, {}))
    assert "WRONG" in text and "not finite" in text and "failed: RuntimeError: it broke" in text
    assert "fake_contestants:off: wrong or failed in 1 cells" in text


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_process_that_ends_is_a_result_and_the_next_cell_gets_a_new_one() -> None:
    records = sweep(fakes.crashing, fakes.killed, cells=[square("full", 16, 8), square("full", 24, 8)])
    assert [r["status"] for r in records] == ["failed", "out of memory", "ok", "ok"]
    assert records[0]["reason"] == "its process ended with SIGABRT: something went very wrong"


def test_a_contestant_that_does_not_answer_is_given_up() -> None:
    (record,) = sweep(fakes.hanging, cells=[square("full", 16, 8)], settings=replace(FAST, timeout=1))
    assert record["status"] == "timed out" and "no answer within 1 s" in record["reason"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sample_of_rows_judges_as_the_whole_would(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.make(Cell(variant, 90, 120, 8, heads=4, heads_k=2, backward=True))
    whole = reference.forward(problem.spec, problem.q, problem.k, problem.v).out
    monkeypatch.setattr(judge, "SAMPLED", 24)
    sampled = Judge(problem)
    assert sampled.rows.tolist()[0] == 0 and sampled.rows.tolist()[-1] == 89 and sampled.rows.size == 24
    assert np.allclose(sampled.expected[0], whole[:, :, sampled.rows], rtol=0, atol=1e-12)
    grads = reference.backward(problem.spec, problem.q, problem.k, problem.v, sampled.d_out)
    for found, want in zip(sampled.expected[1:], (grads.q[:, :, sampled.rows], grads.k, grads.v), strict=True):
        assert np.allclose(found, want, rtol=0, atol=1e-12)


def test_whatever_memory_that_nobody_wrote_holds_is_wrong() -> None:
    problem = Problem.make(square("full", 16, 8))
    signalling = np.full(problem.q.shape, 0x7FA00000, np.uint32).view(np.float32)
    assert Judge(problem).verdict((signalling,)).wrong


def test_a_long_sum_may_round_but_not_forget_a_key() -> None:
    """The output of many keys is small beside the terms of its sum, whose rounding is what an honest kernel shows."""
    problem = Problem.make(Cell("full", 1, 30000, 16, heads=1, heads_k=1))
    against = Judge(problem)
    (want,) = against.expected
    assert not against.verdict([want + 1e-6]).wrong
    forgot = reference.forward(problem.spec, problem.q, problem.k[:, :, :-1], problem.v[:, :, :-1]).out
    assert against.verdict([forgot]).wrong


@pytest.mark.parametrize(("dtype", "n_k"), [("float32", 70), ("float32", 90), ("float16", 70), ("bfloat16", 70)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_installed_contestant_is_right(variant: str, dtype: str, n_k: int) -> None:
    """A peer that computes something else would make the comparison worthless."""
    who, _ = contestants.installed()
    for backward in (False, True):
        cell = Cell(variant, 70, n_k, 16, dtype, batch=2, heads=4, heads_k=2, backward=backward)
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
    problem = Problem.make(Cell(variant, 300, 600, 4, heads=2, heads_k=2))
    seen = 300 * 600 if problem.mask is None else int(problem.mask.sum())
    assert problem.visible == 2 * seen and problem.flops == 4 * 2 * seen * 4


def test_bytes_of_a_cell() -> None:
    cell = Cell("bias", 3, 50, 8, "float16", batch=2, heads=4, heads_k=2)
    problem = Problem.make(cell)
    assert cell.key_bytes == problem.k.nbytes + problem.v.nbytes
    assert cell.input_bytes == cell.key_bytes + problem.q.nbytes + problem.d_out.nbytes + 2 * 4 * 3 * 50
    assert cell.matrix_bytes == 2 * 2 * 4 * 3 * 50


# -- memory -----------------------------------------------------------------------------------------------------------


def test_naive_attention_is_not_run_where_its_matrix_would_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.machine, "available_memory", lambda: 1 << 20)
    naive = peers.FROM_NUMPY[0]
    (record,) = sweep(naive, cells=[square("full", 200, 8)])
    assert record["status"] == "skipped" and str(3 * 4 * 200 * 200 * 4) in record["reason"]
    (record,) = sweep(naive, cells=[square("bias", 2000, 8)])
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
    monkeypatch.setattr(bench_options, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        cli("--plot", str(tmp_path / "x.png"))
