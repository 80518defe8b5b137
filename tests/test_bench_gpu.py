"""The GPU suite without a GPU: its cases, its judgement and its method."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests import fake_stage as fakes  # noqa: E402
from tilewise.bench.gpu import cases, contestants, module, projection, suite, targets, timing  # noqa: E402
from tilewise.bench.gpu.cases import VARIANTS, Case  # noqa: E402
from tilewise.bench.gpu.contestants import CUDNN, DENSE, EFFICIENT, FLASH, FLEX, NO_GRAD, SDPA, Entry  # noqa: E402
from tilewise.bench.gpu.judge import ALLOWED, Expected, Gradients  # noqa: E402
from tilewise.bench.gpu.timing import Settings  # noqa: E402
from tilewise.cli import bench as command  # noqa: E402

ROOT = Path(__file__).parent.parent
FAST = Settings(rounds=2, host_calls=3)
SMALL = {"tokens": 64, "hidden": 32}


def small(variant: str, **options: Any) -> Case:
    return Case(variant, 32, 8, **SMALL, **options)


def measure(case: Case, *who: str, host: bool = False) -> dict[str, dict[str, Any]]:
    found = fakes.FakeStage(FAST).measure(case, who, host)
    return {r["contestant"].rpartition(":")[2]: r for r in found}


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    """A module of these attributes, and the packages around it."""
    module = type(sys)(name)
    vars(module).update(attributes)
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), module)


# -- cases ------------------------------------------------------------------------------------------------------------


def test_the_sections_are_what_the_command_offers() -> None:
    assert tuple(suite.SECTIONS) == command.GPU_SECTIONS
    assert set(targets._CHECKS) == set(suite.SECTIONS) - {"ladder", "units", "scaling"}
    assert {name: len(section.cases) for name, section in suite.SECTIONS.items()} == {
        "forward": 36, "stress": 32, "variants": 24, "gqa": 10, "varlen": 16, "ladder": 4,
        "units": 7, "triton": 18, "backward": 22, "gradients": 36, "learned": 4, "cute": 38, "cute_gradients": 36,
        "scaling": 8, "projection": 13, "tilelang": 12, "tilelang_gradients": 12, "step": 8, "decode": 3, "launch": 1,
        "first": 19,
    }  # fmt: skip
    for section in suite.SECTIONS.values():
        assert len(set(section.cases)) == len(section.cases) and section.quick


def test_every_case_has_as_many_tokens() -> None:
    for section in suite.SECTIONS.values():
        for case in section.cases:
            assert case.batch * case.n == case.tokens == sum(case.lengths)
            assert case.heads * case.d == case.hidden and case.heads_k * case.group == case.heads


def test_operations_are_counted_as_papers_do() -> None:
    full, causal = (Case(variant, 4096, 128) for variant in ("full", "causal"))
    assert full.flops == 4 * 4 * 16 * 4096**2 * 128 and causal.flops == full.flops / 2
    assert Case("full", 4096, 128, group=8).flops == full.flops


@pytest.mark.parametrize("variant", ["window 256", "document"])
def test_visible_pairs_are_those_of_the_mask(variant: str) -> None:
    case = Case(variant, 600, 8, tokens=600, hidden=8)
    at, made = torch.arange(600), VARIANTS[variant]
    seen = made.mask(cases.draw(case, 0, "cpu").extras)(0, 0, at[:, None], at)
    assert made.pairs(600) == int(seen.sum())


def test_calls_take_turns_on_inputs_that_no_cache_holds() -> None:
    case = small("full")
    assert len(cases.sets(case, "cpu", beyond=0)) == 2
    one = 3 * 2 * 64 * 32
    made = cases.sets(case, "cpu", beyond=3 * one)
    assert len(cases.sets(case, "cpu")) == cases.MOST_SETS
    assert len(made) == 3 and not torch.equal(made[0].q, made[1].q)
    assert timing.in_order(["a", "b"], 3) == ["a", "b", "a"]  # the first set, which is judged, comes last


def test_hard_inputs_are_hard() -> None:
    normal, falling, rising, x64 = (
        cases.draw(Case("full", 64, 8, inputs=inputs, tokens=64, hidden=8), 0, "cpu")
        for inputs in ("normal", "falling", "rising", "x64")
    )
    assert torch.equal(x64.q @ x64.k.mT, 64 * (normal.q @ normal.k.mT))
    for hard, begin, end in ((falling, 12.0, 0.02), (rising, 0.02, 12.0)):
        scale = (hard.k / normal.k).float()[0, 0].median(-1).values
        assert scale[0] == pytest.approx(begin, rel=0.02) and scale[-1] == pytest.approx(end, rel=0.02)


# -- judgement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("group", [1, 4])
def test_ours_is_what_the_peers_functions_say(variant: str, group: int) -> None:
    """Wide enough for windows to hide something."""
    case = Case(variant, 1152, 16, group, tokens=1152, hidden=64)
    found = measure(case, "tilewise cpu", "tests.fake_stage:right")
    assert {r["status"] for r in found.values()} == {"ok"}, found
    assert all(r["error"] < ALLOWED / 4 for r in found.values())


@pytest.mark.parametrize("variant", ["causal", "window 256", "document", "alibi", "softcap", "bias"])
def test_flex_attention_says_the_same(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = Case(variant, 384, 16, tokens=384, hidden=64)
    inputs = cases.draw(case, 0, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.flex_attention._warn_once", lambda *args, **options: None, raising=False)
        entry = contestants.find(FLEX).enter(case, [inputs])
        out = entry.calls[0]()
    assert Expected.of(case, inputs).error(entry.read(out)) < ALLOWED / 4


@pytest.mark.parametrize("variant", ["full", "causal", "bias"])
def test_gradients_are_judged(variant: str) -> None:
    """Those of the CPU engine, of PyTorch's autograd, and a tenth too large."""
    case = Case(variant, 96, 16, tokens=192, hidden=64, backward=True)
    found = measure(case, "tilewise cpu", "tests.fake_stage:right", "tests.fake_stage:off")
    assert {name: r["status"] for name, r in found.items()} == {"tilewise cpu": "ok", "right": "ok", "off": "wrong"}
    assert found["right"]["error"] < ALLOWED / 2
    assert case.flops == 2.5 * replace(case, backward=False).flops


