"""Hopper's kernels as racecheck understands them: every lane of a warp frees a place for itself.

In the kernels the lanes of a warp meet, and then one of them arrives at the barrier. racecheck does not see that what
the others read or wrote came before (tests/cuda/sanitizer_limits.cu shows it in twenty lines), and reports who fills
the place again. Kernels have the same names as without it, so they are for a folder of their own:

TILEWISE_EVERY_LANE=1 python -m tests.cute.prebuild FOLDER --arch sm_90a

The kernels that compute scores twice are not among them: theirs are CuTe's own pipelines.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.edits import edited

EDITS = {
    "rings.py": [
        ("    return made, fillers, readers\n", "    return made, fillers, 32 * readers\n"),
        ("    with cute.arch.elect_one():\n        cute.arch.mbarrier_arrive(ring.barriers.free + stage)\n",
         "    cute.arch.mbarrier_arrive(ring.barriers.free + stage)\n"),
    ],
    "hopper.py": [
        ("    if first_lane():\n        cute.arch.mbarrier_arrive(barrier)\n",
         "    cute.arch.mbarrier_arrive(barrier)\n"),
    ],
    "backward_sm90_producer.py": [
        ("CONSUMER_WARPS = 8\n", "CONSUMER_WARPS = 8 * 32\n"),
        ("CONSUMER_WARPS + 1)  # and the storer", "CONSUMER_WARPS + 32)  # and the storer"),
        ("barriers + ITEM_FREE + stage, STAGES)", "barriers + ITEM_FREE + stage, 32 * STAGES)"),
        ("barriers + ITEM_FULL + stage, 1)", "barriers + ITEM_FULL + stage, 32)"),
        ("Item(number, b, hk, visits))\n            cute", "Item(number, b, hk, visits))\n        cute"),
        ("Item(Int32(-1), Int32(0), Int32(0), Int32(0)))\n        cute",
         "Item(Int32(-1), Int32(0), Int32(0), Int32(0)))\n    cute"),
        ("    if first_lane():\n        cute.arch.mbarrier_arrive(barriers + Q_FREE + number)\n",
         "    cute.arch.mbarrier_arrive(barriers + Q_FREE + number)\n    if first_lane():\n"),
    ],
}  # fmt: skip


def is_wanted() -> bool:
    return os.environ.get("TILEWISE_EVERY_LANE") == "1"


@contextmanager
def installed() -> Iterator[None]:
    """For all that is compiled meanwhile, if it is wanted; nothing may have been compiled before."""
    from tilewise.kernels.cute import source

    if not is_wanted():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        for path in Path(source.__path__[0]).glob("*.py"):
            Path(folder, path.name).write_text(edited(EDITS, path.name, path.read_text()))
        source.__path__ = [folder]
        yield
