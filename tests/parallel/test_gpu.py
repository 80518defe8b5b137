"""On a GPU (pytest -m gpu tests/parallel). NCCL has one rank a GPU: two processes that share one send through their
hosts, by Gloo; and one process sends itself, by NCCL and its streams, what a ring of two would send."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tilewise as tw
from tests.parallel.pool import Pool, mesh
from tests.parallel.problem import check
from tilewise import parallel, validate
from tilewise.cases import Case
from tilewise.parallel import contiguous, needs, sequence
from tilewise.parallel.blocks import Problem
from tilewise.parallel.team import Team

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

WAYS = [("2", layout, method) for layout, method in product(("contiguous", "zigzag"), ("ring", "gather", "heads"))]
BY_SEQUENCE = [("2", "zigzag", "ring"), ("2", "zigzag", "gather")]
# Each kernel takes seconds to compile, and an exchange of heads has others on every rank if the variant tells heads
# apart. Of half precision: Hopper's kernels, and a long sum over out, which is off if parts of it are rounded.
CASES = [
    (Case("causal", "ragged", "bfloat16"), WAYS),
    (Case("all at once", "head of 128", "bfloat16"), BY_SEQUENCE),
    (Case("all at once", "ragged", "float32"), WAYS),
    (Case("softcap, alibi", "packed", "float32"), BY_SEQUENCE),
]
# Seconds: one process compiles what it alone computes with while the other waits for it in the group. Beside as many
# other tests as there are cores a Triton kernel takes half a minute, and a case has several.
LIMITS = {"timeout": 240, "patience": 300, "afresh": True}

SCORE = tw.softcap(20.0) >> (tw.S - abs(tw.Q - tw.K) * 1e-3)  # in which positions count

# -- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    made = Pool(2, **LIMITS)
    yield made
    made.close()


@pytest.mark.parametrize(("case", "ways"), CASES, ids=lambda x: x.name if isinstance(x, Case) else "")
def test_two_processes_share_a_gpu(two: Pool, case: Case, ways: Any) -> None:
    two.run(check, case, ways, "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL has one rank a GPU, and here is one")
def test_two_gpus() -> None:
    pool = Pool(2, backend="nccl", **LIMITS)
    try:
        for case, ways in CASES:
            pool.run(check, case, ways, "cuda")
    finally:
        pool.close()


def _packed_apart() -> int:
    """Each rank has a sequence of its own."""
    x, lengths = torch.randn(64, 2, 64, device="cuda"), torch.tensor([0, 64, 128])
    with parallel.count_traffic() as sent:
        parallel.attention_varlen(x, x, x, lengths, lengths, mesh=mesh("2"), method="ring")
    return sent.bytes


def test_sequences_of_a_pack_are_not_sent_to_ranks_that_have_none_of_them(two: Pool) -> None:
    assert two.run(_packed_apart) == [0, 0]


def _the_same_bits() -> None:
    torch.manual_seed(mesh("2").get_local_rank())
    x = torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = []
    for _ in range(3):
        out = parallel.attention(x, x, x, mesh=mesh("2"), score=SCORE, method="ring")
        found.append((out, *torch.autograd.grad(out.square().sum(), x)))
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again, strict=True))


def test_the_same_call_gives_the_same_bits(two: Pool) -> None:
    two.run(_the_same_bits)


# -- one process, by NCCL ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Iterator[Pool]:
    made = Pool(1, backend="nccl", **LIMITS)
    yield made
    made.close()


def _mesh_of_one() -> None:
    """Hosts of a group that has NCCL alone tell each other what they were called with, all the same."""
    x = torch.randn(1, 2, 100, 64, device="cuda", requires_grad=True)
    out = parallel.attention(x, x, x, mesh=mesh("1"), causal=True)
    want = tw.attention(x, x, x, causal=True)
    assert torch.allclose(out, want, atol=1e-5)
    given = torch.randn_like(out)
    found, expected = (torch.autograd.grad(each, x, given)[0] for each in (out, want))
    assert torch.allclose(found, expected, atol=1e-4)
    with pytest.raises(ValueError, match="which sends no tensors of cpu"):
        parallel.attention(*[torch.randn(1, 2, 4, 8)] * 3, mesh=mesh("1"))


def test_a_mesh_of_one_gpu(alone: Pool) -> None:
    alone.run(_mesh_of_one)


def _to_itself(method: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first of two ranks, whose peer is itself: the other's keys are its own once more, farther on."""
    n = q.shape[2]
    whole = (x[:, :, :1].expand(-1, -1, 2 * n, -1) for x in (q, k, v))
    call = validate.prepare(*whole, score=SCORE)
    halves = contiguous(2 * n, 2)
    found = needs.find(call.spec, call.shape, halves, halves)
    team = Team(dist.group.WORLD, (0, 0), 0)
    problem = Problem(team, call.spec, call.shape, halves, halves, found, method, "auto")
    return sequence.attention(problem, q, k, v, None, [])[0]


def _drawn(n: int, heads: int, d: int) -> list[Tensor]:
    return [torch.randn(1, heads, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]


def _streams(method: str) -> float:
    """Call after call, and the host waits for none: what is read before it came, or written before it went, is seen."""
    dist.all_reduce(torch.zeros(1, device="cuda"))
    worst = torch.zeros((), device="cuda")
    for _ in range(20):
        q, k, v = _drawn(2048, 8, 64)
        given = torch.randn_like(q)
        found = _to_itself(method, q, k, v)
        want = tw.attention(q, torch.cat((k, k), 2), torch.cat((v, v), 2), score=SCORE)
        pairs = [(found, want)]
        pairs += zip(*(torch.autograd.grad(out, (q, k, v), given) for out in (found, want)), strict=True)
        for a, b in pairs:
            worst = torch.maximum(worst, (a.float() - b.float()).abs().max() / b.float().abs().max())
    return float(worst)


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_nothing_is_read_before_it_came_nor_written_before_it_went(alone: Pool, method: str) -> None:
    assert alone.run(_streams, method)[0] < 0.03  # a few roundings of bfloat16


def _trace(path: str) -> None:
    q, k, v = _drawn(32768, 16, 128)
    _to_itself("ring", q, k, v)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda._sleep(200_000_000)  # until the host has handed over all: then the GPU alone decides
        _to_itself("ring", q, k, v)
        torch.cuda.synchronize()
    profile.export_chrome_trace(path)


def test_keys_travel_while_those_before_them_are_computed_with(alone: Pool, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    alone.run(_trace, str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy")]
    assert events, "the profiler saw nothing on the GPU"
    busy: Counter[int] = Counter()
    for event in events:
        busy[event["args"]["stream"]] += event["dur"]
    computing = busy.most_common(1)[0][0]
    longest = max((e for e in events if e["args"]["stream"] == computing), key=lambda e: e["dur"])
    moved = [e for e in events if e["args"]["stream"] != computing]
    assert moved, "all ran in one stream"
    assert any(_overlap(e, kernel) for e in moved for kernel in events if kernel["args"]["stream"] == computing), [
        (e["name"], e["ts"], e["dur"]) for e in (longest, *moved)
    ]


def _overlap(a: Any, b: Any) -> bool:
    return bool(a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"])
