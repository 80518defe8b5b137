"""Backward passes on a GPU that is none: which kernels are launched, on which arrays, and when nothing else is done."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.cuda.fake_gpu import FakeGpu
from tests.cuda.test_launch import HOPPER, TILED
from tests.cuda.test_ops import needs_compiler
from tilewise import dispatch, reference
from tilewise.dispatch import Unsupported
from tilewise.schedule import Kind
from tilewise.spec import Partial, Tile
from tilewise.validate import prepare

torch = pytest.importorskip("torch")
from tilewise.kernels.cuda import CudaKernel  # noqa: E402
from tilewise.pytorch import operator  # noqa: E402

pytestmark = needs_compiler

BY_HOPPER = ["backward_sm90_rows", "backward_sm90"]


@pytest.mark.parametrize(
    ("kernel", "kind", "launched"),
    [
        ("cuda/tiled", TILED, ["tiled_d_query", "tiled_d_keys"]),
        ("cuda/tiled", HOPPER, ["tiled_d_query", "tiled_d_keys"]),
        ("cuda/forward_sm90", HOPPER, BY_HOPPER),
        (
            "cuda/forward_sm90",
            {**HOPPER, "d": 136},
            ["backward_sm90_rows", "backward_sm90_wide"],
        ),
        ("cuda/unordered", HOPPER, BY_HOPPER),
        ("cuda", TILED, ["tiled_d_query", "tiled_d_keys"]),
        ("cuda", HOPPER, BY_HOPPER),
        ("auto", HOPPER, BY_HOPPER),
    ],
)
def test_gradients(kernel: str, kind: dict[str, Any], launched: list[str], fake_gpu: FakeGpu) -> None:
    """Of heads that share keys, of rows that lie anyhow, of sinks, and of lse as well as of out."""
    _check_gradients(kernel, kind)
    assert fake_gpu.launched[-len(launched) :] == launched


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["cuda/forward_sm90", "cuda/tiled"])
def test_a_gradient_of_lse_of_any_type(kernel: str, dtype: Any, fake_gpu: FakeGpu) -> None:
    """As numbers that all types have are given, they are the same."""
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 2, 100, 64, dtype=torch.bfloat16) for _ in range(4))
    d_lse = torch.randint(-3, 4, (1, 2, 100)).float()
    _, pullback = tw.attention_vjp(q, k, v, kernel=kernel)
    wide, other = pullback(d_out, d_lse), pullback(d_out, d_lse.to(dtype))
    assert all(torch.equal(getattr(wide, name), getattr(other, name)) for name in "qkv")


def test_a_plan_that_leaves_out_scores_of_arrays_elsewhere(fake_gpu: FakeGpu) -> None:
    """What a bias holds is not known, so it cannot be that it masks: causal tiles are FULL, of all heads alike."""
    from tilewise.kernels.cuda import marshal
    from tilewise.kernels.cuda.backward_rungs import BACKWARD

    bias = torch.zeros(2, 4, 512, 512)
    q, k, v = (torch.zeros(2, 4, 512, 64, dtype=torch.bfloat16) for _ in range(3))
    call = prepare(q, k, v, causal=True, score=tw.bias(bias))
    for rung in BACKWARD:
        made = marshal.tables(call.spec, call.shape, Tile(64, 128), rung)
        kinds = made.numbers[made.runs_at :].reshape(-1, 3)[:, 2]
        assert made.plans == (1, 1) and (kinds == Kind.FULL).any()


def test_gradients_by_masks_of_arrays_that_the_host_has_not_seen(fake_gpu: FakeGpu) -> None:
    """They are looked at on the GPU, each time: the arrays may have changed."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 300, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    ids = torch.arange(300, dtype=torch.int32) // 130
    for step in (130, 70):
        ids.copy_(torch.arange(300, dtype=torch.int32) // step)
        mask = tw.causal() & tw.document(ids)
        out = tw.attention(q, k, v, mask=mask, kernel="cuda/forward_sm90")
        fake_gpu.launched.clear()
        found = torch.autograd.grad(out.sum(), (q, k, v))
        assert fake_gpu.launched == [BY_HOPPER[0], "refine_backward", "refine_backward", *BY_HOPPER[1:]]
        plain = [x.detach().double().numpy() for x in (q, k, v)]
        _, pullback = tw.attention_vjp(*plain, mask=tw.causal() & tw.document(ids.numpy().copy()))
        want = pullback(np.ones(plain[0].shape))
        for x, y in zip(found, (want.q, want.k, want.v), strict=True):
            assert np.abs(x.double().numpy() - y).max() < 2e-2 * np.abs(y).max()


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
def test_a_launch_stores_what_rounding_takes_from_out(kernel: str, fake_gpu: FakeGpu) -> None:
    """Where it is told, behind sinks. A backward pass that is ready for it reads it, wherever it is."""
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 2, 100, 64).bfloat16() for _ in range(4))
    call, system = prepare(12 * q, k, v, causal=True, sinks=torch.randn(2)), dispatch.kernel(kernel)
    spec, operands = replace(call.spec, keeps_remainder=True), (call.q, call.k, call.v)
    ready = system.prepared(spec, *operands)
    assert ready.keeps_remainder and not system.prepared(call.spec, *operands).keeps_remainder
    kept = system.forward(spec, *operands)
    saved = Partial(
        torch.full_like(kept.out, torch.nan), torch.empty_like(kept.lse), torch.full_like(kept.out, torch.nan)
    )
    ready.launch([x.data_ptr() for x in (*operands, *saved, spec.sinks, saved.remainder)])
    assert torch.equal(saved.out, kept.out) and torch.equal(saved.remainder, kept.remainder)
    want = reference.backward(call.spec, *operands, d_out).q
    errors = []
    for given in (kept, Partial(kept.out, kept.lse)):
        backward = system.prepared_backward(call.spec, *operands, given, d_out)
        other = replace(given, remainder=None if given.remainder is None else saved.remainder)
        grads = [backward.run(*operands, x, d_out, None, [], spec.sinks) for x in (given, other)]
        assert torch.equal(grads[0].q, grads[1].q) and torch.equal(grads[0].sinks, grads[1].sinks)
        errors.append(float(np.linalg.norm(grads[0].q.double().numpy() - want) / np.linalg.norm(want)))
    assert errors[0] < 3e-3 < errors[1]


