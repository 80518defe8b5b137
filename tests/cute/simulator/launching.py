"""Calls of the forward kernel whose launches are simulated: libraries as they were built, on arrays of the host.

For a process of its own: what it loads stands for CUDA in all of it.
"""

from __future__ import annotations

import ctypes
import os
import random
from pathlib import Path
from typing import Any

import torch

from tests.cute.launched import moved
from tests.cute.simulator.instructions import steps
from tests.cute.simulator.machine import Grid
from tests.cute.simulator.memory import Memory
from tests.cute.simulator.parse import parse
from tilewise.kernels.cute import launch, library, ordering
from tilewise.kernels.cute.rungs import RUNGS
from tilewise.kernels.cute.wanted import Wanted
from tilewise.spec import Partial
from tilewise.validate import Call

_PARAMETER = 64  # bytes that a parameter begins at multiples of, as `symbols` has them
_Tell = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class Simulator:
    """kernels: a folder of libraries, each with its PTX beside it. blocks: as many as run at once."""

    def __init__(self, stand_in: str, kernels: Path) -> None:
        self.kernels, self.blocks, self.chance = kernels, 3, random.Random(0)
        self.count = torch.zeros(1, dtype=torch.int32)
        self.name, self.arrays, self.error = "", [(0, 0)], None
        cuda = ctypes.CDLL(stand_in, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOW)
        self._kept = _Tell(self._told)
        cuda.tell(self._kept)
        os.environ[library.FOLDER] = str(kernels)
        self._found = library.kernel
        library.kernel = self._kernel  # type: ignore[assignment]
        ordering._multiprocessors = lambda device: self.blocks  # type: ignore[assignment]
        ordering._count_on = lambda device: self.count

    def forward(self, call: Call) -> Partial:
        result = launch.forward(RUNGS["forward_sm90"], call.spec, call.q, call.k, call.v, "sm_90a")
        assert int(self.count) == 0, "the count of items is left as it was"
        return result

    def _kernel(self, wanted: Wanted, arch: str) -> Any:
        function = self._found(wanted, arch)

        def call(*given: Any) -> None:
            self.name, self.arrays, self.error = wanted.name(arch, library.runtime()), _extents(given), None
            function(*map(moved, given))
            if self.error is not None:
                raise self.error

        return call

    def _told(self, launch: int, arguments: int) -> None:
        """Called from C, which no exception passes through."""
        try:
            self._run(*(ctypes.c_uint * 2).from_address(launch), arguments)
        except Exception as error:
            self.error = error

    def _run(self, blocks: int, rows: int, arguments: int) -> None:
        program = parse((self.kernels / f"{self.name}.ptx").read_text())
        addresses = (ctypes.c_void_p * len(program.parameters)).from_address(arguments)
        given = zip(addresses, program.parameters.values(), strict=True)
        parameters = b"".join(
            ctypes.string_at(at, size).ljust(-(-size // _PARAMETER) * _PARAMETER, b"\0") for at, size in given
        )
        Grid(steps(program), program.threads, blocks, Memory(self.arrays, parameters), self.chance, rows).run()


def _extents(given: Any) -> list[tuple[int, int]]:
    """Where tensors lie, from their first byte up to their last."""
    if isinstance(given, tuple):
        return [extent for x in given for extent in _extents(x)]
    if not isinstance(given, torch.Tensor):
        return []
    last = sum((n - 1) * step for n, step in zip(given.shape, given.stride(), strict=True))
    return [(given.data_ptr(), given.data_ptr() + (last + 1) * given.element_size())]
