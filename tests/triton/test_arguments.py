"""The arguments of kernels. Plans are kept, unless they look at arrays in main memory, which someone may change."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tilewise.expr import K, Q, load
from tilewise.spec import Attention, Lengths, Shape, Tile

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from tilewise.kernels import uploads  # noqa: E402 - only with both of them
from tilewise.kernels.triton import arguments  # noqa: E402
from tilewise.pytorch import graphs  # noqa: E402
from tilewise.sharing import Kept  # noqa: E402

SHAPE, TILE = Shape(1, 2, 2, 64, 64, 8, 8), Tile(16, 16)


@dataclass(eq=False)
class Device:
    type: str = "cuda"
    capturing: bool = False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device that is none: what is moved there stays where it is."""
    monkeypatch.setattr(uploads, "_on_devices", Kept(4))
    monkeypatch.setattr(graphs, "held", {})
    device = Device()
    monkeypatch.setattr(graphs, "is_capturing", lambda: device.capturing)
    monkeypatch.setattr(uploads.torch, "from_numpy", lambda x: SimpleNamespace(to=lambda device: x.copy()))
    return device


def _plan(device: Any, mask: Any, by_key: bool = False) -> Any:
    return uploads.plan_on(device, Attention(1.0, mask), SHAPE, TILE, by_key)


def test_the_same_call_has_the_same_plan(gpu: Device) -> None:
    assert _plan(gpu, tw.causal()) is _plan(gpu, tw.causal())
    different = [tw.causal(), tw.window(3), None]
    made = [_plan(gpu, mask, by_key) for mask in different for by_key in (False, True)]
    assert len(set(map(id, made))) == 6


def test_arrays_in_main_memory_are_looked_at_again(gpu: Device) -> None:
    cells = np.zeros((64, 64), bool)
    mask = load(cells, Q, K)
    assert not _plan(gpu, mask).records[..., 6].any()
    cells[:] = True
    assert _plan(gpu, mask).records[..., 6].all()


def test_a_graph_needs_a_plan_that_is_there_and_keeps_it(gpu: Device) -> None:
    gpu.capturing = True
    with pytest.raises(RuntimeError, match="make it once first"):
        _plan(gpu, tw.causal())
    gpu.capturing = False
    made = _plan(gpu, tw.causal())
    gpu.capturing = True
    assert _plan(gpu, tw.causal()) is made
    assert [plan for plan, _ in graphs.held.values()] == [made]


def _maps(x: Any, spec: Attention | None = None) -> list[Any]:
    return list(arguments.maps(spec or Attention(1.0), 16, k=x, v=torch.zeros(2, 3, 40, 16)).values())


def test_a_copy_engine_takes_rows_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_has_copy_engine", lambda device: True)
    x = torch.zeros(2, 3, 40, 16)
    k_map, v_map = _maps(x)
    assert k_map.block_shape == v_map.block_shape == [1, 1, 16, 16]
    assert None not in _maps(x.transpose(1, 2).contiguous().transpose(1, 2))  # heads side by side
    unsuitable = {
        "expanded": x[:1].expand(2, 3, 40, 16),
        "an odd address": torch.zeros(2 * 3 * 40 * 16 + 1)[1:].view(2, 3, 40, 16),
        "odd rows": torch.zeros(2, 3, 40, 18)[..., :15],
        "nothing": x[:, :, :0],
    }
    assert {name: _maps(y) for name, y in unsuitable.items()} == {name: [None, None] for name in unsuitable}


def test_a_copy_engine_turns_nothing_and_knows_no_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_has_copy_engine", lambda device: True)
    x, ends = torch.zeros(2, 3, 40, 16), np.array([0, 40])
    assert _maps(x, Attention(1.0, rope=tw.Rope())) == [None, None]
    assert _maps(x, Attention(1.0, lengths=Lengths(ends, ends))) == [None, None]
    monkeypatch.setattr(arguments, "_has_copy_engine", lambda device: False)
    assert _maps(x) == [None, None]


@pytest.mark.parametrize(
    ("hip", "capability", "has"), [(None, (9, 0), True), (None, (8, 9), False), ("6.4", (9, 4), False)],
    ids=["Hopper", "Ada", "AMD"],
)  # fmt: skip
def test_what_hopper_has_amds_gpus_have_not(
    hip: str | None, capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments.modules, "is_interpreted", lambda: False)
    monkeypatch.setattr(uploads.torch.version, "hip", hip)
    monkeypatch.setattr(uploads.torch.cuda, "get_device_capability", lambda device: capability)
    assert arguments._has_copy_engine.__wrapped__(Device()) is has
    assert arguments.starts_early.__wrapped__(Device()) is has
    assert not arguments._has_copy_engine.__wrapped__(Device("cpu"))
