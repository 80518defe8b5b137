"""Who takes part: ours by system, the peers that the GPU suite times, and the exact result rounded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilewise import api, dispatch
from tilewise.bench.accuracy.cells import Cell, Drawn
from tilewise.bench.accuracy.exact import Results
from tilewise.bench.contestants import OURS
from tilewise.bench.gpu import contestants as gpu
from tilewise.bench.gpu.cases import Inputs
from tilewise.bench.process import load
from tilewise.bench.refusal import RefusedError
from tilewise.variants.alibi import alibi

FORMAT = "exact, rounded once"
SYSTEMS = {
    "cuda": ("cuda", "cuda/unordered", "cuda/tiled", "triton", "cute", "tilelang"),
    "cpu": ("cpu", "numpy"),
}
PEERS = {
    "cuda": (
        gpu.SDPA_CUDNN, gpu.SDPA_FLASH, gpu.EFFICIENT, gpu.SDPA_MATH, gpu.FLEX, gpu.FLASH_2, gpu.FLASH_3, gpu.FLASH,
    ),
    "cpu": (gpu.SDPA_FLASH, gpu.SDPA_MATH),
}  # fmt: skip
UNFUSED = (gpu.SDPA_MATH,)  # n x n weights in float32 in memory: told, but no kernel's peer
SLOW_TO_COMPILE = (gpu.FLEX, gpu.FLASH, f"{OURS}cute", f"{OURS}tilelang")  # a kernel for each type and size, in seconds


@dataclass(frozen=True, eq=False)
class Contestant:
    name: str
    run: Callable[[Cell, Drawn], Results]  # or raises
    missing: Callable[[], str | None] = lambda: None


def names(device: str, kernel: str | None) -> list[str]:
    """Everyone who could take part, ours last. kernel: only that one of ours."""
    ours = SYSTEMS[device] if kernel is None else (kernel,)
    return [*PEERS[device], *(OURS + name for name in ours)]


def find(name: str) -> Contestant:
    if name.startswith(OURS):
        kernel = name.removeprefix(OURS)
        return Contestant(name, partial(_ours, kernel), partial(_unavailable, kernel))
    if ":" in name:  # one from elsewhere, as "module:attribute"
        found: Contestant = load(name)
        return found
    return Contestant(name, _Peer(name), gpu.find(name).missing)


def _unavailable(kernel: str) -> str | None:
    return dispatch.kernel(kernel).unavailable()


def _ours(kernel: str, cell: Cell, x: Drawn) -> Results:
    """As a user calls it: by autograd."""
    import torch

    leaves = x.leaves()
    q, k, v, *learned = leaves
    options: dict[str, Any] = {"causal": cell.mask == "causal", "kernel": kernel}
    if cell.learned == "slopes":
        options["score"] = alibi(learned[0], grad=True)
    if cell.learned == "sinks":
        options["sinks"] = learned[0]
    out, lse = api.attention(q, k, v, return_lse=True, **options)
    found = torch.autograd.grad(out, leaves, x.d_out)
    what = ("d_q", "d_k", "d_v", f"d_{cell.learned}")
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(what, found, strict=False))}


class _Peer:
    """One of the GPU suite's. FlexAttention is compiled for each shape, whose cells take turns on the same tensors."""

    def __init__(self, name: str) -> None:
        self._contestant = gpu.find(name)
        self._kept: tuple[tuple[Any, ...], Inputs, gpu.Entry] | None = None

    def __call__(self, cell: Cell, x: Drawn) -> Results:
        import torch

        if cell.learned:
            raise RefusedError("cannot express", "it is asked for no slopes or sinks")
        inputs, entry = self._entered(cell, x)
        wanted, d_out = (inputs.wanted, x.d_out) if entry.gradients is None else entry.gradients[0]
        with entry.around():
            out = entry.calls[0]()
            grads = torch.autograd.grad(entry.read(out) if entry.gradients is None else out, wanted, d_out)
        read = (lambda y: y) if entry.gradients is None else entry.read
        return {"out": entry.read(out).detach(), **dict(zip(("d_q", "d_k", "d_v"), map(read, grads), strict=True))}

    def _entered(self, cell: Cell, x: Drawn) -> tuple[Inputs, gpu.Entry]:
        import torch

        shape = (cell.mask, cell.dtype, cell.n, cell.d)
        if self._contestant.name == gpu.FLEX and self._kept is not None and self._kept[0] == shape:
            _, inputs, entry = self._kept
            with torch.no_grad():
                for kept, new in zip((inputs.q, inputs.k, inputs.v), (x.q, x.k, x.v), strict=True):
                    kept.copy_(new)
            return inputs, entry
        q, k, v = x.leaves()
        inputs = Inputs(q, k, v, d_out=x.d_out)
        entry = self._contestant.enter(cell.case, [inputs])
        self._kept = shape, inputs, entry
        return inputs, entry
