"""The triton op table: what its functions give is what NumPy gives. By Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.test_ops import EXPRESSIONS, MASKS, SHAPE, check_condition, numpy_values, random_conditions
from tilewise import dispatch
from tilewise.arrays import Array
from tilewise.expr import HK, B, Expr, H, K, Q, load
from tilewise.kernels import reads
from tilewise.kernels.reads import Sharing
from tilewise.kernels.triton import modules
from tilewise.kernels.triton.ops import function
from tilewise.spec import Attention, Lengths

_reason = dispatch.kernel("triton").unavailable()
needs_triton = pytest.mark.skipif(_reason is not None, reason=str(_reason))


def _values(name: str, expr: Expr) -> tuple[Array, Array]:
    """S, and what the expression gives for each of its places, as the function computes it."""
    import torch

    from tests.triton.table import table
    from tilewise.kernels.triton.arguments import keys_of, loaded_by

    shape = (SHAPE.batch, SHAPE.heads, SHAPE.n_q, SHAPE.n_k)
    s = torch.from_numpy(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    out = torch.full(shape, torch.nan)
    spec = Attention(1.0, **{name: expr})
    place = (
        SHAPE.first_batch, SHAPE.origin_q, SHAPE.origin_k, SHAPE.total_q, SHAPE.total_k, SHAPE.packed_q, SHAPE.packed_k,
    )  # fmt: skip
    function = getattr(modules.variant(spec, keys_of(SHAPE)), name)
    with np.errstate(all="ignore"):
        table[(SHAPE.heads, SHAPE.batch)](
            s, out, place, loaded_by(spec, s), SHAPE.group, SHAPE.n_q, SHAPE.n_k, FUNCTION=function, TILE=16
        )
    return s.numpy(), out.numpy()


@needs_triton
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_values_are_numpys(name: str) -> None:
    s, scores = _values("score", EXPRESSIONS[name])
    np.testing.assert_allclose(scores, numpy_values(EXPRESSIONS[name], s), rtol=3e-6, atol=3e-6)


@needs_triton
@pytest.mark.parametrize("name", MASKS)
def test_conditions_are_numpys(name: str) -> None:
    s, conditions = _values("mask", MASKS[name])
    assert np.array_equal(conditions, numpy_values(MASKS[name], s))


@needs_triton
def test_random_expressions_are_numpys() -> None:
    for seed, mask in random_conditions():
        s, conditions = _values("mask", mask)
        check_condition(f"seed {seed}", mask, conditions, s)


@needs_triton
@pytest.mark.parametrize("n", [SHAPE.n_k - 3, SHAPE.origin_k + SHAPE.n_k, 999])
def test_arrays_that_have_all_keys_and_arrays_that_have_not(n: int) -> None:
    """Of the first, neighbours are loaded together; of the others, the last cell counts for all keys beyond."""
    cells = np.random.default_rng(n).standard_normal((SHAPE.origin_q + 5, n)).astype(np.float32)
    few = cells[0, ::2].copy()
    expr = load(cells, Q, K) + load(few, K)
    s, scores = _values("score", expr)
    np.testing.assert_allclose(scores, numpy_values(expr, s), rtol=3e-6, atol=3e-6)
    complete = [i for i, size in enumerate((n, len(few))) if size >= SHAPE.origin_k + SHAPE.n_k]
    assert function("score", expr, Attention(1.0, None, expr).loaded, complete).count("cell_of") == len(complete)


# -- who shares a cell ------------------------------------------------------------------------------------------------


def _reads(index: tuple[Expr | int, ...], shape: tuple[int, ...], lengths: Lengths | None = None) -> list[Sharing]:
    import tilewise as tw

    score = tw.S + load(np.zeros(shape, np.float32), *index, grad=True)
    return [read.sharing for read in reads.reads(Attention(1.0, None, score, lengths=lengths))]


@pytest.mark.parametrize(
    ("index", "shape", "sharing"),
    [
        ((), (), Sharing.ROWS),
        ((Q,), (9,), Sharing.ROWS),
        ((0, K), (1, 9), Sharing.COLUMNS),
        ((0, Q, K), (1, 9, 9), Sharing.PAIRS),
        ((Q - K + 8,), (17,), Sharing.DISTANCES),
        ((abs(K - Q) // 2,), (5,), Sharing.DISTANCES),
        ((K + 0,), (9,), Sharing.COLUMNS),
        ((H * 1, Q // 1, 0 + K), (4, 9, 9), Sharing.PAIRS),
    ],
)
def test_who_shares_a_cell(index: tuple[Expr | int, ...], shape: tuple[int, ...], sharing: Sharing) -> None:
    assert _reads(index, shape) == [sharing]


@pytest.mark.parametrize("index", [Q + K, Q * K, (Q + 1) // 2 - K, Q % 3])
def test_what_nobody_sums_up_is_refused(index: Expr) -> None:
    for twice in ((H, HK), (B, B)):
        with pytest.raises(ValueError, match="sums up no gradients"):
            _reads(twice, (9, 9))
    with pytest.raises(ValueError, match="sums up no gradients"):
        _reads((index,), (99,))
    import tilewise as tw

    spec = Attention(1.0, None, tw.S + load(np.zeros(99, np.float32), index, grad=True))
    assert "sums up no gradients" in str(reads.unsupported(spec))
