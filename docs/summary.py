"""The short answers of README.md and docs/backends.md: peers and machines from results/, the matrix from the backends.

The sentences stand here, their numbers in results/; tables.py puts both between the markers of a page.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs import features
from docs.markdown import table
from tilewise._version import __version__
from tilewise.bench import suite
from tilewise.bench.gpu.contestants import CUDNN, FLASH, FLASH_ORDERED, FLEX, PAGED, SDPA
from tilewise.bench.problem import WINDOW
from tilewise.bench.table import geometric_mean
from tilewise.choosing import Purpose

Record = dict[str, Any]
WIDTH = 120
_OLDEST = {"Python": 'requires-python = "', "NumPy": '"numpy', "PyTorch": 'torch = \\["torch'}  # in pyproject.toml
LONG = 4096  # keys from which on FlashAttention-4's gradients are ahead


def records(results: Path, section: str) -> list[Record]:
    """Ours of a section ("gpu/forward"), those that were right; none if it was not measured."""
    path = results / f"{section}.json"
    found = json.loads(path.read_text())["records"] if path.exists() else []
    return [r for r in found if r["ours"] and r["status"] == "ok"]


@dataclass(frozen=True)
class Ratios:
    """Our speed over a peer's, a number a case."""

    values: tuple[float, ...]

    @property
    def mean(self) -> str:
        return _times(geometric_mean(list(self.values)))

    @property
    def least(self) -> str:
        return _times(min(self.values))

    @property
    def span(self) -> str:
        return f"{_times(min(self.values))} to {_times(max(self.values))}"


def _times(x: float) -> str:
    return f"{x:.2f}x" if x < 10 else f"{x:.0f}x"


def ratios(found: list[Record], peer: str | None = None) -> Ratios:
    """To this peer, or to the best one."""
    by_case = (r["ratio"] if peer is None else (r["ratios"] or {}).get(peer) for r in found)
    return Ratios(tuple(x for x in by_case if x is not None))


# -- beside other libraries -------------------------------------------------------------------------------------------


