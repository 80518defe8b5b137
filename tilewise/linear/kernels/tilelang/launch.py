"""A call's kernels, one after the other.

A block has a segment of a head's rows, and all of the head's state. Where a sequence is one segment, as it is if heads
and batches keep a GPU busy, every row goes through memory once; else k and v do once more, for the states between.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tilewise import arrays
from tilewise.dispatch import Unsupported
from tilewise.kernels import gpus
from tilewise.kernels.tilelang import library
from tilewise.kernels.tilelang.call import lies_by_tokens, row_places, steps_of, suits_copy_engine
from tilewise.kernels.tilelang.compiler import C
from tilewise.kernels.uploads import kept_on
from tilewise.linear.kernels.decays import decay_gradient, log_decay
from tilewise.linear.kernels.tilelang.build import CHUNK, LinearBuild, build_of, default_chunk, written
from tilewise.linear.spec import Done, LinearGrads, Problem
from tilewise.linear.state import LinearState

_SIDE = 4  # as in chunks.py
_LEAST_CHUNKS = 8  # of a segment, or reading and writing states would take longer than the chunks


class Segments(NamedTuple):
    """table: all of them, with fields as in chunks.py; inner, later: those that are not the last, or not the first, of
    their sequence; firsts: the first of each sequence; chunks: of each row, the first row of its chunk."""

    table: Any
    inner: Any
    later: Any
    firsts: Any
    chunks: Any

    @property
    def number(self) -> int:
        return int(self.table.shape[0])


def forward(problem: Problem, chunk: int | None, target: str) -> Done:
    call = LinearCall(problem, chunk, target)
    shape, spec, q = problem.shape, problem.spec, problem.q
    out = torch.empty_strided(*arrays.stored_as(q, problem.v), dtype=q.dtype, device=q.device)
    norm = call.row_numbers(spec.normalize)
    states, final = call.states()
    if call.has_rows:
        call.launch(
            "outputs", call.segments.table, {"q": q, "k": problem.k, "v": problem.v}, {"out": out},
            states=states, final=final, norm=norm,
        )  # fmt: skip
    norm = norm[..., : shape.n_q].contiguous() if spec.normalize else _numbers(q, shape.batch, shape.heads, 0)
    return Done(out, norm, call.split(final, shape.heads_k, log_decay(problem)))


def backward(
    problem: Problem, done: Done, d_out: Any, d_state: LinearState | None, chunk: int | None, target: str
) -> LinearGrads:
    """Gradients of sum(out * d_out) + sum(state * d_state)."""
    call = LinearCall(problem, chunk, target)
    shape, spec, q, k, v = problem.shape, problem.spec, problem.q, problem.k, problem.v
    summed = torch.float32 if shape.group > 1 else q.dtype
    made = (
        torch.empty if call.has_rows and spec.lengths is None else torch.zeros
    )  # every row has a chunk that stores it
    d_q = made(q.shape, dtype=q.dtype, device=q.device)
    d_k, d_v = (made((*q.shape[:3], x.shape[3]), dtype=summed, device=q.device) for x in (k, v))
    if spec.lengths is not None:
        d_q, d_k, d_v = map(_by_tokens, (d_q, d_k, d_v))
    share, shift = (call.row_numbers(spec.normalize) for _ in range(2))
    d_rows, d_columns = (call.row_numbers(problem.decay is not None) for _ in range(2))
    rows = {"share": share, "shift": shift}
    of_keys = {"k": k, "v": v}
    d_final = call.states_from(d_state, shape.heads)
    if call.has_rows:
        if spec.normalize:
            given = {"out": done.out, "d_out": d_out}
            call.launch("row_weights", call.segments.table, given, {}, norm=done.norm.contiguous(), **rows)
        states, _ = call.states()
        call.launch(
            "d_query", call.segments.table, {"q": q, **of_keys, "d_out": d_out}, {"d_q": d_q},
            states=states, d_rows=d_rows, **rows,
        )  # fmt: skip
        d_states = d_final  # a block reads its state before it writes it
        if not call.is_one_segment:
            d_states = call.empty_states(shape.heads)
            inner = call.segments.later if spec.causal else call.segments.table
            if len(inner):
                call.launch("d_segment_states", inner, {"q": q, "d_out": d_out}, {}, d_states=d_states, **rows)
            call.scan(d_states, d_final, backwards=True)
        call.launch(
            "d_keys", call.segments.table, {"q": q, **of_keys, "d_out": d_out}, {"d_k": d_k, "d_v": d_v},
            d_states=d_states, d_final=d_final, d_columns=d_columns, **rows,
        )  # fmt: skip
    d_decay = None
    if problem.decay is not None:
        d_decay = decay_gradient(problem, call.of_key_heads(d_rows - d_columns)[..., : shape.n_q], done.state, d_state)
    d_log = torch.zeros_like(done.state.log_decay) if d_state is None else d_state.log_decay
    initial = None if problem.initial is None else call.split(call.of_key_heads(d_final), shape.heads_k, d_log)
    d_k, d_v = (call.of_key_heads(x).to(q.dtype) for x in (d_k, d_v))
    return LinearGrads(d_q, d_k, d_v, d_decay, initial)


class LinearCall:
    """What the kernels of a call share."""

    def __init__(self, problem: Problem, chunk: int | None, target: str) -> None:
        if problem.n_states > gpus.MOST_IN_A_GRID:
            room = f"a launch has room for {gpus.MOST_IN_A_GRID}, and there are {problem.n_states}"
            raise Unsupported(f"lengths: kernel 'tilelang' takes sequences side by side; {room}; pass fewer in a call")
        self.problem, self.target = problem, target
        self.chunk = CHUNK if target != C else chunk or default_chunk(target)
        self.segments = segments_of(problem, self.chunk, target)
        shape = problem.shape
        self.has_rows = 0 not in (shape.batch, shape.heads, self.segments.number)
        made = self.build_for("scan", ())
        self.depth, self.columns = made.depth, made.columns
        self.slots = shape.batch * self.segments.number
        self.is_one_segment = problem.spec.causal and problem.n_states == self.slots == len(self.segments.firsts) - 1
        self.is_one_segment &= not len(self.segments.inner)
        self.decays, self.totals = self._cumulative()

    def states(self) -> tuple[Any, Any]:
        """The state before each segment, and that after all if queries see all; else still that before."""
        problem = self.problem
        final = self.states_from(problem.initial, 0)
        if self.is_one_segment:  # blocks whose heads share keys would read what one of them writes
            return final.clone() if problem.shape.group > 1 else final, final
        states = self.empty_states(problem.shape.heads_k)
        if self.has_rows:
            inner = self.segments.inner if problem.spec.causal else self.segments.table
            if len(inner):
                self.launch("segment_states", inner, {"k": problem.k, "v": problem.v}, {}, states=states)
            self.scan(states, final)
        return states, final

    def scan(self, states: Any, final: Any, backwards: bool = False) -> None:
        totals = self.totals if states.shape[1] == self.totals.shape[1] else self._by_query_head(self.totals, 1)
        self.launch(
            "scan", self.segments.table, {}, {}, states=states, totals=totals, final=final,
            firsts=self.segments.firsts, heads=states.shape[1], backwards=int(backwards),
        )  # fmt: skip

    def row_numbers(self, wanted: bool) -> Any:
        """Places for one number a row, if a kernel of this call has any."""
        q = self.problem.q
        return _numbers(q, *q.shape[:2], row_places(q.shape[2])).zero_() if wanted else _unused(q)

    def empty_states(self, heads: int) -> Any:
        return _numbers(self.problem.q, self.slots, heads, self.depth, self.columns + _SIDE)

    def states_from(self, given: LinearState | None, heads: int) -> Any:
        """As kernels have them. heads: of queries, the first of each group of which has all; or 0, for key heads."""
        shape = self.problem.shape
        slots, width = self.problem.n_states, self.columns + _SIDE
        states = _numbers(self.problem.q, slots, heads or shape.heads_k, self.depth, width).zero_()
        if given is not None:
            firsts = states[:, :: shape.group if heads else 1]
            firsts[:, :, : shape.d, : shape.d_v] = given.kv
            firsts[:, :, : shape.d, self.columns] = given.z
        return states

    def split(self, states: Any, heads: int, log_decay: Any) -> LinearState:
        shape = self.problem.shape
        rows = states[:, :heads, : shape.d]
        return LinearState(rows[..., : shape.d_v].contiguous(), rows[..., self.columns].contiguous(), log_decay)

    def of_key_heads(self, x: Any) -> Any:
        """The sums over the query heads that share a key head."""
        shape = self.problem.shape
        return x if shape.group <= 1 else x.unflatten(1, (shape.heads_k, shape.group)).sum(2)

    def launch(self, kernel: str, table: Any, rows: dict[str, Any], results: dict[str, Any], **others: Any) -> None:
        """rows, results: arrays whose rows the copy engine may take. others: arrays without gaps, and numbers."""
        shape, spec = self.problem.shape, self.problem.spec
        on_gpu = self.target != C
        build = self.build_for(kernel, (*rows.values(), *results.values()))
        given = {name: x if on_gpu else x.contiguous() for name, x in (rows | results).items()}
        tensors = {name: x for name, x in others.items() if isinstance(x, torch.Tensor)}
        tensors |= {"segments": table, "decays": self.decays}
        values: dict[str, Any] = {
            "batch": shape.batch, "heads": shape.heads, "heads_k": shape.heads_k, "n": shape.n_q, "group": shape.group,
            "n_rows": row_places(shape.n_q),
            "n_segments": len(table), "slots": self.slots, "n_states": self.problem.n_states,
            "n_firsts": len(self.segments.firsts), "per_batch": self.segments.number, "scale": spec.scale,
            **{name: x for name, x in others.items() if not isinstance(x, torch.Tensor)},
        }  # fmt: skip
        for name, x in (given | tensors).items():
            values |= {f"{name}_step{i}": step for i, step in enumerate(steps_of(x))}
        values |= {name: x.data_ptr() for name, x in (given | tensors).items()}
        values["stream"] = torch.cuda.current_stream().cuda_stream if on_gpu else None
        found = library.kernel(build, lambda: written(kernel)(build, spec))
        found.launch(values, torch.device(shape.device))
        for name, x in results.items():
            if given[name] is not x:
                x.copy_(given[name])

    def build_for(self, kernel: str, rows: Sequence[Any]) -> LinearBuild:
        """What the compiler is asked for. rows: arrays that the copy engine might take."""
        problem = self.problem
        suits = suits_copy_engine if problem.spec.lengths is None else lies_by_tokens
        aligned = self.target != C and all(map(suits, rows))
        decays = problem.decay is not None
        return build_of(kernel, problem.spec, problem.shape, decays, self.target, self.chunk, aligned)

    def _cumulative(self) -> tuple[Any, Any]:
        """The logs summed up from the first row of a chunk to each of its rows, and over each segment."""
        problem, shape = self.problem, self.problem.shape
        if problem.decay is None or not self.has_rows:
            return _unused(problem.q), _numbers(problem.q, self.slots, shape.heads_k).zero_()
        sums = torch.nn.functional.pad(problem.decay.double().cumsum(-1), (1, 0))
        rows = (sums[..., 1:] - sums[..., self.segments.chunks]).float()
        begins, ends = self.segments.table[:, :2].long().unbind(1)
        totals = (sums[..., ends] - sums[..., begins]).float()
        behind = row_places(shape.n_q) - shape.n_q  # the copy engine reads them, and finds the last row's
        rows = torch.nn.functional.pad(rows, (0, behind), mode="replicate")
        return rows.contiguous(), totals.transpose(1, 2).reshape(self.slots, shape.heads_k).contiguous()

    def _by_query_head(self, x: Any, axis: int) -> Any:
        return x.repeat_interleave(self.problem.shape.group, axis).contiguous()


def segments_of(problem: Problem, chunk: int, target: str) -> Segments:
    """As many as keep all processors busy, and no more."""
    shape = problem.shape
    rows = segment_rows(shape.n_q, blocks_wanted(shape.device, target) // max(1, shape.batch * shape.heads), chunk)
    lengths = (0, shape.n_q) if problem.spec.lengths is None else tuple(int(n) for n in problem.spec.lengths)
    device, said = problem.q.device, (lengths, rows, chunk, shape.batch)
    return kept_on(device, ("linear segments of TileLang", *said), (), lambda: _segments(device, *said))


def blocks_wanted(device: str, target: str) -> int:
    """One for each processor: it has no room for more."""
    return 1 if target == C else int(torch.cuda.get_device_properties(device).multi_processor_count)


def segment_rows(n: int, wanted: int, chunk: int) -> int:
    """Of a segment, where n rows are cut into so many: whole chunks."""
    return chunk * max(_LEAST_CHUNKS, -(-n // (max(1, wanted) * chunk)))


def _segments(device: Any, lengths: tuple[int, ...], rows: int, chunk: int, batch: int) -> Segments:
    table: list[list[int]] = []
    firsts, chunks = [0], []
    for sequence, (begin, end) in enumerate(pairwise(lengths)):
        starts = range(begin, end, rows)
        table += [
            [first, min(first + rows, end), len(table) + i, sequence, int(first == begin), int(first + rows >= end)]
            for i, first in enumerate(starts)
        ]
        firsts.append(len(table))
        chunks.append(torch.arange(end - begin) // chunk * chunk + begin)
    whole = torch.tensor(table, dtype=torch.int32).reshape(-1, 6)
    if len(lengths) == 2:  # batches
        firsts = [b * len(table) for b in range(batch + 1)]
    inner, later = whole[whole[:, 5] == 0], whole[whole[:, 4] == 0]
    parts = whole, inner, later, torch.tensor(firsts, dtype=torch.int32), torch.cat(chunks)
    return Segments(*(x.contiguous().to(device) for x in parts))


def _by_tokens(x: Any) -> Any:
    """The same, (total, heads, d) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _unused(like: Any) -> Any:
    """For an argument that nothing is read of, though a kernel asks for its steps: one number of one head's one row."""
    return torch.zeros(1, 1, 1, dtype=torch.float32, device=like.device)


def _numbers(like: Any, *size: int) -> Any:
    return torch.empty(size, dtype=torch.float32, device=like.device)
