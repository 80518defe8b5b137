"""Exact attention in blocks, on (..., n, d) arrays, and the definition to compare it with."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.arrays import Array, compute_dtype, narrow, widen
from tilewise.lab.blocks import Blocks, Visible, blocks, count_blocks, visible_causal, visible_dense
from tilewise.lab.checks import check_floats, check_inputs, check_mask, whole
from tilewise.lab.loops import init, keys_outer, queries_outer, update_block
from tilewise.softmax import finite


def online_softmax(x: Array, block_size: int = 32) -> Array:
    """Softmax over the last axis: one pass over blocks finds the maximum and the sum together, then x is normalised.

    It is attention without values: update_block runs with values of width 0. A row of -inf alone gives zeros.
    """
    check_floats(x=x)
    if x.ndim == 0:
        raise ValueError("x: expected at least one dimension, got a scalar")
    dtype = compute_dtype(str(x.dtype))
    row_max, row_sum, acc = init(x.shape[:-1], 0, dtype)
    for cols in blocks(x.shape[-1], whole("block_size", block_size)):
        s = widen(x[..., cols], dtype)
        row_max, row_sum, acc = update_block(row_max, row_sum, acc, s, np.zeros((s.shape[-1], 0), dtype))
    p = np.exp(widen(x, dtype) - finite(row_max)[..., None])
    return narrow(p / np.where(row_sum == 0, 1, row_sum)[..., None], str(x.dtype))


class TiledAttention:
    """Exact attention, block by block, never holding the matrix of scores.

    order "kv" has the K/V blocks in the outer loop and keeps statistics of all n rows; order "q" has the Q blocks
    outside, as GPU kernels do, and keeps those of one block. sram_bytes is a simulated budget that the blocks must
    fit in (see sram_needed). last_blocks tells what the last call computed and skipped, over all leading dimensions.
    """

    def __init__(
        self, block_size_q: int = 32, block_size_kv: int = 32, *, order: str = "kv", sram_bytes: int | None = None
    ) -> None:
        if order not in ("kv", "q"):
            raise ValueError(f'order: expected "kv" or "q" (the outer loop), got {order!r}')
        self.block_size_q = whole("block_size_q", block_size_q)
        self.block_size_kv = whole("block_size_kv", block_size_kv)
        self.order = order
        self.sram_bytes = None if sram_bytes is None else whole("sram_bytes", sram_bytes)
        self.last_blocks: Blocks | None = None

    def forward(self, Q: Array, K: Array, V: Array, mask: Array | None = None) -> Array:
        """softmax(Q K^T / sqrt(d)) V over the keys where mask (boolean, broadcastable to (..., n_q, n_k)) is True.

        The mask is read a block at a time, and a block in which it is all False is skipped. A row with no key gives 0.
        """
        check_inputs(Q, K, V)
        if mask is None:
            return self._forward(Q, K, V, lambda head: lambda rows, cols: True)
        full = check_mask(mask, Q, K)
        return self._forward(Q, K, V, lambda head: partial(visible_dense, full[head]))

    def forward_causal(self, Q: Array, K: Array, V: Array) -> Array:
        """Attention in which the last query sees every key, the one before it all but the last, and so on.

        Aligned bottom right: query i sees the keys up to i + n_k - n_q. Blocks wholly in the future are skipped.
        """
        check_inputs(Q, K, V)
        return self._forward(Q, K, V, lambda head: partial(visible_causal, K.shape[-2] - Q.shape[-2]))

    def __call__(self, Q: Array, K: Array, V: Array, mask: Array | None = None) -> Array:
        return self.forward(Q, K, V, mask)

    def _forward(self, Q: Array, K: Array, V: Array, visible: Callable[[tuple[int, ...]], Visible]) -> Array:
        """Each leading index is an attention of its own, as each head has its own thread blocks on a GPU."""
        self._check_sram(Q.shape[-1], V.shape[-1], Q.dtype)
        loops = keys_outer if self.order == "kv" else queries_outer
        sizes = self.block_size_q, self.block_size_kv
        out = np.empty((*Q.shape[:-1], V.shape[-1]), Q.dtype)
        heads = list(np.ndindex(Q.shape[:-2]))
        computed = sum(loops(Q[head], K[head], V[head], *sizes, visible(head), out[head]) for head in heads)
        grid = count_blocks(Q.shape[-2], K.shape[-2], self.block_size_q, self.block_size_kv, causal=False)
        self.last_blocks = Blocks(grid.total * len(heads), computed)
        return out

    def _check_sram(self, d: int, d_v: int, dtype: np.dtype[Any]) -> None:
        needed = sram_needed(self.block_size_q, self.block_size_kv, d, d_v, dtype)
        if self.sram_bytes is None or needed <= self.sram_bytes:
            return
        sizes = range(max(self.block_size_q, self.block_size_kv) + 1)
        fits = bisect_right(sizes, self.sram_bytes, key=lambda b: sram_needed(b, b, d, d_v, dtype)) - 1
        raise ValueError(
            f"sram_bytes: {self.block_size_q} x {self.block_size_kv} blocks need {needed} bytes with {dtype} inputs, "
            f"d = {d} and d of V = {d_v}, but there are {self.sram_bytes}; "
            + (f"block_size_q = block_size_kv = {fits} would fit" if fits else "not even 1 x 1 would fit")
        )


def standard_attention(Q: Array, K: Array, V: Array, mask: Array | None = None) -> tuple[Array, Array]:
    """The definition, with the whole matrix of weights: returns (output, weights), both in the inputs' dtype."""
    check_inputs(Q, K, V)
    dtype, stored = compute_dtype(str(Q.dtype)), str(Q.dtype)
    weights = widen(Q, dtype) * dtype.type(1 / math.sqrt(Q.shape[-1])) @ widen(K, dtype).swapaxes(-1, -2)
    if mask is not None:
        check_mask(mask, Q, K)
        np.copyto(weights, -np.inf, where=~mask)
    weights -= finite(weights.max(axis=-1, initial=-np.inf))[..., None]
    np.exp(weights, out=weights)
    row_sum = weights.sum(axis=-1, keepdims=True)
    weights /= np.where(row_sum == 0, 1, row_sum)  # a row with no key: weights 0
    return narrow(weights @ widen(V, dtype), stored), narrow(weights, stored)


def sram_needed(block_q: int, block_kv: int, d: int, d_v: int, dtype: npt.DTypeLike = np.float32) -> int:
    """Bytes that the work on one block holds, at full block sizes.

    Counted: the blocks of q, k and v in the inputs' dtype; the block of scores (the weights overwrite it), acc, row_max
    and row_sum in the dtype of the computation, which is float32, or float64 for float64 inputs.
    """
    stored = block_q * d + block_kv * (d + d_v)
    computed = block_q * (block_kv + d_v + 2)
    return stored * np.dtype(dtype).itemsize + computed * compute_dtype(str(np.dtype(dtype))).itemsize
