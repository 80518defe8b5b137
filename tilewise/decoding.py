"""Few queries at the end of long sequences, whose keys are in a cache: checks, and decoding by any forward pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tilewise import arrays, dispatch, schedule, validate
from tilewise.cache import Cache
from tilewise.cache.checks import check_like
from tilewise.expr import Expr
from tilewise.rope import Rope
from tilewise.rotating import turned_from
from tilewise.spec import Attention, Lengths, Partial, Positions, Shape
from tilewise.validate import Call
from tilewise.walking import remembered

Forward = Callable[[Attention, Any, Any, Any], Partial]


def prepare(q: Any, cache: Any, **options: Any) -> Call:
    """Check a call of `decode`; its k and v are outlines of the cache, of which every sequence may be a part."""
    if not isinstance(cache, Cache):
        raise TypeError(
            f"cache: expected a tw.KVCache or a tw.PagedKVCache, got {type(cache).__name__}; "
            "tw.KVCache.like(k, v, capacity=n) makes one"
        )
    check_like("q", q, cache.k)
    d = int(cache.k.shape[3])
    if len(q.shape) != 4 or q.shape[0] != cache.batch or q.shape[3] != d:
        raise ValueError(
            f"q: expected ({cache.batch}, heads, queries, {d}) as the cache's batch and head dimension are, "
            f"got shape {tuple(q.shape)}"
        )
    if q.shape[1] == 0 or q.shape[1] % cache.heads:
        raise ValueError(f"q: its heads must be a multiple of the cache's {cache.heads} heads, got {q.shape[1]}")
    call = validate.outline(q, *cache.outline(), **options)
    for expr in call.spec.expressions:
        _check_fit(expr, call.shape)
    return call


def _check_fit(expr: Expr, shape: Shape) -> None:
    """Lengths change from call to call, so the expression must be right for all of them up to the capacity."""

    def check(expr: Expr) -> bool:
        validate.check_variant(Attention(1.0, score=expr), shape)
        sequences = np.arange(shape.batch + 1)
        schedule.check_integers(expr, shape, Lengths(sequences * shape.n_q, sequences * shape.n_k))
        return True

    remembered(expr, ("decoding", shape), check)


def run(system: dispatch.Kernel, spec: Attention, q: Any, cache: Cache, rope: Rope | None = None) -> Partial:
    """By the system's kernels for decoding, or by its forward pass. rope: q is turned; the keys were when they came."""
    own = dispatch.decoder(system)
    if own is not None:
        return own.decode(spec, q, cache, rope)
    if rope is not None:
        q = turned_from(q, rope, cache.lengths - q.shape[2])
    return by_sequences(system.forward, spec, q, cache)


def by_sequences(forward: Forward, spec: Attention, q: Any, cache: Cache) -> Partial:
    """A forward pass on the keys of each sequence; on all at once if they are equally long and lie side by side."""
    keys_and_values = cache.together()
    if keys_and_values is not None:
        return _attended(forward, spec, q, *keys_and_values)
    parts = [
        _attended(forward, replace(spec, positions=Positions(first_batch=b)), q[b : b + 1], *cache.sequence(b))
        for b in range(cache.batch)
    ]
    return Partial(_joined([part.out for part in parts]), _joined([part.lse for part in parts]))


def _attended(forward: Forward, spec: Attention, q: Any, k: Any, v: Any) -> Partial:
    """By the forward pass, unless there is no key yet: a system was chosen for a full cache, and may need keys."""
    return forward(spec, q, k, v) if k.shape[2] else _of_no_keys(spec, q, v)


def _of_no_keys(spec: Attention, q: Any, v: Any) -> Partial:
    """out is 0, and lse what sinks alone make it."""
    rows, wide = q.shape[:3], str(arrays.compute_dtype(arrays.dtype_name(q)))
    if arrays.is_torch(q):
        lse = q.new_full(rows, -np.inf, dtype=getattr(sys.modules["torch"], wide))
        return Partial(q.new_zeros((*rows, v.shape[3])), lse if spec.sinks is None else lse.copy_(spec.sinks[:, None]))
    lse = np.full(rows, -np.inf if spec.sinks is None else arrays.widen(spec.sinks, wide)[:, None], wide)
    return Partial(np.zeros((*rows, v.shape[3]), q.dtype), lse)


def _joined(parts: list[Any]) -> Any:
    return sys.modules["torch"].cat(parts) if arrays.is_torch(parts[0]) else np.concatenate(parts)
