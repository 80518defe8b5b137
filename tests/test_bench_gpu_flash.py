"""FlashAttention-4 as a contestant, without a GPU or its compiler: what it is asked, and what its functions say."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests import fake_stage as fakes  # noqa: E402
from tests.test_bench_gpu import FAST, measure, small, stand_in  # noqa: E402
from tilewise.bench.gpu import cases, contestants  # noqa: E402
from tilewise.bench.gpu.cases import VARIANTS, Case  # noqa: E402
from tilewise.bench.gpu.contestants import CUDNN, FLASH, FLASH_ORDERED  # noqa: E402


def test_flash_attention_is_asked_in_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def flash_attn_func(q: Any, k: Any, v: Any, **options: Any) -> Any:
        asked.append(options)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2), None

    stand_in(monkeypatch, "flash_attn.cute.interface", flash_attn_func=flash_attn_func)
    case = small("causal")
    assert contestants.find(FLASH).missing() is None
    assert measure(case, FLASH)[FLASH]["status"] == "ok"
    assert measure(small("window 256"), FLASH) and measure(small("softcap"), FLASH)
    assert asked[0] == {"causal": True} and {"causal": True, "window_size": (256, 0)} in asked
    assert {"causal": True, "softcap": cases.CAP} in asked
    assert measure(small("bias"), FLASH)[FLASH]["status"] == "failed"  # for its compiler is not there
    refused = measure(small("bias", backward=True), FLASH)[FLASH]
    assert (refused["status"], refused["reason"]) == (
        "cannot express",
        "its backward pass has no gradient of aux_tensors",
    )
    assert measure(replace(case, backward=True), FLASH_ORDERED)[FLASH_ORDERED]["status"] == "ok"
    assert asked[-1] == {"causal": True, "deterministic": True}


class Registers(torch.Tensor):  # type: ignore[misc]
    """What CuTe calls a tensor in registers, as far as functions of scores use one."""

    def load(self) -> Any:
        return self.as_subclass(torch.Tensor)


@pytest.fixture
def flash_functions(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of FlashAttention-4's functions, by PyTorch's numbers in place of CuTe's."""
    stand_in(
        monkeypatch,
        "cutlass.cute",
        jit=lambda function: function,
        make_rmem_tensor=lambda count, dtype: torch.zeros(count, dtype=dtype).as_subclass(Registers),
        Float32=torch.float32,
        Int32=torch.int32,
        BFloat16=torch.bfloat16,
    )
    monkeypatch.setattr(sys.modules["cutlass"], "cute", sys.modules["cutlass.cute"], raising=False)
    stand_in(
        monkeypatch,
        "flash_attn.cute.compute_block_sparsity",
        compute_block_sparsity=lambda *arguments: arguments,
        scalar_to_ssa=lambda x, dtype: torch.tensor([x], dtype=dtype),
    )
    monkeypatch.setitem(sys.modules, "flash_attn.cute.utils", sys.modules["flash_attn.cute.compute_block_sparsity"])
    monkeypatch.delitem(sys.modules, "tilewise.bench.gpu.flash", raising=False)
    yield importlib.import_module("tilewise.bench.gpu.flash")
    sys.modules.pop("tilewise.bench.gpu.flash")


@pytest.mark.parametrize("variant", ["alibi", "bias", "document"])
def test_flash_attentions_functions_say_the_same(variant: str, flash_functions: Any) -> None:
    """Of as many neighbouring keys at a time as a function of scores says, of one for masks."""
    case = Case(variant, 32, 64, tokens=32, hidden=128)
    extras, variants = cases.draw(case, 0, "cpu").extras, VARIANTS[variant]
    told = flash_functions.options(case, extras)
    score, mask, arrays = told.get("score_mod"), told.get("mask_mod"), told["aux_tensors"]
    at_once = getattr(score, "__vec_size__", 1)
    for h, q, k in ((h, q, k) for h in range(2) for q in range(32) for k in range(0, 32, 2)):
        at = [torch.tensor([i, i]) for i in (0, h, q)]
        keys = torch.tensor([k, k + 1])
        if variants.score is not None:
            s = torch.tensor([0.5, -2.0])
            found = torch.cat([
                score(s[i:j], at[0], at[1], q_idx=at[2], kv_idx=keys[i:j], seqlen_info=None, aux_tensors=arrays)
                for i, j in ([(0, 2)] if at_once == 2 else [(0, 1), (1, 2)])
            ])  # fmt: skip
            want = torch.stack([variants.score(extras)(s[i], 0, h, q, k + i) for i in (0, 1)])
            assert torch.allclose(found, want.float(), atol=1e-2)
        if mask is not None:
            seen = [bool(mask(at[0][:1], at[1][:1], at[2][:1], keys[i : i + 1], None, arrays)) for i in (0, 1)]
            assert seen == [bool(variants.mask(extras)(0, h, q, k + i)) for i in (0, 1)]
    assert told.get("causal", False) == (variant == "alibi")


def test_flash_attention_visits_blocks_that_its_tiles_fit(flash_functions: Any) -> None:
    for d, tile in ((64, (192, 128)), (128, (128, 128))):
        case = Case("document", 256, d, tokens=256, hidden=128)
        told = flash_functions.options(case, cases.draw(case, 0, "cpu").extras)
        assert told["block_sparse_tensors"][:6] == (*tile, 1, 1, 256, 256)


def test_without_flash_attention_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    (reason,) = fakes.FakeStage(FAST).missing([FLASH, CUDNN]).values()
    assert "flash_attn.cute does not load (ModuleNotFoundError" in reason and "pip install" in reason
