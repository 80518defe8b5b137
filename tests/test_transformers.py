"""Hugging Face transformers with attn_implementation="tilewise": tiny models give what they give with "eager"."""

from __future__ import annotations

import copy
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[transformers]'"
)

import torch  # noqa: E402
from torch.nn.attention.flex_attention import BlockMask, create_block_mask  # noqa: E402
from transformers import masking_utils as theirs  # noqa: E402

import tilewise as tw  # noqa: E402
from tests.strategies import dense_values  # noqa: E402
from tilewise.integrations import transformers as ours  # noqa: E402
from tilewise.schedule import Kind  # noqa: E402
from tilewise.spec import Shape  # noqa: E402

WORDS = 61
WINDOW = 5
COMMON: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GROUPED = COMMON | {"num_key_value_heads": 2, "head_dim": 8}
T5 = {
    "vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, "initializer_factor": 3.0,
    "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": None,
}  # fmt: skip
DECODERS = ["Llama", "GPTNeoX", "Gemma2", "GptOss"]
OPTIONS = {
    "Llama": GROUPED,
    "GPTNeoX": COMMON | {"attention_dropout": 0.0, "hidden_dropout": 0.0},
    "Gemma2": GROUPED | {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
    "GptOss": GROUPED | {"sliding_window": WINDOW, "num_local_experts": 3, "num_experts_per_tok": 2},
}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    ours.register()
    yield
    ours.register()


@cache
def _model(name: str) -> Any:
    torch.manual_seed(0)
    options = T5 if name == "T5" else OPTIONS[name]
    task = "ForConditionalGeneration" if name == "T5" else "ForCausalLM"
    model = getattr(transformers, name + task)(getattr(transformers, f"{name}Config")(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms, biases and sinks begin with all the same numbers
                parameter.normal_(std=0.5)
    return model


def _words(*size: int) -> Any:
    return torch.randint(2, WORDS, size, generator=torch.Generator().manual_seed(1))


def _padding(side: str, n: int) -> Any:
    """Three sequences, two of them shorter."""
    mask = torch.ones(3, n, dtype=torch.int64)
    for row, padded in ((0, 4), (1, 1)):
        if side == "left":
            mask[row, :padded] = 0
        elif side == "right":
            mask[row, n - padded :] = 0
    return mask


def _both(model: Any, run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What `run` gives with Tilewise, and with eager attention."""
    found = []
    for implementation in ("tilewise", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        found.append(run(model))
    return found[0], found[1]


def _trained(logits: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """Logits, and the gradients of every parameter."""

    def run(model: Any) -> dict[str, Any]:
        out = logits(model)
        out.pow(2).mean().backward()
        grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
        return {"logits": out.detach(), **grads}

    return run


def _check(got: Any, want: Any) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert x.abs().max() > 0, name
        torch.testing.assert_close(
            got[name], x, rtol=0, atol=2e-5 * float(x.abs().max()), msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each attention that Tilewise computed."""
    made: list[dict[str, Any]] = []

    def noted(q: Any, k: Any, v: Any, **options: Any) -> Any:
        made.append({"q": q, "k": k, **options})
        return tw.attention(q, k, v, **options)

    monkeypatch.setattr(ours, "attention", noted)
    return made


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_gradients(name: str, side: str, calls: list[dict[str, Any]]) -> None:
    """Where words are: what comes out at padding means nothing, and transformers' own implementations differ there."""
    words, padding = _words(3, 12), _padding(side, 12)

    def logits(model: Any) -> Any:
        return model(input_ids=words, attention_mask=padding).logits[padding.bool()]

    _check(*_both(_model(name), _trained(logits)))
    assert len(calls) == 2
    assert all(isinstance(call["mask"], tw.Expr) for call in calls)
    if name != "GPTNeoX":
        assert all(call["k"].shape[1] == 2 for call in calls), "keys were repeated"


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_t5_logits_and_gradients(side: str, calls: list[dict[str, Any]]) -> None:
    """Encoder, decoder and cross attention, with a learned bias by position."""
    encoded, decoded = _padding(side, 12), _padding(side, 9)

    def logits(model: Any) -> Any:
        given = {"input_ids": _words(3, 12), "decoder_input_ids": _words(3, 9)}
        return model(**given, attention_mask=encoded, decoder_attention_mask=decoded).logits[decoded.bool()]

    got, want = _both(_model("T5"), _trained(logits))
    _check(got, want)
    assert len(calls) == 6
    assert sum("relative_attention_bias" in name for name in want) == 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, "T5"])
def test_generation(name: str, cache: str, calls: list[dict[str, Any]]) -> None:
    """Past the window's end, where a sliding cache lets go of keys. Logits too: small models repeat themselves."""
    given = {"input_ids": _words(3, 8), "attention_mask": _padding("left", 8), "cache_implementation": cache}

    def tokens(model: Any) -> Any:
        return model.generate(
            **given, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
        )

    got, want = _both(_model(name), tokens)
    assert torch.equal(got.sequences, want.sequences)
    _check({"logits": torch.stack(got.logits)}, {"logits": torch.stack(want.logits)})
    assert [call["q"].shape[2] for call in calls].count(1) >= 2 * 7


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_a_cache_filled_in_parts(name: str, kind: str) -> None:
    words, padding = _words(3, 14), _padding("left", 14)

    def logits(model: Any) -> dict[str, Any]:
        if kind == "static":
            store = transformers.StaticCache(config=model.config, max_cache_len=20)
        else:
            store = transformers.DynamicCache(config=model.config)
        parts = []
        with torch.no_grad():
            for a, b in ((0, 3), (3, 9), (9, 10), (10, 14)):
                out = model(input_ids=words[:, a:b], attention_mask=padding[:, :b], past_key_values=store)
                parts.append(out.logits)
        return {"logits": torch.cat(parts, 1)[padding.bool()]}

    _check(*_both(_model(name), logits))


def test_packed_sequences(calls: list[dict[str, Any]]) -> None:
    """Positions that begin anew tell where a sequence ends."""
    words, positions = _words(2, 12), torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)

    def logits(model: Any) -> Any:
        return model(input_ids=words, position_ids=positions, use_cache=False).logits

    got, want = _both(_model("Llama"), _trained(logits))
    _check(got, want)
    alone = _model("Llama")(input_ids=words[:, 5:]).logits
    torch.testing.assert_close(got["logits"][:, 5:], alone, rtol=0, atol=1e-4)
    assert "==" in repr(calls[0]["mask"])


def test_gradient_checkpointing() -> None:
    model, words, padding = _model("Llama"), _words(3, 12), _padding("left", 12)

    def logits(model: Any) -> Any:
        return model(input_ids=words, attention_mask=padding, use_cache=False).logits[padding.bool()]

    model.gradient_checkpointing_enable()
    model.train()
    try:
        _check(*_both(model, _trained(logits)))
    finally:
        model.gradient_checkpointing_disable()
        model.eval()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_mask_of_the_callers_own(dtype: torch.dtype) -> None:
    """Four dimensions: transformers hands it on as it is. Eager attention takes those that are added alone."""
    words = _words(2, 9)
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(2)) > 0.5
    mask[..., 0] = True
    added = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    own = {"tilewise": mask if dtype == torch.bool else added, "eager": added}

    def logits(model: Any) -> Any:
        return model(input_ids=words, attention_mask=own[model.config._attn_implementation]).logits

    _check(*_both(_model("Llama"), _trained(logits)))


