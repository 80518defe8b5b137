"""What the kernels of linear attention share: features, decays and gradients of a chunk's rows, and states.

A sequence is cut into segments, which programs work on side by side, and a segment into chunks, one after the other.
A state is d x d_v numbers and, behind them, the d numbers of z, all float32. A program has BLOCK of its columns, or of
its rows, in registers: all of it would leave no room for anything else.

What a call has not is None: a FEATURE map (identity), a scale (1), a decay, norms. Nothing is computed for it then, so
that rows go from memory to the tensor cores as they are, past the registers. What rows.py has made before is as if a
call had it not: features are rows, and sums over a chunk's rows are there to be loaded.
"""

import triton
import triton.language as tl
from triton.language import target_info

from tilewise.kernels.triton.source.tiles import INTERPRETED, matrix, narrow


@triton.jit
def operand(x, TYPE: tl.constexpr):
    """What a matrix product takes, for data of a type: bfloat16 and float32 as they are. Sums over a sequence leave the
    range of float16, so its operands are as precise, but of float32's range (TF32)."""
    if TYPE != tl.bfloat16:
        x = x.to(tl.float32)
    elif x.dtype != tl.bfloat16:
        x = narrow(x, tl.bfloat16)
    if TYPE == tl.bfloat16 and INTERPRETED:
        x = x.to(tl.float32)  # the interpreter multiplies bfloat16 as whole numbers
    if TYPE == tl.float16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.constexpr_function
def has_tf32():
    """AMD's GPUs multiply float32 as it is, but for CDNA 3."""
    return target_info.is_cuda() or target_info.is_hip_cdna3()


@triton.jit
def product(a, b, TYPE: tl.constexpr):
    return tl.dot(
        operand(a, TYPE), operand(b, TYPE), input_precision="tf32" if TYPE == tl.float16 and has_tf32() else "ieee"
    )


@triton.jit
def added(x, y, one):
    """The sum of two products. Triton would have the second begin with the first. Where there are more warps than rows
    for them, it then computes the first once for each group of warps and moves it to another layout: with a factor that
    it does not know to be 1 it does not. one: that factor, or None."""
    if one is not None:
        x, y = x * one, y * one
    return x + y


# -- rows of a chunk --------------------------------------------------------------------------------------------------


@triton.jit
def inside(row, first, last, column, WIDTH: tl.constexpr):
    """Blocks of columns that fill the width need no second look."""
    there = (row < last - first)[:, None]
    if (WIDTH + column.shape[0]) % column.shape[0] != 0:  # an int of the interpreter has no remainder by a constexpr
        there = there & (column < WIDTH)[None, :]
    return there


@triton.jit
def head_at(x, steps, b, h, first, row, column):
    """Some columns of a chunk's rows. How far they are from the first, 32 bits tell."""
    return matrix(x, steps, b, h, first) + row[:, None] * steps[2] + column[None, :]


