"""Models whose sequences are split over ranks: our module, alone and under DDP, Hugging Face's, and the example."""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tilewise as tw
from tests.parallel.pool import Pool, mesh
from tilewise import parallel
from tilewise.nn import MultiHeadAttention

ROOT = Path(__file__).parent.parent.parent


def _module(ranks: Any = None, layout: str = "contiguous") -> MultiHeadAttention:
    torch.manual_seed(0)
    options = {"rope": tw.Rope(), "causal": True, "sinks": True, "score": tw.softcap(3.0)}
    return MultiHeadAttention(24, 4, heads_k=2, **options, mesh=ranks, layout=layout, dtype=torch.float64)


def _trained(where: str, layout: str, wrapper: str = "") -> None:
    """DDP and FSDP take the mean of gradients; without them a rank has its share of the sum."""
    ranks = mesh(where)
    if ranks.get_coordinate() is None:
        return
    alone, module = _module(), _module(ranks, layout)
    x = torch.randn(2, 21, 24, dtype=torch.float64)
    want = alone(x)
    want.square().sum().backward()
    model = _wrapped(module, ranks, wrapper)
    done = model(parallel.shard(x, ranks, dim=1, layout=layout))
    done.square().sum().backward()
    assert torch.allclose(parallel.unshard(done.detach(), ranks, dim=1, layout=layout), want)
    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        grad = ours.grad.full_tensor() if wrapper == "FSDP" else ours.grad
        total = grad * ranks.size() if wrapper else parallel.mesh.ranks_of(ranks).sum(grad)
        assert torch.allclose(total, theirs.grad)


def _wrapped(module: MultiHeadAttention, ranks: Any, wrapper: str) -> Any:
    if wrapper == "FSDP":
        return fully_shard(module, mesh=ranks)
    return DistributedDataParallel(module, process_group=ranks.get_group()) if wrapper else module


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_multi_head_attention(pool: Pool, layout: str) -> None:
    for where in ("2", "3"):
        pool.run(_trained, where, layout)


def _compiled() -> None:
    ranks = mesh("2")
    if ranks.get_coordinate() is None:
        return
    module = _module(ranks)
    x = parallel.shard(torch.randn(1, 12, 24, dtype=torch.float64), ranks, dim=1).requires_grad_()
    graphs: list[Any] = []

    def backend(graph: Any, given: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    both = [call(x) for call in (torch.compile(module, backend=backend), module)]
    assert torch.allclose(*both)
    assert torch.allclose(*(torch.autograd.grad(out.square().sum(), x)[0] for out in both))
    assert len(graphs) >= 2  # the projections before attention, and the one behind it


def test_the_rest_of_a_module_is_compiled(pool: Pool) -> None:
    pool.run(_compiled)


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP"])
def test_wrapped(pool: Pool, wrapper: str) -> None:
    pool.run(_trained, "2", "zigzag", wrapper)


def _cached() -> None:
    if mesh("2").get_coordinate() is not None:
        module = _module(mesh("2"))
        with pytest.raises(ValueError, match="cache: a module with a mesh trains on whole sequences"), torch.no_grad():
            module(torch.randn(1, 2, 24, dtype=torch.float64), cache=module.new_cache(1, 8))


def test_a_cache_is_refused(pool: Pool) -> None:
    pool.run(_cached)


def _language_models() -> None:
    if mesh("2").get_coordinate() is not None:
        for layout, padded in product(("contiguous", "zigzag"), (False, True)):
            _language_model(mesh("2"), layout, padded)


def _language_model(ranks: Any, layout: str, padded: bool) -> None:
    import transformers

    from tilewise.integrations.transformers import register

    config = transformers.MistralConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=6, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    register("tilewise")
    register("tilewise over ranks", mesh=ranks, layout=layout)
    model = transformers.MistralForCausalLM(config).eval()
    words, counts = torch.randint(2, 61, (2, 22)), torch.ones(2, 22, dtype=torch.int64)
    counts[0, 18:] = 0 if padded else 1
    model.set_attn_implementation("tilewise")
    want = model(input_ids=words, attention_mask=counts).logits
    model.set_attn_implementation("tilewise over ranks")
    own = [parallel.shard(x, ranks, dim=1, layout=layout) for x in (words, counts)]
    places = parallel.positions(22, ranks, layout=layout)[None].expand(2, -1)
    logits = model(input_ids=own[0], attention_mask=own[1], position_ids=places).logits
    whole = parallel.unshard(logits.detach(), ranks, dim=1, layout=layout)
    assert torch.allclose(whole[counts.bool()], want[counts.bool()], atol=1e-4)
    if layout == "zigzag":  # whose positions have a gap
        with pytest.raises(
            (tw.Unsupported, parallel.PeerError), match=r"position_ids: .* pass attention_mask=torch.ones"
        ):
            model(input_ids=own[0], position_ids=places)
    with pytest.raises(tw.Unsupported, match="here are 1 queries for 6 keys"):
        model(input_ids=own[0][:, :1], past_key_values=model(input_ids=own[0], use_cache=True).past_key_values)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_model_of_transformers(pool: Pool) -> None:
    pool.run(_language_models)


def _example() -> None:
    ranks = mesh("2")
    if ranks.get_coordinate() is not None:
        train = runpy.run_path(str(ROOT / "examples" / "long_context.py"))["train"]
        shared, alone = train(ranks, steps=2), train(None, steps=2)
        assert shared == pytest.approx(alone, abs=1e-5)
        assert shared[1] < shared[0]


def test_the_example_has_the_loss_of_one_process(pool: Pool) -> None:
    pool.run(_example)


@pytest.mark.slow
def test_torchrun_runs_the_example() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/long_context.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "the same, within" in done.stdout
