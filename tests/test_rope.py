"""Rotary embedding: against complex numbers, which know of no conventions, tables or tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.problems import assert_close, bits, store
from tilewise import reference, rope
from tilewise.cases import Case
from tilewise.kernels.numpy import NumpyKernel
from tilewise.spec import Attention, Positions, Shape
from tilewise.validate import prepare

CONVENTIONS = {"halves": False, "interleaved": True}


def turned(x: np.ndarray, positions: Any, dim: int, base: float = 10000.0, interleaved: bool = False) -> np.ndarray:
    """(..., n, d) numbers, each pair a complex number times exp(i angle), in NumPy's widest type."""
    x = np.asarray(x, np.longdouble)
    pairs = dim // 2
    angles = np.asarray(positions, np.longdouble)[..., None] * np.longdouble(base) ** (-2 * np.arange(pairs) / dim)
    one, other = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, pairs), slice(pairs, dim))
    z = (x[..., one] + 1j * x[..., other]) * np.exp(1j * angles)
    made = x.copy()
    made[..., one], made[..., other] = z.real, z.imag
    return made


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q k^T / sqrt(d)) v, causal from the end, of (heads, n, d) arrays."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    n_q, n_k = scores.shape[-2:]
    seen = np.arange(n_k) <= np.arange(n_q)[:, None] + n_k - n_q
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    return (weights / np.where(total == 0, 1, total)) @ v


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


# -- apply_rope -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("dim", [None, 6, 2])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_apply_rope_is_a_product_of_complex_numbers(dtype: str, library: str, dim: int | None, convention: str) -> None:
    x = store(normal(2, 3, 7, 10), dtype, library)
    made = tw.apply_rope(x, tw.Rope(dim, base=100.0, interleaved=CONVENTIONS[convention]))
    assert made.dtype == x.dtype
    assert_close(made, turned(wide(x), np.arange(7), dim or 10, 100.0, CONVENTIONS[convention]), dtype, terms=1)


def wide(x: Any) -> np.ndarray:
    return (x.double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)).astype(np.float64)


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (3, 2, 5, 8)])
def test_every_layout_and_positions_of_each_batch(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    made = tw.apply_rope(x, tw.Rope(), positions=np.array([7, 1, 0, 30, 4]))
    assert_close(made, turned(x, [7, 1, 0, 30, 4], 8), "float64")
    if len(shape) > 2:
        positions = np.arange(15).reshape(3, 5) * 11
        want = turned(x, positions if len(shape) == 3 else positions[:, None], 8)
        assert_close(tw.apply_rope(x, tw.Rope(positions=positions)), want, "float64")


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_far_positions_keep_their_digits(library: str, given: bool) -> None:
    """Angles in float32 would be off by 0.004 at position 100,000."""
    far = 100_003
    x = store(normal(far if not given else 2, 8)[-2:], "float32", library)
    if given:
        made = tw.apply_rope(x, tw.Rope(), positions=np.array([far - 2, far - 1]) if library == "numpy" else
                             torch.tensor([far - 2, far - 1]))  # fmt: skip
    else:
        whole = store(np.concatenate([np.zeros((far - 2, 8)), wide(x)]), "float32", library)
        made = tw.apply_rope(whole, tw.Rope())[-2:]
    assert np.abs(wide(made) - turned(wide(x), [far - 2, far - 1], 8)).max() < 5e-7


def test_given_tables_replace_the_base() -> None:
    angles = np.arange(6)[:, None] * np.array([0.3, 0.02])
    tables = {"cos": 1.5 * np.cos(angles), "sin": 1.5 * np.sin(angles)}
    x, plain = normal(6, 8), tw.Rope(4, base=(0.3 / 0.02) ** 2)
    made = tw.apply_rope(x, tw.Rope(**tables))
    turned_plain = turned(x, np.arange(6) * 0.3, 4, plain.base)
    assert_close(made[:, :4], 1.5 * turned_plain[:, :4], "float64")
    assert np.array_equal(made[:, 4:], x[:, 4:])
    tensors = tw.Rope(**{name: torch.from_numpy(x) for name, x in tables.items()})
    assert np.array_equal(tw.apply_rope(torch.from_numpy(x), tensors, positions=torch.tensor([0, 1, 2, 3, 4, 5])), made)


def test_apply_rope_has_gradients() -> None:
    x = torch.from_numpy(normal(1, 2, 4, 6)).requires_grad_()
    for interleaved in CONVENTIONS.values():
        assert torch.autograd.gradcheck(lambda x, i=interleaved: tw.apply_rope(x, tw.Rope(4, interleaved=i)), x)


def test_tables_are_made_once_and_grow_by_doubling() -> None:
    first, again, longer = (
        rope.counted_tables(tw.Rope(base=777.0), (range(n),), 8, "float32") for n in (100, 256, 257)
    )  # fmt: skip
    assert first[0] is again[0]
    assert len(first[0]) == 256
    assert len(longer[0]) == 512


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["numpy", "cpu"])
@pytest.mark.parametrize(("n_q", "n_k"), [(9, 9), (4, 11), (11, 4), (1, 300)])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_attention_turns_queries_and_keys(convention: str, n_q: int, n_k: int, kernel: str) -> None:
    """By complex numbers, without the reference: counted from the ends, with groups of heads, a part of each head."""
    interleaved = CONVENTIONS[convention]
    q, k, v = normal(4, n_q, 12), normal(2, n_k, 12, seed=1), normal(2, n_k, 5, seed=2)
    at_q, at_k = np.arange(n_q) + n_k - n_q, np.arange(n_k)
    want = dense(
        turned(q, at_q, 8, 50.0, interleaved),
        np.repeat(turned(k, at_k, 8, 50.0, interleaved), 2, 0),
        np.repeat(v, 2, 0),
    )
    made = tw.attention(
        q[None], k[None], v[None], causal=True, rope=tw.Rope(8, 50.0, interleaved=interleaved), kernel=kernel
    )
    assert_close(made[0], want, "float64")


