"""The Triton kernel system: portable GPU kernels, forward and backward; on CPUs by Triton's interpreter."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

from tilewise.arrays import Array
from tilewise.cache import Cache
from tilewise.kernels import gpus, host, reads
from tilewise.kernels.tensors import as_tensor, device_of, grads_like, partial_like, rows
from tilewise.kernels.triton.choices import Pass
from tilewise.kernels.triton.modules import is_interpreted
from tilewise.kernels.triton.tuning import chosen, described, without_room
from tilewise.rope import Rope
from tilewise.spec import Attention, Grads, Partial, Shape, Tile

DTYPES = ("float16", "bfloat16", "float32")
MOST_D = 512


class TritonKernel:
    """On CUDA tensors of PyTorch; by Triton's interpreter (TRITON_INTERPRET=1) on arrays in main memory."""

    summary = "Triton, on the GPUs that it serves"

    def __init__(self, rung: str | None = None) -> None:
        self.name = "triton" if rung is None else f"triton/{rung}"
        self.basic = rung == "basic"

    def unavailable(self) -> str | None:
        if not_installed() or is_interpreted():
            return not_installed()
        reason = gpus.none_here()
        return None if reason is None else f"{reason}; TRITON_INTERPRET=1 runs it on a CPU, slowly"

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        if self.basic and shape.backward:
            return "it is a first exercise, without a backward pass; kernel='triton' has one"
        if self.basic and spec.rope is not None:
            return "it is a first exercise, without a rotary embedding; kernel='triton' has one"
        if is_interpreted() and not gpus.is_imagined(shape.device):
            return host.unsupported(shape) or _unsupported(spec, shape)
        if not shape.device.startswith("cuda"):
            return f"it computes on GPUs and the arrays are on {shape.device}; move them with .cuda()"
        return _unsupported(spec, shape)

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return chosen(Pass.FORWARD, _as_kernels_get(spec, shape), shape).tile

    def choice(self, spec: Attention, shape: Shape) -> str:
        kinds = (Pass.D_QUERY, Pass.D_KEYS) if shape.backward else (Pass.FORWARD,)
        given = _as_kernels_get(spec, shape)
        return "; ".join(f"{kind.value}: {described(kind, given, shape)}" for kind in kinds)

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial:
        from tilewise.kernels.triton.launch import forward

        with device_of(q):
            done = forward(spec, as_tensor(q), as_tensor(k), as_tensor(v), tile, self.basic)
        return partial_like(done, q)

    def backward(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any = None,
        tile: Tile | None = None,
    ) -> Grads:  # fmt: skip
        from tilewise.kernels.triton.launch import backward

        dtype = _computed_with(as_tensor(d_out), as_tensor(q))
        held = _held(saved, dtype)
        d_lse = None if d_lse is None else as_tensor(d_lse)
        with device_of(q):
            grads = backward(spec, as_tensor(q), as_tensor(k), as_tensor(v), held, rows(d_out, dtype), d_lse, tile)
        return grads_like(grads, spec, q, k, v)

    def decode(self, spec: Attention, q: Any, cache: Cache, rope: Rope | None = None) -> Partial:
        from tilewise.kernels.triton.launch_decode import decode

        with device_of(q):
            done = decode(spec, as_tensor(q), cache, rope)
        return partial_like(done, q)

    def append(self, cache: Cache, k: Any, v: Any, counts: Array, rope: Rope | None = None) -> None:
        from tilewise.kernels.triton.launch_decode import append

        with device_of(k):
            append(cache, as_tensor(k), as_tensor(v), counts, rope)


def _as_kernels_get(spec: Attention, shape: Shape) -> Attention:
    """Without a rotary embedding where q and k are turned before."""
    if spec.rope is None:
        return spec
    from tilewise.kernels.triton.turning import few_tiles_turn_keys

    return spec if few_tiles_turn_keys(spec, shape, None) else replace(spec, rope=None)


def _computed_with(d_out: Any, q: Any) -> Any:
    """One that holds what q and the output's gradient have, of those that there are kernels for."""
    torch = sys.modules["torch"]
    both = torch.promote_types(d_out.dtype, q.dtype)
    return torch.float32 if both == torch.float64 else both


def _held(saved: Partial, dtype: Any) -> Partial:
    """As kernels take it, which another system may have saved. In a wider type the output is one with its remainder."""
    out, lse = rows(saved.out, dtype), as_tensor(saved.lse).contiguous()
    if saved.remainder is None:
        return Partial(out, lse)
    remainder = rows(saved.remainder, dtype)
    is_wider = out.element_size() > as_tensor(saved.out).element_size()
    return Partial(out + remainder, lse) if is_wider else Partial(out, lse, remainder)


def _unsupported(spec: Attention, shape: Shape) -> str | None:
    if shape.dtype not in DTYPES:
        return f"it computes {', '.join(DTYPES)}, and the arrays are {shape.dtype}; kernel='cpu' takes them"
    if max(shape.d, shape.d_v) > MOST_D:
        return f"it takes head dimensions up to {MOST_D}, and they are {shape.d} and {shape.d_v}"
    reason = gpus.too_long(shape) or reads.too_many(spec, shape)
    return reason or without_room(spec, shape) or (reads.unsupported(spec) if shape.backward else None)


@cache
def not_installed() -> str | None:
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    return f"it needs {', '.join(missing)}; pip install 'tilewise[triton]'" if missing else None
