"""What only a GPU can show: streams, graphs, memory that moves, results beside the CPU's (`make test-gpu`)."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import tilewise as tw

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

KERNELS = ("cuda", "cuda/naive", "cuda/tiled")


def _inputs(n: int = 200, dtype: Any = None, heads: int = 4) -> list[Any]:
    torch.manual_seed(n)
    return [torch.randn(2, heads, n, 64, dtype=dtype or torch.float32, device="cuda") for _ in range(3)]


def _close(a: Any, b: Any) -> bool:
    """Within two roundings of the type, of numbers up to 4."""
    limit = {torch.float32: 1e-5, torch.float16: 2**-7, torch.bfloat16: 2**-4}[a.dtype]
    return bool((a.cpu().float() - b.cpu().float()).abs().max() < limit)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_are_the_cpus(kernel: str, dtype: Any) -> None:
    q, k, v = _inputs(dtype=dtype)
    for options in ({"causal": True}, {"mask": tw.window(30), "score": tw.alibi(4)}, {"score": tw.softcap(5.0)}):
        got = tw.attention(q, k, v, kernel=kernel, **options)
        assert got.device == q.device
        assert _close(got, tw.attention(q.cpu(), k.cpu(), v.cpu(), **options))


def test_heads_side_by_side_stay_so() -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in _inputs())
    out = tw.attention(q, k, v, causal=True)
    assert out.stride() == q.stride()
    assert _close(out, tw.attention(q.cpu(), k.cpu(), v.cpu(), causal=True))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_packed_sequences_with_lengths_anywhere(where: str) -> None:
    q, k, v = (torch.randn(90, 4, 32, device="cuda") for _ in range(3))
    lengths = torch.tensor([0, 40, 40, 90], dtype=torch.int32)
    want = tw.attention_varlen(q.cpu(), k.cpu(), v.cpu(), lengths, lengths, causal=True)
    given = lengths.to(where)
    assert _close(tw.attention_varlen(q, k, v, given, given, causal=True), want)


def test_a_document_mask_on_the_gpu() -> None:
    q, k, v = _inputs()
    ids = torch.arange(200, device="cuda", dtype=torch.int32) // 60
    got = tw.attention(q, k, v, mask=tw.document(ids))
    assert _close(got, tw.attention(q.cpu(), k.cpu(), v.cpu(), mask=tw.document(ids.cpu())))


def test_other_memory_the_second_time() -> None:
    """Addresses belong to a call: what is kept between calls must not hold any."""
    for seed in range(3):
        torch.manual_seed(seed)
        held = torch.empty(seed * 1000 + 1, device="cuda")  # so that the next tensors lie elsewhere
        q, k, v = _inputs(130)
        assert _close(tw.attention(q, k, v, causal=True), tw.attention(q.cpu(), k.cpu(), v.cpu(), causal=True))
        del held


def test_memory_that_tma_does_not_take() -> None:
    """An address that is no multiple of 16 bytes goes to another kernel, and one that is comes back."""
    q, k, v = _inputs(130, torch.bfloat16)
    want = tw.attention(q.cpu(), k.cpu(), v.cpu(), causal=True)
    odd = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape).copy_(q)
    for x in (q, odd, q, odd):
        assert _close(tw.attention(x, k, v, causal=True), want)


def test_what_changes_in_place() -> None:
    q, k, v = _inputs()
    mask, ids = (
        torch.ones(200, 200, dtype=torch.bool, device="cuda"),
        torch.zeros(200, dtype=torch.int32, device="cuda"),
    )
    for step in range(3):
        mask[:, step * 60 : step * 60 + 30] = False
        ids[step * 50 :] += 1
        for array, variant in ((mask, lambda x: x), (ids, tw.document)):
            got = tw.attention(q, k, v, mask=variant(array))
            assert _close(got, tw.attention(q.cpu(), k.cpu(), v.cpu(), mask=variant(array.cpu())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_whose_first_call_this_is(dtype: Any) -> None:
    """A thread has no context of CUDA's before its first call, and PyTorch may have memory at hand without asking."""
    calls = [_inputs(n, dtype) for n in (200, 200, 210, 210)]
    wants = [tw.attention(*(x.cpu() for x in call), causal=True) for call in calls]
    tw.attention(*calls[0], causal=True)
    torch.cuda.synchronize()
    got: dict[int, Any] = {}

    def run(i: int) -> None:
        for _ in range(20):
            got[i] = tw.attention(*calls[i], causal=True)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert [_close(got[i], want) for i, want in enumerate(wants)] == [True] * len(wants)


