"""What kernel systems that work in main memory share: arrays of either library in, and the same out, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tilewise.arrays import Array, as_numpy, compute_dtype, dtype_name, like, narrow, widen
from tilewise.rope import Rope, Rotation, rotations
from tilewise.spec import Attention, Grads, Partial, Shape

Forward = Callable[[Attention, Array, Array, Array], Partial]
Backward = Callable[[Attention, Array, Array, Array, Partial, Array, "Array | None"], Grads]


def unsupported(shape: Shape) -> str | None:
    if shape.device != "cpu":
        return f"it works in main memory and the arrays are on {shape.device}; move them with .cpu()"
    return None


def turning_first(forward: Forward) -> Forward:
    """For a pass without a rotary embedding of its own: q and k are turned before it begins, a copy of each."""

    def turned(spec: Attention, q: Array, k: Array, v: Array) -> Partial:
        if spec.rope is None:
            return forward(spec, q, k, v)
        turn_q, turn_k = _turns(spec.rope, spec, q, k, v)
        return forward(replace(spec, rope=None), _apply(turn_q, q), _apply(turn_k, k), v)

    return turned


def turning_back(backward: Backward) -> Backward:
    """The same for its gradients, which are turned back when it is done."""

    def turned(
        spec: Attention, q: Array, k: Array, v: Array, saved: Partial, d_out: Array, d_lse: Array | None
    ) -> Grads:
        if spec.rope is None:
            return backward(spec, q, k, v, saved, d_out, d_lse)
        turn_q, turn_k = _turns(spec.rope, spec, q, k, v)
        given = _apply(turn_q, q), _apply(turn_k, k), v
        grads = backward(replace(spec, rope=None), *given, saved, d_out, d_lse)
        return replace(grads, q=_apply(turn_q.back(), grads.q), k=_apply(turn_k.back(), grads.k))

    return turned


def _turns(rope: Rope, spec: Attention, q: Array, k: Array, v: Array) -> tuple[Rotation, Rotation]:
    shape = Shape.of(spec, q, k, v)
    return rotations(rope, shape, spec.lengths, compute_dtype(shape.dtype))


def _apply(turn: Rotation, x: Array) -> Array:
    """Computed in at least float32, stored as x is."""
    name = dtype_name(x)
    return narrow(turn.turned(widen(x, compute_dtype(name))), name)


def run_forward(forward: Forward, spec: Attention, q: Any, k: Any, v: Any) -> Partial:
    """A forward pass on NumPy arrays, on arrays of the caller's library."""
    done = forward(spec, as_numpy(q), as_numpy(k), as_numpy(v))
    return done.map(lambda x: like(x, q))


def run_backward(
    backward: Backward, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any
) -> Grads:
    """A backward pass on NumPy arrays, on arrays of the caller's library."""
    held = saved.map(as_numpy)
    d_lse = None if d_lse is None else as_numpy(d_lse)
    grads = backward(spec, as_numpy(q), as_numpy(k), as_numpy(v), held, as_numpy(d_out), d_lse)
    wanted = zip(grads.arrays, spec.wanted, strict=True)
    return Grads(
        like(grads.q, q), like(grads.k, k), like(grads.v, v),
        None if grads.sinks is None else like(grads.sinks, spec.sinks),
        tuple(like(g, slot.array) for g, slot in wanted),
    )  # fmt: skip
