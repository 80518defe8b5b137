"""`tilewise bench --report`: what the page holds, what is called a regression, and what is refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake_results import made_up
from tilewise import cli
from tilewise.bench.page import document, plots, reading, scales
from tilewise.bench.page.choosing import charts
from tilewise.linear import bench as linear

ROOT = Path(__file__).parent.parent
Change = Callable[[dict[str, Any]], Any]
LINEAR_GPU = {
    "schema": "linear gpu 1", "gpu": "Fake H200", "copy": 4000.0,
    "records": [{"batch": 1, "n": n, "heads": 8, "d": 64, "forward_ms": 1.0, "backward_ms": 2.0, "forward_rate": 2000.0,
                 "backward_rate": 1000.0} for n in (1024, 2048, 4096)],
}  # fmt: skip
PARALLEL = {
    "schema": "tilewise bench --parallel 1", "machine": {"cpu": "abacus", "cores": 2},
    "sizes": {"n": 64, "heads": 2, "heads_k": 2, "d": 8},
    "records": [{"ranks": 2, "mask": "causal", "method": "ring", "layout": "zigzag", "forward_ms": 1.0, "both_ms": 3.0,
                 "forward_bytes": 1024, "backward_bytes": 2048}],
}  # fmt: skip


def write(to: Path, results: Any) -> Path:
    to.parent.mkdir(exist_ok=True)
    to.write_text(json.dumps(results))
    return to


def changed(results: dict[str, Any], change: Change) -> dict[str, Any]:
    made = copy.deepcopy(results)
    for r in made["records"]:
        change(r)
    return made


def timed(factor: float, noise: float = 0.0, ours: bool = True) -> Change:
    """Times of ours (or the peer's) times a factor, give or take the noise."""

    def change(r: dict[str, Any]) -> None:
        ms = r["median_ms"] * (factor if r["ours"] == ours else 1.0)
        r.update(median_ms=ms, p10_ms=ms * (1 - noise), p90_ms=ms * (1 + noise))

    return change


@pytest.fixture(scope="module")
def forward() -> dict[str, Any]:
    return made_up("forward")


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_every_number_and_asks_for_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests import gpu_results

    stored = {f"cpu/{name}": made_up(name) for name in ("forward", "decode", "memory")}
    stored |= {f"gpu/{name}": gpu_results.made_up(name) for name in ("forward", "gradients", "launch", "units")}
    for name, results in stored.items():
        write(tmp_path / "results" / f"{name.replace('/', '-')}.json", results)
    write(tmp_path / "results" / "notes.json", {"hello": 1})
    out = tmp_path / "page.html"
    assert cli.main(["bench", "--report", str(tmp_path / "results"), "-o", str(out)]) == 0
    assert "notes.json is not of `tilewise bench --json`" in capsys.readouterr().out
    text = out.read_text()
    assert len(text) < 2_000_000
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)
    assert "default-src 'none'" in text
    assert "{{" not in text
    shown = re.findall(r'<tr id="m\d+".*?</tr>', text)
    records = [r for results in stored.values() for r in results["records"]]
    assert len(shown) == len(records)
    values = [float(x) for row in shown for x in re.findall(r'<td data-value="([^"]+)"', row)]
    for field in ("median_ms", "gflops", "tflops", "ratio", "extra_bytes"):
        wanted = [r[field] for r in records if r.get(field) is not None and (field != "ratio" or r["ours"])]
        if field in ("gflops", "tflops"):  # decoding tells GB/s, and a host's time is no speed
            wanted = [r[field] for r in records if r.get(field) and r.get("n_q") != 1]
        assert wanted, field
        assert set(wanted) <= set(values), field
    sections = text.split('<section class="panel run"')[1:]
    assert len(sections) == len(stored)
    for section in sections:
        assert "<figure" in section
        assert section.count("Every number of these charts") == 1
        assert "tilewise 0." in section.split("</p>")[0]
        assert "commit" in section.split("</p>")[0]
    for told in ("Linear attention, CPU: no results", "Memory, GPU: no results", "<code>tilewise bench --cpu training"):
        assert told in text
    assert "Memory, CPU: no results" not in text
    assert "all n × n scores (naive)" in text
    assert "Targets, CPU" in text


