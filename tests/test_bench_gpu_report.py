"""What is made of the GPU suite's results: targets that are met or not, tables and pictures."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.gpu_results import OUR, made_up, values  # noqa: E402
from tilewise import cli  # noqa: E402
from tilewise.bench.gpu import plot, report, suite  # noqa: E402
from tilewise.bench.gpu.cases import Case  # noqa: E402
from tilewise.bench.gpu.contestants import CUDNN, FLASH, FLEX, PAGED  # noqa: E402
from tilewise.kernels.cute import projected  # noqa: E402

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "gpu").mkdir()
    for name in suite.SECTIONS:
        (tmp_path / "gpu" / f"{name}.json").write_text(json.dumps(made_up(name), allow_nan=False))
    return tmp_path / "gpu"


# -- targets ----------------------------------------------------------------------------------------------------------

ORDERED = "tilewise cuda/forward_sm90"


@pytest.mark.parametrize(
    ("section", "what", "limit"),
    [
        ("forward", "forward, d 64: geometric mean to the best peer", 1.10),
        ("forward", "forward, d 128: slowest case to the best peer", 1.02),
        ("forward", "forward, d 256: geometric mean to the best peer", 1.00),
        ("forward", "forward, d 256: slowest case to the best peer", 0.95),
        ("stress", "hard inputs: slowest case to the best peer", 0.95),
        ("variants", "alibi: slowest case to FlexAttention", 1.2),
        ("variants", "softcap: slowest case to FlashAttention-4", 1 / 1.15),
        ("gqa", "grouped heads: slowest case to cuDNN", 1.0),
        ("gradients", f"gradients, {ORDERED}: geometric mean to the best peer", 1.0),
        ("gradients", "gradients, tilewise cuda/unordered: slowest case to the best peer", 0.93),
        ("gradients", f"gradients, {ORDERED}: geometric mean to deterministic FlashAttention-4", 1.0),
        ("learned", "cuda, gradient of a bias: slowest case to FlexAttention", 3.0),
        ("cute", "cute, forward: geometric mean to FlashAttention-4", 0.97),
        ("cute", "cute, with a bias: slowest case to FlexAttention", 1.5),
        ("cute_gradients", "cute, backward: geometric mean to FlashAttention-4", 0.85),
        ("step", "a training step of a module: slowest case to cuDNN's", 1.0),
    ],
)
def test_ratios_are_met_from_their_limit_on(section: str, what: str, limit: float) -> None:
    for ratio, met in ((limit + 1e-6, True), (limit - 1e-6, False)):
        assert values(made_up(section, lambda case, peer, ratio=ratio: ratio))[what].met is met


def test_what_has_no_order_proves_nothing_of_what_has_one() -> None:
    told = [what for what in values(made_up("gradients")) if "deterministic" in what]
    assert told == [f"gradients, {ORDERED}: geometric mean to deterministic FlashAttention-4"]


@pytest.mark.parametrize(("slower", "met"), [(1 / 0.86, True), (1 / 0.84, False)])
def test_an_order_may_cost_little(slower: float, met: bool) -> None:
    """Of each case beside the same one in any order; the slowest counts."""
    results = made_up("gradients")
    chosen = next(r for r in results["records"] if r["contestant"] == ORDERED and r["d"] == 128)
    chosen["median_ms"] *= slower
    check = values(results)[f"gradients, {ORDERED}: least of the speed in any order"]
    assert check.value == pytest.approx(1 / slower) and check.met is met


def test_the_best_peer_of_each_case_counts() -> None:
    def ratio(case: Case, peer: str) -> float:
        slow = case.n == 512 and case.d == 64 and case.variant == "causal" and peer == FLASH
        return 1.0 if slow else 1.2 if peer == FLASH else 1.3

    found = values(made_up("forward", ratio))
    mean, least = (found[f"forward, d 64: {what} to the best peer"] for what in ("geometric mean", "slowest case"))
    assert mean.value == pytest.approx(1.2 ** (11 / 12)) and mean.met is True and mean.target == "at least 1.10x"
    assert least.value == pytest.approx(1.0) and least.met is False
    assert found["forward, d 128: slowest case to the best peer"].value == pytest.approx(1.2)


def test_a_cache_in_pages_is_told_beside_cudnn_and_not_judged() -> None:
    found = values(made_up("decode", lambda case, peer: 0.97))
    checks = [found[f"decode, tilewise triton{kind}, one sequence: to cuDNN"] for kind in ("", PAGED)]
    assert [check.met for check in checks] == [False, None]
    assert all(check.value == pytest.approx(0.97) for check in checks)


def test_times_must_stay_below_their_limit() -> None:
    packing, launch = (
        "packed sequences: most time over the same as a batch",
        f"launch, {OUR}: host time over PyTorch's SDPA",
    )
    for ratio, met in ((1 / 1.04, True), (1 / 1.06, False)):
        check = values(made_up("varlen", lambda case, peer, ratio=ratio: ratio))[packing]
        assert check.value == pytest.approx(1 / ratio) and check.met is met and check.target == "at most 1.05x"
    for ratio, met in ((1 / 1.4, True), (1 / 1.6, False)):
        assert values(made_up("launch", lambda case, peer, ratio=ratio: ratio))[launch].met is met


def test_without_the_strongest_peer_nothing_is_judged() -> None:
    found = values(
        made_up("forward", without=(FLASH,)), made_up("variants", without=(FLASH,)), made_up("gqa", without=(FLASH,))
    )
    check = found["forward, d 64: geometric mean to the best peer"]
    assert check.met is None and check.shown == "1.50x" and check.note == "not judged: FlashAttention-4 was not there"
    assert found["softcap: slowest case to FlexAttention"].met is True
    assert "softcap: slowest case to FlashAttention-4" not in found
    assert found["grouped heads: slowest case to cuDNN"].met is True


def test_cases_that_the_strongest_peer_fails_on_are_counted() -> None:
    results = made_up("forward")
    for r in results["records"]:
        if r["d"] == 256 and r["ours"]:
            del r["ratios"][FLASH]
    check = values(results)["forward, d 256: geometric mean to the best peer"]
    assert check.met is True and check.note == "12 of 12 cases without FlashAttention-4"


def test_a_case_without_a_right_answer_proves_nothing() -> None:
    results = made_up("gqa")
    next(r for r in results["records"] if r["ours"]).update(status="wrong", reason="relative error 1")
    check = values(results)["grouped heads: slowest case to cuDNN"]
    assert check.met is False and check.note == "1 of 10 cells have no number: wrong: relative error 1"


def test_what_auto_takes_must_not_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all cases those that the rule takes are judged, and the table tells which they are."""
    monkeypatch.setattr(projected, "MOST_STEPS", 12)
    what = "output projection, where `auto` takes it: slowest case to two kernels"
    for ratio, met in ((1.01, True), (0.99, False)):
        results = made_up("projection", lambda case, peer, ratio=ratio: ratio)
        assert values(results)[what].met is met
    head, rows = report.table_of("projection", results)
    assert head[-3:] == ("ratio", "steps", "taken by `auto`") and len(rows) == len(suite.SECTIONS["projection"].cases)
    assert rows[0][0] == "4 heads, d 32, batch 1, 1 queries, 64 keys" and rows[0][-3:] == ("0.99x", "12", "yes")
    assert rows[-1][-2:] == ("1280", "no")


