"""Runs pytest on the native library under a sanitizer: python tests/sanitize.py address,undefined PYTEST-ARGUMENTS

The library is built in a folder of its own. The interpreter is not instrumented, so the sanitizer's runtime is loaded
before all else. The exit code is not 0 if a test fails, the sanitizer reports anything, or the library is not used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tilewise.kernels.cpu.engine import build

ROOT = Path(__file__).resolve().parent.parent
RUNTIMES = {"address,undefined": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    # The interpreter keeps memory until it ends; and a program may ask for more than there is, and expect to be told.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": f"suppressions={ROOT / 'tests' / 'tsan.supp'}:allocator_may_return_null=1:die_after_fork=0",
}
THREADS = {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1"}  # ours must meet, whatever the machine has

# PyTorch has threads and memory that sanitizers do not understand. A run in which every test is skipped shows nothing.
PYTEST = """
import os, pathlib, sys
sys.modules["torch"] = None
import pytest
from tilewise.kernels.cpu import library
sys.exit(library.unavailable()) if library.unavailable() else library.isa()
if os.environ["TILEWISE_LIBRARY"] not in pathlib.Path("/proc/self/maps").read_text():
    sys.exit("the library that TILEWISE_LIBRARY names was not loaded")
sys.exit(pytest.main(["--capture=sys", *sys.argv[1:]]))  # reports are written past Python, and must be seen
"""


def runtime(name: str) -> str:
    """The path of one of the compiler's libraries, as LD_PRELOAD needs it."""
    compiler = build.find_compiler()
    told = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = told.stdout.strip()
    if not Path(path).is_absolute():
        raise build.BuildError(f"{compiler[0]} has no {name}: set CXX=g++ (Fedora also: dnf install libasan libtsan)")
    return path


def sanitized(sanitize: str, library: Path) -> tuple[list[str], dict[str, str]]:
    """What comes before a command, and its environment, so that it can load the library."""
    # libstdc++ too: AddressSanitizer looks for __cxa_throw when it starts, and Python alone does not have it.
    preload = f"{runtime(RUNTIMES[sanitize])} {runtime('libstdc++.so.6')}"
    environment = os.environ | OPTIONS | THREADS | {
        "LD_PRELOAD": preload, "TILEWISE_LIBRARY": str(library), "TILEWISE_SANITIZER": sanitize,
    }  # fmt: skip
    return _without_random_addresses(), environment


def _without_random_addresses() -> list[str]:
    """ThreadSanitizer needs memory where it expects it, and some kernels spread addresses too far."""
    prefix = ["setarch", "-R"]
    if shutil.which("setarch") is None:
        return []
    return prefix if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0 else []


def main(sanitize: str, *arguments: str) -> int:
    objects = build.BUILD / f"engine-{sanitize.replace(',', '-')}"
    library = build.link(build.compile_objects(objects=objects, sanitize=sanitize), objects=objects, sanitize=sanitize)
    prefix, environment = sanitized(sanitize, library)
    command = [*prefix, sys.executable, "-c", PYTEST, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in RUNTIMES:
        sys.exit(f"usage: python tests/sanitize.py {' | '.join(RUNTIMES)} PYTEST-ARGUMENTS")
    try:
        sys.exit(main(*sys.argv[1:]))
    except build.BuildError as failure:
        sys.exit(str(failure))
