"""Where linear attention overtakes softmax attention: found in numbers that are known, and shown by the command."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tilewise.bench import machine
from tilewise.bench.gpu.timing import Settings
from tilewise.bench.stamp import stamp
from tilewise.cli import main
from tilewise.linear import bench_ahead, bench_gpu, reference
from tilewise.linear.bench import Row, crossover, growth, results
from tilewise.linear.cases import LinearCase
from tilewise.linear.contract import gradients_to_pull
from tilewise.linear.state import LinearState
from tilewise.linear.validate import prepare

LINEAR_GPU = [
    {
        "batch": 1, "n": n, "heads": 2, "d": 64, "contestant": who, "ours": who != bench_gpu.PEER, "status": "ok",
        "reason": None, "error": 2e-3, "forward_ms": ms, "backward_ms": 2 * ms, "forward_rate": 100.0,
        "backward_rate": 200.0, "forward_call_ms": ms, "backward_call_ms": 2 * ms,
        **{f"{what}_ratio": 2.0 if who != bench_gpu.PEER else None for what in bench_gpu.TARGETS},
    }
    for n in (64, 128) for who, ms in (("tilewise triton", 1.0), (bench_gpu.PEER, 2.0))
]  # fmt: skip
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "linear_attention.py"


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


def test_files_in_a_folder_and_what_was_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    options = "bench --linear --n 32,64 --d 8 --heads 1 --repeat 1 --kernel numpy --json"
    assert main([*options.split(), str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert (tmp_path / "linear.json").exists()
    assert main(["bench", "--linear", "--from", str(tmp_path), "--plot", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == told.splitlines()[:-1]
    assert (tmp_path / "linear.png").read_bytes().startswith(b"\x89PNG")
    gpu = {**_gpu_results(LINEAR_GPU), **stamp(machine.describe())}
    (tmp_path / "gpu.json").write_text(json.dumps(gpu))
    picture = tmp_path / "gpu.png"
    assert main(["bench", "--linear", "--from", str(tmp_path / "gpu.json"), "--plot", str(picture)]) == 0
    assert "flash-linear-attention" in capsys.readouterr().out and picture.exists()


def test_the_table_of_the_page_comes_from_the_file(tmp_path: Path) -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    page = ROOT / "docs" / "linear.md"
    assert "Not measured yet: `tilewise bench --linear --json results/cpu`" in tables["fill"](page, tmp_path)
    (tmp_path / "cpu").mkdir()
    found = results([Row(512, 0.002, 0.001), Row(1024, 0.004, 0.008)], 64, 8)
    (tmp_path / "cpu" / "linear.json").write_text(json.dumps(found))
    text = tables["fill"](page, tmp_path)
    assert "| 1024 | 8.00 | 4.00 | 2.00x |" in text and "grows as n^1.00. It is the faster one from n = 724 on" in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--from nowhere.json", "--from: cannot read 'nowhere.json'"),
        (f"--from {EXAMPLE}", "is not JSON"),
        ("--plot picture.pdf", "--plot: expected a file ending in .png"),
        ("--json no/such/place.json", "--json: there is no folder"),
    ],
)
def test_command_refuses_other_files(options: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--linear", *options.split()]) != 0
    assert told in capsys.readouterr().err


def test_command_refuses_other_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--linear", "--kernel", "cuda"]) != 0
    known = "cpu, numpy, triton, tilelang, tilelang-c"
    assert f"--kernel: expected one of {known} with --linear, got 'cuda'" in capsys.readouterr().err
    assert main(["bench", "--linear", "--kernel", "tilelang", "--n", "64"]) != 0
    assert "--kernel: kernel 'tilelang' cannot compute this linear attention" in capsys.readouterr().err


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_example_holds(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["correctness"](pytest.importorskip(library))
    assert capsys.readouterr().out.count("✓") == 6


def test_the_example_compares(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["comparison"]([32, 64])
    told = capsys.readouterr().out
    assert "standard ms" in told and [line.split()[0] for line in told.splitlines() if "KiB" in line] == ["32", "64"]


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
    monkeypatch.setattr(bench_gpu, "DEVICE", "cpu")
    records = bench_gpu.measured(torch, shape, Settings())
    assert [r["status"] for r in records] == ["ok", "wrong", "ok", "failed"]
    assert [r["forward_ratio"] for r in records] == [3.0, pytest.approx(30.0), None, None]
    assert all(r["forward_call_ms"] == r["backward_call_ms"] == 5.0 for r in records[:3])
    assert "no_such_thing" in records[3]["reason"] and records[3]["backward_ms"] is None


def test_what_a_peer_would_try_is_compiled_in_shares() -> None:
    """Each configuration by one process, of kernels one after the other; what does not compile is left to the peer."""

    class Tuner:
        arg_names = ("x",)

        def __init__(self, name: str, count: int, done: list[str], chosen: bool = False) -> None:
            self.fn, self.name, self.count, self.done, self.chosen = self, name, count, done, chosen

        def run(self, *args: Any, grid: Any, warmup: bool) -> None:
            if not self.chosen:
                bench_ahead._not_chosen(self, config=0)

        def prune_configs(self, kwargs: dict[str, Any]) -> list[Any]:
            return [SimpleNamespace(all_kwargs=lambda i=i: {"config": f"{self.name}{i}"}) for i in range(self.count)]

        def warmup(self, *args: Any, grid: Any, config: str) -> None:
            if config == "b1":
                raise RuntimeError("too many registers")
            self.done.append(config)

    done: list[str] = []
    for mine in range(3):
        run = bench_ahead._compiling(mine, 3, Tuner.run)
        for tuner in (Tuner("a", 4, done), Tuner("c", 5, done, chosen=True), Tuner("b", 3, done)):
            run(tuner, 1.0, grid=(1,), warmup=False)
    assert sorted(done) == ["a0", "a1", "a2", "a3", "b0", "b2"]


def test_shares_are_of_small_arrays() -> None:
    """Each process has its own, and one GPU has room for all of them."""
    assert {(shape.heads, shape.d) for shape in bench_ahead.representatives()} == {(16, 128), (32, 64)}
    assert all(shape.batch * shape.n == 16384 for shape in bench_ahead.representatives())


def test_what_a_peer_chose_before_is_not_compiled_again() -> None:
    """By Triton's own tuner, with a choice in its cache folder."""
    tuning = pytest.importorskip("triton.runtime.autotuner")
    found, compiled = [True], []
    configs = [tuning.Config({"BLOCK": size}) for size in (16, 32)]

    class Kernel:
        def run(self, *args: Any, **kwargs: Any) -> None:
            assert kwargs["BLOCK"] == 32

        def warmup(self, *args: Any, **kwargs: Any) -> None:
            compiled.append(kwargs["BLOCK"])

    class Tuner(tuning.Autotuner):  # type: ignore[misc, name-defined]
        _bench = bench_ahead._not_chosen

        def __init__(self) -> None:
            self.configs, self.arg_names, self.keys, self.cache, self.cache_results = configs, ["x"], ["x"], {}, True
            self.fn = self.base_fn = Kernel()

        def prune_configs(self, kwargs: Any) -> Any:
            return configs

        def check_disk_cache(self, key: Any, configs: Any, bench: Any) -> bool:
            if found[0]:
                self.cache[key] = self.configs_timings = configs[1]
            else:
                bench()
            return found[0]

    run = bench_ahead._compiling(0, 1, tuning.Autotuner.run)
    run(Tuner(), 1, grid=(1,), warmup=False)
    assert compiled == []
    found[0] = False
    run(Tuner(), 1, grid=(1,), warmup=False)
    assert compiled == [16, 32]


