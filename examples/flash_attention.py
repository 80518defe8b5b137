"""FlashAttention in TileLang, checked and timed on whatever device there is: `python examples/flash_attention.py`.

On an NVIDIA GPU TileLang's kernels are checked and timed. Without one they are checked all the same, by TileLang's C
target, which computes what the GPU would, slowly; and what is timed is the native engine. Where TileLang is not
installed, whatever `auto` takes stands in for it, and the example says so.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import tilewise as tw
from tilewise import arrays, dispatch
from tilewise.contract import expected_forward, on_device, on_host
from tilewise.validate import prepare

HEADS, D = 8, 64


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time FlashAttention in TileLang.")
    parser.add_argument("--lengths", default="512,1024,2048,4096", type=whole_numbers,
                        help="of sequences that are timed (%(default)s)")  # fmt: skip
    lengths = parser.parse_args().lengths
    device, system = where_to_compute()
    passed = [check(name, kernel, options, device) for name, kernel, options in exercises(system)]
    print("\nPerformance Comparison")
    for n in lengths:
        compare(n, device, system)
    return 0 if all(passed) else 1


def whole_numbers(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text):
        raise argparse.ArgumentTypeError(f"expected whole numbers such as 512,1024, got {text!r}")
    return [int(n) for n in text.split(",")]


def where_to_compute() -> tuple[str, str]:
    """The device, and the kernel system that is checked there."""
    torch = imported_torch()
    if torch is not None and torch.cuda.is_available():
        print(f"On {torch.cuda.get_device_name()}, in bfloat16")
        device, wanted = "cuda:0", "tilelang"
    else:
        print("On the CPU, in float32")
        device, wanted = "cpu", "tilelang-c"
    call = prepare(*made(1, 200, 300, dtype_on(device)))
    reason = dispatch.reason(wanted, call.spec, replace(call.shape, device=device))
    if reason is not None:
        print(f"Without TileLang's kernels: {reason}")
    return device, wanted if reason is None else "auto"


def exercises(system: str) -> list[tuple[str, str, dict[str, Any]]]:
    """A name, the kernel that computes it, and the options of the call."""
    simple = system if system == "auto" else f"{system}/simple"
    table = np.random.default_rng(1).standard_normal((4, 32)).astype(np.float32)
    return [
        ("flash_attention_simple", simple, {}),
        ("flash_attention_simple, causal", simple, {"causal": True}),
        ("flash_attention_forward", system, {}),
        ("flash_attention_forward, causal", system, {"causal": True}),
        ("flash_attention_forward, relative position bias", system, {"score": tw.relative(table)}),
    ]


def check(name: str, kernel: str, options: dict[str, Any], device: str) -> bool:
    """Against dense attention in float64, by the contract: twice the error of the dense computation in this type."""
    print(f"Testing {name}...")
    heads = 1 if "simple" in name else 4
    host = prepare(*made(heads, 200, 300, dtype_on(device)), **options)
    call = on_device(host, device)
    system = dispatch.resolve(kernel, call.spec, call.shape)
    done = on_host(system.forward(call.spec, call.q, call.k, call.v).out)
    wanted = expected_forward(host)[0]
    error = float(wanted.errors(done).max())
    is_right = error <= wanted.limit
    print(f"{'✓' if is_right else '✗'} {name} {'passed' if is_right else 'FAILED'} (max error {error:.1e})")
    return is_right


def dtype_on(device: str) -> str:
    return "float32" if device == "cpu" else "bfloat16"


def made(heads: int, n_q: int, n_k: int, dtype: str) -> list[Any]:
    """q, k and v, in main memory."""
    rng = np.random.default_rng(0)
    return [arrays.narrow(rng.standard_normal((1, heads, n, D)), dtype) for n in (n_q, n_k, n_k)]


def compare(n: int, device: str, system: str) -> None:
    """Standard attention, which stores the n x n matrix of each head, beside ours: on a GPU by this system."""
    torch = imported_torch()
    if device == "cpu":
        q, k, v = (x[0] for x in made(HEADS, n, n, "float32"))
        standard, ours = partial(standard_numpy, q, k, v), partial(tw.attention, q, k, v)
    else:
        q, k, v = (arrays.as_tensor(x).to(device) for x in made(HEADS, n, n, "bfloat16"))
        standard, ours = partial(standard_torch, torch, q, k, v), partial(tw.attention, q, k, v, kernel=system)
    before, after = (milliseconds(call, torch, device) for call in (standard, ours))
    matrix, io = HEADS * n * n * q.dtype.itemsize, 4 * HEADS * n * D * q.dtype.itemsize
    print(f"\nSequence Length: {n}")
    print(f"Standard Attention: {before:.3f} ms, {matrix / 2**20:.1f} MB for scores")
    print(f"FlashAttention:     {after:.3f} ms, 0 MB for scores; q, k, v and the result take {io / 2**20:.1f} MB")
    print(f"Speedup:            {before / after:.2f}×")


def standard_numpy(q: Any, k: Any, v: Any) -> Any:
    s = q @ k.swapaxes(-1, -2) * np.float32(D**-0.5)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True) @ v


def standard_torch(torch: Any, q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * D**-0.5, dim=-1) @ v


def milliseconds(call: Callable[[], Any], torch: Any, device: str) -> float:
    """The least of a few, after a first one that may compile."""
    taken = []
    for _ in range(6):
        started = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return 1000 * min(taken[1:])


def imported_torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


if __name__ == "__main__":
    sys.exit(main())
