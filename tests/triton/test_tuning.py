"""Choices of tiles, warps and stages: they fit, and what `tilewise tune` finds goes before the table."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tilewise import cli, validate
from tilewise.expr import H, K, Q, load
from tilewise.kernels.triton import fitting, tuned, tuning
from tilewise.kernels.triton.tuning import Choice, Pass
from tilewise.spec import Attention, Shape, Tile
from tilewise.variants.causal import causal

SHAPE = Shape(1, 2, 2, 256, 256, 64, 64, "bfloat16", "cuda:0")
HELD = fitting.Held("q", both=True, loops=1)
BIAS = Attention(1.0, load(np.zeros((9, 9), bool), Q, K), tw.S + load(np.zeros((2, 9, 9), np.float32), H, Q, K))


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, even where Triton is interpreted."""
    monkeypatch.setattr(tuning, "is_interpreted", lambda: False)


@pytest.mark.parametrize("limit", [227 << 10, 163 << 10, 99 << 10, 64 << 10])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("d", [16, 64, 80, 128, 256, 512])
def test_every_choice_has_room(d: int, dtype: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "shared_memory", lambda device: limit)
    for kind in Pass:
        for spec in (Attention(1.0), BIAS):
            shape = Shape(1, 2, 2, 256, 256, d, d, dtype)
            choice = tuning.chosen(kind, spec, shape)
            is_least = choice.tile == Tile(16, 16) and choice.stages == 1
            assert is_least or tuning.fits(kind, choice, spec, shape, limit)


@pytest.mark.parametrize("tile", [None, Tile(64, 16), Tile(128, 32), Tile(16, 64), Tile(32, 128)])
@pytest.mark.parametrize("limit", [227 << 10, 99 << 10, 64 << 10])
def test_64_rows_are_multiplied_with_wide_matrices(
    tile: Tile | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "shared_memory", lambda device: limit)
    for kind, d, spec in product(Pass, (16, 64, 128, 256, 512), (Attention(1.0), BIAS)):
        found = tuning.chosen(kind, spec, Shape(1, 2, 2, 256, 256, d, d, "float16"), tile).tile
        assert kind is Pass.D_KEYS or found.q < 64 or found.k >= 64
        assert kind not in (Pass.D_KEYS, Pass.ARRAYS) or found.k < 64 or found.q >= 64
    assert fitting.padded(24, "bfloat16") == 64 and fitting.padded(24, "float32") == 32
    assert fitting.padded(80, "float16") == 128


def test_what_has_no_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "shared_memory", lambda device: 99 << 10)
    large = Shape(1, 2, 2, 64, 64, 512, 512, "float32", backward=True)
    told = tuning.without_room(Attention(1.0), large)
    assert told is not None and "129 KiB" in told and "99" in told
    assert tuning.without_room(Attention(1.0), replace(large, dtype="bfloat16")) is None
    assert tuning.without_room(BIAS, replace(large, d=256, d_v=256)) is None


def test_arrays_of_pairs_take_room_and_others_do_not() -> None:
    slopes = Attention(1.0, None, tw.S + load(np.zeros((2, 9), np.float32), H, Q))
    choice = Choice(Tile(64, 64), 4, 2)
    plain, rows, pairs = (fitting.shared_bytes(choice, x, SHAPE, HELD) for x in (Attention(1.0), slopes, BIAS))
    assert plain == rows and pairs - plain == 2 * 64 * 64 * (1 + 4)


def test_a_variants_cells_take_stages_and_not_the_place_of_other_programs() -> None:
    wanted, limit = Choice(Tile(64, 64), 4, 4), 227 << 10
    choices = [fitting.fitted(wanted, spec, SHAPE, HELD, limit) for spec in (Attention(1.0), BIAS)]
    plain, biased = (
        limit // fitting.shared_bytes(choice, spec, SHAPE, HELD)
        for choice, spec in zip(choices, (Attention(1.0), BIAS), strict=True)
    )
    assert choices[0] == wanted and choices[1].tile == wanted.tile and 2 <= choices[1].stages < wanted.stages
    assert biased >= plain > 1
    assert limit // fitting.shared_bytes(wanted, BIAS, SHAPE, HELD) < plain


def test_queries_in_a_single_stage_lie_there_both_ways() -> None:
    held, (one, two) = fitting.Held("k", both=True, loops=1), (Choice(Tile(32, 64), 4, stages) for stages in (1, 2))
    first, second = (fitting.shared_bytes(choice, Attention(1.0), SHAPE, held) for choice in (one, two))
    tile = 32 * 64 * 2  # bytes of q, or of d_out
    assert first == 2 * 2 * tile * 64 // 32 // 2 + 3 * tile and second - first == tile


def test_angles_take_room_where_they_are_loaded_ahead() -> None:
    turned = Attention(1.0, rope=tw.Rope())
    for stages, more in ((1, 0), (3, 3 * 64 * 64 * 4)):
        choice = Choice(Tile(64, 64), 4, stages)
        plain, wide = (fitting.shared_bytes(choice, x, SHAPE, HELD) for x in (Attention(1.0), turned))
        assert wide - plain == more


