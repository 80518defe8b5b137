"""T5's relative position bias: near distances have an entry each, far ones share entries, ever wider ones."""

import math
from typing import Any

import numpy as np

from tilewise.expr import Expr, H, K, Loaded, S, load, load_slot, maximum, minimum
from tilewise.variants._checks import P, array, whole


def t5(table: Any, max_distance: int = 128, bidirectional: bool = True, grad: bool = False) -> Expr:
    """S + table[bucket of the distance, head]. table: (buckets, heads), as T5 stores it, or (buckets,).

    bidirectional: the second half of the buckets is for keys after the query; otherwise those keys count as distance 0.

    ░ ▓ ▓ █ █ █
    ░ ░ ▓ ▓ █ █
    ▒ ░ ░ ▓ ▓ █
    """
    table = array("t5", "table", table, "float", range(1, 3))
    buckets = table.shape[0]
    if buckets < 2 or (bidirectional and buckets % 2):
        raise ValueError(f"t5: the table needs an even number of buckets, at least 2, got {buckets}")
    side = buckets // 2 if bidirectional else buckets
    max_distance = whole("t5", "max_distance", max_distance, side // 2 + 1)
    # The buckets are looked up by distance: no logarithm in a kernel, the same bucket on every system.
    before = bucket_of_distance(side, max_distance)
    if bidirectional:
        after = before[1:] + side
        lookup, entry = np.concatenate([after[::-1], before]), P - K + max_distance
    else:
        lookup, entry = before, P - K
    bucket = load_slot(Loaded(lookup, constant=True), minimum(maximum(entry, 0), len(lookup) - 1))
    head = [H] if len(table.shape) == 2 else []
    return S + load(table, bucket, *head, grad=grad)


def bucket_of_distance(buckets: int, max_distance: int) -> Any:
    """The bucket of each distance from 0 to max_distance: the first half exact, the second half logarithmic."""
    exact = max(buckets // 2, 1)
    distance = np.arange(max_distance + 1)
    # In float32, as T5 computes it: a distance on the edge of a bucket falls on the same side.
    ratio = np.log(np.maximum(distance, exact).astype(np.float32) / exact) / np.float32(math.log(max_distance / exact))
    far = np.minimum(exact + (ratio * (buckets - exact)).astype(np.int64), buckets - 1)
    return np.where(distance < exact, distance, far).astype(np.int32)
