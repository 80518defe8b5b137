"""A cache in pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.arrays import Array
from tilewise.cache.base import Cache, Numbers
from tilewise.cache.checks import check_storage, named, positive, zeros

LEAST_PAGE = 16  # keys, as tensor cores take them
NO_PAGE = -1
MOST_PLACES = 2**28  # of a table, for all sequences together: 1 GiB, in which places are told by 32-bit integers


class PagedKVCache(Cache):
    """Keys and values in pages, which sequences take as they grow and give back when they end.

    k is (pages, heads, page size, d), v likewise, d may differ; a page size is a power of 2 from 16 on. The arrays are
    the caller's and are written in place; `PagedKVCache.like(k, v, pages=n)` makes them.
    batch: how many sequences there is room for.  capacity: the most keys of one; unless given, what all pages hold.

        cache = tw.PagedKVCache.like(k, v, pages=1024, page_size=64)
        cache.append(k, v, counts=[900, 17])
        cache.release(1)  # its pages are free again
    """

    def __init__(self, k: Any, v: Any, batch: int, capacity: int | None = None) -> None:
        check_storage(k, v, "(pages, heads, page size, d)")
        pages, size = int(k.shape[0]), int(k.shape[2])
        if size < LEAST_PAGE or size & (size - 1):
            raise ValueError(f"page size: expected a power of 2 from {LEAST_PAGE} on, got {size}")
        most = pages * size if capacity is None else min(positive("capacity", capacity), pages * size)
        columns = -(-most // size)
        super().__init__(k, v, positive("batch", batch, MOST_PLACES // columns), most, 0)
        self._table = Numbers(np.full((self.batch, columns), NO_PAGE, np.int32), k)
        self._free = list(range(pages))[::-1]  # the last is taken first: pages given back are taken again soon
        self._pages: list[list[int]] = [[] for _ in range(self.batch)]

    @classmethod
    def like(
        cls, k: Any, v: Any, *, pages: int, page_size: int = LEAST_PAGE, batch: int | None = None,
        capacity: int | None = None,
    ) -> PagedKVCache:  # fmt: skip
        """An empty one for such arrays, (batch, heads, n, d), of the same library, type and device."""
        pages, page_size = positive("pages", pages), positive("page_size", page_size)
        stored_k, stored_v = (zeros(name, x, page_size, pages) for name, x in named(k, v))
        return cls(stored_k, stored_v, int(k.shape[0]) if batch is None else batch, capacity)

    @property
    def page_size(self) -> int:
        return int(self.k.shape[2])

    @property
    def table(self) -> Any:
        """Which pages each sequence has, in order: (batch, most) int32, where the keys are; -1: none."""
        return self._table.array

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def release(self, *sequences: Any) -> None:
        super().release(*sequences)
        for b in map(int, sequences):
            self._free += self._pages[b][::-1]
            self._table.put((b, slice(0, len(self._pages[b]))), NO_PAGE)
            self._pages[b] = []

    def sequence(self, b: int) -> tuple[Any, Any]:
        n = int(self._lengths.host[b])
        k, v = (self._gathered(x, self._pages[b], n) for x in (self.k, self.v))
        return k, v

    def _gathered(self, x: Any, pages: list[int], n: int) -> Any:
        rows = x[pages].swapaxes(0, 1).reshape(self.heads, -1, x.shape[3])
        return rows[None, :, :n]

    def _make_room(self, counts: Array) -> None:
        super()._make_room(counts)
        needed = -(-(self._lengths.host + counts) // self.page_size)
        rows = np.repeat(np.arange(self.batch), needed - [len(pages) for pages in self._pages])
        if len(rows) > len(self._free):
            advice = ", or end sequences with cache.release(...)" if len(self._free) < len(self.k) else ""
            raise ValueError(
                f"append: {len(rows)} more pages of {self.page_size} keys are needed, and {len(self._free)} of "
                f"{len(self.k)} are free; make a cache of more pages{advice}"
            )
        columns, taken = np.zeros_like(rows), np.zeros(len(rows), np.int32)
        for i, b in enumerate(rows):
            columns[i], taken[i] = len(self._pages[b]), self._free.pop()
            self._pages[b].append(int(taken[i]))
        if len(taken):
            self._table.put((rows, columns), taken)

    def _place(self, b: Array, key: Array) -> tuple[Array, Array]:
        return self._table.host[b, key // self.page_size], key % self.page_size
