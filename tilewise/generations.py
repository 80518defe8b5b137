"""Generations of GPUs, by the shared memory that a block of threads may take, and the tiles that there is room for.

A forward kernel keeps its queries' tile, and tiles of keys and values come by, several pairs at a time (stages): one is
computed with while the next are loaded. Scores, weights and sums are in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.schedule import itemsize
from tilewise.spec import Shape, Tile

_SYSTEM = 1 << 10  # bytes that each block takes on top, for the system


@dataclass(frozen=True)
class Generation:
    """block, processor: bytes that a block may take, and that a processor has for all of its blocks."""

    arch: str
    name: str
    gpus: str
    block: int
    processor: int

    def stages(self, tile: Tile, shape: Shape) -> int:
        """Pairs of tiles of k and v that there is room for beside that of q."""
        q, pair = tile_bytes(tile, shape)
        return max(self.block - q, 0) // pair

    def blocks(self, taken: int) -> int:
        """That a processor has room for, if each takes so many bytes. Threads and registers may leave fewer."""
        return self.processor // (taken + _SYSTEM)


def _generation(arch: str, name: str, gpus: str, block: int, processor: int) -> Generation:
    return Generation(arch, name, gpus, block << 10, processor << 10)


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", in KiB.
GENERATIONS = {
    generation.arch: generation
    for generation in (
        _generation("sm_70", "Volta", "V100", 96, 96),
        _generation("sm_75", "Turing", "T4, RTX 2080", 64, 64),
        _generation("sm_80", "Ampere", "A100", 163, 164),
        _generation("sm_86", "Ampere", "A10, RTX 3090", 99, 100),
        _generation("sm_87", "Ampere", "Orin", 163, 164),
        _generation("sm_89", "Ada", "L40, RTX 4090", 99, 100),
        _generation("sm_90", "Hopper", "H100, H200", 227, 228),
        _generation("sm_100", "Blackwell", "B200", 227, 228),
        _generation("sm_103", "Blackwell", "B300", 227, 228),
        _generation("sm_120", "Blackwell", "RTX 5090", 99, 100),
        _generation("sm_121", "Blackwell", "DGX Spark", 99, 100),
    )
}

AMD = {"gfx90a": "CDNA 2 (MI250)", "gfx942": "CDNA 3 (MI300X)", "gfx1100": "RDNA 3 (RX 7900)"}  # for Triton alone


def tile_bytes(tile: Tile, shape: Shape) -> tuple[int, int]:
    """Of the tile of q, and of a pair of k and v."""
    size = itemsize(shape.dtype)
    return tile.q * shape.d * size, tile.k * (shape.d + shape.d_v) * size
