"""Versions of the CUDA sources beside each other, on a Hopper GPU: what does a change of a kernel bring?

    python tests/compare_gpu.py build/versions/* --cases full,64,4096 causal,128,512
    python tests/compare_gpu.py build/versions/* --cases causal,128,4096 --backward
    python tests/compare_gpu.py --cases causal,128,4096 --backward --kernels    # microseconds of each kernel
    ncu --set full -k attention -o report python tests/compare_gpu.py --cases causal,128,4096 --backward --once
    ncu --import report.ncu-rep --page source --csv    # what every instruction waits for

Each folder has files that stand for those of the same names in tilewise/kernels/cuda/source; `today` is the sources as
they are. All take turns in one process with cuDNN and FlashAttention-4, as in `tilewise bench --gpu`, whose cases these
are: variant, head dimension, length, and perhaps its kind of inputs. A version whose results are not today's is named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

if __name__ == "__main__":  # the project's folder, not the script's own, where `cuda` is something else
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tilewise import dispatch
from tilewise.bench.gpu.cases import VARIANTS, Case, Inputs, sets
from tilewise.bench.gpu.contestants import CUDNN, FLASH, Entry, entered, find
from tilewise.bench.gpu.timing import GpuClock, Settings, rounds
from tilewise.kernels.cuda import compiler, source
from tilewise.kernels.cuda.backward_rungs import BACKWARD_SM90, UNORDERED_SM90
from tilewise.kernels.cuda.choice import HOPPER, backward_source_of, source_of
from tilewise.kernels.cuda.source import Source
from tilewise.sharing import Kept
from tilewise.spec import Attention, Shape
from tilewise.validate import prepare

KERNELS = {False: "cuda/forward_sm90", True: "cuda/unordered"}  # whether d_q may be added in any order
MOST_OFF = 0.02  # from today's results, of the largest number
PEERS = (CUDNN, FLASH)


@dataclass(frozen=True)
class Version:
    name: str
    folder: Path | None = None
    sources: Kept[Source] = field(default_factory=lambda: Kept(512), compare=False)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Kernels that are asked for inside are this version's."""
        read, kept = source._read, source._sources
        source._read, source._sources = partial(self._read, read), self.sources
        try:
            yield
        finally:
            source._read, source._sources = read, kept

    def _read(self, read: Callable[[Path, str], str], folder: Path, name: str) -> str:
        own = None if self.folder is None else self.folder / name
        return own.read_text() if own is not None and own.exists() else read(folder, name)


def case_of(text: str, backward: bool) -> Case:
    variant, d, n, *inputs = text.split(",")
    return replace(Case(variant, int(n), int(d), inputs=inputs[0] if inputs else "normal"), backward=backward)


def compile_ahead(name: str, folder: Path | None, case: Case, unordered: bool = False) -> None:
    """What a call of the case launches, into the user's cache: a process for each, where one would wait for each."""
    options = VARIANTS[case.variant].options(case, {})
    with Version(name, folder).used():
        for made in _sources(_spec(case, options), _shape(case), case.backward, unordered):
            compiler.machine_code(made, compiler.architecture(HOPPER))


def _sources(spec: Attention, shape: Shape, backward: bool, unordered: bool) -> list[Source]:
    made, hoppers = [source_of(spec, shape, HOPPER)], UNORDERED_SM90 if unordered else BACKWARD_SM90
    return [*made, backward_source_of(hoppers, spec, shape)] if backward else made


def _shape(case: Case) -> Shape:
    return Shape(case.batch, case.heads, case.heads_k, case.n, case.n, case.d, case.d, "bfloat16")


def _spec(case: Case, options: dict[str, Any]) -> Attention:
    empty = np.zeros((1, 1, 1, case.d), np.float32)
    return prepare(empty, empty, empty, **options).spec


def entry_of(version: Version, case: Case, inputs: Sequence[Inputs], unordered: bool = False) -> Entry:
    kernel = dispatch.kernel(KERNELS[unordered])

    def call_on(x: Inputs) -> Callable[[], Any]:
        q, k, v = (y.detach() for y in (x.q, x.k, x.v))
        spec = prepare(q, k, v, **VARIANTS[case.variant].options(case, x.extras)).spec
        saved = kernel.forward(spec, q, k, v)

        def run() -> Any:
            with version.used():
                if not case.backward:
                    return kernel.forward(spec, q, k, v).out
                grads = kernel.backward(spec, q, k, v, saved, x.d_out)
                return grads.q, grads.k, grads.v

        return run

    return Entry([call_on(x) for x in inputs])


