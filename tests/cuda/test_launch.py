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
from tilewise import dispatch, expr, schedule, wire
from tilewise.dispatch import Unsupported
from tilewise.spec import Partial
from tilewise.validate import prepare

torch = pytest.importorskip("torch")
from tilewise.kernels.cuda import CudaKernel, launcher  # noqa: E402
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


def test_an_address_that_tma_does_not_take(fake_gpu: FakeGpu, checks: list[str]) -> None:
    q, k, v = _inputs(0, **HOPPER)
    odd = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    for x in (q, odd, q, odd):
        assert _close(tw.attention(x, k, v), _want([q, k, v]))
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
    tw.attention(*tensors)
    tensors[0].requires_grad_()
    out = tw.attention(*tensors)
    assert out.requires_grad
    assert _close(out, _want(tensors))
    with torch.no_grad():
        assert not tw.attention(*tensors).requires_grad
    with pytest.raises(Unsupported, match="are taken if named"):
        out.sum().backward()


BY_HOPPER = ["backward_sm90_rows", "backward_sm90", "backward_sm90_d_query"]


@pytest.mark.parametrize(
    ("kernel", "kind", "launched"),
    [
        ("cuda/tiled", TILED, ["tiled_d_query", "tiled_d_keys"]),
        ("cuda/tiled", HOPPER, ["tiled_d_query", "tiled_d_keys"]),
        ("cuda/forward_sm90", HOPPER, BY_HOPPER),
        ("cuda/unordered", HOPPER, BY_HOPPER),
    ],
)
def test_gradients(kernel: str, kind: dict[str, Any], launched: list[str], fake_gpu: FakeGpu) -> None:
    """Of heads that share keys, of rows that lie anyhow, of sinks, and of lse as well as of out."""
    _check_gradients(kernel, kind)
    assert fake_gpu.launched[-len(launched) :] == launched


def _check_gradients(kernel: str, kind: dict[str, Any], seed: int = 0) -> None:
    torch.manual_seed(seed)
    n, d, dtype = kind["n"], kind["d"], kind["dtype"]
    q, k, v = (torch.randn(1, n, heads, d).to(dtype).transpose(1, 2).requires_grad_() for heads in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=True)
    options = {"mask": tw.causal() & tw.window(30), "score": tw.softcap(2.0)}
    out, lse = tw.attention(q, k, v, sinks=sinks, **options, kernel=kernel, return_lse=True)
    d_out, d_lse = torch.randn(1, n, 4, d).to(dtype).transpose(1, 2), torch.randn(1, 4, n)
    found = torch.autograd.grad((out, lse), (q, k, v, sinks), (d_out, d_lse))
    plain = [x.detach().double().numpy() for x in (q, k, v, sinks, d_out, d_lse)]
    _, pullback = tw.attention_vjp(*plain[:3], sinks=plain[3], **options)
    want = pullback(plain[4], plain[5])
    for x, y in zip(found, (want.q, want.k, want.v, want.sinks), strict=True):
        off = np.abs(x.double().numpy() - y).max() / np.abs(y).max()
        assert off < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("kernel", ["cuda/tiled", "cuda/forward_sm90"])