def test_everyones_kernels_are_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, peer = (bench_gpu.Contestant(lambda q, k, v: q, ours=is_ours) for is_ours in (True, False))
    who = {"tilewise triton": ours, "tilewise tilelang": ours, bench_gpu.PEER: peer}
    monkeypatch.setattr(bench_gpu, "contestants", lambda shape: who)
    monkeypatch.setattr(bench_gpu, "has_peer", lambda: True)
    monkeypatch.setattr(bench_ahead.os, "cpu_count", lambda: 2)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(bench_ahead, "_in_a_process", lambda *task: asked.append(task))
    told: list[str] = []
    bench_ahead.compile_all(told.append)
    shares = [("share", 0, 2), ("share", 1, 2)]
    calls = [("call", "tilewise triton", shape) for shape in bench_gpu.SHAPES]
    kernels = ("outputs", "segment_states", "d_segment_states", "scan", "d_query", "d_keys")
    compiled = [("kernel", name, shape) for name in kernels for shape in bench_ahead.representatives()]
    assert sorted(asked) == sorted([*calls, *compiled, *shares])
    assert told[-1] == "compiling everyone's kernels: 18 of 18 processes are done"


def test_the_kernels_compiled_ahead_are_those_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from tilewise.kernels.tilelang import library
    from tilewise.linear.kernels.tilelang import launch

    ahead, taken = [], []
    monkeypatch.setattr(bench_ahead.gpus, "capability", lambda device: (9, 0))
    monkeypatch.setattr(library, "keep", lambda build, write: ahead.append(build))
    monkeypatch.setattr(launch, "blocks_wanted", lambda device, target: 132)

    def noted(self: Any, kernel: str, table: Any, rows: Any, results: Any, **others: Any) -> None:
        taken.append(self.build_for(kernel, (*rows.values(), *results.values())))

    monkeypatch.setattr(launch.LinearCall, "launch", noted)
    for name in ("outputs", "segment_states", "d_segment_states", "scan", "d_query", "d_keys"):
        bench_ahead.Compiler().kernel(name, bench_gpu.Shape(1, 2048, 2, 64))
    x = torch.zeros(1, 2, 2048, 64, dtype=torch.bfloat16)
    problem = prepare(x, x, x, feature_map="identity", normalize=False).problem
    done = launch.forward(problem, None, "sm_90a")
    launch.backward(problem, done, x, None, None, "sm_90a")
    assert set(ahead) == set(taken)


def test_a_process_that_compiles_may_fail() -> None:
    bench_ahead._in_a_process("call", "no such contestant", bench_gpu.Shape(1, 8, 1, 8))


def test_one_length_shows_no_growth(capsys: pytest.CaptureFixture[str]) -> None:
    """A line through one point has any slope; NumPy warned of it."""
    assert (
        main(["bench", *["--linear", "--n", "32", "--d", "8", "--heads", "1", "--repeat", "1", "--kernel", "numpy"]])
        == 0
    )
    told = capsys.readouterr().out
    assert "grows" not in told
    assert "\nLinear attention is the faster one " in told


@pytest.mark.parametrize("call", [tw.attention, tw.linear_attention])
def test_who_has_no_gpu_is_told_of_the_cpu_target(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.ones((1, 1, 4, 16), np.float32)
    stands_in = "kernel='tilelang-c' computes the same in main memory, slowly"
    with pytest.raises(tw.Unsupported, match=stands_in):
        call(q, q, q, kernel="tilelang")
    monkeypatch.setattr("tilewise.kernels.gpus.none_here", lambda: None)
    with pytest.raises(tw.Unsupported, match=stands_in):
        call(q, q, q, kernel="tilelang")
