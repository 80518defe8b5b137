"""Choices of tiles, warps and stages: each architecture's, which fit; what `tilewise tune` finds goes before them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tilewise import cli
from tilewise.expr import H, K, Q, load
from tilewise.kernels.triton import choices, fitting, tuned, tuning
from tilewise.kernels.triton.choices import HEADS, Calls, Choice, Pass
from tilewise.kernels.triton.modules import is_interpreted
from tilewise.spec import Attention, Shape, Tile
from tilewise.variants.causal import causal

SHAPE = Shape(1, 2, 2, 256, 256, 64, 64, "bfloat16", "cuda:0")
HELD = fitting.Held("q", both=True, loops=1)
BIAS = Attention(1.0, load(np.zeros((9, 9), bool), Q, K), tw.S + load(np.zeros((2, 9, 9), np.float32), H, Q, K))


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, even where Triton is interpreted."""
    monkeypatch.setattr(tuning, "is_interpreted", lambda: False)
    tuning._held.cache_clear()
    yield
    tuning._held.cache_clear()


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
            assert is_least or fitting.shared_bytes(choice, spec, shape, tuning._HELD[kind]) <= limit


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


def test_tiles_that_wait_for_a_second_product_take_room_in_pipelines() -> None:
    by_waiting = [HELD._replace(waiting=n) for n in range(3)]
    for stages, more in ((1, 0), (3, 64 * 64 * 2)):
        choice = Choice(Tile(64, 64), 4, stages)
        none, one, two = (fitting.shared_bytes(choice, Attention(1.0), SHAPE, held) for held in by_waiting)
        assert (one - none, two - none) == (more, 2 * more)


def test_less_room_takes_stages_first_and_then_the_tile_that_passes_by() -> None:
    wanted, sizes = Choice(Tile(128, 64), 8, 4), []
    for limit in range(200 << 10, 20 << 10, -(4 << 10)):
        choice = fitting.fitted(wanted, Attention(1.0), SHAPE, HELD, limit)
        sizes.append((choice.stages, choice.tile.q * choice.tile.k))
        assert fitting.shared_bytes(choice, Attention(1.0), SHAPE, HELD) <= limit
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 3


# -- the table --------------------------------------------------------------------------------------------------------

ROOM = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10,
    "gfx942": 64 << 10,
}  # fmt: skip


