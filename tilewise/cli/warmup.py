"""`tilewise warmup`: the CUDA kernels of given calls compiled now, so that no call waits for a compiler."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tilewise import validate
from tilewise.arrays import BFLOAT16
from tilewise.bench.machine import import_torch
from tilewise.bench.problem import VARIANTS, Cell
from tilewise.choosing import Purpose, order
from tilewise.cli import UserError
from tilewise.cli.bench_options import names, several, whole
from tilewise.cli.terminal import progress
from tilewise.kernels import disk
from tilewise.kernels.cuda import OLDEST, compiler, support
from tilewise.kernels.cuda.choice import HOPPER, gradient_sources_of, sources_of
from tilewise.kernels.cuda.source import Source

_EXAMPLES = """examples:
  tilewise warmup                                   full and causal, head dimension 128, bfloat16
  tilewise warmup --variants causal,alibi --d 64,128 --dtype float16,bfloat16
  tilewise warmup --backward                        and what training takes
  tilewise warmup --d 192 --d-v 128 --arch sm_90a   on a machine without a GPU

The variants are those of `tilewise bench`. Window sizes, scales, batches and heads make no difference to a kernel, and
lengths only a little: --n has one that is short and one that is long."""


class _Wanted(NamedTuple):
    """A kernel, and the first call that wants it."""

    source: Source
    arch: str
    dtype: str
    about: str


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "warmup",
        help="compile the CUDA kernels of given calls now",
        description="Compiles the CUDA kernels that calls of these kinds take, and keeps them in the cache folder "
        "(TILEWISE_CACHE, or the user's own). Calls then find them there.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--variants", default="full,causal", metavar="LIST", help="(default: %(default)s)")
    parser.add_argument("--d", default="128", metavar="LIST", help="head dimensions (default: %(default)s)")
    parser.add_argument("--d-v", metavar="D", help="the head dimension of v, if not --d")
    parser.add_argument("--dtype", default="bfloat16", metavar="LIST", help="(default: %(default)s)")
    parser.add_argument("--n", default="1024,4096", metavar="LIST", help="lengths (default: %(default)s)")
    parser.add_argument("--backward", action="store_true", help="the kernels of training, too")
    parser.add_argument(
        "--arch", metavar="LIST", help="such as sm_90a (default: this machine's GPUs, or sm_90a if it has none)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    wanted = list(_wanted(args))
    for arch, dtype in dict.fromkeys((x.arch, x.dtype) for x in wanted):
        first = order(arch.removesuffix("a"), dtype, Purpose.FORWARD)[0]
        if not first.startswith("cuda"):
            print(f"{arch}, {dtype}: auto takes {first}, which compiles when first called; these are for kernel='cuda'")
    missing = [x for x in wanted if compiler.prebuilt(x.source, x.arch) is None]
    reason = compiler.without_nvrtc() if missing else None
    if reason is not None:
        raise UserError(f"kernels to compile: {len(missing)} of {len(wanted)}, but {reason}")
    compiled = 0
    for i, (source, arch, _, about) in enumerate(missing, start=1):
        if compiler.kept(source, arch) is not None:
            continue
        progress(f"compiling {i} of {len(missing)}: {about}")
        started = time.perf_counter()
        try:
            compiler.machine_code(source, arch)
        except compiler.CompileError as error:
            raise UserError(str(error)) from error
        progress()
        if compiler.kept(source, arch) is None:
            raise UserError(f"the compiled kernel is not kept: {_why_not_kept()}")
        print(f"{about}: {source.rung}, {time.perf_counter() - started:.1f} s")
        compiled += 1
    shipped = len(wanted) - len(missing)
    print(f"kernels that are ready: {len(wanted)} ({compiled} compiled now, {shipped} shipped with Tilewise)")
    return 0


def _why_not_kept() -> str:
    files = disk.user_cache("cuda")
    return files.unusable() or f"{files} cannot be written; free some room, or set TILEWISE_CACHE to another folder"


def _wanted(args: argparse.Namespace) -> Iterator[_Wanted]:
    variants = names("variants", several("variants", args.variants, "full,causal"), tuple(VARIANTS))
    dtypes = names("dtype", several("dtype", args.dtype, "float16,bfloat16"), support.DTYPES)
    dims = [whole("d", x, validate.MAX_HEAD_DIM) for x in several("d", args.d, "64,128")]
    lengths = [whole("n", x) for x in several("n", args.n, "1024,4096")]
    d_v = None if args.d_v is None else whole("d-v", args.d_v, validate.MAX_HEAD_DIM)
    seen: set[tuple[str, str]] = set()
    for capability, variant, dtype, d, n in product(_capabilities(args.arch), variants, dtypes, dims, lengths):
        arch = compiler.architecture(capability)
        cell = Cell(variant, n, n, d, dtype, heads=1, heads_k=1)
        for source in _sources(cell, d_v or d, capability, args.backward):
            if (source.text, arch) not in seen:
                seen.add((source.text, arch))
                yield _Wanted(source, arch, dtype, f"{variant}, {dtype}, d {d}, n {n}, {arch}")


def _sources(cell: Cell, d_v: int, capability: tuple[int, int], backward: bool) -> list[Source]:
    dtype = BFLOAT16 if cell.dtype == "bfloat16" else np.dtype(cell.dtype)
    q, k, v = (np.zeros((1, cell.heads, cell.n_q, d), dtype) for d in (cell.d, cell.d, d_v))
    options = VARIANTS[cell.variant].options(np.random.default_rng(0), cell, lambda x: x)
    call = validate.prepare(q, k, v, **options)
    forward = sources_of(call.spec, call.shape, capability)
    if not backward:
        return forward
    training = replace(call.spec, keeps_remainder=True)  # whose forward pass has a kernel of its own
    return [
        *forward,
        *sources_of(training, call.shape, capability),
        *gradient_sources_of(call.spec, call.shape, capability),
    ]


def _capabilities(given: str | None) -> list[tuple[int, int]]:
    """Those of the architectures that were named, or of this machine's GPUs."""
    if given is not None:
        return list(dict.fromkeys(_capability(x) for x in several("arch", given, "sm_80,sm_90a")))
    torch = import_torch()
    if torch is None or not torch.cuda.is_available():
        print(f"no GPU here: compiling for {compiler.architecture(HOPPER)} (--arch names others)")
        return [HOPPER]
    return sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})


def _capability(arch: str) -> tuple[int, int]:
    found = re.fullmatch(r"sm_(\d+)(\d)a?", arch)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        oldest = compiler.architecture(OLDEST)
        raise UserError(f"--arch: expected an architecture such as sm_90a, {oldest} or newer, got {arch!r}")
    return int(found[1]), int(found[2])
