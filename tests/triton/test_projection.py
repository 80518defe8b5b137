"""The fused projection: as the library multiplies, and as Triton does, by its interpreter; against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.problems import STORED, assert_close, store
from tests.test_rope import turned
from tests.triton.test_ops import needs_triton

KERNELS = ["matmul", pytest.param("triton", marks=needs_triton)]
ROPES = {
    "none": None,
    "halves": tw.Rope(),
    "interleaved": tw.Rope(interleaved=True, base=100.0),
    "a part": tw.Rope(4, base=30.0),
    "a part, interleaved": tw.Rope(6, interleaved=True),
}


def problem(
    batch: int, n: int, features: int, d: int, dtype: str = "float64", library: str = "torch", heads: int = 4
) -> list[Any]:
    """x, w and b for 2 heads of keys."""
    rng = np.random.default_rng([batch, n, features, d])
    columns = (heads + 4) * d
    sizes = (batch, n, features), (features, columns), (columns,)
    return [store(rng.standard_normal(size), dtype, library) for size in sizes]


def exact(x: Any, w: Any, b: Any, rope: tw.Rope | None, positions: Any = None, heads: int = 4) -> list[np.ndarray]:
    """q, k and v in NumPy's float64, the embedding by complex numbers."""
    x, w = (np.asarray(a.double() if isinstance(a, torch.Tensor) else a, np.float64) for a in (x, w))
    y = x @ w + (0 if b is None else np.asarray(b.double() if isinstance(b, torch.Tensor) else b, np.float64))
    y = y.reshape(*x.shape[:2], heads + 4, -1).swapaxes(1, 2)
    q, k, v = y[:, :heads], y[:, heads:-2], y[:, -2:]
    if rope is None:
        return [q, k, v]
    at = np.arange(x.shape[1]) if positions is None else positions
    return [*(turned(a, at, rope.dim or a.shape[-1], rope.base, rope.interleaved) for a in (q, k)), v]


def check(found: Any, want: Any, dtype: str, features: int) -> None:
    for name, one, other in zip(("q", "k", "v"), found, want, strict=True):
        assert_close(one, other, dtype, terms=features, what=name)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ROPES)
def test_q_k_v_of_every_embedding(name: str, kernel: str) -> None:
    """Rows of three batch indices share tiles; features and head dimension fill none."""
    x, w, b = problem(3, 11, 45, 10, "float32")
    found = tw.fused_qkv_projection(x, w, b, heads=4, heads_k=2, rope=ROPES[name], kernel=kernel)
    assert [tuple(a.shape) for a in found] == [(3, 4, 11, 10), (3, 2, 11, 10), (3, 2, 11, 10)]
    check(found, exact(x, w, b, ROPES[name]), "float32", 45)


@needs_triton
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_triton_rounds_half_precision_once(dtype: str) -> None:
    x, w, b = problem(2, 9, 70, 24, dtype)
    found = tw.fused_qkv_projection(x, w, b, heads=4, heads_k=2, rope=tw.Rope(), kernel="triton")
    for one, want in zip(found, exact(x, w, b, tw.Rope()), strict=True):
        error = np.abs(one.double().numpy() - want) / np.maximum(np.abs(want), 1)
        assert error.max() <= STORED[dtype] / 2 * 1.01
        assert one.dtype == x.dtype


HEADS = {
    "two tiles, and a third half full": (16, tw.Rope()),
    "half of a head is not turned": (16, tw.Rope(8)),
    "pairs that are no power of 2": (16, tw.Rope(6)),
    "narrow": (4, tw.Rope(interleaved=True)),
    "padded": (20, tw.Rope()),
    "padded, a part": (24, tw.Rope(12)),
    "padded, a part that is a power of 2": (24, tw.Rope(8)),
    "wider than a tile": (288, tw.Rope()),
    "a single number": (1, None),
}
LAYOUTS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "plain": lambda x, w: (x, w),
    "weight.T": lambda x, w: (x, w.T.contiguous().T),
    "gaps in the batch": lambda x, w: (torch.cat([x, x], 1)[:, : x.shape[1]], w),
    "gaps in the batch, weight.T": lambda x, w: (torch.cat([x, x], 1)[:, : x.shape[1]], w.T.contiguous().T),
    "every other number": lambda x, w: (
        torch.stack([x, x], 3).flatten(2)[..., ::2], torch.stack([w, w], 2).flatten(1)[:, ::2],
    ),
}  # fmt: skip
FEATURES = {"whole tiles": 64, "a part of one": 44, "no multiple of 16 bytes": 45}
LIE = [
    ("plain", "whole tiles"), ("plain", "a part of one"), ("plain", "no multiple of 16 bytes"),
    ("weight.T", "a part of one"), ("gaps in the batch", "whole tiles"), ("gaps in the batch", "a part of one"),
    ("gaps in the batch, weight.T", "a part of one"), ("every other number", "a part of one"),
]  # fmt: skip


