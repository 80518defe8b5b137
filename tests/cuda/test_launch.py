"""Calls that are repeated: prepared once, launched on other arrays, with nothing stale. On the simulator."""

from __future__ import annotations

import gc
import json
import logging
import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.cuda.fake_gpu import FakeGpu
from tests.cuda.test_ops import needs_compiler
from tilewise import expr, schedule, validate, wire
from tilewise.dispatch import Unsupported

torch = pytest.importorskip("torch")
from tilewise.kernels.cuda import launcher  # noqa: E402
from tilewise.pytorch import graphs, operator, repeat  # noqa: E402

pytestmark = needs_compiler

TILED = {"n": 40, "d": 16, "dtype": torch.float32}
HOPPER = {"n": 72, "d": 64, "dtype": torch.bfloat16}  # what forward_sm90 takes
KINDS = pytest.mark.parametrize("kind", [TILED, HOPPER], ids=["tiled", "forward_sm90"])


def _inputs(seed: int, n: int, d: int, dtype: Any, batch: int = 1, heads: int = 2) -> list[Any]:
    torch.manual_seed(seed)
    return [torch.randn(batch, heads, n, d).to(dtype) for _ in range(3)]


def _want(tensors: list[Any], **options: Any) -> Any:
    q, k, v = (x.detach().float().numpy() for x in tensors)
    return torch.from_numpy(tw.attention(q, k, v, **options))


def _close(got: Any, want: Any) -> bool:
    return bool((got.detach().float() - want).abs().max() < (1e-5 if got.dtype == torch.float32 else 2e-2))


