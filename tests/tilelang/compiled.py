"""Whether TileLang's kernels can be had where tests run on a GPU."""

from __future__ import annotations

from tilewise.kernels.tilelang import compiler, library


def missing() -> str | None:
    """Why there are none: no compiler, and none that was compiled before."""
    return None if library.any_is_kept("", "sm_90a") else compiler.not_installed("sm_90a")