@needs_triton
@pytest.mark.parametrize(("layout", "features"), LIE)
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_every_width_however_arrays_lie(name: str, layout: str, features: str) -> None:
    """10 heads, of which 8 are turned."""
    d, rope = HEADS[name]
    x, w, b = problem(2, 37, FEATURES[features], d, "float32", heads=6)
    x, w = LAYOUTS[layout](x, w)
    found = tw.fused_qkv_projection(x, w, b, heads=6, heads_k=2, rope=rope, kernel="triton")
    check(found, exact(x, w, b, rope, heads=6), "float32", FEATURES[features])


@needs_triton
def test_what_a_copy_engine_takes() -> None:
    """In the interpreter, which does as if it had one."""
    from tilewise.kernels.triton.launch_projection import _suit_copy_engine

    def suit(layout: str, features: int = 44, d: int = 12) -> bool:
        x, w, _ = problem(2, 5, features, d, "float32")
        return _suit_copy_engine(*LAYOUTS[layout](x, w), d)

    assert suit("plain") and suit("weight.T") and suit("weight.T", d=10)
    assert not (suit("gaps in the batch") or suit("plain", features=45) or suit("plain", d=10))


@needs_triton
@pytest.mark.parametrize("layout", ["plain", "gaps in the batch"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_more_rows_than_go_together(dtype: str, layout: str) -> None:
    """Programs take tiles of rows in turns; the last turn, and the last tile, are not full."""
    x, w, b = problem(3, 1500, 24, 8, dtype)
    x, w = LAYOUTS[layout](x, w)
    found = tw.fused_qkv_projection(x, w, b, heads=4, heads_k=2, rope=tw.Rope(), kernel="triton")
    check(found, exact(x, w, b, tw.Rope()), dtype, 24)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_linear_layers_weight_without_a_bias(kernel: str) -> None:
    """Its weight is stored the other way round, and x may be a view."""
    x, w, _ = problem(2, 5, 40, 16, "float32")
    x, w = torch.stack([x, x], 2)[:, :, 0], w.T.contiguous().T
    positions = torch.tensor([[5, 900, 3, 70_000, 0], [1, 2, 4, 8, 16]])
    rope = tw.Rope(positions=positions)
    found = tw.fused_qkv_projection(x, w, heads=4, heads_k=2, d=16, rope=rope, kernel=kernel)
    check(found, exact(x, w, None, rope, positions.numpy()[:, None]), "float32", 40)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["none", "halves", "a part", "a part, interleaved"])
@pytest.mark.parametrize("d", [10, 16])
def test_gradients(kernel: str, name: str, d: int) -> None:
    """Those of x, w and b are PyTorch's own, of the same in float64."""
    given = [a.requires_grad_() for a in problem(2, 7, 33, d, "float32")]
    wide = [a.detach().double().requires_grad_() for a in given]
    pulled = [torch.from_numpy(np.random.default_rng(i).standard_normal((2, h, 7, d))) for i, h in enumerate((4, 2, 2))]

    def gradients(kernel: str, inputs: list[Any]) -> Any:
        made = tw.fused_qkv_projection(*inputs, heads=4, heads_k=2, rope=ROPES[name], kernel=kernel)
        total = sum((a * g.to(a.dtype)).sum() for a, g in zip(made, pulled, strict=True))
        return torch.autograd.grad(total, inputs)

    for what, one, want in zip("xwb", gradients(kernel, given), gradients("matmul", wide), strict=True):
        assert_close(one, want, "float32", what=what)


def test_gradients_in_float64() -> None:
    given = [a.requires_grad_() for a in problem(1, 3, 5, 2)]
    assert torch.autograd.gradcheck(
        lambda *a: tw.fused_qkv_projection(*a, heads=4, heads_k=2, rope=tw.Rope()), given
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_numpys_arrays(dtype: str) -> None:
    x, w, b = problem(2, 5, 12, 6, dtype, "numpy")
    found = tw.fused_qkv_projection(x, w, b, heads=4, heads_k=2, rope=tw.Rope())
    assert all(a.dtype == x.dtype for a in found)
    check(found, exact(x, w, b, tw.Rope()), dtype, 12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_rows(kernel: str) -> None:
    x, w, b = problem(2, 0, 12, 6, "float32")
    found = tw.fused_qkv_projection(x, w, b, heads=4, heads_k=2, rope=tw.Rope(), kernel=kernel)
    assert [tuple(a.shape) for a in found] == [(2, 4, 0, 6), (2, 2, 0, 6), (2, 2, 0, 6)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_attention_makes_of_it(kernel: str) -> None:
    """Turned on the way, by the projection or by attention: the same."""
    x, w, b = problem(2, 13, 20, 8, "float32")
    one = tw.attention(
        *tw.fused_qkv_projection(x, w, b, heads=4, heads_k=2, rope=tw.Rope(), kernel=kernel), causal=True
    )
    other = tw.attention(*tw.fused_qkv_projection(x, w, b, heads=4, heads_k=2), causal=True, rope=tw.Rope())
    assert torch.allclose(one, other, atol=1e-5)


@needs_triton
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck's own: it looks at tensors that are no leaves
def test_the_operator_keeps_pytorchs_rules() -> None:
    from tilewise.pytorch import projection
    from tilewise.pytorch.rope import rotation_on

    x, w, b = (a.requires_grad_() for a in problem(2, 3, 8, 4, "float32"))
    turn = rotation_on(x.device, tw.Rope(), (range(3),), 4)
    torch.library.opcheck(projection._project, (x, w, b, turn.cos, turn.sin, False, 8, 6))


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiled_without_breaks(kernel: str) -> None:
    x, w, b = problem(2, 3, 8, 4, "float32")
    layer = torch.compile(
        lambda x, w, b: tw.fused_qkv_projection(x, w, b, heads=4, heads_k=2, rope=tw.Rope(), kernel=kernel),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    check(layer(x, w, b), exact(x, w, b, tw.Rope()), "float32", 8)


# -- what is refused --------------------------------------------------------------------------------------------------

X, W, B = problem(2, 3, 8, 4, "float32")
Refused = tuple[Callable[[], Any], type[Exception], str]


def call(x: Any = X, w: Any = W, b: Any = B, heads: Any = 4, heads_k: Any = 2, **options: Any) -> Callable[[], Any]:
    return lambda: tw.fused_qkv_projection(x, w, b, heads=heads, heads_k=heads_k, **options)


MISTAKES: dict[str, Refused] = {
    "x's rank": (call(X[0]), ValueError, r"x: expected \(batch, n, features\), got shape \(3, 8\)"),
    "w the other way round": (call(w=W.T), ValueError, "w_qkv: expected .* x's 8 features, got shape .*weight.T"),
    "columns": (call(heads=6), ValueError, r"w_qkv: expected .* 10 \* d with d .* got 32 and d 3"),
    "d": (call(d=5), ValueError, "got 32 and d 5"),
    "bias": (call(b=B[:5]), ValueError, "b_qkv: expected 32 numbers, as w_qkv has columns, got 5"),
    "types": (call(w=W.double()), TypeError, "w_qkv: expected .* of float32 on cpu as x is, got .* of float64"),
    "libraries": (call(w=W.numpy()), TypeError, "w_qkv: expected a PyTorch tensor .* as x is, got a NumPy array"),
    "whole numbers": (call(X.int()), TypeError, "x: expected an array of float16"),
    "heads": (call(heads=0), ValueError, "heads: expected a positive whole number, got 0"),
    "groups": (call(heads=4, heads_k=3), ValueError, "a number that divides heads, which is 4, got 3"),
    "kernel": (call(kernel="cuda"), ValueError, "kernel: expected one of auto, matmul, triton, got 'cuda'"),
    "rope": (call(rope=tw.Rope(6)), ValueError, "6 numbers of a head are turned, and it has 4"),
    "keys' positions": (
        call(rope=tw.Rope(positions=np.arange(3), positions_k=np.arange(3))), ValueError, "stand at the same places",
    ),
    "float64 in Triton": (
        call(X.double(), W.double(), B.double(), kernel="triton"), tw.Unsupported, "cannot compute this projection",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run()
