"""PyTorch's scaled_dot_product_attention, argument for argument, computed by Tilewise."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from tilewise import arrays, variants
from tilewise.api import attention
from tilewise.dispatch import Unsupported
from tilewise.expr import Expr, K, Q

_TOP_LEFT = K <= Q  # how PyTorch aligns causal attention


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """What torch.nn.functional.scaled_dot_product_attention computes, from the same arguments; NumPy arrays too.

    query: (..., n, d), key: (..., m, d), value: (..., m, d_v). Leading dimensions broadcast. The last of them are the
    heads: with enable_gqa those of key and value need only divide those of query.
    attn_mask: bool (True: may attend) or float (added), broadcastable to (..., n, m); a float tensor that requires grad
    gets its gradient.  is_causal: query i sees keys 0 to i, whatever the lengths. This is aligned top left, where
    tw.causal() is aligned bottom right. With attn_mask both hold.
    A row that sees no key is 0; PyTorch's is 0 or NaN, depending on its version and backend.
    dropout_p must be 0: weights that are never stored cannot be dropped.
    """
    if dropout_p != 0:
        raise Unsupported(f"dropout_p: attention is computed without dropout, got {dropout_p!r}; pass 0.0")
    _check(query, key, value, enable_gqa)
    if attn_mask is None and _is_plain(query, key, value):
        return attention(query, key, value, mask=_TOP_LEFT if is_causal else None, scale=scale)
    batch, heads = _leading(query, key, value, enable_gqa)
    heads_k = _heads(key) if _heads(key) == _heads(value) else heads
    q, k, v = (_standard(x, batch, h) for x, h in ((query, heads), (key, heads_k), (value, heads_k)))
    mask: Expr | None = _TOP_LEFT if is_causal else None
    score: Expr | None = None
    if attn_mask is not None:
        aligned = _aligned(attn_mask, batch, (heads, q.shape[2], k.shape[2]))
        if arrays.kind_of(aligned) == "float":
            score = variants.bias(aligned)
        else:
            mask = variants.dense(aligned) if mask is None else mask & variants.dense(aligned)
    out = attention(q, k, v, mask=mask, score=score, scale=scale)
    lead = (*batch, heads) if max(len(x.shape) for x in (query, key, value)) > 2 else ()
    return out.reshape((*lead, *out.shape[2:]))


def _is_plain(query: Any, key: Any, value: Any) -> bool:
    """Tensors that need no broadcasting: most calls, and this costs less than finding out what broadcasts to what."""
    return arrays.is_torch(query) and all(
        len(x.shape) == 4 and x.shape[:2] == query.shape[:2] and x.stride(3) == 1 for x in (query, key, value)
    )


def _check(query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not arrays.is_array(x):
            advice = arrays.list_advice(x)
            raise TypeError(f"{name}: expected a NumPy array or a PyTorch tensor, got {type(x).__name__}{advice}")
        if len(x.shape) < (3 if enable_gqa else 2):
            expected = "(..., heads, n, d), as enable_gqa needs" if enable_gqa else "(..., n, d)"
            raise ValueError(f"{name}: expected {expected}, got shape {tuple(x.shape)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: expected a last dimension of {query.shape[-1]} as query has, got {key.shape[-1]}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value: expected {key.shape[-2]} rows as key has, got {value.shape[-2]}")


def _heads(x: Any) -> int:
    heads: int = x.shape[-3] if len(x.shape) > 2 else 1
    return heads


def _leading(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[tuple[int, ...], int]:
    """The batch dimensions of the result, and its heads."""
    given = (query, key, value)
    batch = _broadcast([tuple(x.shape[:-3]) for x in given])
    if batch is None:
        raise ValueError(f"query, key, value: leading dimensions must broadcast, got shapes {_shapes(given)}")
    sizes = [_heads(x) for x in given]
    if not enable_gqa:
        heads = _broadcast([(n,) for n in sizes])
        if heads is None:
            raise ValueError(f"query, key, value: heads that differ need enable_gqa=True, got shapes {_shapes(given)}")
        return batch, heads[0]
    for name, n in (("key", sizes[1]), ("value", sizes[2])):
        if n == 0 or sizes[0] % n:
            raise ValueError(
                f"{name}: its heads must divide query's {sizes[0]} (enable_gqa), got {n}; heads come third from last"
            )
    return batch, sizes[0]


def _shapes(given: tuple[Any, ...]) -> str:
    return ", ".join(str(tuple(x.shape)) for x in given)


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape that these broadcast to, or None."""
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    merged = tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))
    fits = all(n in (1, want) for shape in padded for n, want in zip(shape, merged, strict=True))
    return merged if fits else None


def _standard(x: Any, batch: tuple[int, ...], heads: int) -> Any:
    """(batch, heads, n, d), rows contiguous; a view unless that takes a copy."""
    x = x[None] if len(x.shape) == 2 else x
    if _heads(x) not in (1, heads):  # key and value have different numbers of heads
        repeats = heads // _heads(x)
        x = x.repeat_interleave(repeats, -3) if arrays.is_torch(x) else np.repeat(x, repeats, -3)
    x = _expanded(x, (*batch, heads, *x.shape[-2:]))
    if len(batch) != 1:
        x = x.reshape((math.prod(batch), *x.shape[-3:]))
    if arrays.is_torch(x):
        return x if x.stride(-1) == 1 else x.contiguous()
    return x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


def _expanded(x: Any, shape: tuple[int, ...]) -> Any:
    if tuple(x.shape) == shape:
        return x
    return (sys.modules["torch"] if arrays.is_torch(x) else np).broadcast_to(x, shape)


def _aligned(mask: Any, batch: tuple[int, ...], scores: tuple[int, int, int]) -> Any:
    """attn_mask with one batch dimension at most; dimensions of size 1 stay so, but where batch dimensions mix."""
    if not arrays.is_array(mask) or arrays.kind_of(mask) not in ("bool", "float"):
        found = arrays.dtype_name(mask) if arrays.is_array(mask) else type(mask).__name__
        raise TypeError(f"attn_mask: expected an array of bool (True: may attend) or float (added), got {found}")
    want = (*batch, *scores)
    if len(mask.shape) > len(want) or _broadcast([tuple(mask.shape), want]) != want:
        raise ValueError(f"attn_mask: expected a shape that broadcasts to {want}, got {tuple(mask.shape)}")
    if len(mask.shape) <= 4 and len(batch) == 1:
        return mask if len(mask.shape) else mask[None]
    tail, mixed = mask.shape[-3:], mask.shape[:-3]
    if any(size != 1 for size in mixed):
        mask = _expanded(mask, (*batch, *tail))
    return mask.reshape((math.prod(mask.shape[:-3]), *tail))