def test_scalings_have_a_time_and_an_error_each() -> None:
    head, rows = report.table_of("scaling", made_up("scaling"))
    assert head[1:3] == ("tilewise cute/basic, ms", "tilewise cute/basic, error") and len(head) == 7
    assert rows[-1][0] == "full, d 128, n 2048, x8, float32" and rows[-1][2] == "2.0e-03"


def test_aims_of_triton_are_speeds() -> None:
    found = values(made_up("triton"), made_up("backward"))
    for what, met in (("forward", False), ("backward", True)):  # ours has 500 everywhere
        for mask in ("full", "causal"):
            check = found[f"triton, {what}: {mask}, d 128, n 16384"]
            assert (check.met, check.shown) == (met, "500 TFLOP/s")
    assert found["triton, backward: full, d 128, n 16384"].target == "at least 470 TFLOP/s"


def test_tilelang_is_beside_its_own_example() -> None:
    met = {what: check.met for what, check in values(made_up("tilelang")).items()}
    assert met == {
        "tilelang, forward: full, d 64, n 4096": True,
        "tilelang, forward: causal, d 64, n 4096": True,
        "tilelang, forward: full, d 128, n 4096": False,
        "tilelang, forward: causal, d 128, n 16384": False,
    }
    (check,) = values(made_up("tilelang_gradients")).values()
    assert check.limit is None and check.value == 1.5


