"""The teaching interface: tiled attention in a few plain loops, and what it saves, counted and measured.

Everything here is NumPy on (..., n, d) arrays of float16, float32 or float64. The page to read with it is docs/lab.md.
"""

from __future__ import annotations

import math
import tracemalloc
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from tilewise.arrays import Array, compute_dtype, narrow, widen
from tilewise.softmax import State, finite

__all__ = [
    "Blocks",
    "MemoryReport",
    "TiledAttention",
    "count_blocks",
    "online_softmax",
    "sram_needed",
    "standard_attention",
    "update_block",
    "verify_memory_usage",
]

_FLOATS = (np.float16, np.float32, np.float64)
_MATRIX_LIMIT = 2**30  # bytes of a score matrix that verify_memory_usage still dares to make

# What a block may see: True is every key, False is none (skip it), an array says which.
Visible = Callable[[slice, slice], "Array | bool"]


class Blocks(NamedTuple):
    """How many (query block, key block) pairs there are, and how many were computed and skipped."""

    total: int
    computed: int
    skipped: int


class MemoryReport(TypedDict):
    """Bytes, and ratios of bytes. None: not measured, because the score matrix would be too large to make."""

    standard_attention_matrix: int
    tiled_max_block: int
    memory_reduction: float
    standard_peak: int | None
    tiled_peak: int
    measured_reduction: float | None


# -- the algorithm ----------------------------------------------------------------------------------------------------


def update_block(row_max: Array, row_sum: Array, acc: Array, s: Array, v: Array) -> tuple[Array, Array, Array]:
    """Take one block of scores s (rows, keys) and values v (keys, d_v) into the rows' statistics; returns new ones.

    Masked scores are -inf. This is the heart of the algorithm, and both loop orders call it.
    """
    state = State(row_max, row_sum, acc)
    state.step(s, v)
    return state.row_max, state.row_sum, state.acc


