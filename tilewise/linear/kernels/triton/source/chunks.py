"""What the kernels of linear attention share: features, decays and gradients of a chunk's rows, and states.

A sequence is cut into segments, which programs work on side by side, and a segment into chunks, one after the other.
A state is d x d_v numbers and, behind them, the d numbers of z, all float32. A program has BLOCK of its columns, or of
its rows, in registers: all of it would leave no room for anything else.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.source.tiles import INTERPRETED, matrix, narrow


@triton.jit
def operand(x, TYPE: tl.constexpr):
    """What a matrix product takes, for data of a type: bfloat16 and float32 as they are. Sums over a sequence leave the
    range of float16, so its operands are as precise, but of float32's range (TF32)."""
    x = x.to(tl.float32)
    if TYPE == tl.bfloat16:
        x = narrow(x, tl.bfloat16)
        x = x.to(tl.float32) if INTERPRETED else x  # the interpreter multiplies bfloat16 as whole numbers
    elif TYPE == tl.float16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def product(a, b, TYPE: tl.constexpr):
    return tl.dot(operand(a, TYPE), operand(b, TYPE), input_precision="ieee" if TYPE == tl.float32 else "tf32")


@triton.jit
def inside(row, n, column, WIDTH: tl.constexpr):
    return (row < n)[:, None] & (column < WIDTH)[None, :]


@triton.jit
def load_head(x, steps, b, h, row, n, column, WIDTH: tl.constexpr):
    """Some columns of one head's rows, 0 where there are none."""
    at = matrix(x, steps, b, h, 0) + row[:, None].to(tl.int64) * steps[2] + column[None, :]
    return tl.load(at, mask=inside(row, n, column, WIDTH), other=0.0)


@triton.jit
def store_head(x, steps, b, h, row, n, column, values, WIDTH: tl.constexpr):
    at = matrix(x, steps, b, h, 0) + row[:, None].to(tl.int64) * steps[2] + column[None, :]
    tl.store(at, narrow(values, x.dtype.element_ty), mask=inside(row, n, column, WIDTH))


@triton.jit
def mapped(x, FUNCTION: tl.constexpr, row, n, column, WIDTH: tl.constexpr):
    """A feature map, or its slope, of every number; 0 where there is none. Of the variables only S is one."""
    values = FUNCTION(x.to(tl.float32), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    return tl.where(inside(row, n, column, WIDTH), values, 0.0)


@triton.jit
def features(
    x, steps, b, h, row, n, column, scale, FEATURE: tl.constexpr, TYPE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Of one head's rows, rounded as products take them at once: half as many registers hold them."""
    x_rows = load_head(x, steps, b, h, row, n, column, WIDTH)
    return operand(mapped(x_rows, FEATURE, row, n, column, WIDTH) * scale, TYPE)


@triton.jit
def decays(decay, steps, b, hk, row, n, CHUNK: tl.constexpr):
    """The logs summed up to each row of a chunk, and over all of it."""
    if decay is None:
        c, total = tl.zeros([CHUNK], tl.float32), tl.cast(0.0, tl.float32)
    else:
        at = matrix(decay, steps, b, hk, 0) + row.to(tl.int64) * steps[2]
        logs = tl.load(at, mask=row < n, other=0.0).to(tl.float32)
        c, total = tl.cumsum(logs, 0), tl.sum(logs, 0)
    return c, total


@triton.jit
def within(s, c, decay, CHUNK: tl.constexpr):
    """Products of a chunk's queries and keys as weights: decayed, 0 for later keys."""
    i = tl.arange(0, CHUNK)
    seen = i[:, None] >= i[None, :]
    if decay is not None:
        s *= tl.exp(tl.where(seen, c[:, None] - c[None, :], 0.0))
    return tl.where(seen, s, 0.0)


@triton.jit
def segment_at(segments):
    """The first row of this program's segment, and the one behind its last."""
    record = segments + tl.program_id(0) * 2
    return tl.load(record), tl.load(record + 1)


@triton.jit
def state_at(states, b, hk, heads_k, D: tl.constexpr, D_V: tl.constexpr):
    """Where the state of this program's segment is."""
    slot = (tl.cast(b, tl.int64) * tl.num_programs(0) + tl.program_id(0)) * heads_k + hk
    return states + slot * (D * D_V + D)


@triton.jit
def load_state(at, i, j, D: tl.constexpr, D_V: tl.constexpr):
    """Rows i and columns j of kv, and z's numbers i."""
    kv = tl.load(at + i[:, None] * D_V + j[None, :], mask=inside(i, D, j, D_V), other=0.0)
    return kv, tl.load(at + D * D_V + i, mask=i < D, other=0.0)


@triton.jit
def store_state(at, kv, z, i, j, D: tl.constexpr, D_V: tl.constexpr):
    tl.store(at + i[:, None] * D_V + j[None, :], kv, mask=inside(i, D, j, D_V))
    if tl.program_id(2) == 0:  # programs of further columns have the same
        tl.store(at + D * D_V + i, z, mask=i < D)


@triton.jit
def after(kv, z, f_k, v, c, total, TYPE: tl.constexpr):
    """The state after a chunk."""
    kept, f_k = tl.exp(total), f_k.to(tl.float32) * tl.exp(total - c)[:, None]
    return kv * kept + product(tl.trans(f_k), v, TYPE), z * kept + tl.sum(f_k, 0)


@triton.jit
def load_numbers(x, b, h, heads, n, row, last):
    """One number a row, of (batch, heads, n) without gaps."""
    return tl.load(x + (tl.cast(b, tl.int64) * heads + h) * n + row, mask=row < last, other=0.0)


@triton.jit
def store_numbers(x, b, h, heads, n, row, last, values):
    tl.store(x + (tl.cast(b, tl.int64) * heads + h) * n + row, values, mask=row < last)


@triton.jit
def share_of(norm, b, h, heads, n, row, last, CHUNK: tl.constexpr):
    """What a row of weights is multiplied by to be normalized; 0 where their sum is 0."""
    if norm is None:
        share = tl.full([CHUNK], 1.0, tl.float32)
    else:
        share = inverse(load_numbers(norm, b, h, heads, n, row, last))
    return share


@triton.jit
def row_gradients(
    d_out, steps, norm, b, h, heads, n, row, last, column, TYPE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Of a row's sum of weighted values, before it was normalized; rounded as products take them."""
    share = share_of(norm, b, h, heads, n, row, last, CHUNK)
    return operand(load_head(d_out, steps, b, h, row, last, column, WIDTH).to(tl.float32) * share[:, None], TYPE)


@triton.jit
def inverse(sums):
    """1 over each; 0 of 0."""
    return tl.where(sums == 0, 0.0, 1 / tl.where(sums == 0, 1.0, sums))