@pytest.mark.parametrize("architecture", ROOM)
def test_entries_of_an_architecture_are_taken_as_they_are(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its own row: what would be made smaller on its GPUs has no place there."""
    monkeypatch.setattr(tuning, "shared_memory", lambda device: ROOM[architecture])
    monkeypatch.setattr(tuning, "architecture", lambda device: architecture)
    seen = 0
    for kind, (calls, mask), d in product(Pass, ((Calls.PLAIN, None), (Calls.MASKED, causal())), HEADS):
        found = choices.entry(architecture, kind, calls, d)
        if "any GPU" not in found.row:
            seen += 1
            assert tuning.chosen(kind, Attention(1.0, mask), replace(SHAPE, d=d, d_v=d, device="cpu")) == found.choice
    assert seen > 0


def test_what_was_measured_is_hoppers() -> None:
    for architecture, d in product(ROOM, HEADS):
        found = choices.entry(architecture, Pass.FORWARD, Calls.PLAIN, d)
        assert found.origin == ("measured" if architecture == "sm_90" and d <= 256 else "reckoned")
    assert choices.entry("sm_90", Pass.DECODE, Calls.PLAIN, 256).origin == "reckoned"
    common, own = (choices.entry(x, Pass.D_QUERY, Calls.PLAIN, 64) for x in ("sm_80", "sm_90"))
    assert common.choice == own.choice and "any GPU" in common.row and "sm_90" in own.row
    assert choices.entry("sm_89", Pass.FORWARD, Calls.PLAIN, 64) == choices.entry(
        "sm_86", Pass.FORWARD, Calls.PLAIN, 64
    )
    assert choices.entry("gfx90a", Pass.DECODE, Calls.PLAIN, 64).choice.stages == 2


def test_blackwell_keeps_tiles_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "architecture", lambda device: {"cuda:0": "sm_103", "cuda:1": "sm_120"}[device])
    waiting = [[tuning._held(kind, device).waiting for kind in Pass] for device in ("cuda:0", "cuda:1")]
    assert waiting == [[0, 1, 2, 0, 0, 0], [0] * 6]


def _torch_with(hip: str | None, **properties: Any) -> Any:
    found = SimpleNamespace(**properties)
    cuda = SimpleNamespace(get_device_properties=lambda device: found, get_device_capability=lambda device: (9, 4))
    return SimpleNamespace(version=SimpleNamespace(hip=hip), cuda=cuda)


@pytest.mark.parametrize(
    ("torch", "name", "room"),
    [
        (_torch_with(None, shared_memory_per_block=48 << 10, shared_memory_per_block_optin=7), "sm_94", 7),
        (_torch_with("6.4", shared_memory_per_block=64 << 10, gcnArchName="gfx942:sramecc+"), "gfx942", 64 << 10),
    ],
    ids=["NVIDIA", "AMD"],
)
def test_what_a_gpu_tells_of_itself(torch: Any, name: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert fitting.architecture.__wrapped__("cuda:0") == name
    assert fitting.shared_memory.__wrapped__("cuda:0") == room


# -- tilewise tune ----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU that is none, with a cache folder of its own."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(tuned, "gpu_name", lambda device: "A GPU (of 2026)")
    monkeypatch.setattr(tuning, "shared_memory", lambda device: fitting.HOPPER)
    monkeypatch.setattr(tuning, "architecture", lambda device: "sm_90")
    tuned.choices.cache_clear()
    yield tmp_path
    tuned.choices.cache_clear()


def test_a_mask_makes_smaller_tiles(machine: Path) -> None:
    pytest.importorskip("triton")
    plain, masked = (tuning.chosen(Pass.FORWARD, Attention(1.0, mask), SHAPE) for mask in (None, causal()))
    assert plain == Choice(Tile(128, 64), 4, 3)
    assert masked == Choice(Tile(64, 64), 4, 3)


def test_what_was_found_is_taken_by_such_calls_alone(machine: Path) -> None:
    pytest.importorskip("triton")
    plain, masked, small = Attention(1.0), Attention(1.0, causal()), Choice(Tile(32, 16), 4, 2)
    before = tuning.chosen(Pass.FORWARD, masked, SHAPE)
    path = tuned.save("A GPU (of 2026)", {(Pass.FORWARD, Calls.PLAIN, 64): small})
    assert path == machine / "triton" / "tuned-A-GPU-of-2026-.json"
    assert tuning.chosen(Pass.FORWARD, plain, SHAPE) == small != before
    assert tuning.chosen(Pass.FORWARD, masked, SHAPE) == before
    assert tuning.chosen(Pass.D_KEYS, plain, SHAPE) == choices.entry("sm_90", Pass.D_KEYS, Calls.PLAIN, 64).choice
    least = Choice(Tile(16, 16), 4, 1)
    tuned.save("A GPU (of 2026)", {(Pass.FORWARD, Calls.MASKED, 128): least})
    assert tuned.choices("cuda:0") == {
        (Pass.FORWARD, Calls.PLAIN, 64): small, (Pass.FORWARD, Calls.MASKED, 128): least,
    }  # fmt: skip
    assert tuned.choices("cpu") == {}


BROKEN = ["", "[]", '{"format": 2, "choices": {"forward plain 64": [3, 64, 4, 2]}}', '{"format": 2, "choices": 3}']
BROKEN += ['{"format": 2, "choices": {"forward plain 65": [64, 64, 4, 2]}}', '{"format": 2, "choices": {"a b 64": []}}']


@pytest.mark.parametrize("text", BROKEN)
def test_what_cannot_be_read_is_passed_over(text: str, machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(text)
    assert tuned.choices("cuda:0") == {}
    assert "tune again" in caplog.text and caplog.records[0].levelname == "WARNING"


def test_a_file_of_another_format_is_told_of_and_replaced(machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    caplog.set_level("INFO", "tilewise")
    path = _write('{"gpu": "A GPU", "triton": "3.6.0", "choices": {"forward": {"64": [32, 16, 4, 2]}}}')
    assert tuned.choices("cuda:0") == {}
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert str(path) in caplog.text and "it is in format 1, and this version of Tilewise reads 2" in caplog.text
    found = {(Pass.D_KEYS, Calls.MASKED, 64): Choice(Tile(16, 16), 4, 1)}
    tuned.save("A GPU (of 2026)", found)
    assert tuned.choices("cuda:0") == found


def _write(text: str) -> Path:
    path = tuned.path_for("A GPU (of 2026)")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


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

    wanted = {Pass.FORWARD: (32, 64), Pass.D_QUERY: (128, 64), Pass.D_KEYS: (64, 32)}

    def milliseconds(trial: trials.Trial, choice: Choice) -> float:
        size = wanted[trial.kind] if trial.calls is Calls.PLAIN else (64, 64)
        return 1.0 if (choice.tile.q, choice.tile.k) == size else math.inf if choice.stages > 3 else 2.0

    def of_a_pass(kind: Pass, d: int, device: str) -> list[trials.Trial]:
        shape = replace(SHAPE, d=d, d_v=d)
        specs = {Calls.PLAIN: Attention(1.0), Calls.MASKED: Attention(1.0, causal())}
        return [trials.Trial(kind, calls, spec, shape, lambda: None) for calls, spec in specs.items()]

    monkeypatch.setattr(tune, "_check_gpu", lambda: None)
    monkeypatch.setattr(trials, "milliseconds", milliseconds)
    monkeypatch.setattr(trials, "trials", of_a_pass)
    assert cli.main(["tune", "--d", "48", "--passes", "forward,d_query,d_keys"]) == 0
    told = capsys.readouterr().out
    assert "forward, plain, d 48: 1.000 ms, tiles of 32 queries and 64 keys" in told and str(machine) in told
    sizes = {key: (x.tile.q, x.tile.k) for key, x in tuned.choices("cuda:0").items()}
    plain = {(kind, Calls.PLAIN, 64): size for kind, size in wanted.items()}
    assert sizes == plain | {(kind, Calls.MASKED, 64): (64, 64) for kind in wanted}


def test_calls_by_which_passes_are_tuned(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, run by Triton's interpreter: each is of its kind, and takes the choice that is tried."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    if not is_interpreted():
        pytest.skip("Triton is not interpreted")
    from tilewise.kernels.triton import launch, launch_decode, launch_gradients, trials

    for name, small in (("_TOKENS", 64), ("_NUMBERS", 32), ("_LENGTH", 32), ("_SEQUENCES", 2)):
        monkeypatch.setattr(trials, name, small)
    taken: list[Pass] = []

    def chosen(kind: Pass, *given: Any) -> Choice:
        taken.append(kind)
        return tuning.chosen(kind, *given)

    for module in (launch, launch_decode, launch_gradients):
        monkeypatch.setattr(module, "chosen", chosen)
    backward, saved = launch.backward, []
    monkeypatch.setattr(launch, "backward", lambda *given: saved.append(given[4]) or backward(*given))
    for kind in Pass:
        made = list(trials.trials(kind, 16, "cpu"))
        assert [x.calls for x in made] == list(Calls)[kind in (Pass.PAIRS, Pass.ARRAYS) :]
        for trial in made:
            assert tuning.calls_of(trial.spec) is trial.calls
            taken.clear()
            trial.run()
            assert kind in taken
            tried = list(trials.candidates(trial))
            assert len(tried) > 4 and len(set(tried)) == len(tried)
    assert saved and all(x.remainder is not None for x in saved), "what training reads is timed"


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
    told = str(tw.explain(q, q, q, kernel="triton"))
    assert "choice: forward: tiles of 32 queries and 32 keys" in told
    assert "(reckoned, float32 on any GPU, heads up to 64)" in told


def test_explain_tells_where_a_choice_is_from(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    measured = tuning.described(Pass.FORWARD, Attention(1.0), SHAPE)
    assert measured.endswith("(measured, plain calls on sm_90, heads up to 64)")
    biased = tuning.described(Pass.FORWARD, BIAS, SHAPE)
    assert biased.endswith("(measured, masked calls on sm_90, heads up to 64, made smaller to fit)")
    tuned.save("A GPU (of 2026)", {(Pass.FORWARD, Calls.PLAIN, 64): Choice(Tile(64, 64), 8, 2)})
    found = tuning.described(Pass.FORWARD, Attention(1.0), SHAPE)
    assert found.endswith("8 warps, 2 stages (tuned, plain calls on this GPU, heads up to 64)")
    monkeypatch.setattr(tuning, "architecture", lambda device: "sm_80")
    reckoned = tuning.described(Pass.D_KEYS, Attention(1.0), SHAPE)
    assert reckoned.endswith("(reckoned, plain calls on any GPU, heads up to 64)")
    monkeypatch.setattr(tuning, "is_interpreted", lambda: True)
    assert tuning.described(Pass.D_KEYS, Attention(1.0), SHAPE).endswith("(for the interpreter)")


def test_an_interpreter_takes_large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "is_interpreted", lambda: True)
    shape = Shape(1, 2, 2, 64, 64, 512, 512)
    assert tuning.chosen(Pass.D_KEYS, Attention(1.0), shape).tile == Tile(128, 128)
    assert tuning.chosen(Pass.D_KEYS, Attention(1.0), shape, Tile(61, 16)).tile == Tile(32, 16)
