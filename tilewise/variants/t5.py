"""T5's relative position bias: near distances have an entry each, far ones share entries, ever wider ones."""

import math
from typing import Any

import numpy as np

from tilewise.expr import Expr, H, K, Loaded, S, load_slot, maximum, minimum
from tilewise.variants._checks import P, array, constant_table, read, whole

MAX_DISTANCE = 2**20  # a lookup table has an entry for each distance


def t5(table: Any, max_distance: int = 128, bidirectional: bool = True, grad: bool = False) -> Expr:
    """S + table[bucket of the distance, head]. table: (buckets, heads), as T5 stores it, or (buckets,).

    bidirectional: the second half of the buckets is for keys after the query; otherwise those keys count as distance 0.

    >>> print(picture(t5(np.arange(8.0), max_distance=6), 6, 6))
    ░ ▓ █ █ █ █
    ░ ░ ▓ █ █ █
    ▒ ░ ░ ▓ █ █
    ▒ ▒ ░ ░ ▓ █
    ▒ ▒ ▒ ░ ░ ▓
    ▒ ▒ ▒ ▒ ░ ░
    """
    table = array("t5", "table", table, "float", range(1, 3))
    buckets = table.shape[0]
    if buckets < 2 or (bidirectional and buckets % 2):
        raise ValueError(f"t5: the table needs an even number of buckets, at least 2, got {buckets}")
    side = buckets // 2 if bidirectional else buckets
    max_distance = whole("t5", "max_distance", max_distance, max(side // 2, 1) + 1, MAX_DISTANCE)
    # The buckets are looked up by distance: no logarithm in a kernel, the same bucket on every system.
    lookup = bucket_of_distance(side, max_distance, bidirectional)
    entry = P - K + max_distance if bidirectional else P - K
    bucket = load_slot(Loaded(lookup, constant=True), minimum(maximum(entry, 0), lookup.shape[0] - 1))
    head = [H] if len(table.shape) == 2 else []
    return S + read("t5", "table", table, bucket, *head, grad=grad)


@constant_table
def bucket_of_distance(buckets: int, max_distance: int, bidirectional: bool) -> Any:
    """The bucket of each distance: the first half of a side's buckets exact, the second half logarithmic.

    Distances run from 0 to max_distance; with bidirectional from -max_distance, keys after the query first.
    """
    exact = max(buckets // 2, 1)
    distance = np.arange(max_distance + 1)
    # In float32, as T5 computes it: a distance on the edge of a bucket falls on the same side.
    ratio = np.log(np.maximum(distance, exact).astype(np.float32) / exact) / np.float32(math.log(max_distance / exact))
    far = np.minimum(exact + (ratio * (buckets - exact)).astype(np.int64), buckets - 1)
    before = np.where(distance < exact, distance, far).astype(np.int32)
    return np.concatenate([before[:0:-1] + buckets, before]) if bidirectional else before
