"""The CUDA kernel system: plain CUDA C++, a ladder from the naive kernel up, compiled when first needed."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tilewise import arrays
from tilewise.kernels import gpus
from tilewise.kernels.cuda import support
from tilewise.kernels.cuda.backward_rungs import BACKWARD, BACKWARD_SM90, UNORDERED_SM90, Hoppers, hoppers_backward
from tilewise.kernels.cuda.choice import HOPPER, suited
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.rungs import Rung, named
from tilewise.spec import Attention, Grads, Partial, Shape, Tile

if TYPE_CHECKING:
    from tilewise.kernels.cuda.backward import PreparedBackward
    from tilewise.kernels.cuda.prepared import Prepared

OLDEST = (7, 0)  # Volta


class CudaKernel:
    """On CUDA tensors of PyTorch; `rung` names one of the ladder's kernels, or the last one as "unordered": gradients
    of q are then added up in any order, and have other bits each time."""

    summary = "CUDA C++ on NVIDIA GPUs"

    def __init__(self, rung: str | None = None) -> None:
        self.name = "cuda" if rung is None else f"cuda/{rung}"
        self.rung: Rung | None = None if rung is None else named(rung)
        self._backward = hoppers_backward(rung)

    def unavailable(self) -> str | None:
        return gpus.for_amd() or _not_installed() or gpus.none_here()

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        away = gpus.elsewhere(shape)
        if away is not None:
            return away
        capability = gpus.capability(shape.device)
        had = f"and {shape.device} has {capability[0]}.{capability[1]}"
        if capability < OLDEST:
            return f"it needs compute capability {OLDEST[0]}.{OLDEST[1]}, {had}"
        if self.rung is not None and self.rung.persistent and capability != HOPPER:
            return f"it is made for compute capability {HOPPER[0]}.{HOPPER[1]}, {had}"
        if shape.backward and spec.batch_invariant and self._backward is UNORDERED_SM90:
            return "it adds gradients of q in any order, and batch_invariant wants one; 'cuda/forward_sm90' has it"
        name = None if self.rung is None else self.rung.name
        return support.unsupported(spec, shape, name) or self._not_loaded(shape) or self._without_room(spec, shape)

    def _not_loaded(self, shape: Shape) -> str | None:
        """Why the rung that was named cannot load these arrays. A backward pass copies what lies badly."""
        if self.rung is None:
            return None
        by_copy_engine = self.rung.persistent and not shape.backward
        return self.rung.unsupported(shape) or (shape.not_copied if by_copy_engine else None)

    def _without_room(self, spec: Attention, shape: Shape) -> str | None:
        """Why a block of this GPU cannot hold what the kernels that would serve keep in shared memory."""
        if shape.backward:
            kernels = () if self._hoppers(shape) is not None else BACKWARD
        else:
            kernels = (self.rung or suited(shape, gpus.capability(shape.device)),)
        return support.without_room(kernels, spec, shape)

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        rung = self.rung or suited(shape, gpus.capability(shape.device))
        return rung.default_tile(spec, shape)

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial:
        torch = sys.modules["torch"]
        dtype = getattr(torch, spec.out_dtype(arrays.dtype_name(q)))
        out = torch.empty_strided(*arrays.stored_as(q, v), dtype=dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        remainder = torch.empty_like(out) if spec.stores_remainder(arrays.dtype_name(q)) else None
        prepared = self.prepared(spec, q, k, v, tile)
        if prepared is not None:
            loaded = loaded_on(spec, q.device)
            further = [x for x in (spec.sinks, remainder) if x is not None]
            prepared.launch([x.data_ptr() for x in (q, k, v, out, lse, *loaded, *further)])
        return Partial(out, lse, remainder)

    def prepared(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Prepared | None:
        """The call, ready for other arrays that lie as these; None if there is nothing to compute.

        If q, k and v begin at multiples of 16 bytes, the others must. Results are stored as forward's are.
        """
        from tilewise.kernels.cuda import gpu
        from tilewise.kernels.cuda.prepared import prepare

        batch, heads, n, _ = q.shape
        views = {name: View.of_torch(x) for name, x in {"q": q, "k": k, "v": v}.items()}
        views |= {"out": View(0, *arrays.stored_as(q, v)), "lse": View(0, (batch, heads, n), (heads * n, n, 1))}
        views["remainder"] = views["out"]
        loaded = [View.of_torch(x) for x in loaded_on(spec, q.device)]
        sinks = None if spec.sinks is None else View.of_torch(spec.sinks)
        device = q.get_device()
        with gpu.as_current(device):
            return prepare(self.rung, spec, Shape.of(spec, q, k, v), views, loaded, sinks, device, tile)

    def backward(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any = None,
        tile: Tile | None = None,
    ) -> Grads:  # fmt: skip
        from tilewise.kernels.cuda.backward import of_arrays

        prepared, every = self._prepared_backward(spec, q, k, v, saved, d_out, d_lse, tile)
        loaded = loaded_on(spec, q.device)
        grads = prepared.launch(every, loaded, spec.sinks)
        if not spec.wanted:
            return grads
        hopper = prepared.arrangement.hoppers is not None
        return replace(grads, arrays=of_arrays(spec, every, loaded, tile, hopper))

    def prepared_backward(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any = None
    ) -> PreparedBackward:
        """The backward pass, ready for other arrays that lie as these; each begins at a multiple of 16 bytes if its
        counterpart does, and only then."""
        return self._prepared_backward(spec, q, k, v, saved, d_out, d_lse)[0]

    def _prepared_backward(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any, tile: Tile | None = None
    ) -> tuple[PreparedBackward, dict[str, Any]]:
        from tilewise.kernels.cuda import gpu
        from tilewise.kernels.cuda.backward import prepared

        hoppers = self._hoppers(Shape.of(spec, q, k, v))
        with gpu.as_current(q.get_device()):
            return prepared(spec, q, k, v, saved, d_out, d_lse, loaded_on(spec, q.device), hoppers, tile)

    def _hoppers(self, shape: Shape) -> Hoppers | None:
        """Hopper's backward pass, if it is this kernel's, or if none was named and it can; else the tiled one."""
        if self.rung is not None:
            return self._backward
        able = gpus.capability(shape.device) == HOPPER and BACKWARD_SM90.unsupported(shape) is None
        return BACKWARD_SM90 if able else None


@cache
def _not_installed() -> str | None:
    missing = [name for name in ("torch", "cuda.core", "cuda.bindings") if not _is_installed(name)]
    if missing:
        return f"it needs {', '.join(missing)}; pip install 'tilewise[cuda]'"
    return None


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def loaded_on(spec: Attention, device: Any) -> list[Any]:
    """The arrays that a variant reads; those that it made itself come along once."""
    from tilewise.pytorch.constants import constant_on

    return [
        constant_on(slot.array, device) if slot.constant and not arrays.is_torch(slot.array) else slot.array
        for slot in spec.loaded
    ]
