"""What only a GPU shows, beside the conformance suite: arrays that lie anyhow, packed garbage, long calls, graphs.

Without the compiler there: `python -m tests.cute.prebuild FOLDER` elsewhere, and TILEWISE_CUTE_KERNELS=FOLDER.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tilewise as tw
from tilewise import cli, contract, dispatch, validate

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
_reason = dispatch.kernel("cute").unavailable()
if _reason is not None:
    pytest.skip(_reason, allow_module_level=True)

from tests.cute.prebuild import BIASED, PROJECTED  # noqa: E402
from tests.cute.simulated import biased  # noqa: E402
from tilewise.kernels.cute import projected, projection  # noqa: E402
from tilewise.nn import MultiHeadAttention  # noqa: E402

HALF = (torch.float16, torch.bfloat16)


def _off(got: Any, want: Any) -> float:
    return float((got.double().cpu() - want.double().cpu()).abs().max())


def _inputs(*shape: int, dtype: Any, heads_k: int | None = None) -> list[Any]:
    torch.manual_seed(0)
    batch, heads, n, d = shape
    sizes = (heads, heads_k or heads, heads_k or heads)
    return [torch.randn(batch, h, n, d, device="cuda").to(dtype) for h in sizes]


def _sdpa(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """In float64, on the GPU."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k, v, is_causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_long_calls_on_hopper(dtype: Any, d: int, causal: bool) -> None:
    q, k, v = _inputs(2, 4, 1500, d, dtype=dtype, heads_k=2)
    out = tw.attention(q, k, v, causal=causal, kernel="cute/forward_sm90")
    assert _off(out, _sdpa(q, k, v, causal)) < 2e-2


def _gradients(compute: Any, d_out: Any, *given: Any) -> list[Any]:
    leaves = [x.detach().requires_grad_() for x in given]
    return list(torch.autograd.grad(compute(*leaves), leaves, d_out))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_long_gradients_on_hopper(dtype: Any, d: int, causal: bool) -> None:
    q, k, v = _inputs(2, 4, 1500, d, dtype=dtype, heads_k=2)
    d_out = torch.randn_like(q)
    got = _gradients(lambda *x: tw.attention(*x, causal=causal, kernel="cute/forward_sm90"), d_out, q, k, v)
    want = _gradients(lambda *x: _sdpa(*x, causal), d_out.double(), q, k, v)
    for name, a, b in zip("qkv", got, want, strict=True):
        assert _off(a, b) < 2e-2 * float(b.double().abs().max()), f"d_{name}"


