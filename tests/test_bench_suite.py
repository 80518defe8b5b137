"""The CPU suite: its sections, the arithmetic of its targets, and what is made of its results."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fake_results import PEER, made_up
from tilewise import cli
from tilewise.bench import peers, plot_suite, report, roofline, run, suite, targets
from tilewise.bench.problem import Cell, Problem
from tilewise.cli import bench as command

ROOT = Path(__file__).parent.parent


def values(*sections: dict[str, Any]) -> dict[str, targets.Check]:
    found = targets.checks({s["options"]["section"]: s for s in sections})
    return {check.what: check for check in found}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cpu").mkdir()
    for name in suite.SECTIONS:
        (tmp_path / "cpu" / f"{name}.json").write_text(json.dumps(made_up(name), allow_nan=False))
    return tmp_path / "cpu"


# -- sections ---------------------------------------------------------------------------------------------------------


def test_the_sections_are_what_the_command_offers() -> None:
    assert tuple(suite.SECTIONS) == command.CPU_SECTIONS == tuple(targets._CHECKS)
    assert {name: len(section.cells) for name, section in suite.SECTIONS.items()} == {
        "forward": 12, "half": 24, "training": 12, "decode": 24, "window": 5, "memory": 4,
    }  # fmt: skip
    for section in suite.SECTIONS.values():
        assert len(set(section.cells)) == len(section.cells)
    assert all(cell.backward for cell in suite.SECTIONS["training"].cells)
    decode = suite.SECTIONS["decode"].cells
    assert {cell.n_q for cell in decode} == {1} and {cell.n_k for cell in decode} == {8192, 16384, 32768, 65536}
    groups = [c.heads // c.heads_k for c in decode if c.n_k == 32768 and c.dtype == "float32"]
    assert sorted(groups) == [1, 2, 4, 8, 16]


def test_pytorch_is_asked_the_best_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """is_causal for a causal square, never for one query, which would see one key alone; grouped heads as such."""
    pytest.importorskip("torch")
    import torch

    asked: list[dict[str, Any]] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **options: Any) -> Any:
        asked.append(options)
        return sdpa(*args, **options)

    spy.__doc__ = sdpa.__doc__
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    for cell in (Cell("causal", 64, 64, 8), Cell("full", 1, 64, 8, heads=8, heads_k=2), Cell("causal", 1, 64, 8)):
        problem = Problem.make(cell)
        entry = PEER.enter(problem)
        entry.run(entry.put(problem.d_out))
    square, decode, last = asked
    assert square["is_causal"] and square["attn_mask"] is None and "enable_gqa" not in square
    assert not decode["is_causal"] and decode["attn_mask"] is None and decode["enable_gqa"]
    assert not last["is_causal"] and last["attn_mask"].all()


# -- targets ----------------------------------------------------------------------------------------------------------


def test_means_and_minima_are_of_the_right_cells() -> None:
    def ratio(cell: Cell) -> float:
        slow = cell.variant == "full" and (cell.n_q, cell.d) == (512, 64)
        return (1.0 if slow else 1.3) if cell.variant == "full" else 1.5

    found = values(made_up("forward", ratio))
    full, slowest = found["forward, full: geometric mean"], found["forward, full: slowest cell"]
    assert full.value == pytest.approx(1.3 ** (5 / 6)) and full.met is True and full.target == "at least 1.20x"
    assert slowest.value == pytest.approx(1.0) and slowest.met is False and slowest.shown == "1.00x"
    assert found["forward, causal: geometric mean"].value == pytest.approx(1.5)
    assert found["forward, causal: slowest cell"].met is True


@pytest.mark.parametrize(
    ("section", "what", "limit"),
    [
        ("forward", "forward, full: geometric mean", 1.2),
        ("forward", "forward, full: slowest cell", 1.05),
        ("forward", "forward, causal: geometric mean", 1.5),
        ("forward", "forward, causal: slowest cell", 1.12),
        ("half", "half precision: geometric mean", 1.6),
        ("training", "training: geometric mean", 1.35),
        ("training", "training: slowest cell", 1.15),
    ],
)
def test_ratios_are_met_from_their_limit_on(section: str, what: str, limit: float) -> None:
    for ratio, met in ((limit + 1e-6, True), (limit - 1e-6, False)):
        assert values(made_up(section, lambda cell, ratio=ratio: ratio))[what].met is met


def test_decoding_is_judged_by_what_it_reads() -> None:
    """A query head and key take 8 ns, in which 2 * 128 numbers are read, shared by the group; 20 GB/s is the rate."""
    target, of_8, of_16, cached = _shares(made_up("decode", lambda cell: 1.0))
    assert target.what.startswith("decode, groups up to 4:") and target.target == "at least 75%"
    assert target.value == pytest.approx(2 * 128 * 2 / 4 / 8 / 20) and target.met is True  # two bytes, groups of 4
    at_the_peak = "the least has 32% of the FMA peak, at which it would be"  # 4 * 128 operations in 8 ns
    assert target.note == f"13 of 13 cells reach 75%; {at_the_peak} 250%"
    assert of_8.what.startswith("decode, groups of 8:") and of_16.what.startswith("decode, groups of 16:")
    assert of_16.value == pytest.approx(2 * 128 * 2 / 16 / 8 / 20) and of_8.value == pytest.approx(2 * of_16.value)
    assert of_16.note == f"0 of 3 cells reach 75%; {at_the_peak} 62%"
    assert cached.what.startswith("decode, k and v within 2 caches:") and "5 of 5" in cached.note
    assert of_8.met is of_16.met is False and cached.met is None  # told, not judged


def _shares(results: dict[str, Any]) -> list[targets.Check]:
    return [check for what, check in values(results).items() if "share of the plain read rate" in what]


def test_only_what_comes_from_memory_is_judged() -> None:
    """One slow cell: beyond the cache it misses its target, within it is only told."""
    for n_k, dtype, heads, met in (
        (32768, "float16", 32, False), (16384, "float16", 32, True), (8192, "float32", 32, True),
        (32768, "float32", 8, False), (32768, "float32", 64, False), (32768, "float32", 128, False),
    ):  # fmt: skip
        slow = (n_k, dtype, heads)
        found = _shares(made_up("decode", lambda c, slow=slow: 0.01 if (c.n_k, c.dtype, c.heads) == slow else 8.0))
        (least,) = [check for check in found if check.value < 0.1]
        assert (least.met is False) is not met and all(
            check.met is not False for check in found if check is not least
        ), slow


def test_where_the_cache_is_unknown_every_cell_counts() -> None:
    results = made_up("decode", times_cache=None, fits_cache=None)
    assert [check.note.split(" cells")[0] for check in _shares(results)] == ["18 of 18", "3 of 3", "1 of 3"]


def test_without_a_read_rate_nothing_is_proved() -> None:
    results = made_up("decode")
    for r in results["records"]:
        r["read_fraction"] = None
    target = _shares(results)[0]
    assert target.met is False and target.note == "13 of 13 cells have no number: the read rate was not measured"


def test_the_section_of_decoding_shows_both_limits() -> None:
    lines = report.section("decode", made_up("decode", lambda cell: 1.0)).splitlines()
    assert "plain read  of that  of the FMA peak" in lines[1]
    (short,) = (line for line in lines if line.strip().startswith("float16 full, 1 query, 8192 keys"))
    (long,) = (line for line in lines if line.strip().startswith("float32 full, 1 query, 32768 keys, d 128, 128 heads"))
    assert short.split()[-7:] == ["16.0", "20.0", "80%", "32%", "in", "the", "cache"]
    assert long.split()[-4:] == ["8.0", "20.0", "40%", "32%"]
    assert "plain read" not in report.section("window", made_up("window"))


def test_a_window_must_take_the_same_time_for_every_query_and_key() -> None:
    what = "window: time for each query and key, most over least"
    flat, steep = (values(made_up("window", ratio))[what] for ratio in (lambda c: 1.0, lambda c: 1024 / c.n_q))
    assert flat.value == pytest.approx(1.0) and flat.met is True
    assert steep.value == pytest.approx(16.0) and steep.met is False and steep.target == "at most 1.25x"


def test_memory_is_judged_at_the_longest_sequence() -> None:
    what = "memory: of the full matrix at n 16384"
    matrix = 8 * 16384**2 * 4
    for extra, met in ((0.019 * matrix, True), (0.021 * matrix, False)):
        check = values(made_up("memory", extra_bytes=extra))[what]
        assert check.value == pytest.approx(extra / matrix) and check.met is met
    assert check.shown == "2.1%" and check.target == "at most 2.0%"


def test_the_section_of_memory_calls_it_so() -> None:
    lines = report.section("memory", made_up("memory", extra_bytes=2**20)).splitlines()
    assert lines[1].endswith("extra memory, of all scores") and "speed" not in lines[1]
    assert lines[2].endswith("1.0 MiB of 128 MiB")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"status": "wrong", "reason": "error 1"}, "12 of 12 cells have no number: wrong: error 1"),
        ({"status": "failed", "reason": "it broke", "median_ms": 1.0}, "failed: it broke"),
    ],
)
def test_a_cell_without_a_right_answer_proves_nothing(changed: dict[str, Any], why: str) -> None:
    check = values(made_up("training", lambda cell: 9.0, **changed))["training: geometric mean"]
    assert check.value is None and check.met is False and check.shown == "-" and why in check.note


def test_without_a_peer_nothing_is_proved() -> None:
    results = made_up("half")
    for r in results["records"]:
        r["ratio"] = None
    check = values(results)["half precision: geometric mean"]
    assert check.met is False and "no peer ran" in check.note


def test_the_summary_marks_what_is_met() -> None:
    text = report.summary({"forward": made_up("forward", lambda cell: 1.4), "half": made_up("half")})
    lines = {line[2:].split("  ")[0]: line for line in text.splitlines()}
    assert lines["forward, full: geometric mean"].startswith("✓")
    assert re.search(r"✗ forward, causal: geometric mean +1.40x +at least 1.50x", text)
    assert lines["half precision: slowest cell"].startswith("·")
    assert "4 of 5 met" in text and "measured peak 200 GFLOP/s" in text


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_suite_runs_and_writes_its_sections(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roofline, "LIBRARY", "tests.fake_library")
    monkeypatch.setattr(peers, "FROM_TORCH", ())  # which takes long to start
    for name, n in (("decode", 48), ("memory", 512)):  # memory of a small call comes from what was free already
        cells = tuple(replace(c, n_q=min(c.n_q, n), n_k=n) for c in suite.SECTIONS[name].cells[:1])
        monkeypatch.setitem(suite.SECTIONS, name, replace(suite.SECTIONS[name], cells=cells))
    folder = tmp_path / "cpu"
    options = ["--kernel", "numpy", "--threads", "1", "--budget", "0.05", "--json", str(folder)]
    assert cli.main(["bench", "--cpu", "decode", "memory", *options]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "decode: one query for many keys" in out and "met. " in out
    decode, memory = (json.loads((folder / f"{name}.json").read_text()) for name in ("decode", "memory"))
    (ours,) = decode["records"]
    assert ours["status"] == "ok" and ours["n_q"] == 1 and ours["repetitions"] >= 3
    read_bytes = 2 * 8 * 48 * 128 * 4
    assert ours["read_gbs"] == pytest.approx(read_bytes / ours["median_ms"] / 1e6)
    assert ours["plain_read_gbs"] == pytest.approx(1e4 * read_bytes / 1e9) and decode["machine"]["read_gbs"] == 4.0
    assert 0 < ours["read_fraction"] <= read_bytes / ours["min_ms"] / 1e6 / ours["plain_read_gbs"] * 1.001
    assert ours["fits_cache"] in (True, None) and memory["records"][0]["plain_read_gbs"] is None
    assert decode["machine"]["peak_gflops"] == 1.0 and decode["options"]["section"] == "decode"
    assert memory["records"][0]["extra_bytes"] > 0


def test_a_section_that_was_stopped_is_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(self: run.Sweep, cell: Any, team: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run.Sweep, "cell", stopped)
    assert cli.main(["bench", "--cpu", "window", "--kernel", "numpy", "--json", str(tmp_path)]) == 130
    assert "stopped in window" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--cpu", "--n", "64"], "--n: the suite of --cpu has its own cells; leave out --n, or --cpu"),
        (["--cpu", "--no-memory"], "--no-memory: the suite"),
        (["--cpu", "--json", "results.json"], "--json: with --cpu a folder is expected, for a file a section"),
        (["--cpu", "--json", "/no/such/folder"], "there is no folder '/no/such'"),
        (["--cpu", "--kernel", "cobol"], "cuda-sim/forward_sm90, got 'cobol'"),
        (["--cpu", "--from", "/no/such"], "a folder with forward.json, half.json"),
        (["--cpu", "--threads", "0"], "--threads: expected a whole number of at least 1, got '0'"),
    ],
)
def test_wrong_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--kernel", "numpy", *argv]) == 2
    assert message in capsys.readouterr().err


def test_without_the_engine_the_suite_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(suite, "KERNEL", "steam")
    assert cli.main(["bench", "--cpu"]) == 2
    assert (
        "measures the kernel system 'steam', which is not here; name another with --kernel" in capsys.readouterr().err
    )


def test_a_section_that_does_not_exist() -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--cpu", "sideways"])


# -- what is made of the results --------------------------------------------------------------------------------------


def test_stored_sections_are_shown_and_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--cpu", "--from", str(folder), "--plot", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "✓ training: geometric mean" in out and "float16 causal, n 8192, d 128" in out
    assert sorted(path.name for path in folder.glob("*.png")) == [
        "decode.png", "forward.png", "half.png", "scaling.png", "training.png",
    ]  # fmt: skip


def test_only_what_there_is_is_drawn(tmp_path: Path) -> None:
    """Without a library there are no limits to draw, and a refused peer leaves a gap."""
    results = made_up("forward")
    results["machine"].update(peak_gflops=None, read_gbs=None)
    for r in results["records"]:
        if not r["ours"]:
            r.update(status="failed", reason="it broke", gflops=None, median_ms=None)
    window = made_up("window")
    drawn = plot_suite.draw({"forward": results, "window": window}, tmp_path)
    assert [path.name for path in drawn] == ["forward.png", "scaling.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_the_figure_of_speed_has_a_bar_for_everyone_and_the_peak() -> None:
    left, right = plot_suite._speed("forward", made_up("forward")).axes
    for axis in (left, right):
        assert len(axis.patches) == 12
        assert [line.get_ydata()[0] for line in axis.lines] == [200.0]
        assert {text.get_text() for text in axis.texts} == {"2.00x"}


def test_the_figure_of_decoding_has_the_plain_reads_of_everyone() -> None:
    *types, groups = plot_suite._decode(made_up("decode")).axes
    assert len(types) == 3
    for axis, points in ((types[0], 4), (groups, 5)):
        lines = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
        assert set(lines) == {who + name for who in ("", "plain read, ") for name in ("tilewise cpu", "torch sdpa")}
        assert lines["plain read, torch sdpa"] == [20.0] * points


def test_the_tables_of_the_pages_come_from_the_files(folder: Path, tmp_path: Path) -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    shutil.copy(ROOT / "results" / "numpy.json", tmp_path)
    text = tables["fill"](tables["PERFORMANCE"], tmp_path)
    assert "Not measured yet: `tilewise bench --cpu" not in text
    assert "| training: geometric mean | 2.00x | at least 1.35x | ✓ |" in text
    assert "| float32 | causal | 8192 | 128 | " in text and "| 2.00x |" in text
    assert "| float32 | 65536 | 32 / 8 | " in text and " | 64.0 | 20.0 | 320% | 64% |" in text
    assert " | 20.0 (cache) | " in text and "✓ 13 of 13 cells reach 75%; the least has" in text
    assert "| 16384 | 15.6 | 15.6 | 8,192 | 0.2% |" in text
    assert "![" not in text.split("## The CPU engine")[1]
    (folder / "forward.png").touch()
    assert "/cpu/forward.png)" in tables["fill"](tables["PERFORMANCE"], tmp_path)


def test_tables_of_nothing_say_so(tmp_path: Path) -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    shutil.copy(ROOT / "results" / "numpy.json", tmp_path)
    assert "Not measured yet: `tilewise bench --cpu --json" in tables["fill"](tables["PERFORMANCE"], tmp_path)
