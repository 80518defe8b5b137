"""The rotary embedding in Triton, by its interpreter: what the conformance suite's cases leave out."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.problems import assert_close
from tests.triton.test_ops import needs_triton
from tilewise import arrays, rotating
from tilewise.cases import Case
from tilewise.contract import (
    backward_results,
    check_results,
    expected_backward,
    expected_forward,
    forward_results,
    gradients_to_pull,
)
from tilewise.dispatch import kernel
from tilewise.spec import Tile
from tilewise.validate import Call, prepare, prepare_varlen


def check(call: Call, tile: Tile | None = None) -> None:
    """Forward and backward are within the contract."""
    triton, given = kernel("triton"), (call.spec, call.q, call.k, call.v)
    d_out, d_lse = gradients_to_pull(call)
    saved = triton.forward(*given, tile)
    check_results(expected_forward(call), forward_results(saved))
    grads = triton.backward(*given, saved, d_out, d_lse, tile)
    check_results(expected_backward(call, d_out, d_lse), backward_results(grads))


def is_before(call: Call, tile: Tile | None) -> bool:
    """Whether q and k are turned before the kernels begin."""
    from tilewise.kernels.triton.turning import turns_before

    return turns_before(call.spec, call.shape, tile, torch.from_numpy(call.q)) is not None


def inputs(d: int, n_q: int, n_k: int, dtype: str = "float32", batch: int = 2, heads_k: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng([d, n_q, n_k])
    sizes = ((batch, heads, n, d) for heads, n in ((2 * heads_k, n_q), (heads_k, n_k), (heads_k, n_k)))
    return [arrays.narrow(rng.standard_normal(size), dtype) for size in sizes]


# -- attention --------------------------------------------------------------------------------------------------------
WAYS = {"tile by tile": 19, "before": 37}  # queries, in two tiles of 16 and in three


@needs_triton
@pytest.mark.parametrize("n_q", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("d", "dim"), [(7, 4), (16, 16), (24, 24), (33, 2), (40, 32)])
def test_heads_and_parts_of_every_size(d: int, dim: int, interleaved: bool, n_q: int) -> None:
    """Heads that are no power of 2, or odd; parts that end within a half."""
    rope = tw.Rope(dim, base=30.0, interleaved=interleaved)
    check(prepare(*inputs(d, n_q, 37, batch=1, heads_k=1), causal=True, rope=rope), Tile(16, 16))


@needs_triton
@pytest.mark.parametrize("n_q", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_rounded_once(dtype: str, n_q: int) -> None:
    positions = np.random.default_rng(0).integers(0, 100_000, (2, 37))
    rope = tw.Rope(positions=positions[:, :n_q].copy(), positions_k=positions)
    check(prepare(*inputs(16, n_q, 37, dtype), rope=rope), Tile(16, 32))


@needs_triton
def test_many_tiles_of_queries_have_keys_turned_before() -> None:
    """Two of them, in whichever tiles, turn keys themselves; and packed ones if no sequence has more."""
    rope = tw.Rope()
    for n_q, tile, before in (
        (32, Tile(16, 16), False), (33, Tile(16, 16), True), (256, None, False), (257, None, True), (0, None, False),
    ):  # fmt: skip
        assert is_before(prepare(*inputs(8, n_q, 37), rope=rope), tile) == before
        assert not is_before(prepare(*inputs(8, n_q, 37)), tile)
    q, k = np.zeros((70, 2, 8), np.float32), np.zeros((90, 2, 8), np.float32)
    lengths_k = np.array([0, 40, 80, 90])
    for lengths, invariant, before in (
        ([0, 32, 64, 70], False, False), ([0, 33, 64, 70], False, True), ([0, 32, 64, 70], True, True),
    ):  # fmt: skip
        cumulative = np.array(lengths), lengths_k
        call = prepare_varlen(q, k, k, *cumulative, rope=rope, batch_invariant=invariant)
        assert is_before(call, Tile(16, 16)) == before


@needs_triton
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("middle", [19, 37])
def test_packed_sequences(middle: int, interleaved: bool) -> None:
    """Positions are counted in each of them; one has no queries."""
    rng = np.random.default_rng(middle)
    lengths_q, lengths_k = np.cumsum([0, 30, 0, middle, 23]), np.cumsum([0, 40, 5, 15, 20])
    sizes = (lengths_q[-1], 4, 8), (lengths_k[-1], 2, 8), (lengths_k[-1], 2, 8)
    q, k, v = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    rope = tw.Rope(6, base=30.0, interleaved=interleaved)
    call = prepare_varlen(q, k, v, lengths_q, lengths_k, causal=True, rope=rope)
    assert is_before(call, Tile(16, 16)) == (middle == 37)
    check(call, Tile(16, 16))


@needs_triton
@pytest.mark.parametrize("n_q", WAYS.values(), ids=WAYS)
def test_gradients_of_arrays(n_q: int) -> None:
    """Their sums are of turned q and k as well."""
    rng = np.random.default_rng(0)
    bias, slopes = rng.standard_normal((n_q, 37)).astype(np.float32), rng.random(4).astype(np.float32)
    score = tw.bias(bias, grad=True) >> tw.alibi(slopes, grad=True)
    check(prepare(*inputs(16, n_q, 37), causal=True, score=score, rope=tw.Rope(8)), Tile(16, 16))


@needs_triton
def test_results_are_stored_as_queries_are() -> None:
    """Though turned ones are contiguous."""
    q, k, v = (torch.from_numpy(x).transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(16, 300, 20))
    out = kernel("triton").forward(prepare(q, k, v, rope=tw.Rope()).spec, q, k, v).out
    assert out.stride() == q.stride()


@needs_triton
@pytest.mark.parametrize("n_q", WAYS.values(), ids=WAYS)
def test_tables_that_lie_anyhow(n_q: int) -> None:
    cos, sin = np.cos(np.arange(160.0)).reshape(4, 40).T, np.sin(np.arange(160.0)).reshape(40, 4)
    check(prepare(*inputs(8, n_q, 37, batch=1, heads_k=1), rope=tw.Rope(cos=cos, sin=sin)), Tile(16, 16))


@needs_triton
def test_turned_inside_is_turned_before() -> None:
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in inputs(16, 9, 20))

    def gradients(out: Any) -> Any:
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    inside = tw.attention(q, k, v, causal=True, rope=tw.Rope(), kernel="triton")
    turned = tw.apply_rope(q, tw.Rope(), positions=torch.arange(11, 20)), tw.apply_rope(k, tw.Rope())
    before = tw.attention(*turned, v, causal=True, kernel="triton")
    assert torch.allclose(inside, before, atol=1e-5)
    for one, other in zip(gradients(inside), gradients(before), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@needs_triton
def test_a_case_without_pairs_is_what_it_was() -> None:
    """No embedding: no angles are made, and none are passed."""
    from tilewise.kernels.triton.turning import turning

    call = Case("causal", "ragged").inputs().call()
    assert turning(call.spec, call.shape, call.q) == {"turns": None, "PAIRS": 0, "INTERLEAVED": False}


# -- the operator -----------------------------------------------------------------------------------------------------
ROPES = {
    "halves": tw.Rope(),
    "interleaved": tw.Rope(interleaved=True),
    "a part": tw.Rope(6),
    "a part, interleaved": tw.Rope(6, interleaved=True),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """tw.apply_rope takes the kernel for tensors in main memory, by Triton's interpreter."""
    from tilewise.pytorch import turning

    monkeypatch.setattr(rotating, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(turning, "is_available", lambda device, dtype: dtype != "float64")


def plainly(x: Any, rope: tw.Rope, positions: Any = None) -> np.ndarray:
    """By NumPy, in float64."""
    at = np.arange(x.shape[-2]) if positions is None else positions.numpy()
    turned = tw.apply_rope(x.detach().double().numpy(), rope, positions=at)
    assert isinstance(turned, np.ndarray)
    return turned


@needs_triton
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(2, 5, 300, 16), (3, 1, 1, 10), (1, 2, 33, 200), (2, 2, 0, 8)])
def test_whole_tensors(shape: tuple[int, ...], dtype: str, name: str, as_on_a_gpu: None) -> None:
    """Tiles of rows and groups of heads, some of them ragged: the bits of PyTorch's operations, in the interpreter."""
    x = torch.from_numpy(np.random.default_rng(shape).standard_normal(shape)).to(getattr(torch, dtype))
    made = tw.apply_rope(x, ROPES[name])
    assert made.is_contiguous()
    assert torch.equal(made, rotating.rotation_of(ROPES[name], *shape[2:], like=x).turned(x.float()).to(x.dtype))


