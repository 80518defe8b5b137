"""A question put to one kernel system, twice, with everything looked at; and what became of it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.conformance.paths import threads
from tests.fuzzing.judging.exact import Answer, answer
from tests.fuzzing.question import LinearQuestion, Question
from tests.fuzzing.running import plans
from tests.fuzzing.running.asking import Asked, AskedLinear, Unaskable, ask, ask_linear, cache_of
from tests.fuzzing.running.device import placed, soil
from tests.fuzzing.running.memory import Memory, bits
from tests.fuzzing.running.systems import System
from tilewise import arrays, decoding
from tilewise.contract import (
    ContractError,
    backward_results,
    expected,
    forward_results,
    on_host,
)
from tilewise.dispatch import Unsupported
from tilewise.kernels.numpy import NumpyKernel
from tilewise.linear import contract as linear_contract
from tilewise.linear.spec import Done
from tilewise.spec import Lengths, Partial
from tilewise.walking import variables

Results = dict[str, Any]


@dataclass
class Verdict:
    """What became of one question."""

    dtype: str
    kind: str  # dense, one query, packed, part, decode or linear
    names: tuple[str, ...]
    backward: bool = False  # was computed, too
    unfit: str | None = None  # why no results could say anything
    redrawn: Counter[str] = field(default_factory=Counter)  # why questions before it were not put
    refused: str | None = None  # by the kernel, with its reason
    failure: str | None = None
    ratio: float = 0.0  # the largest error, as a share of its limit
    results: Counter[str] = field(default_factory=Counter)  # judged, by their names
    lucky: Counter[str] = field(default_factory=Counter)  # of them, beyond the contract's limit but within the bound
    plans: int = 0  # plans that were judged


class Refused(Exception):  # noqa: N818 - it names a state
    """The package's checks refuse a call that ought to be one."""


def kind_of(question: Question | LinearQuestion) -> str:
    if isinstance(question, LinearQuestion):
        return "linear"
    if question.cache is not None:
        return "decode"
    if question.lengths is not None:
        return "packed"
    if question.origin != (0, 0) or question.total is not None:
        return "part"
    return "one query" if question.q.values.shape[2] == 1 else "dense"


def judge(system: System, question: Question | LinearQuestion, memory: Memory) -> Verdict:
    """Put the question to the system, and say what became of it."""
    verdict = Verdict(question.dtype, kind_of(question), question.names)
    memory.clear()
    known = answer(question)
    if known.unfit is not None:
        verdict.unfit = known.unfit
        return verdict
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trial = _trial(system, question, known, verdict, memory)
            trial.run()
    except Unaskable as reason:
        verdict.unfit = str(reason)
    except Unsupported as reason:  # by how arrays lie, or by the type of d_out, which shapes do not tell
        verdict.refused = str(reason)
    except Exception as error:  # whatever a kernel raises is a failure of this question, not of the fuzz
        verdict.failure = f"{type(error).__name__}: {error}"
    return verdict