@pytest.mark.parametrize("name", ["Gemma2", "T5"])
def test_torch_compile(name: str) -> None:
    """One graph, with the mask made in it."""
    model, words, padding = _model(name), _words(3, 10), _padding("left", 10)
    model.set_attn_implementation("tilewise")
    given = {"input_ids": words, "attention_mask": padding, "use_cache": False}
    if name == "T5":
        given["decoder_input_ids"] = _words(3, 7)
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(model, backend="eager", fullgraph=True)(**given).logits
        torch.testing.assert_close(got, model(**given).logits)


# -- masks ------------------------------------------------------------------------------------------------------------

IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]])
FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "window": theirs.sliding_window_causal_mask_function(3),
    "both ways": theirs.bidirectional_mask_function,
    "window both ways": theirs.sliding_window_bidirectional_mask_function(2),
    "chunks": theirs.chunked_causal_mask_function(3, torch.tensor([2, 0])),
    "packed": theirs.and_masks(theirs.causal_mask_function, theirs.packed_sequence_mask_function(IDS)),
    "blocks": theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(IDS - 1)),
    "own": theirs.and_masks(theirs.causal_mask_function, lambda b, h, q, k: (k + b) % 2 == h),
}
PLACES: dict[str, Any] = {  # queries, keys, position of the first query, of the first key
    "all": (12, 12, 0, 0),
    "after a cache": (5, 12, 7, 0),
    "a cache that slid": (4, 6, 8, 6),
    "a static cache": (4, 10, torch.tensor(3), 0),
    "a static cache, empty": (4, 10, 0, 0),
    "one query": (1, 9, 8, 0),
}


