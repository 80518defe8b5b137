"""A learner's CUDA source in the place of a kernel of the ladder, on the simulator."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tilewise.kernels.cuda.rungs import named
from tilewise.kernels.cuda.simulator import CompileError, Order, SimulationError
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel
from tilewise.lab.exercises.judging import WrongError
from tilewise.lab.exercises.problem import Problem
from tilewise.spec import Partial, Tile


def checked(path: Path, rung: str, problems: Iterable[Problem], tile: Tile) -> Iterator[str]:
    """In several orders of threads: a sound kernel does not care."""
    given = copy.copy(named(rung))
    given.name, given.folder = path.stem, path.parent
    for problem in problems:
        for order in Order:
            kernel = CudaSimKernel(rung, order)
            kernel.rung = given
            done = _forward(kernel, problem, tile)
            problem.check(done.out, done.lse)
        yield problem.about


def _forward(kernel: CudaSimKernel, problem: Problem, tile: Tile) -> Partial:
    call = problem.call()
    try:
        return kernel.forward(call.spec, call.q, call.k, call.v, tile)
    except SimulationError as report:
        raise WrongError(f"{problem.about}: the simulator stopped it:\n{report}") from None
    except CompileError as error:
        raise WrongError(f"it does not compile:\n{_errors(str(error))}") from None


def _errors(told: str) -> str:
    """The compiler's first errors, without what it says of the text around them."""
    lines = [line for line in told.splitlines() if re.search(r"\berror\b", line)]
    return "\n".join(lines[:5]) or told
