"""Results of the CPU suite that no machine measured: every time is a plain function of its cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests import fake_contestants as fakes
from tilewise.bench import peers, roofline, run, suite
from tilewise.bench.contestants import Contestant
from tilewise.bench.problem import Cell

ROOF = roofline.Roof(peak_gflops=200.0, read_gbs=30.0)
PLAIN_READ, CACHE = 20e9, 32 << 20
OURS = Contestant("tilewise cpu", fakes.ours.enter, ours=True)
PEER = peers.FROM_TORCH[0]
Ratio = Callable[[Cell], float]


def made_up(name: str, ratio: Ratio = lambda cell: 2.0, **changed: Any) -> dict[str, Any]:
    """Results of a section: the peer takes 8 ns for each visible pair of a head, ours that over the ratio."""
    records = []
    for cell in suite.SECTIONS[name].cells:
        flops = 4.0 * cell.pairs * cell.d
        for contestant, faster in ((OURS, ratio(cell)), (PEER, 1.0)):
            seconds = 8e-9 * cell.pairs / faster
            if cell.variant == "window":  # ours grows with n x window, the peer with n x n
                seconds = 8e-9 * cell.n_q * (256 if contestant.ours else cell.n_k) / faster
            record = run._record({**cell.describe(), "flops": flops}, contestant, None)
            times = dict.fromkeys(("median_ms", "min_ms", "p10_ms", "p90_ms"), seconds * 1e3)
            record.update(times, repetitions=3, gflops=flops / seconds / 1e9, error=1e-7, extra_bytes=None)
            if cell.n_q == 1:
                record.update(
                    roofline.reading(cell, seconds, [roofline.PlainRead.beside(cell, [seconds], PLAIN_READ)], CACHE)
                )
            if suite.SECTIONS[name].memory:
                record["extra_bytes"] = 1000 * cell.n_q
            records.append({**record, **(changed if contestant.ours else {})})
    for ours, peer in zip(records[::2], records[1::2], strict=True):
        ours["ratio"], peer["ratio"] = peer["median_ms"] / ours["median_ms"], 1.0
    return run.results(records, {"section": name, "threads": 2}, {}, ROOF)
