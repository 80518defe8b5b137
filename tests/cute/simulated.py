"""python -m tests.cute.simulated build KERNELS CASE...: compiles what the cases take, and keeps its PTX;
python -m tests.cute.simulated run KERNELS STAND_IN CASE...: computes them, and tells by how far each is off.

Two processes: the compiler brings CUDA's own runtime, for which the stand-in stands. "all": every case.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tilewise as tw
from tests.cute import every_lane
from tilewise import arrays, cases, contract, validate
from tilewise.kernels.cute import support
from tilewise.kernels.cute.launch import cannot_be_copied, is_aligned
from tilewise.kernels.cute.rungs import RUNGS
from tilewise.kernels.cute.wanted import Wanted, kernel_of
from tilewise.kernels.disk import Files
from tilewise.validate import Call

ARCH, RUNTIME, HOPPER = "sm_90a", "cu13", (9, 0)
RUNG = RUNGS["forward_sm90"]
LENGTHS = torch.tensor([0, 70, 70, 270, 400, 401], dtype=torch.int32)


def _drawn(seed: int, *shape: int, gain: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * gain).to(dtype)


def _dense(
    d: int, n: int, keys: int = 0, gain: float = 1.0, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Call:
    rows = (2, n), (1, keys or n), (1, keys or n)
    q, k, v = (_drawn(i, 1, heads, count, d, gain=gain, dtype=dtype) for i, (heads, count) in enumerate(rows))
    return validate.prepare(q, k, v, **options)


def _packed(d: int, **options: Any) -> Call:
    q, k, v = (_drawn(i, int(LENGTHS[-1]), 2, d) for i in range(3))
    return validate.prepare_varlen(q, k, v, LENGTHS, LENGTHS, **options)


def _one_key(d: int, causal: bool = False) -> Call:
    """Rows with all of their weight on one key, in any tile, above others by little enough and by too much for a
    speculation that serves. Values are not small, so that those others' parts of them are no rounding's matter."""
    n, gains = 300, torch.tensor([3.0, 4.0, 8.0, 40.0])
    k, v = (_drawn(i, 1, 1, n, d) for i in range(2))
    k = (k * (d**0.5 / k.float().norm(dim=-1, keepdim=True))).to(k.dtype)
    chance = torch.rand(n, generator=torch.Generator().manual_seed(3))
    at = (chance * (torch.arange(n) + 1 if causal else n)).long()
    q = (k[:, :, at] * (gains[torch.arange(n) // 16 % 4] * (64 / d) ** 0.5)[:, None]).to(k.dtype)
    return validate.prepare(q, k, torch.where(v < 0, v - 1, v + 1), causal=causal)


def _even(d: int) -> Call:
    """All weights are 1, and half precision takes nothing from them: results are as exact as sums are."""
    call = _dense(d, 200, 300, causal=True)
    return replace(call, q=torch.zeros_like(call.q), spec=replace(call.spec, keeps_remainder=True))


def biased(d: int, n: int, keys: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    """Some rows see no key, some only the last ones."""
    bias = _drawn(3, 1, 2, n, keys, gain=2.0)
    bias[:, :, : n // 3] = bias[:, :, n // 3 : n // 2, :-20] = -torch.inf
    return _dense(d, n, keys, score=tw.bias(bias.to(dtype)))


def _named() -> Iterator[tuple[str, Callable[[], Call]]]:
    for d in (64, 128, 256):
        yield f"full {d}", lambda d=d: _dense(d, 300, 500)
        yield f"causal {d}", lambda d=d: _dense(d, 300, causal=True)
        yield f"without keys {d}", lambda d=d: _dense(d, 300, 100, causal=True)
        yield f"growing {d}", lambda d=d: _dense(d, 200, 500, gain=8.0)  # weights are rescaled, and computed again
        yield f"growing halves {d}", lambda d=d: _dense(d, 200, 500, gain=8.0, dtype=torch.float16)
        yield f"packed {d}", lambda d=d: _packed(d, causal=True)
        yield f"bias {d}", lambda d=d: biased(d, 304, 304)
        yield f"wide bias {d}", lambda d=d: biased(d, 304, 304, torch.float32)
        growing = _drawn(3, 2, 200, 504, gain=100.0)  # scores are computed again, cells and all
        yield f"growing bias {d}", lambda d=d, bias=growing: _dense(d, 200, 504, score=tw.bias(bias))
        yield f"one key {d}", lambda d=d: _one_key(d)
        yield f"one key, causal {d}", lambda d=d: _one_key(d, causal=True)
        yield f"even {d}", lambda d=d: _even(d)
    yield "sinks", lambda: _dense(128, 200, causal=True, sinks=torch.tensor([0.5, -1.0]))
    yield "long", lambda: _dense(64, 2100, 300)
    yield "long growing", lambda: _dense(64, 2100, 300, gain=8.0)
    yield "long bias", lambda: biased(64, 2112, 200)
    for case in cases.conformance():
        yield f"conformance {case}", lambda case=case: _on_torch(case.inputs().call())


def _on_torch(call: Call) -> Call:
    q, k, v = (x if isinstance(x, torch.Tensor) else arrays.as_tensor(x) for x in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v)


CASES = dict(_named())


def wanted(call: Call) -> Wanted | None:
    """The kernel of a call, if Hopper's takes it."""
    shape = replace(call.shape, device="cuda:0")
    given = {"q": call.q, "k": call.k, "v": call.v}
    if support.unsupported(call.spec, shape, RUNG, HOPPER) is not None or cannot_be_copied(given) is not None:
        return None
    return kernel_of(RUNG, call.spec, call.shape, aligned=all(map(is_aligned, given.values())))


