"""One seed, one call: drawn again until it can be judged, made on a kernel, and judged."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

import numpy as np

from tests.conformance.paths import threads
from tests.fuzzing.bounds import Bounds
from tests.fuzzing.device import placed, placed_on, soil
from tests.fuzzing.dice import Dice
from tests.fuzzing.draw import Drawn, Wanted, draw
from tests.fuzzing.memory import Memory, bits
from tests.fuzzing.rounding import LARGEST
from tilewise import arrays
from tilewise.contract import (
    ContractError,
    Expected,
    backward_results,
    expected_backward,
    expected_forward,
    forward_results,
    on_host,
)
from tilewise.dispatch import Kernel, Unsupported
from tilewise.kernels.numpy import NumpyKernel
from tilewise.spec import Lengths, Partial
from tilewise.walking import variables

MOST_DRAWS = 100
IN_ANY_ORDER = ("cuda/unordered",)  # whose gradients of q have other bits each time


@dataclass(frozen=True, eq=False)
class Problem:
    """A call with what is expected of it."""

    drawn: Drawn
    forward: list[Expected]
    backward: list[Expected]
    bounds: Bounds
    memory: Memory


@dataclass
class Verdict:
    """What became of one seed."""

    dtype: str
    kind: str
    names: list[str]
    backward: bool
    redrawn: Counter[str]
    refused: str | None = None  # by the kernel, with its reason
    failure: str | None = None
    ratio: float = 0.0  # the largest error, as a share of its limit
    results: Counter[str] = field(default_factory=Counter)  # judged, by their names
    lucky: Counter[str] = field(default_factory=Counter)  # of them, beyond the contract's limit but within the bound


def make(seed: int, memory: Memory, wanted: Wanted) -> tuple[Problem, Counter[str]]:
    """The seed's problem: the first it draws whose results mean something; and why others were not taken."""
    redrawn = Counter[str]()
    for dice in islice(_dice(seed, wanted.pool), MOST_DRAWS):
        memory.clear()
        try:
            drawn = draw(*dice, memory, wanted)
        except ValueError as error:
            if "beyond 32 bits" not in str(error):
                raise
            redrawn["integers beyond 32 bits"] += 1
            continue
        with np.errstate(all="ignore"):
            problem = _problem(drawn, memory)
        if isinstance(problem, Problem):
            return problem, redrawn
        redrawn[problem] += 1
    raise RuntimeError(f"seed {seed}: no call fit to judge in {MOST_DRAWS} draws: {dict(redrawn)}")


def _dice(seed: int, pool: int | None) -> Iterator[tuple[Dice, Dice]]:
    """For one draw after the other: dice for what kernels are compiled for, which a pool shares, and for the rest."""
    if pool is None:
        dice = Dice(seed)
        while True:
            yield dice, dice
    for number in count():
        yield Dice(MOST_DRAWS * (seed % pool) + number), Dice(MOST_DRAWS * (pool + seed) + number)


def _problem(drawn: Drawn, memory: Memory) -> Problem | str:
    """The call with what is expected of it, or why it cannot be judged. No kernel has a say in this."""
    bounds = Bounds(drawn.call)
    reason = bounds.unfit(backward=drawn.d_out is not None)
    if reason is not None:
        return reason
    forward = expected_forward(drawn.call)
    backward = [] if drawn.d_out is None else expected_backward(drawn.call, drawn.d_out, drawn.d_lse)
    for e in forward + backward:
        largest = np.abs(e.exact[np.isfinite(e.exact)]).max(initial=0)
        if not (largest < 0.9 * LARGEST[e.dtype] and np.isfinite(e.limit)):
            return "results beyond the range of their type"
    return Problem(drawn, forward, backward, bounds, memory)


def judge(kernel: Kernel, seed: int, memory: Memory, wanted: Wanted) -> Verdict:
    """Draw the seed's call, make it on this kernel, and say what became of it."""
    problem, redrawn = make(seed, memory, wanted)
    drawn = problem.drawn
    verdict = Verdict(drawn.call.shape.dtype, drawn.kind, drawn.names, drawn.d_out is not None, redrawn)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _Trial(kernel, problem, verdict, wanted.device).run()
    except Exception as error:  # whatever a kernel raises is a failure of this seed, not of the fuzz
        verdict.failure = f"{type(error).__name__}: {error}\n{describe(drawn)}"
    return verdict


