"""The judge of random calls beside others: the package's reference, PyTorch's autograd, and kernels that round.

The judge shares no code with any of them. Here alone they meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.fuzzing.drawing.draw import Wanted, draw
from tests.fuzzing.judging.errors import Bounded
from tests.fuzzing.judging.exact import Answer, Exact, answer
from tests.fuzzing.judging.values import Values, evaluate, kind_of
from tests.fuzzing.judging.walk import BOOL, FLOAT, read
from tests.fuzzing.judging.widths import HALF, LARGEST, to_bfloat16, to_float16, wide
from tests.fuzzing.question import Given, LinearQuestion, Numbers, Question
from tests.fuzzing.running import plans
from tilewise import arrays, contract, parse, reference
from tilewise.expr import Expr, Loaded, as_float, from_records, records
from tilewise.linear import contract as linear_contract
from tilewise.linear import reference as linear_reference
from tilewise.linear.spec import Linear, Problem
from tilewise.linear.state import LinearState
from tilewise.schedule import Plan, Runs
from tilewise.spec import Attention, Lengths, Partial, Positions, Shape, Tile
from tilewise.validate import Call

SEEDS = 120


def stored(given: Given | None) -> Any:
    if given is None:
        return None
    return (
        arrays.narrow(given.values, given.dtype) if given.values.dtype.kind == "f" else given.values.astype(given.dtype)
    )


def expressed(text: str | None, question: Question, loaded: list[Any]) -> Expr | None:
    """The text as the package reads it, its arrays' gradients wanted where the question wants them."""

    def wanting(payload: Any) -> Any:
        if isinstance(payload, Loaded):
            number = next(i for i, x in enumerate(loaded) if x is payload.array)
            return replace(payload, grad=question.arrays[number].wants_gradient)
        return payload

    if text is None:
        return None
    return from_records((op, args, kind, wanting(payload)) for op, args, kind, payload in records(parse(text, loaded)))


def called(question: Question) -> Call:
    loaded = [stored(given) for given in question.arrays]
    mask, score = (expressed(text, question, loaded) for text in (question.mask, question.score))
    lengths = None if question.lengths is None else Lengths(*(np.array(x) for x in question.lengths))
    spec = Attention(
        question.scale, mask, None if score is None else as_float(score), stored(question.sinks), lengths,
        Positions(*question.origin, *(question.total or (None, None))),
    )  # fmt: skip
    return Call(spec, *(stored(given) for given in (question.q, question.k, question.v)), 4)


def fit(wanted: Wanted, count: int = SEEDS) -> list[tuple[int, Any, Answer]]:
    """The generator's questions that can be judged, with the judge's answers."""
    questions = ((seed, draw(seed, wanted)) for seed in range(count))
    answered = ((seed, question, answer(question)) for seed, question in questions)
    return [(seed, question, found) for seed, question, found in answered if found.unfit is None]


def same(found: Numbers, expected: Any, limit: float) -> bool:
    """They differ by less than a thousandth of what a kernel may be off by."""
    expected = np.asarray(expected)
    infinite = np.isinf(expected)
    if found.shape != expected.shape or not np.array_equal(found[infinite], expected[infinite]):
        return False
    return bool(np.all(np.abs(found[~infinite] - expected[~infinite]) <= 1e-3 * limit))


# -- the package's reference ------------------------------------------------------------------------------------------


def test_the_reference_agrees() -> None:
    """Forward, backward, and both contracts' limits."""
    seen, ratios, of_weights = Counter[str](), [], []
    for seed, question, found in fit(Wanted(backward_share=1.0, cache_share=0.0, most_scores=20_000)):
        call, d_out, d_lse = called(question), stored(question.d_out), stored(question.d_lse)
        with np.errstate(all="ignore"):
            expected = contract.expected_forward(call) + contract.expected_backward(call, d_out, d_lse)
        assert [e.what for e in expected] == list(found.results), seed
        for e in expected:
            got = found.results[e.what]
            assert same(got.exact, e.exact, e.limit), f"{e.what} of seed {seed}"
            limit = contract.expected(got.what, got.dtype, got.rounded_as, got.exact, got.dense, got.saved)
            assert limit.dtype == e.dtype
            ratios.append(1.0 if limit.limit == e.limit else limit.limit / e.limit)
            if e.what == "out" and question.dtype in HALF:
                of_weights.append(ratios[-1])
            seen[e.what] += 1
        seen.update(question.names)
    assert {"d_array 0", "d_sinks"} <= seen.keys()
    # The dense computation is another one: its errors are like, not the same.
    assert np.quantile(ratios, 0.05) > 0.6 and np.quantile(ratios, 0.95) < 1.7
    assert np.abs(np.array(of_weights) - 1).max() < 0.01  # where weights are rounded, that decides