@triton.jit
def load_head(x, steps, b, h, first, last, column, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """0 where there are none."""
    row = tl.arange(0, CHUNK)
    at = head_at(x, steps, b, h, first, row, column)
    return tl.load(at, mask=inside(row, first, last, column, WIDTH), other=0.0)


@triton.jit
def store_head(x, steps, b, h, first, last, column, values, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.arange(0, CHUNK)
    at = head_at(x, steps, b, h, first, row, column)
    tl.store(at, narrow(values, x.dtype.element_ty), mask=inside(row, first, last, column, WIDTH))


@triton.jit
def store_columns(x, steps, b, h, first, last, column, values, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Rows that are columns of `values`. A thread that multiplied has a pair of every eight. In their order it would
    store some of those, and Triton goes through shared memory for each of them, with two barriers. Dealt anew,
    (chunk / 8, 4, 2) as (4, chunk / 8, 2), no row stays, and all go at once."""
    i = tl.arange(0, CHUNK)
    row = i // 2 % (CHUNK // 8) * 8 + i // (CHUNK // 4) * 2 + i % 2
    values = tl.reshape(narrow(values, x.dtype.element_ty), [column.shape[0], CHUNK // 8, 4, 2])
    values = tl.reshape(tl.trans(values, 2, 1, 3, 0), [CHUNK, column.shape[0]])
    at = head_at(x, steps, b, h, first, row, column)
    tl.store(at, values, mask=inside(row, first, last, column, WIDTH))


@triton.jit
def load_numbers(x, b, h, heads, n, first, last, CHUNK: tl.constexpr):
    """One number a row, of (batch, heads, n) without gaps."""
    i = tl.arange(0, CHUNK)
    return tl.load(x + (tl.cast(b, tl.int64) * heads + h) * n + first + i, mask=i < last - first, other=0.0)


@triton.jit
def store_numbers(x, b, h, heads, n, first, last, values, CHUNK: tl.constexpr):
    i = tl.arange(0, CHUNK)
    tl.store(x + (tl.cast(b, tl.int64) * heads + h) * n + first + i, values, mask=i < last - first)


@triton.jit
def mapped(x, FUNCTION: tl.constexpr, first, last, column, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """A feature map, or its slope, of every number; 0 where there is none. Of the variables only S is one."""
    values = FUNCTION(x.to(tl.float32), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    return tl.where(inside(tl.arange(0, CHUNK), first, last, column, WIDTH), values, 0.0)


@triton.jit
def scaled(x, scale):
    if scale is not None:
        x = x.to(tl.float32) * scale
    return x


@triton.jit
def features(
    x, steps, b, h, first, last, column, scale,
    FEATURE: tl.constexpr, TYPE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of one head's rows; rounded as products take them at once: half as many registers hold them."""
    rows = load_head(x, steps, b, h, first, last, column, CHUNK, WIDTH)
    if FEATURE is not None:
        rows = mapped(rows, FEATURE, first, last, column, CHUNK, WIDTH)
    return operand(scaled(rows, scale), TYPE)


@triton.jit
def decays(decay, steps, b, hk, first, last, CHUNK: tl.constexpr):
    """The logs summed up to each row of a chunk, and over all of it."""
    if decay is None:
        c, total = tl.zeros([CHUNK], tl.float32), tl.cast(0.0, tl.float32)
    else:
        i = tl.arange(0, CHUNK)
        at = matrix(decay, steps, b, hk, first) + i.to(tl.int64) * steps[2]
        logs = tl.load(at, mask=i < last - first, other=0.0).to(tl.float32)
        c, total = tl.cumsum(logs, 0), tl.sum(logs, 0)
    return c, total


@triton.jit
def decayed(x, logs, decay):
    """Rows, each by its log."""
    if decay is not None:
        x = x.to(tl.float32) * tl.exp(logs)[:, None]
    return x


@triton.jit
def kept(x, total, decay):
    """What a chunk leaves of numbers."""
    if decay is not None:
        x *= tl.exp(total)
    return x


@triton.jit
def within(s, c, decay, CHUNK: tl.constexpr, TURNED: tl.constexpr = False):
    """Products of a chunk's queries and keys as weights: decayed, 0 for later keys. TURNED: rows are the keys."""
    i = tl.arange(0, CHUNK)
    if TURNED:
        seen = i[:, None] <= i[None, :]
    else:
        seen = i[:, None] >= i[None, :]
    if decay is not None:
        past = c[None, :] - c[:, None] if TURNED else c[:, None] - c[None, :]
        s *= tl.exp(tl.where(seen, past, 0.0))
    return tl.where(seen, s, 0.0)


@triton.jit
def row_gradients(
    d_out, steps, norm, b, h, heads, n, first, last, column,
    TYPE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of a row's sum of weighted values, before it was normalized; rounded as products take them."""
    g = load_head(d_out, steps, b, h, first, last, column, CHUNK, WIDTH)
    if norm is not None:
        g = g.to(tl.float32) * inverse(load_numbers(norm, b, h, heads, n, first, last, CHUNK))[:, None]
    return operand(g, TYPE)


@triton.jit
def inverse(sums):
    """1 over each; 0 of 0."""
    return tl.where(sums == 0, 0.0, 1 / tl.where(sums == 0, 1.0, sums))


# -- programs and states ----------------------------------------------------------------------------------------------


@triton.jit
def place_of(heads, BLOCKS: tl.constexpr):
    """This program's batch index, head, and block of the state's rows or columns. Blocks of a head are neighbours: they
    read the same rows at the same time, all but one from the cache."""
    head = tl.program_id(0) // BLOCKS
    return head // heads, head % heads, tl.program_id(0) % BLOCKS


@triton.jit
def segment_at(segments):
    """The first row of this program's segment, and the one behind its last."""
    record = segments + tl.program_id(1) * 2
    return tl.load(record), tl.load(record + 1)


@triton.jit
def state_at(states, n_segments, b, hk, heads_k, D: tl.constexpr, D_V: tl.constexpr):
    """Where the state of this program's segment is."""
    slot = (tl.cast(b, tl.int64) * n_segments + tl.program_id(1)) * heads_k + hk
    return states + slot * (D * D_V + D)


@triton.jit
def cells(i, j, D: tl.constexpr, D_V: tl.constexpr):
    """Rows i and columns j of kv: where they are, and which there are."""
    return i[:, None] * D_V + j[None, :], (i < D)[:, None] & (j < D_V)[None, :]


@triton.jit
def load_state(kv_at, z_at, i, j, D: tl.constexpr, D_V: tl.constexpr):
    cell, there = cells(i, j, D, D_V)
    return tl.load(kv_at + cell, mask=there, other=0.0), tl.load(z_at + i, mask=i < D, other=0.0)


@triton.jit
def store_state(kv_at, z_at, kv, z, i, j, has_z, D: tl.constexpr, D_V: tl.constexpr):
    """has_z: of programs that have the same z, one stores it."""
    cell, there = cells(i, j, D, D_V)
    tl.store(kv_at + cell, kv, mask=there)
    if has_z:
        tl.store(z_at + i, z, mask=i < D)


@triton.jit
def state_of(states, given, n_segments, b, hk, heads_k, i, j, D: tl.constexpr, D_V: tl.constexpr):
    """That of this program's segment. If it is the only one of its sequence there are no `states`: then the one that is
    given (kv, z), or nothing yet."""
    if states is not None:
        at = state_at(states, n_segments, b, hk, heads_k, D, D_V)
        kv, z = load_state(at, at + D * D_V, i, j, D, D_V)
    elif given is not None:
        slot = tl.cast(b, tl.int64) * heads_k + hk
        kv, z = load_state(given[0] + slot * (D * D_V), given[1] + slot * D, i, j, D, D_V)
    else:
        kv, z = tl.zeros([i.shape[0], j.shape[0]], tl.float32), tl.zeros([i.shape[0]], tl.float32)
    return kv, z


@triton.jit
def z_of(states, given, n_segments, b, hk, heads_k, i, D: tl.constexpr, D_V: tl.constexpr):
    """z alone."""
    if states is not None:
        z = tl.load(state_at(states, n_segments, b, hk, heads_k, D, D_V) + D * D_V + i, mask=i < D, other=0.0)
    elif given is not None:
        z = tl.load(given[1] + (tl.cast(b, tl.int64) * heads_k + hk) * D + i, mask=i < D, other=0.0)
    else:
        z = tl.zeros([i.shape[0]], tl.float32)
    return z


@triton.jit
def sums_at(sums, steps, b, h, first, CHUNK: tl.constexpr):
    """Where those of a chunk are. With the number of their segment chunks count on from one to the next, though a
    segment may begin where no chunk of another sequence would."""
    return matrix(sums, steps, b, h, first // CHUNK + tl.program_id(1))


@triton.jit
def sum_of(rows, sums, steps, b, h, first, i, CHUNK: tl.constexpr, D: tl.constexpr):
    """Over a chunk's rows; loaded, if it was made before."""
    if sums is not None:
        total = tl.load(sums_at(sums, steps, b, h, first, CHUNK) + i, mask=i < D, other=0.0)
    else:
        total = tl.sum(rows.to(tl.float32), 0)
    return total


@triton.jit
def after(
    kv, z, f_k, v, c, total, decay, sums, sums_steps, b, hk, first, i,
    TYPE: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The state after a chunk. SUMS: z, too."""
    f_k = decayed(f_k, total - c, decay)
    kv = kept(kv, total, decay) + product(tl.trans(f_k), v, TYPE)
    if SUMS:
        z = kept(z, total, decay) + sum_of(f_k, sums, sums_steps, b, hk, first, i, CHUNK, D)
    return kv, z
