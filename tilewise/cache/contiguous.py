"""A cache in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.cache.base import Cache
from tilewise.cache.checks import check_storage, named, positive, zeros


class KVCache(Cache):
    """Keys and values of each sequence in one piece: k is (batch, heads, capacity, d), v likewise, d may differ.

    The arrays are the caller's, NumPy's or PyTorch's, and are written in place. lengths: how many keys each sequence
    has in them already, a number or one a sequence. `KVCache.like(k, v, capacity=n)` makes an empty cache instead.

        cache = tw.KVCache.like(k, v, capacity=4096)
        cache.append(k, v)
        out = tw.decode(q, cache, k=new_k, v=new_v, causal=True)
    """

    def __init__(self, k: Any, v: Any, lengths: Any = 0) -> None:
        check_storage(k, v, "(batch, heads, capacity, d)")
        super().__init__(k, v, int(k.shape[0]), int(k.shape[2]), lengths)

    @classmethod
    def like(cls, k: Any, v: Any, *, capacity: int) -> KVCache:
        """An empty one for such arrays, (batch, heads, n, d), of the same library, type and device."""
        capacity = positive("capacity", capacity)
        return cls(*(zeros(name, x, capacity) for name, x in named(k, v)))

    def sequence(self, b: int) -> tuple[Any, Any]:
        n = int(self._lengths.host[b])
        return self.k[b : b + 1, :, :n], self.v[b : b + 1, :, :n]

    def together(self) -> tuple[Any, Any] | None:
        lengths = self._lengths.host
        return (self.k[:, :, : lengths[0]], self.v[:, :, : lengths[0]]) if np.all(lengths == lengths[0]) else None