def test_the_reference_agrees_on_kept_remainders() -> None:
    """Dense gradients of out in two halves are as far off as the contract's; those of a rounded out are not."""
    ratios, others = [], []
    for _, question, found in fit(Wanted(backward_share=1.0, cache_share=0.0, dtypes=HALF, most_scores=8_000), 60):
        call, d_out, d_lse = called(question), stored(question.d_out), stored(question.d_lse)
        call = replace(call, spec=replace(call.spec, keeps_remainder=True))
        with np.errstate(all="ignore"):
            expected = contract.expected_backward(call, d_out, d_lse)
        for e in expected:
            got = found.results[e.what]
            kept = limited(got.with_remainder).limit
            for limits, other in ((ratios, e.limit), (others, limited(got).limit)):
                limits.append(1.0 if kept == other else other / kept if kept else 2.0)
    apart, apart_without = (np.quantile(np.abs(np.array(x) - 1), 0.95) for x in (ratios, others))
    assert apart < 0.01 and apart_without > 0.05


def limited(x: Exact) -> contract.Expected:
    return contract.expected(x.what, x.dtype, x.rounded_as, x.exact, x.dense, x.saved)


def test_the_reference_agrees_on_caches() -> None:
    lengths = set[int]()
    for seed, question, found in fit(Wanted(cache_share=1.0, most_scores=20_000), 30):
        lengths.update(question.cache.lengths)
        for b, length in enumerate(question.cache.lengths):
            kept = {"q": None, "k": length, "v": length}
            alone = {name: getattr(question, name).values[b : b + 1, :, :n] for name, n in kept.items()}
            call = called(replace(question, **{name: Given(x, question.dtype) for name, x in alone.items()}))
            spec = replace(call.spec, positions=Positions(first_batch=b))
            done = reference.forward(spec, call.q, call.k, call.v, dtype=contract.exact(question.dtype))
            for what, values in contract.forward_results(done).items():
                assert same(found.results[what].exact[b : b + 1], values, 1e-6), f"{what} of seed {seed}"
    assert len(lengths) > 5


def test_the_linear_reference_agrees() -> None:
    """The judge's matrix and its gradients, with the reference's, and with a state that takes a key at a time."""
    seen = Counter[str]()
    for seed, question, found in fit(Wanted(linear_share=1.0, backward_share=1.0), 80):
        problem, d_out, d_state = linear_problem(question)
        exact = contract.exact(question.dtype)
        with np.errstate(all="ignore"):
            expected = linear_contract.forward_results(linear_reference.recurrent(problem, exact))
            grads = linear_reference.backward(problem, d_out, d_state, exact)
        expected |= linear_contract.backward_results(grads)
        assert expected.keys() == found.results.keys(), seed
        for what, values in expected.items():
            got = found.results[what]
            limit = contract.expected(what, got.dtype, got.rounded_as, values, got.dense, got.saved).limit
            assert same(got.exact, values, limit), f"{what} of seed {seed}: {question.names}"
        seen.update((*expected, *question.names))
    assert {"d_decay", "d_initial kv", "packed", "all of a sequence"} <= seen.keys()


def linear_problem(question: LinearQuestion) -> tuple[Problem, Any, LinearState | None]:
    def state(parts: tuple[Given, ...] | None) -> LinearState | None:
        return None if parts is None else LinearState(*map(stored, parts))

    decay, (batch, _, n, _), heads = stored(question.decay), question.q.values.shape, question.k.values.shape[1]
    if decay is not None:
        decay = decay.astype(wide(question.dtype)) if decay.ndim == 0 else decay
        decay = np.broadcast_to(decay[:, None] if decay.ndim == 1 else decay, (batch, heads, n))
    lengths = None if question.lengths is None else np.array(question.lengths)
    spec = Linear(
        as_float(parse(question.feature)), question.causal, question.normalize, question.scale, lengths
    )  # fmt: skip
    q, k, v = (stored(given) for given in (question.q, question.k, question.v))
    return Problem(spec, q, k, v, decay, state(question.state)), stored(question.d_out), state(question.d_state)