@pytest.mark.parametrize("padded", ["none", "left", "right", "short"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_means_what_theirs_means(name: str, place: str, padded: str) -> None:
    n, m, q_offset, kv_offset = copy.deepcopy(PLACES[place])
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[0] = torch.arange(12) >= 7 if padded == "left" else torch.arange(12) < (5 if padded == "right" else 12)
    given = {
        "batch_size": 2, "q_length": n, "kv_length": m, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": FUNCTIONS[name],
        "attention_mask": None if padded == "none" else padding[:, :8] if padded == "short" else padding,
    }  # fmt: skip
    want = theirs.sdpa_mask(**given, allow_is_causal_skip=False)
    got = ours.make_mask(**given, allow_is_causal_skip=False)
    if n == 1:
        assert torch.equal(got, want)
        return
    if isinstance(q_offset, torch.Tensor):
        q_offset += 4  # as the cache does before layers attend
    found = dense_values(got.expression, Shape(2, 3, 3, n, m, 4, 4))
    assert torch.equal(torch.from_numpy(found.copy()), want.expand(2, 3, n, m))


def test_masks_are_the_expressions_that_kernels_know() -> None:
    made = {name: ours.make_mask(2, 8, 8, mask_function=function).expression for name, function in FUNCTIONS.items()}
    assert made["causal"] is tw.causal()
    assert repr(made["window"]) == "(K > Q + (NK - NQ) - 3) & (K <= Q + (NK - NQ))"
    everything = torch.ones(2, 8, dtype=torch.bool)
    assert ours.make_mask(2, 8, 8, attention_mask=everything).expression is tw.causal()
    assert "load" in repr(ours.make_mask(2, 8, 8, attention_mask=~everything).expression)


def test_padding_and_windows_skip_tiles() -> None:
    x = torch.zeros(2, 1, 2048, 8)
    padding = torch.arange(2048).expand(2, -1) >= torch.tensor([[0], [1024]])

    def skipped(**given: Any) -> float:
        counts = tw.explain(x, x, x, mask=ours.make_mask(2, 2048, 2048, **given).expression).plan.counts
        return counts[Kind.EMPTY] / sum(counts.values())

    window = theirs.sliding_window_causal_mask_function(256)
    assert 0.45 < skipped() < 0.5
    assert skipped(attention_mask=padding) > 0.6
    assert skipped(mask_function=window) > 0.8


def test_a_function_that_is_no_expression_gives_a_dense_mask() -> None:
    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.bitwise_xor(q, k) < 4

    place = torch.arange(8)
    want = (torch.bitwise_xor(place[:, None], place) < 4).expand(2, 1, 8, 8)
    assert torch.equal(ours.make_mask(2, 8, 8, mask_function=function), want)
    padding = place >= torch.tensor([[0], [1]])
    got = ours.make_mask(2, 8, 8, mask_function=function, attention_mask=padding)
    assert torch.equal(got, want & padding[:, None, None])
    x = torch.randn(2, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    out, _ = ours.attend(SimpleNamespace(training=False), x, x, x, got)
    torch.testing.assert_close(
        out.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention(x, x, x, got), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("causal", "n"), [(True, 5), (True, 1), (False, 5)])
def test_without_a_mask_a_module_says_whether_it_is_causal(causal: bool, n: int) -> None:
    q, k = torch.randn(2, 4, n, 8), torch.randn(2, 2, 8, 7).mT  # whose rows are not contiguous
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=causal and n > 1, enable_gqa=True)
    for module, option in (
        (SimpleNamespace(training=True, is_causal=causal), None),
        (SimpleNamespace(training=True), causal),
    ):
        out, weights = ours.attend(module, q, k, k, None, is_causal=option)
        assert weights is None
        assert out.is_contiguous()
        torch.testing.assert_close(out.transpose(1, 2), want)


def test_scores_are_capped_before_anything_is_added() -> None:
    """No model does both as yet; so does transformers' own FlexAttention."""
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    position_bias, added = 3 * torch.randn(2, 1, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    out, _ = ours.attend(
        SimpleNamespace(training=False), q, k, v, added, scaling=0.7, softcap=1.5, position_bias=position_bias
    )
    scores = 1.5 * torch.tanh(0.7 * q @ k.mT / 1.5) + position_bias + added
    torch.testing.assert_close(out.transpose(1, 2), scores.softmax(-1) @ v)


def test_a_mask_goes_to_the_device_of_a_layer() -> None:
    mask = ours.make_mask(2, 8, 8, attention_mask=torch.zeros(2, 8, dtype=torch.bool))
    moved = mask.to("meta", non_blocking=True)
    assert [str(slot.array.device) for slot in tw.walking.loads(moved.expression)] == ["meta"]
    assert moved.shape == mask.shape == (2, 1, 8, 8)
    assert isinstance(moved, BlockMask)
    assert repr(moved) == str(moved) == repr(mask)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_dropout_is_refused_in_training_alone() -> None:
    x = torch.zeros(1, 2, 4, 8)
    ours.attend(SimpleNamespace(training=False), x, x, x, None, dropout=0.1)
    with pytest.raises(tw.Unsupported, match=r"dropout: .* got 0\.1 in training; set the config's attention_dropout"):
        ours.attend(SimpleNamespace(training=True), x, x, x, None, dropout=0.1)


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_weights_are_refused(name: str) -> None:
    model = _model(name)
    model.set_attn_implementation("tilewise")
    given = {"decoder_input_ids": _words(1, 4)} if name == "T5" else {}
    with pytest.raises(tw.Unsupported, match=r"output_attentions: .* never stored"):
        model(input_ids=_words(1, 4), output_attentions=True, **given)


_OTHER = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 4, 4, device="cpu")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache": object()}, tw.Unsupported, "cache: keys and values in pages"),
        ({"attention_mask": torch.ones(1, 4)}, TypeError, r"attention_mask: expected .* got Tensor of shape \(1, 4\)"),
        ({"attention_mask": _OTHER}, TypeError, "attention_mask: expected .* got BlockMask of shape"),
        ({"attention_mask": "causal"}, TypeError, "attention_mask: expected .* got str"),
        ({"attention_mask": ours.make_mask(1, 3, 5)}, ValueError, r"made for \(queries, keys\) \(3, 5\), .* \(4, 4\)"),
        ({"attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.int64)}, TypeError, "of type float, got int64"),
        ({"softcap": -1.0}, ValueError, "softcap: cap must be a positive number"),
    ],
)  # fmt: skip
def test_mistakes(change: dict[str, Any], error: type[Exception], message: str) -> None:
    x = torch.zeros(1, 2, 4, 8)
    given = {"module": SimpleNamespace(training=False), "query": x, "key": x, "value": x, "attention_mask": None}
    ours.attend(**given)
    with pytest.raises(error, match=message):
        ours.attend(**{**given, **change})


def test_models_that_take_masks_apart_are_told() -> None:
    mask = ours.make_mask(1, 4, 4)
    with pytest.raises(tw.Unsupported, match="attention_mask: this model takes a part of its mask"):
        mask[:, :, :, :3]
    with pytest.raises(AttributeError, match="attention_mask: this model asks its mask for 'dtype'"):
        mask.dtype  # noqa: B018


# -- registering ------------------------------------------------------------------------------------------------------


def test_a_kernel_system_by_name(calls: list[dict[str, Any]]) -> None:
    ours.register("tilewise_numpy", kernel="numpy")
    model = _model("Llama")
    model.set_attn_implementation("tilewise_numpy")
    model(input_ids=_words(1, 4))
    assert {call["kernel"] for call in calls} == {"numpy"}
    with pytest.raises(ValueError, match="kernel"):
        ours.register(kernel="no such system")


def test_without_transformers_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match=r"needs transformers 5\.20 or newer .*pip install 'tilewise\[transformers\]'"
    ):
        runpy.run_path(ours.__file__)
