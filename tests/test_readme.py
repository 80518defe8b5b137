"""README: short, its cells too, and every number in it from results/ or from what the backends answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from docs import features, summary, tables
from tests import fake_results, gpu_results
from tilewise import dispatch
from tilewise._version import __version__
from tilewise.bench import suite
from tilewise.bench.gpu import suite as gpu_suite
from tilewise.cases import Case
from tilewise.choosing import Purpose
from tilewise.kernels.cuda.rungs import RUNGS
from tilewise.kernels.cuda.source import assembled

ROOT = Path(__file__).parent.parent
TEXT = tables.README.read_text()
MADE = re.compile(r"<!-- ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)


def test_it_is_read_in_two_minutes() -> None:
    assert len(TEXT.splitlines()) <= 150


def test_a_cell_holds_a_few_words() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in row.strip("|").split("|")]
    assert rows and [cell for cell in cells if len(cell.split()) > 6] == []


def test_numbers_are_between_markers() -> None:
    """Speeds, times and sizes; code is not prose."""
    by_hand = re.sub(r"```.*?```", "", MADE.sub("", TEXT), flags=re.DOTALL)
    assert re.findall(r"\d[\d.]*(?:x| ?(?:ms|us|µs|GiB|MiB|TFLOP|%))", by_hand) == []
    assert {name for name, _ in MADE.findall(TEXT)} == {"comparisons", "matrix", "machines", "status"}


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Results in which ours is 1.5 times as fast on a GPU, and twice on a CPU."""
    for of, sections, made_up in (("gpu", gpu_suite.SECTIONS, gpu_results), ("cpu", suite.SECTIONS, fake_results)):
        (tmp_path / of).mkdir()
        for name in sections:
            (tmp_path / of / f"{name}.json").write_text(json.dumps(made_up.made_up(name)))
    return tmp_path


def test_comparisons_follow_the_results(measured: Path) -> None:
    bullets = summary.comparisons(measured, tables.README).replace("\n  ", " ").split("\n")
    assert [bullet.split("**")[1] for bullet in bullets] == [
        "FlexAttention", "FlashAttention-4", "SDPA on a GPU", "SDPA for decoding", "SDPA on a CPU",
    ]  # fmt: skip
    assert all("1.50x" in bullet for bullet in bullets[:4]) and "ran at 2.00x its speed" in bullets[4]
    assert all("Stay with" in bullet for bullet in bullets)


def test_comparisons_without_results_say_how_to_measure(tmp_path: Path) -> None:
    bullets = summary.comparisons(tmp_path, tables.README).replace("\n  ", " ").split("\n")
    assert len(bullets) == 5 and all("not measured yet: `tilewise bench --" in bullet for bullet in bullets)


def test_speeds_of_machines_follow_the_results(measured: Path) -> None:
    hopper, *_, windows = summary.machines(measured, tables.README).splitlines()[2:]
    assert hopper.endswith("| 1.50x, 1.50x, 1.50x | measured on an Fake H200 |")
    assert windows == "| Windows |  |  |  |  | not supported |"


def test_machines_without_results_say_how_to_measure(tmp_path: Path) -> None:
    assert "|  | not measured yet: `tilewise bench --gpu` |" in summary.machines(tmp_path, tables.README)


def test_backends_without_results_have_no_row(measured: Path, tmp_path: Path) -> None:
    assert len(summary.backends(measured, tables.README).splitlines()) == 2 + 10
    (measured / "gpu" / "cute.json").unlink()
    assert len(summary.backends(measured, tables.README).splitlines()) == 2 + 9


def _said_to_compile(purposes: tuple[Purpose, ...] = tuple(Purpose), system: str = "") -> set[str]:
    """Those of GPUs; system: on which `auto` takes it for one of these purposes."""
    machines = (machine for machine in summary.MACHINES if machine.status.startswith("compiled"))
    every = {arch for machine in machines for arch in machine.architectures} - {"cpu"}
    return {arch for arch in every if not system or system in {features.automatic(arch, x) for x in purposes}}


def test_triton_compiles_for_machines_that_are_said_to_compile() -> None:
    pytest.importorskip("triton")
    from tests.triton.test_compile import ARCHITECTURES, DECODING

    assert _said_to_compile((Purpose.FORWARD, Purpose.BACKWARD), "triton") <= set(ARCHITECTURES)
    assert _said_to_compile((Purpose.DECODE,), "triton") <= {*ARCHITECTURES, *DECODING}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here")
@pytest.mark.parametrize("arch", sorted(arch for arch in _said_to_compile() if arch.startswith("sm_")))
def test_cuda_compiles_for_machines_that_are_said_to_compile(arch: str, tmp_path: Path) -> None:
    call, rung = Case("softcap, alibi", "several tiles", "float16").inputs().call(), RUNGS["tiled"]
    source, _ = assembled(rung, call.spec, call.shape, rung.default_tile(call.spec, call.shape))
    (tmp_path / "kernel.cu").write_text(source.text)
    command = ["nvcc", "-std=c++17", f"-arch={arch}", "-cubin", "-o", "kernel.cubin", "kernel.cu"]
    subprocess.run(command, cwd=tmp_path, check=True)


def test_versions_are_those_of_the_package() -> None:
    told = summary.status(ROOT / "results", tables.README)
    assert f"Version {__version__}, alpha" in told
    assert re.search(r"It needs Python 3\.\d+, NumPy [\d.]+ and, for tensors, PyTorch [\d.]+ or newer\.$", told)


def test_a_tick_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = (line for line in features.ticks().splitlines() if line.startswith("| float32 |"))
    assert before.count("✓") == 5
    monkeypatch.setattr(dispatch.kernel("numpy"), "unsupported", lambda spec, shape: "it has had enough", raising=False)
    (after,) = (line for line in features.ticks().splitlines() if line.startswith("| float32 |"))
    assert after.count("✓") == 4