def test_what_a_file_says_is_text(tmp_path: Path, forward: dict[str, Any]) -> None:
    evil = "<script>alert(1)</script>"
    bad = changed(forward, lambda r: r.update(variant=evil, contestant=evil, status="wrong", reason=evil))
    good = made_up("memory")
    good["missing"], good["machine"]["cpu"], good["source"] = {evil: evil}, evil, {"commit": evil, "dirty": True}
    out = tmp_path / "page.html"
    paths = [str(write(tmp_path / f"{i}.json", x)) for i, x in enumerate((bad, good))]
    assert cli.main(["bench", "--report", *paths, "-o", str(out)]) == 0
    assert "<script>alert" not in out.read_text()
    assert "&lt;script&gt;alert" in out.read_text()


def test_linear_and_parallel_results_are_read(tmp_path: Path) -> None:
    found = linear.results([linear.Row(n, 1e-3 * n, 1e-6 * n * n) for n in (256, 512, 1024)], 64, 8)
    assert {"date", "machine", "source", "tilewise"} <= set(found)
    stored = {"linear": found, "linear_gpu": LINEAR_GPU, "parallel": PARALLEL}
    runs = {name: reading.read(write(tmp_path / f"{name}.json", results)) for name, results in stored.items()}
    assert [(run.where, run.kind) for run in runs.values()] == [("CPU", "linear"), ("GPU", "linear"), ("CPU", "other")]
    first = runs["linear"].measurements[0]
    assert (first.contestant, first.ms, first.ratio) == ("tilewise linear", 256.0, pytest.approx(0.256))
    assert [m.fraction for m in runs["linear_gpu"].measurements[:2]] == [0.5, 0.25]
    beside = [{**r, "contestant": who, "ours": ours, "status": status, "reason": None, "forward_ratio": ratio,
               "backward_ratio": None} for r in LINEAR_GPU["records"] for who, ours, status, ratio in
              (("tilewise triton", True, "ok", 2.5), ("flash-linear-attention", False, "wrong", None))]  # fmt: skip
    run = reading.read(write(tmp_path / "beside.json", {**LINEAR_GPU, "schema": "linear gpu 2", "records": beside}))
    assert [(m.ours, m.is_right, m.ratio) for m in run.measurements[:4:2]] == [(True, True, 2.5), (False, False, None)]
    assert runs["parallel"].measurements[1].more == {"sent, backward": "2.0 KiB"}
    assert "tilewise ring" in document.page(list(runs.values()))


def test_what_the_repository_has_is_shown() -> None:
    """Every file of results/ that `tilewise bench` wrote."""
    runs, left_out = reading.found([ROOT / "results"])
    others = {"accuracy.json", "coverage.json", "fuzz.json", "proof.json", "training.json"}
    assert {Path(path).name for path in left_out} <= others
    assert len(document.page(runs)) < 2_000_000


@pytest.mark.parametrize(
    ("most", "end", "count"), [(1.0, 1.0, 5), (782.0, 800.0, 5), (820.0, 1000.0, 5), (0.0013, 0.0015, 4)]
)
def test_axes_end_behind_the_largest(most: float, end: float, count: int) -> None:
    high, ticks = scales.ceiling(most)
    assert (high, len(ticks)) == (pytest.approx(end), count)
    assert ticks[-1] == pytest.approx(high)


def test_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind of chart one, coarsely: a picture takes a while."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots.parts, "DPI", 20)
    monkeypatch.setattr(plots, "charts", lambda run: {type(chart): chart for chart in charts(run)}.values())
    stored = write(tmp_path / "decode.json", made_up("decode"))
    command = ["bench", "--report", str(stored), "-o", str(tmp_path / "page.html"), "--plots", str(tmp_path / "plots")]
    assert cli.main(command) == 0
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {f"cpu-decode-{kind}.{end}" for kind in ("speed", "bars", "limit") for end in ("png", "svg")}


# -- old and new ------------------------------------------------------------------------------------------------------


def against(tmp_path: Path, old: Any, new: Any, *options: str) -> int:
    paths = [str(write(tmp_path / name, x)) for name, x in (("old.json", old), ("new.json", new))]
    return cli.main(["bench", "--report", paths[1], "-o", str(tmp_path / "page.html"), "--against", paths[0], *options])