@needs_triton
def test_tensors_that_lie_anyhow(as_on_a_gpu: None) -> None:
    """Rows apart, heads side by side, columns apart, one batch index for all; positions of each of them."""
    rope, positions = tw.Rope(), torch.tensor([[7, 1, 70_000, 3, 0], [2, 9, 4, 1, 1]])
    whole = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 5, 4, 16)).astype(np.float32))
    views = [
        whole.transpose(1, 2), whole.transpose(1, 2)[:, ::2, :, 4:12], whole.transpose(1, 2)[..., ::2],
        whole[:1].expand(2, -1, -1, -1).transpose(1, 2),
    ]  # fmt: skip
    for x in views:
        assert_close(tw.apply_rope(x, rope, positions=positions), plainly(x, rope, positions), "float32")
    assert_close(tw.apply_rope(views[0][0, 0], rope), plainly(views[0][0, 0], rope), "float32")


@needs_triton
@pytest.mark.parametrize("name", ROPES)
def test_gradients_are_turned_back(name: str, as_on_a_gpu: None) -> None:
    """And theirs forward again."""
    rng = np.random.default_rng(0)
    x, d_y, g = (torch.from_numpy(rng.standard_normal((2, 3, 5, 8)).astype(np.float32)).requires_grad_() for _ in "xdg")
    y = tw.apply_rope(x, ROPES[name])
    (d_x,) = torch.autograd.grad(y, x, d_y, create_graph=True)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(tw.apply_rope(wide, ROPES[name]), wide, d_y.detach().double())
    assert_close(d_x, want.numpy(), "float32")
    (again,) = torch.autograd.grad(d_x, d_y, g)
    assert_close(again, plainly(g, ROPES[name]), "float32")


