"""The backward pass on a GPU: by Hopper's kernels, or by the tiled ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.kernels.cuda import gpu, marshal
from tilewise.kernels.cuda.array_gradients import gradients
from tilewise.kernels.cuda.backward_rungs import Hoppers
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.prepared import OPERANDS, Prepared, prepare_backward, prepare_backward_sm90
from tilewise.kernels.cuda.prepared_arrays import OnGpu
from tilewise.kernels.cuda.structs import BACKWARD_ARRAYS
from tilewise.pytorch.sinks import d_sinks
from tilewise.spec import Attention, Grads, Partial, Shape, Tile


@dataclass(frozen=True)
class Arrangement:
    """How the arrays of a backward pass lie for its kernels: Hopper's, or the tiled ones if there are none of those.

    A gradient of the output that is wider than q makes all wider, up to the type computed with. Hopper's kernels leave
    that to the tiled ones, and what has no queries or no keys.
    """

    dtype: Any
    hoppers: Hoppers | None

    @classmethod
    def suited(cls, q: Any, k: Any, d_out: Any, hoppers: Hoppers | None) -> Arrangement:
        dtype = q.dtype if d_out.dtype == q.dtype else torch.float32
        return cls(dtype, None if dtype != q.dtype or q.numel() == 0 or k.numel() == 0 else hoppers)

    def arrays(self, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any) -> dict[str, Any]:
        """As the kernels take them, and what they write."""
        lying = _rows if self.hoppers is None else _copied
        names, given = ("q", "k", "v", "out", "d_out", "remainder"), (q, k, v, saved.out, d_out, saved.remainder)
        every: dict[str, Any] = {
            name: None if x is None else lying(x.to(self.dtype)) for name, x in zip(names, given, strict=True)
        }
        for name in ("q", "k", "v"):
            every[f"d_{name}"] = torch.empty(every[name].shape, dtype=self.dtype, device=q.device)
        lse = saved.lse.contiguous()
        d_lse = None if d_lse is None else d_lse.to(torch.float32)
        return {**every, "lse": lse, "d_lse": d_lse, "delta": torch.empty_like(lse)}


@dataclass(frozen=True)
class PreparedBackward:
    """A backward pass, ready for arrays that lie as those it was prepared for, wherever that is."""

    arrangement: Arrangement
    kernels: Sequence[Prepared]
    space: Sequence[int]  # numbers that they need beside their arrays
    types: Sequence[Any]  # of the gradients of q, k and v

    def run(
        self, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any, loaded: Sequence[Any], sinks: Any
    ) -> Grads:
        """loaded: the arrays that the variant reads, in the order of spec.loaded."""
        return self.launch(self.arrangement.arrays(q, k, v, saved, d_out, d_lse), loaded, sinks)

    def launch(self, every: dict[str, Any], loaded: Sequence[Any], sinks: Any) -> Grads:
        # Of the stream: another launch may run beside this one.
        space = [torch.empty(count, dtype=torch.float32, device=every["q"].device) for count in self.space]
        parts = [every[name] for name in OPERANDS], loaded, [every[name] for name in BACKWARD_ARRAYS], space
        addresses = [0 if x is None else x.data_ptr() for part in parts for x in part]
        for kernel in self.kernels:
            kernel.launch(addresses)
        d_q, d_k, d_v = (every[f"d_{name}"].to(dtype) for name, dtype in zip("qkv", self.types, strict=True))
        return Grads(d_q, d_k, d_v, None if sinks is None else d_sinks(sinks, every["lse"], every["delta"]), ())


def prepared(
    spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any, loaded: Sequence[Any],
    hoppers: Hoppers | None, tile: Tile | None = None,
) -> tuple[PreparedBackward, dict[str, Any]]:  # fmt: skip
    """The pass, on the current device, and the arrays of this call, arranged for it."""
    arrangement = Arrangement.suited(q, k, d_out, hoppers)
    every = arrangement.arrays(q, k, v, saved, d_out, d_lse)
    views = {name: View(0, (), (0, 0, 0)) if x is None else View.of_torch(x) for name, x in every.items()}
    read, shape = [View.of_torch(x) for x in loaded], Shape.of(spec, every["q"], every["k"], every["v"])
    device = q.get_device()
    if arrangement.hoppers is None:
        kernels, space = prepare_backward(spec, shape, views, read, device, tile), list[int]()
    else:
        kernels, space = prepare_backward_sm90(arrangement.hoppers, spec, shape, views, read, device)
    return PreparedBackward(arrangement, kernels, space, (q.dtype, k.dtype, v.dtype)), every


def of_arrays(
    spec: Attention, every: dict[str, Any], loaded: Sequence[Any], tile: Tile | None, hopper: bool
) -> tuple[Any, ...]:
    """The gradients of arrays that the score reads, after a backward pass on these. hopper: by Hopper's kernels."""
    shape = Shape.of(spec, every["q"], every["k"], every["v"])
    with gpu.as_current(every["q"].get_device()):
        made = gradients(OnGpu(spec, shape, every, loaded), spec, shape, tile, hopper)
    return tuple(x.to(slot.array.dtype) for x, slot in zip(made, spec.wanted, strict=True))


def _copied(x: Any) -> Any:
    """As the copy engine takes it."""
    return (
        x if marshal.cannot_be_copied({"x": View.of_torch(x)}) is None and x.stride(-1) == 1 else x.clone().contiguous()
    )


def _rows(x: Any) -> Any:
    """Numbers of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
