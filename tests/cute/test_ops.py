"""The cute op table: what its functions give is what NumPy gives. CuTe's compiler runs them on a CPU."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from tests.cuda.test_ops import EXPRESSIONS, MASKS, SHAPE, check_condition, numpy_values, random_conditions
from tilewise.arrays import Array
from tilewise.expr import Expr, H, K, Q, S, load
from tilewise.kernels.cute import modules
from tilewise.spec import Attention

needs_cute = pytest.mark.skipif(find_spec("cutlass") is None, reason="CuTe's DSL is not installed")


def _values(name: str, expr: Expr) -> tuple[Array, Array]:
    """S, and what the expression gives for each of its places, as the function computes it."""
    from cutlass.cute.runtime import from_dlpack

    from tests.cute.table import table
    from tilewise.kernels.cute.launch import as_kernels_take

    shape = (SHAPE.batch, SHAPE.heads, SHAPE.n_q, SHAPE.n_k)
    s = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    out = np.full(shape, np.nan, np.float32)
    spec = Attention(1.0, **{name: expr})
    place = (
        SHAPE.first_batch, SHAPE.origin_q, SHAPE.origin_k, SHAPE.total_q, SHAPE.total_k, SHAPE.packed_q, SHAPE.packed_k,
    )  # fmt: skip
    arrays = tuple(from_dlpack(as_kernels_take(x)) for x in [slot.array for slot in spec.loaded] or [s])
    table(*map(from_dlpack, (s, out)), arrays, getattr(modules.module(modules.text(spec)), name), place, SHAPE.group)
    return s, out


@needs_cute
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_values_are_numpys(name: str) -> None:
    s, scores = _values("score", EXPRESSIONS[name])
    np.testing.assert_allclose(scores, numpy_values(EXPRESSIONS[name], s), rtol=3e-6, atol=3e-6)


@needs_cute
@pytest.mark.parametrize("name", MASKS)
def test_conditions_are_numpys(name: str) -> None:
    s, conditions = _values("mask", MASKS[name])
    assert np.array_equal(conditions, numpy_values(MASKS[name], s))


@needs_cute
def test_random_expressions_are_numpys() -> None:
    for seed, mask in random_conditions():
        s, conditions = _values("mask", mask)
        check_condition(f"seed {seed}", mask, conditions, s)


def test_a_value_is_written_once() -> None:
    slopes = np.ones(4, np.float32)
    text = modules.text(Attention(1.0, None, S + load(slopes, H) * abs(Q - K) + load(slopes, H)))
    assert text.count("cell(") == 1


def test_arrays_are_slots_in_order() -> None:
    a, b = np.zeros(4, np.float32), np.zeros((4, 3), bool)
    made = modules.text(Attention(1.0, load(b, H, K % 3), S + load(a, H)))
    other = modules.text(Attention(1.0, load(np.ones((4, 3), bool), H, K % 3), S + load(np.ones(4, np.float32), H)))
    assert made == other, "a new array of the same kind compiles nothing"
    assert "arrays[1]" in made.partition("def mask")[0], "those of the mask come first"
