"""torch.compile(fullgraph=True): the same bits, forward and backward, whatever the variant and wherever it is built."""

from __future__ import annotations

import ast
import doctest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError, Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import tilewise as tw
from tests.torch_cases import NAMES, example
from tilewise.expr import HK, KP, NK, NQ, QP, B, H, K, Q, S

Function = Callable[..., torch.Tensor]
N, HEADS, D = 6, 2, 4


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def inputs(*size: int, count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(count)]


def assert_same(function: Function, *leaves: torch.Tensor, others: tuple[torch.Tensor, ...] = ()) -> None:
    """Compiled or not, out and the gradients of all leaves have the same bits."""
    runs = []
    for run in (function, compiled(function)):
        for x in (*leaves, *others):
            x.grad = None
        out = run(*leaves)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape))
        runs.append([out, *(x.grad for x in (*leaves, *others))])
    for eager, traced in zip(*runs, strict=True):
        assert eager is not None
        assert traced is not None
        assert torch.equal(eager, traced)


# -- every variant, built outside and closed over ----------------------------------------------------------------------


QUICK = ("full", "causal", "document per batch", "added mask", "t5", "all at once", "packed bias by sequence")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_variants_built_outside(name: str) -> None:
    """Expressions, and the tensors in them that have gradients, are found in the function's closure."""
    case = example(name)
    assert_same(case.run, *case.operands, others=tuple(case.learned))


# -- every variant, built inside ---------------------------------------------------------------------------------------


def _tensor(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


IDS = torch.tensor([0, 0, 1, 1, 1, 2])
SEEN = torch.rand(N, N, generator=torch.Generator().manual_seed(2)) < 0.7
# Each makes the options of a call, with a tensor x of this shape in it that has a gradient.
INSIDE: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], dict[str, Any]]]] = {
    "causal": ((), lambda x: {"mask": tw.causal(), "score": S * x}),
    "window": ((), lambda x: {"mask": tw.window(2, 1) & tw.causal(), "score": S * x}),
    "prefix": ((), lambda x: {"mask": tw.causal() | tw.prefix(2), "score": x * S}),
    "document": ((), lambda x: {"mask": tw.document(IDS), "score": S - x}),
    "dilated": ((), lambda x: {"mask": tw.dilated(2), "score": S + x}),
    "dense": ((), lambda x: {"mask": tw.dense(SEEN), "score": S / (x * x + 1)}),
    "alibi": ((HEADS,), lambda x: {"score": tw.alibi(HEADS) >> tw.alibi(x)}),
    "relative": ((HEADS, 5), lambda x: {"score": tw.relative(x, signed=True)}),
    "t5": ((8, HEADS), lambda x: {"score": tw.t5(x, max_distance=5), "causal": True}),
    "softcap": ((N, N), lambda x: {"score": tw.softcap(2.0) >> tw.bias(x)}),
    "bias": ((1, HEADS, 1, N), lambda x: {"score": tw.bias(x), "scale": 0.5}),
    "float mask": ((N, N), lambda x: {"mask": x, "causal": True}),
    "boolean mask": ((), lambda x: {"mask": SEEN, "score": S * x}),
    "NumPy mask": ((), lambda x: {"mask": SEEN.numpy(), "score": S * x}),
    "NumPy slopes": ((), lambda x: {"score": tw.alibi(np.array([0.5, 0.25])) >> S * x}),
    "sinks": ((HEADS,), lambda x: {"sinks": x, "causal": True}),
    "a sum of tensors": ((N,), lambda x: {"score": S + tw.load(x.exp() + x, K)}),
    "one tensor twice": ((N,), lambda x: {"score": S + tw.load(x, K) - tw.load(x, Q)}),
    "mask_mod": ((), lambda x: {"mask": tw.from_mask_mod(lambda b, h, q, k: IDS[q] == IDS[k]), "score": S * x}),
    "score_mod": ((N,), lambda x: {"score": tw.from_score_mod(lambda s, b, h, q, k: torch.tanh(s) + x[q] * x[k])}),
    "named kernel": ((), lambda x: {"score": S * x, "kernel": "numpy", "batch_invariant": True}),
}