@needs_triton
@pytest.mark.parametrize("positions", [False, True])
def test_compiled_without_breaks(positions: bool, as_on_a_gpu: None) -> None:
    def layer(x: Any, at: Any) -> Any:
        return tw.apply_rope(x, tw.Rope(4, positions=at if positions else None))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (5, 9):
        x = torch.from_numpy(np.random.default_rng(n).standard_normal((1, 2, n, 8)).astype(np.float32))
        x, at = x.requires_grad_(), torch.arange(n) * 3
        made = compiled(x, at)
        assert_close(made, plainly(x, tw.Rope(4), at if positions else None), "float32")
        (d_x,) = torch.autograd.grad(made.square().sum(), x)
        assert torch.allclose(d_x, 2 * x, atol=1e-5)  # turning keeps lengths


@needs_triton
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")  # PyTorch's own forward mode
def test_what_looks_on_sees_pytorchs_operations(as_on_a_gpu: None) -> None:
    """torch.func, and forward mode, go through those; an operator would give tangents of 0, or no gradient."""
    x, t = (torch.from_numpy(np.random.default_rng(i).standard_normal((1, 2, 5, 8)).astype(np.float32)) for i in (0, 1))
    want, rope = plainly(t, tw.Rope()), tw.Rope()
    assert_close(torch.func.jvp(lambda x: tw.apply_rope(x, rope), (x,), (t,))[1], want, "float32")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, t)
        tangent = torch.autograd.forward_ad.unpack_dual(tw.apply_rope(dual, rope)).tangent
        assert_close(tangent, want, "float32")
    found = torch.func.grad(lambda x: tw.apply_rope(x, rope).square().sum())(x)
    assert torch.allclose(found, 2 * x, atol=1e-5)  # turning keeps lengths


@needs_triton
def test_vmap(as_on_a_gpu: None) -> None:
    """Of x; of x and positions; of positions alone."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 2, 4, 5, 6)).astype(np.float32))
    at = torch.tensor([[2, 0, 5, 1, 7], [1, 1, 2, 3, 5], [9, 8, 7, 6, 5]])

    def one(x: Any, at: Any) -> Any:
        return tw.apply_rope(x, tw.Rope(), positions=at)

    for dims in ((0, None), (0, 0), (None, 0), (2, 0)):
        given = x.movedim(0, dims[0]) if dims[0] else x if dims[0] == 0 else x[0], at if dims[1] == 0 else at[0]
        want = [one(x[0 if dims[0] is None else i], at[0 if dims[1] is None else i]) for i in range(3)]
        assert torch.equal(torch.vmap(one, dims)(*given), torch.stack(want))
    each = torch.stack([at[:2], at[1:], at[:2].flip(0)])
    want = [one(x[i], each[i]) for i in range(3)]
    assert torch.equal(torch.vmap(one)(x, each), torch.stack(want))
    assert torch.equal(torch.vmap(lambda x: one(x, each[0]))(x), torch.stack([one(x[i], each[0]) for i in range(3)]))


@needs_triton
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck's own: it looks at tensors that are no leaves
def test_the_operator_is_registered_as_pytorch_wants_it() -> None:
    from tilewise.pytorch import turning
    from tilewise.pytorch.rope import rotation_on

    x = torch.zeros(1, 4, 6, 8).transpose(1, 2).requires_grad_()
    turns = rotation_on(x.device, tw.Rope(), (range(4),), 8)
    torch.library.opcheck(turning._turn, (x, turns.cos, turns.sin, False, False))


def test_tensors_in_main_memory_stay_with_pytorch() -> None:
    """Which then does without Triton, however it was installed."""
    program = """
import sys, torch, tilewise
tilewise.apply_rope(torch.zeros(2, 4), tilewise.Rope())
assert not any(name.partition(".")[0] == "triton" for name in sys.modules)
from tilewise.pytorch import turning
assert not turning.is_served(torch.zeros(1, 1, 2, 4))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
