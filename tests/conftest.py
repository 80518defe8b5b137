"""What all tests share: kernels that tests compile are kept in the build folder, not in the user's own cache; they may
be compiled as racecheck understands them; and those that Triton interprets take less of its time."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("TILEWISE_CACHE", str(Path(__file__).parent.parent / "build" / "cache"))

if os.environ.get("TILEWISE_EVERY_LANE") == "1":
    from tests.cuda import every_lane

    every_lane.install()

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    from tests.triton import quick_interpreter

    quick_interpreter.install()


@pytest.fixture(autouse=True)
def _no_gpu_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fake one said of itself is forgotten."""
    from tilewise import dispatch

    monkeypatch.setattr(dispatch, "_architectures", {})
