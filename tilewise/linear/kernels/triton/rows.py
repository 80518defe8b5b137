"""What kernels are told of rows: features, sums and gradients that are ready, where a call is large enough for that."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.linear.kernels.triton.call import Call, all_steps, functions_of, in_advance, scale_of
from tilewise.linear.kernels.triton.source import rows as row_kernels


class Keys(NamedTuple):
    k: Any
    feature: Any  # which kernels still have to take of keys and queries, or None
    sums: Any  # (batch, key heads, places, d): of a chunk's features, decayed to its end; None if kernels add them up
    totals: Any = None  # (batch, key heads, places): the log that a chunk decays by, if sums of weights are to be known


class Queries(NamedTuple):
    q: Any
    scale: float | None  # that features are still to be multiplied by, or None
    norm: Any = None  # (batch, heads, n): the sums of rows' weights, or None if kernels add them up
    inverses: Any = None  # 1 over each


class Pulled(NamedTuple):
    """Gradients of rows."""

    d_out: Any
    norm: Any  # what d_out is still to be divided by, or None
    shift: Any  # (batch, heads, n): of the sum of a row's weights; to be filled, if norm is there
    sums: Any  # (batch, heads, places, d): of shift f(q) over a chunk's rows, or None if kernels add them up


def keys_of(call: Call, sums: bool) -> Keys:
    """sums: whether those are wanted."""
    problem, shape = call.problem, call.problem.shape
    feature = functions_of(problem.spec).feature
    if not call.prepares:
        return Keys(problem.k, feature, None)
    added = totals = None
    if sums:
        added = _sums(call, shape.heads_k)
        totals = call.numbers(*added.shape[:3]) if call.adds_up_before and problem.decay is not None else None
    k = _place(call, problem.k)
    if k is not None or sums:
        _map(call, problem.k, k, added, totals, None)
    return Keys(problem.k if k is None else k, None, added, totals)


def queries_of(call: Call) -> Queries:
    q, scale = call.problem.q, scale_of(call.problem.spec)
    made = _place(call, q) if call.prepares else None
    if made is None:
        return Queries(q, scale)
    _map(call, q, made, None, None, scale)
    return Queries(made, None)


def weighed_queries(call: Call, keys: Keys, states: Any, initial: Any) -> Queries:
    """With the sums of their weights, if those are to be known before: the kernel that adds them up maps q."""
    problem, shape, segments = call.problem, call.problem.shape, call.segments
    if not call.adds_up_before:
        return queries_of(call)
    q, k, scale, early = problem.q, keys.k, scale_of(problem.spec), in_advance(call.early)
    z_before, made = _sums(call, shape.heads_k), _place(call, q)
    norm, inverses = (call.numbers(*q.shape[:3]) for _ in range(2))
    call.launch(
        row_kernels.z_rows, shape.heads_k, 1, keys.sums, keys.totals, states, initial, z_before,
        *all_steps(keys.sums, keys.totals), segments.table, segments.number, shape.heads_k, **early,
    )  # fmt: skip
    call.launch_chunks(
        row_kernels.weigh_rows, shape.heads, q, k, problem.decay, z_before, made, norm, inverses,
        *all_steps(q, k, problem.decay, z_before, made), segments.table, shape.heads, shape.group, shape.n_q,
        scale=scale, FEATURE=functions_of(problem.spec).feature, **early,
    )  # fmt: skip
    return Queries(q, scale, norm, inverses) if made is None else Queries(made, None, norm, inverses)


def pulled_of(call: Call, queries: Queries, out: Any, norm: Any, d_out: Any) -> Pulled:
    problem, shape = call.problem, call.problem.shape
    if not problem.spec.normalize:
        return Pulled(d_out, None, None, None)
    shift = call.numbers(*norm.shape)
    if not call.prepares:
        return Pulled(d_out, norm, shift, None)
    g, sums = call.tape.empty(d_out.shape, d_out.dtype, d_out.device), _sums(call, shape.heads)
    call.launch_chunks(
        row_kernels.pull_rows, shape.heads, queries.q, problem.decay, out, norm, d_out, g, shift, sums,
        *all_steps(queries.q, problem.decay, out, d_out, g, sums), call.segments.table, shape.heads, shape.group,
        shape.n_q, scale=queries.scale,
    )  # fmt: skip
    return Pulled(g, None, shift, sums)


def _sums(call: Call, heads: int) -> Any:
    """With a place for each chunk, and some between: see chunks.sums_at."""
    shape, chunk = call.problem.shape, call.choice("map_rows").chunk
    return call.numbers(shape.batch, heads, shape.n_q // chunk + call.segments.number, shape.d)


def _place(call: Call, x: Any) -> Any:
    """For features of q or k; None if they are what they are made of."""
    return None if functions_of(call.problem.spec).feature is None else call.tape.empty(x.shape, x.dtype, x.device)


def _map(call: Call, x: Any, made: Any, sums: Any, totals: Any, scale: float | None) -> None:
    decay = call.problem.decay if sums is not None else None
    call.launch_chunks(
        row_kernels.map_rows, x.shape[1], x, decay, made, sums, totals, *all_steps(x, decay, made, sums, totals),
        call.segments.table, x.shape[1], scale=scale, FEATURE=functions_of(call.problem.spec).feature,
    )  # fmt: skip