@pytest.mark.parametrize("variant", ["full", "causal"])
def test_a_step_of_a_module_is_judged(variant: str) -> None:
    """Ours beside the same one on PyTorch's attention, whose gradients of x and of both weights are expected."""
    case = Case(variant, 96, 16, tokens=192, hidden=64, step=True)
    inputs = cases.draw(case, 0, "cpu")
    expected = module.Expected.of(case, inputs)
    for steps in (module.ours(case, [inputs]), module.on_sdpa(case, [inputs])):
        found = steps[0]()
        assert [x.shape for x in found] == [(2, 96, 64), (192, 64), (64, 64)]
        assert expected.error(found) < ALLOWED
        assert expected.error((*found[:2], 1.1 * found[2])) > ALLOWED
        assert expected.error((*found[:2], float("nan") * found[2])) == float("inf")
    assert case.flops == 3.5 * replace(case, step=False).flops + 3 * 2 * 192 * 4 * 64**2
    record = measure(case, contestants.OUR_MODULE)[contestants.OUR_MODULE]
    assert record["status"] == "ok" and record["step"]


def test_a_projection_is_judged() -> None:
    """Of few queries over more keys: ours and PyTorch's attention, each with a product behind it; a tenth too large."""
    case = Case("full", 96, 16, tokens=192, hidden=64, queries=7, model=40)
    inputs = cases.draw(case, 0, "cpu")
    expected = projection.Expected.of(case, inputs)
    y = projection.one_by_one(case, [inputs], torch.nn.functional.scaled_dot_product_attention)[0]()
    assert y.shape == (2, 7, 40) and expected.error(y) < ALLOWED
    assert expected.error(1.1 * y) > ALLOWED and expected.error(float("nan") * y) == float("inf")
    assert case.flops == replace(case, model=0).flops + 2 * 2 * 7 * 64 * 40
    found = measure(case, "tilewise cpu + matmul", contestants.SDPA_PRODUCT, "tilewise cute projection")
    assert [r["status"] for r in found.values()][:2] == ["ok", "ok"]
    refused = found["tilewise cute projection"]
    assert refused["ours"] and "cute cannot project this call's output" in refused["reason"]
    assert not found["tilewise cpu + matmul"]["ours"]


def test_what_is_asked_of_a_projection_and_of_scales() -> None:
    sections = suite.SECTIONS
    asked = sections["projection"].who("cuda", sections["projection"].cases[0])
    assert asked == ["tilewise cute projection", "tilewise cuda + matmul", "torch sdpa + matmul"]
    asked = sections["scaling"].who("cuda", sections["scaling"].cases[0])
    assert asked == ["tilewise cute/basic", "tilewise cute/scaled_q", "tilewise cute/scaled_k"]


