"""A call's kernels, one after the other.

q, k, v and out go through memory once, and k and v once more, for the states: programs that share a head's columns read
the same rows at the same time, from the cache. States are written for segments alone, some per processor; where heads
are enough for all processors there is one segment, and no states. Large calls go through q and k, and backwards through
out and its gradient, once more before: see rows.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tilewise import arrays
from tilewise.linear.kernels.decays import decay_gradient, log_decay
from tilewise.linear.kernels.triton.call import Call, all_steps, functions_of, in_advance, scale_of, segments_of
from tilewise.linear.kernels.triton.rows import Keys, keys_of, pulled_of, queries_of, weighed_queries
from tilewise.linear.kernels.triton.source import backward as backward_kernels
from tilewise.linear.kernels.triton.source import forward as forward_kernels
from tilewise.linear.kernels.triton.source import states as state_kernels
from tilewise.linear.kernels.triton.tape import Tape
from tilewise.linear.spec import Done, LinearGrads, Problem
from tilewise.linear.state import LinearState

_BLOCK = 1024  # numbers of a state that a program of `scan` has


def forward(problem: Problem, chunk: int | None = None) -> Done:
    return _forward(problem, chunk, Tape(problem.q, problem.k, problem.v))[0]


# Triton's interpreter computes with NumPy, which warns of what IEEE's inf and NaN are for.
@np.errstate(all="ignore")
def _forward(problem: Problem, chunk: int | None, tape: Tape) -> tuple[Done, Any]:
    """With the states before each segment, if there are several."""
    shape, spec, v, decay = problem.shape, problem.spec, problem.v, problem.decay
    call = Call(problem, segments_of(problem, chunk), chunk, tape)
    final = _empty_state(call) if spec.keeps_state else None
    keys = keys_of(call, sums=spec.normalize or final is not None)
    states, _ = _states(call, keys, final)
    initial, left = _parts(problem.initial), final if call.by_kernels else None
    q, scale, norm, inverses = weighed_queries(call, keys, states, initial)
    sizes, steps = arrays.stored_as(problem.q, v)
    out = call.tape.empty(sizes, q.dtype, q.device, steps)
    named = in_advance(call.early and (states is not None or norm is not None))
    to_fill = None
    if norm is None:
        norm = call.numbers(*q.shape[:2], q.shape[2] if spec.normalize else 0)
        to_fill = norm if spec.normalize else None
    by_head = call.segments.table, call.segments.number, shape.heads, shape.group, shape.n_q, scale
    if call.is_plain:
        call.launch(
            forward_kernels.plain_outputs, shape.heads, shape.d_v,
            q, keys.k, v, keys.sums, states, initial, out, inverses, left,
            *all_steps(q, keys.k, v, keys.sums, out), *by_head, **named,
        )  # fmt: skip
    else:
        call.launch(
            forward_kernels.outputs, shape.heads, shape.d_v,
            q, keys.k, v, decay, keys.sums, states, initial, out, to_fill, inverses, left,
            *all_steps(q, keys.k, v, decay, keys.sums, out), *by_head,
            one=call.choice("outputs").one, FEATURE=keys.feature, CAUSAL=spec.causal, **named,
        )  # fmt: skip
    state = LinearState(None, None, None)
    if final is not None:
        if 0 in (shape.n_q, shape.batch, shape.heads) and call.by_kernels:
            final = _untouched(problem)
        state = LinearState(*final, log_decay(problem))
    return Done(out, norm, state), states


@np.errstate(all="ignore")
def backward(
    problem: Problem, done: Done, d_out: Any, d_state: LinearState | None, chunk: int | None = None,
    tape: Tape | None = None, states: Any = None,
) -> LinearGrads:  # fmt: skip
    """Gradients of sum(out * d_out) + sum(state * d_state). states: those before each segment, if they were kept."""
    shape, spec, v, decay = problem.shape, problem.spec, problem.v, problem.decay
    given = problem.q, problem.k, v
    tape = tape or Tape(*given, done.out, done.norm, d_out)
    call = Call(problem, segments_of(problem, chunk), chunk, tape, backward=True)
    segments = call.segments
    keys, queries = keys_of(call, sums=spec.normalize), queries_of(call)
    q, k = queries.q, keys.k
    states, totals = _states(call, keys, None) if states is None else (states, None)
    d_q, d_k, d_v = (call.tape.empty(x.shape, x.dtype, x.device) for x in given)
    g, norm, shift, g_sums = pulled_of(call, queries, done.out, done.norm, d_out)
    d_rows, d_columns = (
        None if decay is None else call.numbers(-(-shape.d // call.choice(kernel).block), *x.shape[:3])
        for kernel, x in (("linear_d_query", q), ("linear_d_keys", k))
    )
    pulled = _parts(d_state)
    d_initial = None if problem.initial is None else _empty_state(call)
    slope = functions_of(spec).slope
    raw_q, raw_k = (None, None) if slope is None else (problem.q, problem.k)
    named = {"FEATURE": keys.feature, "CAUSAL": spec.causal}
    by_key = segments.table, segments.number, shape.heads_k, shape.n_q, queries.scale
    call.launch(
        backward_kernels.linear_d_query, shape.heads, shape.d,
        q, k, v, raw_q, decay, keys.sums, states, _parts(problem.initial), done.out, norm, g, d_q, shift, d_rows,
        *all_steps(q, k, v, raw_q, decay, keys.sums, done.out, g, d_q), segments.table, segments.number, shape.heads,
        shape.group, shape.n_q, queries.scale, scale_of(spec), one=call.choice("linear_d_query").one,
        SLOPE=slope, **named,
    )  # fmt: skip
    d_states = None if states is None else call.numbers(*states.shape)
    if d_states is not None:
        call.launch(
            state_kernels.d_segment_states, shape.heads_k, shape.d_v,
            q, g, norm, shift, decay, g_sums, d_states, *all_steps(q, g, decay, g_sums), *by_key,
            GROUP=shape.group, FEATURE=keys.feature, EARLY=call.early,
        )  # fmt: skip
        _scan(call, d_states, totals, pulled, None if call.by_kernels else d_initial, backwards=True)
    call.launch(
        backward_kernels.linear_d_keys, shape.heads_k, shape.d,
        q, k, v, raw_k, decay, g_sums, d_states, pulled, norm, g, shift, d_k, d_columns,
        d_initial if call.by_kernels else None, *all_steps(q, k, v, raw_k, decay, g_sums, g, d_k), *by_key,
        one=call.choice("linear_d_keys").one,
        GROUP=shape.group, SLOPE=slope, SUMS=spec.normalize or d_state is not None, **named,
    )  # fmt: skip
    call.launch(
        backward_kernels.d_values, shape.heads_k, shape.d_v,
        q, k, decay, d_states, pulled, norm, g, d_v, *all_steps(q, k, decay, g, d_v), *by_key,
        one=call.choice("d_values").one, GROUP=shape.group, **named,
    )  # fmt: skip
    d_decay = None
    if d_rows is not None and d_columns is not None:
        by_head = d_rows.sum(0).reshape(shape.batch, shape.heads_k, shape.group, shape.n_q).sum(2)
        d_decay = decay_gradient(problem, by_head - d_columns.sum(0), done.state, d_state)
    return LinearGrads(d_q, d_k, d_v, d_decay, _initial_gradient(call, d_initial, d_state))


def _initial_gradient(call: Call, numbers: Any, d_state: LinearState | None) -> LinearState | None:
    problem, shape = call.problem, call.problem.shape
    if problem.initial is None:
        return None
    if d_state is None:
        d_state = LinearState(*(torch.zeros_like(x) for x in problem.initial))
    kv, z = (d_state.kv, d_state.z) if call.by_kernels and 0 in (shape.n_q, shape.batch, shape.heads) else numbers
    return LinearState(kv, z, d_state.log_decay)


def forward_tape(problem: Problem) -> Tape:
    """The launches that give out, norm and states (or None) for q, k and v that lie as these do."""
    problem = replace(problem, q=problem.q.detach(), k=problem.k.detach(), v=problem.v.detach())  # all of them others
    tape = Tape(problem.q, problem.k, problem.v)
    done, states = _forward(problem, None, tape)
    return tape.finished(done.out, done.norm, states)


def backward_tape(problem: Problem, done: Done, states: Any, d_out: Any) -> Tape:
    """Those that give d_q, d_k and d_v for q, k, v, out, norm, states and d_out."""
    problem = replace(problem, q=problem.q.detach(), k=problem.k.detach(), v=problem.v.detach())
    done, d_out = replace(done, out=done.out.detach()), d_out.detach()
    tape = Tape(problem.q, problem.k, problem.v, done.out, done.norm, states, d_out)
    grads = backward(problem, done, d_out, None, tape=tape, states=states)
    return tape.finished(grads.q, grads.k, grads.v)


# -- states -----------------------------------------------------------------------------------------------------------


def _states(call: Call, keys: Keys, final: Any) -> tuple[Any, Any]:
    """The state before each segment, and by how much each decays it; nothing for the only segment of a sequence. final:
    where the state after all goes (kv, z), or None."""
    problem, shape, segments = call.problem, call.problem.shape, call.segments
    if call.is_one_segment:
        return None, None
    slots = shape.batch, segments.number, shape.heads_k
    states = call.numbers(*slots, shape.d * shape.d_v + shape.d)
    totals = None if problem.decay is None else call.numbers(*slots)
    call.launch(
        state_kernels.segment_states, shape.heads_k, shape.d_v,
        keys.k, problem.v, problem.decay, keys.sums, states, totals,
        *all_steps(keys.k, problem.v, problem.decay, keys.sums), segments.table, segments.number, shape.heads_k,
        # What the last one adds nobody asks for, but by how much it decays.
        segments=segments.number - 1 if call.by_kernels and problem.decay is None else None,
        FEATURE=keys.feature, SUMS=problem.spec.normalize or final is not None, EARLY=call.early,
    )  # fmt: skip
    _scan(call, states, totals, _parts(problem.initial), None if call.by_kernels else final)
    return states, totals


def _scan(call: Call, states: Any, totals: Any, initial: Any, final: Any, backwards: bool = False) -> None:
    """`states` become those before each segment; final: where what comes after all of them goes (kv, z)."""
    problem, shape, size = call.problem, call.problem.shape, int(states.shape[-1])
    call.tape.launch(
        state_kernels.scan, (problem.n_states * shape.heads_k, -(-size // _BLOCK)),
        states, totals, initial, final, call.segments.firsts, call.segments.number, shape.heads_k, size,
        PACKED=problem.spec.lengths is not None, BACKWARDS=backwards, CAUSAL=problem.spec.causal, D=shape.d,
        BLOCK=_BLOCK, **in_advance(call.early),
    )  # fmt: skip


def _empty_state(call: Call) -> tuple[Any, Any]:
    shape, slots = call.problem.shape, (call.problem.n_states, call.problem.shape.heads_k)
    return call.numbers(*slots, shape.d, shape.d_v), call.numbers(*slots, shape.d)


def _untouched(problem: Problem) -> tuple[Any, Any]:
    """The state after no tokens."""
    shape, device = problem.shape, problem.q.device
    if problem.initial is not None:
        return problem.initial.kv.clone(), problem.initial.z.clone()
    size = problem.n_states, shape.heads_k, shape.d
    return torch.zeros(*size, shape.d_v, device=device), torch.zeros(*size, device=device)


def _parts(state: LinearState | None) -> tuple[Any, Any] | None:
    return None if state is None else (state.kv.contiguous(), state.z.contiguous())