@pytest.mark.parametrize("kernel", ["numpy", "cpu"])
def test_packed_sequences_count_their_own_positions(kernel: str) -> None:
    lengths_q, lengths_k = np.array([0, 3, 3, 10]), np.array([0, 5, 6, 10])
    q, k, v = normal(10, 2, 8), normal(10, 1, 8, seed=1), normal(10, 1, 8, seed=2)
    made = tw.attention_varlen(q, k, v, lengths_q, lengths_k, causal=True, rope=tw.Rope(), kernel=kernel)
    for i in range(3):
        rows, cols = (slice(x[i], x[i + 1]) for x in (lengths_q, lengths_k))
        alone = [x.swapaxes(0, 1)[None] for x in (q[rows], k[cols], v[cols])]
        want = tw.attention(*alone, causal=True, rope=tw.Rope(), kernel=kernel)
        assert bits(made[rows].swapaxes(0, 1)) == bits(want[0])


def test_only_differences_of_positions_count() -> None:
    q, k, v = (normal(2, 1, 6, 8, seed=i) for i in range(3))
    one, other = (
        tw.attention(q, k, v, rope=tw.Rope(positions=np.arange(6) * 3 + shift)) for shift in (0, 1000)
    )  # fmt: skip
    assert np.abs(one - other).max() < 1e-12
    assert np.abs(one - tw.attention(q, k, v, rope=tw.Rope())).max() > 1e-3


def test_a_shard_has_global_positions() -> None:
    q, k, v = (normal(1, 1, n, 8, seed=n) for n in (6, 10, 10))
    whole = reference.forward(Attention(0.3, tw.causal(), rope=tw.Rope()), q, k, v)
    where = Positions(origin_q=2, origin_k=0, total_q=6, total_k=10)
    spec = Attention(0.3, tw.causal(), positions=where, rope=tw.Rope())
    part = NumpyKernel().forward(spec, q[:, :, 2:5], k, v)
    assert np.abs(part.out - whole.out[:, :, 2:5]).max() < 1e-12


def test_nothing_stands_before_the_tables() -> None:
    """Queries that outnumber keys begin at 0, and keys behind."""
    counted = rope.places(tw.Rope(), Shape(1, 1, 1, 7, 3, 8, 8), None)
    assert counted == ((range(7),), (range(4, 7),))


