"""Attention of one head, block by block, in both orders of the loops: q (n_q, d), k (n_k, d), v (n_k, d_v)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tilewise.arrays import Array, compute_dtype, narrow, widen
from tilewise.lab.blocks import Visible, blocks
from tilewise.softmax import State


def update_block(row_max: Array, row_sum: Array, acc: Array, s: Array, v: Array) -> tuple[Array, Array, Array]:
    """Take one block of scores s (rows, keys) and values v (keys, d_v) into the rows' statistics; returns new ones.

    Masked scores are -inf. This is the heart of the algorithm, and both loop orders call it.
    """
    state = State(row_max, row_sum, acc)
    state.step(s, v)
    return state.row_max, state.row_sum, state.acc


def init(rows: tuple[int, ...], d_v: int, dtype: npt.DTypeLike) -> tuple[Array, Array, Array]:
    """row_max, row_sum and acc of rows that have seen no key yet."""
    state = State.init(rows, d_v, dtype)
    return state.row_max, state.row_sum, state.acc


def scores(q: Array, k: Array, seen: Array | bool) -> Array:
    """Scaled scores of one block, with -inf where a key may not be seen."""
    s: Array = q * q.dtype.type(1 / math.sqrt(q.shape[-1])) @ k.T
    return s if seen is True else np.where(seen, s, s.dtype.type(-np.inf))


def keys_outer(q: Array, k: Array, v: Array, size_q: int, size_kv: int, visible: Visible, out: Array) -> int:
    """Each K/V block is loaded once and meets every Q block; returns the number of blocks computed."""
    dtype, computed = compute_dtype(str(q.dtype)), 0
    row_max, row_sum, acc = init((len(q),), v.shape[-1], dtype)  # (n_q,), (n_q,), (n_q, d_v)
    for cols in blocks(len(k), size_kv):
        k_block, v_block = widen(k[cols], dtype), widen(v[cols], dtype)
        for rows in blocks(len(q), size_q):
            if (seen := visible(rows, cols)) is False:
                continue
            # 2 s = q @ k.T, 4 mask
            s = scores(widen(q[rows], dtype), k_block, seen)
            # 5 row_max, rescale, p, row_sum
            # 6 acc = acc * rescale + p @ v
            new = update_block(row_max[rows], row_sum[rows], acc[rows], s, v_block)
            row_max[rows], row_sum[rows], acc[rows] = new
            computed += 1
    # 7 finish: acc / row_sum
    out[:] = narrow(State(row_max, row_sum, acc).finish().out, str(out.dtype))
    return computed


def queries_outer(q: Array, k: Array, v: Array, size_q: int, size_kv: int, visible: Visible, out: Array) -> int:
    """Each Q block meets every K/V block and is then finished; returns the number of blocks computed."""
    dtype, computed = compute_dtype(str(q.dtype)), 0
    for rows in blocks(len(q), size_q):
        # 1 load q
        q_block = widen(q[rows], dtype)
        row_max, row_sum, acc = init((len(q_block),), v.shape[-1], dtype)  # (rows,), (rows,), (rows, d_v)
        # for each kv block:
        for cols in blocks(len(k), size_kv):
            if (seen := visible(rows, cols)) is False:
                continue
            # 2 s = q @ k.T, 4 mask
            s = scores(q_block, widen(k[cols], dtype), seen)
            # 5 row_max, rescale, p, row_sum
            # 6 acc = acc * rescale + p @ v
            row_max, row_sum, acc = update_block(row_max, row_sum, acc, s, widen(v[cols], dtype))
            computed += 1
        # 7 finish: acc / row_sum
        out[rows] = narrow(State(row_max, row_sum, acc).finish().out, str(out.dtype))
    return computed
