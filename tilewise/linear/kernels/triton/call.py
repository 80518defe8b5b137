"""A problem on its way through the kernels: how it is cut, and how a kernel is launched on all of it."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tilewise.dispatch import Unsupported
from tilewise.expr import S
from tilewise.kernels import gpus
from tilewise.kernels.triton import modules
from tilewise.kernels.triton.arguments import starts_early, steps_of
from tilewise.kernels.triton.fitting import padded
from tilewise.kernels.triton.ops import function
from tilewise.kernels.triton.tuning import processors
from tilewise.kernels.uploads import kept_on
from tilewise.linear.features import slope
from tilewise.linear.kernels.triton.choices import Choice, choice_of, segments_for
from tilewise.linear.kernels.triton.tape import Tape
from tilewise.linear.spec import Linear, Problem
from tilewise.walking import remembered

# Numbers of q from which on kernels are told features, norms and sums that others made before: a kernel more takes as
# long as some chunks do.
LARGE = 1 << 23


class Segments(NamedTuple):
    """table: (segments, 2), the first row and the one behind the last; firsts: the first segment of each sequence."""

    table: Any
    firsts: Any
    rows: int  # of each at most: whole chunks

    @property
    def number(self) -> int:
        return int(self.table.shape[0])


class Functions(NamedTuple):
    feature: Any
    slope: Any


class Call(NamedTuple):
    problem: Problem
    segments: Segments
    chunk: int | None
    tape: Tape
    backward: bool = False

    @property
    def by_kernels(self) -> bool:
        """Whether those that go through the rows leave the states at a sequence's ends; else `scan` does."""
        return self.problem.spec.causal and self.problem.spec.lengths is None

    @property
    def is_one_segment(self) -> bool:
        return self.by_kernels and self.segments.number == 1

    @property
    def prepares(self) -> bool:
        """Whether rows are made ready by kernels of their own (rows.py). In bfloat16 what is ready takes as much memory
        as what it is made of. Forwards, without a causal mask, every row is needed once."""
        shape, again = self.problem.shape, self.problem.spec.causal or self.backward
        return again and shape.dtype == "bfloat16" and shape.batch * shape.heads * shape.n_q * shape.d >= LARGE

    @property
    def adds_up_before(self) -> bool:
        """Whether the sums of rows' weights are known before outputs are computed."""
        return self.prepares and self.problem.spec.normalize and not self.backward

    @property
    def is_plain(self) -> bool:
        """Whether `plain_outputs` serves: rows are features, multiplied as they come."""
        spec, shape = self.problem.spec, self.problem.shape
        is_bare = spec.causal and self.problem.decay is None
        is_ready = self.prepares or not (spec.normalize or functions_of(spec).feature is not None)
        same_width = padded(shape.d, shape.dtype) == padded(shape.d_v, shape.dtype)
        return is_bare and is_ready and shape.dtype == "bfloat16" and same_width

    @property
    def early(self) -> bool:
        """Whether `scan`, and what is behind it, start beside the kernel before them and wait for it there."""
        return starts_early(self.problem.q.device)

    def choice(self, kernel: str) -> Choice:
        return choice_of(kernel, self.problem.shape, self.chunk)

    def numbers(self, *size: int) -> Any:
        return self.tape.empty(size, torch.float32, self.problem.q.device)

    def launch(
        self, kernel: Any, heads: int, width: int, *args: Any, segments: int | None = None, **named: Any
    ) -> None:
        """For each block of a state that has so many rows or columns, head and segment."""
        choice = self.choice(kernel.__name__)
        blocks = -(-width // choice.block)
        grid = (self.problem.shape.batch * heads * blocks, self.segments.number if segments is None else segments)
        named |= {"BLOCK": choice.block, "BLOCKS": blocks, "num_warps": choice.warps, "num_stages": choice.stages}
        self._launch(kernel, grid, choice.chunk, *args, **named)

    def launch_chunks(self, kernel: Any, heads: int, *args: Any, **named: Any) -> None:
        """For each head and chunk; the kernel is told how many of those a segment has."""
        choice = self.choice(kernel.__name__)
        chunks = self.segments.rows // choice.chunk
        grid = (self.problem.shape.batch * heads * chunks, self.segments.number)
        self._launch(kernel, grid, choice.chunk, *args, chunks=chunks, num_warps=choice.warps, **named)

    def _launch(self, kernel: Any, grid: tuple[int, int], chunk: int, *args: Any, **named: Any) -> None:
        shape = self.problem.shape
        if grid[1] > gpus.MOST_IN_A_GRID:
            room = f"a launch has room for {gpus.MOST_IN_A_GRID} of them, and there are {grid[1]}"
            raise Unsupported(f"lengths: kernel 'triton' takes segments of sequences side by side; {room}; pass fewer")
        self.tape.launch(
            kernel, grid, *args, **named, TYPE=getattr(tl, shape.dtype), CHUNK=chunk, D=shape.d, D_V=shape.d_v,
            DEPTH=padded(shape.d, shape.dtype), COLUMNS=padded(shape.d_v, shape.dtype),
        )  # fmt: skip


# -- how it is cut ----------------------------------------------------------------------------------------------------


def segments_of(problem: Problem, chunk: int | None = None) -> Segments:
    """As many as keep all processors busy, and no more: k and v are read for each state once more."""
    shape = problem.shape
    choice = choice_of("outputs", shape, chunk)
    lengths = (0, shape.n_q) if problem.spec.lengths is None else tuple(int(n) for n in problem.spec.lengths)
    longest = max((end - begin for begin, end in pairwise(lengths)), default=0)
    programs = shape.batch * shape.heads * -(-shape.d_v // choice.block)
    rows = segment_rows(shape.n_q, choice.chunk, programs, choice.residents * processors(problem.q.device))
    rows = min(rows, choice.chunk * max(1, -(-longest // choice.chunk)))
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
    numbers = torch.tensor(table, dtype=torch.int32).reshape(-1, 2)
    return Segments(numbers.to(device), torch.tensor(firsts, dtype=torch.int32).to(device), rows)


# -- arguments --------------------------------------------------------------------------------------------------------


def functions_of(spec: Linear) -> Functions:
    """The feature map and its slope, written once; None for the identity."""
    if spec.feature.key == S.key:
        return Functions(None, None)
    texts = remembered(
        spec.feature, "linear triton",
        lambda feature: (function("feature", feature, ()), function("slope", slope(feature), ())),
    )  # fmt: skip
    module: ModuleType = modules.module(texts)
    return Functions(module.feature, module.slope)


def scale_of(spec: Linear) -> float | None:
    return None if spec.scale == 1.0 else spec.scale


def all_steps(*given: Any) -> tuple[Any, ...]:
    return tuple(None if x is None else steps_of(x) for x in given)


def in_advance(early: bool) -> dict[str, Any]:
    """For a kernel that waits by itself for the one before it: an option that only some GPUs know."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
