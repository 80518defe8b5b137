"""What TileLang's kernels can compute, wherever they run."""

from __future__ import annotations

from tilewise import arrays
from tilewise.kernels import gpus, reads
from tilewise.kernels.tilelang.choices import Pass, has_room
from tilewise.kernels.tilelang.compiler import C
from tilewise.spec import Attention, Positions, Shape
from tilewise.variants import causal

MOST_D = 256
MOST_ARRAYS = 8  # as in tiles.py
CAPABILITY = (9, 0)  # kernels were compiled for Hopper alone; for sm_80 and sm_89 TileLang 0.1.15 failed to lower some
_DTYPES = {True: ("float16", "bfloat16"), False: ("float16", "float32")}


def unsupported(spec: Attention, shape: Shape, target: str) -> str | None:
    on_gpu = target != C
    if shape.dtype not in _DTYPES[on_gpu]:
        return _types(shape, on_gpu)
    if on_gpu and max(shape.d, shape.d_v) > MOST_D:
        return f"it takes head dimensions up to {MOST_D}, and they are {shape.d} and {shape.d_v}; kernel='triton' fits"
    if spec.rope is not None:
        return "it has no rotary embedding; turn q and k first, with tw.apply_rope, or take kernel='triton'"
    unknown = reads.unsupported(spec) if shape.backward else gpus.rounds_out(spec, shape)
    return (
        gpus.too_long(shape)
        or reads.too_many(spec, shape)
        or unknown
        or _arrays(spec, on_gpu)
        or _room(spec, shape, target)
    )


def too_much(spec: Attention, shape: Shape) -> str | None:
    """Why the first kernel to read cannot compute a call: it has full and causal attention, and nothing else."""
    is_alone = spec.score is None and spec.sinks is None and spec.lengths is None and spec.positions == Positions()
    is_known = spec.mask is None or spec.mask is causal()
    if shape.backward or not (is_alone and is_known):
        return "it is a first exercise: full or causal attention, forward alone; kernel='tilelang' has all"
    return "it is a first exercise, which wants keys; kernel='tilelang' does without" if shape.n_k == 0 else None


def _types(shape: Shape, on_gpu: bool) -> str:
    known, other = ", ".join(_DTYPES[on_gpu]), "triton" if on_gpu and shape.dtype == "float32" else "cpu"
    why = "; its products of float32 are TF32's" if on_gpu and shape.dtype == "float32" else ""
    return f"it computes {known}, and the arrays are {shape.dtype}{why}; kernel={other!r} takes them"


def _arrays(spec: Attention, on_gpu: bool) -> str | None:
    read = spec.loaded
    if len(read) > MOST_ARRAYS:
        return f"it takes variants that read up to {MOST_ARRAYS} arrays, and this one reads {len(read)}"
    if not on_gpu and any(arrays.dtype_name(slot.array) == "bfloat16" for slot in read):
        return "TileLang's C target has no bfloat16, and an array that the variant reads is of it"
    return None


def _room(spec: Attention, shape: Shape, target: str) -> str | None:
    kinds = (Pass.D_QUERY, Pass.D_KEYS, *([Pass.ARRAYS] if spec.wanted else [])) if shape.backward else (Pass.FORWARD,)
    if all(has_room(kind, spec, shape, target) for kind in kinds):
        return None
    return f"heads of {shape.d} and {shape.d_v} do not fit the shared memory of {target}; kernel='triton' fits"
