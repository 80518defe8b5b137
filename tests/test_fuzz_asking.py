"""A question as a call of the package: layouts, caches, texts, the line of a failure; and on a device."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.fuzzing.drawing.draw import Wanted, draw
from tests.fuzzing.drawing.spelling import by_options
from tests.fuzzing.question import Cache, Given, Layout, LinearQuestion, Question
from tests.fuzzing.running import device
from tests.fuzzing.running.asking import ask, ask_linear
from tests.fuzzing.running.memory import Memory
from tests.fuzzing.running.put import judge_seed
from tests.fuzzing.running.systems import System
from tests.fuzzing.running.trial import judge
from tests.fuzzing.running.written import read, written
from tilewise import arrays
from tilewise.contract import on_device
from tilewise.kernels.cuda.simulator.kernel import _walkable
from tilewise.kernels.numpy import NumpyKernel
from tilewise.spec import Attention, Grads, Partial, Tile
from tilewise.validate import Call

MEMORY = Memory()


def _numpy(kernel: Any = None, device: str = "cpu") -> System:
    return System("numpy", kernel or NumpyKernel(), device=device)


# -- a question as a call ---------------------------------------------------------------------------------------------

_LAYOUTS = {
    "plain": Layout(), "at the end": Layout(at_page="end"), "at the beginning": Layout(at_page="begin"),
    "heads inside": Layout((0, 2, 1, 3), at_page="end"), "every other": Layout(step=(2, 1, 3, 1)),
    "reversed": Layout(reversed=(0, 2)), "padded": Layout(padding=16), "at an odd address": Layout(aside=1),
    "odd steps": Layout(padding=1, at_page="end"), "one head for all": Layout(expanded=(1,)),
    "read-only": Layout(writeable=False),
}  # fmt: skip


@pytest.mark.parametrize("name", _LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "bool", "int8"])
def test_arrays_lie_as_their_layouts_say(name: str, dtype: str) -> None:
    layout, memory = _LAYOUTS[name], Memory()
    values = np.random.default_rng(0).integers(-3, 4, (2, 3, 5, 8))
    values = values != 0 if dtype == "bool" else values if dtype == "int8" else values.astype(np.float64)
    values = np.broadcast_to(values[:, :1], values.shape) if layout.expanded else values
    x = memory.place(Given(values, dtype, layout))
    assert arrays.dtype_name(x) == dtype
    assert np.array_equal(arrays.widen(x, np.float64) if "float" in dtype else x, values)
    assert x.flags.writeable == (layout.writeable and not layout.expanded)
    assert memory.used[0] is x
    size, steps = x.itemsize, layout.step or (1,) * 4
    if layout.order:
        assert x.strides[1] < x.strides[2]
    if layout.reversed:
        assert [step < 0 for step in x.strides] == [True, False, True, False]
    if layout.padding:
        assert x.strides[2] == 8 * size + layout.padding
    if not layout.order and not layout.padding and not layout.reversed and not layout.expanded:
        assert x.strides[2] == 8 * size * steps[2]
    if not layout.at_page:
        assert x.ctypes.data % 16 == layout.aside or layout.reversed


def test_what_lies_between_and_beside_is_no_number() -> None:
    x = Memory().place(Given(np.zeros((3, 4)), "float32", Layout(step=(1, 2), at_page="begin")))
    around = np.lib.stride_tricks.as_strided(x, (3, 7), (x.strides[0], 4))
    assert np.isnan(around[:, 1::2]).all() and not np.isnan(around[:, ::2]).any()
    after = np.lib.stride_tricks.as_strided(x[2:, 3:], (1, 9), (x.strides[0], 4))
    assert np.isnan(after[:, 1:]).all()


def _written(mask: str | None, score: str | None, **changes: Any) -> Question:
    """Of causal(), dense(a0) and bias(a1), or options in their place: the definitions are not asked for here."""
    q, k, v = (Given(np.ones((1, 2, n, 4)), "float32") for n in (3, 5, 5))
    a0, a1 = Given(np.eye(3, 5) > 0, "bool"), Given(np.ones((2, 1, 5)), "float16")
    return Question(q, k, v, 0.5, None, None, mask, score, arrays=(a0, a1), **changes)


@pytest.mark.parametrize(
    "where", [{}, {"lengths": ((0, 3), (0, 5))}, {"total": (3, 5)}], ids=["dense", "packed", "part"]
)
@pytest.mark.parametrize(
    ("mask", "score", "causal", "array"),
    [
        ("causal()", None, True, None), ("(causal()) & (K > 1)", None, True, None),
        ("(causal()) & ((dense(a0)) | (K > 1))", None, True, None),
        ("((causal()) & (K > 1)) | (K < 1)", None, False, None), ("~(causal())", None, False, None),
        ("dense(a0)", None, False, 0), ("(causal()) & (dense(a0))", None, True, 0),
        (None, "bias(a1)", False, 1), ("causal()", "(softcap(2)) >> (bias(a1))", True, 1),
        ("K > 1", "bias(a1)", False, None), (None, "(bias(a1)) >> (softcap(2))", False, None),
        ("dense(a0)", "bias(a1)", False, 0),
    ],
)  # fmt: skip
def test_options_say_what_constructors_do(
    mask: str | None, score: str | None, causal: bool, array: int | None, where: dict[str, Any]
) -> None:
    by_text = _written(mask, score, **where)
    said = by_options(by_text, takes_arrays=not where)
    assert (said.causal, said.array_as_mask) == (causal, None if where else array)
    assert ("causal" in f"{said.mask_as_written}") == ("causal" in f"{mask}" and not causal)
    spec, expected = (ask(x, Memory(), "cpu").call.spec for x in (said, by_text))
    assert [repr(x) for x in spec.expressions] == [repr(x) for x in expected.expressions]
    assert len(spec.expressions) == (mask is not None) + (score is not None)


@pytest.mark.parametrize("page", [None, 16])
def test_a_cache_is_scattered_and_spoilt_beyond_its_keys(page: int | None) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (Given(rng.standard_normal((3, heads, n, 4)), "float64") for heads, n in ((4, 2), (2, 40), (2, 40)))
    asked = ask(Question(q, k, v, 1.0, cache=Cache((40, 0, 17), page)), Memory(), "cpu")
    assert list(asked.cache.lengths) == [40, 0, 17]
    for b, n in enumerate((40, 0, 17)):
        found, _ = asked.cache.sequence(b)
        assert np.array_equal(found[0], k.values[b, :, :n])
    held = np.isfinite(asked.cache.k).all(axis=(1, 3)).sum()
    assert held == 57 and np.isnan(asked.cache.k).any()
    if page is not None:
        pages = asked.cache.table[0][asked.cache.table[0] >= 0]
        assert len(pages) == 3 and not np.array_equal(pages, pages[0] + np.arange(3))


def test_arrays_are_one_in_both_texts_and_wanted_where_told() -> None:
    one = Given(np.zeros((1, 1, 3, 3)), "float32")
    table = Given(np.zeros(3), "float32", wants_gradient=True)
    texts = {"mask": "load(a0, K) < 1", "score": "S + load(a0, Q) + load(a1, K)"}
    tables = table, replace(table, wants_gradient=False)
    spec = ask(Question(one, one, one, 1.0, **texts, arrays=tables), Memory(), "cpu").call.spec
    assert len(spec.wanted) == 1 and len({id(slot.array) for slot in spec.loaded}) == 2


def test_a_call_is_made_as_it_is_written() -> None:
    x = Given(np.zeros((1, 1, 3, 3)), "float32")
    question = Question(x, x, x, 1.0, "K <= Q", mask_as_written="prefix(2)")
    assert repr(ask(question, Memory(), "cpu").call.spec.mask) == "K < 2"


def test_a_constructor_that_is_not_its_definition_is_caught() -> None:
    rng = np.random.default_rng(0)
    q = Given(rng.standard_normal((1, 1, 4, 3)).astype(np.float32).astype(np.float64), "float32")
    right = Question(q, q, q, 1.0, "K <= Q + (NK - NQ)", mask_as_written="causal()")
    assert judge(_numpy(), right, MEMORY).failure is None
    wrong = replace(right, mask="K < Q + (NK - NQ)")
    assert "ContractError" in str(judge(_numpy(), wrong, MEMORY).failure)


@pytest.mark.parametrize("seed", range(6))
def test_questions_are_read_back_to_the_bit(seed: int) -> None:
    wanted = Wanted(half_share=0.5, linear_share=0.4, backward_share=0.7)
    question = draw(seed, wanted)
    text = written(question)
    again = read(text)
    assert written(again) == text and json.loads(text)["ask"] == (
        "linear" if isinstance(question, LinearQuestion) else "attention"
    )
    made = ask_linear if isinstance(question, LinearQuestion) else ask
    first, second = Memory(), Memory()
    made(question, first, "cpu"), made(again, second, "cpu")  # type: ignore[arg-type]
    assert [x.tobytes() for x in first.used] == [x.tobytes() for x in second.used]
    assert [x.strides for x in first.used] == [x.strides for x in second.used]


# -- on a device ------------------------------------------------------------------------------------------------------


def test_arrays_lie_on_a_device_as_they_do_here() -> None:
    values = np.random.default_rng(0).standard_normal((2, 3, 5, 8))
    for name in ("plain", "heads inside", "every other", "padded", "at the end"):
        x = MEMORY.place(Given(values, "bfloat16", _LAYOUTS[name]))
        there = device._placed(x, "cpu")
        assert there.stride() == tuple(step // 2 for step in x.strides)
        assert there.data_ptr() % 16 == x.ctypes.data % 16
        assert arrays.as_numpy(there).tobytes() == np.ascontiguousarray(x).tobytes()


def test_copies_have_the_numbers_of_a_row_side_by_side() -> None:
    """One head for all, between two addresses: a copy that keeps the order of its steps would turn it."""
    memory = np.zeros(100, np.uint8)
    x = np.lib.stride_tricks.as_strided(memory[1:25].view(np.float32), (2, 2, 1, 6), (0, 0, 0, 4))
    there = device._placed(x, "cpu")
    assert there.stride(-1) == 1 and np.array_equal(there.numpy(), x)
    assert device._placed(np.float64(3), "cpu").item() == 3
    assert _walkable(x).strides[-1] == x.itemsize


def test_no_tensor_has_steps_between_two_numbers() -> None:
    records = np.zeros(4, np.dtype({"names": ["x"], "formats": [np.float32], "offsets": [1], "itemsize": 9}))
    records["x"] = [1, 2, 3, 4]
    assert arrays.as_tensor(records["x"]).tolist() == [1, 2, 3, 4]


class _OnTensors(NumpyKernel):
    """The NumPy kernel as if it were a GPU's: tensors in, tensors out."""

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial:
        assert arrays.is_torch(q) and all(arrays.is_torch(slot.array) for slot in spec.loaded)
        host = on_device(Call(spec, q, k, v, 4), "host", lambda x, device: arrays.as_numpy(x))
        done = super().forward(host.spec, host.q, host.k, host.v, tile)
        return Partial(*(arrays.as_tensor(np.asarray(x)) for x in (done.out, done.lse)))

    def backward(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any = None,
        tile: Tile | None = None,
    ) -> Grads:  # fmt: skip
        assert all(x is None or arrays.is_torch(x) for x in (q, saved.out, saved.lse, d_out, d_lse))
        host = on_device(Call(spec, q, k, v, 4), "host", lambda x, device: arrays.as_numpy(x))
        given = (None if x is None else arrays.as_numpy(x) for x in (saved.out, saved.lse, d_out, d_lse))
        out, lse, d_out, d_lse = given
        return super().backward(host.spec, host.q, host.k, host.v, Partial(out, lse), d_out, d_lse, tile)


def test_calls_on_a_device_are_judged_as_others_are() -> None:
    # A device whose name is not "cpu": arrays become tensors.
    wanted = Wanted(backward_share=0.3, half_share=0.9, most_scores=60_000, shapes=1)
    system = _numpy(_OnTensors(), "cpu:0")
    verdicts = [judge_seed(system, seed, MEMORY, wanted) for seed in range(30)]
    assert [x.failure for x in verdicts if x.failure is not None] == []
    assert {"bfloat16", "float16"} <= {x.dtype for x in verdicts if x.results["out"]}
    assert {"decode", "dense", "packed"} <= {x.kind for x in verdicts}
    assert any(x.results["d_q"] for x in verdicts)
