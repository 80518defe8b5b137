"""`tilewise build cute`: kernels compiled ahead of time, into a folder of small libraries that need no compiler."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilewise import validate
from tilewise.arrays import BFLOAT16
from tilewise.bench.problem import VARIANTS, Cell
from tilewise.cli import UserError
from tilewise.cli.bench_options import check_writable, names, several, whole
from tilewise.cli.terminal import progress
from tilewise.kernels.cute import architecture, compiler, library, projected, support
from tilewise.kernels.cute.cubin import Resources
from tilewise.kernels.cute.rungs import LADDER, LONG, SCALED, Rung, backward_rung
from tilewise.kernels.cute.wanted import Wanted, kernel_of
from tilewise.kernels.disk import Files
from tilewise.spec import Attention, Shape
from tilewise.validate import Call

_EXAMPLES = f"""examples:
  tilewise build cute --arch sm_90a --out kernels
  tilewise build cute --arch sm_90a --out kernels --backward    and what training takes
  tilewise build cute --arch sm_90a,sm_80 --out kernels --variants causal,alibi --d 64 --dtype float16
  tilewise build cute --arch sm_90a --out kernels --d 32 --projection 4    and with the output projection of 4 heads
  {library.FOLDER}=kernels python train.py          calls find them there

The variants are those of `tilewise bench`. Batches, heads and scales make no difference to a kernel, nor do lengths,
but that small heads have one for long sequences, which is built, too; the numbers of a mask, such as a window's size,
do. A bias is built for one array of all heads, (queries, keys), and for one of each, (heads, queries, keys)."""


class _Asked(NamedTuple):
    kernel: Wanted
    arch: str
    about: str


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "build",
        help="compile kernels ahead of time, for machines without a compiler",
        description="Compiles CuTe kernels, which needs no GPU, into a folder of small libraries. Where the variable "
        f"{library.FOLDER} names that folder, calls take them from there, and need apache-tvm-ffi alone.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("system", choices=["cute"], help="the kernel system")
    parser.add_argument("--arch", required=True, metavar="LIST", help="such as sm_90a")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder, made if it is not there")
    parser.add_argument("--variants", default="full,causal", metavar="LIST", help="(default: %(default)s)")
    parser.add_argument("--d", default="64,128", metavar="LIST", help="head dimensions (default: %(default)s)")
    parser.add_argument("--dtype", default="float16,bfloat16", metavar="LIST", help="(default: %(default)s)")
    parser.add_argument("--backward", action="store_true", help="the kernels of training, too: forward and gradients")
    parser.add_argument(
        "--projection", metavar="LIST", help="the kernels that multiply by w_o, too, for so many heads, such as 4,8"
    )
    parser.add_argument(
        "--scaled", action="store_true", help="the first kernel with the scale in q or in k, too: exercises"
    )
    parser.add_argument(
        "--cuda", choices=["12", "13"], default="13", help="whose runtime is there (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    asked = list(_asked(args))
    reason = compiler.not_installed()
    if reason is not None:
        raise UserError(f"nothing can be compiled here: {reason}")
    Path(args.out).mkdir(mode=0o755, parents=True, exist_ok=True)
    check_writable("--out", args.out)
    files, spilling, runtime = Files(Path(args.out), most=None, guarded=False), 0, f"cu{args.cuda}"
    for i, (kernel, arch, about) in enumerate(asked, start=1):
        progress(f"compiling {i} of {len(asked)}: {about}")
        started = time.perf_counter()
        try:
            made = compiler.compile(kernel, arch)
            content = made.library(runtime)
        except compiler.CompileError as error:
            raise UserError(str(error)) from error
        files.add(kernel.name(arch, runtime), content)
        progress()
        spilling += made.resources.stack > 0
        print(f"{about}: {_resources(made.resources)}, {len(content) >> 10} KiB, {time.perf_counter() - started:.1f} s")
    print(f"kernels: {len(asked)}, in {args.out}; {library.FOLDER}={args.out} lets calls find them")
    untrusted = Files(Path(args.out)).untrusted()
    if untrusted is not None:
        print(f"calls will not load them as they are: {untrusted}")
    if spilling:
        print(f"{spilling} of them keep numbers in slow memory: registers have no room; smaller heads have")
    return 1 if spilling else 0


def _resources(taken: Resources) -> str:
    spilled = f", {taken.stack} bytes of slow memory" if taken.stack else ""
    return f"{taken.registers} registers{spilled}"


def _asked(args: argparse.Namespace) -> Iterator[_Asked]:
    variants = names("variants", several("variants", args.variants, "full,causal"), tuple(VARIANTS))
    dtypes = names("dtype", several("dtype", args.dtype, "float16,bfloat16"), support.DTYPES)
    dims = [whole("d", x, support.MOST_D) for x in several("d", args.d, "64,128")]
    capabilities = [_capability(x) for x in several("arch", args.arch, "sm_80,sm_90a")]
    heads = [whole("projection", x) for x in several("projection", args.projection, "4,8")] if args.projection else []
    seen: set[tuple[Wanted, str]] = set()
    for capability, variant, dtype, d in product(capabilities, variants, dtypes, dims):
        arch = architecture(capability)
        cell, rungs = (
            Cell(variant, 1024, 1024, d, dtype, heads=2, heads_k=2),
            (*LADDER, *(SCALED if args.scaled else ())),
        )
        for call in _calls(cell):
            for kernel in (*_kernels(call, rungs, capability, args.backward), *_projecting(call, heads, capability)):
                if (kernel, arch) not in seen:
                    seen.add((kernel, arch))
                    yield _Asked(kernel, arch, f"{variant}, {kernel}, {arch}")


def _calls(cell: Cell) -> Iterator[Call]:
    """One; of a variant that reads an array for each head also one of which all heads read the same."""
    dtype = BFLOAT16 if cell.dtype == "bfloat16" else np.dtype(cell.dtype)
    q, k, v = (np.zeros((1, cell.heads, cell.n_q, cell.d), dtype) for _ in range(3))
    variant, rng = VARIANTS[cell.variant], np.random.default_rng(0)
    yield validate.prepare(q, k, v, **variant.options(rng, cell, lambda x: x))
    if variant.dense_input:
        yield validate.prepare(q, k, v, **variant.options(rng, cell, lambda x: x[0]))


def _kernels(call: Call, rungs: Sequence[Rung], capability: tuple[int, int], backward: bool) -> Iterator[Wanted]:
    """Of each rung that takes such calls; backward: and those of training, of their gradients and before them."""
    yield from _of_rungs(call.spec, call.shape, rungs, capability)
    shape = replace(call.shape, backward=True)
    if backward and support.unsupported(call.spec, shape, None, capability) is None:
        trained = replace(call.spec, keeps_remainder=True)
        yield from (x for x in _of_rungs(trained, call.shape, rungs, capability) if x.remainder)
        yield kernel_of(backward_rung(call.spec, shape), call.spec, shape)


def _of_rungs(spec: Attention, shape: Shape, rungs: Sequence[Rung], capability: tuple[int, int]) -> Iterator[Wanted]:
    for rung in rungs:
        if support.unsupported(spec, shape, rung, capability) is None:
            yield kernel_of(rung, spec, shape)
            yield kernel_of(rung, spec, replace(shape, n_q=LONG, n_k=LONG))


def _projecting(call: Call, heads: Sequence[int], capability: tuple[int, int]) -> Iterator[Wanted]:
    """With the output projection of so many heads, if shared memory has room for all of them."""
    for count in heads:
        shape = replace(call.shape, heads=count, heads_k=count)
        if projected.unsupported(call.spec, shape, capability) is None:
            yield projected.kernel_for(call.spec, shape)


def _capability(arch: str) -> tuple[int, int]:
    found = re.fullmatch(r"sm_(\d+)(\d)a?", arch)
    if found is None or (int(found[1]), int(found[2])) < support.OLDEST:
        raise UserError(f"--arch: expected an architecture such as sm_90a, {architecture(support.OLDEST)} or newer, "
                        f"got {arch!r}")  # fmt: skip
    return int(found[1]), int(found[2])