def test_gradients_are_the_references() -> None:
    q, k, v = normal(1, 4, 5, 8), normal(1, 2, 7, 8, seed=1), normal(1, 2, 7, 6, seed=2)
    turns = tw.Rope(6, positions=np.arange(5) * 7, positions_k=np.arange(7) * 5)
    out, pullback = tw.attention_vjp(q, k, v, causal=True, rope=turns)
    got = pullback(np.ones_like(out))
    want = reference.backward(prepare(q, k, v, causal=True, rope=turns).spec, q, k, v, np.ones_like(out))
    for name in "qkv":
        assert_close(getattr(got, name), getattr(want, name), "float64", what=name)


def test_weights_are_of_turned_queries() -> None:
    q, k, v = (normal(6, 8, seed=i) for i in range(3))
    w = tw.weights(q, k, v, rows=[1, 4], causal=True, rope=tw.Rope())
    assert_close(w @ v, tw.attention(q, k, v, causal=True, rope=tw.Rope())[[1, 4]], "float64")


def test_explain_says_what_turns_and_where() -> None:
    text = str(tw.explain(*(normal(6, 8) for _ in range(3)), rope=tw.Rope(4)))
    assert "rope: Rope(dim=4, base=10000.0); cpu turns q and k before its tiles" in text


@pytest.mark.parametrize("name", ["cuda-sim", "triton/basic"])
def test_a_system_without_it_says_so(name: str) -> None:
    from tilewise import dispatch

    call = Case("rope", "square").inputs().call()
    assert "rotary embedding" in (dispatch.kernel(name).unsupported(call.spec, call.shape) or "")


# -- PyTorch ----------------------------------------------------------------------------------------------------------


def tensors(*shape: int, grad: bool = False) -> list[Any]:
    return [torch.from_numpy(normal(*shape, seed=i)).requires_grad_(grad) for i in range(3)]


def test_autograd_of_attention() -> None:
    positions = torch.tensor([[3, 1, 4], [1, 5, 9]])
    for turns in (tw.Rope(), tw.Rope(2, interleaved=True, positions=positions)):
        assert torch.autograd.gradcheck(
            lambda q, k, v, r=turns: tw.attention(q, k, v, causal=True, rope=r), tensors(2, 1, 3, 4, grad=True)
        )


@pytest.mark.parametrize("positions", [False, True])
def test_compiled_without_breaks(positions: bool) -> None:
    def layer(q: Any, k: Any, v: Any, at: Any) -> Any:
        turns = tw.Rope(4, positions=at if positions else None)
        return tw.attention(q, k, v, causal=True, rope=turns) + tw.apply_rope(v, turns)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (5, 9):
        given = (*tensors(1, 2, n, 8), torch.arange(n) * 3)
        assert torch.allclose(compiled(*given), layer(*given), atol=1e-12)


@pytest.mark.parametrize("turns", [tw.Rope(), tw.Rope(positions=torch.tensor([2, 0, 5, 1]))], ids=["counted", "given"])
def test_vmap(turns: tw.Rope) -> None:
    def one(q: Any, k: Any, v: Any) -> Any:
        return tw.attention(q, k, v, rope=turns)

    given = tensors(3, 2, 1, 4, 6)
    want = torch.stack([one(*(x[i] for x in given)) for i in range(3)])
    assert torch.allclose(torch.vmap(one)(*given), want)
    grad = torch.func.grad(lambda q, k, v: one(q, k, v).square().sum())(*(x[0] for x in given))
    q = given[0][0].clone().requires_grad_()
    one(q, given[1][0], given[2][0]).square().sum().backward()
    assert torch.allclose(grad, q.grad)


def test_the_operator_checks_positions_itself() -> None:
    """Whoever calls it by its name cannot make a kernel read beyond them."""
    from tilewise.pytorch.operator import attention

    q, k, v = tensors(1, 1, 4, 8)
    line = '{"kernel": "numpy", "scale": 1.0, "rope": {"base": 10.0}, "rope arrays": {"positions": 0}}'
    assert attention(q, k, v, [torch.arange(4)], None, line)[0].shape == q.shape
    with pytest.raises(ValueError, match=r"positions must be \(4,\) or \(1, 4\)"):
        attention(q, k, v, [torch.arange(3)], None, line)


def test_numbers_of_numpy() -> None:
    """They travel as text, as Python's do."""
    q, k, v = tensors(1, 1, 4, 8)
    plain = tw.attention(q, k, v, rope=tw.Rope(4, 32.0))
    assert torch.equal(tw.attention(q, k, v, rope=tw.Rope(np.int64(4), np.float32(32.0))), plain)


