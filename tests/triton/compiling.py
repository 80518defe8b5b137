"""Compiles every Triton kernel for a GPU that need not be there, from the arguments that calls give them.

`python -m tests.triton.compiling sm_80 all`, a process of its own: in one with TRITON_INTERPRET=1 nothing is compiled.
Prints the kernels it compiled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import target_info
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import tilewise as tw
from tilewise import arrays
from tilewise.cache import Cache
from tilewise.expr import B, Expr, H, K, Q, load
from tilewise.kernels.triton import (
    arguments,
    launch,
    launch_decode,
    launch_plan,
    launch_projection,
    launch_rope,
    tuning,
)
from tilewise.linear import validate as linear
from tilewise.linear.kernels.triton import call as call_linear
from tilewise.linear.kernels.triton import choices as choices_linear
from tilewise.linear.kernels.triton import launch as launch_linear
from tilewise.pytorch.rope import rotation_on
from tilewise.spec import Attention


@dataclass(frozen=True)
class Target:
    gpu: GPUTarget
    shared_memory: int  # bytes, of a block
    copies: bool = False  # by a copy engine; and kernels start early


TARGETS = {
    "sm_75": Target(GPUTarget("cuda", 75, 32), 64 << 10),
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_89": Target(GPUTarget("cuda", 89, 32), 99 << 10),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 << 10, copies=True),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 << 10, copies=True),
    "gfx90a": Target(GPUTarget("hip", "gfx90a", 64), 64 << 10),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 << 10),
    "gfx1100": Target(GPUTarget("hip", "gfx1100", 32), 64 << 10),
}
_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
compiled: set[str] = set()
too_large: list[str] = []
unordered: list[str] = []


def _type(x: Any) -> Any:
    if isinstance(x, TensorDescriptor):
        return f"tensordesc<{_TYPES[x.base.dtype][1:]}[{','.join(map(str, x.block_shape))}]>"
    if isinstance(x, torch.Tensor):
        return _TYPES[x.dtype]
    if x is None or isinstance(x, tl.constexpr):
        return "constexpr"
    if isinstance(x, tuple):
        return tuple(map(_type, x))
    return "fp32" if isinstance(x, float) else "i32"


def _compile(target: Target, kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """In place of a launch."""
    options = {name: named.pop(name) for name in ("num_warps", "num_stages", "launch_pdl") if name in named}
    given = dict(zip(kernel.arg_names, args, strict=False)) | named
    constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr or given[p.name] is None}
    for i, name in enumerate(kernel.arg_names):
        if name not in constants and isinstance(given[name], tuple):
            constants |= {(i, j): x for j, x in enumerate(given[name]) if _type(x) == "constexpr"}
    signature = {name: "constexpr" if name in constants else _type(given[name]) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=target.gpu, options=options)
    compiled.add(kernel.__name__)
    if options.get("launch_pdl") and not _waits_first(made.asm["ptx"]):
        unordered.append(
            f"{kernel.__name__}: it starts beside the kernel before it, and stores before it waits for that"
        )
    if made.metadata.shared > target.shared_memory:
        too_large.append(f"{kernel.__name__}: {made.metadata.shared} bytes of shared memory, {options}, {constants}")


def _waits_first(ptx: str) -> bool:
    """Whether a kernel waits for the one before it, and stores nothing until then."""
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    return bool(wait) and "st.global" not in before


def _call(
    spec: Attention, dtype: torch.dtype, d: int, basic: bool = False, n: int = 160, with_d_lse: bool = True
) -> None:
    q, k, v = (torch.zeros(1, 4 // group, n, d, dtype=dtype) for group in (1, 2, 2))
    done = launch.forward(spec, q, k, v, None, basic)
    if not basic:
        for d_lse in (None, done.lse) if with_d_lse else (None,):
            launch.backward(spec, q, k, v, done, torch.zeros_like(done.out), d_lse, None)


def _refine(mask: Expr, dtype: torch.dtype, d: int, with_d_lse: bool = True) -> None:
    """A mask of arrays that the host has not seen."""
    seen, arrays.is_elsewhere = arrays.is_elsewhere, arrays.is_torch
    _call(Attention(0.1, mask), dtype, d, with_d_lse=with_d_lse)
    arrays.is_elsewhere = seen


def _decode(spec: Attention, dtype: torch.dtype, d: int, page_size: int | None, rope: tw.Rope | None = None) -> None:
    """A cache long enough for its keys to be shared, so that shares are merged."""
    x = torch.zeros(1, 2, 3, d, dtype=dtype)
    if page_size is None:
        cache: Cache = tw.KVCache.like(x, x, capacity=4096)
    else:
        cache = tw.PagedKVCache.like(x, x, pages=4096 // page_size, page_size=page_size)
    launch_decode.append(cache, x, x, np.array([2], np.int32), rope)
    launch_decode.decode(spec, torch.zeros(1, 8, 2, d, dtype=dtype), cache, rope)


def _project(dtype: torch.dtype, d: int, rope: tw.Rope | None, any_strides: bool = True) -> None:
    x, w = torch.zeros(2, 160, 200, dtype=dtype), torch.zeros(200, 4 * d, dtype=dtype)
    turn = None if rope is None else rotation_on(x.device, rope, (range(160),), d)
    y = launch_projection.project(x, w, w[0], turn, 4, 3)
    launch_projection.gather(y, turn, 3)
    if any_strides:
        launch_projection.project(x, w.T.contiguous().T, None, turn, 4, 3)
        launch_projection.project(x[:, :150], w, None, turn, 4, 3)  # which no copy engine takes


def _turn(dtype: torch.dtype, d: int, rope: tw.Rope) -> None:
    x = torch.zeros(2, 3, 160, d, dtype=dtype)
    turn = rotation_on(x.device, rope, (range(160),), d)
    launch_rope.turned(launch_rope.turned(x, turn), turn, back=True)


def _linear(
    dtype: torch.dtype, d: int, normalize: bool = True, causal: bool = True, n: int = 160, **options: Any
) -> None:
    q, k = (torch.zeros(1, heads, n, d, dtype=dtype) for heads in (4, 2))
    problem = linear.prepare(q, k, k, normalize=normalize, causal=causal, **options).problem
    done = launch_linear.forward(problem, None)
    launch_linear.backward(problem, done, torch.zeros_like(done.out), done.state, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument(
        "which", nargs="?", choices=["all", "decode"], help="more types, sizes and variants; or decoding alone"
    )
    options = parser.parse_args()
    _stand_for(options.target, TARGETS[options.target])
    if options.which == "decode":
        _every_decode()
    else:
        _every_kernel(options.which == "all")
    sys.stdout.write(" ".join(sorted(compiled)) + "\n")
    sys.exit("\n".join(too_large + unordered) or None)


def _stand_for(name: str, target: Target) -> None:
    """Launches compile, and find what such a GPU would tell of itself."""
    JITFunction.run = lambda kernel, *args, **named: _compile(target, kernel, *args, **named)
    tuning.architecture, tuning.shared_memory = (lambda device: name), (lambda device: target.shared_memory)
    choices_linear.shared_memory = launch_projection.shared_memory = tuning.shared_memory
    tuning.processors = launch_decode.processors = call_linear.processors = lambda device: 132
    arguments._has_copy_engine = lambda device: target.copies
    target_info.current_target = _builtin(lambda: target.gpu)
    launch_decode.starts_early = call_linear.starts_early = lambda device: target.copies


def _builtin(function: Callable[[], GPUTarget]) -> Callable[[], GPUTarget]:
    """One that kernels may ask while they are compiled."""
    function.__triton_builtin__ = True  # type: ignore[attr-defined]
    return function


def _every_kernel(and_more: bool) -> None:
    causal, bias = tw.causal(), np.zeros((1, 4, 160, 160), np.float32)
    scores = [
        load(np.zeros(4, np.float32), H, grad=True), load(np.zeros((1, 160), np.float32), 0, K, grad=True),
        load(bias, 0, H, Q, K, grad=True), load(np.zeros(9, np.float32), abs(Q - K), grad=True),
    ]  # fmt: skip
    _call(Attention(0.1, causal), torch.bfloat16, 64)
    trained = Attention(0.1, causal, sum(scores, start=tw.S), keeps_remainder=True)
    _call(trained, torch.bfloat16, 64, with_d_lse=False)
    _call(Attention(0.1, causal & tw.document(np.zeros(160, np.int64))), torch.float16, 64, basic=True)
    launch_plan._LEAST_VISITS = 0
    _refine(causal & tw.document(torch.zeros(160, dtype=torch.int64)), torch.bfloat16, 64, with_d_lse=and_more)
    _project(torch.bfloat16, 128, tw.Rope(), any_strides=and_more)
    _turn(torch.bfloat16, 128, tw.Rope())
    _decode(Attention(0.1), torch.bfloat16, 128, None)
    _decode(Attention(0.1), torch.float16, 80, 16, tw.Rope(24, interleaved=True))
    _linear(torch.bfloat16, 64, n=32768, decay=torch.zeros(2))
    _linear(torch.bfloat16, 128, n=16384)
    _linear(torch.bfloat16, 128, n=4096, normalize=False, feature_map="identity")
    if and_more:
        _further(causal, scores)


def _further(causal: Any, scores: list[Any]) -> None:
    for score in scores:
        _call(Attention(0.1, causal, tw.S + score), torch.bfloat16, 64)
    for d in (64, 128, 256):  # plain calls, which have tiles of their own
        for keeps_remainder in (False, True):
            _call(Attention(0.1, keeps_remainder=keeps_remainder), torch.bfloat16, d)
    _call(Attention(0.1, causal, tw.S + scores[0] + scores[2]), torch.bfloat16, 128)
    for dtype, d in ((torch.float16, 80), (torch.bfloat16, 256), (torch.float32, 128)):
        _call(Attention(0.1, causal), dtype, d)
    for dtype, rope in ((torch.bfloat16, tw.Rope()), (torch.float16, tw.Rope(24, interleaved=True))):
        for n in (100, 160):  # few tiles, which are turned as they are loaded, and many, which are turned before
            _call(Attention(0.1, causal, tw.S + scores[0] + scores[2], rope=rope), dtype, 64, n=n)
    for dtype, d, rope in (
        (torch.float16, 80, tw.Rope(24, interleaved=True)), (torch.float32, 64, None),
        (torch.bfloat16, 96, tw.Rope(24)), (torch.float16, 512, tw.Rope()),
    ):  # fmt: skip
        _project(dtype, d, rope)
    for interleaved in (False, True):
        for dtype, d, dim in ((torch.float16, 80, 24), (torch.float32, 512, None), (torch.bfloat16, 7, 2)):
            _turn(dtype, d, tw.Rope(dim, interleaved=interleaved))
    for dtype, d in ((torch.bfloat16, 128), (torch.float16, 80), (torch.float32, 128)):
        _linear(dtype, d, decay=torch.zeros(1, 2, 160), feature_map=tw.tanh(tw.S) + 2.0)
        _linear(dtype, d, normalize=False)
        _linear(dtype, d, normalize=False, feature_map="identity")
        _linear(dtype, d, causal=False)
    dense, padding = torch.zeros(4, 160, 160, dtype=torch.bool), torch.zeros(1, 160, dtype=torch.bool)
    _refine(causal & tw.dense(dense), torch.float16, 128)
    _refine(tw.window(20) | load(padding, B, K), torch.float32, 256)
    _every_decode()
    arguments._has_copy_engine = lambda device: False
    for dtype, d in ((torch.bfloat16, 64), (torch.float16, 80), (torch.bfloat16, 256), (torch.float32, 128)):
        _call(Attention(0.1, causal, tw.softcap(30.0), sinks=np.zeros(4, np.float32)), dtype, d)


def _every_decode() -> None:
    mask, sinks = tw.causal() & tw.window(512), np.zeros(8, np.float32)
    for dtype, d, page_size in (
        (torch.bfloat16, 128, None), (torch.float16, 80, 16), (torch.bfloat16, 64, 256), (torch.float32, 128, 16),
    ):  # fmt: skip
        _decode(Attention(0.1, mask, tw.softcap(30.0) >> tw.alibi(8), sinks), dtype, d, page_size)
    _decode(Attention(0.1), torch.bfloat16, 512, 64)


if __name__ == "__main__":
    main()
