"""Attention that a referee must see through. Children find the functions by name: tests.fake_attention:right ..."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from typing import Any

import torch

_ROUNDS = itertools.count()


def right(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False, scale: float = 1.0
) -> Any:
    """In float64, aligned bottom right; rows without keys are 0."""
    group = q.shape[1] // k.shape[1]
    wide = [x.double().repeat_interleave(n, 1) for x, n in ((q, 1), (k, group), (v, group))]
    s = scale * wide[0] @ wide[1].mT
    if bias is not None:
        s = s + bias
    seen = torch.ones(s.shape, dtype=torch.bool) if mask is None else mask.expand(s.shape)
    if causal:
        seen = seen.tril(s.shape[3] - s.shape[2])
    s = s.masked_fill(~seen, -math.inf)
    empty = (s == -math.inf).all(-1, keepdim=True)
    p = s.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return (p @ wide[2]).to(q.dtype)


def undefined(q: Any, k: Any, v: Any, *, mask: Any = None, scale: float = 1.0) -> Any:
    """NaN in rows without keys, as a plain softmax gives."""
    out = right(q, k, v, mask=mask, scale=scale)
    if mask is None:
        return out
    return torch.where(mask.expand(*q.shape[:3], k.shape[2]).any(-1, keepdim=True), out, math.nan)


def top_left(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float = 1.0) -> Any:
    """Says nothing of it, so that it is asked for bottom right."""
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if causal else None
    return right(q, k, v, mask=seen, scale=scale)


def leaving(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float = 1.0) -> Any:
    if causal:
        os._exit(7)
    return right(q, k, v, scale=scale)


def faulting(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float = 1.0) -> Any:
    if causal:
        os.kill(os.getpid(), signal.SIGSEGV)
    return right(q, k, v, scale=scale)


def losing(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float = 1.0) -> Any:
    """As PyTorch tells that the GPU's context is lost: every later call of the process fails too."""
    if causal:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return right(q, k, v, scale=scale)


def hanging(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float = 1.0) -> Any:
    if causal:
        time.sleep(300)
    return right(q, k, v, scale=scale)


def changing(q: Any, k: Any, v: Any, *, scale: float = 1.0) -> Any:
    """Another bit each time, far below any limit."""
    return right(q, k, v, scale=scale) * (1 + 2.0**-23 * (next(_ROUNDS) % 2))


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, d_x: Any) -> Any:
        return 1.5 * d_x


def careless(q: Any, k: Any, v: Any, *, scale: float = 1.0) -> Any:
    """Right, but the gradient of k is half as large again."""
    return right(q, _WrongGradient.apply(k), v, scale=scale)


def refusing(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float = 1.0) -> Any:
    if q.shape[3] % 8:
        raise ValueError(f"head dimension {q.shape[3]}: expected a multiple of 8")
    return right(q, k, v, causal=causal, scale=scale)


def listing(q: Any, k: Any, v: Any, *, scale: float = 1.0) -> Any:
    return [right(q, k, v, scale=scale)]


def silent(q: Any, k: Any, v: Any, *, scale: float = 1.0) -> None:
    """It computes, and forgets to return."""
    right(q, k, v, scale=scale)


def beside(q: Any, k: Any, v: Any, *, scale: float = 1.0) -> Any:
    return right(q, k, v, scale=scale), None, 3


def counting(q: Any, k: Any, v: Any, *, scale: float = 1.0) -> Any:
    return right(q, k, v, scale=scale).long()


def opening(q: Any, k: Any, v: Any, *, mask: Any, scale: float = 1.0) -> Any:
    """The right result, but the mask lets everything through from now on."""
    out = right(q, k, v, mask=mask, scale=scale)
    mask.fill_(True)
    return out


def writing(q: Any, k: Any, v: Any, *, scale: float = 1.0) -> Any:
    """The right result, but q is not what it was."""
    out = right(q, k, v, scale=scale)
    q.data.mul_(2)
    return out
