"""What the backward pass makes of a tile of scores, as functions of the host, a thread after the other. They run on a
CPU, in float32."""

import cutlass
import cutlass.cute as cute

from tilewise.kernels.cute.source import backward_sm90
from tilewise.kernels.cute.source.d_keys_sm90 import by_columns, left
from tilewise.kernels.cute.source.d_query_sm90 import delta_of_part
from tilewise.kernels.cute.source.forward_sm90 import store
from tilewise.kernels.cute.source.gradients_sm90 import differentiate, keep, pass_on, product_of, weigh
from tilewise.kernels.cute.source.operations import minimum
from tilewise.kernels.cute.source.tiles import PARTIAL, binary, mask, score, work_of
from tilewise.kernels.cute.source.vocabulary import ELEMENTS, by_rows, operand_of_product, products_sm90, transposed

BFLOAT16 = ELEMENTS["bfloat16"]


@cute.jit
def by_query(
    product: cute.Tensor, d_p: cute.Tensor, p: cute.Tensor, d_s: cute.Tensor, shift: cute.Tensor, delta: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, arrays: tuple, scale: cutlass.Float32, b: cutlass.Int32, h: cutlass.Int32,
    group: cutlass.Int32, build: cutlass.Constexpr,
):  # fmt: skip
    """As d_query goes: product, d_p, p and d_s are (queries, keys) of one head, shift and delta (batch, heads, n)."""
    size = build.tile
    for number in cutlass.range(records.shape[2]):
        for thread in cutlass.range(size.q // 64 * 128):
            work = work_of(records, number, b, h, group)
            scores, _ = products_sm90(BFLOAT16, size.q, size.k, build.depth)
            at = scores[0].get_slice(thread).partition_C(cute.make_identity_tensor((size.q, size.k)))
            for run in cutlass.range(work.first_run, work.last_run):
                for tile in cutlass.range(runs[run, 0], runs[run, 1]):
                    row_shift = left(shift, by_rows(at), work, b, h)
                    row_delta = left(delta, by_rows(at), work, b, h)
                    given = product, d_p, p, d_s
                    differentiated(
                        given,
                        by_rows,
                        at,
                        tile * size.k,
                        runs[run, 2],
                        work,
                        row_shift,
                        row_delta,
                        arrays,
                        scale,
                        build,
                    )


@cute.jit
def by_key(
    product: cute.Tensor, d_p: cute.Tensor, p: cute.Tensor, d_s: cute.Tensor, shift: cute.Tensor, delta: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, arrays: tuple, scale: cutlass.Float32, b: cutlass.Int32, h: cutlass.Int32,
    group: cutlass.Int32, build: cutlass.Constexpr,
):  # fmt: skip
    """The same as d_keys goes."""
    size = build.by_key
    for number in cutlass.range(records.shape[2]):
        for thread in cutlass.range(size.k // 64 * 128):
            work = work_of(records, number, b, h, group)
            scores, _ = products_sm90(BFLOAT16, size.k, size.q, build.depth)
            at = scores[0].get_slice(thread).partition_C(transposed(cute.make_identity_tensor((size.q, size.k))))
            for run in cutlass.range(work.first_run, work.last_run):
                for tile in cutlass.range(runs[run, 0], runs[run, 1]):
                    here = work._replace(first=tile * size.q)
                    row_shift = left(shift, by_columns(at), here, b, h)
                    row_delta = left(delta, by_columns(at), here, b, h)
                    given = product, d_p, p, d_s
                    differentiated(
                        given, by_columns, at, work.first, runs[run, 2], here, row_shift, row_delta, arrays, scale,
                        build,
                    )  # fmt: skip


@cute.jit
def once(
    product: cute.Tensor, d_p: cute.Tensor, p: cute.Tensor, d_s: cute.Tensor, shift: cute.Tensor, delta: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, arrays: tuple, scale: cutlass.Float32, b: cutlass.Int32, h: cutlass.Int32,
    group: cutlass.Int32, build: cutlass.Constexpr,
):  # fmt: skip
    """The same as the kernel with five products goes, tiles from the last to the first; p and d_s narrowed."""
    size = build.tile
    for number in cutlass.range(records.shape[2]):
        for thread in cutlass.range(size.k // 64 * 128):
            work = work_of(records, number, b, h, group)
            scores, _ = products_sm90(BFLOAT16, size.k, size.q, build.depth)
            at = scores[0].get_slice(thread).partition_C(transposed(cute.make_identity_tensor((size.q, size.k))))
            for run in cutlass.range(work.first_run, work.last_run):
                for i in cutlass.range(runs[run, 1]):
                    here = work._replace(first=(runs[run, 0] - i) * size.q)
                    row_shift, row_delta = (cute.make_rmem_tensor((2, size.q // 8), cutlass.Float32) for _ in range(2))
                    for j in cutlass.range(size.q // 4, unroll_full=True):
                        query = minimum(here.first + j // 2 * 8 + thread % 4 * 2 + j % 2, here.n_q - 1)
                        row_shift[j % 2, j // 2] = shift[b, h, here.q_begin + query]
                        row_delta[j % 2, j // 2] = delta[b, h, here.q_begin + query]
                    weighed(
                        (product, d_p, p, d_s), at, work.first, runs[run, 2], here, row_shift, row_delta, arrays, scale,
                        build,
                    )  # fmt: skip


@cute.jit
def weighed(given, at, first_key, kind, work, row_shift, row_delta, arrays: tuple, scale, build: cutlass.Constexpr):
    product, d_p, p, d_s = given
    s, here = loaded(product, d_p, at, first_key, work)
    score(s, at, first_key, work, arrays, scale, build)
    if kind == PARTIAL:
        mask(s, at, first_key, work, arrays, build)
    backward_sm90.weigh(s, row_shift, binary(scale, build))
    operands = [cute.make_rmem_tensor(operand_of_product(s), BFLOAT16) for _ in range(2)]
    backward_sm90.differentiate(*operands, s, here, row_delta)
    for to, operand in zip((p, d_s), operands, strict=True):
        wide = cute.make_rmem_tensor(at.shape, cutlass.Float32)
        wide.store(cute.make_tensor(operand.iterator, s.layout).load().to(cutlass.Float32))
        write(to, wide, at, first_key, work)


@cute.jit
def differentiated(
    given, by_queries: cutlass.Constexpr, at, first_key, kind, work, row_shift, row_delta, arrays: tuple, scale,
    build: cutlass.Constexpr,
):  # fmt: skip
    """A thread's numbers of one tile, of given products; by_queries: how they are seen as (queries, keys)."""
    product, d_p, p, d_s = given
    s, here = loaded(product, d_p, at, first_key, work)
    kept = product_of(s, build)
    keep(kept, s)
    score(s, at, first_key, work, arrays, scale, build)
    if kind == PARTIAL:
        mask(s, at, first_key, work, arrays, build)
    weigh(by_queries(s), row_shift, binary(scale, build))
    write(p, s, at, first_key, work)
    differentiate(by_queries(s), by_queries(here), row_delta)
    pass_on(s, kept, at, first_key, work, arrays, scale, build)
    write(d_s, s, at, first_key, work)


@cute.jit
def loaded(product, d_p, at, first_key, work):
    """A thread's numbers of both products."""
    s, here = (cute.make_rmem_tensor(at.shape, cutlass.Float32) for _ in range(2))
    for i in cutlass.range(cute.size(s), unroll_full=True):
        query, key = work.q_begin + work.first + at[i][0], work.k_begin + first_key + at[i][1]
        s[i], here[i] = cutlass.Float32(0.0), cutlass.Float32(0.0)
        if (query < product.shape[0]) & (key < product.shape[1]):  # as the copy engine fills in
            s[i], here[i] = product[query, key], d_p[query, key]
    return s, here


@cute.jit
def write(to: cute.Tensor, numbers, at, first_key, work):
    for i in cutlass.range(cute.size(numbers), unroll_full=True):
        query, key = work.first + at[i][0], first_key + at[i][1]
        if (query < work.n_q) & (key < work.n_k):
            to[work.q_begin + query, work.k_begin + key] = numbers[i]


@cute.jit
def delta_of_parts(out: cute.Tensor, remainder: cute.Tensor, d_out: cute.Tensor, delta: cute.Tensor):
    """delta: (rows, parts), the sum of d_out * (out + remainder) over each part of a row."""
    for row in cutlass.range(delta.shape[0]):
        for part in cutlass.range(delta.shape[1]):
            delta[row, part] = delta_of_part(out[row, None], remainder[row, None], d_out[row, None], part)


@cute.jit
def stored(out: cute.Tensor, count: cutlass.Int32, size: cutlass.Constexpr):
    """A product of that size, each number of which says where it is, by 256 * row + column."""
    for thread in cutlass.range(size[0] // 64 * 128):
        _, sums = products_sm90(BFLOAT16, size[0], 64, size[1])
        at = sums[0].get_slice(thread).partition_C(cute.make_identity_tensor(size))
        acc = cute.make_rmem_tensor(at.shape, cutlass.Float32)
        for i in cutlass.range(cute.size(acc), unroll_full=True):
            acc[i] = cutlass.Float32(256 * at[i][0] + at[i][1])
        store(acc, out, count, sums[0], thread, size)