def online_softmax(x: Array, block_size: int = 32) -> Array:
    """Softmax over the last axis: one pass over blocks finds the maximum and the sum together, then x is normalised.

    It is attention without values: update_block runs with values of width 0. A row of -inf alone gives zeros.
    """
    _check_floats(x=x)
    if x.ndim == 0:
        raise ValueError("x: expected at least one dimension, got a scalar")
    dtype = compute_dtype(str(x.dtype))
    row_max, row_sum, acc = _init(x.shape[:-1], 0, dtype)
    for cols in _blocks(x.shape[-1], _whole("block_size", block_size)):
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
        self.block_size_q = _whole("block_size_q", block_size_q)
        self.block_size_kv = _whole("block_size_kv", block_size_kv)
        self.order = order
        self.sram_bytes = None if sram_bytes is None else _whole("sram_bytes", sram_bytes)
        self.last_blocks: Blocks | None = None

    def forward(self, Q: Array, K: Array, V: Array, mask: Array | None = None) -> Array:
        """softmax(Q K^T / sqrt(d)) V over the keys where mask (boolean, broadcastable to (..., n_q, n_k)) is True.

        The mask is read a block at a time, and a block in which it is all False is skipped. A row with no key gives 0.
        """
        _check_inputs(Q, K, V)
        if mask is None:
            return self._forward(Q, K, V, lambda head: lambda rows, cols: True)
        full = _check_mask(mask, Q, K)
        return self._forward(Q, K, V, lambda head: partial(_dense, full[head]))

    def forward_causal(self, Q: Array, K: Array, V: Array) -> Array:
        """Attention in which the last query sees every key, the one before it all but the last, and so on.

        Aligned bottom right: query i sees the keys up to i + n_k - n_q. Blocks wholly in the future are skipped.
        """
        _check_inputs(Q, K, V)
        return self._forward(Q, K, V, lambda head: partial(_causal, K.shape[-2] - Q.shape[-2]))

    def __call__(self, Q: Array, K: Array, V: Array, mask: Array | None = None) -> Array:
        return self.forward(Q, K, V, mask)

    def _forward(self, Q: Array, K: Array, V: Array, visible: Callable[[tuple[int, ...]], Visible]) -> Array:
        """Each leading index is an attention of its own, as each head has its own thread blocks on a GPU."""
        self._check_sram(Q.shape[-1], V.shape[-1], Q.dtype)
        loops = self._keys_outer if self.order == "kv" else self._queries_outer
        out = np.empty((*Q.shape[:-1], V.shape[-1]), Q.dtype)
        heads = list(np.ndindex(Q.shape[:-2]))
        computed = sum(loops(Q[head], K[head], V[head], visible(head), out[head]) for head in heads)
        grid = count_blocks(Q.shape[-2], K.shape[-2], self.block_size_q, self.block_size_kv, causal=False)
        total = grid.total * len(heads)
        self.last_blocks = Blocks(total, computed, total - computed)
        return out

    def _keys_outer(self, q: Array, k: Array, v: Array, visible: Visible, out: Array) -> int:
        """Each K/V block is loaded once and meets every Q block; returns the number of blocks computed."""
        dtype, computed = compute_dtype(str(q.dtype)), 0
        row_max, row_sum, acc = _init((len(q),), v.shape[-1], dtype)  # (n_q,), (n_q,), (n_q, d_v)
        for cols in _blocks(len(k), self.block_size_kv):
            k_block, v_block = widen(k[cols], dtype), widen(v[cols], dtype)
            for rows in _blocks(len(q), self.block_size_q):
                if (seen := visible(rows, cols)) is False:
                    continue
                # 2 s = q @ k.T, 4 mask
                s = _scores(widen(q[rows], dtype), k_block, seen)
                # 5 row_max, rescale, p, row_sum
                # 6 acc = acc * rescale + p @ v
                new = update_block(row_max[rows], row_sum[rows], acc[rows], s, v_block)
                row_max[rows], row_sum[rows], acc[rows] = new
                computed += 1
        # 7 finish: acc / row_sum
        out[:] = narrow(State(row_max, row_sum, acc).finish().out, str(out.dtype))
        return computed

    def _queries_outer(self, q: Array, k: Array, v: Array, visible: Visible, out: Array) -> int:
        """Each Q block meets every K/V block and is then finished; returns the number of blocks computed."""
        dtype, computed = compute_dtype(str(q.dtype)), 0
        for rows in _blocks(len(q), self.block_size_q):
            # 1 load q
            q_block = widen(q[rows], dtype)
            row_max, row_sum, acc = _init((len(q_block),), v.shape[-1], dtype)  # (rows,), (rows,), (rows, d_v)
            for cols in _blocks(len(k), self.block_size_kv):
                if (seen := visible(rows, cols)) is False:
                    continue
                # 2 s = q @ k.T, 4 mask
                s = _scores(q_block, widen(k[cols], dtype), seen)
                # 5 row_max, rescale, p, row_sum
                # 6 acc = acc * rescale + p @ v
                row_max, row_sum, acc = update_block(row_max, row_sum, acc, s, widen(v[cols], dtype))
                computed += 1
            # 7 finish: acc / row_sum
            out[rows] = narrow(State(row_max, row_sum, acc).finish().out, str(out.dtype))
        return computed

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
    _check_inputs(Q, K, V)
    dtype, stored = compute_dtype(str(Q.dtype)), str(Q.dtype)
    weights = widen(Q, dtype) * dtype.type(1 / math.sqrt(Q.shape[-1])) @ widen(K, dtype).swapaxes(-1, -2)
    if mask is not None:
        _check_mask(mask, Q, K)
        np.copyto(weights, -np.inf, where=~mask)
    weights -= finite(weights.max(axis=-1, initial=-np.inf))[..., None]
    np.exp(weights, out=weights)
    row_sum = weights.sum(axis=-1, keepdims=True)
    weights /= np.where(row_sum == 0, 1, row_sum)  # a row with no key: weights 0
    return narrow(weights @ widen(V, dtype), stored), narrow(weights, stored)


# -- blocks and what they may see -------------------------------------------------------------------------------------


