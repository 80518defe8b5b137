"""A call's kernels, one after the other.

q, k, v and out go through memory once, and k and v once more, for the states: programs that share a head's columns read
the same rows at the same time, from the cache. States are written for segments alone, some per processor.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from tilewise import arrays
from tilewise.kernels.triton import modules
from tilewise.kernels.triton.arguments import steps_of
from tilewise.kernels.triton.fitting import padded, shared_memory
from tilewise.kernels.triton.ops import function
from tilewise.kernels.triton.tuning import processors
from tilewise.linear.features import slope
from tilewise.linear.kernels.triton.source import backward as backward_kernels
from tilewise.linear.kernels.triton.source import forward as forward_kernels
from tilewise.linear.kernels.triton.source import states as state_kernels
from tilewise.linear.spec import Done, Linear, LinearGrads, Problem
from tilewise.linear.state import LinearState
from tilewise.spec import Shape
from tilewise.walking import remembered

_BLOCK = 1024  # numbers of a state that a program of `scan` has
_COLUMNS = 64  # or rows of a state that a program has in registers
_ROOM = 160 << 10  # bytes of shared memory that two stages of the widest heads take; other GPUs have one
_PROGRAMS = 2  # for each processor: one computes while the other loads
_LEAST_CHUNKS = 4  # of a segment, or reading and writing states would take longer than the chunks


class Told(NamedTuple):
    """What kernels are compiled for, and how many programs share the rows (d) and columns (d_v) of a state."""

    named: dict[str, Any]
    blocks: int
    v_blocks: int


class Segments(NamedTuple):
    """table: (segments, 2), the first row and the one behind the last; firsts: the first segment of each sequence."""

    table: Any
    firsts: Any

    @property
    def number(self) -> int:
        return int(self.table.shape[0])


# Triton's interpreter computes with NumPy, which warns of what IEEE's inf and NaN are for.
@np.errstate(all="ignore")
def forward(problem: Problem, chunk: int | None) -> Done:
    shape, spec, q = problem.shape, problem.spec, problem.q
    chunk = chunk or default_chunk(shape)
    segments = segments_of(problem, chunk)
    told = _told(spec, shape, chunk)
    states, _, after = _states(problem, segments, told)
    out = torch.empty_strided(*arrays.stored_as(q, problem.v), dtype=q.dtype, device=q.device)
    norm = _numbers(q, *q.shape[:2], q.shape[2] if spec.normalize else 0)
    grid = (segments.number, shape.batch * shape.heads, told.v_blocks)
    if 0 not in grid:
        forward_kernels.outputs[grid](
            q, problem.k, problem.v, problem.decay, states, out, norm if spec.normalize else None,
            *_steps(q, problem.k, problem.v, problem.decay, out), segments.table, shape.heads, shape.group, shape.n_q,
            spec.scale, CAUSAL=spec.causal, **told.named,
        )  # fmt: skip
    return Done(out, norm, _split(after, problem, _log_decay(problem)))


@np.errstate(all="ignore")
def backward(problem: Problem, done: Done, d_out: Any, d_state: LinearState | None, chunk: int | None) -> LinearGrads:
    """Gradients of sum(out * d_out) + sum(state * d_state)."""
    shape, spec, q, k, v, decay = problem.shape, problem.spec, problem.q, problem.k, problem.v, problem.decay
    chunk = chunk or default_chunk(shape)
    segments = segments_of(problem, chunk)
    told, sizes = _told(spec, shape, chunk), (shape.group, shape.n_q, spec.scale)
    states, totals, _ = _states(problem, segments, told)
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    norm, shift = (done.norm, torch.empty_like(done.norm)) if spec.normalize else (None, None)
    d_rows, d_columns = (None if decay is None else _numbers(q, told.blocks, *x.shape[:3]) for x in (q, k))
    named, slopes = {"CAUSAL": spec.causal, **told.named}, {"SLOPE": _functions(spec).slope}
    by_query, by_key, by_value = (
        (segments.number, shape.batch * heads, blocks)
        for heads, blocks in (
            (shape.heads, told.blocks), (shape.heads_k, told.blocks), (shape.heads_k, told.v_blocks),
        )
    )  # fmt: skip
    if 0 not in by_query:
        backward_kernels.linear_d_query[by_query](
            q, k, v, decay, states, done.out, norm, d_out, d_q, shift, d_rows,
            *_steps(q, k, v, decay, done.out, d_out, d_q), segments.table, shape.heads, *sizes, **named, **slopes,
        )  # fmt: skip
        state_kernels.d_segment_states[by_value](
            q, d_out, norm, shift, decay, states, *_steps(q, d_out, decay), segments.table, shape.heads_k, *sizes,
            **told.named,
        )  # fmt: skip
    d_initial = _scan(problem, segments, states, totals, d_state, backwards=True)
    if 0 not in by_key:
        backward_kernels.linear_d_keys[by_key](
            q, k, v, decay, states, norm, d_out, shift, d_k, d_columns, *_steps(q, k, v, decay, d_out, d_k),
            segments.table, shape.heads_k, *sizes, **named, **slopes,
        )  # fmt: skip
        backward_kernels.d_values[by_value](
            q, k, decay, states, norm, d_out, d_v, *_steps(q, k, decay, d_out, d_v),
            segments.table, shape.heads_k, *sizes, **named,
        )  # fmt: skip
    d_log = torch.zeros_like(done.state.log_decay) if d_state is None else d_state.log_decay
    d_decay = None
    if d_rows is not None and d_columns is not None:
        by_head = d_rows.sum(0).reshape(shape.batch, shape.heads_k, shape.group, shape.n_q).sum(2)
        d_decay = _decay_gradient(problem, by_head - d_columns.sum(0), done.state, d_state)
    return LinearGrads(d_q, d_k, d_v, d_decay, None if problem.initial is None else _split(d_initial, problem, d_log))


# -- states -----------------------------------------------------------------------------------------------------------


def _states(problem: Problem, segments: Segments, told: Told) -> tuple[Any, Any, Any]:
    """The state before each segment, by how much each decays it, and the state after all."""
    shape = problem.shape
    slots = shape.batch, segments.number, shape.heads_k
    states = _numbers(problem.q, *slots, shape.d * shape.d_v + shape.d)
    totals = _numbers(problem.q, *slots)
    grid = (segments.number, shape.batch * shape.heads_k, told.v_blocks)
    if 0 not in grid:
        state_kernels.segment_states[grid](
            problem.k, problem.v, problem.decay, states, totals, *_steps(problem.k, problem.v, problem.decay),
            segments.table, shape.heads_k, **told.named,
        )  # fmt: skip
    return states, totals, _scan(problem, segments, states, totals, problem.initial)


def _scan(
    problem: Problem, segments: Segments, states: Any, totals: Any, initial: LinearState | None, backwards: bool = False
) -> Any:
    """(sequences, key heads, d * d_v + d) numbers after the last segment; `states` become those before each."""
    size, shape = int(states.shape[-1]), problem.shape
    final = _numbers(problem.q, problem.n_states, shape.heads_k, size)
    if initial is not None:
        initial = torch.cat([initial.kv.flatten(2), initial.z], dim=2)
    grid = (problem.n_states * shape.heads_k, -(-size // _BLOCK))
    if 0 not in grid:
        state_kernels.scan[grid](
            states, totals, initial, final, segments.firsts, segments.number, shape.heads_k, size,
            PACKED=problem.spec.lengths is not None, BACKWARDS=backwards, CAUSAL=problem.spec.causal, BLOCK=_BLOCK,
        )  # fmt: skip
    return final


def _split(numbers: Any, problem: Problem, log_decay: Any) -> LinearState:
    shape = problem.shape
    kv, z = numbers.split([shape.d * shape.d_v, shape.d], dim=2)
    return LinearState(kv.unflatten(2, (shape.d, shape.d_v)), z, log_decay)


def _log_decay(problem: Problem) -> Any:
    """What a sequence decays by from end to end, and what its initial state did before."""
    shape, initial = problem.shape, problem.initial
    sums = _numbers(problem.q, problem.n_states, shape.heads_k).zero_()
    for at, rows in problem.sequences() if problem.decay is not None else ():
        sums[at] = problem.decay[:, :, rows].float().sum(-1)
    return sums if initial is None else sums + initial.log_decay


def _decay_gradient(problem: Problem, d_c: Any, state: LinearState, d_state: LinearState | None) -> Any:
    """From gradients of cumulative sums to those of what was summed; in float64, as a sequence's are added up."""
    d_c = d_c.double()
    last = torch.zeros_like(state.log_decay, dtype=torch.float64)
    if d_state is not None:
        last += (d_state.kv * state.kv).sum((2, 3)) + (d_state.z * state.z).sum(2) + d_state.log_decay
    for at, rows in problem.sequences():
        d_c[:, :, rows] = d_c[:, :, rows].flip(-1).cumsum(-1).flip(-1) + last[at][..., None]
    return d_c.to(problem.decay.dtype)


