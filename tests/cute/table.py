"""A function of the host that writes down what a function of a variant gives for every score. It runs on a CPU."""

import cutlass
import cutlass.cute as cute


@cute.jit
def table(
    s: cute.Tensor,
    out: cute.Tensor,
    arrays: tuple,
    function: cutlass.Constexpr,
    place: cutlass.Constexpr,
    group: cutlass.Constexpr,
):
    """s, out: (batch, heads, n_q, n_k). place: what variables begin at."""
    first_batch, origin_q, origin_k, total_q, total_k, packed_q, packed_k = place
    batch, heads, n_q, n_k = s.shape
    for i in cutlass.range(batch * heads * n_q * n_k):
        b, h, q, k = i // (heads * n_q * n_k), i // (n_q * n_k) % heads, i // n_k % n_q, i % n_k
        at = (b, h, q, k)
        out[at] = cutlass.Float32(
            function(
                s[at], first_batch + b, h, h // group, origin_q + q, origin_k + k, packed_q + q, packed_k + k,
                cutlass.Int32(total_q), cutlass.Int32(total_k), arrays,
            )
        )  # fmt: skip
