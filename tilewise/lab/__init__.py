"""The teaching interface: tiled attention in a few plain loops, and what it saves, counted and measured.

Everything here is NumPy on (..., n, d) arrays of float16, float32 or float64. The page to read with it is docs/lab.md;
`tilewise lab` has the exercises.
"""

from tilewise.lab.attention import TiledAttention, online_softmax, sram_needed, standard_attention
from tilewise.lab.blocks import Blocks, count_blocks
from tilewise.lab.loops import update_block
from tilewise.lab.memory import MemoryReport, verify_memory_usage

__all__ = [
    "Blocks",
    "MemoryReport",
    "TiledAttention",
    "count_blocks",
    "online_softmax",
    "sram_needed",
    "standard_attention",
    "update_block",
    "verify_memory_usage",
]
