"""`tilewise bench --parallel`: what processes send is what theory says, and the table says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilewise.bench import ranks
from tilewise.cli import main

SMALL = ["--n", "256", "--heads", "2", "--d", "8", "--repeat", "1"]


def test_bytes_are_those_of_theory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "found.json"
    assert main(["bench", "--parallel", "2", *SMALL, "--json", str(target)]) == 0
    shown = capsys.readouterr().out
    found = json.loads(target.read_text())
    for record in (r for r in found["records"] if r["mask"] == "full"):
        for each in ("forward", "backward"):
            assert record[f"{each}_bytes"] == record[f"{each}_theory"] > 0, record
    window = {r["method"]: r["forward_bytes"] for r in found["records"] if r["mask"] == "window"}
    assert (
        window["ring"] == window["gather"] == 128 * 2 * 16 * 4
    )  # 128 keys of the first rank, whose window has them all
    assert main(["bench", "--parallel", "--from", str(target)]) == 0
    assert capsys.readouterr().out.strip() in shown
    assert "full, 2, heads" in shown


def test_heads_that_cannot_be_shared_are_left_out() -> None:
    assert ranks._methods(3, ranks.Sizes()) == ("ring", "gather")
    assert ranks._methods(1, ranks.Sizes()) == ("one process",)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--parallel", "two"], "--parallel: expected a whole number of at least 1, got 'two'"),
        (["--parallel", "--dtype", "float64"], "--dtype: --parallel has its own; leave it out"),
        (["--parallel", "--heads", "6", "--heads-k", "4"], "--heads-k: expected a divisor of the 6 query heads, got 4"),
        (["--parallel", "--json", "/no/folder/x.json"], "--json: there is no folder"),
    ],
)
def test_options_are_checked(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) != 0
    assert told in capsys.readouterr().err
