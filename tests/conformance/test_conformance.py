"""Every kernel system on every case, forward and backward. What a system declares unsupported must raise."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pytest

import tilewise as tw
from tests.conformance.paths import forced, paths
from tests.tilelang.compiled import missing
from tilewise import arrays, dispatch, validate
from tilewise.cases import PACKED_VARIANTS, VARIANTS, Case, conformance
from tilewise.contract import backward_results, check_backward, check_forward, gradients_to_pull, on_device, on_host
from tilewise.dispatch import Kernel
from tilewise.spec import Attention, Shape, Tile

# Beside a system's own tile: smaller ones than the cases' shapes, wide and high, dividing nothing.
TILES = dict.fromkeys(("numpy", "cpu"), (None, Tile(32, 48), Tile(61, 16)))


class Run(NamedTuple):
    """A case on one system, by one of its paths, with one tile."""

    system: str
    path: str | None
    case: Case
    tile: Tile | None

    def __str__(self) -> str:
        system = self.system if self.path is None else f"{self.system}/{self.path}"
        return f"{system} | {self.case.name} | {self.tile or 'default tile'}"


# The simulated kernels one by one: each is a text of its own.
SYSTEMS = (*(name for name in dispatch.NAMES if name not in ("cuda", "tilelang")), *dispatch.simulated_rungs())
# TileLang's kernels by its C target, each compiled anew for a case: tests/tilelang has what is beside the cases.
COMPILED = ("tilelang-c", "tilelang-c/simple")

# Case by case, so that what is expected of a case is computed once for all systems.
RUNS = [
    Run(name, path, case, tile)
    for case in conformance()
    for name in (*SYSTEMS, *COMPILED)
    for path in paths(name)
    for tile in TILES.get(name, (None,))
]


def _kernel(name: str, case: Case, backward: bool, device: str = "cpu") -> Kernel | None:
    """The kernel, or None if it refuses this case, which is then checked to raise."""
    has_device = device == "cpu" or pytest.importorskip("torch").cuda.is_available()
    kernel = dispatch.kernel(name)
    reason = kernel.unavailable() if has_device else "there is no NVIDIA GPU"
    if reason is not None:
        pytest.skip(f"{name} cannot run on this machine: {reason}")
    call = on_device(case.inputs().call(), device)
    shape = replace(call.shape, backward=backward)
    if kernel.unsupported(call.spec, shape) is None:
        return kernel
    with pytest.raises(tw.Unsupported, match=name):
        dispatch.resolve(name, call.spec, shape)
    return None


def _check_gradients(kernel: Kernel, case: Case, tile: Tile | None, device: str = "cpu") -> None:
    """As training calls, with the remainder of out in half precision. Some without: another system may keep none."""
    check_backward(kernel, case, tile, device)
    if case.dtype in arrays.HALF_DTYPES and crc32(case.name.encode()) % 4 == 0:
        check_backward(kernel, case, tile, device, keeps_remainder=False)


# A GPU's kernels are checked where they can run (`make test-gpu`); here it is checked that they say why they cannot.
GPU_RUNGS = (
    *(f"cuda/{rung}" for rung in ("naive", "tiled", "forward_sm90")), "triton", "cute/basic", "cute/forward_sm90",
    "tilelang", "tilelang/simple",
)  # fmt: skip


def tiles_on_a_gpu(name: str, case: Case, tiles: tuple[Tile | None, ...]) -> tuple[Tile | None, ...]:
    """TileLang's kernels are compiled for each variant, type and tile, in seconds: other tiles are for few variants."""
    return tiles if not name.startswith("tilelang") or case.variant in ("full", "causal", "window") else tiles[:1]


