"""Blocks of queries and keys: which there are, who sees what in one, and how many need not be computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import index
from typing import SupportsIndex

import numpy as np

from tilewise.arrays import Array
from tilewise.lab.checks import whole

# What a block of queries may see of a block of keys: True is every key, False is none (skip it), an array says which.
Visible = Callable[[slice, slice], "Array | bool"]


class Blocks(int):
    """How many blocks, (query block, key block) pairs, are computed: a whole number, with the total and the skipped.

    Two counts are equal if as many blocks are computed; `total` and `skipped` are not compared.
    """

    total: int
    skipped: int

    def __new__(cls, total: SupportsIndex, computed: SupportsIndex) -> Blocks:
        made = super().__new__(cls, index(computed))
        made.total, made.skipped = index(total), index(total) - index(computed)
        return made

    @property
    def computed(self) -> int:
        return int(self)

    def __repr__(self) -> str:
        return f"Blocks(total={self.total}, computed={int(self)}, skipped={self.skipped})"

    def __str__(self) -> str:
        return repr(self)

    def __reduce__(self) -> tuple[type[Blocks], tuple[int, int]]:  # copies and pickles keep both numbers
        return Blocks, (self.total, int(self))


def count_blocks(n_q: int, n_kv: int, block_q: int, block_kv: int, causal: bool) -> Blocks:
    """How many block pairs an attention computes, an int that knows `.total` and `.skipped`; none is visited.

        count_blocks(128, 128, 32, 32, causal=True)  # 10, of 16

    The last query of block i sees keys up to (i + 1) * block_q - 1 + n_kv - n_q; a block that starts later is skipped.
    """
    n_q, n_kv = whole("n_q", n_q, least=0), whole("n_kv", n_kv, least=0)
    block_q, block_kv = whole("block_q", block_q), whole("block_kv", block_kv)
    blocks_q, blocks_kv = -(-n_q // block_q), -(-n_kv // block_kv)
    total = blocks_q * blocks_kv
    if not causal:
        return Blocks(total, total)
    last_keys = (min((i + 1) * block_q, n_q) - 1 + n_kv - n_q for i in range(blocks_q))
    computed = sum(max(0, last_key // block_kv + 1) for last_key in last_keys)
    return Blocks(total, computed)


def blocks(n: int, size: int) -> Iterator[slice]:
    """0 to n in slices of `size`; the last one may be shorter."""
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def visible_dense(mask: Array, rows: slice, cols: slice) -> Array | bool:
    """What a block sees of a mask (n_q, n_k)."""
    block = mask[rows, cols]
    return True if block.all() else block if block.any() else False


def visible_causal(offset: int, rows: slice, cols: slice) -> Array | bool:
    """What the queries `rows` may see of the keys `cols`, where query i sees the keys up to i + offset.

    False: nothing, the block is skipped. True: everything, no mask is needed. Else booleans (rows, cols).
    """
    if rows.stop - 1 + offset < cols.start:  # not even the last query sees the first key
        return False
    if rows.start + offset >= cols.stop - 1:  # even the first query sees the last key
        return True
    return np.arange(cols.start, cols.stop) <= np.arange(rows.start, rows.stop)[:, None] + offset
