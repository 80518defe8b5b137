"""TFLOP/s of TileLang's kernels on a GPU, beside others of ours: `python -m tests.tilelang.speed [KERNEL ...]`.

16k tokens of 2048 numbers in bfloat16, as in the tables of docs/performance.md; the backward pass counts 2.5 times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

import tilewise as tw

TOKENS, WIDTH = 16384, 2048


def milliseconds(call: Callable[[], Any]) -> float:
    """The median of 20, after 5 that warm up and may compile."""
    taken = []
    for i in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        taken += [begin.elapsed_time(end)] if i >= 5 else []
    return sorted(taken)[len(taken) // 2]


def main() -> None:
    for kernel, d, n, causal in product(sys.argv[1:] or ["tilelang"], (64, 128), (4096, 16384), (False, True)):
        shape = (TOKENS // n, WIDTH // d, n, d)
        q, k, v, d_out = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        operands = [x.requires_grad_() for x in (q, k, v)]
        operations = 4 * shape[0] * shape[1] * n * n * d / (2 if causal else 1) / 1e9
        forward = milliseconds(lambda: tw.attention(q, k, v, causal=causal, kernel=kernel))  # noqa: B023
        out = tw.attention(q, k, v, causal=causal, kernel=kernel)
        backward = milliseconds(lambda: torch.autograd.grad(out, operands, d_out, retain_graph=True))  # noqa: B023
        told = f"forward {operations / forward:.0f}, backward {2.5 * operations / backward:.0f} TFLOP/s"
        print(f"{kernel}: d {d}, n {n}, {'causal' if causal else 'full'}: {told}")  # noqa: T201


if __name__ == "__main__":
    main()
