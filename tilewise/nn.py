"""Modules for PyTorch: multi-head attention of any variant, with fused projections and a rotary embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.api import attention, decode
from tilewise.cache import Cache, KVCache
from tilewise.projection import MAX_HEAD_DIM, check_heads, fused_qkv_projection
from tilewise.pytorch.turning import is_followed
from tilewise.rope import Rope
from tilewise.validate import whole

MAX_FEATURES = 2**20


class MultiHeadAttention(nn.Module):  # type: ignore[misc]
    """Self-attention of x, (batch, n, features): one projection to q, k and v, attention, one projection back.

    heads, heads_k: of queries, and of keys and values (grouped queries); all alike unless given.
    head_dim: features / heads unless given.  bias: of both projections.
    rope: q and k are turned by their positions.  causal, mask, score, scale: as `tw.attention` takes them; whatever a
    call gives takes their place.  sinks: a learned logit per query head that joins each row sum.
    kernel: of attention, as `tw.attention` takes it.
    mesh, layout, method: x is this rank's part of sequences that the ranks of the mesh share, as
    `tilewise.parallel.attention` takes them.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        heads_k: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        rope: Rope | None = None,
        causal: bool = False,
        mask: Any = None,
        score: Any = None,
        scale: float | None = None,
        sinks: bool = False,
        kernel: str = "auto",
        mesh: Any = None,
        layout: Any = "contiguous",
        method: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        features = whole("features", features, 1, MAX_FEATURES)
        self.heads, self.heads_k = heads, _ = check_heads(heads, heads if heads_k is None else heads_k)
        given = _head_dim(features, heads) if head_dim is None else head_dim
        self.head_dim = whole("head_dim", given, 1, MAX_HEAD_DIM)
        self.rope, self.kernel = rope, kernel
        self.ranks = None if mesh is None else {"mesh": mesh, "layout": layout, "method": method}
        self.options = {"causal": causal, "mask": mask, "score": score, "scale": scale}
        columns = (heads + 2 * self.heads_k) * self.head_dim
        self.qkv = nn.Linear(features, columns, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(heads * self.head_dim, features, bias=bias, device=device, dtype=dtype)
        self.sinks = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype)) if sinks else None

    def forward(self, x: Tensor, *, cache: Cache | None = None, rope: Rope | None = None, **options: Any) -> Tensor:
        """x: (batch, n, features); rope and options take the place of the module's, for this call.

        cache: a tw.KVCache or tw.PagedKVCache. x then has the next n words of each sequence: their keys and values are
        appended to it, turned, and attention goes to all that it has. Under torch.no_grad().
        """
        unknown = options.keys() - self.options.keys()
        if unknown:
            raise TypeError(f"{sorted(unknown)[0]}: expected one of {', '.join(('rope', *self.options))}")
        _check(x, self.qkv.weight)
        rope = self.rope if rope is None else rope
        if cache is not None and rope is not None and rope.positions is None:
            rope = _behind(rope, cache, x.shape[1])
        q, k, v = fused_qkv_projection(
            x, self.qkv.weight.T, self.qkv.bias, heads=self.heads, heads_k=self.heads_k, d=self.head_dim,
            rope=rope if self.ranks is None else None,
        )  # fmt: skip
        how = {"sinks": self.sinks, "kernel": self.kernel, **self.options, **options}
        if self.ranks is not None:
            done = _over_ranks(q, k, v, cache, rope=rope, **self.ranks, **how)
        elif cache is not None:
            done = decode(q, cache, k=k, v=v, **how)
        else:
            projected = _projected_at_once(q, k, v, self.out, **how)
            if projected is not None:
                return projected
            done = attention(q, k, v, **how)
        return self.out(done.transpose(1, 2).flatten(2))

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for this many sequences, of as many words at most, where the module is."""
        like = self.qkv.weight.new_empty(1, self.heads_k, 1, self.head_dim).expand(whole("batch", batch), -1, -1, -1)
        return KVCache.like(like, like, capacity=capacity)

    def extra_repr(self) -> str:
        """What printing a module shows beside its layers."""
        said = {"heads": self.heads, "heads_k": self.heads_k, "head_dim": self.head_dim, "rope": self.rope}
        said |= {name: value for name, value in self.options.items() if value is not False}
        return ", ".join(f"{name}={value}" for name, value in said.items() if value is not None)


def _projected_at_once(q: Tensor, k: Tensor, v: Tensor, out: nn.Module, kernel: str, **how: Any) -> Tensor | None:
    """Attention and the projection behind it by one kernel, where `auto` may take it and it is faster; or None."""
    if torch.compiler.is_compiling() or kernel != "auto" or not _are_numbers_alone(q, out):
        return None
    from tilewise.kernels.cute.projection import projected_if_it_pays

    y: Tensor | None = projected_if_it_pays(q, k, v, out.weight.T, **how)
    return y if y is None or out.bias is None else y.add_(out.bias)


def _are_numbers_alone(q: Tensor, out: nn.Module) -> bool:
    """On a GPU, with no gradients, no other layer in the projection's place, and nobody who looks on."""
    is_watched = torch.is_grad_enabled() or torch.is_autocast_enabled("cuda") or is_followed()
    is_plain = type(out) is nn.Linear and not out._forward_hooks and not out._forward_pre_hooks
    return q.device.type == "cuda" and is_plain and not is_watched


def _over_ranks(q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, **how: Any) -> Tensor:
    """Where rows stand in the whole sequence is known there, and turns q and k."""
    from tilewise import parallel  # which needs PyTorch's distributed engine

    if cache is not None:
        raise ValueError("cache: a module with a mesh trains on whole sequences; make one without to decode")
    done: Tensor = parallel.attention(q, k, v, **how)
    return done


def _behind(rope: Rope, cache: Cache, n: int) -> Rope:
    """At the positions of the next n words of each sequence."""
    lengths = torch.as_tensor(cache.lengths)
    return replace(rope, positions=lengths[:, None] + torch.arange(n, device=lengths.device))


def _head_dim(features: int, heads: int) -> int:
    if features % heads:
        raise ValueError(
            f"heads: expected a number that divides features, which is {features}, got {heads}; or head_dim"
        )
    return features // heads


def _check(x: Any, weight: Tensor) -> None:
    """Whether x can be projected: said here, where it is x that the caller knows, and not the weights."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a PyTorch tensor, got {type(x).__name__}; pass torch.as_tensor(x)")
    if x.dim() != 3 or x.shape[2] != weight.shape[1]:
        raise ValueError(
            f"x: expected (batch, n, {weight.shape[1]}), the features that the module was made for, "
            f"got shape {tuple(x.shape)}"
        )
    if x.device != weight.device:
        raise ValueError(
            f"x: expected a tensor on {weight.device} as the module is, got one on {x.device}; move one of them: "
            f"x.to({str(weight.device)!r}) or module.to({str(x.device)!r})"
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"x: expected {weight.dtype} as the module's weights are, got {x.dtype}; convert x with "
            f"x.to({weight.dtype}) or the module with module.to({x.dtype}), or call it under torch.autocast"
        )