# -- PyTorch's autograd -----------------------------------------------------------------------------------------------

SCORES = [  # and the mask that stands beside it
    ("30.0 * tanh(S / 30.0)", None),
    ("S - load(a0, H + 1) * abs(Q + (NK - NQ) - K)", "K <= Q + (NK - NQ)"),
    ("S + load(a1, H, Q - K)", "(K <= Q) | (K < 2)"),
    ("where(K <= Q, S * load(a1, H, K) + load(a0, K // 3), -inf)", None),
    ("S * S * 0.1 - exp(S * 0.3) / (2 + load(a0, Q + 1) * load(a0, Q + 1))", "(Q + K) % 3 != 1"),
    ("S + load(a1, HK + 1, load(a2, K + 1)) * load(a0, K + 1) / (NQ + 0.5)", "load(a2, K) > -1"),
    ("minimum(S, load(a0, K + 1)) + maximum(S * 0.5, load(a0, Q * 2) - 0.1) + log(abs(S) + 1.0)", "~(K == Q)"),
    ("S - load(a0, 7 - K % 4 - Q // -2) % 0.3", "load(a2, Q + 1) != load(a2, K)"),
    ("load(a0, minimum(Q, K)) * float(B + 1)", "K < NK - 1"),
]


@pytest.mark.parametrize(("text", "mask"), SCORES)
def test_autograd_agrees(text: str, mask: str | None) -> None:
    torch = pytest.importorskip("torch")
    rng, (batch, heads, heads_k, n_q, n_k) = np.random.default_rng(3), (2, 4, 2, 5, 6)
    inputs = (batch, heads, n_q, 3), (batch, heads_k, n_k, 3), (batch, heads_k, n_k, 4), (batch, heads, n_q, 4)
    values = [rng.standard_normal(x).astype(np.float32) for x in (*inputs, (batch, heads, n_q), (heads,), (7,), (4, 6))]
    taken = [Given(x.astype(np.float64), "float32", wants_gradient=True) for x in values]
    q, k, v, d_out, d_lse, sinks, a0, a1 = taken
    a2 = Given(rng.integers(0, 3, 6), "int64")
    question = Question(q, k, v, 0.5, mask, text, arrays=(a0, a1, a2), sinks=sinks, d_out=d_out, d_lse=d_lse)
    found = answer(question)
    assert found.unfit is None

    leaves = [torch.tensor(x.values, requires_grad=True) for x in (q, k, v, sinks, a0, a1)]
    tq, tk, tv, tsinks, t0, t1 = leaves
    tk, tv = (x.repeat_interleave(2, dim=1) for x in (tk, tv))
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    names: dict[str, Any] = {
        "B": b, "H": h, "HK": h // 2, "Q": torch.arange(n_q)[:, None], "K": torch.arange(n_k), "NQ": n_q, "NK": n_k,
        "S": 0.5 * tq @ tk.mT, "a0": t0, "a1": t1, "a2": torch.tensor(a2.values), "inf": torch.inf, **_torch(torch),
    }  # fmt: skip
    score = eval(text, names) + torch.zeros(batch, heads, n_q, n_k)
    if mask is not None:
        score = torch.where(eval(mask, names), score, -torch.inf)
    everything = torch.cat([score, tsinks[:, None, None].expand(batch, heads, n_q, 1)], dim=-1)
    lse, out = torch.logsumexp(everything, -1), torch.softmax(everything, -1)[..., :-1] @ tv
    (torch.sum(out * torch.tensor(d_out.values)) + torch.sum(lse * torch.tensor(d_lse.values))).backward()

    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    expected = dict(zip(("out", "lse", "d_q", "d_k", "d_v", "d_sinks"), (out, lse, *grads[:4]), strict=True))
    order = sorted((i for i, name in enumerate(("a0", "a1")) if name in text), key=lambda i: text.index(f"a{i}"))
    expected |= {f"d_array {i}": grads[4 + number] for i, number in enumerate(order)}
    assert expected.keys() == found.results.keys()
    for what, x in expected.items():
        assert np.allclose(found.results[what].exact, x.detach().numpy(), rtol=1e-10, atol=1e-12), what


