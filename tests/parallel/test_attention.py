"""Attention over two, three and four real processes is that of one: every method, layout and variant, both passes."""

from __future__ import annotations

from itertools import product
from zlib import crc32

import pytest
import torch

import tilewise as tw
from tests.parallel.pool import Pool, mesh
from tests.parallel.problem import check
from tilewise import parallel
from tilewise.cases import PACKED_VARIANTS, SHAPES, VARIANTS, Case, conformance
from tilewise.kernels.cuda import simulator
from tilewise.parallel import balanced

LAYOUTS = ("contiguous", "zigzag")
# With 4 heads, 2 of keys: all methods that can be had.
WAYS = [
    ("2", "ring"), ("2", "gather"), ("2", "heads"), ("3", "ring"), ("3", "gather"),
    ("4", "ring"), ("4", "gather"), ("4", "heads"), ("4", "mix"), ("2 x 2", "ring"), ("2 x 2", "gather"),
]  # fmt: skip
EVERY = [(where, layout, method) for (where, method), layout in product(WAYS, LAYOUTS)]


def _some(case: Case) -> list[tuple[str, str, str]]:
    """One with keys that travel, one with heads that do; others for each case, the same each time."""
    first = crc32(case.name.encode())
    kinds = ([way for way in EVERY if (way[0] != "2 x 2" and way[2] in ("ring", "gather")) == keys] for keys in (0, 1))
    return [ways[first % len(ways)] for ways in kinds]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(pool: Pool, variant: str) -> None:
    case = Case(variant, "ragged", "float64")
    pool.run(check, case, _some(case))


@pytest.mark.parametrize("variant", PACKED_VARIANTS)
def test_packed_sequences(pool: Pool, variant: str) -> None:
    case = Case(variant, "packed", "float64")
    pool.run(check, case, _some(case))


@pytest.mark.parametrize(("variant", "ways"), [("all at once", EVERY), ("bias over batch", EVERY[::2])])
def test_every_method(pool: Pool, variant: str, ways: list[tuple[str, str, str]]) -> None:
    pool.run(check, Case(variant, "ragged", "float64"), ways)


@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in ("ragged", "largest head", "head of 256")])
def test_every_shape(pool: Pool, shape: str) -> None:
    """Some have fewer rows than there are ranks."""
    ways = [way for way in EVERY if way[2] in ("ring", "gather") and way[0] != "2 x 2"]
    pool.run(check, Case("causal", shape, "float64"), ways[::5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_types(pool: Pool, dtype: str) -> None:
    for variant in ("causal", "all at once"):
        pool.run(check, Case(variant, "ragged", dtype), EVERY[::7])


def test_partial_results_of_half_precision_are_merged_unrounded(pool: Pool) -> None:
    """Else the gradient of sinks, a long sum over out, is off by more than one process's."""
    pool.run(
        check, Case("all at once", "head of 128", "bfloat16"), [("2", "zigzag", "gather"), ("3", "zigzag", "ring")]
    )


def _rounded_once(kernel: str) -> float:
    """The part of a result over three ranks that is not what the exact one is rounded to."""
    if mesh("3").get_coordinate() is None:
        return 0.0
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 192, 32).bfloat16() for _ in "qkv")
    own = (parallel.shard(x, mesh("3"), dim=2) for x in (q, k, v))
    out = parallel.unshard(parallel.attention(*own, mesh=mesh("3"), method="ring", kernel=kernel), mesh("3"), dim=2)
    exact = tw.attention(q.double(), k.double(), v.double())
    return float((out != exact.bfloat16()).float().mean())


@pytest.mark.skipif(simulator.unavailable() is not None, reason="the simulator needs a C++ compiler")
def test_partial_results_of_kernels_for_gpus_are_merged_unrounded(pool: Pool) -> None:
    """If they are rounded before, a fifth of all numbers are others; if not, those that lie between two."""
    assert max(pool.run(_rounded_once, "cuda-sim/tiled")) < 0.01


@pytest.mark.slow
@pytest.mark.skipif(simulator.unavailable() is not None, reason="the simulator needs a C++ compiler")
@pytest.mark.parametrize("rung", ["tiled", "forward_sm90"])
def test_kernels_for_gpus(pool: Pool, rung: str) -> None:
    """As on a GPU, where results are those of the type, and not of a wider one."""
    ways = [("2", "zigzag", "gather"), ("3", "zigzag", "ring")]
    pool.run(check, Case("all at once", "ragged", "bfloat16"), ways, "cpu", f"cuda-sim/{rung}")


def _error_of_d_q(method: str) -> float:
    """Of rows that the largest weight saturates, relative to float64's gradient, over two ranks in bfloat16."""
    if mesh("2").get_coordinate() is None:
        return 0.0
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 2, 256, 32).mul(scale).bfloat16() for scale in (12, 1, 1, 1))
    own = [parallel.shard(x, mesh("2"), dim=2) for x in (q, k, v, d_out)]
    own[0].requires_grad_()
    parallel.attention(*own[:3], mesh=mesh("2"), causal=True, method=method).backward(own[3])
    assert own[0].grad is not None
    found = parallel.unshard(own[0].grad, mesh("2"), dim=2).double()
    exact = q.double().requires_grad_()
    tw.attention(exact, k.double(), v.double(), causal=True).backward(d_out.double())
    assert exact.grad is not None
    return float((found - exact.grad).norm() / exact.grad.norm())


@pytest.mark.parametrize("method", ["ring", "gather", "heads"])
def test_gradients_are_made_from_an_unrounded_out(pool: Pool, method: str) -> None:
    assert max(pool.run(_error_of_d_q, method)) < 3e-3


def test_a_rank_that_sees_nothing_has_gradients(pool: Pool) -> None:
    """Of more queries than keys the first see none, under a causal mask: gradients of learned arrays are 0 there."""
    pool.run(check, Case("all at once", "more queries than keys", "float64"), [("3", "contiguous", "ring")])


def test_a_balanced_layout(pool: Pool) -> None:
    """Ranks have several ranges each, of any order."""
    layout = balanced(128, 4, pieces=3, mask=tw.causal() & tw.window(40))
    assert max(map(len, layout.ranges)) > 2
    ways = [("4", layout, "ring"), ("4", layout, "gather"), ("4", layout, "mix"), ("2 x 2", layout, "gather")]
    for variant in ("causal window", "bias over batch"):
        pool.run(check, Case(variant, "square", "float64"), ways)


def test_one_rank_is_a_mesh_too(pool: Pool) -> None:
    pool.run(check, Case("all at once", "ragged", "float64"), [("1", layout, "auto") for layout in LAYOUTS])


@pytest.mark.slow
@pytest.mark.parametrize("case", conformance(), ids=lambda case: case.name)
def test_conformance(pool: Pool, case: Case) -> None:
    shape = SHAPES.get(case.shape)
    heads = 4 if shape is None else shape.heads
    divides = {"2": 2, "3": 3, "4": 4, "2 x 2": 2}
    ways = [(where, lay, how) for where, lay, how in EVERY if how in ("ring", "gather") or heads % divides[where] == 0]
    fits = [way for way in ways if way[0] != "2 x 2" or (heads % 2 == 0 and heads >= 4)]
    pool.run(check, case, [way for way in fits if way[2] != "heads" or case.shape in ("ragged", "packed")])
