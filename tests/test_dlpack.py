"""Arrays of other libraries: tensors in between, in the same memory."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tilewise.arrays import Array
from tilewise.pytorch import front

torch = pytest.importorskip("torch")


class Other:
    """An array of a library that is neither: it has a type, a shape and DLPack."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), str(tensor.dtype)

    def __dlpack__(self, **how: Any) -> Any:
        return self.tensor.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return Library


class Library:
    @staticmethod
    def from_dlpack(x: Any) -> Other:
        return Other(torch.from_dlpack(x))


@pytest.fixture
def given() -> list[Array]:
    return list(np.random.default_rng(0).standard_normal((3, 2, 4, 10, 8)).astype(np.float32))


def _others(*given: Array) -> list[Other]:
    return [Other(torch.from_numpy(x)) for x in given]


def test_results_are_of_the_callers_library(given: list[Array]) -> None:
    out, lse = tw.attention(*_others(*given), causal=True, return_lse=True)
    assert type(out) is type(lse) is Other
    want, want_lse = tw.attention(*given, causal=True, return_lse=True)
    assert np.array_equal(out.tensor.numpy(), want)
    assert np.array_equal(lse.tensor.numpy(), want_lse)


def test_nothing_is_copied(given: list[Array], monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[int] = []
    made: list[int] = []
    real = front.attention

    def watched(q: Any, k: Any, v: Any, *more: Any) -> Any:
        addresses.extend(x.data_ptr() for x in (q, k, v))
        result = real(q, k, v, *more)
        made.append(result[0].data_ptr())
        return result

    monkeypatch.setattr(front, "attention", watched)
    out = tw.attention(*_others(*given))
    assert addresses == [x.ctypes.data for x in given]
    assert made == [out.tensor.data_ptr()]


def test_everything_beside_q(given: list[Array]) -> None:
    ids, sinks = np.arange(10, dtype=np.int32) // 4, np.ones(4, np.float32)
    mask = np.random.default_rng(1).random((10, 10)) < 0.7
    bias = np.random.default_rng(2).standard_normal((10, 10)).astype(np.float32)
    for options in (
        lambda put: {"mask": put(mask), "sinks": put(sinks)},
        lambda put: {"mask": tw.document(put(ids)), "score": tw.bias(put(bias))},
        lambda put: {"score": tw.S + tw.load(put(bias), tw.Q, tw.K)},
    ):
        out = tw.attention(*_others(*given), **options(lambda x: _others(x)[0]))
        assert np.array_equal(out.tensor.numpy(), tw.attention(*given, **options(lambda x: x)))


def test_packed_sequences(given: list[Array]) -> None:
    packed, lengths = [x[0].swapaxes(0, 1).copy() for x in given], np.array([0, 3, 10])
    others = _others(*packed, lengths, lengths)
    want = tw.attention_varlen(*packed, lengths, lengths, causal=True)
    assert np.array_equal(tw.attention_varlen(*others, causal=True).tensor.numpy(), want)


def test_a_library_that_takes_nothing_gets_tensors(given: list[Array], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Library, "from_dlpack")
    assert isinstance(tw.attention(*_others(*given)), torch.Tensor)


def test_without_pytorch_it_is_told(given: list[Array], monkeypatch: pytest.MonkeyPatch) -> None:
    others = _others(*given)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        TypeError, match=r"q: expected a NumPy array or a PyTorch tensor, got Other; .* pip install torch"
    ):
        tw.attention(*others)


def test_libraries_do_not_mix(given: list[Array]) -> None:
    others = _others(*given)
    with pytest.raises(TypeError, match="k: expected a PyTorch tensor as q is, got a NumPy array"):
        tw.attention(others[0], given[1], others[2])