def _torch(torch: Any) -> dict[str, Callable[..., Any]]:
    """Functions of the language, by PyTorch's."""

    def load(table: Any, *index: Any) -> Any:
        return table[tuple(torch.clamp(torch.as_tensor(i), 0, n - 1) for i, n in zip(index, table.shape, strict=True))]

    def floats(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *x: function(*(torch.as_tensor(a, dtype=torch.float64) for a in x))

    def either(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *x: function(*(torch.as_tensor(a) for a in x))

    return {
        "load": load, "float": lambda x: x.double(), "abs": torch.abs, "where": torch.where,
        "exp": floats(torch.exp), "log": floats(torch.log), "tanh": floats(torch.tanh),
        "minimum": either(torch.minimum), "maximum": either(torch.maximum),
    }  # fmt: skip


# -- rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "dtype"), [(to_float16, "float16"), (to_bfloat16, "bfloat16")])
def test_numbers_are_rounded_as_they_are_stored(ours: Callable[[Numbers], Numbers], dtype: str) -> None:
    """Around every number that the type has, and in the middle between two."""
    every = np.arange(2**16, dtype=np.uint16)
    bits = every.view(np.float16) if dtype == "float16" else every.view(arrays.BFLOAT16)
    numbers = arrays.widen(bits, np.float32)
    numbers = numbers[np.isfinite(numbers)]
    with np.errstate(over="ignore"):
        middle = ((numbers[:-1].astype(np.float64) + numbers[1:]) / 2).astype(np.float32)
        near = [f(x) for x in (numbers, middle) for f in (lambda x: x, lambda x: np.nextafter(x, np.float32(np.inf)),
                                                          lambda x: np.nextafter(x, np.float32(-np.inf)))]  # fmt: skip
        x = np.concatenate([*near, np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0, 65519.9, 65520.0, 3.4e38])])
        expected = arrays.widen(arrays.narrow(x, dtype), np.float32)
        found = ours(x)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found), np.signbit(expected) & ~np.isnan(x) | np.isnan(x) & np.signbit(found))


def test_expressions_are_off_by_no_more_than_their_bound() -> None:
    """Of the generator's texts, in float32: the bound holds, and mostly says something."""
    known, seen = 0, Counter[str]()
    bounded, plain = Bounded("float32"), Values(np.float32)
    for seed in range(300):
        question = draw(seed, Wanted(backward_share=0.0, most_scores=5_000))
        for text in (question.mask, question.score):
            if text is None or 0 in (*question.q.values.shape, *question.k.values.shape):
                continue
            walk = read(text, tuple(map(kind_of, question.arrays)))
            env = places(question, np.random.default_rng(seed))
            with np.errstate(all="ignore"):
                found = evaluate(walk, env, question.arrays, plain)
                exact = {**env, "S": (env["S"].astype(np.float64), 0.0)}
                for step, value, (true, error) in zip(
                    walk.steps, found, evaluate(walk, exact, question.arrays, bounded), strict=True
                ):
                    if step.kind == BOOL:
                        assert np.all((value == true) | error), f"{step.op} of seed {seed}: {text}"
                    else:
                        off = np.where(value == true, 0, np.abs(value - np.asarray(true, np.float64)))
                        good = (off <= error) | (error == np.inf)
                        assert np.all(good), f"{step.op} of seed {seed}: {text}"
                        known += step.kind == FLOAT and bool(np.all(error <= 1e-3 * (1 + np.abs(true))))
                    seen[step.op] += 1
    assert known > 500
    assert {"exp", "log", "tanh", "div", "mod", "floordiv", "where", "lt", "not", "load", "minimum"} <= seen.keys()


