"""What kernels are told of rows: features and gradients that are ready, where a call is long enough for that."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.linear.kernels.triton.call import Call, all_steps, functions_of, scale_of
from tilewise.linear.kernels.triton.source import rows as row_kernels


class Rows(NamedTuple):
    q: Any
    k: Any
    feature: Any  # which kernels still have to take of them, or None
    scale: float | None  # that features of q are still to be multiplied by, or None
    sums: Any  # (batch, key heads, chunks, d): of a chunk's features of keys, or None if kernels add them up


class Pulled(NamedTuple):
    """Gradients of rows."""

    d_out: Any
    norm: Any  # what d_out is still to be divided by, or None
    shift: Any  # (batch, heads, n): of the sum of a row's weights; to be filled, if norm is there
    sums: Any  # (batch, heads, chunks, d): of shift f(q) over a chunk's rows, or None if kernels add them up


def rows_of(call: Call, sums: bool) -> Rows:
    """sums: whether those of keys are wanted."""
    problem, shape, spec = call.problem, call.problem.shape, call.problem.spec
    feature, scale = functions_of(spec).feature, scale_of(spec)
    if not call.prepares:
        return Rows(problem.q, problem.k, feature, scale, None)
    totals = _sums(call, shape.heads_k) if sums else None
    if feature is None:
        if sums:
            _map(call, problem.k, None, totals, None)
        return Rows(problem.q, problem.k, None, scale, totals)
    q, k = (call.tape.empty(x.shape, x.dtype, x.device) for x in (problem.q, problem.k))
    _map(call, problem.k, k, totals, None)
    _map(call, problem.q, q, None, scale)
    return Rows(q, k, None, None, totals)


def pulled_of(call: Call, rows: Rows, out: Any, norm: Any, d_out: Any) -> Pulled:
    problem, shape = call.problem, call.problem.shape
    if not problem.spec.normalize:
        return Pulled(d_out, None, None, None)
    shift = call.numbers(*norm.shape)
    if not call.prepares:
        return Pulled(d_out, norm, shift, None)
    g, sums = call.tape.empty(d_out.shape, d_out.dtype, d_out.device), _sums(call, shape.heads)
    call.launch_chunks(
        row_kernels.pull_rows, shape.heads, rows.q, problem.decay, out, norm, d_out, g, shift, sums,
        *all_steps(rows.q, problem.decay, out, d_out, g, sums), call.segments.table, shape.heads, shape.group,
        shape.n_q, scale=rows.scale,
    )  # fmt: skip
    return Pulled(g, None, shift, sums)


def _sums(call: Call, heads: int) -> Any:
    """With a place for each chunk: see chunks.sums_at."""
    shape, chunk = call.problem.shape, call.choice("map_rows").chunk
    return call.numbers(shape.batch, heads, shape.n_q // chunk + call.segments.number, shape.d)


def _map(call: Call, x: Any, mapped: Any, sums: Any, scale: float | None) -> None:
    decay = call.problem.decay if sums is not None else None
    call.launch_chunks(
        row_kernels.map_rows, x.shape[1], x, decay, mapped, sums, *all_steps(x, decay, mapped, sums),
        call.segments.table, x.shape[1], scale=scale, FEATURE=functions_of(call.problem.spec).feature,
    )  # fmt: skip
