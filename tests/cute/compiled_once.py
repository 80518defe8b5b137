"""python -m tests.cute.compiled_once: asks for a small kernel; tells how often the compiler ran, and what was loaded.

A process of its own: what another has loaded is not looked for on disk.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tilewise.kernels.cute import compiler, library
from tilewise.kernels.cute.rungs import BASIC
from tilewise.kernels.cute.wanted import kernel_of
from tilewise.spec import Attention, Shape


def main() -> None:
    compiled: list[str] = []
    loaded: list[str] = []
    compile, load = compiler.compile, library.load

    def counted(kernel: Any, arch: str) -> Any:
        compiled.append(arch)
        return compile(kernel, arch)

    def told(path: Path) -> Any:
        loaded.append(path.name)
        return load(path)

    compiler.compile, library.load = counted, told
    launch = library.kernel(kernel_of(BASIC, Attention(0.1), Shape(1, 1, 1, 9, 9, 16, 16, "float16")), "sm_90a")
    assert callable(launch)
    sys.stdout.write(json.dumps({"compiled": len(compiled), "loaded": loaded}))


if __name__ == "__main__":
    main()