def places(question: Question, rng: np.random.Generator) -> dict[str, Any]:
    """Variables of a question, as of one dense sequence, and any S."""
    (batch, heads, n_q, _), (_, heads_k, n_k, _) = question.q.values.shape, question.k.values.shape
    q, k, h = np.arange(n_q)[:, None], np.arange(n_k), np.arange(heads)[:, None, None]
    return {
        "B": np.arange(batch)[:, None, None, None], "H": h, "HK": h // (heads // heads_k), "Q": q, "K": k,
        "NQ": np.int64(n_q), "NK": np.int64(n_k), "QP": q, "KP": k,
        "S": rng.standard_normal((batch, heads, n_q, n_k)).astype(np.float32),
    }  # fmt: skip


@pytest.mark.parametrize("linear_share", [0.0, 1.0])
def test_the_dense_computation_is_within_the_bound(linear_share: float) -> None:
    """It is a kernel like any other, but of float64, whose own error is not what it has."""
    looser: list[float] = []
    for seed, question, found in fit(Wanted(backward_share=0.7, linear_share=linear_share, most_scores=20_000)):
        for what, x in found.results.items() if question.dtype != "float64" else ():
            finite = np.isfinite(x.exact)
            off = np.abs(x.dense[finite].astype(np.float64) - x.exact[finite])
            assert x.bound.shape == x.exact.shape and np.all(off <= x.bound[finite]), f"{what} of seed {seed}"
            looser += [float(x.bound[finite].max() / off.max())] if off.size and off.max() > 0 else []
    assert np.median(looser) < 2000  # it says something


def test_results_beyond_their_type_say_nothing() -> None:
    for seed, _, found in fit(Wanted(backward_share=0.5), 40):
        for what, x in found.results.items():
            assert np.abs(x.exact[np.isfinite(x.exact)]).max(initial=0) < LARGEST[x.dtype], f"{what} of seed {seed}"
            assert not np.isnan(x.exact).any()


# -- plans ------------------------------------------------------------------------------------------------------------


def test_the_packages_plans_are_right() -> None:
    judged = 0
    for seed, question, _ in fit(Wanted(backward_share=0.0)):
        call = called(question)
        judged += plans.check(question, call.spec, call.shape, plans.tiles_for(question, seed))
    assert judged > SEEDS


def planned(live: str | None, told: str, n_q: int = 40, n_k: int = 50) -> tuple[Plan, Numbers]:
    """The package's plan of one mask, and where another holds."""
    q, k = np.arange(n_q)[:, None], np.arange(n_k)
    shape = Shape(1, 2, 2, n_q, n_k, 8, 8)
    seen = np.broadcast_to(eval(told, {"Q": q, "K": k, "H": np.arange(2)[:, None, None]}), (1, 2, n_q, n_k))
    return Plan(shape, Tile(8, 16), None if live is None else parse(live)), seen


@pytest.mark.parametrize(
    ("live", "told", "wrong"),
    [
        ("K <= Q", "K <= Q", None),
        ("K <= Q - 8", "K <= Q", "EMPTY, and has keys that count"),
        ("K <= Q + 16", "K <= Q", "FULL, and has keys that the mask hides"),
        (None, "K <= Q", "FULL, and has keys that the mask hides"),
        (None, "K == K + 0 * Q", None),
        ("K < 16", "(K < 16) | ((K == 40) & (Q == 39))", "EMPTY, and has keys that count .1 do"),
        ("K < 17", "(K < 17) & ((K > 0) | (Q > 0))", "FULL, and has keys that the mask hides .127 do"),
        ("(K <= Q) | (H == 1)", "K <= Q", "head 1 is FULL"),
        ("(K <= Q) & (H == 1)", "K <= Q", "head 0 is EMPTY"),
    ],
)
def test_a_wrong_plan_is_caught(live: str | None, told: str, wrong: str | None) -> None:
    plan, seen = planned(live, told)
    if wrong is None:
        plans.check_plan(plan, seen, seen)
        return
    with pytest.raises(plans.WrongPlan, match=wrong):
        plans.check_plan(plan, seen, seen)


def test_a_full_tile_may_have_scores_of_minus_infinity() -> None:
    """They are computed there, and hide their keys by themselves; a tile in which all keys do may be EMPTY."""
    plan, seen = planned(None, "K == K + 0 * Q")
    plans.check_plan(plan, seen & (np.arange(50) > 20), seen)
    late = planned("K > 20", "K > 20")
    plans.check_plan(late[0], late[1], seen)


