"""What the GPU suite's numbers stand beside: limits, what the driver tells, and Nsight Compute's counters."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests import fake_stage as fakes  # noqa: E402
from tests.gpu_results import OUR, made_up  # noqa: E402
from tilewise.bench.gpu import counters, limits, report, run, suite  # noqa: E402
from tilewise.bench.gpu.cases import Case  # noqa: E402
from tilewise.bench.gpu.contestants import FLASH  # noqa: E402

PLAY = (OUR, Case("full", 32, 8, tokens=64, hidden=32))


def test_the_limit_that_binds_is_the_longest() -> None:
    found = limits.shortest_ms(flops=700e12, exps=7e12, traffic=4e12, limits=fakes.LIMITS)
    assert found == pytest.approx({"matrix": 1000.0, "exp": 2000.0, "bytes": 1000.0})
    assert limits.shortest_ms(1, 1, 1, {**fakes.LIMITS, "exp_gops": None})["exp"] is None


def test_nvidia_smi_is_read_or_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, "580.1, 700.00, 1980, 3201\n")
    monkeypatch.setattr(limits.subprocess, "run", lambda *args, **options: done)
    assert limits._told() == {
        "driver": "580.1", "power_limit_w": "700.00", "max_sm_mhz": "1980", "max_memory_mhz": "3201",
    }  # fmt: skip

    def absent(*args: Any, **options: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(limits.subprocess, "run", absent)
    assert set(limits._told().values()) == {None}


COUNTED = """==PROF== Connected to process 7
a line that the program printed
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","at::spin_kernel(long)","dram__bytes.sum","byte","1"
"0","7","at::spin_kernel(long)","lts__t_bytes.sum","byte","1"
"1","7","attention","dram__bytes.sum","byte","1,000"
"1","7","attention","lts__t_bytes.sum","byte","5,000"
"2","7","spin_kernel","dram__bytes.sum","byte","1"
"2","7","spin_kernel","lts__t_bytes.sum","byte","1"
==PROF== Disconnected
"3","7","prepare","dram__bytes.sum","byte","10"
"3","7","prepare","lts__t_bytes.sum","byte","20"
"4","7","attention","dram__bytes.sum","byte","2,000.5"
"4","7","attention","lts__t_bytes.sum","byte","7,000"
"""


def test_launches_are_counted_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counters.parsed(COUNTED)
    assert [[launch[counters.L2] for launch in call] for call in found] == [[5000.0], [20.0, 7000.0]]
    assert counters.parsed("==ERROR== no permission") == []
    asked: list[list[str]] = []

    def answer(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, COUNTED, "==ERROR== ERR_NVGPUCTRPERM")

    monkeypatch.setattr(counters.shutil, "which", lambda name: name)
    monkeypatch.setattr(counters.subprocess, "run", answer)
    assert counters.traffic([PLAY, PLAY]) == [
        {counters.DRAM: 1000.0, counters.L2: 5000.0}, {counters.DRAM: 2010.5, counters.L2: 7020.0},
    ]  # fmt: skip
    assert counters.traffic([PLAY]) == "ncu counted 2 of 1 calls: ==ERROR== ERR_NVGPUCTRPERM"
    code = asked[0][-1]
    names: dict[str, Any] = {}
    exec(code.split(";")[0], names)  # what its process is told can be read there
    assert eval(re.search(r"play\((.*)\)$", code)[1], names) == [PLAY, PLAY]  # type: ignore[index]
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    assert counters.traffic([PLAY]) == "ncu (Nsight Compute) is not on PATH"


def test_busy_units_are_those_of_the_longest_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = [
        {counters.TENSOR: share, counters._TIME: time} for share, time in ((10.0, 5.0), (70.0, 90.0), (20.0, 3.0))
    ]
    monkeypatch.setattr(counters, "_counted", lambda plays, metrics: [launches])
    assert counters.busy([PLAY]) == [launches[1]]
    results = made_up("units", without=(FLASH,))
    shares = {counters.TENSOR: 67.0, counters.EXPONENTIALS: 66.0, counters.ISSUE: 50.0}
    monkeypatch.setattr(counters, "busy", lambda plays: [shares for _ in plays])
    run.watch(results["records"], suite.SECTIONS["units"].cases)
    assert re.search(r"tilewise cuda, full, d 64, n 4096, x64 +500 +67% +66% +50%", report.section("units", results))


def test_the_ladder_tells_bytes_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    results = made_up("ladder", without=(f"{OUR}/forward_sm90",))
    monkeypatch.setattr(counters, "traffic", lambda plays: [{counters.DRAM: 1e6, counters.L2: 2e6} for _ in plays])
    results["records"][0].update(status="failed", reason="it broke")
    run.climb(results["records"], suite.SECTIONS["ladder"].cases, fakes.LIMITS)
    failed, tiled = results["records"][:2]
    assert failed["plan_bytes"] is None and tiled["dram_bytes"] == 1e6
    n, d, heads, batch = 1024, 64, 32, 16
    assert tiled["plan_bytes"] == batch * heads * n * (2 * d * 2 + 4) + batch * heads * (n // 64) * n * 2 * d * 2
    assert tiled["limits_ms"]["bytes"] == pytest.approx(4 * 16384 * 2048 * 2 / 4e12 * 1e3)
    assert tiled["limits_ms"]["exp"] == pytest.approx(16384 * 1024 * 32 / 3500e9 * 1e3)
    text = report.section("ladder", results)
    assert "(matrix)" in text and "977 KiB" in text
    monkeypatch.setattr(counters, "traffic", lambda plays: "no ncu")
    run.climb(results["records"], suite.SECTIONS["ladder"].cases, fakes.LIMITS)
    assert tiled["counters_reason"] == "no ncu"
