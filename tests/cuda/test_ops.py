"""The cuda op table: what its C++ gives is what NumPy gives, and common masks cost what hand-written ones do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tilewise as tw
from tests.expressions import Expressions
from tests.fuzzing.drawing.dice import Dice
from tests.strategies import BOOL_ARRAYS, FLOAT_ARRAYS, INT_ARRAYS
from tilewise import arrays
from tilewise.arrays import Array
from tilewise.expr import HK, KP, NK, NQ, QP, B, Expr, H, K, Loaded, Q, S, load, where
from tilewise.kernels.cuda import marshal, simulator
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.ops import variant
from tilewise.kernels.cuda.rungs import Naive
from tilewise.kernels.cuda.source import source
from tilewise.kernels.cuda.structs import MAX_CONSTANTS
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.spec import Attention, Shape, Tile
from tilewise.walking import evaluate

needs_compiler = pytest.mark.skipif(simulator.unavailable() is not None, reason=str(simulator.unavailable()))

SHAPE = Shape(2, 4, 2, 12, 14, 14, 14, origin_q=5, origin_k=3, total_q=20, total_k=17)


class _Table(Naive):
    """The kernel of table.cu."""

    name, folder = "table", Path(__file__).parent


def _values(mask: Expr | None, score: Expr | None, shape: Shape = SHAPE) -> tuple[Array, Array, Array]:
    """S, and what score and mask give for each of its places, as computed by the C++."""
    sizes = (shape.batch, shape.heads, shape.n_q, shape.n_k)
    s = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
    scores, conditions = (np.full(sizes, np.nan, np.float32) for _ in range(2))
    spec, tile, made = Attention(1.0, mask, score), Tile(8, 5), variant(mask, score)
    text = source(_Table(), made, shape, tile, headers=simulator.headers())
    tables = marshal.tables(spec, shape, tile, _Table())
    operands = {name: View.of_numpy(x) for name, x in (("q", s), ("out", scores), ("v", conditions))}
    loaded = [View.of_numpy(arrays.as_numpy(slot.array)) for slot in made.slots]
    params = marshal.params(
        spec, shape, tables, int(tables.numbers.ctypes.data), operands, None, loaded, made.constants
    )
    simulator.compile_source(text.text).launch(params, grid=marshal.blocks(shape, tables), threads=tile.q)
    return s, scores, conditions


def numpy_values(expr: Expr, s: Array, shape: Shape = SHAPE) -> Array:
    b, h, q, k = np.ix_(*(np.arange(n) for n in s.shape))
    with np.errstate(all="ignore"):
        return np.broadcast_to(evaluate(expr, {**shape.env(b, h, q, k), "S": s}, numpy_ops(np.float32)), s.shape)


BIG = np.array([2**31 - 1, -(2**31), 7, 0], np.int32)
HUGE = np.array([2**62, -(2**62), 5, 0], np.int64)
_HASH = 0x9E3779B97F4A7C15 - 2**64
HASHES = np.array([-(2**63), _HASH, _HASH + 2**32, _HASH + 1, 7, 2**53, 2**53 + 1, 2**63 - 1])

EXPRESSIONS: dict[str, Expr] = {
    "variables": S + (B + 2 * H + 3 * HK + 5 * Q + 7 * K + 11 * NQ + 13 * NK + 17 * QP + 19 * KP),
    "division": S + ((Q - K) // 5 + (K - Q) % 7 + (Q - K) // (K - 9) + (Q - K) % (K - 9)),
    "division by 0": S + (Q // (K - K) + Q % (K - K)),
    "float division": (S // 0.3) + (S % 0.7) + (S // -0.3) + (S % -0.7),
    "functions": tw.exp(S) + tw.log(abs(S) + 1.0) + tw.tanh(S) + abs(-S),
    "extremes": tw.minimum(S, 0.1) + tw.maximum(S, -0.1) + tw.minimum(Q, K) + tw.maximum(Q, K),
    "constants": where(K % 2 == 0, S * 1e-3, -np.inf) + where(Q < 8, 3.0, -7.25),
    "smallest integer": where(Q == -(2**31), S, S + 1.0),
    "integers beyond 32 bits": S + (load(BIG, H) + load(BIG, H) - 2 * load(BIG, H) + load(BIG, H) // -1) * 1.0,
    "integers of 64 bits": where(load(HUGE, H) > 2**31 - 1, S, S - load(HUGE, H) // 3),
    "choices of integers": S + where(load(HUGE, H) > load(BIG, H), load(HUGE, H), load(BIG, H)) * 1e-9,
    "sizes of integers": S + abs(load(BIG, H)) * 1e-9 + tw.maximum(load(HUGE, H), Q) * 1e-18,
    "clamped": S + load(np.arange(5, dtype=np.float32), Q - K),
}


@needs_compiler
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_values_are_numpys(name: str) -> None:
    s, scores, _ = _values(None, EXPRESSIONS[name])
    np.testing.assert_allclose(scores, numpy_values(EXPRESSIONS[name], s), rtol=3e-6, atol=3e-6)


MASKS: dict[str, Expr] = {
    "causal": tw.causal(),
    "window": tw.window(3, 1),
    "causal window": tw.causal() & tw.window(4),
    "prefix": tw.causal() | tw.prefix(6),
    "either side": (K > Q - 3) & (Q + 4 > K) & (3 >= K - Q) & ~(K < 2),
    "twice": (2 * K <= Q + K) & (Q - K != 2),
    "not alone": (K + K <= Q) | (K == Q),
    "far away": (K <= Q + 2**30) & (K > Q - 2**30),
    "ids of 64 bits": load(HASHES, Q % 8) == load(HASHES, K % 8),
    "others": load(HASHES, Q % 8) != load(HASHES, K % 8),
    "in order": load(HASHES, Q % 8) <= load(HASHES, K % 8),
    "ids and numbers": (load(HASHES, Q % 8) == 7) | (load(HASHES, K % 8) > 2**31 - 1) | (load(HASHES, H + 4) < K),
    "chosen ids": where(K < Q, load(HASHES, Q % 8), load(HASHES, K % 8)) == load(HASHES, H),
    "the larger id": tw.maximum(load(HASHES, Q % 8), load(HASHES, K % 8)) == load(HASHES, K % 8),
    "an id as an index": load(HASHES, load(HASHES, K % 8)) == load(HASHES, load(HASHES, Q % 8)),
}


@needs_compiler
@pytest.mark.parametrize("name", MASKS)
def test_conditions_are_numpys(name: str) -> None:
    s, _, conditions = _values(MASKS[name], None)
    assert np.array_equal(conditions, numpy_values(MASKS[name], s))
    assert 0 < conditions.mean() <= 1


@needs_compiler
def test_random_expressions_are_numpys() -> None:
    """Every operation over every kind of array; what is compared is masked by what float32 can tell."""
    for seed, mask in random_conditions():
        s, _, conditions = _values(mask, None)
        check_condition(f"seed {seed}", mask, conditions, s)


def random_conditions() -> Iterator[tuple[int, Expr]]:
    pools = {"int": INT_ARRAYS, "float": FLOAT_ARRAYS, "bool": BOOL_ARRAYS}
    for seed in range(25):
        dice = Dice(seed)
        drawn = Expressions(dice.below, lambda kind, dice=dice: Loaded(dice.one_of(pools[kind])))
        yield seed, drawn.condition(dice.between(1, 4))


def check_condition(what: str, mask: Expr, got: Array, s: Array) -> None:
    different = got != numpy_values(mask, s)
    floats = any(op in repr(mask) for op in ("exp", "log", "tanh", "/", "."))  # may round to another side
    assert different.mean() <= (0.02 if floats else 0), f"{what}: {mask!r}"


# -- what it costs ----------------------------------------------------------------------------------------------------


def _function(text: str, name: str) -> list[str]:
    body = re.search(rf" {name}\(const Params& params, const Head& head, const Row.*?\{{\n(.*?)\n\}}", text, re.DOTALL)
    assert body is not None
    return [line.strip() for line in body[1].splitlines()]


@pytest.mark.parametrize(
    ("mask", "comparisons"),
    [
        (tw.causal(), ["<="]),
        (tw.window(5, 7), [">=", "<="]),
        (tw.causal() & tw.window(24), [">=", "<="]),
        (tw.prefix(9), ["<="]),
    ],
)
def test_bounds_are_compared_with_the_column_alone(mask: Expr, comparisons: list[str]) -> None:
    """For each score: a comparison or two of the column with a number of the row, as one would write by hand."""
    condition, result = _function(variant(mask, None).text, "mask")
    found = re.findall(r"key\.column (<=|>=) row\.t\d+", condition)
    assert found == comparisons
    assert re.fullmatch(r"const bool x\d+ = key\.column .. row\.t\d+( && key\.column .. row\.t\d+)?;", condition)
    assert re.fullmatch(r"return x\d+;", result)


def test_values_are_computed_where_they_vary() -> None:
    ids, slopes = np.zeros(20, np.int32), np.ones(4, np.float32)
    text = variant(load(ids, Q) == load(np.zeros(17, np.int32), K), S - load(slopes, H) * abs(Q - K)).text
    per_score = _function(text, "mask") + _function(text, "score")
    assert not any(".read(" in line or "float(" in line.replace("float(key.column)", "") for line in per_score)
    assert len(re.findall(r"\.read\(", text)) == 3


def test_a_table_of_pairs_is_found_by_row() -> None:
    """Of a bias only the key's place is left for each score, and nothing is multiplied if keys lie side by side."""
    text = variant(None, tw.bias(np.zeros((2, 4, 20, 17), np.float32))).text
    assert [line for line in _function(text, "score") if "near" in line] == ["const float x11 = near.n0;"]
    assert "row.r7.read_two(key.k9, next.k9, two[0].n0, two[1].n0);" in text
    assert "const int k9 = clamped(params.arrays[0], 3, K);" in text
    other = variant(None, tw.bias(np.zeros((2, 4, 17, 20), np.float32).swapaxes(2, 3))).text
    assert "along(params.arrays[0], 3, K);" in other


