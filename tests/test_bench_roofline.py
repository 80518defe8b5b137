"""The machine's limits: how they are measured, and how near a decoding step comes to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import fake_contestants as fakes
from tests import fake_library
from tests.fake_results import made_up
from tilewise.bench import machine, player, report, roofline, run
from tilewise.bench.contestants import Contestant, Entry, as_tensor
from tilewise.bench.problem import Cell, Problem


def test_without_the_library_limits_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "LIBRARY", "tilewise.kernels.nothing.library")
    assert roofline.measured(2) == roofline.UNKNOWN
    record = {"dtype": "float32", "gflops": 50.0, "read_gbs": None, "read_fraction": None}
    assert roofline.fractions(record, roofline.UNKNOWN) == {"fraction": None, "read_fraction": None}


@pytest.mark.parametrize(
    ("variable", "why"), [("FAKE_UNAVAILABLE", "not built"), ("FAKE_BROKEN", "failed: AssertionError: no clock")]
)
def test_a_library_that_cannot_measure_says_why(variable: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "LIBRARY", "tests.fake_library")
    monkeypatch.setenv(variable, "not built")
    assert roofline.measured(1) == roofline.Roof(unmeasured=why)
    records = [{**r, "read_fraction": None} for r in made_up("decode")["records"]]
    results = run.results(records, {"section": "decode"}, {}, roofline.measured(1))
    assert results["records"][0]["read_fraction"] is None and f"not measured: {why}" in report.summary(
        {"decode": results}
    )


def test_limits_are_measured_with_the_contestants_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "LIBRARY", "tests.fake_library")
    roof = roofline.measured(3)
    assert roof == roofline.Roof(peak_gflops=3.0, read_gbs=4.0)  # the best of several buffers
    record = {"dtype": "float16", "gflops": 1.5, "read_gbs": 1.0, "read_fraction": None}
    assert roofline.fractions(record, roof) == {"fraction": 0.5, "read_fraction": 0.25}
    assert roofline.fractions({**record, "read_fraction": 0.5}, roof)["read_fraction"] == 0.5
    assert roofline.fractions({**record, "dtype": "float64"}, roof)["fraction"] is None


def test_a_plain_read_is_of_the_arrays_that_are_attended_over(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Problem] = []
    read: list[Any] = []

    def enter(problem: Problem) -> Entry:
        entered.append(problem)
        return Entry(lambda d_out: fakes.exact(problem), lambda x: x)

    monkeypatch.setattr(player, "find", lambda name: Contestant(name, enter))
    monkeypatch.setattr(fake_library, "read_rate", lambda *arrays: read.extend(arrays) or 5)
    playing = player.Player("someone")
    playing.enter(Cell("full", 1, 16, 8, "float16"), 0)
    assert playing.plain_read("tests.fake_library") == 5.0
    assert [x is y for x, y in zip(read, (entered[0].k, entered[0].v), strict=True)] == [True, True]
    monkeypatch.setenv("FAKE_UNAVAILABLE", "not built")
    assert playing.plain_read("tests.fake_library") is None


class _Team:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, name: str, method: str, count: int, timeout: float) -> list[float]:
        self.asked.append(method)
        return [1e-3] * count

    def plain_read(self, name: str, timeout: float) -> float:
        self.asked.append("plain read")
        return 1e9


@pytest.mark.parametrize(("queries", "asked"), [(1, ["turn", "plain read"]), (16, ["turn"])])
def test_every_turn_of_a_decoding_step_is_followed_by_a_plain_read(queries: int, asked: list[str]) -> None:
    team, entrant = _Team(), run._Entrant(verdict=None, rows=1, held_bytes=0, takes=1e-3, count=6)
    for _ in range(3):
        assert run.Sweep(())._turn(team, Cell("full", queries, 16, 8), "someone", entrant, 2) == [1e-3, 1e-3]
    assert team.asked == 3 * asked
    assert len(entrant.plain_reads) == team.asked.count("plain read")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_on_the_cpu_are_the_arrays_that_are_read(dtype: str) -> None:
    pytest.importorskip("torch")
    problem = Problem.make(Cell("full", 1, 16, 8, dtype))
    for x in (problem.q, problem.k, problem.v, problem.d_out):
        assert as_tensor("cpu")(x).data_ptr() == x.ctypes.data and x.ctypes.data % 64 == 0


def test_what_fits_the_cache_is_marked() -> None:
    cell = Cell("full", 1, 1024, 128, heads=8, heads_k=8)  # k and v: 8 MiB
    plain = [roofline.PlainRead(rate, share) for rate, share in ((7e9, 0.25), (2e9, 0.5), (1e9, 1.0))]
    found = [roofline.reading(cell, 1e-3, plain, cache) for cache in (8 << 20, 4 << 20, None)]
    assert [(r["times_cache"], r["fits_cache"]) for r in found] == [(1.0, True), (2.0, False), (None, None)]
    assert found[0]["plain_read_gbs"] == 2.0 and found[0]["read_gbs"] == pytest.approx((8 << 20) / 1e6)
    assert found[0]["read_fraction"] == 0.5
    unknown = roofline.reading(cell, 1e-3, [], None)
    assert unknown["plain_read_gbs"] is unknown["read_fraction"] is None


def test_a_turn_is_compared_with_the_read_beside_it() -> None:
    """Memory is twice as fast in the first turn as in the others, and so is the step: always half of a plain read."""
    cell = Cell("full", 1, 1024, 128, heads=8, heads_k=8)
    rates = (16e9, 8e9, 8e9)
    plain = [roofline.PlainRead.beside(cell, [9.0, cell.key_bytes / (rate / 2), 0.0], rate) for rate in rates]
    found = roofline.reading(cell, 1e-3, plain, None)
    assert found["read_fraction"] == pytest.approx(0.5) and found["plain_read_gbs"] == 8.0


def test_the_last_cache_is_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CACHES", tmp_path)
    assert machine.cache_bytes() is None
    for i, size in enumerate(("32K", "1024K", "32768K")):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(f"{size}\n")
    assert machine.cache_bytes() == 32 << 20
    (tmp_path / "index2" / "size").write_text("plenty\n")
    assert machine.cache_bytes() is None
