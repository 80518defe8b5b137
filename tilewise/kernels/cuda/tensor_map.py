"""How the copy engine (TMA) sees an array: sizes, steps, the box that one copy moves, and how it is swizzled."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_SWIZZLES = (0, 32, 64, 128)


@dataclass(frozen=True)
class TensorMap:
    """Dimensions come innermost first; `steps` are bytes from one index to the next, of all but the innermost."""

    address: int
    dtype: str
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128

    def __post_init__(self) -> None:
        item = _ITEM_BYTES.get(self.dtype)
        if item is None:
            raise ValueError(f"dtype: expected one of {', '.join(_ITEM_BYTES)}, got {self.dtype!r}")
        rank = len(self.sizes)
        if not 1 <= rank <= 5 or len(self.box) != rank or len(self.steps) != rank - 1:
            raise ValueError(
                f"sizes, steps, box: expected 1 to 5 sizes, as many of box and one step less, got {rank}, "
                f"{len(self.box)} and {len(self.steps)}"
            )
        if self.address % 16:
            raise ValueError(f"address: expected a multiple of 16 bytes, got {self.address:#x}")
        for step in self.steps:
            if step % 16 or not 0 < step < 2**40:
                raise ValueError(f"steps: expected multiples of 16 bytes below 2^40, got {step}")
        for size in self.box:
            if not 1 <= size <= 256:
                raise ValueError(f"box: expected 1 to 256 a dimension, got {size}")
        for size in self.sizes:
            if not 1 <= size <= 2**32:
                raise ValueError(f"sizes: expected 1 to 2^32 a dimension, got {size}")
        if self.swizzle not in _SWIZZLES:
            raise ValueError(f"swizzle: expected one of {_SWIZZLES} bytes, got {self.swizzle}")
        if self.box[0] * item % 16 or (self.swizzle and self.box[0] * item > self.swizzle):
            raise ValueError(
                f"box: its innermost dimension has {self.box[0] * item} bytes; expected a multiple of 16, "
                f"and at most the {self.swizzle} bytes of the swizzle"
            )

    @property
    def box_bytes(self) -> int:
        """What one copy moves, and what a barrier must expect."""
        total = _ITEM_BYTES[self.dtype]
        for size in self.box:
            total *= size
        return total

    def simulated(self) -> SimulatedMap:
        """For the simulator."""
        made = SimulatedMap(self.address, len(self.sizes), _ITEM_BYTES[self.dtype], self.swizzle)
        made.size[: len(self.sizes)] = self.sizes
        made.step[: len(self.steps)] = self.steps
        made.box[: len(self.box)] = self.box
        return made

    def encoded(self) -> bytes:
        """For a GPU, by its driver."""
        from cuda.bindings import driver

        types = driver.CUtensorMapDataType
        swizzles = driver.CUtensorMapSwizzle
        rank = len(self.sizes)
        error, made = driver.cuTensorMapEncodeTiled(
            {
                "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                "float32": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            }[self.dtype],
            rank,
            self.address,
            [driver.cuuint64_t(x) for x in self.sizes],
            [driver.cuuint64_t(x) for x in self.steps],
            [driver.cuuint32_t(x) for x in self.box],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            {
                0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
                32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
                64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
                128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
            }[self.swizzle],
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver refuses the tensor map {self}: {error.name}")
        return ctypes.string_at(made.getPtr(), 128)


class SimulatedMap(ctypes.Structure):
    """As in simulator/hopper.cpp; it has the size and the alignment of the driver's."""

    _fields_ = [
        ("address", ctypes.c_uint64), ("rank", ctypes.c_int32), ("item", ctypes.c_int32), ("swizzle", ctypes.c_int32),
        ("box", ctypes.c_int32 * 5), ("size", ctypes.c_int64 * 5), ("step", ctypes.c_int64 * 5),
        ("reserved", ctypes.c_int64),
    ]  # fmt: skip
