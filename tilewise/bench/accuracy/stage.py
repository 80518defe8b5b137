"""A contestant's own process: it draws each cell's tensors, computes what is exact, and says how far off it is."""

from __future__ import annotations

import math
from typing import Any

from tilewise.bench import machine
from tilewise.bench.accuracy.cells import Cell, Drawn, draw
from tilewise.bench.accuracy.contestants import FORMAT, Contestant, find
from tilewise.bench.accuracy.exact import Exact, errors, exact, rounded
from tilewise.bench.contestants import OURS
from tilewise.bench.gpu import limits
from tilewise.bench.gpu.judge import ALLOWED
from tilewise.bench.refusal import RefusedError, public, refusal

Record = dict[str, Any]


class Stage:
    def __init__(self, device: str) -> None:
        self._device = device
        self._contestants: dict[str, Contestant] = {}

    def machine(self) -> dict[str, Any]:
        return machine.describe() if self._device == "cpu" else limits.machine()

    def missing(self, names: list[str]) -> dict[str, str]:
        """Who cannot take part, with the reason."""
        reasons = {name: find(name).missing() for name in names}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def measure(self, cell: Cell, name: str) -> Record:
        """A record, of a failure too. A GPU that can no longer be used is an error."""
        x = draw(cell, self._device)
        want = exact(cell, x)
        try:
            return self._measured(cell, name, x, want)
        except Exception as error:  # a contestant's failure is a result of the benchmark
            refused = refusal(error)
            self._check_device(name, refused)
            return blank(cell, name, refused)

    def _measured(self, cell: Cell, name: str, x: Drawn, want: Exact) -> Record:
        if name == FORMAT:
            return _record(cell, name, errors(want, rounded(cell, want.results)))
        contestant = self._contestants.setdefault(name, find(name))
        return _record(cell, name, errors(want, contestant.run(cell, x)))

    def _check_device(self, name: str, refused: RefusedError) -> None:
        if self._device == "cpu":
            return
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise RefusedError(refused.status, f"{name} left the GPU unusable: {refused.reason}") from None


def blank(cell: Cell, name: str, refused: RefusedError) -> Record:
    """Of a contestant that has no numbers for the cell, and why."""
    return {**_begun(cell, name, refused.status, public(refused.reason)), "errors": {}}


def _begun(cell: Cell, name: str, status: str, reason: str | None) -> Record:
    return {
        **cell.describe(), "contestant": name, "ours": name.startswith(OURS), "status": status, "reason": reason,
    }  # fmt: skip


def _record(cell: Cell, name: str, found: dict[str, tuple[float, float]]) -> Record:
    """Relative and largest errors, of four digits; JSON has no infinity."""
    right = found["out"][0] <= ALLOWED
    status, reason = ("ok", None) if right else ("wrong", f"out is off by {found['out'][0]:.2g}, {ALLOWED} is rounding")
    told = {what: [_digits(x) for x in pair] for what, pair in found.items()}
    return {**_begun(cell, name, status, reason), "errors": told}


def _digits(x: float) -> float | None:
    return float(f"{x:.4g}") if math.isfinite(x) else None
