"""The cases of linear attention on a GPU: those of every system, and longer ones, of several segments."""

from __future__ import annotations

from dataclasses import replace

from tilewise.linear.cases import CASES as SHARED
from tilewise.linear.cases import LinearCase

LONG = [
    LinearCase("long", n=3000, d=128, d_v=128, dtype="bfloat16", decay="head"),
    LinearCase("long, by token", n=3000, d=64, d_v=128, dtype="bfloat16", decay="token", carried=True),
    LinearCase("long, heads that are no power of 2", n=1500, d=96, d_v=80, heads=4, dtype="bfloat16"),
    LinearCase("long, all of it", n=1500, d=64, d_v=64, dtype="bfloat16", causal=False, carried=True),
    LinearCase("long, packed", lengths=(0, 1000, 1000, 1001, 3000), d=64, d_v=64, dtype="bfloat16", carried=True),
    LinearCase("long, packed, gates", lengths=(0, 700, 1501), d=128, d_v=128, dtype="bfloat16", decay="token"),
    LinearCase("not normalized", n=700, d=128, d_v=128, dtype="bfloat16", normalize=False, feature_map="identity"),
]
CASES = [*SHARED, *(replace(case, dtype="bfloat16") for case in SHARED if case.dtype == "float32"), *LONG]
