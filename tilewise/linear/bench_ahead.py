"""Before linear attention is measured on a GPU: everyone's kernels are compiled, by processes side by side.

Triton compiles one kernel after the other, and a peer that tunes itself tries hundreds of configurations, for minutes.
What was compiled is found in Triton's cache folder. So each process compiles a share of what the peer would try, and
the peer then times all of it and chooses, as it always does. What it chose in an earlier run is found there as well,
and nothing else is compiled then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from itertools import cycle
from typing import Any

from tilewise.bench.contestants import OURS
from tilewise.bench.process import Child
from tilewise.bench.refusal import RefusedError
from tilewise.kernels import gpus
from tilewise.kernels.tilelang import architecture, library
from tilewise.linear import bench_gpu
from tilewise.linear.features import FEATURE_MAPS
from tilewise.linear.kernels.tilelang.build import CHUNK, KERNELS, build_of, written
from tilewise.linear.spec import Linear

_TILELANG = f"{OURS}tilelang"
_PATIENCE = 300.0  # seconds; whatever is not compiled by then is compiled when it is called


def compile_all(progress: Callable[[str], None]) -> None:
    """What fails here fails again when it is measured, and is told there."""
    tasks = list(_tasks())
    with ThreadPoolExecutor(len(tasks)) as pool:
        done = as_completed([pool.submit(_in_a_process, method, *args) for method, *args in tasks])
        for i, _ in enumerate(done):
            progress(f"compiling everyone's kernels: {i + 1} of {len(tasks)} processes are done")


def _tasks() -> Iterator[tuple[Any, ...]]:
    for shape in bench_gpu.SHAPES:
        ours = [name for name, who in bench_gpu.contestants(shape).items() if who.ours]
        yield from (("call", name, shape) for name in ours if name != _TILELANG)
        if _TILELANG in ours and shape in representatives():
            yield from (("kernel", kernel, shape) for kernel in KERNELS if kernel != "row_weights")
    if bench_gpu.has_peer():
        number = os.cpu_count() or 1
        yield from (("share", i, number) for i in range(number))


def _in_a_process(method: str, *args: Any) -> None:
    with suppress(RefusedError), Child(f"{__name__}:Compiler") as child:
        child.ask(method, *args, timeout=_PATIENCE)


class Compiler:
    """The child's side."""

    def call(self, name: str, shape: bench_gpu.Shape) -> None:
        """One of ours, forwards and backwards."""
        _forwards_and_backwards(bench_gpu.contestants(shape)[name], shape)

    def kernel(self, name: str, shape: bench_gpu.Shape) -> None:
        """One of TileLang's, each of which takes seconds."""
        spec, call = Linear(FEATURE_MAPS["identity"], normalize=False), bench_gpu.call_shape(shape)
        target = architecture(gpus.capability(call.device))
        build = build_of(name, spec, call, False, target, CHUNK, True)
        library.keep(build, lambda: written(name)(build, spec))

    def share(self, mine: int, number: int) -> None:
        """Every so many-th of the configurations that the peer would try; none is launched."""
        from triton.runtime.autotuner import Autotuner

        Autotuner.run, Autotuner._bench = _compiling(mine, number, Autotuner.run), _not_chosen
        for shape in representatives():
            _forwards_and_backwards(bench_gpu.contestants(shape)[bench_gpu.PEER], shape)


def representatives() -> list[bench_gpu.Shape]:
    """A shape for all that have the same kernels: one that is small, since every process has its arrays."""
    by_size = sorted(bench_gpu.SHAPES, key=lambda shape: -shape.batch * shape.n)
    return list({(shape.heads, shape.d): shape for shape in by_size}.values())


def _forwards_and_backwards(contestant: bench_gpu.Contestant, shape: bench_gpu.Shape) -> None:
    import torch

    size = (shape.batch, shape.heads, shape.n, shape.d)
    inputs = [torch.zeros(size, device=bench_gpu.DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    bench_gpu.entered(torch, contestant, inputs)


class _NotChosen(Exception):  # noqa: N818 - it names a state
    """Triton has not chosen among a kernel's configurations, neither here nor in its cache folder."""


def _not_chosen(*args: Any, **kwargs: Any) -> None:
    """In place of Triton's, which would time a configuration."""
    raise _NotChosen


def _compiling(mine: int, number: int, run_chosen: Callable[..., Any]) -> Callable[..., None]:
    """In place of Triton's `run`, which is run_chosen: what was not chosen yet is compiled, those of the share, and
    nothing is computed."""
    turns = cycle(range(number))

    def run(self: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> None:
        try:
            run_chosen(self, *args, warmup=warmup, **kwargs)
        except _NotChosen:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            for config in self.prune_configs(kwargs):
                if next(turns) == mine:
                    with suppress(Exception):  # Triton would not take it either
                        self.fn.warmup(*args, **kwargs, **config.all_kwargs())

    return run