def test_streams_at_once() -> None:
    """Launches of one kernel that run beside each other count their work apart."""
    calls = [_inputs(1000 + i, torch.bfloat16) for i in range(4)]
    wants = [tw.attention(*call, causal=True) for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    got: list[Any] = [None] * len(calls)
    for _ in range(25):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i] = tw.attention(*calls[i], causal=True)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, wants, strict=True))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU alone")
def test_a_second_device() -> None:
    """Kernels and plans of the first are no use there; and the current device stays what it was."""
    q, k, v = _inputs(130, torch.bfloat16)
    want = tw.attention(q, k, v, causal=True)
    for _ in range(2):
        out = tw.attention(q.to("cuda:1"), k.to("cuda:1"), v.to("cuda:1"), causal=True)
        assert out.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        assert _close(out, want)
        assert _close(tw.attention(q, k, v, causal=True), want)


def test_a_repeated_call_costs_the_host_little() -> None:
    """At most 1.5 times what PyTorch's own attention does: checks and preparations are made once."""
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (torch.randn(1, 2, 16, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    ours, torchs = _host_times(
        lambda: tw.attention(q, k, v, causal=True), lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
    )
    assert ours <= 1.5 * torchs, f"{ours * 1e6:.1f} us, and PyTorch's {torchs * 1e6:.1f} us"


def _host_times(*calls: Any) -> list[float]:
    """Seconds until a call returns, the least of many turns: a few calls each, as other work may come in between."""
    best = [float("inf")] * len(calls)
    with torch.no_grad():
        for turn in range(1000 * len(calls)):
            i = turn % len(calls)
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(5):
                calls[i]()
            best[i] = min(best[i], (time.perf_counter() - started) / 5)
    return best


def test_the_callers_stream() -> None:
    """A launch waits for what is on the caller's stream, and for nothing else."""
    q, k, v = _inputs(500)
    want = tw.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(q)
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out = tw.attention(late, k, v, causal=True)
    stream.synchronize()
    assert torch.equal(out, want)


def test_a_captured_graph() -> None:
    q, k, v = _inputs()
    tw.attention(q, k, v, causal=True, score=tw.alibi(4))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention(q, k, v, causal=True, score=tw.alibi(4))
    for seed in (1, 2):
        torch.manual_seed(seed)
        q.copy_(torch.randn_like(q))
        graph.replay()
        torch.cuda.synchronize()
        assert _close(out, tw.attention(q.cpu(), k.cpu(), v.cpu(), causal=True, score=tw.alibi(4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_of_several_calls_at_once(dtype: Any) -> None:
    """Captured launches share nothing that changes: replays on two streams do not disturb each other."""
    layers = [_inputs(1000, dtype), _inputs(700, dtype)]
    graphs, outs = [], []
    for q, k, v in layers:
        tw.attention(q, k, v, causal=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x = q
            for _ in range(3):
                x = tw.attention(x, k, v, causal=True)
        graphs.append(graph)
        outs.append(x)
    wants = []
    for q, k, v in layers:
        x = q
        for _ in range(3):
            x = tw.attention(x, k, v, causal=True)
        wants.append(x)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(outs, wants, strict=True))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_around_a_first_call_is_refused() -> None:
    q, k, v = (torch.randn(1, 1, 20, 24, device="cuda") for _ in range(3))
    with pytest.raises(RuntimeError, match="make it once first"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        tw.attention(q, k, v, mask=tw.dilated(7), score=tw.softcap(3.25))


def test_gradients_are_recorded_without_the_operator() -> None:
    q, k, v = _inputs()
    q.requires_grad_()
    out = tw.attention(q, k, v, causal=True)
    assert out.requires_grad
    with torch.no_grad():
        assert torch.equal(out, tw.attention(q, k, v, causal=True))


def test_the_same_call_gives_the_same_bits() -> None:
    q, k, v = _inputs(dtype=torch.bfloat16)
    assert torch.equal(*(tw.attention(q, k, v, mask=tw.causal() & tw.window(50)) for _ in range(2)))


def test_auto_takes_it_and_says_why_not_the_others() -> None:
    q, k, v = _inputs()
    told = str(tw.explain(q, k, v, causal=True))
    assert "cuda" in told
    assert "main memory" in told


def test_masks_of_arrays_that_change() -> None:
    """What a mask reads on the GPU is looked at there, anew in every call, and in every replay of a graph."""
    q, k, v = _inputs(700, torch.bfloat16)
    ids = torch.arange(700, device="cuda", dtype=torch.int32) // 300
    mask = tw.document(ids)

    def want() -> Any:
        return tw.attention(q.cpu(), k.cpu(), v.cpu(), mask=tw.document(ids.cpu()))

    assert _close(tw.attention(q, k, v, mask=mask), want())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention(q, k, v, mask=mask)
    for step in (50, 130, 701):
        ids.copy_(torch.arange(700, device="cuda", dtype=torch.int32) // step)
        assert _close(tw.attention(q, k, v, mask=mask), want())
        graph.replay()
        assert _close(out, want())


def _gradients(kernel: str, inputs: list[Any], d_out: Any) -> list[Any]:
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    return list(torch.autograd.grad(tw.attention(q, k, v, causal=True, kernel=kernel), (q, k, v), d_out))


@pytest.mark.parametrize("d", [64, 128])
def test_gradients_have_the_same_bits_a_hundred_times(d: int) -> None:
    """Beside other work, which delays some blocks more than others."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 1000, d, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    d_out, busy = torch.randn_like(inputs[0]), torch.randn(4096, 4096, device="cuda")
    first, beside = _gradients("cuda/forward_sm90", inputs, d_out), torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(beside):
            torch.mm(busy, busy)
        again = _gradients("cuda/forward_sm90", inputs, d_out)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("kernel", ["cuda/forward_sm90", "cuda/unordered"])
def test_gradients_read_nothing_that_was_not_written(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """initcheck does not see what the copy engine stores. Here all that is allocated begins as NaN."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 500, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    d_out, empty = torch.randn_like(inputs[0]), torch.empty
    want = _gradients("cuda/tiled", inputs, d_out)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(torch.nan))
    for x, y in zip(_gradients(kernel, inputs, d_out), want, strict=True):
        assert float((x - y).abs().max()) < 0.02 * float(y.abs().max())


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("kernel", ["cuda/forward_sm90", "cuda/unordered"])
def test_gradients_with_a_bias_that_comes_by_tiles(kernel: str, d: int) -> None:
    """Of heads of their own and of one for all, each twice, the second time somewhere else; and the bias's own."""
    torch.manual_seed(d)
    for shape in ((4, 300, 400), (300, 400)):
        for _ in range(2):
            q = torch.randn(2, 4, 300, d, dtype=torch.bfloat16)
            k, v = (torch.randn(2, 2, 400, d, dtype=torch.bfloat16) for _ in range(2))
            bias, d_out = torch.randn(shape, dtype=torch.bfloat16), torch.randn_like(q)

            def gradients(convert: Any, kernel: str, given: Any = (q, k, v, bias, d_out)) -> Any:
                q, k, v, bias, d_out = (convert(x).requires_grad_() for x in given)
                out = tw.attention(q, k, v, causal=True, score=tw.bias(bias, grad=True), kernel=kernel)
                return torch.autograd.grad(out, (q, k, v, bias), d_out)

            want, got = gradients(lambda x: x.double(), "auto"), gradients(lambda x: x.cuda(), kernel)
            for x, y in zip(got, want, strict=True):
                assert (x.cpu().double() - y).abs().max() < 2e-2 * y.abs().max()
