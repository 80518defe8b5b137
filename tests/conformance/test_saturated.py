"""Every kernel system on saturated rows: what tilewise/saturated.py promises. What is unsupported must raise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.conformance.test_conformance import COMPILED, GPU_RUNGS, SYSTEMS, _kernel
from tilewise import arrays, dispatch, saturated
from tilewise.cases import PLACES, SHAPES, Case, dominant
from tilewise.contract import ContractError
from tilewise.saturated import check_one_hot_backward, check_one_hot_forward, check_scaled
from tilewise.spec import Attention, Partial

FAST = ("numpy", "cpu")
# Of those that are interpreted or simulated: a dominant key that softmax finds late, whichever way it walks; large q.
QUICK = (
    "causal | head of 128 | bfloat16 one-hot first by 20", "full | head of 128 | float16 one-hot last by 20",
    "full | head of 128 | float32 one-hot first by 20", "causal | head of 128 | bfloat16 x12",
)  # fmt: skip


def _runs(cases: list[Case]) -> list[Any]:
    """Case by case, so that what is expected of one is computed once for all systems."""
    return [
        pytest.param(name, case, id=f"{name} | {case.name}", marks=() if _is_quick(name, case) else pytest.mark.slow)
        for case in cases
        for name in (*SYSTEMS, *COMPILED)
    ]


def _is_quick(name: str, case: Case) -> bool:
    if name in FAST:
        return case.shape == "several tiles" and case.variant == "causal" and case.gap == 20
    return name in SYSTEMS and case.name in QUICK


# -- every system -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "case"), _runs(saturated.one_hot_cases()))
def test_one_hot_forward(name: str, case: Case) -> None:
    kernel = _kernel(name, case, backward=False)
    if kernel is not None:
        check_one_hot_forward(kernel, case)


@pytest.mark.parametrize(("name", "case"), _runs(saturated.one_hot_cases()))
def test_one_hot_backward(name: str, case: Case) -> None:
    kernel = _kernel(name, case, backward=True)
    if kernel is not None:
        check_one_hot_backward(kernel, case)


@pytest.mark.parametrize(("name", "case"), _runs(saturated.scaled_cases()))
def test_scaled_forward(name: str, case: Case) -> None:
    kernel = _kernel(name, case, backward=False)
    if kernel is not None:
        check_scaled(kernel, case, backward=False)


@pytest.mark.parametrize(("name", "case"), _runs(saturated.scaled_cases()))
def test_scaled_backward(name: str, case: Case) -> None:
    kernel = _kernel(name, case, backward=True)
    if kernel is not None:
        check_scaled(kernel, case, backward=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", saturated.one_hot_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("name", [*GPU_RUNGS, "cuda/unordered"])
def test_one_hot_on_a_gpu(name: str, case: Case) -> None:
    for backward, check in ((False, check_one_hot_forward), (True, check_one_hot_backward)):
        kernel = _kernel(name, case, backward, device="cuda:0")
        if kernel is not None:
            check(kernel, case, device="cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("case", saturated.scaled_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("name", [*GPU_RUNGS, "cuda/unordered"])
def test_scaled_on_a_gpu(name: str, case: Case) -> None:
    for backward in (False, True):
        kernel = _kernel(name, case, backward, device="cuda:0")
        if kernel is not None:
            check_scaled(kernel, case, device="cuda:0", backward=backward)


# -- the judge itself -------------------------------------------------------------------------------------------------

ONE_HOT = Case("causal", "several tiles", "bfloat16", one_hot="middle")
LARGE = Case("causal", "several tiles", "bfloat16", magnitude=12.0)


class _Wrong:
    """NumPy's kernel with a mistake in what its forward pass gives."""

    def __init__(self, mistake: Any) -> None:
        self._kernel, self._mistake = dispatch.kernel("numpy"), mistake

    def forward(self, spec: Attention, *args: Any) -> Partial:
        done: Partial = self._mistake(self._kernel.forward(spec, *args))
        return done

    def backward(self, *args: Any) -> Any:
        return self._kernel.backward(*args)


def _out_of(done: Partial, change: Any) -> Partial:
    return replace(done, out=arrays.narrow(change(arrays.widen(done.out, np.float64)), arrays.dtype_name(done.out)))