def test_first_calls_must_be_quick() -> None:
    results = made_up("first")

    def judged(ms: float, warm: float, compiled: int = 0) -> list[bool | None]:
        for r in results["records"]:
            r.update(median_ms=ms, warm_ms=warm, compiled=compiled)
        return [check.met for check in values(results).values()]

    assert judged(100, 100) == [True, True, True, True, None, True, None]
    assert judged(4000, 101) == [False, True, False, True, None, True, None]
    assert judged(5001, 99, compiled=1) == [False, False, True, False, None, False, None]
    assert values(results)["first call, compiled ahead"].note == "11 of 11 were not; `make kernels` does it"
    assert values(results)["first call, triton, forward"].target == "at most 5000 ms"


# -- what is made of the results --------------------------------------------------------------------------------------


def test_stored_sections_are_shown_and_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--gpu", "--from", str(folder), "--plot", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "✓ forward, d 64: geometric mean to the best peer" in out and "power limit 700 W" in out
    assert re.search(r"causal, d 128, n 512 +500 +333 +333 +- +1.50x", out)  # no FlexAttention at this n
    assert "causal, d 128, n 1024, 16 heads on 2" in out and "full, d 64, n 4096, packed ragged" in out
    assert "Rounds differ by up to 3%." in out
    drawn = {
        "backward",
        "forward",
        "gradients",
        "cute",
        "cute_gradients",
        "tilelang",
        "tilelang_gradients",
        "gqa",
        "stress",
        "triton",
        "variants",
    }
    assert {path.stem for path in folder.glob("*.png")} == drawn


def test_failures_are_told_once_with_their_count() -> None:
    results = made_up("gqa", without=(FLASH,))
    for r in results["records"]:
        if not r["ours"]:
            r.update(status="failed", reason="no plan", median_ms=None, tflops=None)
    lines = report.section("gqa", results).splitlines()
    assert "cuDNN: failed: no plan (10 cases)" in lines and "FlashAttention-4 is not here: not installed" in lines


def test_a_section_without_targets_has_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--gpu", "ladder", "--from", str(folder)]) == 0
    assert "No targets in these sections." in capsys.readouterr().out


def test_a_quick_run_is_called_one() -> None:
    results = made_up("gqa")
    assert "a quick run" not in report.summary({"gqa": results})
    results["options"]["quick"] = True
    assert report.summary({"gqa": results}).endswith("a quick run")


def test_the_figure_has_a_line_for_everyone_and_the_limit() -> None:
    axes = plot._against_n("forward", made_up("forward")).axes
    assert len(axes) == 6
    lines = {line.get_label(): list(line.get_ydata()) for line in axes[0].lines}
    assert set(lines) == {OUR, CUDNN, FLASH, FLEX, "measured matmul of 8192"}
    assert lines[OUR] == pytest.approx([500.0] * 6) and len(lines[FLEX]) == 2
    assert lines["measured matmul of 8192"] == [700.0, 700.0] and axes[0].get_ylim()[1] > 700


def test_only_what_there_is_is_drawn(tmp_path: Path) -> None:
    results = made_up("variants")
    for r in results["records"]:
        r.update(status="failed", reason="it broke")
    assert plot.draw({"variants": results, "ladder": made_up("ladder")}, tmp_path) == []


def test_the_tables_of_the_pages_come_from_the_files(folder: Path, tmp_path: Path) -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    shutil.copy(ROOT / "results" / "numpy.json", tmp_path)
    (folder / "forward.png").touch()
    performance = tables["fill"](tables["PERFORMANCE"], tmp_path)
    assert "| forward, d 64: geometric mean to the best peer | 1.50x | at least 1.10x | ✓ |" in performance
    assert "/gpu/forward.png)" in performance and "Fake H200" in performance
    assert "| causal, d 64, n 512 | 500 | 333 | 333 | - | 1.50x |" in performance
    assert "| tilewise triton, causal, d 128, n 2048, forward and backward | " in performance
    assert "From `results/gpu/launch.json`, 2026-11-15. Microseconds until a call returns." in performance


def test_tables_of_nothing_say_so(tmp_path: Path) -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    shutil.copy(ROOT / "results" / "numpy.json", tmp_path)
    text = tables["fill"](tables["PERFORMANCE"], tmp_path)
    assert "Not measured yet: `tilewise bench --gpu forward --json results/gpu` does it." in text