def chosen(names: list[str]) -> dict[str, Call]:
    called = {name: CASES[name]() for name in (CASES if names == ["all"] else names)}
    return {name: call for name, call in called.items() if wanted(call) is not None}


def build(kernels: Path, names: list[str]) -> None:
    os.environ |= {"CUTE_DSL_ARCH": ARCH, "CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": str(kernels)}
    from tilewise.kernels.cute import compiler

    with every_lane.installed():
        for kernel in {wanted(call): None for call in chosen(names).values()}:
            assert kernel is not None
            name = kernel.name(ARCH, RUNTIME)
            if Files(kernels).path(name) is None:
                made = compiler.compile(kernel, ARCH)
                (kernels / f"{name}.ptx").write_text(made.call.__ptx__)
                Files(kernels, most=None).add(name, made.library(RUNTIME))


def run(kernels: Path, stand_in: str, names: list[str]) -> None:
    from tests.cute.simulator.launching import Simulator

    simulator = Simulator(stand_in, kernels)
    for name, call in chosen(names).items():
        got = simulator.forward(call)
        expected = contract.expected_forward(call)
        off = {
            x.what: [float(x.errors(part).max(initial=0)), x.limit]
            for x, part in zip(expected, (got.out, got.lse), strict=True)
        }
        if name.startswith("one key"):
            off["out, to the last bit"] = [float((got.out != _heaviest_values(call)).sum()), 0.0]
        if got.remainder is not None:
            whole, exact = got.out.double() + got.remainder.double(), torch.from_numpy(expected[0].exact)
            off["out and its remainder"] = [float((whole - exact).abs().max()), 2.0**-15 * float(exact.abs().max())]
        assert (got.remainder is not None) == call.spec.keeps_remainder
        sys.stdout.write(json.dumps([name, off]) + "\n")
        sys.stdout.flush()


def _heaviest_values(call: Call) -> torch.Tensor:
    """v of each row's key with the largest score that counts."""
    s = call.q.double() @ call.k.double().mT
    if call.spec.mask is not None:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return call.v[0, 0, s.argmax(-1)[0, 0]].expand(call.q.shape[:3] + call.v.shape[3:])


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    if what == "build":
        build(Path(folder), rest)
    else:
        run(Path(folder), rest[0], rest[1:])
