"""Launches made ready: what was once prepared for tensors on a GPU serves all tensors that lie the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.spec import Partial

DEVICES = ("cuda",)  # where a launch takes less time than all that comes before it
_ALIGNMENT = 16  # kernels differ by whether arrays begin at multiples of it


class Ready:
    """A launch, and how its results are stored: sizes and steps of out and lse, and the type of out.

    places: where the arrays that it reads are among those of a call. keeps: there is a third result, the remainder of
    out, which is 0 if the launch stores none.
    """

    def __init__(
        self, prepared: Any, places: Sequence[int], out: Any, lse: Any, dtype: Any, device: Any, keeps: bool = False
    ) -> None:
        self.prepared, self.places, self.keeps = prepared, places, keeps
        self.out, self.lse, self.dtype, self.device = out, lse, dtype, device

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Any, arrays: Sequence[Tensor]) -> tuple[Tensor, ...]:
        out = self._like_out()
        lse = torch.empty_strided(*self.lse, dtype=torch.float32, device=self.device)
        addresses = [x.data_ptr() for x in (q, k, v, out, lse)]
        addresses += [arrays[i].data_ptr() for i in self.places]
        if sinks is not None:
            addresses.append(sinks.data_ptr())
        if not self.keeps:
            self.prepared.launch(addresses)
            return out, lse
        remainder = self._like_out()
        if self.prepared.keeps_remainder:
            addresses.append(remainder.data_ptr())
        else:
            remainder.zero_()
        self.prepared.launch(addresses)
        return out, lse, remainder

    def _like_out(self) -> Tensor:
        return torch.empty_strided(*self.out, dtype=self.dtype, device=self.device)


class ReadyBackward:
    """The same for gradients. places: as above."""

    def __init__(self, prepared: Any, places: Sequence[int]) -> None:
        self.prepared, self.places = prepared, places

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, arrays: Sequence[Tensor], sinks: Any, saved: Partial, d_out: Tensor,
        d_lse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
        grads = self.prepared.run(q, k, v, saved, d_out, d_lse, [arrays[i] for i in self.places], sinks)
        return grads.q, grads.k, grads.v, [] if sinks is None else [grads.sinks]


def layout(x: Tensor) -> tuple[Any, ...]:
    """All that a launch depends on but the address."""
    return x.shape, x.stride(), x.dtype, x.device


def are_aligned(*tensors: Tensor) -> bool:
    addresses = 0
    for x in tensors:
        addresses |= x.data_ptr()
    return not addresses % _ALIGNMENT
