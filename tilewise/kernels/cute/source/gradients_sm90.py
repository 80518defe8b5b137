"""What both kernels of Hopper's backward pass do: tiles and where they come from, and what becomes of scores."""

import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from tilewise.kernels.cute.source.forward_sm90_producer import parts
from tilewise.kernels.cute.source.tiles import exp2, fused, multiply_by_slopes
from tilewise.kernels.cute.source.vocabulary import stages


def tiles_and_stages(layouts, element, consumers):
    """Tiles of q, d_out, k and v in shared memory, and the barriers of each."""
    memory = SmemAllocator()
    tiles = [memory.allocate_tensor(element, layout.outer, 1024, layout.inner) for layout in layouts]
    return tiles, [stages(tile, consumers) for tile in tiles]


def parts_from(begin, map_, rows, tile):
    """Tiles of a matrix from a row on, and their places."""
    size = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    return parts(map_, cute.domain_offset((begin, 0), rows), tile, size, (None, 0))


def weigh(s, shift, factor):
    """Scores, (queries, keys), become weights p; products are rounded as forward did, so that delta is the mean of
    d_p."""
    for query in range(cute.size(s, mode=[0])):
        for key in range(cute.size(s, mode=[1])):
            s[query, key] = exp2(fused(s[query, key], factor, shift[query]))


def differentiate(p, d_p, delta):
    """d_score takes the place of p."""
    for query in range(cute.size(p, mode=[0])):
        for key in range(cute.size(p, mode=[1])):
            p[query, key] = p[query, key] * (d_p[query, key] - delta[query])


def product_of(s, build):
    """A place for the products of q and k, if the slope of a score depends on them: scores take theirs."""
    return cute.make_rmem_tensor_like(s) if has_slope(build) else None


def keep(product, s):
    if product is not None:
        product.store(s.load())


def pass_on(d_score, product, at, first_key, work, arrays, scale, build):
    """d_s takes the place of d_score."""
    if has_slope(build):
        multiply_by_slopes(d_score, product, at, first_key, work, arrays, scale, build)


def has_slope(build):
    return hasattr(build.variant, "slope")


def narrow(operand, numbers):
    """Numbers of a product as the first operand of another: the same registers, in the order of the product."""
    cute.make_tensor(operand.iterator, numbers.layout).store(numbers.load().to(operand.element_type))


def scaled(acc, scale):
    for i in range(cute.size(acc)):
        acc[i] = acc[i] * scale
    return acc
