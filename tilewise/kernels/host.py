"""What kernel systems that work in main memory share: arrays of either library in, and the same out, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.arrays import Array, as_numpy, like
from tilewise.spec import Attention, Grads, Partial, Shape

Forward = Callable[[Attention, Array, Array, Array], Partial]
Backward = Callable[[Attention, Array, Array, Array, Partial, Array, "Array | None"], Grads]


def unsupported(shape: Shape) -> str | None:
    if shape.device != "cpu":
        return f"it works in main memory and the arrays are on {shape.device}; move them with .cpu()"
    return None


def run_forward(forward: Forward, spec: Attention, q: Any, k: Any, v: Any) -> Partial:
    """A forward pass on NumPy arrays, on arrays of the caller's library."""
    done = forward(spec, as_numpy(q), as_numpy(k), as_numpy(v))
    return Partial(like(done.out, q), like(done.lse, q))


def run_backward(
    backward: Backward, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any
) -> Grads:
    """A backward pass on NumPy arrays, on arrays of the caller's library."""
    held = Partial(as_numpy(saved.out), as_numpy(saved.lse))
    d_lse = None if d_lse is None else as_numpy(d_lse)
    grads = backward(spec, as_numpy(q), as_numpy(k), as_numpy(v), held, as_numpy(d_out), d_lse)
    wanted = zip(grads.arrays, spec.wanted, strict=True)
    return Grads(
        like(grads.q, q), like(grads.k, k), like(grads.v, v),
        None if grads.sinks is None else like(grads.sinks, spec.sinks),
        tuple(like(g, slot.array) for g, slot in wanted),
    )  # fmt: skip
