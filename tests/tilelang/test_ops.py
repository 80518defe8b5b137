"""The tilelang op table: what its expressions give is what NumPy gives. By TileLang's C target, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.cuda.test_ops import EXPRESSIONS, HUGE, MASKS, SHAPE, check_condition, numpy_values, random_conditions
from tests.fuzzing.drawing.dice import Dice
from tilewise import dispatch
from tilewise.arrays import Array
from tilewise.expr import NK, NQ, B, Expr, H, K, Q, S, as_float, constant, load, maximum, minimum, where
from tilewise.kernels.tilelang.build import Build, Variant, sources, told_of
from tilewise.kernels.tilelang.compiler import C
from tilewise.spec import Attention, Tile
from tilewise.walking import loads

_reason = dispatch.kernel("tilelang-c").unavailable()
needs_tilelang = pytest.mark.skipif(_reason is not None, reason=str(_reason))


def _values(*exprs: Expr) -> tuple[Array, list[Array]]:
    """S, and what each expression gives for each of its places, as the compiled kernel computes it."""
    from tests.tilelang.table import table
    from tilewise.kernels.tilelang import library
    from tilewise.kernels.tilelang.call import as_kernels_take
    from tilewise.kernels.uploads import tensor

    variant = Variant({f"value{i}": expr for i, expr in enumerate(exprs)}, loads(*exprs))
    build = Build(
        "table", C, "float32", 1, 1, Tile(), 0, 1, turns=False, heads_first=False, raw=False, has_sinks=False,
        shared_keys=False, packed=False, from_zero=False, aligned=True, **told_of(variant),
    )  # fmt: skip
    shape = (SHAPE.batch, SHAPE.heads, SHAPE.n_q, SHAPE.n_k)
    s = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    out = np.full((len(exprs), *shape), np.nan, np.float32)
    arrays = [as_kernels_take(tensor(slot.array, "cpu")).contiguous() for slot in variant.slots]
    given = {"s": s.ctypes.data, "out": out.ctypes.data, **{f"a{i}": None for i in range(8)}}
    given |= {f"a{i}": x.data_ptr() for i, x in enumerate(arrays)}
    given |= {f"a{i}_size{axis}": size for i, x in enumerate(arrays) for axis, size in enumerate(x.shape)}
    library.kernel(build, lambda: table(build, variant, SHAPE)).launch(given)
    return s, list(out)


def _in_parts(named: dict[str, Expr]) -> list[dict[str, Expr]]:
    """So few at a time that a kernel has parameters for their arrays."""
    parts: list[dict[str, Expr]] = [{}]
    for name, expr in named.items():
        if len(loads(*parts[-1].values(), expr)) > 8:
            parts.append({})
        parts[-1][name] = expr
    return parts


@needs_tilelang
@pytest.mark.parametrize("part", _in_parts(EXPRESSIONS), ids=", ".join)
def test_values_are_numpys(part: dict[str, Expr]) -> None:
    s, values = _values(*part.values())
    for (name, expr), got in zip(part.items(), values, strict=True):
        np.testing.assert_allclose(got, numpy_values(expr, s), rtol=3e-6, atol=3e-6, err_msg=name)


@needs_tilelang
@pytest.mark.parametrize("part", _in_parts(MASKS), ids=", ".join)
def test_conditions_are_numpys(part: dict[str, Expr]) -> None:
    s, values = _values(*part.values())
    for (name, expr), got in zip(part.items(), values, strict=True):
        assert np.array_equal(got, numpy_values(expr, s)), name


@needs_tilelang
def test_random_expressions_are_numpys() -> None:
    for part in _in_parts({f"seed {seed}": mask for seed, mask in random_conditions()}):
        s, values = _values(*part.values())
        for (name, mask), got in zip(part.items(), values, strict=True):
            check_condition(name, mask, got, s)


# TileLang's simplifier (0.1.15) made other numbers of these, or of a comparison with them.
_NEGATIVE_QUOTIENTS = [
    (4 - K // 8) % 4, -(K // 5) % 2, -(H % 2) % 4, -(K // 5) // 2, minimum(-(K // 5), 3) % 4, K // -2 % 16 // -4,
    -(load(HUGE, H) // 5) % 2, (Q - K) // (K - 9) % 3, Q // (K - K) - Q % (K - K),
]  # fmt: skip


@needs_tilelang
def test_quotients_of_negative_quotients_are_numpys() -> None:
    terms = [as_float(term) for term in _NEGATIVE_QUOTIENTS] + [term < 2 for term in _NEGATIVE_QUOTIENTS]
    _check_equal(terms)


@needs_tilelang
@pytest.mark.parametrize("seed", [5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (7, 8, 9))])
def test_random_whole_numbers_are_numpys(seed: int) -> None:
    _check_equal(list(_random_whole_numbers(Dice(seed), 250)))


def _check_equal(terms: list[Expr]) -> None:
    s, values = _values(*terms)
    wrong = [repr(x) for x, got in zip(terms, values, strict=True) if not np.array_equal(got, numpy_values(x, s))]
    assert not wrong


def _random_whole_numbers(dice: Dice, count: int) -> Iterator[Expr]:
    """Quotients, remainders and what may stand around them, as numbers or compared."""
    for _ in range(count):
        term, other = _whole_number(dice, 3), dice.one_of([constant(dice.between(-3, 4)), _whole_number(dice, 2)])
        yield dice.one_of([as_float(term), term < other, term <= other, term == other])


def _whole_number(dice: Dice, depth: int) -> Expr:
    if depth == 0 or dice.below(12) == 0:
        return dice.one_of([K, Q, K, Q, H, NK, NQ, B, constant(dice.between(-9, 9))])
    a, b = _whole_number(dice, depth - 1), _whole_number(dice, depth - 1)
    divisor = constant(dice.one_of([2, 3, 4, 5, 8, 16, -1, -2, -3, -4, 1])) if dice.below(6) or b.op == "const" else b
    return dice.one_of([
        a // divisor, a % divisor, a // divisor, a % divisor, -a, abs(a), a + b, a - b, a * dice.between(-4, 4),
        minimum(a, b), maximum(a, b), where(a < b, a, _whole_number(dice, depth - 1)),
    ])  # fmt: skip


def test_a_new_array_of_the_same_kind_compiles_nothing() -> None:
    def told(n: int) -> dict[str, object]:
        slopes, seen = np.ones(n, np.float32), np.ones((n, 3), bool)
        spec = Attention(1.0, load(seen, H, K % 3), S + load(slopes, H))
        return told_of(Variant({"score": spec.score, "mask": spec.mask}, spec.loaded))  # type: ignore[dict-item]

    assert told(4) == told(9)


def test_which_array_is_which_decides() -> None:
    a, b = np.ones(9, np.float32), np.zeros(9, np.float32)
    slots = loads(load(a, K), load(b, K))
    one, other = (told_of(Variant({"score": S + load(x, Q) * load(y, K)}, slots)) for x, y in ((a, b), (b, a)))
    assert one != other


def test_another_text_is_another_kernel_of_those_that_are_made_of_it() -> None:
    texts = {name: sources(name) for name in ("forward", "backward", "gradients", "tiles")}
    assert "def forward(" in texts["forward"] and "def done_with(" in texts["forward"] + texts["tiles"]
    assert "def d_query(" not in texts["forward"]
    assert "def d_query(" in texts["gradients"], "which takes a tile's weights from there"
    assert all("class CompileError" in text and "_OPS: OpTable" in text for text in texts.values())
