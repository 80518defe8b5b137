"""The cases of linear attention that are compiled for a GPU: some of every system's, and long ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewise.linear.cases import CASES as SHARED
from tilewise.linear.cases import LinearCase

RAW: dict[str, Any] = {"dtype": "bfloat16", "normalize": False, "feature_map": "identity"}
LONG = [
    LinearCase("long", n=3000, d=128, d_v=128, dtype="bfloat16", decay="head"),
    LinearCase("long, by token", n=3000, d=64, d_v=128, dtype="bfloat16", decay="token", carried=True),
    LinearCase("long, heads that are no power of 2", n=1500, d=96, d_v=80, heads=4, dtype="bfloat16"),
    LinearCase("long, all of it", n=1500, d=64, d_v=64, dtype="bfloat16", causal=False, carried=True),
    LinearCase("long, packed", lengths=(0, 1000, 1000, 1001, 3000), d=64, d_v=64, dtype="bfloat16", carried=True),
    LinearCase("long, packed, gates", lengths=(0, 700, 1501), d=128, d_v=128, dtype="bfloat16", decay="token"),
    LinearCase("not normalized", n=700, d=128, d_v=128, **RAW),
    LinearCase("not normalized, one segment", 2, 4, 2, n=200, d=128, d_v=64, carried=True, **RAW),
    LinearCase("not normalized, scaled", n=1500, d=64, d_v=64, decay="head", scale=0.5, **RAW),
]
AGAIN = LinearCase("any", 2, 8, 4, n=2000, d=64, d_v=64, dtype="bfloat16", decay="token")  # for the same bits
NAMES = ("all of a sequence", "squared relu", "exp", "an expression", "gates, grouped heads", "packed", "nothing")
CASES = [
    *(replace(case, dtype="bfloat16") for case in SHARED if case.name in NAMES),
    *(case for case in SHARED if case.dtype == "bfloat16"),
    *LONG,
    AGAIN,
]
