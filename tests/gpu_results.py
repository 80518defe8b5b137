"""Results of the GPU suite that nobody measured, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests import fake_stage as fakes  # noqa: E402
from tilewise.bench.contestants import OURS  # noqa: E402
from tilewise.bench.gpu import contestants, run, stage, suite, targets  # noqa: E402
from tilewise.bench.gpu.cases import Case  # noqa: E402

OUR = OURS + suite.KERNEL
Ratio = Callable[[Case, str], float]


def made_up(name: str, ratio: Ratio = lambda case, peer: 1.5, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Results of a section: ours reaches 500 TFLOP/s, a peer that over the ratio."""
    section, records = suite.SECTIONS[name], []
    for case in section.cases:
        made = []
        for who in section.who(suite.KERNEL, case):
            if who in without:
                continue
            record = stage.blank(case, who, contestants.find(who).ours, None)
            faster = 1.0 if record["ours"] else ratio(case, who)
            ms = (case.read_bytes / 3600e6 if case.queries else case.flops / 500e9) * faster
            record.update(
                median_ms=ms, rounds_ms=[0.99 * ms, ms, 1.02 * ms], spread=0.03, how="graph", calls=5, error=0.002
            )
            record["tflops"] = None if section.host else case.flops / ms / 1e9
            if case.queries:
                record["gbs"] = case.read_bytes / ms / 1e6
                record["read_fraction"] = record["gbs"] / fakes.LIMITS["read_gbs"]
            record["fraction"] = None if section.host else record["tflops"] / fakes.LIMITS["matmul_tflops"]
            if section.first:
                record.update(warm_ms=ms / 2, warm_rounds_ms=[ms / 2], compiled=int(case.variant not in suite.AHEAD))
            made.append(record)
        stage.compare(made)
        records += made
    missing = dict.fromkeys(without, "not installed")
    return {
        "schema": run.SCHEMA, "tilewise": "0.1.0", "date": "2026-11-15T12:00:00Z", "missing": missing,
        "machine": {**fakes.MACHINE, **fakes.LIMITS}, "options": {"section": name, "quick": False}, "records": records,
    }  # fmt: skip


def values(*sections: dict[str, Any]) -> dict[str, Any]:
    return {check.what: check for check in targets.checks({s["options"]["section"]: s for s in sections})}
