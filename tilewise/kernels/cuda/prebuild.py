"""`make kernels`: the common kernels compiled ahead, so that a first call need not wait for a compiler."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

from tilewise.expr import Expr, K, Q
from tilewise.kernels.cuda import compiler
from tilewise.kernels.cuda.backward_rungs import BACKWARD_SM90
from tilewise.kernels.cuda.choice import HOPPER, backward_sources_of, source_of
from tilewise.kernels.cuda.source import Source
from tilewise.spec import Attention, Shape
from tilewise.variants.causal import causal
from tilewise.variants.window import window

DIMENSIONS = (64, 128, 256)
DTYPES = ("float16", "bfloat16")
LENGTHS = (512, 1024, 8192)  # short and long sequences may have other tiles in the forward pass


def masks() -> list[Expr | None]:
    """Windows of all sizes have the same source. K <= Q is causal as PyTorch's own function aligns it."""
    return [None, causal(), K <= Q, window(1), causal() & window(1)]


def common() -> list[Source]:
    """Of both passes; the forward pass of training keeps what rounding takes from out."""
    found: dict[str, Source] = {}
    for d, dtype, n, mask in product(DIMENSIONS, DTYPES, LENGTHS, masks()):
        spec, shape = Attention(d**-0.5, mask), Shape(1, 1, 1, n, n, d, d, dtype)
        training = replace(spec, keeps_remainder=True)
        sources = [source_of(x, shape, HOPPER) for x in (spec, training)]
        sources += backward_sources_of(BACKWARD_SM90, spec, shape)
        found |= {source.text: source for source in sources}
    return list(found.values())


def build(sources: list[Source], arch: str, compile_one: Callable[[Source, str], bytes]) -> None:
    """What the folder had of other sources goes."""
    names = {f"{compiler.key(source.text, arch)}.cubin": source for source in sources}
    folder = compiler.PREBUILT.folder
    for path in folder.glob("*.cubin"):
        if path.name not in names:
            path.unlink()
    with ThreadPoolExecutor() as threads:
        missing = [name for name in names if compiler.PREBUILT.path(name) is None]
        made = threads.map(lambda name: compile_one(names[name], arch), missing)
        for i, (name, code) in enumerate(zip(missing, made, strict=True), start=1):
            compiler.PREBUILT.add(name, code)
            print(f"{i} of {len(missing)}: {names[name].rung}, {len(code) >> 10} KiB")
    total = sum(path.stat().st_size for path in folder.glob("*.cubin"))
    print(f"{len(names)} kernels for {arch}, {total >> 10} KiB, in {folder}")


def main() -> int:
    reason = compiler.without_nvrtc()
    if reason is not None and shutil.which("nvcc") is None:
        print(f"no compiler: {reason}, or the CUDA toolkit for nvcc", file=sys.stderr)
        return 2
    build(common(), compiler.architecture(HOPPER), compiler.by_nvrtc if reason is None else compiler.by_nvcc)
    return 0


if __name__ == "__main__":
    sys.exit(main())
