"""The kernel with the output projection: which calls it takes, and for which it is worth it."""

from __future__ import annotations

from dataclasses import replace

from tilewise.kernels.cute import support
from tilewise.kernels.cute.rungs import BASIC
from tilewise.kernels.cute.wanted import Wanted, kernel_of
from tilewise.schedule import itemsize
from tilewise.spec import Attention, Shape

TILE = 64  # queries of a block, keys and columns of y that it takes at a time
BLOCKS = 132  # that run at once on an H200, each with most of a multiprocessor's shared memory
# What `auto` takes: as many steps, one behind the other, are faster than attention and a product behind it. From
# `tilewise bench --gpu projection`: the most steps of a case that is not slower than its best peer, and of all cases
# with fewer. On an H200 a step takes 0.7 us or more, and there is no such case: it is for those who call it by name.
MOST_STEPS = 0


def kernel_for(spec: Attention, shape: Shape, aligned: bool = True) -> Wanted:
    kernel = kernel_of(BASIC, spec, shape, aligned)
    return replace(kernel, rung="projected", source="projected", heads=shape.heads)


def unsupported(spec: Attention, shape: Shape, capability: tuple[int, int]) -> str | None:
    """Why the kernel cannot compute this call, or None."""
    reason = support.unsupported(spec, shape, BASIC, capability)
    if reason is not None:
        return reason
    size, columns = itemsize(shape.dtype), BASIC.columns(shape.d_v)
    results, weights = TILE * (shape.heads * columns * size + 16), TILE * (columns * size + 16)
    return support.no_room(BASIC.shared_bytes(shape) + results + weights, shape, capability)


def steps(shape: Shape, model: int) -> int:
    """Tiles that a multiprocessor goes through, one behind the other: a block has all heads of its queries, their keys
    first, then the weights of each for all columns of y. Blocks beyond those that run at once come behind them."""
    blocks = shape.batch * -(-shape.n_q // TILE)
    return shape.heads * (-(-shape.n_k // TILE) + -(-model // TILE)) * -(-blocks // BLOCKS)


def pays(shape: Shape, model: int) -> bool:
    """Whether one launch is faster than attention and a product behind it: short queries and keys, small models."""
    return 0 < steps(shape, model) <= MOST_STEPS