@pytest.mark.parametrize("name", tw.variants.VARIANTS)
def test_what_a_variant_shows_of_itself_can_be_built_inside(name: str) -> None:
    """The example in a variant's docstring, so that a new one is tried without a word."""
    (shown,) = doctest.DocTestParser().get_examples(tw.variants.VARIANTS[name].__doc__ or "")
    (picture,) = (x for x in ast.walk(ast.parse(shown.source)) if isinstance(x, ast.Call) and _called(x) == "picture")
    variant, n_q, n_k = (ast.unparse(argument) for argument in picture.args)
    kind = "mask" if eval(variant, {**vars(tw), "np": np}).kind == "bool" else "score"
    function = eval(f"lambda q, k, v: attention(q, k, v, {kind}={variant})", {**vars(tw), "np": np})
    heads = 8 if name == "alibi" else 1
    q, k, v = (torch.randn(1, heads, int(n), D, dtype=torch.float64).requires_grad_() for n in (n_q, n_k, n_k))
    assert_same(function, q, k, v)


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


@pytest.mark.parametrize("name", INSIDE)
def test_variants_built_inside(name: str) -> None:
    size, options = INSIDE[name]
    assert_same(lambda q, k, v, x: tw.attention(q, k, v, **options(x)), *inputs(1, HEADS, N, D), _tensor(*size))