def _learned(heads: int, n: int) -> list[Any]:
    """Slopes, a bias of keys, one of pairs that heads share, and a table of distances."""
    shapes = (heads,), (1, 1, 1, n), (1, 1, n, n), (heads, 9)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def _learned_score(slopes: Any, of_keys: Any, of_pairs: Any, table: Any) -> Any:
    return tw.softcap(2.0) >> tw.alibi(slopes) >> tw.bias(of_keys) >> tw.bias(of_pairs) >> tw.relative(table)


@pytest.mark.parametrize(
    ("kernel", "dtype", "summing"),
    [("cuda/tiled", torch.float32, "tiled_arrays"), ("cuda", torch.bfloat16, "arrays_sm90")],
)
def test_gradients_of_arrays(kernel: str, dtype: Any, summing: str, fake_gpu: FakeGpu) -> None:
    """By one kernel for each way in which scores share their cells; those of distances are then led to the cells."""
    torch.manual_seed(0)
    n = 70
    q, k, v = (torch.randn(2, heads, n, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    learned, d_out = _learned(4, n), torch.randn(2, 4, n, 16).to(dtype)
    out = tw.attention(q, k, v, mask=tw.causal(), score=_learned_score(*learned), kernel=kernel)
    found = torch.autograd.grad(out, (q, k, v, *learned), d_out)
    assert fake_gpu.launched[-5:] == [summing] * 4 + ["cells"]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, *learned)]
    want = _dense(*wide, d_out.double())
    for x, y in zip(found, want, strict=True):
        assert x.shape == y.shape
        assert float((x - y).abs().max()) < (1e-4 if dtype == torch.float32 else 3e-2) * float(y.abs().max())


def _dense(q: Any, k: Any, v: Any, slopes: Any, of_keys: Any, of_pairs: Any, table: Any, d_out: Any) -> Any:
    """The gradients of the same by PyTorch, all scores at once."""
    n = q.shape[2]
    apart = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    k_of, v_of = (x.repeat_interleave(2, dim=1) for x in (k, v))
    s = (
        2 * torch.tanh(q @ k_of.mT / 4 / 2)
        - slopes[:, None, None] * apart
        + of_keys
        + of_pairs
        + table[:, apart.clamp(max=8)]
    )
    p = s.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
    return torch.autograd.grad(p @ v_of, (q, k, v, slopes, of_keys, of_pairs, table), d_out)


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
    assert fake_gpu.launched[1:3] == BY_HOPPER
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
