"""The CUDA kernel system: plain CUDA C++, a ladder from the naive kernel up, compiled when first needed."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

from tilewise import arrays
from tilewise.kernels.cuda import marshal, support
from tilewise.kernels.cuda.choice import HOPPER, chosen, suited
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.rungs import RUNGS, Rung
from tilewise.kernels.cuda.source import assembled
from tilewise.spec import Attention, Grads, Partial, Shape, Tile

OLDEST = (7, 0)  # Volta


class CudaKernel:
    """On CUDA tensors of PyTorch; `rung` names one of the ladder's kernels."""

    summary = "CUDA C++ on NVIDIA GPUs"

    def __init__(self, rung: str | None = None) -> None:
        self.name = "cuda" if rung is None else f"cuda/{rung}"
        self.rung: Rung | None = None if rung is None else RUNGS[rung]

    def unavailable(self) -> str | None:
        return _not_installed() or _no_gpu()

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        if not shape.device.startswith("cuda"):
            return f"it computes on NVIDIA GPUs and the arrays are on {shape.device}; move them with .cuda()"
        capability = sys.modules["torch"].cuda.get_device_capability(shape.device)
        if capability < OLDEST:
            return f"it needs compute capability {OLDEST[0]}.{OLDEST[1]}, and {shape.device} has {capability}"
        if self.rung is not None and self.rung.persistent and capability != HOPPER:
            return f"it is made for compute capability {HOPPER[0]}.{HOPPER[1]}, and {shape.device} has {capability}"
        return support.unsupported(spec, shape) or (None if self.rung is None else self.rung.unsupported(shape))

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        rung = self.rung or suited(shape, sys.modules["torch"].cuda.get_device_capability(shape.device))
        return rung.default_tile(spec, shape)

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial:
        with sys.modules["torch"].cuda.device(q.device):
            return _forward(self.rung, spec, q, k, v, tile)

    def backward(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any = None,
        tile: Tile | None = None,
    ) -> Grads:  # fmt: skip
        raise NotImplementedError("cuda has no backward pass; ask unsupported() first")


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


def _no_gpu() -> str | None:
    """PyTorch is asked, but never imported for it: who has tensors on a GPU has imported it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "PyTorch is not imported, so nothing is on a GPU"
    return None if torch.cuda.is_available() else "PyTorch finds no NVIDIA GPU, or was built without CUDA"


def _forward(named: Rung | None, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None) -> Partial:
    from tilewise.kernels.cuda import launcher

    torch = sys.modules["torch"]
    shape = Shape.of(spec, q, k, v)
    out = _stored_as(q, shape.d_v)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    views = {name: View.of_torch(x) for name, x in {"q": q, "k": k, "v": v, "out": out, "lse": lse}.items()}
    rung = chosen(named, shape, views, torch.cuda.get_device_capability(q.device))
    tile = rung.fitting(tile or rung.default_tile(spec, shape), shape)
    tables, numbers = launcher.tables_on(q.device, spec, shape, tile, rung)
    blocks = marshal.blocks(shape, tables)
    if blocks == 0:
        return Partial(out, lse)
    text, slots = assembled(rung, spec, shape, tile)
    loaded = [_on_device(slot.array, slot.constant, q.device) for slot in slots]
    params = marshal.params(
        spec, shape, tables, numbers.data_ptr(), views,
        None if spec.sinks is None else View.of_torch(spec.sinks), [View.of_torch(x) for x in loaded],
    )  # fmt: skip
    if rung.persistent:
        maps = {name: x.encoded() for name, x in marshal.tensor_maps(views, shape.dtype, tile).items()}
        blocks = min(blocks, torch.cuda.get_device_properties(q.device).multi_processor_count)
        params = marshal.launch(params, spec, shape, tables, maps, launcher.count_on(q.device), blocks)
    launcher.launch(text, q.device, blocks, params)
    return Partial(out, lse)


def _stored_as(q: Any, d_v: int) -> Any:
    """Room for the output: heads side by side if q has them so, as a projection leaves them; else one by one."""
    batch, heads, n, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((batch, n, heads, d_v)).transpose(1, 2)
    return q.new_empty((batch, heads, n, d_v))


def _on_device(array: Any, is_constant: bool, device: Any) -> Any:
    """A loaded array; one that a variant made itself comes along once."""
    if not is_constant or arrays.is_torch(array):
        return array
    key = (id(array), device.index)
    if key not in _constants:
        if len(_constants) >= _MOST_CONSTANTS:
            _constants.clear()
        _constants[key] = array, arrays.as_tensor(array).to(device)  # the array stays, or its id could be another's
    return _constants[key][1]


_constants: dict[tuple[int, int], tuple[Any, Any]] = {}
_MOST_CONSTANTS = 64
