"""What a user imports: NumPy alone is enough, nothing optional is imported, every public name explains itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

import tilewise as tw

ROOT = Path(__file__).parent.parent
OPTIONAL = ("torch", "triton", "cuda", "cutlass", "tilelang", "matplotlib", "ml_dtypes", "transformers")


def test_importing_tilewise_imports_numpy_alone() -> None:
    script = f"""
import sys, tilewise
import tilewise.cli.demo, tilewise.cli.doctor, tilewise.cli.plan, tilewise.cli.bench, tilewise.cli.tune, tilewise.lab
import tilewise.lab.exercises
[tilewise.lab.exercises.skeleton(name) for name in tilewise.lab.exercises.NAMES]
import tilewise.integrations
import numpy as np
tilewise.attention(np.ones((3, 2)), np.ones((3, 2)), np.ones((3, 2)), causal=True)
print([name for name in {OPTIONAL!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_numpy_is_the_only_dependency() -> None:
    about = metadata("tilewise")
    required = [line for line in about.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert len(required) == 1
    assert required[0].startswith("numpy")
    extras = {"torch", "cuda", "triton", "cute", "tilelang", "transformers", "bench", "test"}
    assert extras <= set(about.get_all("Provides-Extra") or [])


@pytest.mark.parametrize("name", [n for n in tw.__all__ if callable(getattr(tw, n)) and n != "Expr"])
def test_public_names_explain_themselves(name: str) -> None:
    if name not in ("exp", "log", "tanh", "minimum", "maximum"):
        assert getattr(tw, name).__doc__


def test_kernel_systems_never_import_each_other() -> None:
    """What they share has files beside their folders."""
    systems = {path.name: path for path in (ROOT / "tilewise" / "kernels").iterdir() if path.is_dir()}
    for name, folder in systems.items():
        for path in folder.glob("**/*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tilewise.kernels."):
                    imported = node.module.split(".")[2]  # type: ignore[union-attr]
                    assert imported not in systems or imported == name, f"{path} imports {node.module}"


def test_modules_are_attributes_before_they_are_imported() -> None:
    """`import tilewise as tw` is enough for tw.lab; it imports none of them, nor PyTorch."""
    script = """
import sys
import tilewise as tw
names = ("integrations", "lab", "nn", "parallel")
assert not [name for name in names if f"tilewise.{name}" in sys.modules], "importing is lazy"
assert set(names) <= set(dir(tw)) and "attention" in dir(tw)
assert tw.lab.count_blocks(4, 4, 2, 2, causal=False) == 4
assert tw.integrations.__doc__
assert "torch" not in sys.modules
assert tw.nn.MultiHeadAttention and tw.parallel.shard
assert not hasattr(tw, "parallels")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_a_module_that_needs_pytorch_says_so_where_there_is_none() -> None:
    script = """
import inspect, sys
sys.modules["torch"] = None
import tilewise as tw
assert not hasattr(tw, "nn")
inspect.getmembers(tw)
tw.parallel
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.endswith(
        "AttributeError: tilewise.parallel cannot be imported: it needs PyTorch: pip install torch\n"
    )