def test_gradients_like_ones_before_are_only_launched(
    kernel: str, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[int] = []
    prepare_it = CudaKernel.prepared_backward

    def counted(self: CudaKernel, spec: Any, q: Any, *others: Any) -> Any:
        prepared.append(q.shape[2])
        return prepare_it(self, spec, q, *others)

    monkeypatch.setattr(CudaKernel, "prepared_backward", counted)
    for seed in range(3):
        _check_gradients(kernel, HOPPER, seed)
    _check_gradients(kernel, {**HOPPER, "n": 33})
    assert prepared == [HOPPER["n"], 33]


def test_gradients_repeat_only_where_the_same_arrays_must_be_copied(fake_gpu: FakeGpu) -> None:
    """One operand after the other begins where the copy engine cannot: what is copied lies otherwise than before."""
    line = json.dumps({"kernel": "cuda/forward_sm90", "scale": 0.125})
    torch.manual_seed(0)
    held, sizes = [torch.randn(72 * 3 * 2 * 64 + 8).bfloat16() for _ in range(4)], (1, 2, 72, 64)
    strides = (72 * 384, 64, 384, 1)  # as slices of one tensor for all three lie
    for moved in (None, 0, 3, 1):
        q, k, v, d_out = (x.as_strided(sizes, strides, 4 if i == moved else 0) for i, x in enumerate(held))
        plain = [x.double().numpy() for x in (q, k, v, d_out)]
        saved = dispatch.kernel("cuda/tiled").forward(prepare(q, k, v).spec, q, k, v)
        found = operator.attention_backward(q, k, v, [], None, line, saved.out, saved.lse, d_out, None, [])
        _, pullback = tw.attention_vjp(*plain[:3])
        want = pullback(plain[3])
        for x, y in zip(found[:3], (want.q, want.k, want.v), strict=True):
            assert np.abs(x.double().numpy() - y).max() < 2e-2 * np.abs(y).max(), moved


def test_gradients_of_arrays_that_tma_does_not_take(fake_gpu: FakeGpu) -> None:
    """They are copied: rows that begin anywhere, and the gradient of a sum, which is one number at every place."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 70, 33).bfloat16()[..., 1:], *(torch.randn(1, 2, 70, 32).bfloat16() for _ in range(2))
    spec, kernels = prepare(q, k, v).spec, [dispatch.kernel(f"cuda/{rung}") for rung in ("forward_sm90", "tiled")]
    saved = kernels[1].forward(spec, q, k, v)
    d_out = torch.ones(1).bfloat16().expand(saved.out.shape)
    by_hopper, by_tiles = (kernel.backward(spec, q, k, v, saved, d_out) for kernel in kernels)
    assert fake_gpu.launched[1:4] == BY_HOPPER
    for x, y in zip((by_hopper.q, by_hopper.k, by_hopper.v), (by_tiles.q, by_tiles.k, by_tiles.v), strict=True):
        assert float((x - y).abs().max()) < 2e-2 * float(y.abs().max()) + 1e-3


@pytest.mark.parametrize("wider", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["cuda/tiled", "cuda/forward_sm90"])
def test_a_wider_gradient_makes_all_wider(name: str, wider: Any, fake_gpu: FakeGpu) -> None:
    q, k, v = (torch.ones(1, 1, n, 8, dtype=torch.float16) for n in (2, 1, 1))
    call, kernel = prepare(q, k, v), dispatch.kernel(name)
    d_out = torch.tensor([100_000.5, -100_000.0], dtype=wider)[:, None].expand(1, 1, 2, 8)
    grads = kernel.backward(call.spec, q, k, v, kernel.forward(call.spec, q, k, v), d_out)
    assert grads.v.dtype == torch.float16 and bool((grads.v == 0.5).all())


def test_gradients_of_no_queries_and_of_no_keys(fake_gpu: FakeGpu) -> None:
    for n_q, n_k in ((0, 5), (5, 0)):
        q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (n_q, n_k, n_k))
        found = torch.autograd.grad(tw.attention(q, k, v, kernel="cuda/tiled").sum(), (q, k, v))
        assert all(bool((x == 0).all()) for x in found)


def test_no_order_is_not_batch_invariant(fake_gpu: FakeGpu) -> None:
    q, k, v = (torch.randn(1, 2, 8, 16).bfloat16() for _ in range(3))
    call = prepare(q, k, v, batch_invariant=True)
    shape = replace(call.shape, backward=True)
    with pytest.raises(Unsupported, match="in any order, and batch_invariant wants one"):
        dispatch.resolve("cuda/unordered", call.spec, shape)
    assert dispatch.resolve("cuda/forward_sm90", call.spec, shape).name == "cuda/forward_sm90"


@pytest.mark.parametrize(("batch", "n_q", "n_k"), [(0, 5, 5), (1, 0, 5), (1, 5, 0)])
def test_hoppers_gradients_of_nothing(batch: int, n_q: int, n_k: int, fake_gpu: FakeGpu) -> None:
    q, k, v, d_out = (torch.randn(batch, 2, n, 16).bfloat16() for n in (n_q, n_k, n_k, n_q))
    spec, kernel = prepare(q, k, v).spec, dispatch.kernel("cuda/forward_sm90")
    saved = Partial(torch.zeros_like(q), torch.full((batch, 2, n_q), -torch.inf))
    grads = kernel.backward(spec, q, k, v, saved, d_out)
    for x, y in zip((q, k, v), (grads.q, grads.k, grads.v), strict=True):
        assert x.shape == y.shape and bool((y == 0).all())


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