@pytest.mark.parametrize(
    ("change", "options", "code", "told"),
    [
        (timed(1.0), (), 0, "Ours: 12 the same."),
        (
            timed(1.2),
            (),
            1,
            "SLOWER 1.20x  CPU forward: tilewise cpu, full, d 64, n 512: 8.389 ms (8.389 – 8.389) before, 10.07 ms",
        ),
        (timed(1.04), (), 0, "Ours: 12 the same."),
        (timed(1.04), ("--tolerance", "3"), 1, "12 slower"),
        (timed(1.2, noise=0.2), (), 0, "Ours: 12 the same."),
        (timed(0.8), (), 0, "12 faster"),
        (timed(3.0, ours=False), (), 0, "peers: 3.000 (geometric mean of 12)"),
        (lambda r: r.update(p10_ms=None, p90_ms=None, median_ms=1.06 * r["median_ms"]), (), 1, "12 slower"),
        (lambda r: r.update(status="wrong", reason="it is"), (), 1, "full, d 64, n 512: wrong now: it is"),
    ],
    ids=["same", "slower", "within", "tolerance", "noisy", "faster", "peers", "no noise", "broken"],
)
def test_a_regression_is_beyond_the_noise_of_both(
    tmp_path: Path, forward: dict[str, Any], capsys: pytest.CaptureFixture[str], change: Change,
    options: tuple[str, ...], code: int, told: str,
) -> None:  # fmt: skip
    assert against(tmp_path, forward, changed(forward, change), *options) == code
    assert told in capsys.readouterr().out
    text = (tmp_path / "page.html").read_text()
    rows = text.count('<tr id="m0" class="slower"')
    assert rows == ("slower" in told.lower())
    assert ('class="change slower"' in text) == bool(rows)
    assert ("Slower, or broken: 12" in text) == (code == 1)


def test_another_machine_is_not_judged_unless_asked_for(
    tmp_path: Path, forward: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    new = changed(forward, timed(1.5))
    new["machine"] = {**new["machine"], "cpu": "another abacus"}
    assert against(tmp_path, forward, new) == 0
    told = capsys.readouterr().out
    assert "ANOTHER MACHINE: cpu: " in told
    assert "12 of ours were measured on another machine, and are not judged" in told
    assert "Another machine: cpu" in (tmp_path / "page.html").read_text()
    assert against(tmp_path, forward, new, "--across-machines") == 1


def test_cells_that_only_one_side_has_are_counted(
    tmp_path: Path, forward: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    new = {**forward, "records": forward["records"][4:]}
    assert against(tmp_path, forward, new) == 0
    assert "Of ours 0 are new, and 2 are gone." in capsys.readouterr().out


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "is not JSON"),
        ('{"schema": 2, "records": [NaN]}', "is not JSON"),
        ('{"schema": 7, "records": [1]}', "its schema is 7, none of 2, "),
        ('{"schema": 2}', "has no records"),
        ('{"schema": 2, "records": [{}], "options": {}, "machine": {}}', "'n_q' is missing"),
        ('{"schema": 2, "records": [1]}', "is not as schema 2 has it"),
    ],
)
def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, told: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    assert cli.main(["bench", "--report", str(path), "-o", str(tmp_path / "page.html")]) == 2
    assert told in capsys.readouterr().err
    assert cli.main(["bench", "--report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 2
    assert "no results of `tilewise bench --json` in the folder" in capsys.readouterr().err


def test_a_number_that_is_none(tmp_path: Path, forward: dict[str, Any]) -> None:
    path = write(tmp_path / "x.json", changed(forward, lambda r: r.update(median_ms="fast")))
    with pytest.raises(reading.BadResultsError, match="has median_ms 'fast', expected a number"):
        reading.read(path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--report", "nowhere"], "there is no 'nowhere'"),
        (["--report", "{results}", "--against", "{linear}"], "nothing to compare"),
        (["--report", "{results}", "--against", "{results}", "--tolerance", "much"], "expected a percentage"),
        (["--report", "{results}", "--tolerance", "3"], "--tolerance goes with --against"),
        (["--report", "{results}", "--quick"], "--quick: --report measures nothing"),
        (["--report", "{results}", "--plots", "a.png"], "--plots: expected a folder"),
        (["--report", "{results}", "-o", "nowhere/page.html"], "there is no folder 'nowhere'"),
        (["--quick", "--against", "{results}"], "--against goes with --report"),
    ],
)
def test_bad_options(
    tmp_path: Path, forward: dict[str, Any], capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    places = {
        "results": write(tmp_path / "x.json", forward), "linear": write(tmp_path / "y.json", LINEAR_GPU),
    }  # fmt: skip
    out = [] if "-o" in options or "--report" not in options else ["-o", str(tmp_path / "page.html")]
    assert cli.main(["bench", *(option.format(**places) for option in options), *out]) == 2
    assert told in capsys.readouterr().err


def test_results_of_this_folder_are_the_default(
    tmp_path: Path, forward: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "results" / "forward.json", forward)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "--report"]) == 0
    assert "report.html: 24 measurements in 1 files" in capsys.readouterr().out
    assert (tmp_path / "report.html").is_file()
