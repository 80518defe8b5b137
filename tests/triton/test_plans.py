"""Plans are kept; those that look at arrays in main memory are made anew, as someone may have written there."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tilewise.expr import K, Q, load
from tilewise.spec import Attention, Shape, Tile

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from tilewise.kernels.triton import arguments  # noqa: E402 - only with both of them
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
    monkeypatch.setattr(arguments, "_on_devices", Kept(4))
    monkeypatch.setattr(graphs, "held", {})
    device = Device()
    monkeypatch.setattr(graphs, "is_capturing", lambda: device.capturing)
    monkeypatch.setattr(arguments.torch, "from_numpy", lambda x: SimpleNamespace(to=lambda device: x.copy()))
    return device


def _plan(device: Any, mask: Any, by_key: bool = False) -> Any:
    return arguments._plan_on(device, Attention(1.0, mask), SHAPE, TILE, by_key)


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
