"""Hugging Face transformers: `register()`, then `attn_implementation="tilewise"`.

A model calls two functions by that name: one makes the mask, once a forward pass, the other attends, once a layer.
The first is told the mask as a function of positions, as FlexAttention is. It calls that function with our variables
and hands the expression on to the layers: causal masks, windows, padding and packed sequences skip tiles, and no array
of (queries, keys) is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import rshift
from typing import Any

from tilewise import variants
from tilewise.api import attention
from tilewise.dispatch import Unsupported, check_name
from tilewise.expr import B, Expr, K, Q, constant, load
from tilewise.flex import from_mask_mod
from tilewise.variants._checks import P
from tilewise.walking import loads

try:
    import torch
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.utils.import_utils import is_tracing
except ImportError as error:
    raise ImportError(
        f"tilewise.integrations.transformers needs transformers 5.20 or newer ({error}); "
        "install it with pip install 'tilewise[transformers]'"
    ) from error


def register(name: str = "tilewise", kernel: str = "auto", *, mesh: Any = None, layout: Any = "contiguous") -> None:
    """Let transformers know Tilewise: from now on models take attn_implementation=name, in this process.

    kernel: the kernel system that computes, as in tw.attention.
    mesh, layout: models are given this rank's part of sequences that the ranks of the mesh share, and of their
    position_ids (parallel.positions) and padding, as `tilewise.parallel.attention` takes them.
    """
    check_name(kernel)
    ranks = None if mesh is None else {"mesh": mesh, "layout": layout}
    AttentionInterface.register(name, partial(attend, kernel=kernel, ranks=ranks))
    AttentionMaskInterface.register(name, partial(make_mask, ranks=ranks))


# -- masks ------------------------------------------------------------------------------------------------------------


class Mask(BlockMask):  # type: ignore[misc]
    """A mask as an expression; a BlockMask, as transformers takes only these and tensors for a mask that is ready."""

    def __init__(self, expression: Expr, shape: tuple[int, int, int, int]) -> None:
        self.expression = expression
        self._shape = shape

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the scores that it is for: (batch, 1, queries, keys), as heads share it."""
        return self._shape

    def to(self, device: Any, **options: Any) -> Mask:
        """Layers may be on several devices."""
        return Mask(self.expression.to(device, **options), self._shape)

    def contiguous(self) -> Mask:
        """What generate() asks of every mask."""
        return self

    def __getitem__(self, index: Any) -> Any:
        raise Unsupported(f"attention_mask: this model takes a part of its mask, {index!r}; {_ONLY_TENSORS}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"attention_mask: this model asks its mask for {name!r}; {_ONLY_TENSORS}")

    def __repr__(self) -> str:
        return f"Mask({self.expression!r}, shape={self._shape})"

    __str__ = __repr__


_ONLY_TENSORS = (
    "Tilewise's is an expression, not a tensor: pass a 4-dimensional attention_mask of your own, or load the model "
    'with attn_implementation="sdpa"'
)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Any = None,
    ranks: Any = None,
    **options: Any,
) -> Any:
    """The mask of one forward pass: a Mask, a boolean tensor, or None if nothing is masked.

    mask_function(batch, head, query, key): whether the query may attend to the key, by their positions in the sequence.
    q_offset, kv_offset: the positions of the first query and the first key.  attention_mask: (batch, keys), False for
    padding.  options: what transformers tells its own implementations.
    """
    by_tensors = partial(sdpa_mask, batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    # A row of keys is as small as the padding is; decoding may be compiled, which tensors suit best.
    if q_length == 1 and ranks is None:
        return by_tensors(**options)
    if ranks is not None and (q_length != kv_length or kv_offset):
        raise Unsupported(
            f"past_key_values: ranks share whole sequences, and here are {q_length} queries for {kv_length} keys; pass "
            "use_cache=False, or register() without a mesh to generate"
        )
    query, key = _positions(q_length, kv_length, q_offset, kv_offset)
    try:
        mask = from_mask_mod(lambda b, *_: mask_function(b, constant(0), query, key))  # heads share a mask
    except (TypeError, AttributeError):  # it does what no expression can: only its values are left
        if ranks is not None:
            raise Unsupported(
                "attention_mask: this model's mask is no expression, so that ranks, which have a part of the sequence "
                'each, cannot know it; register() without a mesh, or load the model with attn_implementation="sdpa"'
            ) from None
        return by_tensors(**options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    if ranks is not None and not torch.compiler.is_compiling():
        _refuse_packing(mask, ranks)
    counts = _padding(attention_mask, kv_length, kv_offset, ranks)
    if counts is not None:
        mask = mask & load(counts, B, K)
    return Mask(mask, (batch_size, 1, q_length, kv_length))


def _refuse_packing(mask: Expr, ranks: dict[str, Any]) -> None:
    """On every rank, if one finds it: a zig-zag has a jump on some ranks alone."""
    from tilewise.parallel.agreement import agree
    from tilewise.parallel.mesh import ranks_of

    def own() -> dict[str, Any]:
        if loads(mask):
            raise Unsupported(
                "position_ids: transformers takes their jumps for sequences that are packed, and a rank knows its own "
                "alone; pass attention_mask=torch.ones_like(words), of each rank's words, which says that all count"
            )
        return {}

    agree(ranks_of(ranks["mesh"]), own)


def _positions(q_length: int, kv_length: int, q_offset: Any, kv_offset: int) -> tuple[Expr, Expr]:
    """Where queries and keys stand in the sequence, as expressions."""
    key = _shifted(K, kv_offset)
    if isinstance(q_offset, torch.Tensor):
        return Q + load(q_offset.clone()), key  # a static cache counts on in place, before the layers attend
    if q_offset + q_length == kv_offset + kv_length:  # counted from the last key, one expression serves all lengths
        return _shifted(P, kv_offset), key
    return _shifted(Q, q_offset), key


def _shifted(position: Expr, by: int) -> Expr:
    return position + by if by else position


def _padding(attention_mask: Any, kv_length: int, kv_offset: int, ranks: Any = None) -> Any:
    """Which keys count, (batch, keys), or None if all do. Masks read arrays of the whole sequence."""
    if attention_mask is None:
        return None
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    if missing > 0:  # a static cache has room for keys to come
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    counts = attention_mask[:, kv_offset : kv_offset + kv_length]
    if ranks is not None:
        from tilewise import parallel

        counts = parallel.unshard(counts.to(torch.uint8), dim=1, **ranks).bool()
    return None if not is_tracing(counts) and counts.all() else counts


# -- attention --------------------------------------------------------------------------------------------------------


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Any = None,
    s_aux: Any = None,
    kernel: str = "auto",
    ranks: Any = None,
    **options: Any,
) -> tuple[Any, None]:
    """The attention of one layer. query: (batch, heads, n, d); key and value have as many heads, or fewer. The result
    is (batch, n, heads, d), and None in place of weights, which are never stored."""
    _refuse(module, dropout, options)
    mask, added = _mask(attention_mask, query, key)
    if attention_mask is None and query.shape[2] > 1 and _is_causal(module, is_causal):
        mask = K <= Q  # keys beyond the queries are room in a static cache, to be filled later
    score = _score(softcap, position_bias, added)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    how = {"mask": mask, "score": score, "scale": scaling, "sinks": s_aux, "kernel": kernel}
    out = attention(query, key, value, **how) if ranks is None else _over_ranks(query, key, value, ranks, how)
    return out.transpose(1, 2).contiguous(), None


def _over_ranks(query: Any, key: Any, value: Any, ranks: Any, how: dict[str, Any]) -> Any:
    from tilewise import parallel

    return parallel.attention(query, key, value, **ranks, **how)


def _refuse(module: Any, dropout: float, options: dict[str, Any]) -> None:
    """What only an implementation that stores all weights can do, or that keeps keys in pages."""
    if dropout and module.training:
        raise Unsupported(
            f"dropout: attention is computed without dropout, got {dropout!r} in training; set the config's "
            "attention_dropout (T5: dropout_rate) to 0.0, or call model.eval()"
        )
    if options.get("output_attentions"):
        raise Unsupported(
            "output_attentions: attention weights are never stored, so they cannot be returned; leave it False, or "
            'load the model with attn_implementation="eager"'
        )
    if options.get("cache") is not None:
        raise Unsupported(
            f"cache: keys and values in pages ({type(options['cache']).__name__}) are not read; generate without "
            "continuous batching"
        )


def _mask(attention_mask: Any, query: Any, key: Any) -> tuple[Expr | None, Any]:
    """What a layer was given, as a mask and as something to be added to the scores."""
    if attention_mask is None:
        return None, None
    if not isinstance(attention_mask, (Mask, torch.Tensor)) or len(attention_mask.shape) != 4:
        found = f"of shape {tuple(attention_mask.shape)}" if hasattr(attention_mask, "shape") else ""
        raise TypeError(
            "attention_mask: expected what tilewise's mask function made, or a tensor of shape (batch, heads, queries, "
            f"keys), got {type(attention_mask).__name__} {found}; register() again if masks were registered since"
        )
    if not isinstance(attention_mask, Mask):
        is_bool = attention_mask.dtype == torch.bool
        return (variants.dense(attention_mask), None) if is_bool else (None, attention_mask)
    made_for, lengths = tuple(attention_mask.shape[2:]), (query.shape[2], key.shape[2])
    if made_for != lengths:  # an expression would fit any
        raise ValueError(
            f"attention_mask: it was made for (queries, keys) {made_for}, and this layer has {lengths}; pass a "
            "4-dimensional attention_mask of your own"
        )
    return attention_mask.expression, None


def _is_causal(module: Any, is_causal: bool | None) -> bool:
    """What holds where a model makes no mask: as transformers' own implementation by SDPA has it."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _score(softcap: float | None, *added: Any) -> Expr | None:
    """Scores are capped first; then biases and masks are added."""
    steps = [] if softcap is None else [variants.softcap(softcap)]
    steps += [variants.bias(x) for x in added if x is not None]
    return reduce(rshift, steps) if steps else None
