"""What only a GPU can show: streams, graphs, memory that moves, results beside the CPU's (`make test-gpu`)."""

from __future__ import annotations

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
