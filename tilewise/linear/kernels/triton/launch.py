"""A call's kernels, one after the other.

q, k, v and out go through memory once, and k and v once more, for the states: programs that share a head's columns read
the same rows at the same time, from the cache. States are written for segments alone, some per processor; where heads
are enough for all processors there is one segment, and no states.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from tilewise import arrays
from tilewise.expr import S
from tilewise.kernels.triton import modules
from tilewise.kernels.triton.arguments import starts_early, steps_of
from tilewise.kernels.triton.fitting import padded
from tilewise.kernels.triton.ops import function
from tilewise.kernels.triton.tuning import processors
from tilewise.kernels.uploads import kept_on
from tilewise.linear.features import slope
from tilewise.linear.kernels.decays import decay_gradient, log_decay
from tilewise.linear.kernels.triton.choices import Choice, choice_of, segments_for
from tilewise.linear.kernels.triton.source import backward as backward_kernels
from tilewise.linear.kernels.triton.source import forward as forward_kernels
from tilewise.linear.kernels.triton.source import states as state_kernels
from tilewise.linear.kernels.triton.tape import Tape
from tilewise.linear.spec import Done, Linear, LinearGrads, Problem
from tilewise.linear.state import LinearState
from tilewise.walking import remembered

_BLOCK = 1024  # numbers of a state that a program of `scan` has


class Segments(NamedTuple):
    """table: (segments, 2), the first row and the one behind the last; firsts: the first segment of each sequence."""

    table: Any
    firsts: Any

    @property
    def number(self) -> int:
        return int(self.table.shape[0])


class Call(NamedTuple):
    """A problem on its way through the kernels."""

    problem: Problem
    segments: Segments
    chunk: int | None
    tape: Tape

    @property
    def by_kernels(self) -> bool:
        """Whether those that go through the rows leave the states at a sequence's ends; else `scan` does."""
        return self.problem.spec.causal and self.problem.spec.lengths is None

    @property
    def is_one_segment(self) -> bool:
        return self.by_kernels and self.segments.number == 1

    @property
    def is_plain(self) -> bool:
        """Whether `plain_outputs` serves: rows are features as they are, and multiplied as they come."""
        spec, shape = self.problem.spec, self.problem.shape
        is_bare = spec.causal and not spec.normalize and self.problem.decay is None and _functions(spec).feature is None
        return is_bare and shape.dtype == "bfloat16" and padded(shape.d, shape.dtype) == padded(shape.d_v, shape.dtype)

    @property
    def early(self) -> bool:
        """Whether `scan`, and `outputs` behind it, start beside the kernel before them and wait for it there."""
        return starts_early(self.problem.q.device)

    def choice(self, kernel: str) -> Choice:
        return choice_of(kernel, self.problem.shape, self.chunk)

    def numbers(self, *size: int) -> Any:
        return self.tape.empty(size, torch.float32, self.problem.q.device)

    def launch(
        self, kernel: Any, heads: int, width: int, *args: Any, segments: int | None = None, **named: Any
    ) -> None:
        """For each block of a state that has so many rows or columns, head and segment."""
        shape = self.problem.shape
        choice = self.choice(kernel.__name__)
        blocks = -(-width // choice.block)
        grid = (shape.batch * heads * blocks, self.segments.number if segments is None else segments)
        self.tape.launch(
            kernel, grid, *args, **named, TYPE=getattr(tl, shape.dtype), CHUNK=choice.chunk, BLOCK=choice.block,
            BLOCKS=blocks, D=shape.d, D_V=shape.d_v, DEPTH=padded(shape.d, shape.dtype),
            COLUMNS=padded(shape.d_v, shape.dtype), num_warps=choice.warps, num_stages=choice.stages,
        )  # fmt: skip


def forward(problem: Problem, chunk: int | None = None) -> Done:
    return _forward(problem, chunk, Tape(problem.q, problem.k, problem.v))[0]


# Triton's interpreter computes with NumPy, which warns of what IEEE's inf and NaN are for.
@np.errstate(all="ignore")
def _forward(problem: Problem, chunk: int | None, tape: Tape) -> tuple[Done, Any]:
    """With the states before each segment, if there are several."""
    shape, spec, q, k, v, decay = problem.shape, problem.spec, problem.q, problem.k, problem.v, problem.decay
    call = Call(problem, segments_of(problem, chunk), chunk, tape)
    final = _empty_state(call) if spec.keeps_state else None
    states, _ = _states(call, final)
    sizes, steps = arrays.stored_as(q, v)
    out = call.tape.empty(sizes, q.dtype, q.device, steps)
    norm = call.numbers(*q.shape[:2], q.shape[2] if spec.normalize else 0)
    initial, left = _parts(problem.initial), final if call.by_kernels else None
    by_head = call.segments.table, call.segments.number, shape.heads, shape.group, shape.n_q, _scale(spec)
    early = _in_advance(call.early and states is not None)
    if call.is_plain:
        call.launch(
            forward_kernels.plain_outputs, shape.heads, shape.d_v,
            q, k, v, states, initial, out, left, *_steps(q, k, v, out), *by_head, **early,
        )  # fmt: skip
    else:
        call.launch(
            forward_kernels.outputs, shape.heads, shape.d_v, q, k, v, decay, states, initial, out,
            norm if spec.normalize else None, left, *_steps(q, k, v, decay, out), *by_head,
            one=call.choice("outputs").one, FEATURE=_functions(spec).feature, CAUSAL=spec.causal, **early,
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
    shape, spec, q, k, v, decay = problem.shape, problem.spec, problem.q, problem.k, problem.v, problem.decay
    call = Call(problem, segments_of(problem, chunk), chunk, tape or Tape(q, k, v, done.out, done.norm, d_out))
    segments = call.segments
    states, totals = _states(call, None) if states is None else (states, None)
    d_q, d_k, d_v = (call.tape.empty(x.shape, x.dtype, x.device) for x in (q, k, v))
    norm, shift = (done.norm, call.numbers(*done.norm.shape)) if spec.normalize else (None, None)
    d_rows, d_columns = (
        None if decay is None else call.numbers(-(-shape.d // call.choice(kernel).block), *x.shape[:3])
        for kernel, x in (("linear_d_query", q), ("linear_d_keys", k))
    )
    pulled = _parts(d_state)
    d_initial = None if problem.initial is None else _empty_state(call)
    functions = _functions(spec)
    named = {"FEATURE": functions.feature, "CAUSAL": spec.causal}
    by_key = segments.table, segments.number, shape.heads_k, shape.n_q, _scale(spec)
    call.launch(
        backward_kernels.linear_d_query, shape.heads, shape.d,
        q, k, v, decay, states, _parts(problem.initial), done.out, norm, d_out, d_q, shift, d_rows,
        *_steps(q, k, v, decay, done.out, d_out, d_q), segments.table, segments.number, shape.heads, shape.group,
        shape.n_q, _scale(spec), one=call.choice("linear_d_query").one, SLOPE=functions.slope, **named,
    )  # fmt: skip
    d_states = None if states is None else call.numbers(*states.shape)
    if d_states is not None:
        call.launch(
            state_kernels.d_segment_states, shape.heads_k, shape.d_v,
            q, d_out, norm, shift, decay, d_states, *_steps(q, d_out, decay), *by_key,
            GROUP=shape.group, FEATURE=functions.feature, EARLY=call.early,
        )  # fmt: skip
        _scan(call, d_states, totals, pulled, None if call.by_kernels else d_initial, backwards=True)
    call.launch(
        backward_kernels.linear_d_keys, shape.heads_k, shape.d,
        q, k, v, decay, d_states, pulled, norm, d_out, shift, d_k, d_columns, d_initial if call.by_kernels else None,
        *_steps(q, k, v, decay, d_out, d_k), *by_key, one=call.choice("linear_d_keys").one,
        GROUP=shape.group, SLOPE=functions.slope, SUMS=spec.normalize or d_state is not None, **named,
    )  # fmt: skip
    call.launch(
        backward_kernels.d_values, shape.heads_k, shape.d_v,
        q, k, decay, d_states, pulled, norm, d_out, d_v, *_steps(q, k, decay, d_out, d_v), *by_key,
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


def _states(call: Call, final: Any) -> tuple[Any, Any]:
    """The state before each segment, and by how much each decays it; nothing for the only segment of a sequence. final:
    where the state after all goes (kv, z), or None."""
    problem, shape, segments = call.problem, call.problem.shape, call.segments
    if call.is_one_segment:
        return None, None
    slots = shape.batch, segments.number, shape.heads_k
    states = call.numbers(*slots, shape.d * shape.d_v + shape.d)
    totals = None if problem.decay is None else call.numbers(*slots)
    call.launch(
        state_kernels.segment_states, shape.heads_k, shape.d_v, problem.k, problem.v, problem.decay, states, totals,
        *_steps(problem.k, problem.v, problem.decay), segments.table, segments.number, shape.heads_k,
        # What the last one adds nobody asks for, but by how much it decays.
        segments=segments.number - 1 if call.by_kernels and problem.decay is None else None,
        FEATURE=_functions(problem.spec).feature, SUMS=problem.spec.normalize or final is not None, EARLY=call.early,
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
        BLOCK=_BLOCK, **_in_advance(call.early),
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


# -- arguments --------------------------------------------------------------------------------------------------------


def segments_of(problem: Problem, chunk: int | None = None) -> Segments:
    """As many as keep all processors busy, and no more: k and v are read for each state once more."""
    shape = problem.shape
    choice = choice_of("outputs", shape, chunk)
    programs = shape.batch * shape.heads * -(-shape.d_v // choice.block)
    rows = segment_rows(shape.n_q, choice.chunk, programs, choice.residents * processors(problem.q.device))
    lengths = (0, shape.n_q) if problem.spec.lengths is None else tuple(int(n) for n in problem.spec.lengths)
    device = problem.q.device
    return kept_on(device, ("linear segments", lengths, rows), (), lambda: _segments(device, lengths, rows))


def segment_rows(n: int, chunk: int, programs: int, slots: int) -> int:
    """Of a segment: whole chunks, of a sequence that so many programs would go through from end to end."""
    chunks = -(-n // chunk)
    return chunk * max(1, -(-chunks // segments_for(programs, chunks, slots)))


def _segments(device: Any, lengths: tuple[int, ...], rows: int) -> Segments:
    table: list[tuple[int, int]] = []
    firsts = [0]
    for begin, end in pairwise(lengths):
        table += [(first, min(first + rows, end)) for first in range(begin, end, rows)]
        firsts.append(len(table))
    tensors = torch.tensor(table, dtype=torch.int32).reshape(-1, 2), torch.tensor(firsts, dtype=torch.int32)
    return Segments(*(x.to(device) for x in tensors))


class Functions(NamedTuple):
    feature: Any
    slope: Any


def _functions(spec: Linear) -> Functions:
    """The feature map and its slope, written once; None for the identity."""
    if spec.feature.key == S.key:
        return Functions(None, None)
    texts = remembered(
        spec.feature, "linear triton",
        lambda feature: (function("feature", feature, ()), function("slope", slope(feature), ())),
    )  # fmt: skip
    module: ModuleType = modules.module(texts)
    return Functions(module.feature, module.slope)


def _in_advance(early: bool) -> dict[str, Any]:
    """For a kernel that waits by itself for the one before it: an option that only some GPUs know."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def _scale(spec: Linear) -> float | None:
    return None if spec.scale == 1.0 else spec.scale


def _steps(*given: Any) -> tuple[Any, ...]:
    return tuple(None if x is None else steps_of(x) for x in given)
