"""Every CUDA kernel that the conformance suite takes on a GPU, compiled ahead, for a GPU machine whose time is short.

python -m tests.cuda.prebuild FOLDER          here, with or without a GPU: NVRTC of the version that is there
TILEWISE_CACHE=FOLDER pytest -m gpu           there: what is not in the folder is compiled when it is called

Once more with TILEWISE_EVERY_LANE=1 it adds what racecheck is given (every_lane.py); the others are there by then.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from tests.cuda import every_lane
from tilewise.cases import conformance
from tilewise.derivative import score_slopes
from tilewise.expr import S
from tilewise.kernels.cuda import compiler, support
from tilewise.kernels.cuda.backward_rungs import BACKWARD, BACKWARD_SM90, UNORDERED_SM90
from tilewise.kernels.cuda.choice import HOPPER, backward_sources_of, reads_arrays
from tilewise.kernels.cuda.rungs import REFINE, REFINE_BACKWARD, RUNGS
from tilewise.kernels.cuda.source import Source, assembled
from tilewise.spec import Attention, Shape, Tile

TILES = (None, Tile(32, 48), Tile(61, 16))  # of tests/conformance; gradients have the first two
FORWARD = ("naive", "tiled", "forward_sm90")


def sources() -> list[Source]:
    found: dict[str, Source] = {}
    for case in conformance():
        call = case.inputs().call()
        if support.unsupported(call.spec, replace(call.shape, device="cuda:0"), None) is None:
            training = replace(call.spec, keeps_remainder=True)
            forward = (source for spec in (call.spec, training) for source in _forward(spec, call.shape))
            every = (*forward, *_backward(call.spec, call.shape))
            found |= {source.text: source for source in every}
    return list(found.values())


def _forward(spec: Attention, shape: Shape) -> Iterator[Source]:
    for rung in (RUNGS[name] for name in FORWARD if RUNGS[name].unsupported(shape) is None):
        for tile in {rung.fitting(tile or rung.default_tile(spec, shape), shape) for tile in TILES}:
            looks = (REFINE,) if rung.persistent and reads_arrays(spec) else ()
            yield from (assembled(x, spec, shape, tile)[0] for x in (rung, *looks))


def _backward(spec: Attention, shape: Shape) -> Iterator[Source]:
    slope = score_slopes(spec)[S]
    for rung in BACKWARD:
        for tile in {rung.fitting(tile or rung.default_tile(spec, shape), shape) for tile in TILES[:2]}:
            yield assembled(rung, spec, shape, tile, tables=False, slope=slope)[0]
    for hoppers in (BACKWARD_SM90, UNORDERED_SM90):
        if hoppers.unsupported(shape) is None:
            yield from backward_sources_of(hoppers, spec, shape)
    if BACKWARD_SM90.unsupported(shape) is None and reads_arrays(spec):
        yield assembled(REFINE_BACKWARD, spec, shape, BACKWARD_SM90.rungs(shape)[0].default_tile(spec, shape))[0]


def _build(source: Source, arch: str, folder: str) -> None:
    os.environ["TILEWISE_CACHE"] = folder
    compiler.machine_code(source, arch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    reason = compiler.without_nvrtc()
    if reason is not None:
        sys.stderr.write(f"{reason}\n")
        return 2
    if os.environ.get("TILEWISE_EVERY_LANE") == "1":
        every_lane.install()
    wanted, arch = sources(), compiler.architecture(HOPPER)
    folder = str(Path(options.folder).resolve())
    with ProcessPoolExecutor(options.jobs) as pool:
        done = pool.map(_build, wanted, [arch] * len(wanted), [folder] * len(wanted), chunksize=4)
        for i, (source, _) in enumerate(zip(wanted, done, strict=True), start=1):
            sys.stdout.write(f"{i} of {len(wanted)}: {source.rung}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
