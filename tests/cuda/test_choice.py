"""Every front takes the kernel that `auto` should take, on GPUs that are none: CUDA's run on the simulator, and where
Triton would be taken NumPy computes in its place, and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tilewise as tw
from tests.cuda.fake_gpu import FakeGpu
from tilewise import arrays, dispatch
from tilewise.kernels.cuda import CudaKernel
from tilewise.kernels.numpy import NumpyKernel
from tilewise.kernels.triton import TritonKernel
from tilewise.linear import dispatch as linear
from tilewise.spec import Attention, Tile

torch = pytest.importorskip("torch")

D = 16
Taken = list[tuple[str, str]]


@pytest.fixture
def taken(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Which kernels were taken, by the fake GPU's calls so far, and for what."""
    told: Taken = []

    def computing(system: type, name: str, numpy_forward: bool) -> Callable[..., Any]:
        own = getattr(system, name)

        def computed(self: Any, spec: Attention, q: Any, *given: Any, **options: Any) -> Any:
            told.append((self.name, name))
            if not numpy_forward:
                return own(self, spec, q, *given, **options)
            given = tuple(x for x in given if x is not None)
            with monkeypatch.context() as patch:
                patch.setattr(arrays, "device_name", lambda x: "cpu")
                return getattr(NumpyKernel(), name)(spec, q, *given)

        return computed

    for name in ("forward", "backward"):
        monkeypatch.setattr(TritonKernel, name, computing(TritonKernel, name, True))
        monkeypatch.setattr(CudaKernel, name, computing(CudaKernel, name, False))
    for name in ("prepared", "prepared_backward"):
        monkeypatch.setattr(CudaKernel, name, computing(CudaKernel, name, False))
    monkeypatch.setattr(TritonKernel, "unavailable", lambda self: None)
    monkeypatch.setattr(TritonKernel, "unsupported", lambda self, spec, shape: None)
    monkeypatch.setattr(TritonKernel, "choice", lambda self, spec, shape: "tiles of a GPU that is none")
    monkeypatch.setattr(TritonKernel, "default_tile", lambda self, spec, shape: Tile())
    return told


def _on(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def _tensors(aligned: bool = True, dtype: Any = torch.bfloat16, grad: bool = False) -> list[Any]:
    """Rows at multiples of 16 bytes, or not."""
    rows = D if aligned else D + 1
    made = [torch.randn(1, 2, 8, rows, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    return [x.to(dtype)[..., :D].requires_grad_(grad) for x in made]


def _attention(q: Any, k: Any, v: Any) -> Any:
    return tw.attention(q, k, v, causal=True)


def _sdpa(q: Any, k: Any, v: Any) -> Any:
    return tw.scaled_dot_product_attention(q, k, v, is_causal=True)


def _vjp(q: Any, k: Any, v: Any) -> Any:
    return tw.attention_vjp(q, k, v, causal=True)[0]


def _packed(q: Any, k: Any, v: Any) -> Any:
    ends = torch.tensor([0, 3, 8])
    return tw.attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), ends, ends, causal=True)


def _operator(q: Any, k: Any, v: Any) -> Any:
    """As compiled graphs call it."""
    from tilewise import wire
    from tilewise.pytorch import operator

    line, _ = wire.encode(Attention(D**-0.5, tw.causal()), "auto")
    return operator.attention(q, k, v, [], None, line)[0]


FRONTS = [_attention, _sdpa, _vjp, _packed, _operator]


@pytest.mark.parametrize("front", FRONTS)
def test_half_precision_that_tma_refuses_goes_to_triton(front: Callable[..., Any], taken: Taken) -> None:
    front(*_tensors(aligned=False))
    assert {name for name, _ in taken} == {"triton"}
    del taken[:]
    front(*_tensors(aligned=True))
    assert {name for name, _ in taken} == {"cuda/forward_sm90"}


@pytest.mark.parametrize("front", [_attention, _vjp, _operator])
def test_steps_that_are_never_taken_do_not_decide(front: Callable[..., Any], taken: Taken) -> None:
    """PyTorch tells any for a dimension of size 1: 7 numbers from a sequence to the next, where there is one."""
    front(*(x.as_strided(x.shape, (7, *x.stride()[1:])) for x in _tensors()))
    assert {name for name, _ in taken} == {"cuda/forward_sm90"}


@pytest.mark.parametrize("front", FRONTS)
def test_half_precision_goes_to_triton_where_there_is_no_hopper(
    front: Callable[..., Any], taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(monkeypatch, 8, 0)
    front(*_tensors())
    assert {name for name, _ in taken} == {"triton"}


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((8, 0), "float16", "triton"), ((8, 9), "float32", "cuda/tiled"), ((9, 0), "bfloat16", "cuda/forward_sm90"),
        ((9, 0), "float32", "cuda/tiled"), ((7, 5), "float16", "cuda/tiled"), ((12, 0), "bfloat16", "triton"),
    ],
)  # fmt: skip
def test_training_takes_one_kernel_for_both_passes(
    capability: tuple[int, int], dtype: str, expected: str, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(monkeypatch, *capability)
    out = _attention(*_tensors(dtype=getattr(torch, dtype), grad=True))
    assert {name for name, _ in taken} == {expected}
    del taken[:]
    out.float().sum().backward()
    assert {name for name, _ in taken} == {expected}


def test_a_repeated_call_is_not_chosen_anew(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _tensors()
    _attention(*tensors)
    monkeypatch.setattr(dispatch, "resolve", lambda *call: pytest.fail("it was chosen again"))
    _attention(*tensors)


def test_explain_tells_how_arrays_lie(taken: Taken) -> None:
    told = tw.explain(*_tensors(aligned=False))
    assert told.kernel == "triton" and told.gradients == "cuda/forward_sm90"
    assert told.reasons["cuda/forward_sm90"] == (
        "q has rows, heads or batches 34 bytes apart; TMA takes positive multiples of 16"
    )
    assert "the first usable of cuda/forward_sm90, cute/forward_sm90, triton" in told.why
    assert tw.explain(*_tensors()).kernel == "cuda/forward_sm90"


# -- AMD --------------------------------------------------------------------------------------------------------------


def test_on_amds_gpus_triton_serves_and_nothing_made_for_nvidias(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an MI250, which PyTorch says to have the compute capability of an H200."""
    from types import SimpleNamespace

    monkeypatch.setattr(torch.version, "hip", "6.4")
    about = SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    for dtype in (torch.bfloat16, torch.float32):
        told = tw.explain(*_tensors(dtype=dtype))
        assert (told.kernel, told.gradients) == ("triton", "triton")
        assert "AMD CDNA (gfx90a)" in told.why
        for name in ("cuda/forward_sm90", "cuda/tiled", "cute/basic"):
            assert "PyTorch is built for AMD's GPUs (ROCm 6.4)" in (told.reasons[name] or "")
    for name in ("cuda", "cute", "tilelang"):
        with pytest.raises(tw.Unsupported, match="computes on NVIDIA's; kernel='triton' serves AMD's"):
            tw.attention(*_tensors(), kernel=name)
    assert "serves AMD's" in (linear.kernel("tilelang").unavailable() or "")
    assert isinstance(_attention(*_tensors()), torch.Tensor)
    assert taken == [("triton", "forward")]
