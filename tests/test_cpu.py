"""What the native engine promises beyond the conformance suite: how it rounds, and what it takes and gives in place."""

from __future__ import annotations

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
from tests.conformance.paths import forced, paths
from tilewise import arrays, dispatch
from tilewise.kernels.cpu.marshal import Marshal
from tilewise.spec import Attention, Grads, Shape, Tile

ROOT = Path(__file__).parent.parent
REASON = dispatch.kernel("cpu").unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"cpu cannot run on this machine: {REASON}")


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
        marshal.forward(q, q, q, array, q[..., 0].copy())
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