def _trial(
    system: System, question: Question | LinearQuestion, known: Answer, verdict: Verdict, memory: Memory
) -> _Base:
    """Ready to run; what the package's checks refuse is told apart from what its kernels do."""
    try:
        if isinstance(question, LinearQuestion):
            return _LinearTrial(system, question, known, verdict, memory)
        return _Trial(system, question, known, verdict, memory)
    except Unaskable:
        raise
    except (ValueError, TypeError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


class _Base:
    """What trials of both kinds of attention share: the same bits, the limits, inputs that stay as they were."""

    def __init__(self, system: System, known: Answer, verdict: Verdict, memory: Memory) -> None:
        self.system, self.kernel, self.verdict, self.memory = system, system.kernel, verdict, memory
        self.known = known

    def run(self) -> None:
        before = self.inputs()
        self.compute()
        if self.inputs() != before:
            raise ContractError("an input was written to")

    def compute(self) -> None:
        raise NotImplementedError

    def given(self) -> Iterator[Any]:
        raise NotImplementedError

    def inputs(self) -> list[bytes]:
        return [bits(on_host(x)) for x in self.given() if x is not None]

    def twice(self, run: Callable[[Any], Any], count: int) -> tuple[Any, Any]:
        """With some threads and with one alone, where the system has threads, which makes no difference to any bit; on
        the simulator threads take their turns in two orders."""
        self._soil_memory()
        with threads(self.system.kind, count):
            first = run(self.kernel)
        self._soil_memory()
        with threads(self.system.kind, 1):
            return first, run(self.system.again or self.kernel)

    def _soil_memory(self) -> None:
        """What a kernel is about to allocate and forgets to write is NaN, not the 0 that fresh memory often holds."""
        for e in self.known.results.values():
            if self.system.device == "cpu":
                np.full(e.exact.shape, np.nan, arrays.compute_dtype(e.dtype))
            else:
                soil(e.exact.shape, e.dtype, self.system.device)

    def same(self, first: Results, second: Results, when: str) -> None:
        for what, value in first.items():
            if bits(on_host(value)) != bits(on_host(second[what])):
                raise ContractError(f"{what} has other bits {when}")

    def within(self, got: Results, wanted: list[str], has_remainder: bool = False) -> None:
        """Within the contract's limit; where that is small by luck, within what rounding can do to each number.

        has_remainder: the backward pass had what rounding took from out, and owes gradients that are as much better.
        """
        if sorted(got) != sorted(wanted):
            raise ContractError(f"got {sorted(got)}, expected {sorted(wanted)}")
        for what in wanted:
            exact = self.known.results[what].with_remainder if has_remainder else self.known.results[what]
            e = expected(what, exact.dtype, exact.rounded_as, exact.exact, exact.dense, exact.saved)
            errors = e.errors(on_host(got[what]))
            limit: Any = e.limit
            lucky = errors.max(initial=0) > limit
            if lucky:
                limit = np.maximum(limit, exact.bound)
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


class _Trial(_Base):
    def __init__(self, system: System, question: Question, known: Answer, verdict: Verdict, memory: Memory) -> None:
        super().__init__(system, known, verdict, memory)
        self.question, self.asked = question, ask(question, memory, system.device)
        self.call = self.asked.call

    def given(self) -> Iterator[Any]:
        yield from self.memory.used if self.system.device == "cpu" else ()
        call, cache = self.call, self.asked.cache
        if self.system.device != "cpu":
            yield from (call.spec.sinks, *(slot.array for slot in call.spec.loaded))
            yield from (call.q, *(() if cache else (call.k, call.v)))
        if cache is not None:
            yield from (cache.k, cache.v, cache.lengths, cache.table)

    def compute(self) -> None:
        self._judge_plans()
        if self._refused(backward=False):
            return
        saved = self._forward()
        if self.asked.d_out is not None and not self._refused(backward=True):
            self._backward(saved)
            self.verdict.backward = True

    def _judge_plans(self) -> None:
        call = self.asked.host
        tiles = plans.tiles_for(self.question, odd=call.shape.n_q + 7 * call.shape.n_k)
        self.verdict.plans = plans.check(self.question, call.spec, call.shape, tiles)

    def _refused(self, backward: bool) -> bool:
        reason = self.kernel.unsupported(self.call.spec, replace(self.call.shape, backward=backward))
        self.verdict.refused = reason or self.verdict.refused
        return reason is not None

    def _run(self, kernel: Any, asked: Asked) -> Partial:
        call = asked.call
        if asked.cache is not None:
            return decoding.run(kernel, call.spec, call.q, asked.cache)
        done: Partial = kernel.forward(call.spec, call.q, call.k, call.v, asked.tile)
        return done

    def _forward(self) -> Partial:
        saved, again = self.twice(lambda kernel: self._run(kernel, self.asked), self.question.threads)
        self.same(forward_results(saved), forward_results(again), "the second time, in one thread")
        self.within(forward_results(saved), ["out", "lse"])
        for alone, rows, _ in self._sequences_alone():
            if self.kernel.unsupported(alone.call.spec, alone.call.shape) is not None:  # it is empty, perhaps
                continue
            got = forward_results(self._run(self.kernel, alone))
            self.same(_rows(saved, rows), got, "alone, though batch_invariant")
        return saved

    def _backward(self, saved: Partial) -> None:
        call, d_out, d_lse = self.call, self.asked.d_out, self.asked.d_lse
        if self.question.saved_elsewhere:  # only out and lse cross from forward to backward
            saved = self._saved_elsewhere()
        inputs = call.spec, call.q, call.k, call.v, saved, d_out, d_lse, self.asked.tile
        grads, again = self.twice(lambda kernel: kernel.backward(*inputs), self.question.threads)
        got = backward_results(grads)
        fixed = {name: x for name, x in got.items() if name != "d_q" or not self.system.in_any_order}
        self.same(fixed, backward_results(again), "the second time, in one thread")
        gradients = [what for what in self.known.results if what not in ("out", "lse")]
        self.within(got, gradients, saved.remainder is not None)
        for alone, rows, cols in self._sequences_alone():
            one_call = alone.call
            if self.kernel.unsupported(one_call.spec, replace(one_call.shape, backward=True)) is not None:
                continue
            remainder = None if saved.remainder is None else saved.remainder[rows]
            held = Partial(saved.out[rows], saved.lse[rows], remainder)
            parts = d_out[rows], None if d_lse is None else d_lse[rows]
            spec, q, k, v = one_call.spec, one_call.q, one_call.k, one_call.v
            one = self.kernel.backward(spec, q, k, v, held, *parts, self.asked.tile)
            want = {"d_q": grads.q[rows], "d_k": grads.k[cols], "d_v": grads.v[cols]}
            want = {name: x for name, x in want.items() if name in fixed}
            self.same(want, {"d_q": one.q, "d_k": one.k, "d_v": one.v}, "alone, though batch_invariant")

    def _saved_elsewhere(self) -> Partial:
        there = self.asked.host
        found = NumpyKernel().forward(replace(there.spec, keeps_remainder=False), there.q, there.k, there.v)
        return Partial(placed(found.out, self.system.device), placed(found.lse, self.system.device))

    def _sequences_alone(self) -> Iterator[tuple[Asked, Any, Any]]:
        """A batch-invariant call's last sequence as a call of its own, where its variant does not ask which it is."""
        call, spec, cache = self.call, self.call.spec, None
        if not spec.batch_invariant or any({"B", "QP", "KP"} & variables(expr) for expr in spec.expressions):
            return
        rows = cols = np.s_[-1:]
        if spec.lengths is not None:
            q, k = spec.lengths.q, spec.lengths.k
            spec = replace(spec, lengths=Lengths(q[-2:] - q[-2], k[-2:] - k[-2]))
            rows, cols = np.s_[:, :, q[-2] : q[-1]], np.s_[:, :, k[-2] : k[-1]]
        k, v = call.k[cols], call.v[cols]
        if self.asked.cache is not None and self.question.cache is not None:
            if self.question.cache.page is not None:
                return  # pages have other places
            one = replace(self.question.cache, lengths=self.question.cache.lengths[-1:])
            cache = cache_of(one, self.asked.cache.k[cols], self.asked.cache.v[cols])
        alone = replace(call, spec=spec, q=call.q[rows], k=k, v=v)
        yield replace(self.asked, call=alone, cache=cache), rows, cols


def _rows(done: Partial, rows: Any) -> Results:
    return {name: x[rows] for name, x in forward_results(done).items()}


class _LinearTrial(_Base):
    THREADS = 3

    def __init__(
        self, system: System, question: LinearQuestion, known: Answer, verdict: Verdict, memory: Memory
    ) -> None:
        super().__init__(system, known, verdict, memory)
        self.kernel = system.linear
        self.asked: AskedLinear = ask_linear(question, memory, system.device)

    def given(self) -> Iterator[Any]:
        if self.system.device == "cpu":
            yield from self.memory.used
            return
        problem = self.asked.problem
        yield from (problem.q, problem.k, problem.v, problem.decay, self.asked.d_out)
        yield from (x for state in (problem.initial, self.asked.d_state) if state is not None for x in state)

    def compute(self) -> None:
        problem, asked = self.asked.problem, self.asked
        reason = "no linear attention" if self.kernel is None else self.kernel.unsupported(problem.shape)
        if reason is not None:
            self.verdict.refused = reason
            return
        done, again = self.twice(lambda _: self.kernel.forward(problem), self.THREADS)
        first = linear_contract.forward_results(done)
        self.same(first, linear_contract.forward_results(again), "the second time, in one thread")
        self.within(first, list(first))
        if asked.d_out is None:
            return
        grads, again = self.twice(lambda _: self._backward(done), self.THREADS)
        pulled = linear_contract.backward_results(grads)
        self.same(pulled, linear_contract.backward_results(again), "the second time, in one thread")
        self.within(pulled, [what for what in self.known.results if what not in first])
        self.verdict.backward = True

    def _backward(self, done: Done) -> Any:
        return self.kernel.backward(self.asked.problem, done, self.asked.d_out, self.asked.d_state)
