"""What the C target runs, TileLang must also make CUDA of, and nvcc a library: for GPUs that need not be there."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tilewise as tw
from tilewise import validate
from tilewise.arrays import BFLOAT16
from tilewise.derivative import ONE, score_slopes
from tilewise.expr import S
from tilewise.kernels.reads import reads
from tilewise.kernels.tilelang import compiler
from tilewise.kernels.tilelang.build import Build, Variant, variant_of
from tilewise.kernels.tilelang.choices import Pass, chosen

needs_tilelang = pytest.mark.skipif(find_spec("tilelang") is None, reason="TileLang is not installed")
needs_nvcc = pytest.mark.skipif(compiler.not_installed("sm_90a") is not None, reason="TileLang or nvcc is missing")
PASSES = {"forward": Pass.FORWARD, "simple": Pass.SIMPLE, "rows": Pass.ROWS, "d_query": Pass.D_QUERY}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "softcap, alibi": {"causal": True, "score": tw.softcap(30.0) >> tw.alibi(4)},
    "slopes": {"score": tw.alibi(np.ones(4, np.float32), grad=True)},
    "relative": {"score": tw.relative(np.zeros(9, np.float32), grad=True)},
    "bias": {"score": tw.bias(np.zeros((1, 4, 300, 300), np.float32), grad=True)},
    "bias of keys": {"score": tw.bias(np.zeros((1, 1, 1, 300), np.float32), grad=True)},
    "sinks": {"causal": True, "sinks": np.zeros(4, np.float32)},
    "quotients": {"mask": (4 - tw.K // 8) % 4 < 2},
}


class Asked(NamedTuple):
    """A kernel, for a call of one kind."""

    kernel: str
    variant: str = "causal"
    d: int = 128
    dtype: str = "bfloat16"
    packed: bool = False
    aligned: bool = True
    arch: str = "sm_90a"

    def text(self, **others: Any) -> tuple[Build, Any]:
        """others: fields of the build that are set in place of what is chosen."""
        from tilewise.kernels.tilelang.call import build_of, written

        dtype = BFLOAT16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        q, k, v = (np.zeros((1, heads, 300, self.d), dtype) for heads in (4, 2, 2))
        call = validate.prepare(q, k, v, **VARIANTS[self.variant])
        if self.packed:
            packed, lengths = [x[0].swapaxes(0, 1) for x in (q, k, v)], np.array([0, 77, 300], np.int32)
            call = validate.prepare_varlen(*packed, lengths, lengths, **VARIANTS[self.variant])
        shape = replace(call.shape, backward=self.kernel not in ("forward", "simple"))
        kind = PASSES.get(self.kernel, Pass.D_KEYS if self.kernel == "d_keys" else Pass.ARRAYS)
        variant = self._with_derivatives(call.spec)
        choice = chosen(kind, call.spec, shape, self.arch, aligned=self.aligned)
        build = build_of(self.kernel, call.spec, shape, self.arch, choice, variant, self.aligned)
        build = replace(build, **others)
        with compiler.as_target(self.arch):
            return build, written(self.kernel)(build, variant)

    def _with_derivatives(self, spec: Any) -> Variant:
        if self.kernel.startswith("of_"):
            part = reads(spec)[0].slope
            return variant_of(spec, **({} if part is ONE else {"part": part}))
        slope = score_slopes(spec)[S]
        return variant_of(spec, **({} if slope is ONE or not self.kernel.startswith("d_") else {"slope": slope}))


def _slow(asked: Asked) -> Any:
    """What takes TileLang seconds; another stands for it."""
    return pytest.param(asked, marks=pytest.mark.slow)


def _on_hopper(text: str) -> bool:
    """Whether products are a warpgroup's, tiles come by the copy engine, and warps of their own ask for them."""
    return all(word in text for word in ("tl::wgmma_", "tl::tma_load", "warpgroup_reg_dealloc", "mbarrier"))


@needs_tilelang
@pytest.mark.parametrize(
    "asked", [Asked("forward"), *map(_slow, (Asked("d_query"), Asked("d_keys"), Asked("simple", "full")))]
)
def test_hoppers_engines_are_used(asked: Asked) -> None:
    build, kernel = asked.text()
    text = compiler.source(kernel, build.target)
    assert _on_hopper(text), "TileLang took the slow way"
    assert "cudaGridDependencySynchronize" in text, "what the kernel before writes may not be there yet"