def test_less_room_takes_stages_first_and_then_the_tile_that_passes_by() -> None:
    wanted, sizes = Choice(Tile(128, 64), 8, 4), []
    for limit in range(200 << 10, 20 << 10, -(4 << 10)):
        choice = fitting.fitted(wanted, Attention(1.0), SHAPE, HELD, limit)
        sizes.append((choice.stages, choice.tile.q * choice.tile.k))
        assert fitting.shared_bytes(choice, Attention(1.0), SHAPE, HELD) <= limit
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 3


# -- tilewise tune ----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU that is none, with a cache folder of its own."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(tuned, "gpu_name", lambda device: "A GPU (of 2026)")
    monkeypatch.setattr(tuning, "shared_memory", lambda device: fitting.HOPPER)
    tuned.choices.cache_clear()
    yield tmp_path
    tuned.choices.cache_clear()


def test_a_mask_makes_smaller_tiles(machine: Path) -> None:
    pytest.importorskip("triton")
    plain, masked = (tuning.chosen(Pass.FORWARD, Attention(1.0, mask), SHAPE) for mask in (None, causal()))
    assert plain == Choice(Tile(128, 64), 4, 3)
    assert masked == tuning._TABLE[Pass.FORWARD][64]


def test_what_was_found_is_taken(machine: Path) -> None:
    pytest.importorskip("triton")
    before = tuning.chosen(Pass.FORWARD, Attention(1.0), SHAPE)
    path = tuned.save("A GPU (of 2026)", {"forward": {64: (32, 16, 4, 2)}})
    assert path == machine / "triton" / "tuned-A-GPU-of-2026-.json"
    assert tuning.chosen(Pass.FORWARD, Attention(1.0), SHAPE) == Choice(Tile(32, 16), 4, 2) != before
    assert tuning.chosen(Pass.D_KEYS, Attention(1.0), SHAPE) == tuning._TABLE[Pass.D_KEYS][64]
    tuned.save("A GPU (of 2026)", {"forward": {128: (16, 16, 4, 1)}})
    assert tuned.choices("cuda:0")["forward"] == {64: (32, 16, 4, 2), 128: (16, 16, 4, 1)}
    assert tuned.choices("cpu") == {}


@pytest.mark.parametrize("text", ["", "[]", '{"choices": {"forward": {"64": [3, 64, 4, 2]}}}', '{"choices": 3}'])
def test_what_cannot_be_read_is_passed_over(text: str, machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tuned.path_for("A GPU (of 2026)")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert tuned.choices("cuda:0") == {}
    assert "tune again" in caplog.text


def test_without_a_gpu_nothing_is_advised_that_would_not_help(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("tilewise.kernels.triton.modules.is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["tune"]) == 2
    told = capsys.readouterr().err
    assert "tune needs a GPU that Triton serves: PyTorch finds no GPU, or was built without CUDA" in told
    assert "TRITON_INTERPRET" not in told


def test_the_fastest_choice_is_kept(machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    from tilewise.cli import tune
    from tilewise.kernels.triton import trials

    wanted = {Pass.FORWARD: (64, 32), Pass.D_QUERY: (128, 64), Pass.D_KEYS: (32, 128)}

    def milliseconds(kind: Pass, choice: Choice, calls: Any) -> float:
        return 1.0 if (choice.tile.q, choice.tile.k) == wanted[kind] else math.inf if choice.stages > 3 else 2.0

    def problems(d: int, device: str) -> list[Any]:
        q, k, v = np.zeros((3, 1, 2, 64, d), np.float32)
        return [validate.prepare(q, k, v)]

    monkeypatch.setattr(tune, "_check_gpu", lambda: None)
    monkeypatch.setattr(trials, "milliseconds", milliseconds)
    monkeypatch.setattr(trials, "problems", problems)
    assert cli.main(["tune", "--d", "48"]) == 0
    told = capsys.readouterr().out
    assert "forward, d 48: 1.000 ms, tiles of 64 queries and 32 keys" in told and str(machine) in told
    assert {kind: by[64][:2] for kind, by in tuned.choices("cuda:0").items()} == {
        kind.value: size for kind, size in wanted.items()
    }


def test_tuning_needs_a_gpu(capsys: Any) -> None:
    assert cli.main(["tune"]) == 2
    assert "a GPU that Triton serves" in capsys.readouterr().err


def test_a_choice_is_tried_inside_alone() -> None:
    choice = Choice(Tile(16, 16), 4, 1)
    with tuning.trying(Pass.FORWARD, choice):
        assert tuning.chosen(Pass.FORWARD, Attention(1.0), Shape(1, 2, 2, 64, 64, 64, 64)) == choice
    assert tuning.chosen(Pass.FORWARD, Attention(1.0), Shape(1, 2, 2, 64, 64, 64, 64)) != choice


def test_explain_tells_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("tilewise.kernels.triton.is_interpreted", lambda: True)
    q = np.zeros((1, 1, 64, 64), np.float32)
    assert "choice: forward: tiles of 32 queries and 32 keys" in str(tw.explain(q, q, q, kernel="triton"))


def test_an_interpreter_takes_large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "is_interpreted", lambda: True)
    shape = Shape(1, 2, 2, 64, 64, 512, 512)
    assert tuning.chosen(Pass.D_KEYS, Attention(1.0), shape).tile == Tile(128, 128)
    assert tuning.chosen(Pass.D_KEYS, Attention(1.0), shape, Tile(61, 16)).tile == Tile(32, 16)