# -- what is refused --------------------------------------------------------------------------------------------------

X = np.ones((1, 2, 3, 8), np.float32)
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "odd dim": (lambda: tw.Rope(3), "dim must be an even number from 2 on"),
    "dim of another type": (lambda: tw.Rope(4.0), "dim must be an even number"),
    "no base": (lambda: tw.Rope(base=0.0), "base must be a positive number, got 0.0"),
    "interleaved": (lambda: tw.Rope(interleaved=1), "interleaved must be True or False, got 1"),
    "float positions": (lambda: tw.Rope(positions=np.ones(3)), "array of whole numbers.* got float64"),
    "list of positions": (lambda: tw.Rope(positions=[1, 2]), "array of whole numbers.* got list"),
    "positions' rank": (lambda: tw.Rope(positions=np.ones((1, 1, 3), int)), r"must be \(n,\) or \(batch, n\), got"),
    "keys' alone": (lambda: tw.Rope(positions_k=np.arange(3)), "give those of queries too"),
    "one table": (lambda: tw.Rope(cos=np.ones((3, 4))), "both tables, cos and sin"),
    "tables of other shapes": (lambda: tw.Rope(cos=np.ones((3, 4)), sin=np.ones((3, 2))), "sin must have cos's shape"),
    "tables' width": (lambda: tw.Rope(4, cos=np.ones((3, 4)), sin=np.ones((3, 4))), r"must be \(rows, 2\), for dim"),
    "whole-number tables": (lambda: tw.Rope(cos=np.ones((3, 4), int), sin=np.ones((3, 4))), "cos must be an array"),
    "too wide": (lambda: tw.attention(X, X, X, rope=tw.Rope(10)), "10 numbers of a head are turned, and it has 8"),
    "an odd head": (lambda: tw.apply_rope(X[..., :7], tw.Rope()), r"7 numbers.*tw.Rope\(dim=6\)"),
    "no Rope": (lambda: tw.attention(X, X, X, rope=True), r"rope: expected tw.Rope\(...\), got True; write"),
    "positions' length": (
        lambda: tw.attention(X, X, X, rope=tw.Rope(positions=np.arange(4))), r"positions must be \(3,\) or \(1, 3\)"
    ),
    "keys' length": (
        lambda: tw.attention(X, X[:, :, :2], X[:, :, :2], rope=tw.Rope(positions=np.arange(3))), "give positions_k"
    ),
    "short tables": (
        lambda: tw.attention(X, X, X, rope=tw.Rope(cos=np.ones((2, 4)), sin=np.ones((2, 4)))), "2 rows, for positions"
    ),
    "a negative row": (
        lambda: tw.apply_rope(
            torch.from_numpy(X), tw.Rope(cos=np.ones((9, 4)), sin=np.ones((9, 4))), positions=torch.tensor([0, -1, 2])
        ),
        "a position is -1",
    ),
    "x of whole numbers": (lambda: tw.apply_rope(X.astype(int), tw.Rope()), "x: expected an array of float16"),
    "x's rank": (lambda: tw.apply_rope(X[0, 0, 0], tw.Rope()), r"x: expected \(n, d\)"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_arrays_stay_where_they_are() -> None:
    q = torch.ones(1, 1, 3, 4, device="meta")
    with pytest.raises(ValueError, match=r"rope: positions must be on meta, as q is, got cpu"):
        tw.attention(q, q, q, rope=tw.Rope(positions=torch.arange(3)))


def test_the_oracle_is_not_the_kernel() -> None:
    """A rotation that is left out, or that goes the wrong way, is out of the contract."""
    from tilewise.contract import ContractError, check_backward, check_forward

    class Unturned(NumpyKernel):
        def forward(self, spec: Attention, *args: Any, **options: Any) -> Any:
            return super().forward(replace(spec, rope=None), *args, **options)

    with pytest.raises(ContractError):
        check_forward(Unturned(), Case("rope", "square"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ContractError):
        from tilewise.contract import _backward_of

        _backward_of(Case("rope", "square"), False)  # expected of the case, before the mistake
        patch.setattr(rope.Rotation, "back", lambda self: self)
        check_backward(NumpyKernel(), Case("rope", "square"))