@pytest.fixture
def checks(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for each call that was checked from the start."""
    made: list[str] = []
    real = repeat.make_known
    monkeypatch.setattr(repeat, "make_known", lambda *call: (made.append(call[0].line), real(*call))[1])
    return made


# -- nothing stale ----------------------------------------------------------------------------------------------------


@KINDS
def test_other_memory_the_second_time(fake_gpu: FakeGpu, checks: list[str], kind: Any) -> None:
    held = []  # so that no tensor gets the address of one before
    for seed in range(3):
        tensors = _inputs(seed, **kind)
        held.append(tensors)
        assert _close(tw.attention(*tensors, causal=True), _want(tensors, causal=True))
    assert len(checks) == 1
    assert len(fake_gpu.loaded) == 1
    assert fake_gpu.launched == ["tiled" if kind is TILED else "forward_sm90"] * 3


@pytest.mark.parametrize("kind", [HOPPER, {**HOPPER, "d": 20}], ids=["forward_sm90", "tiled"])
def test_an_out_that_is_not_rounded(fake_gpu: FakeGpu, kind: Any) -> None:
    """Ready launches of the same call with and without it: each has an out of its own type."""
    tensors = _inputs(0, **kind)
    spec = validate.prepare(*tensors, causal=True).spec
    lines = [wire.encode(replace(spec, wide_out=wide), "cuda")[0] for wide in (True, False)]
    for _ in range(2):
        (wide, _), (out, _) = (operator.attention(*tensors, [], None, line) for line in lines)
        assert (wide.dtype, out.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(wide.bfloat16(), out)
    assert len(set(fake_gpu.launched)) == 1
    assert len(fake_gpu.launched) == 4
    faked = torch.ops.tilewise.attention(*(x.to("meta") for x in tensors), [], None, lines[0])
    assert (faked[0].dtype, faked[0].shape) == (wide.dtype, wide.shape)


def test_an_address_that_tma_does_not_take(fake_gpu: FakeGpu, checks: list[str]) -> None:
    """The system that was named picks another kernel of its own; `auto` would take another system (test_choice.py)."""
    q, k, v = _inputs(0, **HOPPER)
    odd = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    for x in (q, odd, q, odd):
        assert _close(tw.attention(x, k, v, kernel="cuda"), _want([q, k, v]))
    assert fake_gpu.launched == ["forward_sm90", "tiled"] * 2
    assert len(checks) == 2


def test_other_strides(fake_gpu: FakeGpu) -> None:
    q, k, v = _inputs(0, **TILED)
    beside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for tensors in ([q, k, v], beside, [q, beside[1], v], [q, k, v]):
        got = tw.attention(*tensors)
        assert _close(got, _want([q, k, v]))
        assert got.stride() == tensors[0].stride()


def test_values_of_lengths(checks: list[str]) -> None:
    """They are part of a call, be it the same array."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in _inputs(0, **TILED))
    plain = [x.numpy() for x in (q, k, v)]
    for lengths in (np.array([0, 10, 40]), torch.tensor([0, 10, 40])):
        for middle in (10, 25, 10):
            lengths[1] = middle
            want = tw.attention_varlen(*plain, [0, middle, 40], [0, middle, 40], causal=True)
            assert _close(tw.attention_varlen(q, k, v, lengths, lengths, causal=True), torch.from_numpy(want))
    assert len(checks) == 2, "what arrays hold counts, not which library they are of"
    with pytest.raises(ValueError, match="rise from 0 to 40"):
        lengths[1] = 41
        tw.attention_varlen(q, k, v, lengths, lengths, causal=True)


@KINDS
def test_arrays_that_change_in_place(kind: dict[str, Any], checks: list[str]) -> None:
    """On Hopper masks are looked at before the kernel runs, and a bias comes by tiles."""
    tensors, n = _inputs(0, **kind), kind["n"]
    ids, mask = torch.zeros(n, dtype=torch.int32), torch.ones(n, n) > 0
    bias, sinks = torch.zeros(n, n), torch.zeros(2)
    variants: list[Any] = [
        lambda a: {"mask": tw.document(a(ids))}, lambda a: {"mask": a(mask)}, lambda a: {"mask": a(bias)},
        lambda a: {"score": tw.bias(a(bias))}, lambda a: {"sinks": a(sinks)},
        lambda a: {"mask": tw.document(a(ids)), "score": tw.alibi(2) >> tw.bias(a(bias))},
    ]  # fmt: skip
    for variant in variants:
        got = tw.attention(*tensors, **variant(lambda x: x))
        assert _close(got, _want(tensors, **variant(lambda x: x.numpy())))
    ids[20:], mask[:, 7:], bias[3:], sinks[:] = 1, False, 2.0, 3.0
    for variant in variants:
        got = tw.attention(*tensors, **variant(lambda x: x))
        assert _close(got, _want(tensors, **variant(lambda x: x.numpy())))
    assert len(checks) == len(variants)


def test_which_array_is_read_where(checks: list[str]) -> None:
    """Two loads of one array and loads of two are different kernels."""
    tensors = _inputs(0, **TILED)
    a, b = (torch.arange(40, dtype=torch.int32) // n for n in (7, 11))
    for ids in ((a, a), (a, b), (b, b), (b, a)):
        want = _want(tensors, mask=tw.document(*(x.numpy() for x in ids)))
        assert _close(tw.attention(*tensors, mask=tw.document(*ids)), want)
    assert len(checks) == 2
    for x in (a, b):
        want = _want(tensors, mask=tw.document(a.numpy(), b.numpy()), score=_rising(x.numpy()))
        assert _close(tw.attention(*tensors, mask=tw.document(a, b), score=_rising(x)), want)
    assert len(checks) == 4


def _rising(x: Any) -> tw.Expr:
    return tw.S + 0.1 * tw.load(x, tw.K)


def test_expressions_that_come_and_go(fake_gpu: FakeGpu) -> None:
    """A key has an expression's id, which must not become another's: the expression stays as long as the key."""
    tensors = _inputs(0, **TILED)
    mask = tw.window(31, 17)  # as no other test has it
    stays = weakref.ref(mask)
    tw.attention(*tensors, mask=mask)
    del mask
    for cached in (expr._hold, wire._template, wire._line):
        cached.cache_clear()
    schedule._cache.clear()
    operator._recognised.clear()
    gc.collect()
    assert stays() is not None
    repeat.known._made.clear()
    gc.collect()
    assert stays() is None


def test_a_new_array_leaves_when_its_caller_lets_go(fake_gpu: FakeGpu) -> None:
    tensors = _inputs(0, **TILED)
    bias = torch.zeros(40, 40)
    tw.attention(*tensors, score=tw.bias(bias))
    gone = weakref.ref(bias)
    del bias
    gc.collect()
    assert gone() is None


@KINDS
def test_threads_that_call_at_once(fake_gpu: FakeGpu, kind: Any) -> None:
    calls = [_inputs(seed, **kind) for seed in range(4)]
    wants = [_want(tensors, causal=True) for tensors in calls]
    tw.attention(*calls[0], causal=True)
    wrong: list[int] = []

    def run(i: int) -> None:
        for _ in range(5):
            if not _close(tw.attention(*calls[i], causal=True), wants[i]):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(launcher._rooms) <= 4


# -- arguments that only look the same --------------------------------------------------------------------------------


def test_mistakes_are_told_after_a_call_that_was_right(fake_gpu: FakeGpu) -> None:
    q, k, v = _inputs(0, **TILED)
    tw.attention(q, k, v, causal=True, scale=1.0)
    with pytest.raises(TypeError, match="causal: expected True or False, got 1"):
        tw.attention(q, k, v, causal=1, scale=1.0)
    with pytest.raises(ValueError, match="scale: expected a finite number, got True"):
        tw.attention(q, k, v, causal=True, scale=True)
    with pytest.raises(TypeError, match="k: expected float32 as q is"):
        tw.attention(q, k.double(), v, causal=True, scale=1.0)
    with pytest.raises(TypeError, match="kernel: expected one of"):
        tw.attention(q, k, v, causal=True, scale=1.0, kernel=["cuda"])
    with pytest.raises(Unsupported, match="it multiplies float16 and bfloat16"):
        tw.attention(q, k, v, causal=True, scale=1.0, kernel="cuda/forward_sm90")


def test_tensors_that_are_not_what_their_memory_holds(fake_gpu: FakeGpu) -> None:
    q, k, v = _inputs(0, **TILED)
    tw.attention(q, k, v)
    negative = torch._neg_view(q)
    assert negative.data_ptr() == q.data_ptr()
    assert _close(tw.attention(negative, k, v), _want([-q, k, v]))


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_layouts_of_callers(fake_gpu: FakeGpu, rank: int) -> None:
    tensors = [x[0, 0] if rank == 2 else x[0] if rank == 3 else x for x in _inputs(0, **TILED)]
    for _ in range(2):
        out, lse = tw.attention(*tensors, causal=True, return_lse=True)
        want, want_lse = tw.attention(*(x.numpy() for x in tensors), causal=True, return_lse=True)
        assert out.shape == want.shape
        assert out.is_contiguous()
        assert _close(out, torch.from_numpy(want))
        assert _close(lse, torch.from_numpy(want_lse))


# -- gradients, modes -------------------------------------------------------------------------------------------------


def test_gradients_are_recorded(fake_gpu: FakeGpu) -> None:
    tensors = _inputs(0, **TILED)
    tw.attention(*tensors, kernel="cuda")
    tensors[0].requires_grad_()
    out = tw.attention(*tensors, kernel="cuda")
    assert out.requires_grad
    assert _close(out, _want(tensors))
    with torch.no_grad():
        assert not tw.attention(*tensors).requires_grad
    out.sum().backward()
    assert tensors[0].grad.shape == tensors[0].shape


def test_modes_see_the_operator(fake_gpu: FakeGpu) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        seen: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    tensors = _inputs(0, **TILED)
    tw.attention(*tensors)
    with Watch() as mode:
        tw.attention(*tensors)
    assert mode.seen == ["tilewise.attention.default"]
    mapped = torch.vmap(lambda *x: tw.attention(*x))(*(torch.stack([x, x]) for x in tensors))
    assert _close(mapped[1], _want(tensors))


def test_the_operator_repeats_too(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile calls."""
    line = json.dumps({"kernel": "cuda", "scale": 0.25, "score": "S + load(a0, Q, K)", "score arrays": [0]})
    bias = torch.randn(40, 40)
    held = []
    for seed in range(2):
        tensors = _inputs(seed, **TILED)
        held.append(tensors)
        out, _ = operator.attention(*tensors, [bias], None, line)
        assert _close(out, _want(tensors, score=tw.bias(bias.numpy())))
        monkeypatch.setattr(operator, "make_ready", None)  # once is enough


# -- streams, graphs, devices -----------------------------------------------------------------------------------------


def test_each_stream_has_a_count_of_its_own(fake_gpu: FakeGpu) -> None:
    tensors = _inputs(0, **HOPPER)
    for stream in (0, 7, 0, 7):
        fake_gpu.stream = stream
        tw.attention(*tensors)
    assert len(launcher._counts[-1].of_stream) == 2
    assert launcher._counts[-1].taken == 2
    assert fake_gpu.held == [0, 7], "the plan's memory is held once a stream"


def test_captured_launches_share_no_count(fake_gpu: FakeGpu) -> None:
    tensors = _inputs(0, **HOPPER)
    fake_gpu.capturing = True
    with pytest.raises(launcher.LaunchError, match="make it once first"):
        tw.attention(*tensors)
    fake_gpu.capturing = False
    tw.attention(*tensors)
    fake_gpu.capturing = True
    for _ in range(3):
        tw.attention(*tensors)
    assert launcher._counts[-1].taken == 4
    assert len(graphs.held) == 1


def test_the_device_of_the_arrays_is_made_current(fake_gpu: FakeGpu) -> None:
    tensors = _inputs(0, **TILED)
    tw.attention(*tensors)
    fake_gpu.made_current.clear()
    tw.attention(*tensors)
    assert fake_gpu.made_current == []
    fake_gpu.device = 3
    assert _close(tw.attention(*tensors), _want(tensors))
    assert fake_gpu.made_current == [-1]
    assert fake_gpu.device == 3


def test_a_launch_that_fails_leaves_nothing_behind(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _inputs(0, **HOPPER)
    tw.attention(*tensors)

    def refuse(*how: Any) -> None:
        raise launcher.LaunchError("no")

    with monkeypatch.context() as broken:
        broken.setattr(launcher.gpu, "launch", refuse)
        with pytest.raises(launcher.LaunchError):
            tw.attention(*_inputs(1, **HOPPER))
    assert _close(tw.attention(*tensors), _want(tensors))


def test_a_kernel_compiled_ahead_that_the_driver_refuses(
    fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is of a newer compiler: the kernel is compiled here."""
    caplog.set_level(logging.INFO, "tilewise")

    def load(code: bytes, entry: str) -> Any:
        if code == b"too new":
            raise launcher.LaunchError("loading a kernel: CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
        return fake_gpu.load(code, entry)

    monkeypatch.setattr(launcher.compiler, "prebuilt", lambda source, arch: b"too new")
    monkeypatch.setattr(launcher.gpu, "load", load)
    tensors = _inputs(0, **TILED)
    assert _close(tw.attention(*tensors), _want(tensors))
    assert "the prebuilt kernel 'tiled' is compiled anew: loading a kernel" in caplog.text


@KINDS
def test_what_a_variant_made_stays_for_a_graph(kind: dict[str, Any], fake_gpu: FakeGpu) -> None:
    """Slopes that nobody else holds: a replay may read them at any time."""
    tensors, score = _inputs(0, **kind), tw.alibi(2)
    tw.attention(*tensors, score=score)
    before = len(graphs.held)
    tw.attention(*tensors, score=score)
    assert len(graphs.held) == before
    fake_gpu.capturing = True
    tw.attention(*tensors, score=score)
    held = [x for x in graphs.held.values() if isinstance(x, repeat.Known)]
    assert [x.tolist() for x in held[0].operands if not isinstance(x, int)] == [[2**-4, 2**-8]]
