"""wgmma.h: the products of matrices that a kernel needs, as inline PTX. Each shape is an instruction of its own."""

from __future__ import annotations

from collections.abc import Iterable

_TYPES = {"float16": "f16", "bfloat16": "bf16"}
_OPENING = """// Made by wgmma.py: d (64 x N, float32) = a (64 x 16) @ b (16 x N), or added to it, of 16-bit a and b.
// Operands lie in shared memory with their depth side by side, or, if transposed, their rows or columns.
#pragma once

namespace hw {
template <int N, bool ADD, bool A_TRANSPOSED = false, bool B_TRANSPOSED = false>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64 a, uint64 b);
template <int N, bool ADD, bool B_TRANSPOSED = false>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32 (&a)[4], uint64 b);
"""


def header(dtype: str, columns: Iterable[int]) -> str:
    """The products for these numbers of columns; `dtype` is that of both operands."""
    flags = (False, True)
    made = [_OPENING]
    for n in sorted(set(columns)):
        made += [_from_shared(dtype, n, add, ta, tb) for add in flags for ta in flags for tb in flags]
        made += [_from_registers(dtype, n, add, tb) for add in flags for tb in flags]
    return "\n".join([*made, "}  // namespace hw", ""])


def _from_shared(dtype: str, n: int, add: bool, ta: bool, tb: bool) -> str:
    c = n // 2
    return _function(
        dtype, n, add, f"{n}, {_word(add)}, {_word(ta)}, {_word(tb)}", "uint64 a", f"%{c}, %{c + 1}",
        f"{int(ta)}, {int(tb)}", '"l"(a), "l"(b)',
    )  # fmt: skip


def _from_registers(dtype: str, n: int, add: bool, tb: bool) -> str:
    c = n // 2
    registers = ", ".join(f"%{c + i}" for i in range(4))
    return _function(
        dtype, n, add, f"{n}, {_word(add)}, {_word(tb)}", "const uint32 (&a)[4]", f"{{{registers}}}, %{c + 4}",
        f"{int(tb)}", '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)',
    )  # fmt: skip


def _function(dtype: str, n: int, add: bool, template: str, a: str, operands: str, transposed: str, inputs: str) -> str:
    c, kind = n // 2, _TYPES[dtype]
    d = ", ".join(f"%{i}" for i in range(c))
    outputs = ", ".join(f'"{"+" if add else "="}f"(d[{i}])' for i in range(c))
    text = (
        f"{{\\n.reg .pred add;\\nsetp.ne.b32 add, {int(add)}, 0;\\n"
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{d}}}, {operands}, add, 1, 1, {transposed};\\n}}"
    )
    return (
        f"template <> __device__ __forceinline__ void wgmma<{template}>(float (&d)[{c}], {a}, uint64 b) {{\n"
        f'    asm volatile("{text}" : {outputs} : {inputs});\n}}'
    )


def _word(value: bool) -> str:
    return "true" if value else "false"
