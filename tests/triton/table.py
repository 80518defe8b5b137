"""A kernel that writes down what a function of a variant gives for every score."""

import triton
import triton.language as tl

from tilewise.kernels.triton.source.tiles import at_scores


@triton.jit
def table(s, out, place, loaded, group, n_q, n_k, FUNCTION: tl.constexpr, TILE: tl.constexpr):
    h, b = tl.program_id(0), tl.program_id(1)
    query, key = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    inside = (query < n_q) & (key < n_k)
    at = (b * tl.num_programs(0) + h) * n_q * n_k + query * n_k + key
    values = tl.load(s + at, mask=inside, other=0.0)
    first_batch, origin_q, origin_k, total_q, total_k, packed_q, packed_k = place
    told = (first_batch + b, h, h // group, origin_q, origin_k, total_q, total_k, packed_q, packed_k)
    tl.store(out + at, tl.zeros_like(values) + at_scores(FUNCTION, values, query, key, told, loaded), mask=inside)


@triton.jit
def fails(number):
    tl.static_assert(number != number, "as it should")
