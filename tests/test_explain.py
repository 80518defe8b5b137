"""explain: which kernel system takes a call, why each other one does not, and the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise import dispatch
from tilewise.choosing import BOTH, MAIN_MEMORY, Row
from tilewise.schedule import Kind
from tilewise.spec import Attention, Shape, Tile


def _inputs(n: int = 1024) -> list[np.ndarray]:
    return [np.zeros((2, 4, n, 32), np.float32) for _ in range(3)]


def test_it_tells_the_kernel_and_the_plan() -> None:
    told = tw.explain(*_inputs(), mask=tw.causal() & tw.window(100))
    first = next(name for name in dispatch.NAMES if dispatch.kernel(name).unavailable() is None)
    assert told.kernel == first
    assert told.plan is not None
    assert told.plan.counts[Kind.EMPTY] > 0
    text = str(told)
    parts = "batch 2, heads 4, queries 1024", f"kernel: {first}", "mask: (K <= Q", "EMPTY", "slow-memory traffic"
    for part in (*parts, f"gradients: {first}"):
        assert part in text


def test_a_call_that_nothing_computes_is_explained_too() -> None:
    q = torch.zeros(2, 8, 4, device="meta")
    told = tw.explain(q, q, q)
    assert told.kernel is None
    assert "none can compute this call" in str(told)
    assert "not cpu, numpy" in str(told)
    assert told.reasons["numpy"] == "it works in main memory and the arrays are on meta; move them with .cpu()"


def test_an_unknown_kernel_raises() -> None:
    with pytest.raises(ValueError, match=r"kernel: expected one of auto, cpu, numpy, .* got 'abacus'"):
        tw.explain(*_inputs(8), kernel="abacus")
    with pytest.raises(ValueError, match="got 'Trition'; did you mean 'triton'"):
        tw.explain(*_inputs(8), kernel="Trition")


def test_a_simulator_is_explained_if_named() -> None:
    assert "cuda-sim" not in str(tw.explain(*_inputs(8)))
    told = tw.explain(*_inputs(8), kernel="cuda-sim/naive")
    assert "cuda-sim/naive" in str(told)


class _Picky:
    name, summary = "picky", "a system that refuses"

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        return "it has no backward pass" if shape.backward else None if spec.mask is None else "it knows no masks"

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return Tile()


def _with_order(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """In place of the table's: picky first, whose gradients others have."""
    numpy_kernel = dispatch.kernel("numpy")
    row = Row(MAIN_MEMORY, BOTH, names, names, names, "made up")
    monkeypatch.setattr(dispatch, "row_of", lambda architecture, dtype: row)
    monkeypatch.setattr(dispatch, "order", lambda architecture, dtype, purpose: row.order(purpose))
    monkeypatch.setattr(dispatch, "everywhere", lambda purpose: names)
    monkeypatch.setattr(dispatch, "kernel", lambda name: _Picky() if name == "picky" else numpy_kernel)


def test_auto_takes_the_first_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_order(monkeypatch, "picky", "numpy")
    shape = Shape(1, 1, 1, 8, 8, 4, 4)
    assert dispatch.resolve("auto", Attention(1.0), shape).name == "picky"
    assert dispatch.resolve("auto", Attention(1.0, tw.causal()), shape).name == "numpy"
    backward = Shape(1, 1, 1, 8, 8, 4, 4, backward=True)
    assert dispatch.resolve("auto", Attention(1.0), backward).name == "numpy"
    told = tw.explain(*_inputs(8))
    assert (told.kernel, told.gradients) == ("picky", "numpy")
    assert "the first usable of picky, numpy (main memory, float32; made up)" in told.why
    assert "\n  not picky: it has no backward pass" in str(told).partition("gradients: numpy")[2]


def test_a_named_system_is_never_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_order(monkeypatch, "picky")
    monkeypatch.setattr(dispatch, "NAMED", ("picky",))
    shape = Shape(1, 1, 1, 8, 8, 4, 4)
    with pytest.raises(tw.Unsupported, match="kernel 'picky' cannot compute this call: it knows no masks"):
        dispatch.resolve("picky", Attention(1.0, tw.causal()), shape)
    with pytest.raises(tw.Unsupported, match=r"no kernel system can compute this call:\s+picky: it knows no masks"):
        dispatch.resolve("auto", Attention(1.0, tw.causal()), shape)


def test_numpy_in_the_engines_place_is_told_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(dispatch.kernel("cpu")), "unavailable", lambda self: "it was not compiled; get g++")
    told = tw.explain(*_inputs(8))
    assert told.kernel == told.gradients == "numpy"
    assert told.slowness == told.gradients_slowness
    assert str(told).count("slow: it computes in NumPy") == 2
    assert "Faster, if it could: cpu: it was not compiled; get g++" in str(told)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_it_tells_what_is_kept_for_a_backward_pass(dtype: str) -> None:
    """As many bytes as autograd keeps, of results that are not rounded without a remainder."""
    q, k, v = (torch.zeros(2, heads, 8, d, dtype=getattr(torch, dtype)) for heads, d in ((4, 32), (2, 32), (2, 16)))
    out, lse = 2 * 4 * 8 * 16 * q.itemsize, 2 * 4 * 8 * (8 if dtype == "float64" else 4)
    told = tw.explain(q, k, v)
    assert told.bytes_kept == {"out": out, "lse": lse} | ({"remainder": out} if dtype == "bfloat16" else {})
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        tw.attention(q.requires_grad_(), k, v)
    assert sum(told.bytes_kept.values()) == sum(kept) - q.nbytes - k.nbytes - v.nbytes
    line = "out 2.0 KiB, lse 256 B, remainder 2.0 KiB\n" if dtype == "bfloat16" else f"lse {lse} B\n"
    assert f"kept for a backward pass: out {out // 1024}.0 KiB" in str(told)
    assert line in str(told)