def test_float32_is_judged_more_finely_than_it_computes() -> None:
    case = Case("full", 96, 16, tokens=192, hidden=64, dtype="float32")
    record = measure(case, "tilewise cpu")["tilewise cpu"]
    assert record["dtype"] == "float32" and 1e-9 < record["error"] < 1e-6


def test_the_gradient_of_a_bias_is_a_sum_over_all_heads() -> None:
    case = Case("bias", 96, 16, tokens=192, hidden=64, backward=True)
    inputs = cases.draw(case, 0, "cpu")
    *others, d_bias = torch.autograd.grad(fakes.dense(case, inputs), inputs.wanted, inputs.d_out)
    expected = Gradients.of(case, inputs)
    assert expected.error((*others, d_bias)) < ALLOWED
    assert expected.error((*others, 1.1 * d_bias)) > ALLOWED
    assert expected.error((*others, d_bias * float("nan"))) == float("inf")


def test_decoding_reads_a_cache() -> None:
    """The CPU engine's, with pages and without, beside standard attention of the last query."""
    case = Case("full", 192, 16, group=2, tokens=384, hidden=64, queries=1)
    found = measure(case, "tilewise cpu", "tilewise cpu paged", "tests.fake_stage:right", "tests.fake_stage:off")
    statuses = {name: r["status"] for name, r in found.items()}
    assert statuses == {"tilewise cpu": "ok", "tilewise cpu paged": "ok", "right": "ok", "off": "wrong"}
    assert case.read_bytes == 2 * 2 * 2 * 192 * 16 * 2
    assert case.flops == 4 * 16 * 4 * 192 * 2
    assert all(r["gbs"] == pytest.approx(case.read_bytes / r["median_ms"] / 1e6) for r in found.values())


def test_a_bias_gradient_has_peers_of_its_own() -> None:
    section = suite.SECTIONS["backward"]
    biased = next(case for case in section.cases if case.variant == "bias")
    assert section.who("cuda", biased) == ["tilewise triton", FLEX, EFFICIENT]
    assert section.who("cuda", replace(biased, variant="full")) == ["tilewise triton", FLEX, CUDNN]
    cute, ours = suite.SECTIONS["cute"], "tilewise cute/forward_sm90"
    assert {case.variant: cute.who("cuda", case) for case in cute.cases} == {
        "full": [ours, FLASH], "causal": [ours, FLASH], "bias": [ours, FLEX],
    }  # fmt: skip
    assert suite.SECTIONS["learned"].who("cuda", biased) == ["tilewise cuda/forward_sm90", FLEX, EFFICIENT]


def test_a_rung_that_is_not_there_is_missing() -> None:
    (reason,) = fakes.FakeStage(FAST).missing(["tilewise cuda/steam"]).values()
    assert reason == "there is no kernel 'cuda/steam'"


def test_wrong_failing_and_lazy_contestants_are_shown_as_such() -> None:
    who = ("right", "off", "lazy", "failing", "tiring")
    found = measure(small("causal"), "tilewise cpu", *(f"tests.fake_stage:{name}" for name in who))
    assert {name: r["status"] for name, r in found.items()} == {
        "tilewise cpu": "ok", "right": "ok", "off": "wrong", "lazy": "wrong", "failing": "failed", "tiring": "failed",
    }  # fmt: skip
    assert found["off"]["error"] == pytest.approx(0.1, rel=0.1) and found["lazy"]["error"] is None
    assert found["failing"]["reason"] == "RuntimeError: it broke at <path>"
    assert found["failing"]["median_ms"] is None and found["tiring"]["reason"] == "RuntimeError: tired"
    assert list(found["tilewise cpu"]["ratios"]) == ["tests.fake_stage:right"]  # neither a wrong nor a failed peer


def test_records_have_the_same_fields_and_go_into_json() -> None:
    found = measure(small("causal"), "tilewise cpu", "tests.fake_stage:right", "tests.fake_stage:failing")
    assert len({tuple(r) for r in found.values()}) == 1
    json.dumps(list(found.values()), allow_nan=False)
    ours, peer, _ = found.values()
    assert len(ours["rounds_ms"]) == 2 and ours["calls"] == 3 and ours["spread"] >= 0
    assert ours["median_ms"] == pytest.approx(sum(ours["rounds_ms"]) / 2)
    assert ours["tflops"] == pytest.approx(ours["flops"] / ours["median_ms"] / 1e9)
    assert ours["ratio"] == pytest.approx(peer["median_ms"] / ours["median_ms"]) and peer["ratio"] is None


