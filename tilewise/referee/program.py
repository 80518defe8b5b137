"""A call as a program of PyTorch alone, its numbers written out: for a report to somebody else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.referee.calls import Call, inputs
from tilewise.referee.truth import truth

MOST = 400  # numbers that are written out


def program(call: Call, code: Sequence[str], device: str, what: str, place: Sequence[int]) -> str | None:
    """Lines that print one number of a result; None where the call has too many numbers, or strides of its own.

    code: the lines that make `out`, by the contender.
    """
    given = inputs(call)
    named = {"q": given.q, "k": given.k, "v": given.v, "mask": given.mask, "bias": given.bias}
    there = {name: x for name, x in named.items() if x is not None}
    if not code or call.layout != "packed" or sum(x.size for x in there.values()) > MOST:
        return None
    lines = ["import torch", *(f"{name} = {_tensor(x, device)}" for name, x in there.items())]
    if call.backward:
        learned = ["q", "k", "v", *(["bias"] if call.bias_gradient else [])]
        lines += [f"{name}.requires_grad_()" for name in learned]
    lines += code
    if call.backward:
        lines.append(f"out.backward({_tensor(given.d_out, device)})")
    shown = "out" if what == "out" else f"{what.removeprefix('d_')}.grad"
    want = float(truth(call.id).expected[what].exact[tuple(place)])
    return "\n".join([*lines, f"print({shown}[{', '.join(map(str, place))}].item())  # float64 gives {want:.6g}"])


def _tensor(x: Array, device: str) -> str:
    name = arrays.dtype_name(x)
    wide: Array = x if name == "bool" else arrays.widen(x, np.float64 if name == "float64" else np.float32)
    numbers = ", ".join(_number(y) for y in wide.ravel().tolist())
    where = "" if device == "cpu" else f", device={device!r}"
    return f"torch.tensor([{numbers}], dtype=torch.{name}{where}).reshape{x.shape}"


def _number(x: bool | float) -> str:
    if isinstance(x, bool):
        return str(x)
    return f"{x:.17g}" if np.isfinite(x) else f"float('{x}')"
