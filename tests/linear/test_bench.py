"""Where linear attention overtakes softmax attention: found in numbers that are known, and shown by the command."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise.bench.gpu.timing import Settings
from tilewise.cli import main
from tilewise.linear import bench_gpu, reference
from tilewise.linear.bench import Row, crossover, growth
from tilewise.linear.cases import LinearCase
from tilewise.linear.contract import gradients_to_pull
from tilewise.linear.state import LinearState

LINEAR_GPU = [
    {
        "batch": 1, "n": n, "heads": 2, "d": 64, "contestant": who, "ours": who != bench_gpu.PEER, "status": "ok",
        "reason": None, "error": 2e-3, "forward_ms": ms, "backward_ms": 2 * ms, "forward_rate": 100.0,
        "backward_rate": 200.0, "forward_call_ms": ms, "backward_call_ms": 2 * ms,
        **{f"{what}_ratio": 2.0 if who != bench_gpu.PEER else None for what in bench_gpu.TARGETS},
    }
    for n in (64, 128) for who, ms in (("tilewise triton", 1.0), (bench_gpu.PEER, 2.0))
]  # fmt: skip
EXAMPLE = Path(__file__).parents[2] / "examples" / "linear_attention.py"


def test_crossover_and_growth() -> None:
    rows = [Row(n, linear=n / 1000, softmax=(n / 1000) ** 2) for n in (250, 500, 2000, 4000)]
    assert growth(rows) == pytest.approx(1.0)
    assert crossover(rows) == pytest.approx(1000.0)
    assert crossover(rows[:2]) is None
    assert crossover(rows[2:]) == 2000.0


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "linear.json"
    options = "bench --linear --n 64,32 --d 8 --heads 1 --repeat 1 --kernel numpy --json"
    assert main([*options.split(), str(file)]) == 0
    assert "time grows as n^" in capsys.readouterr().out
    assert [record["n"] for record in json.loads(file.read_text())["records"]] == [32, 64]


def test_command_refuses_other_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--linear", "--kernel", "cuda"]) != 0
    known = "cpu, numpy, triton, tilelang, tilelang-c"
    assert f"--kernel: expected one of {known} with --linear, got 'cuda'" in capsys.readouterr().err


def test_the_example_holds(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["correctness"]()
    assert capsys.readouterr().out.count("✓") == 6


def _gpu_results(records: list[Any]) -> dict[str, Any]:
    return {"schema": bench_gpu.SCHEMA, "gpu": "Fake H200", "copy": 400.0, "peer": "0.6.0", "records": records}


def test_targets_on_a_gpu() -> None:
    judged = {check.what: check for check in bench_gpu.checks(_gpu_results(LINEAR_GPU))}
    assert [(check.value, check.met) for check in judged.values()] == [
        (pytest.approx(2.0), False),
        (pytest.approx(2.0), True),
    ]
    wrong = [{**r, "status": "wrong", "reason": "off by 3%"} if r["n"] == 64 else r for r in LINEAR_GPU]
    assert all(check.value is None and "off by 3%" in check.note for check in bench_gpu.checks(_gpu_results(wrong)))
    alone = [{**r, "forward_ratio": None} for r in LINEAR_GPU if r["ours"]]
    first = next(iter(bench_gpu.checks(_gpu_results(alone))))
    assert first.met is False and f"{bench_gpu.PEER} did not run" in first.note
    text = bench_gpu.text(_gpu_results(wrong))
    assert "1, 128, 2, 64" in text and "2.00x" in text and "wrong" in text


def test_what_a_gpu_is_held_against() -> None:
    torch = pytest.importorskip("torch")
    problem = LinearCase("any", 1, 1, 1, n=600, feature_map="identity", normalize=False).problem()
    d_out, _ = gradients_to_pull(problem)
    given = (torch.from_numpy(x[0, 0]) for x in (problem.q, problem.k, problem.v, d_out))
    out, *grads = bench_gpu.expected(torch, *given)
    no_state = LinearState(*(np.zeros_like(x) for x in reference.forward(problem).state))
    want = reference.backward(problem, d_out, no_state)
    np.testing.assert_allclose(out.numpy(), reference.forward(problem).out[0, 0], rtol=1e-9, atol=1e-9)
    for got, expected in zip(grads, (want.q, want.k, want.v), strict=True):
        np.testing.assert_allclose(got.numpy(), expected[0, 0], rtol=1e-9, atol=1e-9)


def test_a_peer_that_lies_otherwise_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with a clock of its own and a stand-in for the peer."""
    torch = pytest.importorskip("torch")

    def peer(q: Any, k: Any, v: Any) -> Any:
        w = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()).tril()
        return torch.einsum("bhqk,bkhd->bqhd", w, v.float()).to(q.dtype)

    shape = bench_gpu.Shape(2, 70, 3, 16)
    ours = bench_gpu.Contestant(
        lambda q, k, v: peer(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), ours=True
    )
    wrong = bench_gpu.Contestant(lambda q, k, v: 1.1 * q * k * v, ours=True)
    broken = bench_gpu.Contestant(lambda q, k, v: q.no_such_thing(), ours=True)
    who = {"tilewise triton": ours, "tilewise wrong": wrong, bench_gpu.PEER: bench_gpu.Contestant(peer, turned=True)}
    who |= {"tilewise broken": broken}
    monkeypatch.setattr(bench_gpu, "contestants", lambda shape: who)
    monkeypatch.setattr(bench_gpu, "_times", lambda entries, settings: dict(zip(entries, (1.0, 0.1, 3.0), strict=True)))
    monkeypatch.setattr(bench_gpu, "_call_milliseconds", lambda torch, call: call() is not None and 5.0)
    monkeypatch.setattr(bench_gpu, "_DEVICE", "cpu")
    records = bench_gpu.measured(torch, shape, Settings())
    assert [r["status"] for r in records] == ["ok", "wrong", "ok", "failed"]
    assert [r["forward_ratio"] for r in records] == [3.0, pytest.approx(30.0), None, None]
    assert all(r["forward_call_ms"] == r["backward_call_ms"] == 5.0 for r in records[:3])
    assert "no_such_thing" in records[3]["reason"] and records[3]["backward_ms"] is None