@pytest.mark.gpu
@pytest.mark.parametrize("case", conformance(), ids=lambda case: case.name)
@pytest.mark.parametrize("name", GPU_RUNGS)
def test_forward_on_a_gpu(name: str, case: Case) -> None:
    kernel = _kernel(name, case, backward=False, device="cuda:0")
    for tile in tiles_on_a_gpu(name, case, (None, Tile(32, 48), Tile(61, 16))) if kernel is not None else ():
        check_forward(kernel, case, tile, device="cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("case", conformance(), ids=lambda case: case.name)
@pytest.mark.parametrize(
    "name", ["triton", "cuda/tiled", "cuda/forward_sm90", "cuda/unordered", "cute/forward_sm90", "tilelang"]
)
def test_backward_on_a_gpu(name: str, case: Case) -> None:
    kernel = _kernel(name, case, backward=True, device="cuda:0")
    for tile in tiles_on_a_gpu(name, case, (None, Tile(32, 48))) if kernel is not None else ():
        _check_gradients(kernel, case, tile, device="cuda:0")


# What is interpreted or simulated takes seconds each: of the variants, one in three at several tiles here, and of the
# other cases every second, or every third by the simulated kernels that take any type, others by each; all by
# `make test-all` and on a GPU. So are some packed gradients in Triton.
LONG = ("triton", *dispatch.simulated_rungs())
# What a compiler takes seconds for: a few of each kind here.
FEW = {
    "tilelang-c": (
        "all at once | ragged | float32", "causal | grouped | float16", "causal | packed | float32",
    ),
    "tilelang-c/simple": ("full | ragged | float32", "causal | more queries than keys | float32"),
}  # fmt: skip


def _learned() -> set[str]:
    """The variants whose scores read arrays that want gradients."""
    cases = [Case(variant, "batch") for variant in VARIANTS] + [Case(variant, "packed") for variant in PACKED_VARIANTS]
    return {case.variant for case in cases if case.inputs().call().spec.wanted}


# The simulator's gradients of arrays have tests of their own (tests/cuda/test_arrays.py): a few are made here as well.
LEARNED, LEARNED_HERE = _learned(), ("bias over batch", "t5", "biases of rows")


def _marked(run: Run, backward: bool) -> Any:
    shape, packed = run.case.shape, backward and run.system == "triton" and run.case.shape == "packed, none empty"
    is_long = packed or (run.system in LONG and shape == "several tiles")
    kept = run.case.variant == "bias over batch"  # a learned array, by every kernel
    left_out = is_long and not kept and (*VARIANTS, *PACKED_VARIANTS).index(run.case.variant) % 3 != 0
    share = 3 if run.system in ("cuda-sim/naive", "cuda-sim/tiled") and run.case.magnitude == 1 else 2
    is_sampled = run.system in LONG and (not is_long or run.case.magnitude != 1)
    left_out |= is_sampled and crc32(f"{run.system} | {run.case.name}".encode()) % share != 0
    if backward and run.system.startswith("cuda-sim/") and run.case.variant in LEARNED:
        left_out |= run.case.variant not in LEARNED_HERE or shape not in ("ragged", "packed", "several tiles")
        left_out |= run.system in LONG and run.case.dtype != "float32"
    left_out |= run.system in FEW and run.case.name not in FEW[run.system]
    return pytest.param(run, marks=[pytest.mark.slow] if left_out else [], id=str(run))


@pytest.mark.parametrize("run", [_marked(run, backward=False) for run in RUNS])
def test_forward(run: Run) -> None:
    kernel = _kernel(run.system, run.case, backward=False)
    with forced(run.system, run.path):
        if kernel is not None:
            check_forward(kernel, run.case, run.tile)


@pytest.mark.parametrize("run", [_marked(run, backward=True) for run in RUNS])
def test_backward(run: Run) -> None:
    kernel = _kernel(run.system, run.case, backward=True)
    with forced(run.system, run.path):
        if kernel is not None:
            _check_gradients(kernel, run.case, run.tile)


@pytest.mark.parametrize("case", conformance(), ids=lambda case: case.name)
def test_public_call_gives_the_kernels_bits(case: Case) -> None:
    """The API adds layout, not arithmetic; and the same call gives the same bits."""
    inputs = case.inputs()
    call = inputs.call()
    want = dispatch.resolve("auto", call.spec, call.shape).forward(call.spec, call.q, call.k, call.v)
    if inputs.lengths is None:
        out, lse = tw.attention(inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True)
    else:
        out, lse = tw.attention_varlen(inputs.q, inputs.k, inputs.v, *inputs.lengths, **inputs.options, return_lse=True)
    assert np.array_equal(out, call.restore(want.out))
    assert np.array_equal(lse, call.restore(want.lse))
    assert out.shape == (*inputs.q.shape[:-1], inputs.v.shape[-1])
    assert lse.shape == inputs.q.shape[:-1]


def test_a_gpu_system_says_why_it_cannot() -> None:
    call = Case("causal", "square").inputs().call()
    for name in ("cuda", "cute", *(rung for rung in GPU_RUNGS if rung != "triton")):  # Triton has an interpreter
        with pytest.raises(tw.Unsupported, match=f"kernel '{name}' cannot compute this call: "):
            dispatch.resolve(name, call.spec, call.shape)


@pytest.mark.parametrize("name", SYSTEMS)
def test_sinks_of_any_strides(name: str) -> None:
    cases = (Case("sinks", "grouped"), Case("sinks", "grouped", "bfloat16"))
    tried = ((case, _kernel(name, case, backward=False)) for case in cases)
    case, kernel = next((case, kernel) for case, kernel in tried if kernel is not None)
    call = case.inputs().call()
    strange = np.repeat(call.spec.sinks, 2)[::2]
    want, got = (
        kernel.forward(spec, call.q, call.k, call.v) for spec in (call.spec, replace(call.spec, sinks=strange))
    )
    assert np.array_equal(got.out, want.out)
    assert np.array_equal(got.lse, want.lse)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("strange", ["sinks", "d_out", "d_lse", "d_out of another type"])
def test_strides_and_types_beside_the_inputs(name: str, strange: str) -> None:
    """Sinks and gradients come in any strides, and a caller's gradient need not have the result's type."""
    case = Case("sinks", "grouped")
    kernel = _kernel(name, case, backward=True)
    if kernel is None:
        return
    call = case.inputs().call()
    sinks, (d_out, d_lse) = call.spec.sinks, gradients_to_pull(call)

    def gradients(sinks: Any, d_out: Any, d_lse: Any) -> dict[str, Any]:
        spec = replace(call.spec, sinks=sinks)
        saved = kernel.forward(spec, call.q, call.k, call.v)
        return backward_results(kernel.backward(spec, call.q, call.k, call.v, saved, d_out, d_lse))

    given = {"sinks": sinks, "d_out": d_out, "d_lse": d_lse}
    want = gradients(**given)
    if strange in given:
        given[strange] = np.asfortranarray(np.repeat(given[strange], 2, axis=-1))[..., ::2]
    else:
        given["d_out"] = d_out.astype(np.float64)  # of the same values
    got = gradients(**given)
    assert all(np.array_equal(got[what], value) for what, value in want.items())


@pytest.mark.parametrize("name", [name for name in SYSTEMS if "/" not in name])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_wider_gradient_is_not_rounded_to_the_inputs_type(name: str, dtype: str) -> None:
    """The two terms of d_v differ by what float16 has no number for, nor bfloat16."""
    kernel = dispatch.kernel(name)
    reason = kernel.unavailable()
    if reason is not None:
        pytest.skip(f"{name} cannot run on this machine: {reason}")
    q, k, v = (arrays.narrow(np.ones((1, 1, n, 8)), dtype) for n in (2, 1, 1))
    d_out = np.zeros((1, 1, 2, 8), np.float32)
    d_out[..., 0, :], d_out[..., 1, :] = 100_000.5, -100_000.0
    _, pullback = tw.attention_vjp(q, k, v, kernel=name)
    grads = pullback(d_out)
    assert arrays.dtype_name(grads.v) == dtype
    assert np.all(arrays.widen(grads.v, np.float32) == 0.5)


def _check_wide_out(name: str, dtype: str, device: str = "cpu") -> None:
    """Parts of a result are merged before they are rounded: what a kernel rounds is what it hands out unrounded."""
    case = Case("all at once", "ragged", dtype)
    kernel = _kernel(name, case, backward=False, device=device)
    if kernel is None:
        return
    call = on_device(case.inputs().call(), device)
    wide = replace(call.spec, wide_out=True)
    if kernel.unsupported(wide, call.shape) is not None:
        with pytest.raises(tw.Unsupported, match=f"it rounds out to {dtype}, and parts of a result are merged"):
            dispatch.resolve(name, wide, call.shape)
        return
    done = (kernel.forward(spec, call.q, call.k, call.v) for spec in (wide, call.spec))
    (got, got_lse), (want, lse) = ([arrays.as_numpy(on_host(x)) for x in each] for each in done)
    assert arrays.dtype_name(got) == "float32"
    assert np.mean(arrays.narrow(got, dtype) != want) <= (0 if device == "cpu" else 0.01)  # compiled one by one there
    assert np.allclose(got_lse, lse, rtol=1e-6)
    assert np.mean(got != arrays.widen(want, np.float32)) > 0.9


@pytest.mark.parametrize("name", [*SYSTEMS, "triton/basic", "tilelang-c"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_wide_out_is_what_is_rounded(name: str, dtype: str) -> None:
    _check_wide_out(name, dtype)


def test_systems_that_round_out_say_so() -> None:
    from tilewise.kernels.cute.support import unsupported as by_cute
    from tilewise.kernels.tilelang.support import unsupported as by_tilelang

    spec, shape = Attention(1.0, wide_out=True), Shape(1, 2, 2, 128, 128, 64, 64, "bfloat16", "cuda:0")
    for told in (by_cute(spec, shape, None, (9, 0)), by_tilelang(spec, shape, "cuda")):
        assert "it rounds out to bfloat16, and parts of a result are merged in float32" in str(told)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_RUNGS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_wide_out_is_what_is_rounded_on_a_gpu(name: str, dtype: str) -> None:
    _check_wide_out(name, dtype, "cuda:0")


def _heavy(dtype: str) -> tuple[Any, Any, Any, Any, Any]:
    """q, k and v of scores by the hundred thousand, rows whose weight is all on one key, and which key that is."""
    rng = np.random.default_rng(3)
    sizes = (4e3, 90), (20, 300), (1, 300)
    q, k, v = (arrays.narrow(size * rng.standard_normal((1, 2, n, 64)), dtype) for size, n in sizes)
    scores = arrays.widen(q, np.float64) @ arrays.widen(k, np.float64).swapaxes(-1, -2) / 8
    second, first = np.moveaxis(np.sort(scores, axis=-1)[..., -2:], -1, 0)
    return q, k, v, first - second > 100, np.argmax(scores, axis=-1)


def _check_heavy_keys(name: str, dtype: str, device: str = "cpu") -> None:
    assert _kernel(name, Case("full", "grouped", dtype), False, device) is not None
    q, k, v, alone, key = _heavy(dtype)
    call = on_device(validate.prepare(q, k, v), device)
    out = arrays.as_numpy(on_host(dispatch.kernel(name).forward(call.spec, call.q, call.k, call.v).out))
    assert alone.sum() > 150
    for h in range(2):
        found, wanted = out[0, h][alone[0, h]], v[0, h][key[0, h][alone[0, h]]]
        assert found.tobytes() == wanted.tobytes(), f"{(found != wanted).any(-1).sum()} rows of {alone[0, h].sum()}"


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_row_with_its_weight_on_one_key_has_its_value(name: str, dtype: str) -> None:
    """To the last bit: delta is made from it, and d_s is a difference to delta."""
    _check_heavy_keys(name, dtype)


@pytest.mark.parametrize("name", ["triton", "cuda-sim/forward_sm90"])
def test_scores_beyond_what_exponents_tell_apart_are_no_nan(name: str) -> None:
    """Of a billion: a row's only weight may come to nothing, or to more than float16 holds."""
    kernel = _kernel(name, Case("full", "grouped", "float16"), backward=False)
    rng, sizes = np.random.default_rng(0), ((1.5e4, 200), (1.5e4, 1), (1, 1))
    q, k, v = ((size * rng.uniform(0.3, 1, (1, 2, n, 128))).astype(np.float16) for size, n in sizes)
    spec = validate.prepare(q, k, v).spec
    assert not np.isnan(kernel.forward(spec, q, k, v).out).any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_RUNGS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_row_with_its_weight_on_one_key_has_its_value_on_a_gpu(name: str, dtype: str) -> None:
    if name.startswith("tilelang") and (reason := missing()) is not None:
        pytest.skip(f"{name} has no kernels on this machine: {reason}")
    _check_heavy_keys(name, dtype, "cuda:0")


def test_every_variant_has_a_case() -> None:
    """A named variant that no case exercises is a variant nobody checks."""
    from tilewise import cases
    from tilewise.variants import VARIANTS

    source = inspect.getsource(cases)
    assert [name for name in VARIANTS if not re.search(rf"\b{name}\(", source)] == []


def test_a_path_is_forced_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        used = "fast"

        def isa(self) -> str:
            return self.used

        def use_isa(self, name: str) -> None:
            self.used = name

    library = Library()
    monkeypatch.setattr("tests.conformance.paths._library", lambda system: library)
    with pytest.raises(ZeroDivisionError), forced("cpu", "portable"):
        assert library.used == "portable"
        1 / 0  # noqa: B018
    assert library.used == "fast"
