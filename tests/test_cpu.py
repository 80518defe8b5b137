"""What the native engine promises beyond the conformance suite: how it rounds, and what it takes and gives in place."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.conformance.paths import forced, paths, threads
from tilewise import arrays, dispatch
from tilewise.expr import H, K, Q, load, maximum, minimum, where
from tilewise.kernels.cpu import library, structs
from tilewise.kernels.cpu.marshal import Marshal
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.spec import Attention, Grads, Partial, Shape, Tile
from tilewise.walking import evaluate

ROOT = Path(__file__).parent.parent
REASON = dispatch.kernel("cpu").unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"cpu cannot run on this machine: {REASON}")


ROUNDED = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-17, "float64": 2.0**-40}  # and sums on the way


def assert_close(found: Any, expected: Any, dtype: str) -> None:
    found, expected = (arrays.widen(x, np.float64) for x in (found, expected))
    largest = ROUNDED[dtype] * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=largest)


@pytest.fixture(params=paths("cpu"))
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced("cpu", request.param):
        yield request.param


@pytest.mark.parametrize("dtype", arrays.FLOAT_DTYPES)
@pytest.mark.parametrize("n_q", [1, 3, 8, 21])  # rows of delta are summed some at a time, and the rest one by one
def test_a_single_key_has_no_gradient_of_scores(path: str, dtype: str, n_q: int) -> None:
    """Its weight is 1 whatever its score: d_p and delta are the same sum, rounded alike, so nothing is left of them."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (arrays.narrow(rng.standard_normal((2, 2, n, 40)), dtype) for n in (n_q, 1, 1, n_q))
    _, pullback = tw.attention_vjp(q, k, v, kernel="cpu")
    grads = pullback(d_out)
    assert not np.any(arrays.widen(grads.q, np.float64))
    assert not np.any(arrays.widen(grads.k, np.float64))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_every_float16_is_read_as_the_number_it_is(path: str, dtype: str, layout: str) -> None:
    """A bias of all of them but NaN and infinity, 251 keys a row, which no vector divides, or apart in memory."""
    numbers = np.arange(2**16, dtype=np.uint16).view(np.float16)
    numbers = numbers[np.isfinite(numbers)][: 251 * 252].reshape(252, 251)
    numbers[::9, ::7] = -np.inf
    held = np.asfortranarray(numbers) if layout == "columns" else numbers
    q, k, v = (np.random.default_rng(0).standard_normal((1, 1, n, 8)).astype(dtype) for n in (252, 251, 251))
    one, other = (tw.attention(q, k, v, score=tw.bias(b), kernel="cpu") for b in (held, numbers.astype(np.float32)))
    assert np.array_equal(one, other)


# -- integers ---------------------------------------------------------------------------------------------------------