class _Trial:
    """A problem's call on a kernel, twice, with everything looked at."""

    def __init__(self, kernel: Kernel, problem: Problem, verdict: Verdict, device: str) -> None:
        self.kernel, self.problem, self.verdict, self.device = kernel, problem, verdict, device
        self.drawn, self.call = problem.drawn, placed_on(device, problem.drawn.call)

    def run(self) -> None:
        before = self._inputs()
        if self._refused(backward=False):
            return
        try:
            saved = self._forward()
            if self.drawn.d_out is not None and not self._refused(backward=True):
                self._backward(saved)
        except Unsupported as reason:  # by how arrays lie, or by the type of d_out, which shapes do not tell
            self.verdict.refused = str(reason)
            return
        if self._inputs() != before:
            raise ContractError("an input was written to")

    def _inputs(self) -> list[bytes]:
        if self.device == "cpu":
            return [bits(x) for x in self.problem.memory.used]
        spec = self.call.spec
        given = (self.call.q, self.call.k, self.call.v, spec.sinks, *(slot.array for slot in spec.loaded))
        return [bits(on_host(x)) for x in given if x is not None]

    def _refused(self, backward: bool) -> bool:
        reason = self.kernel.unsupported(self.call.spec, replace(self.call.shape, backward=backward))
        self.verdict.refused = reason or self.verdict.refused
        return reason is not None

    def _forward(self) -> Partial:
        call, tile = self.call, self.drawn.tile
        saved, again = self._twice(lambda: self.kernel.forward(call.spec, call.q, call.k, call.v, tile))
        self._same(forward_results(saved), forward_results(again), "the second time, in one thread")
        self._within(self.problem.forward, forward_results(saved), self.problem.bounds.forward)
        for alone, rows, _ in self._sequences_alone():
            if self.kernel.unsupported(alone.spec, alone.shape) is not None:  # it is empty, perhaps
                continue
            got = self.kernel.forward(alone.spec, alone.q, alone.k, alone.v, tile)
            self._same(_rows(saved, rows), forward_results(got), "alone, though batch_invariant")
        return saved

    def _backward(self, saved: Partial) -> None:
        call, drawn = self.call, self.drawn
        if drawn.saved_elsewhere:  # only out and lse cross from forward to backward
            found = NumpyKernel().forward(drawn.call.spec, drawn.call.q, drawn.call.k, drawn.call.v)
            saved = Partial(placed(found.out, self.device), placed(found.lse, self.device))
        d_out, d_lse = (None if x is None else placed(x, self.device) for x in (drawn.d_out, drawn.d_lse))
        inputs = call.spec, call.q, call.k, call.v, saved, d_out, d_lse, drawn.tile
        grads, again = self._twice(lambda: self.kernel.backward(*inputs))
        got = backward_results(grads)
        fixed = {name: x for name, x in got.items() if name != "d_q" or self.kernel.name not in IN_ANY_ORDER}
        self._same(fixed, backward_results(again), "the second time, in one thread")
        self._within(self.problem.backward, got, lambda: self.problem.bounds.backward(drawn.d_out, drawn.d_lse))
        for alone, rows, cols in self._sequences_alone():
            if self.kernel.unsupported(alone.spec, replace(alone.shape, backward=True)) is not None:
                continue
            held = Partial(saved.out[rows], saved.lse[rows])
            parts = d_out[rows], None if d_lse is None else d_lse[rows]
            one = self.kernel.backward(alone.spec, alone.q, alone.k, alone.v, held, *parts, drawn.tile)
            want = {"d_q": grads.q[rows], "d_k": grads.k[cols], "d_v": grads.v[cols]}
            self._same(want, {"d_q": one.q, "d_k": one.k, "d_v": one.v}, "alone, though batch_invariant")

    def _twice(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        """With some threads and with one alone, where the system has threads: that makes no difference to any bit."""
        self._soil_memory()
        with threads(self.kernel.name, self.drawn.threads):
            first = run()
        self._soil_memory()
        with threads(self.kernel.name, 1):
            return first, run()

    def _soil_memory(self) -> None:
        """What a kernel is about to allocate and forgets to write is NaN, not the 0 that fresh memory often holds."""
        for e in self.problem.forward + self.problem.backward:
            if self.device == "cpu":
                np.full(e.exact.shape, np.nan, arrays.compute_dtype(e.dtype))
            else:
                soil(e.exact.shape, e.dtype, self.device)

    def _same(self, first: dict[str, Any], second: dict[str, Any], when: str) -> None:
        for what, value in first.items():
            if bits(on_host(value)) != bits(on_host(second[what])):
                raise ContractError(f"{what} has other bits {when}")

    def _within(self, expected: list[Expected], got: dict[str, Any], bounds: Callable[[], dict[str, Any]]) -> None:
        """Within the contract's limit; where that is small by luck, within what rounding can do to each number."""
        if got.keys() != {e.what for e in expected}:
            raise ContractError(f"got {sorted(got)}, expected {sorted(e.what for e in expected)}")
        for e in expected:
            errors = e.errors(on_host(got[e.what]))
            limit: Any = e.limit
            lucky = errors.max(initial=0) > limit
            if lucky:
                limit = np.maximum(limit, bounds()[e.what])
            share = np.divide(errors, limit, out=np.zeros_like(errors), where=errors > 0)
            ratio = float(share.max(initial=0))
            if not ratio <= 1:
                worst = np.unravel_index(np.argmax(share), share.shape)
                raise ContractError(
                    f"{e.what}{list(map(int, worst))} is off by {errors[worst]:.3g} from {e.exact[worst]:.6g}, "
                    f"{ratio:.3g} times what is allowed"
                )
            self.verdict.ratio = max(self.verdict.ratio, ratio)
            name = e.what.split()[0]  # arrays together
            self.verdict.results[name] += 1
            if lucky:
                self.verdict.lucky[name] += 1

    def _sequences_alone(self) -> Any:
        """A batch-invariant call's last sequence as a call of its own, where its variant does not ask which it is."""
        call, spec = self.call, self.call.spec
        if not spec.batch_invariant or any({"B", "QP", "KP"} & variables(expr) for expr in spec.expressions):
            return
        if spec.lengths is None:
            rows = cols = np.s_[-1:]
        else:
            q, k = spec.lengths.q, spec.lengths.k
            spec = replace(spec, lengths=Lengths(q[-2:] - q[-2], k[-2:] - k[-2]))
            rows, cols = np.s_[:, :, q[-2] : q[-1]], np.s_[:, :, k[-2] : k[-1]]
        yield replace(call, spec=spec, q=call.q[rows], k=call.k[cols], v=call.v[cols]), rows, cols


def _rows(done: Partial, rows: Any) -> dict[str, Any]:
    return {name: x[rows] for name, x in forward_results(done).items()}


def describe(drawn: Drawn) -> str:
    """The call in words, for whoever looks into a failure."""
    call = drawn.call
    told = [f"  {call.shape}", f"  {drawn.kind}: {', '.join(drawn.names)}; {drawn.tile or 'default tile'}"]
    expressions = {"mask": call.spec.mask, "score": call.spec.score}
    told += [f"  {name}: {expr!r}" for name, expr in expressions.items() if expr is not None]
    told += [f"  {name}: {_in_words(x)}" for name, x in zip("qkv", (call.q, call.k, call.v), strict=True)]
    told += [f"  array: {_in_words(slot.array)}" for slot in call.spec.loaded]
    if call.spec.lengths is not None:
        told.append(f"  lengths: {call.spec.lengths.q.tolist()}, {call.spec.lengths.k.tolist()}")
    if drawn.d_out is not None:
        told.append(f"  d_out: {_in_words(drawn.d_out)}; {'no' if drawn.d_lse is None else 'a'} d_lse")
    told.append(f"  {drawn.threads} threads, scale {call.spec.scale:g}, sinks {call.spec.sinks}")
    told.append(f"  batch_invariant {call.spec.batch_invariant}, saved elsewhere {drawn.saved_elsewhere}")
    return "\n".join(told)


def _in_words(x: Any) -> str:
    return f"{arrays.dtype_name(x)} {x.shape}, strides {x.strides}"