@pytest.mark.parametrize("d", [64, 128, 256])
def test_gradients_of_saturated_rows(d: int) -> None:
    """Of queries times 12, in bfloat16; made from the rounded output alone, d_q would be twice as far off. What forward
    returns does not depend on what it keeps."""
    q, k, v = _inputs(1, 4, 1024, d, dtype=torch.bfloat16)
    d_out, kernel = torch.randn_like(q), dispatch.kernel("cute/forward_sm90")
    call = validate.prepare(12 * q, k, v, causal=True)
    kept = replace(call.spec, keeps_remainder=True)
    saved, plain = (kernel.forward(spec, call.q, call.k, call.v) for spec in (kept, call.spec))
    assert plain.remainder is None and torch.equal(plain.out, saved.out) and torch.equal(plain.lse, saved.lse)
    got = kernel.backward(kept, call.q, call.k, call.v, saved, d_out).q.double()
    want, *_ = _gradients(lambda *x: _sdpa(*x, True), d_out.double(), call.q.double(), k.double(), v.double())
    assert float((got - want).norm() / want.norm()) < 3e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_long_calls_by_the_first_kernel(dtype: Any, d: int, causal: bool) -> None:
    q, k, v = _inputs(2, 4, 700, d, dtype=dtype, heads_k=2)
    out = tw.attention(q, k, v, causal=causal, kernel="cute/basic")
    assert _off(out, _sdpa(q, k, v, causal)) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("kernel", ["cute/scaled_q", "cute/scaled_k"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_scale_is_multiplied_into_q_or_k(dtype: Any, kernel: str) -> None:
    q, k, v = _inputs(2, 4, 300, 64, dtype=dtype)
    out = tw.attention(q, k, v, causal=True, kernel=kernel)
    assert _off(out, _sdpa(q, k, v, True)) < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize(("n", "causal"), [(1, False), (100, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_output_projection(dtype: Any, n: int, causal: bool) -> None:
    """Beside attention and a product after it, in float64."""
    from tilewise.kernels.cute.projection import projected_attention

    q, k, v = _inputs(2, 8, 100, 64, dtype=dtype)
    w_o = (torch.randn(512, 328, device="cuda") / 512**0.5).to(dtype)
    y, lse = projected_attention(q[:, :, -n:], k, v, w_o, causal=causal)
    out, want_lse = tw.attention(q[:, :, -n:], k, v, causal=causal, kernel="cute/basic", return_lse=True)
    want = out.double().transpose(1, 2).reshape(2, n, 512) @ w_o.double()
    assert _off(y, want) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert torch.equal(lse, want_lse)
    again = projected_attention(q[:, :, -n:], k, v, w_o, causal=causal).out
    assert torch.equal(y, again), "heads are summed in one order"


@pytest.mark.parametrize(("heads", "d"), PROJECTED)
def test_a_module_projects_at_once(heads: int, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By weights as they lie, with a bias behind, as by two kernels."""
    monkeypatch.setattr(projected, "MOST_STEPS", 1000)
    module = MultiHeadAttention(heads * d, heads, causal=True, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(3, 70, heads * d, device="cuda").bfloat16()
    # A module takes what was built, and builds nothing: where there is a compiler this call does.
    q, k, v = (torch.zeros(1, heads, 8, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    projection.projected_attention(q, k, v, torch.zeros(heads * d, heads * d).to(q), causal=True)
    launched = []
    run = projection.run
    monkeypatch.setattr(projection, "run", lambda *call: launched.append(call) or run(*call))
    with torch.no_grad():
        y = module(x)
        assert len(launched) == 1
        monkeypatch.setattr(projected, "MOST_STEPS", 0)
        want = module(x)
    assert len(launched) == 1 and _off(y, want) < 2e-2


@pytest.mark.parametrize("named", BIASED)
def test_a_table_comes_by_tiles(named: str) -> None:
    """A bias of 16 bits, whose cells are read as matrices, and of 32; some rows see no key, some only the last ones."""
    host = biased(*BIASED[named])
    call = contract.on_device(host, "cuda:0", lambda x, device: x.to(device))
    done = dispatch.kernel("cute/forward_sm90").forward(call.spec, call.q, call.k, call.v)
    got = {what: x.cpu() for what, x in contract.forward_results(done).items()}
    contract.check_results(contract.expected_forward(host), got)


@pytest.mark.parametrize("kernel", ["cute/basic", "cute/forward_sm90"])
def test_the_same_call_has_the_same_bits(kernel: str) -> None:
    q, k, v = _inputs(2, 8, 1000, 128, dtype=torch.bfloat16)
    first, *others = (tw.attention(q, k, v, causal=True, kernel=kernel, return_lse=True) for _ in range(5))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_the_same_gradients_have_the_same_bits() -> None:
    q, k, v = _inputs(2, 8, 1000, 128, dtype=torch.bfloat16, heads_k=2)
    d_out = torch.randn_like(q)
    first, *others = (
        _gradients(lambda *x: tw.attention(*x, causal=True, kernel="cute/forward_sm90"), d_out, q, k, v)
        for _ in range(5)
    )
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_gradients_of_a_window() -> None:
    """Key tiles at its ends meet fewer query tiles, and are taken last: turns are of that order."""
    q, k, v = _inputs(3, 8, 2100, 64, dtype=torch.bfloat16, heads_k=4)
    d_out, far = torch.randn_like(q), torch.arange(2100, device="cuda")[:, None] - torch.arange(2100, device="cuda")
    seen = (far <= 300) & (far >= -40)

    def wanted(q: Any, k: Any, v: Any) -> Any:
        k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q.double(), k, v, attn_mask=seen)

    first, *others = (
        _gradients(lambda *x: tw.attention(*x, mask=tw.window(300, 40), kernel="cute/forward_sm90"), d_out, q, k, v)
        for _ in range(3)
    )
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    for name, a, b in zip("qkv", first, _gradients(wanted, d_out.double(), q, k, v), strict=True):
        assert _off(a, b) < 2e-2 * float(b.double().abs().max()), f"d_{name}"


def test_gradients_of_arrays_that_lie_anyhow() -> None:
    """They are copied where the copy engine does not take them: inner heads, one number for all of d_out."""
    x = torch.randn(2, 300, 4, 72, device="cuda").bfloat16()
    q = x[..., :64].transpose(1, 2)
    d_out = torch.ones((), device="cuda").bfloat16().expand(q.shape)
    got = _gradients(lambda *x: tw.attention(*x, causal=True, kernel="cute/forward_sm90"), d_out, q, q, q)
    want = _gradients(lambda *x: _sdpa(*x, True), d_out.double(), q, q, q)
    for a, b in zip(got, want, strict=True):
        assert _off(a, b) < 2e-2 * max(float(b.double().abs().max()), 1.0)


def test_arrays_that_lie_anyhow() -> None:
    """Inner heads, rows that begin at no multiple of 16 bytes, one head for all."""
    x = torch.randn(2, 300, 4, 72, device="cuda").bfloat16()
    inner = x[..., :64].transpose(1, 2)
    odd = x[..., 1:65].transpose(1, 2)
    one = inner[:, :1].expand(2, 4, 300, 64)
    for q, k, v in ((inner, inner, inner), (odd, inner, odd), (inner, one, one)):
        out = tw.attention(q, k, v, causal=True, kernel="cute")
        assert _off(out, _sdpa(q, k, v, True)) < 2e-2


@pytest.mark.parametrize("kernel", ["cute/basic", "cute/forward_sm90"])
def test_the_next_sequences_numbers_stay_there(kernel: str) -> None:
    """Of packed sequences the second is NaN: nothing of it is in the first."""
    q, k, v = (torch.randn(400, 4, 64, device="cuda").bfloat16() for _ in range(3))
    lengths = torch.tensor([0, 150, 400], dtype=torch.int32)
    want = tw.attention_varlen(q, k, v, lengths, lengths, causal=True, kernel=kernel)
    for x in (q, k, v):
        x[150:] = torch.nan
    got = tw.attention_varlen(q, k, v, lengths, lengths, causal=True, kernel=kernel)
    assert torch.equal(got[:150], want[:150])


def test_the_next_sequences_numbers_stay_out_of_gradients() -> None:
    q, k, v, d_out = (torch.randn(400, 4, 64, device="cuda").bfloat16() for _ in range(4))
    lengths = torch.tensor([0, 150, 400], dtype=torch.int32)

    def gradients() -> list[Any]:
        return _gradients(
            lambda *x: tw.attention_varlen(*x, lengths, lengths, causal=True, kernel="cute/forward_sm90"),
            d_out,
            q,
            k,
            v,
        )

    want = gradients()
    for x in (q, k, v, d_out):
        x[150:] = torch.nan
    for got, same in zip(gradients(), want, strict=True):
        assert torch.equal(got[:150], same[:150])


@pytest.mark.parametrize("kernel", ["cute/basic", "cute/forward_sm90"])
def test_rows_without_keys(kernel: str) -> None:
    q, k, v = _inputs(1, 2, 200, 64, dtype=torch.bfloat16)
    out, lse = tw.attention(q, k[:, :, :50], v[:, :, :50], causal=True, kernel=kernel, return_lse=True)
    assert not out[:, :, :150].any()
    assert bool((lse[:, :, :150] == -torch.inf).all())
    assert bool(out.isfinite().all()) and bool(lse[:, :, 150:].isfinite().all())


def test_a_graph_replays() -> None:
    q, k, v = _inputs(1, 4, 500, 128, dtype=torch.bfloat16)
    want = tw.attention(q, k, v, causal=True, kernel="cute")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tw.attention(q, k, v, causal=True, kernel="cute")
    graph.replay()
    assert torch.equal(got, want)


def test_on_a_stream_of_the_callers() -> None:
    q, k, v = _inputs(1, 4, 2000, 128, dtype=torch.bfloat16)
    want = tw.attention(q, k, v, causal=True, kernel="cute")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = tw.attention(q * 1, k * 1, v * 1, causal=True, kernel="cute")
    stream.synchronize()
    assert torch.equal(got, want)


def test_the_demo_prints_a_learners_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewise.cli.compare.LENGTHS", (256, 512))
    monkeypatch.setattr("tilewise.cli.demo.VARIANTS", ("full", "causal"))
    assert cli.main(["demo", "--kernel", "cute"]) == 0
    out = capsys.readouterr().out
    assert "[PASS] FlashAttention: Output matches reference (max error: 0.00000" in out
    assert "Output shape: [16, 64]\nSample output (first row):\n" in out