def _rounding_of_a_weight(done: Partial) -> Partial:
    """A dominant weight that was rounded, over a sum that was not: a softmax whose shift is not the row's maximum."""
    return _out_of(done, lambda out: out * (1 + 2.0**-8))


def _one_bit(done: Partial) -> Partial:
    def change(out: Any) -> Any:
        out[0, 0, 7, 3] *= 1 + 2.0**-7
        return out

    return _out_of(done, change)


def test_a_rounded_weight_is_found() -> None:
    for mistake in (_rounding_of_a_weight, _one_bit):
        with pytest.raises(ContractError, match=r"one-hot middle by 20: out is .* expected .* the contract allows"):
            check_one_hot_forward(_Wrong(mistake), ONE_HOT)
    with pytest.raises(ContractError, match="one-hot middle by 20: d_q is"):
        check_one_hot_backward(_Wrong(_rounding_of_a_weight), ONE_HOT)
    with pytest.raises(ContractError, match=r"x12: out has a relative error of 0\.00[2-9]"):
        check_scaled(_Wrong(_rounding_of_a_weight), LARGE, backward=False)


def test_an_lse_that_is_off_is_found() -> None:
    with pytest.raises(ContractError, match="lse is"):
        check_one_hot_forward(_Wrong(lambda done: replace(done, lse=done.lse + np.float32(1e-3))), ONE_HOT)
    with pytest.raises(ContractError, match=r"d_[qkv] is"):
        check_one_hot_backward(_Wrong(lambda done: replace(done, lse=done.lse + np.float32(2e-2))), ONE_HOT)


def test_numbers_that_are_not_any_are_found() -> None:
    def nan(done: Partial) -> Partial:
        return _out_of(done, lambda out: out * np.nan)

    with pytest.raises(ContractError, match="out is nan"):
        check_one_hot_forward(_Wrong(nan), ONE_HOT)
    with pytest.raises(ContractError, match="relative error of nan"):
        check_scaled(_Wrong(nan), LARGE, backward=False)


def test_a_delta_of_a_rounded_out_is_found() -> None:
    """What every kernel took it from once; of a few rows at q x 4, whose d_q as a whole is nearly within."""
    dropped = _Wrong(lambda done: replace(done, remainder=None))
    with pytest.raises(ContractError, match=r"x12: d_q has a relative error of 0\.005"):
        check_scaled(dropped, LARGE, backward=True)
    with pytest.raises(ContractError, match=r"x4: d_q saturated has a relative error of 0\.[1-9]"):
        check_scaled(dropped, Case("full", "head of 128", "bfloat16", magnitude=4.0), backward=True)


@pytest.mark.parametrize("gap", [20.0, 128.0])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", ["full", "causal"])
def test_one_hot_rows_have_one_key(variant: str, place: str, gap: float) -> None:
    case = Case(variant, "several tiles", "bfloat16", one_hot=place, gap=gap)
    call, s = case.inputs().call(), SHAPES["several tiles"]
    keys = dominant(place, s.n_q, s.n_k, variant == "causal")
    q, k = (arrays.widen(x, np.float64) for x in (call.q, call.k))
    scores = call.spec.scale * q @ np.repeat(k, s.group, axis=1).swapaxes(-1, -2)
    if variant == "causal":
        scores = np.where(np.arange(s.n_k) <= np.arange(s.n_q)[:, None] + s.n_k - s.n_q, scores, -np.inf)
    own = np.take_along_axis(scores, keys[None, None, :, None], -1)
    rest = np.sort(scores, axis=-1)[..., -2:-1]
    assert np.array_equal(scores.argmax(-1)[0, 0], keys)
    assert (own - rest).min() > 0.9 * gap
    assert len(set(keys)) >= 8
    later = {"first": keys.max() < 8, "middle": True, "last": keys.min() >= s.n_k - s.n_q - 8}
    assert later[place]


def test_float16_is_held_to_an_eighth() -> None:
    bfloat16, float16 = (saturated.promised(replace(LARGE, dtype=dtype)) for dtype in ("bfloat16", "float16"))
    assert bfloat16["d_q"] == 3e-3 and bfloat16["d_q saturated"] == 2e-2
    assert all(8 * float16[what] == pytest.approx(limit) for what, limit in bfloat16.items())


def test_keys_too_near_to_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one-hot rows: .* at d 1; take a larger d"):
        Case("full", "smallest head", one_hot="first").inputs()
