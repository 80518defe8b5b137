"""Kernels with one classic mistake each: what the conformance suite and the fuzz must catch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from tilewise import expr as ex
from tilewise import schedule, softmax
from tilewise.kernels.numpy import NumpyKernel
from tilewise.schedule import Kind, Runs
from tilewise.softmax import State, finite
from tilewise.spec import Attention, Partial, Shape


class Wrong(NumpyKernel):
    """The NumPy kernel with one mistake: it computes another attention, or a part of it is replaced while it runs."""

    def __init__(
        self, change: Callable[[Attention], Attention] = lambda spec: spec, patch: tuple[Any, str, Any] | None = None
    ) -> None:
        self.change, self.patch = change, patch

    def forward(self, spec: Attention, *args: Any) -> Partial:
        with self._mistaken():
            return super().forward(self.change(spec), *args)

    def backward(self, spec: Attention, *args: Any, **options: Any) -> Any:
        with self._mistaken():
            return super().backward(self.change(spec), *args, **options)

    @contextmanager
    def _mistaken(self) -> Iterator[None]:
        """The oracle must stay right, so the mistake lasts no longer than the kernel's own call, its plans included."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(schedule, "_cache", OrderedDict())
            if self.patch is not None:
                monkeypatch.setattr(*self.patch)
            yield


def _no_rescale(self: State, s: Any, v: Any) -> Any:
    new_max = np.maximum(self.row_max, s.max(axis=-1, initial=-np.inf))
    p = np.exp(s - finite(new_max)[..., None])
    self.row_sum, self.acc, self.row_max = self.row_sum + p.sum(axis=-1), self.acc + p @ v, new_max
    return p, np.ones_like(new_max)


def _stale_row_max(self: State, s: Any, v: Any) -> Any:
    """The running max is overwritten before the sum is rescaled, so the sum's factor is exp(0)."""
    new_max = np.maximum(self.row_max, s.max(axis=-1, initial=-np.inf))
    rescale = np.exp(self.row_max - finite(new_max))
    self.row_max = new_max
    p = np.exp(s - finite(new_max)[..., None])
    self.acc = self.acc * rescale[..., None] + p @ v
    self.row_sum = self.row_sum * np.exp(finite(self.row_max) - finite(new_max)) + p.sum(axis=-1)
    return p, rescale


def _no_row_sum_in_lse(self: State, sink: Any = None) -> Partial:
    row_sum = np.where(self.row_sum == 0, 1, self.row_sum)
    return softmax.add_sink(Partial(self.acc / row_sum[..., None], self.row_max), sink)


def _local_env(self: Shape, b: Any, h: Any, q: Any, k: Any) -> dict[str, Any]:
    """Rows counted within the tile instead of within the sequence."""
    return _env(self, b, h, q - q.min() if isinstance(q, np.ndarray) and q.ndim == 2 else q, k)


def _without_the_last_tile(self: Runs, b: int, h: int, i: int) -> Any:
    tiles = list(_tiles(self, b, h, i))
    return iter(tiles[:-1] or tiles)


def _partial_as_full(self: Runs, b: int, h: int, i: int) -> Any:
    return ((j, Kind.FULL) for j, _ in _tiles(self, b, h, i))


_env, _tiles = Shape.env, Runs.tiles

STATE_MISTAKES = {
    "no rescale": (State, "step", _no_rescale),
    "stale row_max": (State, "step", _stale_row_max),
    "missing lse term": (State, "finish", _no_row_sum_in_lse),
    "tile-local row index": (Shape, "env", _local_env),
    "last tile left out": (Runs, "tiles", _without_the_last_tile),
    "PARTIAL taken as FULL": (Runs, "tiles", _partial_as_full),
}
SPEC_MISTAKES: dict[str, Callable[[Attention], Attention]] = {
    "missing scale": lambda spec: replace(spec, scale=1.0),
    "mask off by one": lambda spec: (
        spec if spec.mask is None else replace(spec, mask=ex.substitute(spec.mask, {ex.K: ex.K + 1}))
    ),
    "score left out": lambda spec: replace(spec, score=None),
    "sinks left out": lambda spec: replace(spec, sinks=None),
}


BACKWARD = import_module("tilewise.kernels.numpy.backward")
BACKWARD_MISTAKES = {
    "slope of the score left out": (BACKWARD, "_times", lambda d_score, *_: d_score),
    "gradient of sinks left out": (BACKWARD, "d_sinks", lambda sinks, lse, delta: np.zeros_like(sinks)),
    "array gradients left out": (BACKWARD, "_scatter", lambda *_: None),
    "missing lse term": STATE_MISTAKES["missing lse term"],
    "tile-local row index": STATE_MISTAKES["tile-local row index"],
}