def test_every_operation_can_be_followed() -> None:
    """All of Python's operators on expressions but `~`, and PyTorch's functions."""
    one, two = torch.tensor(1.5, dtype=torch.float64), torch.tensor(3)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        i = abs(Q - K) + 2 * H - (B + HK) % 3 + NK // 2 - (-NQ) + (5 - K) + (7 // (K + 1)) + 9 % (Q + 1) + (QP - KP)
        x = +S * 2 / 3 - 1 / (abs(S) + 1) + tw.exp(-S * S) + tw.log(S * S + 1) + tw.tanh(S)
        x = tw.minimum(x, one) + tw.maximum(i, two) * one - one / (x * x + one) + (two - i) * 0.25 + one * x
        y = torch.where(i > two, torch.tanh(x), torch.exp(torch.abs(x) * -1.0)) + torch.maximum(x, one)
        y = y + tw.where(x > y, x // 1.0, y % 2.0) + (x // one) * 0.5 + x % one - x / one + (x - one) + (one - x)
        near = ((i < 9) & (K >= Q - 4)) | (K <= Q) & (Q != K) | torch.logical_not(K == 1) | (one < x * 0 + 2)
        return tw.attention(q, k, v, mask=(i != -99) & (K >= 0), score=tw.where((near != (K == 2)) == (Q > 0), y, S))

    assert_same(attention, *inputs(1, HEADS, N, D))


def test_operations_that_change_nothing_are_left_out_behind_the_compiler() -> None:
    """It reads them as they were written; what is computed then is the other, as if it was never there."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        negative = -S
        score = -negative * 1.0 + tw.load(x, H * 1, K + 0)
        return tw.attention(q, k, v, mask=K - 0 <= Q // 1, score=score, kernel="cuda-sim/tiled")

    leaves = [x.detach().float().requires_grad_() for x in (*inputs(1, HEADS, N, D), _tensor(HEADS, N))]
    assert_same(attention, *leaves)


@pytest.mark.xfail(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 15),
    strict=True, raises=Unsupported, reason="the compiler follows no `~` of an object before PyTorch 2.15",
)  # fmt: skip
def test_invert_can_be_followed() -> None:
    assert_same(lambda q, k, v: tw.attention(q, k, v, mask=~tw.window(1)), *inputs(1, HEADS, N, D))


def test_where_the_compiler_stops_python_goes_on() -> None:
    """Without fullgraph: expressions that were half built when it stopped are as good as others."""
    q, k, v = inputs(1, HEADS, N, D)

    def attention(q: torch.Tensor) -> torch.Tensor:
        mask = tw.causal() & tw.window(3)
        score = tw.softcap(2.0) >> tw.alibi(HEADS)
        return tw.attention(q * 2, k, v, mask=mask & ~(K == 1), score=score)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.compile(attention, backend="aot_eager")(q)
    assert torch.equal(got, attention(q))


# -- other ways to call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_layouts_and_lse(rank: int) -> None:
    q, k, v = inputs(*(1, HEADS, N, D)[4 - rank :])

    def sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = tw.attention(q, k, v, causal=True, return_lse=True)
        return out.sum(-1) * lse

    assert_same(sums, q, k, v)


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_packed_sequences(kind: Any) -> None:
    bias, lengths = _tensor(2), kind([0, 1, 6])
    assert_same(
        lambda q, k, v: tw.attention_varlen(q, k, v, lengths, lengths, causal=True, score=S + tw.load(bias, B)),
        *inputs(N, HEADS, D),
        others=(bias,),
    )


@pytest.mark.parametrize("gqa", [False, True])
def test_scaled_dot_product_attention(gqa: bool) -> None:
    q, k, v = inputs(2, 3, HEADS, N, D)
    k, v = (x.detach()[:, :, :1].clone().requires_grad_() if gqa else x for x in (k, v))
    mask = _tensor(3, 1, N, N)
    assert_same(
        lambda q, k, v, m: tw.scaled_dot_product_attention(q, k, v, m, is_causal=True, scale=0.3, enable_gqa=gqa),
        q, k, v, mask,
    )  # fmt: skip


def test_merged_parts() -> None:
    def merged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = [tw.attention(q, k[:, :, i::2], v[:, :, i::2], return_lse=True) for i in (0, 1)]
        return tw.merge(parts).out

    assert_same(merged, *inputs(1, HEADS, N, D))


def test_inference_and_autocast() -> None:
    q, k, v = (x.detach().float() for x in inputs(1, HEADS, N, D))

    def attention(q: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return tw.attention(q, k.bfloat16(), v, causal=True)

    got = compiled(attention)(q)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, attention(q))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert compiled(lambda: tw.attention(q, k, v))().dtype == torch.bfloat16


# -- modules -----------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Learned everything: projections, a table by distance held as an expression, a bias of keys, sinks."""

    def __init__(self, width: int = 8, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.join = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.table = torch.nn.Parameter(torch.randn(heads, 4))
        self.sinks = torch.nn.Parameter(torch.randn(heads))
        self.score = tw.softcap(5.0) >> tw.relative(self.table)
        self.strength = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.project(x).chunk(3, dim=-1))
        score = self.score >> tw.alibi(self.heads) >> tw.S - self.strength * tw.load(x.mean(-1), B, K)
        out = tw.attention(q, k, v, causal=True, mask=padding[:, None, None], score=score, sinks=self.sinks)
        return x + self.join(out.transpose(1, 2).flatten(2))


def _train(block: Block, step: Any, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randn(2, N, 8, generator=generator)
        optimizer.zero_grad()
        step(x, torch.rand(2, N, generator=generator) < 0.8).pow(2).mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in block.parameters()]


def _blocks() -> tuple[Block, Block]:
    torch.manual_seed(0)
    one, other = Block(), Block()
    other.load_state_dict(one.state_dict())
    return one, other


def test_a_module_in_training() -> None:
    one, other = _blocks()
    before = [p.detach().clone() for p in one.parameters()]
    eager, traced = _train(one, one), _train(other, compiled(other))
    assert all(not torch.equal(a, b) for a, b in zip(before, eager, strict=True))
    for want, got in zip(eager, traced, strict=True):
        assert_close(got, want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, of its own functions
def test_a_module_in_training_with_inductor() -> None:
    one, other = _blocks()
    for want, got in zip(_train(one, one), _train(other, torch.compile(other, fullgraph=True)), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("strict", [False, True])
def test_a_module_is_exported(strict: bool) -> None:
    block = Block()
    x, padding = torch.randn(2, N, 8), torch.ones(2, N, dtype=torch.bool)
    program = torch.export.export(block, (x, padding), strict=strict)
    assert "tilewise.attention" in str(program.graph)
    assert_close(program.module()(x, padding), block(x, padding))


# -- shapes that change ------------------------------------------------------------------------------------------------


def _count(function: Any, calls: list[tuple[Any, ...]]) -> int:
    """How often it is compiled for these calls; every result is checked."""
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(function, fullgraph=True, backend=counter)
    for given in calls:
        out = traced(*given)
        assert torch.equal(out, function(*given))
        out.sum().backward()
    return int(counter.frame_count)


def test_marked_lengths_compile_once() -> None:
    calls = [inputs(1, HEADS, n, D) for n in (5, 9, 2, 30, 7)]
    for x in (x for given in calls for x in given):
        torch._dynamo.mark_dynamic(x, 2)
    table = _tensor(4)
    assert _count(lambda q, k, v: tw.attention(q, k, v, causal=True, score=tw.relative(table)), calls) == 1


@pytest.mark.parametrize(
    ("function", "more"),
    [
        (lambda q, k, v, m: tw.attention(q, k, v, mask=m), lambda n: torch.randn(n, n, dtype=torch.float64)),
        (lambda q, k, v, m: tw.attention(q, k, v, mask=tw.document(m)), lambda n: torch.arange(n) // 3),
        (lambda q, k, v, m: tw.scaled_dot_product_attention(q, k, v, m), lambda n: torch.ones(n, n) > 0),
    ],
    ids=["mask", "document", "sdpa"],
)
def test_lengths_that_change_compile_twice(function: Any, more: Any) -> None:
    """Once for the first shape, once for all others."""
    calls = [(*inputs(1, HEADS, n, D), more(n)) for n in (5, 9, 2, 30, 7, 11, 6, 4, 3, 8)]
    assert _count(function, calls) == 2


def test_packed_lengths_that_change_compile_twice() -> None:
    def packed(*lengths: int) -> tuple[torch.Tensor, ...]:
        return (*inputs(sum(lengths), HEADS, D), torch.tensor([0, *np.cumsum(lengths)]))

    calls = [packed(3, 4), packed(5, 2, 7), packed(6, 6, 6, 6), packed(2, 0, 9), packed(3, 3, 3, 3, 3), packed(8, 8)]
    assert _count(lambda q, k, v, n: tw.attention_varlen(q, k, v, n, n, causal=True), calls) <= 3


@pytest.mark.parametrize("option", ["window", "softcap", "scale"])
def test_numbers_that_change_compile_again(option: str) -> None:
    make: dict[str, Callable[[Any], dict[str, Any]]] = {
        "window": lambda x: {"mask": tw.window(x)},
        "softcap": lambda x: {"score": tw.softcap(x)},
        "scale": lambda x: {"scale": x},
    }
    q, k, v = inputs(1, HEADS, N, D)
    numbers = (1, 2, 3, 4) if option == "window" else (1.0, 2.5, 3.0, 4.25)
    calls = [(q, k, v, x) for x in numbers]
    assert _count(lambda q, k, v, x: tw.attention(q, k, v, **make[option](x)), calls) >= len(numbers)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: {"mask": "causal()"}, "mask: expected an expression or an array"),
        (lambda: {"mask": tw.causal}, "mask: expected an expression or a tensor, got a function"),
        (lambda: {"score": tw.causal()}, "score: expected a number for each score"),
        (lambda: {"score": tw.bias(torch.zeros(3, 5))}, "bias: values must be for 6 queries, got 3"),
        (lambda: {"sinks": torch.zeros(7)}, "sinks: expected shape"),
        (lambda: {"kernel": "cpp"}, "kernel: expected one of"),
        (lambda: {"mask": Q * 2**28 * K > 0}, "beyond 32 bits"),
    ],
)
def test_mistakes_are_told_when_compiling(options: Any, message: str) -> None:
    q, k, v = inputs(1, HEADS, N, D)
    with pytest.raises((TorchRuntimeError, Unsupported), match=message):
        compiled(lambda: tw.attention(q, k, v, **options()))()


def test_wrong_lengths_are_told_when_running() -> None:
    q, k, v = inputs(N, HEADS, D)
    run = compiled(lambda n: tw.attention_varlen(q, k, v, n, n))
    run(torch.tensor([0, 2, 6]))
    with pytest.raises(ValueError, match="lengths_q: expected cumulative lengths that rise from 0 to 6"):
        run(torch.tensor([0, 9, 6]))


def test_text_is_parsed_outside() -> None:
    q, k, v = inputs(1, HEADS, N, D)
    with pytest.raises(Unsupported, match="parse the text outside the compiled function"):
        compiled(lambda: tw.attention(q, k, v, mask=tw.parse("causal()")))()
    mask = tw.parse("causal() & window(2)")
    assert_same(lambda q, k, v: tw.attention(q, k, v, mask=mask), q, k, v)
