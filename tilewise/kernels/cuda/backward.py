"""The backward pass on a GPU: by Hopper's kernels, or by the tiled ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.kernels.cuda import marshal
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.prepared import prepare_backward, prepare_backward_sm90
from tilewise.kernels.cuda.rungs import Rung
from tilewise.kernels.cuda.structs import BACKWARD_ARRAYS
from tilewise.pytorch.sinks import d_sinks
from tilewise.spec import Attention, Grads, Partial, Shape, Tile

_BEFORE = "q", "k", "v", "out", "lse"  # whose addresses come before those of the arrays that a variant reads


class PreparedBackward:
    """A backward pass, ready for arrays that lie as those it was prepared for, wherever that is.

    A gradient of the output that is wider than q makes all wider, up to the type computed with: Hopper's kernels, if
    given, leave that to the tiled ones, and what has no queries or no keys.
    """

    def __init__(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any, loaded: Sequence[Any],
        hoppers: Sequence[Rung] | None, tile: Tile | None = None,
    ) -> None:  # fmt: skip
        self._dtype = q.dtype if d_out.dtype == q.dtype else torch.float32
        if self._dtype != q.dtype or q.numel() == 0 or k.numel() == 0:
            hoppers = None
        self._lying: Callable[[Any], Any] = _rows if hoppers is None else _copied
        self._device, self._numbers = q.get_device(), list[int]()
        every = self._arranged(q, k, v, saved, d_out, d_lse)
        views = {name: View(0, (), (0, 0, 0)) if x is None else View.of_torch(x) for name, x in every.items()}
        read, shape = [View.of_torch(x) for x in loaded], Shape.of(spec, every["q"], every["k"], every["v"])
        if hoppers is None:
            self._kernels = prepare_backward(spec, shape, views, read, self._device, tile)
        else:
            made = prepare_backward_sm90(hoppers, spec, shape, views, read, self._device)
            self._kernels, self._numbers = made

    def run(
        self, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any, loaded: Sequence[Any], sinks: Any = None
    ) -> Grads:
        """loaded: the arrays that the variant reads, in the order of spec.loaded."""
        every = self._arranged(q, k, v, saved, d_out, d_lse)
        # Of the stream: another launch may run beside this one.
        space = [torch.empty(count, dtype=torch.float32, device=q.device) for count in self._numbers]
        parts = [every[name] for name in _BEFORE], loaded, [every[name] for name in BACKWARD_ARRAYS], space
        addresses = [0 if x is None else x.data_ptr() for part in parts for x in part]
        for kernel in self._kernels:
            kernel.launch(addresses)
        d_q, d_k, d_v = (every[f"d_{name}"].to(x.dtype) for name, x in zip("qkv", (q, k, v), strict=True))
        return Grads(d_q, d_k, d_v, None if sinks is None else d_sinks(sinks, every["lse"], every["delta"]), ())

    def _arranged(self, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any) -> dict[str, Any]:
        """As the kernels take them, and what they write."""
        names, given = ("q", "k", "v", "out", "d_out"), (q, k, v, saved.out, d_out)
        every = {name: self._lying(x.to(self._dtype)) for name, x in zip(names, given, strict=True)}
        for name in ("q", "k", "v"):
            every[f"d_{name}"] = torch.empty(every[name].shape, dtype=self._dtype, device=q.device)
        lse = saved.lse.contiguous()
        return {**every, "lse": lse, "d_lse": d_lse, "delta": torch.empty_like(lse)}


def _copied(x: Any) -> Any:
    """As the copy engine takes it."""
    return (
        x if marshal.cannot_be_copied({"x": View.of_torch(x)}) is None and x.stride(-1) == 1 else x.clone().contiguous()
    )


def _rows(x: Any) -> Any:
    """Numbers of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