def test_packed_sequences_stand_beside_the_same_batch() -> None:
    equal = measure(small("causal", packed="equal"), "tilewise cpu", "tilewise cpu" + DENSE)
    assert {r["status"] for r in equal.values()} == {"ok"}
    assert list(equal["tilewise cpu"]["ratios"]) == ["tilewise cpu" + DENSE]
    case = Case("causal", 8, 8, packed="ragged", **SMALL)
    assert len(case.lengths) == 8 and len(set(case.lengths)) > 1
    ragged = measure(case, "tilewise cpu", "tilewise cpu" + DENSE)
    assert [r["status"] for r in ragged.values()] == ["ok", "cannot express"]


def test_the_host_clock_counts_no_operations() -> None:
    found = measure(small("causal"), "tilewise cpu", "tilewise cpu" + NO_GRAD, SDPA, host=True)
    assert all(r["how"] == "host" and r["tflops"] is None and r["median_ms"] > 0 for r in found.values())
    assert [r["ours"] for r in found.values()] == [True, True, False]


def test_without_gradients_means_that() -> None:
    inputs = cases.draw(small("full"), 0, "cpu")
    inputs.q.requires_grad_()
    entry = contestants.find("tilewise cpu" + NO_GRAD).enter(small("full"), [inputs])
    with entry.around():
        assert not entry.calls[0]().requires_grad


# -- method -----------------------------------------------------------------------------------------------------------


def test_rounds_begin_with_another_contestant_each_time() -> None:
    order: list[str] = []

    def turn(name: str) -> Callable[[], float]:
        def play() -> float:
            order.append(name)
            if name == "c" and order.count("c") == 2:
                raise RuntimeError("tired")
            return float(len(order))

        return play

    seconds, failed = timing.rounds({name: turn(name) for name in "abc"}, 3)
    assert "".join(order) == "abcacbab" and list(failed) == ["c"]
    assert seconds["a"] == [1.0, 4.0, 7.0]
    assert timing.rounds({}, 3) == ({}, {})


class FakeCuda:
    """Counts what a clock does: a call takes 2 ms, a replay as long as the calls it has captured."""

    def __init__(self, capture: bool = True) -> None:
        self.now, self.asked, self.capture, self.capturing = 0.0, [], capture, False  # type: ignore[var-annotated]
        self.captured = 0

    def call(self) -> str:
        if self.capturing:
            if not self.capture:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.captured += 1
        else:
            self.now += 2.0
        return "out"

    def synchronize(self) -> None:
        self.asked.append("sync")

    def _sleep(self, cycles: int) -> None:
        self.asked.append("sleep")
        self.now += 100.0

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        return FakeEvent(self)

    def CUDAGraph(self) -> Any:  # noqa: N802
        self.captured = 0
        return self

    def replay(self) -> None:
        self.now += 2.0 * self.captured

    def graph(self, graph: Any) -> Any:
        return self

    def current_stream(self) -> str:
        return "the caller's"

    def stream(self, stream: str) -> Any:
        self.asked.append(stream)
        return nullcontext()

    def __enter__(self) -> None:
        self.capturing = True

    def __exit__(self, *error: object) -> None:
        self.capturing = False


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.at = cuda, 0.0

    def record(self) -> None:
        self.at = self.cuda.now

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


@pytest.mark.parametrize(("capture", "how"), [(True, "graph"), (False, "in a row")])
def test_the_gpu_clock_times_calls_and_nothing_else(capture: bool, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sleep that hides the host's work is over before the clock starts; both ways give the time of a call."""
    cuda = FakeCuda(capture)
    monkeypatch.setattr(torch, "cuda", cuda)
    clock = timing.GpuClock(Settings(chunk=0.01, warm=0.02, timed=0.02))
    loop = clock.loop(Entry([cuda.call, cuda.call]))
    assert (loop.how, loop.calls, loop.run()) == (how, 5, "out")
    assert loop.takes == pytest.approx(0.01)
    assert clock.turn(loop) == pytest.approx(0.002)
    assert cuda.asked.count("sleep") == 1 + 1 + 2  # pace, the loop's length, two timed runs
    assert cuda.asked.count("the caller's") == 1


@pytest.mark.parametrize(("pace", "count"), [(1e-5, 20), (1e-3, 4), (5e-3, 2), (0.5, 1)])
def test_short_calls_are_many_and_take_turns(pace: float, count: int) -> None:
    assert timing.GpuClock(Settings())._count(pace) == count
