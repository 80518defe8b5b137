"""Hopper's backward kernels as racecheck understands them: every lane of a warp lets a place go for itself, and tells
for itself that it is filled.

In the kernel the lanes of a warp meet, and then one of them arrives at the barrier. racecheck does not see that what
the others read or wrote came before (sanitizer_limits.cu shows it in twenty lines), and reports who fills the place
again. With TILEWISE_EVERY_LANE=1 the tests run this version, which differs in nothing else.
"""

from __future__ import annotations

from pathlib import Path

from tests.edits import edited
from tilewise.kernels.cuda import source

EDITS = {
    "sm90_backward.h": [
        ("CONSUMER_WARPS = WARPGROUPS * 4;", "CONSUMER_WARPS = WARPGROUPS * 128;"),
        *[(f"mbarrier_init({name}, 1)", f"mbarrier_init({name}, 32)") for name in (
            "v_full()", "k_full()", "q_full(stage)", "d_out_full(stage)"
        )],
    ],
    "sm90_backward_consumer.h": [("if (lane == 0) hw::mbarrier_arrive(bar);", "hw::mbarrier_arrive(bar);")],
    "sm90_backward_producer.h": [
        ("if (!clears) return;", "if (!clears && lane != 0) hw::mbarrier_arrive(full);\n        if (!clears) return;"),
        ("if (lane == 0) hw::mbarrier_arrive(full);", "hw::mbarrier_arrive(full);"),
    ],
    "arrays_sm90.cu": [
        ("if (lane == 0) hw::mbarrier_arrive(bar);", "hw::mbarrier_arrive(bar);"),
        *[(f"mbarrier_init({name}, CONSUMER_WARPS)", f"mbarrier_init({name}, CONSUMERS)") for name in (
            "free(stage)", "table_free()"
        )],
    ],
}  # fmt: skip


def install() -> None:
    """For all that is compiled from now on."""
    read = source._read

    def read_edited(folder: Path, name: str) -> str:
        return edited(EDITS, name, read(folder, name))

    source._read = read_edited
