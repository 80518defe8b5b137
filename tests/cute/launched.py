"""python -m tests.cute.launched STAND_IN KERNELS: what the forward pass launches, where a library stands for CUDA.

A process of its own: what it loads would stand for CUDA in all of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

CUDA = 2  # a device, as DLPack numbers them
SHAPES = {"short": (2, 4, 300, 128), "long": (1, 2, 4096, 64)}


class OnGpu:
    """An array of the host that says it is on a GPU. A DLTensor has its address, then its device."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.x.__dlpack__()
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(address(capsule, b"dltensor") + 8).value = CUDA
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0


def moved(x: Any) -> Any:
    import torch
    import tvm_ffi

    if isinstance(x, tuple):
        return tuple(map(moved, x))
    return tvm_ffi.from_dlpack(OnGpu(x)) if isinstance(x, torch.Tensor) else x


def main(stand_in: str, kernels: str) -> None:
    ctypes.CDLL(stand_in, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOW)
    import torch

    from tilewise.kernels.cute import launch, library, ordering
    from tilewise.kernels.cute.rungs import RUNGS
    from tilewise.spec import Attention

    os.environ[library.FOLDER] = kernels
    found = library.kernel

    def kernel(wanted: Any, arch: str) -> Any:
        function = found(wanted, arch)
        return lambda *given: function(*map(moved, given))

    library.kernel = kernel
    ordering._multiprocessors = lambda device: 132
    ordering._count_on = lambda device: torch.zeros(1, dtype=torch.int32)
    for shape in SHAPES.values():
        q, k, v = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(3))
        sys.stdout.write(f"{json.dumps([x.data_ptr() for x in (q, k, v)])}\n")
        sys.stdout.flush()
        launch.forward(RUNGS["forward_sm90"], Attention(0.1), q, k, v, "sm_90a")


if __name__ == "__main__":
    main(*sys.argv[1:])