# -- arguments --------------------------------------------------------------------------------------------------------


def default_chunk(shape: Shape) -> int:
    """Float32 is multiplied without tensor cores, by threads that each hold their part of the rows."""
    return 16 if shape.dtype == "float32" else 64


def segments_of(problem: Problem, chunk: int) -> Segments:
    """As many as keep all processors busy, and no more: k and v are read for each state once more."""
    shape = problem.shape
    programs = shape.batch * shape.heads * -(-shape.d_v // _COLUMNS)
    wanted = -(-_PROGRAMS * processors(problem.q.device) // max(1, programs))
    rows = segment_rows(shape.n_q, wanted, chunk)
    lengths = (0, shape.n_q) if problem.spec.lengths is None else tuple(int(n) for n in problem.spec.lengths)
    return _segments(str(problem.q.device), lengths, rows)


def segment_rows(n: int, wanted: int, chunk: int) -> int:
    """Of a segment, where n rows are cut into so many: whole chunks."""
    return chunk * max(_LEAST_CHUNKS, -(-n // (wanted * chunk)))


@lru_cache(maxsize=256)
def _segments(device: str, lengths: tuple[int, ...], rows: int) -> Segments:
    table: list[tuple[int, int]] = []
    firsts = [0]
    for begin, end in pairwise(lengths):
        table += [(first, min(first + rows, end)) for first in range(begin, end, rows)]
        firsts.append(len(table))
    tensors = torch.tensor(table, dtype=torch.int32).reshape(-1, 2), torch.tensor(firsts, dtype=torch.int32)
    return Segments(*(x.to(device) for x in tensors))


def _told(spec: Linear, shape: Shape, chunk: int) -> Told:
    depth, columns = padded(shape.d, shape.dtype), padded(shape.d_v, shape.dtype)
    block = min(_COLUMNS, depth, columns)
    named = {
        "FEATURE": _functions(spec).feature, "TYPE": getattr(tl, shape.dtype), "CHUNK": chunk, "BLOCK": block,
        "D": shape.d, "D_V": shape.d_v, "DEPTH": depth, "COLUMNS": columns,
        "num_warps": 8 if depth * columns > _COLUMNS**2 else 4,
        "num_stages": 2 if shared_memory(shape.device) >= _ROOM else 1,
    }  # fmt: skip
    return Told(named, -(-shape.d // block), -(-shape.d_v // block))


def _functions(spec: Linear) -> ModuleType:
    """The feature map and its slope, written once."""
    texts = remembered(
        spec.feature, "linear triton",
        lambda feature: (function("feature", feature, ()), function("slope", slope(feature), ())),
    )  # fmt: skip
    return modules.module(texts)


def _numbers(like: Any, *size: int) -> Any:
    return torch.empty(size, dtype=torch.float32, device=like.device)


def _steps(*given: Any) -> tuple[Any, ...]:
    return tuple(None if x is None else steps_of(x) for x in given)