@needs_tilelang
@pytest.mark.parametrize("asked", [Asked("d_query"), *map(_slow, (Asked("forward"), Asked("d_keys")))])
def test_warpgroups_take_turns_when_they_compute(asked: Asked) -> None:
    """Each waits for the one before and lets the next go on, once a tile; those that load have no part in it."""
    _, kernel = asked.text(turns=True)
    loads, computes = compiler.source(kernel, asked.arch).split("warpgroup_reg_alloc")
    waits, goes_on = ("tl::__sync_thread_partial(((((int)threadIdx.x) >> 7) + 7), 256)", "tl::__named_barrier_arrive")
    assert (computes.count(waits), computes.count(goes_on)) == (1, 1)
    assert (loads.count("__sync_thread_partial"), loads.count(goes_on)) == (0, 0)


@needs_tilelang
@pytest.mark.parametrize("kernel", ["forward", pytest.param("d_keys", marks=pytest.mark.slow)])
def test_quotients_are_kept_from_tilelangs_simplifier(kernel: str) -> None:
    """Which is wrong on negative ones: each is asked of a function beside the kernel, for what is its own."""
    _, asked = Asked(kernel, "quotients").text()
    text = compiler.source(asked, "sm_90a")
    body = text.split("__global__")[-1]
    assert "__device__ __forceinline__ int64_t tilewise_floor_remainder32(" in text
    assert re.search(r"tilewise_floor_remainder32\(.*4 - .*tilewise_floor_quotient32\(.*, \(int64_t\)8\).*\) < 2", body)


@needs_tilelang
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("asked", [Asked("forward"), *map(_slow, (Asked("d_query"), Asked("d_keys")))])
def test_blocks_are_counted_by_heads_or_by_tiles(asked: Asked, heads_first: bool) -> None:
    """How many there are of each, and which of them a block has: the head that its rows are stored to."""
    _, kernel = asked.text(heads_first=heads_first)
    text = compiler.source(kernel, asked.arch)
    assert ("dim3(heads, tiles, batch)" if heads_first else "dim3(tiles, heads, batch)") in text
    stored = re.findall(r"tl::tma_store\(.*, \(\(int\)blockIdx\.(.)\), \(\(int\)blockIdx\.z\)\)", text)
    assert set(stored) == {"x" if heads_first else "y"}


@needs_nvcc
def test_nothing_spills_and_the_library_tells_its_arguments(tmp_path: Path) -> None:
    build, kernel = Asked("forward").text()
    made = compiler.library(kernel, build.target)
    assert (made.spilled, 0 < made.registers <= 240) == (0, True)
    (tmp_path / "kernel.so").write_bytes(made.content)
    library = ctypes.CDLL(str(tmp_path / "kernel.so"))  # which needs no driver to be loaded
    library.tilewise_signature.restype = ctypes.c_char_p
    assert b"int64_t q_step2" in library.tilewise_signature()


# Bytes that do not fit registers, where some are known not to: d_keys has sums of both d_k and d_v.
SPILLS = {
    Asked("forward", "bias"): 16,
    Asked("d_keys", d=256): 4096, Asked("d_keys", aligned=False): 4096, Asked("d_keys", "softcap, alibi"): 512,
    Asked("d_keys", "relative"): 512, Asked("d_keys", "bias"): 512, Asked("of_columns", "bias of keys"): 512,
}  # fmt: skip
LOOPS = ("forward", "d_query", "d_keys")
EVERY = [
    *(Asked(kernel, variant) for kernel in LOOPS for variant in VARIANTS if variant != "sinks"),
    *(Asked(kernel, d=d) for kernel in (*LOOPS, "rows") for d in (40, 64, 256)),
    *(Asked(kernel, "softcap, alibi", d=64) for kernel in LOOPS),
    *(Asked(kernel, packed=True) for kernel in LOOPS),
    *(Asked(kernel, aligned=False) for kernel in LOOPS),
    Asked("forward", "sinks"), Asked("forward", dtype="float16"), Asked("simple", "full"), Asked("simple"),
    Asked("of_rows", "slopes"), Asked("of_columns", "bias of keys"), Asked("of_pairs", "bias"),
    Asked("of_distances", "relative"),
]  # fmt: skip


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("asked", EVERY)
def test_every_kernel_compiles(asked: Asked) -> None:
    build, kernel = asked.text()
    assert compiler.library(kernel, build.target).spilled <= SPILLS.get(asked, 0)