def count_blocks(n_q: int, n_kv: int, block_q: int, block_kv: int, causal: bool) -> Blocks:
    """The block pairs of an attention and, if causal, how many of them are skipped: counted without visiting any.

    The last query of block i sees keys up to (i + 1) * block_q - 1 + n_kv - n_q; a block that starts later is skipped.
    """
    n_q, n_kv = _whole("n_q", n_q, least=0), _whole("n_kv", n_kv, least=0)
    block_q, block_kv = _whole("block_q", block_q), _whole("block_kv", block_kv)
    blocks_q, blocks_kv = -(-n_q // block_q), -(-n_kv // block_kv)
    total = blocks_q * blocks_kv
    if not causal:
        return Blocks(total, total, 0)
    last_keys = (min((i + 1) * block_q, n_q) - 1 + n_kv - n_q for i in range(blocks_q))
    computed = sum(max(0, last_key // block_kv + 1) for last_key in last_keys)
    return Blocks(total, computed, total - computed)


def _blocks(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _init(rows: tuple[int, ...], d_v: int, dtype: npt.DTypeLike) -> tuple[Array, Array, Array]:
    """row_max, row_sum and acc of rows that have seen no key yet."""
    state = State.init(rows, d_v, dtype)
    return state.row_max, state.row_sum, state.acc


def _scores(q: Array, k: Array, seen: Array | bool) -> Array:
    """Scaled scores of one block, with -inf where a key may not be seen."""
    s: Array = q * q.dtype.type(1 / math.sqrt(q.shape[-1])) @ k.T
    return s if seen is True else np.where(seen, s, s.dtype.type(-np.inf))


def _dense(mask: Array, rows: slice, cols: slice) -> Array | bool:
    block = mask[rows, cols]
    return True if block.all() else block if block.any() else False


def _causal(offset: int, rows: slice, cols: slice) -> Array | bool:
    if rows.stop - 1 + offset < cols.start:  # not even the last query sees the first key
        return False
    if rows.start + offset >= cols.stop - 1:  # even the first query sees the last key
        return True
    return np.arange(cols.start, cols.stop) <= np.arange(rows.start, rows.stop)[:, None] + offset


# -- memory -----------------------------------------------------------------------------------------------------------


def verify_memory_usage(seq_len: int, d: int = 64, block_size: int = 32) -> MemoryReport:
    """Bytes of the score matrix against one block of it, and the measured peaks of running both, in float32.

    Peaks are tracemalloc's, with the output and without the inputs. If the matrix is over 1 GiB, standard attention is
    not run and what it would measure is None. The tiled run takes (seq_len / block_size) ** 2 Python steps.
    """
    seq_len, d, block_size = _whole("seq_len", seq_len), _whole("d", d), _whole("block_size", block_size)
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal((seq_len, d), dtype=np.float32) for _ in range(3))
    matrix, block = seq_len**2 * Q.itemsize, min(block_size, seq_len) ** 2 * Q.itemsize
    tiled = _peak(lambda: TiledAttention(block_size, block_size)(Q, K, V))
    standard = _peak(lambda: standard_attention(Q, K, V)) if matrix <= _MATRIX_LIMIT else None
    return {
        "standard_attention_matrix": matrix,
        "tiled_max_block": block,
        "memory_reduction": matrix / block,
        "standard_peak": standard,
        "tiled_peak": tiled,
        "measured_reduction": None if standard is None else standard / tiled,
    }


def _peak(run: Callable[[], object]) -> int:
    """The most bytes held at once while run() runs, beyond those held before it."""
    outer = tracemalloc.is_tracing()  # someone else's trace must go on
    if not outer:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not outer:
            tracemalloc.stop()


def sram_needed(block_q: int, block_kv: int, d: int, d_v: int, dtype: npt.DTypeLike = np.float32) -> int:
    """Bytes that the work on one block holds, at full block sizes.

    Counted: the blocks of q, k and v in the inputs' dtype; the block of scores (the weights overwrite it), acc, row_max
    and row_sum in the dtype of the computation, which is float32, or float64 for float64 inputs.
    """
    stored = block_q * d + block_kv * (d + d_v)
    computed = block_q * (block_kv + d_v + 2)
    return stored * np.dtype(dtype).itemsize + computed * compute_dtype(str(np.dtype(dtype))).itemsize


# -- what is checked --------------------------------------------------------------------------------------------------


def _whole(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    return int(value)


def _check_floats(**arrays: Any) -> None:
    for name, x in arrays.items():
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{name}: expected a NumPy array, got {type(x).__name__}")
        if x.dtype not in _FLOATS:
            raise TypeError(f"{name}: expected float16, float32 or float64, got {x.dtype}")


def _check_inputs(Q: Any, K: Any, V: Any) -> None:
    _check_floats(Q=Q, K=K, V=V)
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        if x.dtype != Q.dtype:
            raise TypeError(f"{name}: expected {Q.dtype} as Q has, got {x.dtype}")
        if x.ndim < 2:
            raise ValueError(f"{name}: expected (..., n, d), got shape {x.shape}")
        if x.shape[:-2] != Q.shape[:-2]:
            raise ValueError(f"{name}: expected leading dimensions {Q.shape[:-2]} as Q has, got shape {x.shape}")
    if Q.shape[-1] == 0:
        raise ValueError(f"Q: expected d of at least 1, got shape {Q.shape}")
    if K.shape[-1] != Q.shape[-1]:
        raise ValueError(f"K: expected d = {Q.shape[-1]} as Q has, got shape {K.shape}")
    if V.shape[-2] != K.shape[-2]:
        raise ValueError(f"V: expected n = {K.shape[-2]} as K has, got shape {V.shape}")


def _check_mask(mask: Any, Q: Array, K: Array) -> Array:
    """The mask as a view of (..., n_q, n_k); broadcasting copies nothing."""
    shape = (*Q.shape[:-1], K.shape[-2])
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"mask: expected a boolean NumPy array, got {type(mask).__name__}")
    if mask.dtype != np.bool_:
        raise TypeError(f"mask: expected booleans (True: the query may attend), got {mask.dtype}")
    try:
        return np.broadcast_to(mask, shape)
    except ValueError:
        raise ValueError(f"mask: expected a shape that broadcasts to {shape}, got {mask.shape}") from None