def compare(case: Case, versions: Sequence[Version], settings: Settings, unordered: bool) -> str:
    """A line: everyone's TFLOP/s, and each version's part of the best peer's."""
    clock, inputs = GpuClock(settings), sets(case)
    entries = {version.name: entry_of(version, case, inputs, unordered) for version in versions}
    wrong = [
        name
        for name, entry in entries.items()
        if _off(entry.calls[0](), entries[versions[0].name].calls[0]()) > MOST_OFF
    ]
    peers = [name for name in PEERS if find(name).missing() is None]
    entries |= {name: entered(find(name), case, inputs) for name in peers}
    loops = {name: clock.loop(entry) for name, entry in entries.items()}
    seconds, failed = rounds({name: partial(clock.turn, loop) for name, loop in loops.items()}, settings.rounds)
    speed = {name: case.flops / median(times) / 1e12 for name, times in seconds.items() if name not in failed}
    best = max((speed[name] for name in peers if name in speed), default=None)
    told = [
        f"{name} {x:.0f}" + (f" ({x / best:.3f})" if best and name not in peers else "") for name, x in speed.items()
    ]
    told += [f"{name} FAILED: {error}" for name, error in failed.items()] + [f"{name} is WRONG" for name in wrong]
    return f"{case.variant}, d {case.d}, n {case.n}, {case.inputs}: " + ", ".join(told)


def once(case: Case, versions: Sequence[Version], unordered: bool) -> None:
    """For a profiler: forward as it is, and then what each version computes."""
    inputs = sets(case)[:1]
    for version in versions:
        entry_of(version, case, inputs, unordered).calls[0]()


def kernels(case: Case, versions: Sequence[Version], unordered: bool) -> str:
    """A line for each version and peer: the kernels that a call launches, and the median microseconds of each."""
    inputs = sets(case)
    entries = {version.name: entry_of(version, case, inputs, unordered) for version in versions}
    entries |= {name: entered(find(name), case, inputs) for name in PEERS if find(name).missing() is None}
    told = [f"{name}: " + ", ".join(_times(entry.calls)) for name, entry in entries.items()]
    return "\n".join([f"{case.variant}, d {case.d}, n {case.n}", *told])


def _times(calls: Sequence[Callable[[], Any]], count: int = 10) -> Iterator[str]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for i in range(count):
            calls[i % len(calls)]()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in profiled.events():
        if event.device_type.name == "CUDA":
            spent.setdefault(event.name, []).append(event.device_time)
    for name, each in spent.items():
        each.sort()  # a call's kernels of one name differ in time by far more than calls do
        of_one = (each[i : i + count] for i in range(0, len(each), count))
        yield f"{name[:60]} {' + '.join(f'{median(x):.0f}' for x in of_one)}"


def _off(found: Any, wanted: Any) -> float:
    """The largest difference, of the largest number."""
    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    return max(float((x - y).float().abs().max() / y.float().abs().max()) for x, y in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", nargs="*", type=Path, help="versions: folders with files of tilewise/kernels/cuda/source"
    )
    parser.add_argument("--cases", nargs="+", default=["full,128,4096"], help="variant,d,n or variant,d,n,inputs")
    parser.add_argument("--backward", action="store_true", help="the gradients")
    parser.add_argument("--unordered", action="store_true", help="gradients of q are added in any order")
    parser.add_argument("--once", action="store_true", help="one call each, for a profiler; nothing is timed")
    parser.add_argument("--kernels", action="store_true", help="how long each kernel of a call takes, by a profiler")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    options = parser.parse_args(arguments)
    versions = [Version("today"), *(Version(folder.name, folder) for folder in options.folders)]
    cases = [case_of(text, options.backward) for text in options.cases]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for done in [
            pool.submit(compile_ahead, x.name, x.folder, case, options.unordered) for x in versions for case in cases
        ]:
            done.result()
    for case in cases:
        if options.once:
            once(case, versions, options.unordered)
        elif options.kernels:
            print(kernels(case, versions, options.unordered), flush=True)
        else:
            print(compare(case, versions, Settings(rounds=options.rounds), options.unordered), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
