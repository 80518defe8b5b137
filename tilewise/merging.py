"""Results over disjoint keys, merged into one: how chunks, shards and splits of a sequence come together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise import arrays, softmax
from tilewise.spec import Partial


def merge(partials: Sequence[Any], *, sinks: Any = None) -> Partial:
    """Results over disjoint keys as one: each partial is (out, lse), as attention(..., return_lse=True) gives them.

    sinks: given here and not to the partial calls, since they join the row sum once.
    """
    if not isinstance(partials, Sequence):
        raise TypeError(f"merge: expected a list of (out, lse), got {type(partials).__name__}")
    parts = [_partial(i, p) for i, p in enumerate(partials)]
    if not parts:
        raise ValueError("merge: expected at least one partial result, got none")
    first = parts[0]
    for i, part in enumerate(parts):
        for name, x, like in (("out", part.out, first.out), ("lse", part.lse, first.lse)):
            if arrays.is_torch(x) != arrays.is_torch(like) or arrays.device_name(x) != arrays.device_name(like):
                raise TypeError(f"merge: {name} of partial {i} is of another library or device than that of partial 0")
            if arrays.kind_of(x) != "float":
                raise TypeError(f"merge: {name} of partial {i}: expected floats, got {arrays.dtype_name(x)}")
            if tuple(x.shape) != tuple(like.shape):
                raise ValueError(
                    f"merge: {name} of partial {i} has shape {tuple(x.shape)}, that of partial 0 {tuple(like.shape)}"
                )
    if sinks is not None:
        _check_sinks(sinks, first)
    if arrays.is_torch(first.out):
        merged = softmax.merge(parts, sinks)
        return Partial(merged.out.to(first.out.dtype), merged.lse)
    merged = softmax.merge([Partial(arrays.widen(arrays.as_numpy(p.out), p.lse.dtype), p.lse) for p in parts], sinks)
    return Partial(arrays.like(arrays.narrow(merged.out, arrays.dtype_name(first.out)), first.out), merged.lse)


def _partial(i: int, given: Any) -> Partial:
    if not isinstance(given, Partial) and not (isinstance(given, (tuple, list)) and len(given) == 2):
        raise TypeError(f"merge: partial {i}: expected (out, lse), got {type(given).__name__}")
    part = given if isinstance(given, Partial) else Partial(*given)
    if not arrays.is_array(part.out) or not arrays.is_array(part.lse):
        raise TypeError(f"merge: partial {i}: expected two arrays, (out, lse), got {type(part.out).__name__}")
    if tuple(part.lse.shape) != tuple(part.out.shape[:-1]):
        raise ValueError(
            f"merge: lse of partial {i} has shape {tuple(part.lse.shape)}, "
            f"expected {tuple(part.out.shape[:-1])} as its out {tuple(part.out.shape)} needs"
        )
    return part


def _check_sinks(sinks: Any, part: Partial) -> None:
    """(batch, heads, n) results have a sink a head, packed (total, heads) ones too; the others have one head."""
    shape = tuple(part.lse.shape)
    heads = {1} if len(shape) == 1 else {shape[1]} if len(shape) == 3 else {1, shape[1]}
    if arrays.is_array(sinks) and (
        arrays.is_torch(sinks) != arrays.is_torch(part.out)
        or arrays.device_name(sinks) != arrays.device_name(part.out)
        or arrays.kind_of(sinks) != "float"
    ):
        raise TypeError("sinks: expected floats of the same library and on the same device as the partials")
    if not arrays.is_array(sinks) or len(sinks.shape) != 1 or sinks.shape[0] not in heads:
        found = tuple(sinks.shape) if arrays.is_array(sinks) else type(sinks).__name__
        expected = " or ".join(f"({n},)" for n in sorted(heads))
        raise ValueError(f"sinks: expected shape {expected}, one a query head, got {found}")