HASH = 0x9E3779B97F4A7C15 - 2**64
IDS = np.array([-(2**63), HASH, HASH + 2**32, HASH + 1, 7, 2**53, 2**53 + 1, 2**63 - 1] * 9)
QUERY, KEY = load(IDS, Q), load(IDS, K)
WIDE = {
    "same": QUERY == KEY,
    "other": QUERY != KEY,
    "order": (QUERY < KEY) | (KEY >= 2**31 - 1),
    "one for all": load(IDS, K) == load(IDS[1:2], H * 0),
    "by an index": load(IDS, load(np.argsort(IDS), K)) <= QUERY,
    "an id as an index": load(IDS, KEY) == 2**31 - 1,
    "choices": where(Q > K, QUERY, KEY) > 3,
    "extremes": (minimum(KEY, Q) > -3) & (maximum(QUERY, K) < 2**30),
    "sums": (QUERY + K) % 7 < 3,
    "quotients": abs(QUERY // 3 - K) > 2**30,
    "products": -KEY * 3 - QUERY > 0,
    "divided by -1": QUERY // -1 < 0,
    "divided by 0": KEY // (Q - Q) + KEY % (Q - Q) == 0,
    "as a float": KEY * 1.0 > 0.5,
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.filterwarnings("ignore:.*encountered")  # NumPy's, of products that wrap around
def test_integers_of_arrays_have_64_bits(path: str, name: str, dtype: str) -> None:
    n, h, q = len(IDS), 2, np.random.default_rng(0).standard_normal((1, 2, len(IDS), 16)).astype(dtype)
    env = {"B": 0, "H": np.arange(h)[:, None, None], "Q": np.arange(n)[:, None], "K": np.arange(n)}
    holds = np.broadcast_to(evaluate(WIDE[name], env, numpy_ops(np.float32)), (h, n, n))
    expected = {"mask": tw.dense(holds), "score": tw.S + tw.load(np.where(holds, 1.5, -0.5), H, Q, K)}
    for kind, given in {"mask": WIDE[name], "score": tw.S + where(WIDE[name], 1.5, -0.5)}.items():
        one, other = ({kind: x, "kernel": "cpu", "return_lse": True} for x in (given, expected[kind]))
        _check_alike(tw.attention(q, q, q, **one), tw.attention(q, q, q, **other))
        grads = [tw.attention_vjp(q, q, q, **{kind: x[kind]}, kernel="cpu")[1](q) for x in (one, other)]
        _check_alike(*((x.q, x.k, x.v) for x in grads))


@pytest.mark.parametrize("name", ["one for all", "an id as an index", "as a float"])
def test_decoding_reads_integers_of_64_bits(path: str, name: str) -> None:
    """One query has kernels of its own."""
    q = np.random.default_rng(0).standard_normal((1, 2, len(IDS), 16)).astype(np.float32)
    for options in ({"mask": WIDE[name]}, {"score": tw.S + where(WIDE[name], 1.5, -0.5)}):
        every, last = (tw.attention(x, q, q, **options, kernel="cpu") for x in (q, q[:, :, -1:]))
        _check_alike([last], [every[:, :, -1:]])


def _check_alike(found: Any, wanted: Any) -> None:
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol=2e-3, atol=2e-3)


def test_integers_of_32_bits_take_no_more() -> None:
    """Which is faster; what decides are the numbers, not their type."""
    q = np.zeros((1, 1, 8, 8), np.float32)
    for ids, wide in ((np.arange(8), False), (np.arange(8) + 2**31, True), (np.arange(8) + 2**31 - 8, False)):
        spec = Attention(1.0, mask=load(ids, Q) == load(ids, K))
        assert Marshal(spec, Shape.of(spec, q, q, q), Tile()).is_wide(spec.mask) == wide


def test_an_index_may_be_the_largest_integer(path: str) -> None:
    """What is added to it would leave 32 bits, which the sanitizers tell."""
    q, row = np.ones((1, 1, 40, 8), np.float32), np.arange(40, dtype=np.float32)
    out = tw.attention(q, q, q, score=tw.S + load(row, where(K < 0, K, 2**31 - 1)), kernel="cpu", return_lse=True)
    np.testing.assert_allclose(out[1], 39 + np.log(40) + np.sqrt(8), rtol=1e-6)


@pytest.mark.parametrize("rows", [(-1, 4), (2, 9), (0, 2**63 - 1), (2**63 - 1, 2**63 - 1), (3, -1)], ids=str)
@pytest.mark.parametrize("name", ["q", "k"])
def test_the_engine_takes_no_callers_word_for_rows(name: str, rows: tuple[int, int]) -> None:
    """Whoever checked before: sequences outside the arrays are refused, and nothing is read or written."""
    q = np.ones((1, 1, 8, 16), np.float32)
    spec = Attention(1.0)
    out, lse = np.zeros_like(q), np.zeros(q.shape[:3], np.float32)
    marshal = Marshal(spec, Shape.of(spec, q, q, q), Tile(4, 4))
    call = marshal.forward(q, q, q, Partial(out, lse))
    sequence = structs.Sequence.from_address(call.sequences)
    setattr(sequence, f"{name}_begin", rows[0])
    setattr(sequence, f"n_{name}", rows[1])
    backward = structs.BackwardCall(call, *(marshal.array(x) for x in (q, lse, q, q, q)), slope_at=-1)
    for function, given in (("tilewise_forward", call), ("tilewise_backward", backward)):
        with pytest.raises(ValueError, match="lengths: expected sequences within the arrays"):
            library.call(function, ctypes.byref(given))
    assert not out.any()


def test_arrays_beyond_indices_of_32_bits_are_refused() -> None:
    """An index of 64 bits, read from another array, could lead there."""
    q, ids = np.zeros((1, 1, 8, 8), np.float32), np.arange(8) + 2**31
    for entries, refused in ((2**31, False), (2**31 + 1, True)):
        table = np.broadcast_to(np.int8(0), (2, entries))
        spec = Attention(1.0, score=tw.S + load(table, 0, load(ids, K)) * 1.0)
        reason = dispatch.kernel("cpu").unsupported(spec, Shape.of(spec, q, q, q))
        assert (reason is not None) == refused
        assert reason is None or "2147483649 entries in a dimension; it reads up to 2147483648" in reason


@pytest.mark.parametrize("n_q", [1, 2])  # by decoding, and by tiles
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_is_stored_as_itself(path: str, dtype: str, n_q: int) -> None:
    """All 65,536 of a type, infinities and NaN too: a single key's values come out as they are, and so do gradients."""
    bits = np.arange(2**16, dtype=np.uint16).reshape(128, 1, 1, 512)
    v = bits.view(np.float16) if dtype == "float16" else bits.view(arrays.BFLOAT16)
    q, k = (np.zeros((128, 1, n, 8), v.dtype) for n in (n_q, 1))
    with np.errstate(all="ignore"):
        out, pullback = tw.attention_vjp(q, k, v, kernel="cpu")
        wide, expected = (arrays.widen(x, np.float32) for x in (out, v))
        np.testing.assert_array_equal(wide, np.broadcast_to(expected, wide.shape))
        if n_q == 1:
            np.testing.assert_array_equal(arrays.widen(pullback(v).v, np.float32), expected)


@pytest.mark.parametrize("dtype", arrays.FLOAT_DTYPES)
@pytest.mark.parametrize(("group", "d"), [(3, 64), (5, 128), (8, 80), (9, 24), (16, 64)])
def test_heads_that_share_keys_decode_together(path: str, dtype: str, group: int, d: int) -> None:
    """Few and many of them, beside heads whose width the machine's vectors divide, and do not."""
    rng = np.random.default_rng(0)
    q, k, v = (
        arrays.narrow(rng.standard_normal((2, heads, n, d)), dtype) for heads, n in ((2 * group, 1), (2, 333), (2, 333))
    )
    expected = tw.attention(*(arrays.widen(x, np.float64) for x in (q, k, v)), kernel="numpy")
    assert_close(tw.attention(q, k, v, kernel="cpu"), expected, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_are_summed_over_splits_of_the_keys(path: str, dtype: str) -> None:
    """1,100 keys are two tasks, whose gradients of q are added; heads of 20 are no whole vectors."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        arrays.narrow(rng.standard_normal((1, heads, n, 20)), dtype)
        for heads, n in ((4, 70), (2, 1100), (2, 1100), (4, 70))
    )
    wide = [arrays.widen(x, np.float64) for x in (q, k, v, d_out)]
    found = tw.attention_vjp(q, k, v, mask=tw.window(900), kernel="cpu")[1](d_out)
    expected = tw.attention_vjp(*wide[:3], mask=tw.window(900), kernel="numpy")[1](wide[3])
    for name in "qkv":
        assert_close(getattr(found, name), getattr(expected, name), dtype)


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64", "uint8", "bool", "float64", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arrays_of_every_type_are_read(path: str, dtype: str, kind: str) -> None:
    """Along the keys, with a step between them and without, and gathered."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 8)).astype(dtype) for n in (30, 67, 67))
    table = (rng.standard_normal((30, 134)) * 3).astype(kind)
    for held in (table[:, :67].copy(), table[:, ::2]):
        for index in ((tw.Q, tw.K), (tw.Q, 66 - tw.K)):
            read = tw.load(held, *index)
            value = tw.where(read, 1.0, 0.0) if kind == "bool" else read * 1.0
            plain = held if index[1] is tw.K else held[:, ::-1]
            expected = tw.attention(q, k, v, mask=plain.astype(dtype), kernel="numpy")
            assert_close(tw.attention(q, k, v, score=tw.S + value, kernel="cpu"), expected, "float32")


FLOATS: dict[str, Any] = {
    "S // 0.3": tw.S // 0.3,
    "S % 0.3": tw.S % 0.3,
    "S % -0.3": tw.S % -0.3,
    "minimum": tw.minimum(tw.S, 0.25),
    "maximum": tw.maximum(tw.S, 0.25),
    "-S": -tw.S,
    "abs": abs(tw.S - 0.1),
    "Q != K": tw.where(tw.Q != tw.K, tw.S, 2.0),
    "S != 0": tw.where((tw.S * 0.0) != 0.0, 1.0, tw.S),
    "not": tw.where(~(tw.K < tw.Q), tw.S, 1.0),
    "-(K - Q)": tw.S + (-(tw.K - tw.Q)) * 0.1,
}


@pytest.mark.parametrize("operation", FLOATS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_operations_in_the_engine(path: str, dtype: str, operation: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 8)).astype(dtype) for n in (19, 37, 37))
    options = {"score": FLOATS[operation], "scale": 0.7}
    found, expected = (tw.attention(q, k, v, kernel=name, **options) for name in ("cpu", "numpy"))
    assert_close(found, expected, "float32")


def test_splits_add_to_one_large_gradient_in_turn(path: str) -> None:
    """A table too large for each task to have sums of its own, which every split of the keys reads by its queries."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (rng.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (40, 1100, 1100, 40))
    table = rng.standard_normal(2**20).astype(np.float32)
    score = tw.S + tw.load(table, tw.Q * 26_000 + tw.K % 3, grad=True)
    with threads("cpu", 4):
        found = tw.attention_vjp(q, k, v, score=score, kernel="cpu")[1](d_out).arrays[0]
    expected = tw.attention_vjp(q, k, v, score=score, kernel="numpy")[1](d_out).arrays[0]
    assert np.count_nonzero(expected) == 3 * 40
    assert_close(found, expected, "float32")


# -- in place ---------------------------------------------------------------------------------------------------------


def _strange_rows() -> dict[str, np.ndarray]:
    records = np.zeros((2, 2, 5, 8), [("byte", np.int8), ("number", np.float32)])
    return {
        "apart": np.zeros((2, 2, 5, 16), np.float32)[..., ::2],
        "one for all": np.broadcast_to(np.float32(1), (2, 2, 5, 8)),
        "backward": np.zeros((2, 2, 5, 8), np.float32)[..., ::-1],
        "between bytes": records["number"],
        "misaligned": np.zeros(2 * 2 * 5 * 8 * 4 + 1, np.int8)[1:].view(np.float32).reshape(2, 2, 5, 8),
    }


@pytest.mark.parametrize("strange", _strange_rows())
def test_what_is_read_may_be_copied_but_what_is_written_never(strange: str) -> None:
    array = _strange_rows()[strange]
    q = np.zeros((2, 2, 5, 8), np.float32)
    spec = Attention(1.0)
    marshal = Marshal(spec, Shape.of(spec, q, q, q), Tile())
    copied = marshal.array(array)
    assert copied.data != array.ctypes.data
    assert copied.data % array.itemsize == 0
    assert (copied.batch, copied.head, copied.row) == (80, 40, 8)
    with pytest.raises(ValueError, match="cannot write to strides"):
        marshal.output(array)
    with pytest.raises(ValueError, match="cannot write to strides"):
        marshal.forward(q, q, q, Partial(array, q[..., 0].copy()))
    assert marshal.output(q[:, ::-1]).data == q[:, ::-1].ctypes.data  # rows in any order are as good


# -- backward's program -----------------------------------------------------------------------------------------------


def test_a_backward_program_is_made_once_for_each_choice_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    made = []
    backward = import_module("tilewise.kernels.cpu.backward")  # the package has a function of that name
    assemble = backward._assemble
    monkeypatch.setattr(backward, "_assemble", lambda *args: made.append(args) or assemble(*args))
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    slopes, table = torch.rand(2), torch.rand(11)
    score = tw.S * tw.load(slopes, tw.H) + tw.load(table, tw.Q - tw.K + 5)
    spec = Attention(1.0, score=score)
    kernel = dispatch.kernel("cpu")

    def gradients() -> Grads:
        return kernel.backward(spec, q, k, v, kernel.forward(spec, q, k, v), torch.ones_like(v))

    wanted: list[list[Any]] = [[], [slopes], [slopes, table], [table], []]
    plain = gradients()
    for arrays_ in wanted:
        for x in (slopes, table):
            x.requires_grad_(any(x is y for y in arrays_))
        for _ in range(2):
            got = gradients()
            assert [tuple(x.shape) for x in got.arrays] == [tuple(x.shape) for x in arrays_]
            assert all(torch.any(x != 0) for x in got.arrays)
            assert torch.equal(got.q, plain.q)
    assert len(made) == 4  # none, the first, both, the second


@pytest.mark.parametrize("isa", ["AVX2", "portable", "sse9"])
def test_an_instruction_set_that_is_not_there_is_told(isa: str) -> None:
    """NumPy then serves, and says so once; one that is there is taken, and capitals do not matter."""
    if isa != "sse9" and isa.lower() not in paths("cpu"):
        pytest.skip(f"this machine has no {isa}")
    program = (
        "import numpy as np, tilewise as tw; x = np.ones((8, 8)); tw.attention(x, x, x); tw.attention(x, x, x); "
        "from tilewise.kernels.cpu import library; print(library.unavailable() or library.isa())"
    )
    command = [sys.executable, "-W", "always", "-c", program]  # by itself Python would leave out a second warning
    env = {**os.environ, "TILEWISE_CPU_ISA": isa}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout.strip() == isa.lower()) == (isa != "sse9")
    told = f"computes with NumPy, far slower than its native engine could: TILEWISE_CPU_ISA={isa}: expected one of"
    assert done.stderr.count(told) == (isa == "sse9") and ("portable; set it" in done.stderr) == (isa == "sse9")
