"""Where linear attention overtakes softmax attention: found in numbers that are known, and shown by the command."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tilewise.cli import main
from tilewise.linear.bench import Row, crossover, growth

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
