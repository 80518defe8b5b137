"""`tilewise doctor`: which kernel systems work here, and what the others need."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np

from tilewise import dispatch
from tilewise._version import __version__
from tilewise.bench.machine import import_torch
from tilewise.cli import served
from tilewise.explanation import size
from tilewise.kernels import disk, gpus
from tilewise.kernels.cute import library as cute


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="which kernel systems work here, and what the others need",
        description="Shows this machine, each kernel system (usable, or why not and what to install), the optional "
        "packages, and which kernels each GPU takes. Exit code 1 if no kernel system is usable.",
    )
    parser.add_argument(
        "--arch", metavar="ARCH", help="instead: which kernels a GPU such as sm_80 takes, if all are installed"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.arch is not None:
        print(served.table_of(*served.imagined(args.arch)))
        return 0
    print(f"tilewise {__version__}, Python {platform.python_version()}, NumPy {np.__version__}")
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors\n")
    print("kernel systems")
    import_torch()  # which is asked for GPUs
    reasons = {name: dispatch.kernel(name).unavailable() for name in dispatch.NAMES}
    for name, reason in reasons.items():
        _tell(name, reason)
    print("\ntaken only if named")
    for name in dispatch.ONLY_IF_NAMED:
        _tell(name, dispatch.kernel(name).unavailable())
    print("\noptional packages")
    for package, use in (
        ("torch", "PyTorch tensors and autograd; the first peer of the benchmarks"),
        ("matplotlib", "plots of the benchmarks"),
    ):
        print(f"  {_package(package, use)}")
    print(f"\n{_gpus()}")
    print("\n".join(_caches()))
    return 0 if None in reasons.values() else 1


def _tell(name: str, reason: str | None) -> None:
    mark, text = ("✓", dispatch.kernel(name).summary) if reason is None else ("✗", reason)
    if name == "cpu" and reason is None:
        text += f"\n{_engine()}"
    text = text.replace("\n", "\n" + " " * 15)
    print(f"  {mark} {name:10} {text}")


def _engine() -> str:
    """The native engine's instruction-set path, what it could take instead, and its threads."""
    from tilewise.kernels.cpu import library

    others = [name for name in library.isas() if name != library.isa()]
    choice = f" (TILEWISE_CPU_ISA can name {', '.join(others)})" if others else ""
    return f"instructions: {library.isa()}{choice}; threads: {library.get_num_threads()}"


def _package(package: str, use: str) -> str:
    if find_spec(package) is None:
        return f"✗ {package:10} {use}: pip install {package}"
    try:
        return f"✓ {package:10} {version(package)}: {use}"
    except PackageNotFoundError:
        return f"✓ {package:10} {use}"


def _gpus() -> str:
    """What PyTorch sees; without PyTorch nothing is asked."""
    torch = import_torch()
    if torch is None:
        return "GPU: not looked for (PyTorch is not installed, or cannot be imported)"
    if not torch.cuda.is_available():
        return "GPU: none that PyTorch can use; `tilewise doctor --arch sm_80` tells what one would take"
    devices = (f"cuda:{i}" for i in range(torch.cuda.device_count()))
    return "\n\n".join(
        served.table_of(x, f"GPU {x}, {torch.cuda.get_device_name(x)} ({gpus.architecture(x)})") for x in devices
    )


def _caches() -> Iterator[str]:
    """Where compiled kernels are kept and found, and what is the matter with it."""
    yield f"cache: {_cache(disk.user_cache('.'))}"
    ahead = cute.built_ahead()
    if ahead is not None:
        yield f"kernels built ahead ({cute.FOLDER}): {_cache(ahead)}"


def _cache(files: disk.Files) -> str:
    below = disk.folders_below(files)
    untrusted = next(filter(None, (folder.untrusted() for folder in below)), None)
    if untrusted is not None:
        return f"{files} is not used: {untrusted}"
    sizes = [bytes_of for folder in below for bytes_of in folder.sizes()]
    told = f"{files}: {len(sizes)} files, {size(sum(sizes))}"
    unusable = files.unusable()
    return told if unusable is None else f"{told}; nothing more is kept there: {unusable}"
