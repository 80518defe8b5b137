"""What the interpreter runs, Triton must also compile: for GPUs that need not be there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tilewise.kernels.triton import source

KERNELS = {
    "basic", "forward", "d_query", "d_keys", "of_rows", "of_columns", "of_pairs", "of_distances", "of_cells",
    "decode", "merge", "append", "project", "gather", "turn", "look", "join",
    "segment_states", "scan", "outputs", "plain_outputs", "map_rows", "z_rows", "weigh_rows", "pull_rows",
    "linear_d_query", "d_segment_states", "linear_d_keys", "d_values",
}  # fmt: skip
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx1100")
DECODING = ("sm_75",)

# Each of the slow ones compiles some two hundred kernels, in minutes. gfx90a stands for AMD's: it has no TF32.
CALLS = [("sm_90",), ("gfx90a",), *(pytest.param((name, "all"), marks=pytest.mark.slow) for name in ARCHITECTURES)]


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def _compiled(*call: str) -> set[str]:
    """The names of the kernels, from a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton.compiling", *call], cwd=Path(__file__).parents[2], env=environment,
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return set(done.stdout.split())


@needs_triton
@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_every_kernel_compiles(call: tuple[str, ...]) -> None:
    assert _compiled(*call) == KERNELS


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("arch", DECODING)
def test_decoding_compiles(arch: str) -> None:
    """On Turing `auto` takes Triton for this alone. Not all of its kernels have room there."""
    assert _compiled(arch, "decode") >= {"decode", "merge"}


def test_every_kernel_is_among_them() -> None:
    """A launch names its kernel; a new one must be compiled here too."""
    texts = "".join(path.read_text() for path in Path(source.__file__).parents[1].glob("launch*.py"))
    assert set(re.findall(r"(\w+)\[grid\]\(", texts)) - {"kernel"} <= KERNELS