def test_arrays_are_slots_in_order() -> None:
    a, b = np.zeros(4, np.float32), np.zeros((4, 3), bool)
    made = variant(load(b, H, K % 3), S + load(a, H) * load(a, H))
    assert [slot.array is x for slot, x in zip(made.slots, (a, b), strict=True)] == [True, True]
    again = variant(
        load(np.ones((4, 3), bool), H, K % 3), S + load(slopes := np.ones(4, np.float32), H) * load(slopes, H)
    )
    assert again.text == made.text, "a new array of the same kind compiles nothing"


def test_one_text_serves_windows_of_all_sizes() -> None:
    made, again = variant(tw.window(5, 7), None), variant(tw.window(100), None)
    assert made.text == again.text
    assert (made.constants, again.constants) == ((-5, 7), (-100, 100))
    causal = variant(tw.causal() & tw.window(9), None)
    assert causal.constants == (-9,)
    assert causal.text == variant(tw.window(64, 0), None).text


@needs_compiler
def test_more_bounds_than_constants_have_room() -> None:
    mask = K < 2
    for first in range(4, 4 + 2 * MAX_CONSTANTS, 2):
        mask = mask | (K == first) | ((K > Q + first) & (K < Q + first + 2))
    assert len(variant(mask, None).constants) == MAX_CONSTANTS
    s, _, conditions = _values(mask, None)
    assert np.array_equal(conditions, numpy_values(mask, s))


@needs_compiler
@pytest.mark.parametrize("kernel", ["cuda-sim/naive", "cuda-sim/tiled"])
def test_a_table_between_two_addresses_is_read_as_it_lies(kernel: str) -> None:
    """It is copied, in another order than the caller's: the source must be made for the copy."""
    table = np.zeros(64, np.uint8)[2:26].view(np.float32).reshape(3, 2).T
    table[...] = [[1, 2, 3], [4, 5, 6]]
    q, k = np.zeros((1, 1, 2, 8), np.float32), np.zeros((1, 1, 3, 8), np.float32)
    _, lse = tw.attention(q, k, k, score=load(table, Q, K), kernel=kernel, return_lse=True)
    np.testing.assert_allclose(lse[0, 0], np.log(np.exp(table).sum(axis=1)), rtol=1e-6)
