"""python -m tests.cute.simulated_projection build KERNELS, and then run KERNELS STAND_IN: attention with its output
projection, as simulated.py has attention alone; tells by how far each case is off, and the largest number of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from tests.cute.simulated import ARCH, HOPPER, RUNTIME
from tilewise import validate
from tilewise.kernels import gpus
from tilewise.kernels.cute import compiler, library, projected
from tilewise.kernels.cute.launch import is_aligned
from tilewise.kernels.disk import Files


class Given(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    w_o: torch.Tensor
    causal: bool


def given(heads: int, heads_k: int, n: int, d: int, model: int, dtype: torch.dtype, causal: bool) -> Given:
    """Two sequences; weights as nn.Linear has them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, d, generator=generator).to(dtype) for h in (heads, heads_k, heads_k))
    weight = (torch.randn(model, heads * d, generator=generator) / (heads * d) ** 0.5).to(dtype)
    return Given(q, k, v, weight.T, causal)


def cases() -> dict[str, Given]:
    made = {
        "grouped": given(4, 2, 70, 32, 72, torch.bfloat16, True),
        "padded": given(3, 3, 65, 24, 136, torch.float16, False),
        "not aligned": given(2, 2, 9, 20, 30, torch.bfloat16, True),
    }
    rows = made["padded"]
    return {**made, "rows": rows._replace(w_o=rows.w_o.contiguous())}


def build(kernels: Path) -> None:
    os.environ |= {"CUTE_DSL_ARCH": ARCH, "CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": str(kernels)}
    for x in cases().values():
        call = validate.prepare(x.q, x.k, x.v, causal=x.causal)
        kernel = projected.kernel_for(call.spec, call.shape, aligned=is_aligned(x.q))
        name = kernel.name(ARCH, RUNTIME)
        if Files(kernels).path(name) is None:
            made = compiler.compile(kernel, ARCH)
            (kernels / f"{name}.ptx").write_text(made.call.__ptx__)
            Files(kernels, most=None).add(name, made.library(RUNTIME))


def run(kernels: Path, stand_in: str) -> None:
    from tests.cute.simulator.launching import Simulator
    from tilewise.kernels.cute.projection import projected_attention

    Simulator(stand_in, kernels)
    gpus.elsewhere = lambda shape: None
    gpus.capability = lambda device: HOPPER
    library.not_installed = lambda: None
    for name, x in cases().items():
        y = projected_attention(x.q, x.k, x.v, x.w_o, causal=x.causal).out
        q, k, v = (part.double() for part in (x.q, x.k, x.v))
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(q, k, v, is_causal=x.causal, enable_gqa=True).transpose(1, 2).flatten(2)
        want = out @ x.w_o.double()
        sys.stdout.write(json.dumps([name, float((y - want).abs().max()), float(want.abs().max())]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    if what == "build":
        build(Path(folder))
    else:
        run(Path(folder), *rest)