def _with(runs: Runs, table: Any, more: int = 0) -> Runs:
    """Other runs; more: how many the first row has got."""
    offsets = runs.offsets + more * (np.arange(runs.offsets.shape[-1]) > 0)
    return Runs(table, np.minimum(offsets, len(table)))


@pytest.mark.parametrize("order", ["by_query", "by_key"])
@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda runs: _with(runs, runs.table[1:]), "EMPTY|other kinds|has the run"),
        (lambda runs: _with(runs, runs.table + np.array((1, 1, 0))), "EMPTY|has the run"),
        (lambda runs: _with(runs, np.maximum(runs.table, (0, 0, 2))), "FULL"),
        (lambda runs: _with(runs, np.concatenate([[(0, 99, 1)], runs.table[1:]])), "has the run"),
        (lambda runs: _with(runs, np.concatenate([[(0, 1, 0)], runs.table[1:]])), "has the run"),
        (lambda runs: _with(runs, np.concatenate([runs.table[:1], runs.table]), more=1), "has the run .* after"),
    ],
    ids=["left out", "moved", "full", "too long", "empty", "twice"],
)
def test_either_order_is_judged(order: str, change: Callable[[Runs], Runs], wrong: str) -> None:
    plan, seen = planned("(K <= Q) & (K > Q - 20)", "(K <= Q) & (K > Q - 20)")
    plan.__dict__[order] = change(getattr(plan, order))
    with pytest.raises(plans.WrongPlan, match=wrong):
        plans.check_plan(plan, seen, seen)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda kinds: kinds, None),
        (lambda kinds: kinds & 0b10_00, "has keys that count .*joined|leaves out|has the run"),
        (lambda kinds: np.where(kinds > 15, 0b10_10_10, 0b10_10), "the mask hides|leaves out"),
        (lambda kinds: np.where(kinds == 0b01_01, 0b01_00, kinds), "has keys that count .*joined|leaves out"),
        (lambda kinds: np.where(kinds > 0, 99, 0), "has the run"),
    ],
)
def test_warpgroups_that_share_keys_have_their_own_kinds(
    change: Callable[[Numbers], Numbers], wrong: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, seen = planned("(K <= Q) & (K > Q - 150)", "(K <= Q) & (K > Q - 150)", 300, 310)
    plan = Plan(plan.shape, Tile(64, 32), plan.live)
    runs = Plan.joined

    def joined(self: Plan, count: int, most_skipped: int) -> Runs:
        made = runs(self, count, most_skipped)
        return Runs(np.column_stack([made.table[:, :2], change(made.table[:, 2])]), made.offsets)

    monkeypatch.setattr(Plan, "joined", joined)
    if wrong is None:
        plans.check_plan(plan, seen, seen)
        return
    with pytest.raises(plans.WrongPlan, match=wrong):
        plans.check_plan(plan, seen, seen)


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_numpys_kernel_is_right() -> None:
    """By the contract's limits of the judge's answers; hardly a result needs the bound."""
    from tilewise.kernels.numpy import NumpyKernel

    results, lucky = 0, 0
    for seed, question, found in fit(Wanted(backward_share=0.5, cache_share=0.0, most_scores=20_000), 60):
        call = called(question)
        done: Partial = NumpyKernel().forward(call.spec, call.q, call.k, call.v)
        got = contract.forward_results(done)
        if question.d_out is not None:
            pulled = stored(question.d_out), stored(question.d_lse)
            got |= contract.backward_results(NumpyKernel().backward(call.spec, call.q, call.k, call.v, done, *pulled))
        assert got.keys() == found.results.keys()
        for what, x in found.results.items():
            e = contract.expected(what, x.dtype, x.rounded_as, x.exact, x.dense, x.saved)
            off = e.errors(got[what])
            results, lucky = results + 1, lucky + bool(off.max(initial=0) > e.limit)
            assert np.all(off <= np.maximum(e.limit, x.bound)), f"{what} of seed {seed}"
    assert results > 150 and lucky <= 0.05 * results
