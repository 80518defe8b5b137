"""The named variants: their pictures, and that they mean what their origins mean by them."""

from __future__ import annotations

import doctest
import math
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.picture import grid
from tilewise.variants import VARIANTS
from tilewise.variants.alibi import published_slopes


@pytest.mark.parametrize("name", VARIANTS)
def test_picture(name: str) -> None:
    """Each variant's file shows a picture of itself, and it is the true one."""
    module = import_module(f"tilewise.variants.{name}")
    result = doctest.testmod(module, extraglobs={"np": np, "picture": tw.picture})
    assert result.attempted >= 1
    assert result.failed == 0


def test_every_file_is_exported() -> None:
    files = {path.stem for path in Path(tw.__file__).parent.joinpath("variants").glob("[a-z]*.py")}
    assert files == set(VARIANTS)
    assert files <= set(tw.__all__)
    assert files <= set(import_module("tilewise.variants").__all__)


def test_one_file_each() -> None:
    for name, function in VARIANTS.items():
        assert function.__module__ == f"tilewise.variants.{name}"
        assert getattr(tw, name) is function


def test_causal_is_aligned_bottom_right() -> None:
    assert grid(tw.causal(), 2, 5).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert grid(tw.causal(), 3, 2).tolist() == [[0, 0], [1, 0], [1, 1]]


def test_window_is_inclusive_on_both_sides() -> None:
    distance = np.arange(9)[:, None] - np.arange(9)
    assert np.array_equal(grid(tw.window(3, 1), 9, 9), (distance <= 3) & (distance >= -1))
    assert np.array_equal(grid(tw.window(2), 9, 9), np.abs(distance) <= 2)


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 20])
def test_published_alibi_slopes(heads: int) -> None:
    """The slopes of the paper's code, for numbers of heads that are powers of 2 and others."""

    def power_of_two(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    closest = 2 ** math.floor(math.log2(heads))
    want = power_of_two(closest) + power_of_two(2 * closest)[0::2][: heads - closest]
    np.testing.assert_allclose(published_slopes(heads), want, rtol=1e-6)


def _t5_bucket(relative_position: torch.Tensor, bidirectional: bool, buckets: int, max_distance: int) -> torch.Tensor:
    """The bucket as T5's own formula gives it, position by position."""
    result = torch.zeros_like(relative_position)
    if bidirectional:
        buckets //= 2
        result += (relative_position > 0).long() * buckets
        distance = relative_position.abs()
    else:
        distance = -torch.minimum(relative_position, torch.zeros_like(relative_position))
    exact = buckets // 2
    ratio = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    far = torch.minimum(exact + (ratio * (buckets - exact)).long(), torch.tensor(buckets - 1))
    return result + torch.where(distance < exact, distance, far)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (64, 256), (32, 1000)])
def test_t5_buckets(bidirectional: bool, buckets: int, max_distance: int) -> None:
    n = 1200
    table = np.arange(float(buckets))
    relative_position = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    want = _t5_bucket(relative_position, bidirectional, buckets, max_distance)
    assert np.array_equal(grid(tw.t5(table, max_distance, bidirectional), n, n), want.numpy())


def test_relative_clips_at_the_end_of_the_table() -> None:
    table = np.array([5.0, 3.0, 1.0])
    distance = np.minimum(np.abs(np.arange(7)[:, None] - np.arange(7)), 2)
    assert np.array_equal(grid(tw.relative(table), 7, 7), table[distance])
    signed = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    offset = np.clip(np.arange(7) - np.arange(7)[:, None], -2, 2) + 2
    assert np.array_equal(grid(tw.relative(signed, signed=True), 7, 7), signed[offset])


def test_document_per_batch_and_with_keys_of_its_own() -> None:
    ids, k_ids = np.array([[0, 0, 1], [0, 1, 1]]), np.array([[0, 1], [1, 1]])
    q, k, v = (np.random.default_rng(0).standard_normal((2, n, 4)) for n in (3, 2, 2))
    got = tw.weights(q, k, v, rows=range(3), mask=tw.document(ids, k_ids)) > 0
    assert np.array_equal(got, ids[:, :, None] == k_ids[:, None, :])


def test_sinks_join_the_row_sum() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 5, 4)) for _ in range(3))
    sinks = np.array([0.5, -1.0])
    p = tw.weights(q, k, v, rows=range(5), sinks=sinks)
    scores = q @ k.swapaxes(-1, -2) / 2
    want = np.exp(scores) / (np.exp(scores).sum(-1, keepdims=True) + np.exp(sinks)[:, None, None])
    np.testing.assert_allclose(p, want, rtol=1e-12)
    np.testing.assert_allclose(tw.attention(q, k, v, sinks=sinks), want @ v, rtol=1e-12)
    _, lse = tw.attention(q, k, v, sinks=sinks, mask=tw.K < 0, return_lse=True)
    np.testing.assert_allclose(lse[0], np.broadcast_to(sinks[:, None], (2, 5)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tw.window(-1), "window: left must be a whole number of at least 0, got -1"),
        (lambda: tw.window(2, 1.5), "window: right .* got 1.5"),
        (lambda: tw.prefix(True), "prefix: n .* got True"),
        (lambda: tw.dilated(0), "dilated: step .* at least 1, got 0"),
        (lambda: tw.softcap(0.0), "softcap: cap must be a positive number, got 0.0"),
        (lambda: tw.softcap(math.nan), "softcap: cap"),
        (lambda: tw.alibi(0), "alibi: the number of heads"),
        (lambda: tw.alibi(10**9), "alibi: the number of heads must be at most"),
        (lambda: tw.alibi(np.zeros((2, 2))), "alibi: slopes must have 1 dimensions, got shape"),
        (lambda: tw.alibi([0.5, 0.25]), "alibi: slopes must be a NumPy array"),
        (lambda: tw.relative(np.zeros(4, np.int32)), "relative: table must be of type float, got int32"),
        (lambda: tw.relative(np.zeros(4), signed=True), "odd number of entries"),
        (lambda: tw.relative(np.zeros(0)), "relative: table"),
        (lambda: tw.t5(np.zeros(3)), "even number of buckets"),
        (lambda: tw.t5(np.zeros(32), max_distance=4), "t5: max_distance"),
        (lambda: tw.t5(np.zeros(2), max_distance=1), "t5: max_distance .* at least 2, got 1"),
        (lambda: tw.document(np.zeros(4)), "document: ids must be of type int, got float64"),
        (lambda: tw.dense(np.zeros((2, 2))), "dense: mask must be of type bool, got float64"),
        (lambda: tw.bias(np.zeros((1, 1, 1, 1, 1))), "bias: values must have"),
    ],
)
def test_bad_arguments(make: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()  # type: ignore[operator]
