"""Which kernel of the ladder serves a call."""

from __future__ import annotations

from tilewise.choosing import Purpose, order
from tilewise.derivative import score_slopes
from tilewise.dispatch import Unsupported
from tilewise.expr import S
from tilewise.kernels.cuda.backward_rungs import BACKWARD, BACKWARD_SM90, Hoppers
from tilewise.kernels.cuda.marshal import View, cannot_be_copied
from tilewise.kernels.cuda.rungs import REFINE, REFINE_BACKWARD, RUNGS, Rung
from tilewise.kernels.cuda.source import Source, assembled
from tilewise.spec import Attention, Shape
from tilewise.walking import loads

HOPPER = (9, 0)


def suited(shape: Shape, capability: tuple[int, int]) -> Rung:
    """The fastest one for a shape: the first of CUDA's that `auto` would try."""
    major, minor = capability
    names = order(f"sm_{major}{minor}", shape.dtype, Purpose.FORWARD)
    ladder = [RUNGS[name.removeprefix("cuda/")] for name in names if name.startswith("cuda/")]
    return next(rung for rung in ladder if rung.unsupported(shape) is None)


def chosen(named: Rung | None, shape: Shape, views: dict[str, View], capability: tuple[int, int]) -> Rung:
    """The one that was named, or the fastest for arrays that lie so."""
    rung = named or suited(shape, capability)
    reason = cannot_be_copied({name: views[name] for name in ("q", "k", "v")}) if rung.persistent else None
    if reason is None:
        return rung
    if named is not None:
        raise Unsupported(f"the kernel {rung.name!r} cannot compute this call: {reason}")
    return RUNGS["tiled"]


def source_of(spec: Attention, shape: Shape, capability: tuple[int, int]) -> Source:
    """The source of the kernel that serves a call on arrays that lie as they mostly do: at multiples of 16 bytes."""
    return sources_of(spec, shape, capability)[0]


def sources_of(spec: Attention, shape: Shape, capability: tuple[int, int]) -> list[Source]:
    """The same, and what else it launches: a mask that reads a caller's arrays, which may be on the GPU, is looked at
    there before."""
    rung = suited(shape, capability)
    tile = rung.fitting(rung.default_tile(spec, shape), shape)
    looks = rung.persistent and reads_arrays(spec)
    return [assembled(x, spec, shape, tile)[0] for x in ((rung, REFINE) if looks else (rung,))]


def gradient_sources_of(spec: Attention, shape: Shape, capability: tuple[int, int]) -> list[Source]:
    """Those of the backward pass of such a call."""
    if capability == HOPPER and BACKWARD_SM90.unsupported(shape) is None:
        tile = BACKWARD_SM90.rungs(shape)[0].default_tile(spec, shape)
        looks = [assembled(REFINE_BACKWARD, spec, shape, tile)[0]] if reads_arrays(spec) else []
        return [*backward_sources_of(BACKWARD_SM90, spec, shape), *looks]
    slope = score_slopes(spec)[S]
    tiles = {rung: rung.fitting(rung.default_tile(spec, shape), shape) for rung in BACKWARD}
    return [assembled(rung, spec, shape, tile, tables=False, slope=slope)[0] for rung, tile in tiles.items()]


def reads_arrays(spec: Attention) -> bool:
    """Whether its mask reads those of a caller."""
    return spec.mask is not None and any(not slot.constant for slot in loads(spec.mask))


def backward_sources_of(hoppers: Hoppers, spec: Attention, shape: Shape) -> list[Source]:
    """Those of Hopper's kernels of the backward pass, in their order."""
    slope, rungs = score_slopes(spec)[S], hoppers.rungs(shape)
    tile = rungs[0].default_tile(spec, shape)
    return [assembled(rung, spec, shape, tile, slope=slope)[0] for rung in rungs]
