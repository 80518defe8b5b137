"""The arguments of kernels: steps, sizes, records of tiles, the functions and arrays of a variant."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise import arrays
from tilewise.kernels.summing import key_of
from tilewise.kernels.tables import sequences
from tilewise.kernels.triton import modules
from tilewise.kernels.triton.fitting import padded
from tilewise.kernels.uploads import kept_on, loaded_on
from tilewise.spec import Attention, Shape, Tile


def records_of(spec: Attention, shape: Shape, records: Any, steps: tuple[int, int] = (0, 0)) -> tuple[Any, ...]:
    """Records as kernels take them: with their steps, and whether all variables begin at 0."""
    from_zero = spec.lengths is None and shape.origin_q == shape.origin_k == 0
    return records, *steps, tl.constexpr(from_zero)


def sequences_of(spec: Attention, shape: Shape, q: Any) -> tuple[Any, Any]:
    """A record each of the whole sequences, and the variant's arrays."""

    def make() -> Any:
        return torch.from_numpy(sequences(shape, spec.lengths)).to(q.device)

    records = kept_on(q.device, ("sequences", shape, key_of(spec.lengths)), (), make)
    return records_of(spec, shape, records), loaded_by(spec, q)


def keys_of(shape: Shape) -> int:
    """Numbers of keys are below this one, K and KP."""
    return shape.origin_k + shape.n_k


def loaded_by(spec: Attention, q: Any) -> tuple[Any, Any, Any]:
    """The variant's arrays, their sizes and their steps; one at least, which nothing reads.

    Of that one nothing is told: Triton compiles anew for sizes of another kind.
    """
    loaded = loaded_on(spec, q.device)
    if not loaded:
        return (q,), ((1,),), ((1,),)
    return tuple(loaded), tuple(tuple(x.shape) or (1,) for x in loaded), tuple(x.stride() or (1,) for x in loaded)


def steps_of(x: Any) -> tuple[int, int, int]:
    return tuple(x.stride()[:3])


def maps(spec: Attention, rows: int, **given: Any) -> dict[str, Any]:
    """Arrays as the copy engine of a GPU takes them, in tiles of so many rows; None where it cannot.

    It knows where an array ends, not where a packed sequence does, and it turns nothing.
    """
    suits = spec.lengths is None and spec.rope is None and all(map(suits_copy_engine, given.values()))
    return {
        f"{name}_map": TensorDescriptor.from_tensor(x, [1, 1, rows, *_columns(x)]) if suits else None
        for name, x in given.items()
    }


def _columns(x: Any) -> list[int]:
    """Of a head; of one number a row, none."""
    return [padded(d, arrays.dtype_name(x)) for d in x.shape[3:]]


def suits_copy_engine(x: Any) -> bool:
    """It takes rows that begin at multiples of 16 bytes, each elsewhere: what is expanded lies too close."""
    steps = [step * x.element_size() for step in x.stride()[:-1]]
    lies_apart = all(step % 16 == 0 and 0 < step < 2**40 for step in steps)
    return _has_copy_engine(x.device) and x.numel() > 0 and x.data_ptr() % 16 == 0 and lies_apart


@cache
def _has_copy_engine(device: Any) -> bool:
    """Triton's interpreter does as if."""
    return modules.is_interpreted() or _is_hopper_or_newer(device)


@cache
def starts_early(device: Any) -> bool:
    """Whether a kernel can be started before the one ahead of it has ended, so that its start takes no time."""
    return not modules.is_interpreted() and _is_hopper_or_newer(device)


def _is_hopper_or_newer(device: Any) -> bool:
    """Of NVIDIA's: AMD's GPUs are cuda devices of PyTorch too, and an MI300's capability is (9, 4)."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and bool(torch.cuda.get_device_capability(device)[0] >= 9)


def functions(spec: Attention, variant: ModuleType | None, *names: str) -> dict[str, Any]:
    """Those of a variant that a kernel calls, and whether scores come to it as products of q and k."""
    return {"RAW": spec.raw_scores, **{name.upper(): getattr(variant, name, None) for name in names}}


def sizes(shape: Shape, tile: Tile) -> dict[str, Any]:
    # Triton's interpreter has bfloat16 as whole numbers, and multiplies those. Kernels say input_precision="ieee": it
    # is what float32 needs, half precision ignores it, and most of AMD's GPUs compile no TF32.
    is_wide = modules.is_interpreted() or shape.dtype == "float32"
    return {
        "TILE_Q": tile.q, "TILE_K": tile.k, "D": shape.d, "D_V": shape.d_v,
        "DEPTH": padded(shape.d, shape.dtype), "COLUMNS": padded(shape.d_v, shape.dtype),
        "DOT": tl.float32 if is_wide else getattr(tl, shape.dtype),
    }  # fmt: skip
