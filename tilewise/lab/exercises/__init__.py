"""The exercises of `tilewise lab`, in the order in which to do them, a file each. The sources that they are cut out of
are their solutions."""

from __future__ import annotations

from importlib import import_module

from tilewise.lab.exercises.exercise import Exercise

NAMES = ("online_softmax", "tiled_attention", "causal_skipping", "triton_kernel", "cuda_kernel", "cuda_tiles")


def exercise(name: str) -> Exercise:
    found: Exercise = import_module(f"tilewise.lab.exercises.{name}").EXERCISE
    return found


def skeleton(name: str) -> str:
    """What the learner gets."""
    return exercise(name).skeleton(NAMES.index(name) + 1, len(NAMES))


def solved(name: str) -> str:
    """The same with the project's own lines in their places."""
    return exercise(name).solved(NAMES.index(name) + 1, len(NAMES))