def comparisons(results: Path, page: Path) -> str:
    """A bullet for each library that a reader may have already: what we gain, and when to stay with it."""
    bullets = (bullet(results) for bullet in (_flex, _flash, _sdpa, _decoding, _cpu))
    return "\n".join(textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ") for text in bullets)


def _flex(results: Path) -> str:
    variants = ratios(records(results, "gpu/variants"), FLEX)
    if not variants.values:
        return _unmeasured("FlexAttention", "gpu variants")
    return (
        f"**FlexAttention**: soft caps, ALiBi, windows, documents and biases ran at {variants.span} its speed "
        "(forward). The same expression also runs on CPUs and in decoding. Stay with FlexAttention on GPUs other than "
        "Hopper until you have timed both: we have not."
    )


def _flash(results: Path) -> str:
    forward = ratios(records(results, "gpu/forward"), FLASH)
    ordered = [r for r in records(results, "gpu/gradients") if not r["contestant"].endswith("unordered")]
    gradients, same_mode = ratios(ordered, FLASH), ratios(ordered, FLASH_ORDERED)
    long = ratios([r for r in ordered if r["n"] >= LONG], FLASH)
    if not (forward.values and gradients.values and same_mode.values and long.values):
        return _unmeasured("FlashAttention-4", "gpu forward gradients")
    return (
        f"**FlashAttention-4**: full and causal attention ran at {forward.mean} its speed forward. Our gradients are "
        f"always deterministic; they ran at {gradients.mean} the speed of its default mode and {same_mode.mean} that "
        "of its deterministic mode. Stay with it to train on long sequences: from "
        f"n = {LONG} on our gradients reach {long.mean}."
    )


def _sdpa(results: Path) -> str:
    forward = ratios(records(results, "gpu/forward"), CUDNN)
    step = ratios(records(results, "gpu/step"))
    launches = [r for r in records(results, "gpu/launch") if not r["contestant"].endswith("no_grad")]
    theirs = [r["ratios"][SDPA] * r["median_ms"] for r in launches if SDPA in (r["ratios"] or {})]
    if not (forward.values and step.values and theirs):
        return _unmeasured("SDPA on a GPU", "gpu forward step launch")
    ours_us, theirs_us = 1e3 * launches[0]["median_ms"], 1e3 * theirs[0]
    return (
        f"**SDPA on a GPU** (cuDNN): full and causal attention ran at {forward.mean} its speed forward, a training "
        f"step of a module at {step.span}. Stay with SDPA for small eager calls: at our best, a repeated causal call "
        f"on {launches[0]['n']} tokens keeps the host busy for {ours_us:.0f} µs, SDPA's for {theirs_us:.0f} µs; "
        "variants, gradients and packed sequences take several times SDPA's host time."
    )


def _decoding(results: Path) -> str:
    found = records(results, "gpu/decode")
    plain = ratios([r for r in found if not r["contestant"].endswith(PAGED)], CUDNN)
    paged = ratios([r for r in found if r["contestant"].endswith(PAGED)], CUDNN)
    if not (plain.values and paged.values):
        return _unmeasured("SDPA for decoding", "gpu decode")
    return (
        f"**SDPA for decoding** (cuDNN): one query over a contiguous KV cache ran at {plain.span} its speed, over our "
        f"paged cache at {paged.span}. Stay with SDPA if every sequence has the same length and no variant; change for "
        "pages, mixed lengths, windows or soft caps."
    )


def _cpu(results: Path) -> str:
    forward, training, window = (ratios(records(results, f"cpu/{name}")) for name in ("forward", "training", "window"))
    memory = max(records(results, "cpu/memory"), key=lambda r: r["n_k"], default=None)
    theirs = memory and _extra_of_peer(results, memory["n_k"])
    if not (forward.values and training.values and window.values and memory and theirs):
        return _unmeasured("SDPA on a CPU", "cpu")
    return (
        f"**SDPA on a CPU**: full and causal attention in float32 ran at {forward.mean} its speed, with gradients at "
        f"{training.mean}, a window of {WINDOW} keys at {window.span}. Stay with SDPA if memory is short: at "
        f"n = {memory['n_k']} its call took {theirs / 2**20:.0f} MiB, ours {memory['extra_bytes'] / 2**20:.0f} MiB."
    )


def _extra_of_peer(results: Path, n: int) -> int | None:
    found = json.loads((results / "cpu" / "memory.json").read_text())["records"]
    extra: list[int] = [r["extra_bytes"] for r in found if r["contestant"] == suite.PEER and r["n_k"] == n]
    return extra[0] if extra else None


def _unmeasured(peer: str, sections: str) -> str:
    return f"**{peer}**: not measured yet: `tilewise bench --{sections} --json results/{sections.split()[0]}` does it."


# -- which machine gets what ------------------------------------------------------------------------------------------

MEASURED, COMPILED, MISSING = "measured on", "compiled, never run", "not supported"


@dataclass(frozen=True)
class Machine:
    name: str
    status: str
    architectures: tuple[str, ...]  # that `auto` is asked about; none: nothing computes there


MACHINES = (
    Machine("Hopper (H100, H200)", MEASURED, ("sm_90",)),
    Machine("Ampere, Ada (A100, RTX 4090)", COMPILED, ("sm_80", "sm_89")),
    Machine("Blackwell (B200)", COMPILED, ("sm_100",)),
    Machine("Turing, Volta (T4, V100)", "compiled for Turing, never run", ("sm_75",)),
    Machine("AMD GPUs (MI200, MI300, RX 7900)", COMPILED, ("gfx90a", "gfx942", "gfx1100")),
    Machine("Intel and AMD CPUs, Linux", MEASURED, ("cpu",)),
    Machine("ARM CPUs, Apple silicon", COMPILED, ("cpu",)),
    Machine("Windows", MISSING, ()),
)
_PASSES = {"forward": Purpose.FORWARD, "gradients": Purpose.BACKWARD, "decoding": Purpose.DECODE}
_NAMES = {"cpu": "C++ engine", "numpy": "NumPy", "cuda": "CUDA C++", "triton": "Triton", "cute": "CuTe DSL"}


def machines(results: Path, page: Path) -> str:
    """What `auto` takes for half precision on each machine, and its speed over PyTorch's SDPA where it was measured."""
    rows = []
    for machine in MACHINES:
        measured = _measured(machine, results) if machine.status == MEASURED else ("", machine.status)
        rows.append((machine.name, *(_taken(machine, purpose) for purpose in _PASSES.values()), *measured))
    return table(("machine", *_PASSES, "speed against SDPA", "status"), rows)


def _taken(machine: Machine, purpose: Purpose) -> str:
    """One backend: machines that take different ones are different ones to a reader."""
    (name,) = {features.automatic(arch, purpose) for arch in machine.architectures} or {""}
    return _NAMES.get(name, name)


def _measured(machine: Machine, results: Path) -> tuple[str, str]:
    """Geometric means, in the order of the passes, and of which machine they are."""
    on_cpu = "cpu" in machine.architectures
    device, gradients, peer = ("cpu", "training", None) if on_cpu else ("gpu", "gradients", CUDNN)
    over = []
    for section in ("forward", gradients, "decode"):
        found = [r for r in records(results, f"{device}/{section}") if _is_comparable(r, device)]
        over.append(ratios(found, peer))
    if not all(found.values for found in over):
        return "", f"not measured yet: `tilewise bench --{device}`"
    about = json.loads((results / device / "forward.json").read_text())["machine"][device].removeprefix("NVIDIA ")
    return ", ".join(found.mean for found in over), f"{MEASURED} an {about}"


def _is_comparable(r: Record, device: str) -> bool:
    """What a call does that asks for nothing: gradients in order, a contiguous cache; on a CPU float32."""
    return not r["contestant"].endswith(("unordered", PAGED)) and (device == "gpu" or r["dtype"] == "float32")


# -- what each backend can do -----------------------------------------------------------------------------------------


def matrix(results: Path, page: Path) -> str:
    """Ticks alone: the reasons are in support.md."""
    return features.ticks()


# -- backends beside their peers --------------------------------------------------------------------------------------


def backends(results: Path, page: Path) -> str:
    rows = [(*told, found.mean, found.least) for *told, found in _beside(results) if found.values]
    return table(("backend", "pass", "peer", "geometric mean", "slowest case"), rows)


def _beside(results: Path) -> Iterator[tuple[str, str, str, Ratios]]:
    def of(section: str, peer: str | None = None, name: str | None = None) -> Ratios:
        """Without biases, whose gradients are another question."""
        found = (r for r in records(results, section) if r["variant"] != "bias")
        return ratios([r for r in found if name is None or r["contestant"] == f"tilewise {name}"], peer)

    best = "the fastest peer"
    yield "`cuda`", "forward", best, of("gpu/forward")
    yield "`cuda`", "gradients", best, of("gpu/gradients", name="cuda/forward_sm90")
    yield "`cuda/unordered`", "gradients", best, of("gpu/gradients", name="cuda/unordered")
    yield "`triton`", "forward", FLEX, of("gpu/triton", FLEX)
    yield "`triton`", "gradients", FLEX, of("gpu/backward", FLEX)
    yield "`triton`", "decoding", CUDNN, of("gpu/decode", CUDNN, "triton")
    yield "`cute`", "forward", FLASH, of("gpu/cute", FLASH)
    yield "`cute`", "gradients", FLASH, of("gpu/cute_gradients", FLASH)
    yield "`tilelang`", "forward", best, of("gpu/tilelang")
    yield "`tilelang`", "gradients", best, of("gpu/tilelang_gradients")


def status(results: Path, page: Path) -> str:
    """This version, and the oldest versions of what it needs, from pyproject.toml."""
    project = (page.parent / "pyproject.toml").read_text()
    oldest = {name: re.search(rf'{pattern}>=([\d.]+)"', project) for name, pattern in _OLDEST.items()}
    needed = [f"{name} {found[1]}" for name, found in oldest.items() if found]
    return (
        f"Version {__version__}, alpha: the API may still change ([CHANGELOG](CHANGELOG.md)). "
        f"It needs {', '.join(needed[:-1])} and, for tensors, {needed[-1]} or newer."
    )
