"""The registered operators: PyTorch's own checks, gradients by differences, vmap, torch.func, autocast."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import tilewise as tw
from tests.torch_cases import LENGTHS, NAMES, Example, example
from tilewise import validate, wire
from tilewise.cases import conformance
from tilewise.pytorch.operator import attention, attention_backward


def _operands(case: Example) -> tuple[Any, ...]:
    """What the operator is called with."""
    if case.call is tw.attention:
        call = validate.outline(*case.operands, **case.options)
    else:
        call = validate.outline_varlen(*case.operands, *LENGTHS, **case.options)
    line, given = wire.encode(call.spec, "auto")
    tensors = [x if isinstance(x, torch.Tensor) else tw.arrays.as_tensor(x) for x in given]
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))  # leaves: packed ones come as views
    return q, k, v, tensors, call.spec.sinks, line


# -- PyTorch's checks: schema, fake tensors, autograd, ahead-of-time compilation with dynamic shapes -------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck's own: it looks at tensors that are no leaves
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["full", "all at once", "t5", "document per batch", "packed bias by sequence"])
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    torch.library.opcheck(attention, _operands(example(name, dtype)))


@pytest.mark.parametrize("name", ["full", "all at once", "packed bias by sequence"])
def test_opcheck_backward(name: str) -> None:
    q, k, v, arrays, sinks, line = _operands(example(name))
    wanted = [i for i in wire.score_arrays(line) if arrays[i].requires_grad]
    tensors = [None if x is None else x.detach() for x in (q, k, v, sinks, *arrays)]
    operands = (*tensors[:3], tensors[4:], tensors[3], line)
    out, lse = attention(*operands)
    for d_lse in (None, torch.ones_like(lse)):
        torch.library.opcheck(attention_backward, (*operands, out, lse, torch.ones_like(out), d_lse, wanted))


@pytest.mark.parametrize("stored", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3)])
@pytest.mark.parametrize("size", [(2, 3, 5, 4), (1, 3, 5, 4), (2, 1, 5, 4), (2, 3, 1, 1), (2, 3, 0, 4), (0, 3, 5, 4)])
def test_strides_are_as_the_fake_operator_says(size: tuple[int, ...], stored: tuple[int, ...]) -> None:
    q = torch.randn([size[i] for i in stored]).permute(*(stored.index(i) for i in range(4)))
    assert q.shape == torch.Size(size)
    v = torch.randn(*size[:3], 7)
    line = json.dumps({"kernel": "auto", "scale": 1.0})
    real = attention(q, q, v, [], None, line)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = attention(mode.from_tensor(q), mode.from_tensor(q), mode.from_tensor(v), [], None, line)
    for have, said in zip(real, fake, strict=True):
        assert (have.shape, have.dtype, have.stride()) == (said.shape, said.dtype, said.stride())


def test_kernels_get_contiguous_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever autograd, vmap or a caller of the operator hands over: the gradient of a sum is one number, expanded."""
    from tilewise.kernels.numpy import NumpyKernel

    steps: list[int] = []
    for name in ("forward", "backward"):
        method = getattr(NumpyKernel, name)

        def watched(self: Any, spec: Any, *given: Any, method: Any = method) -> Any:
            steps.extend(x.stride(-1) for x in given if isinstance(x, torch.Tensor))
            return method(self, spec, *given)

        monkeypatch.setattr(NumpyKernel, name, watched)
    q = torch.randn(1, 2, 4, 5).transpose(2, 3).requires_grad_()
    out, lse = attention(q, q, q, [], None, json.dumps({"kernel": "numpy", "scale": 1.0}))
    (out.sum() + lse.sum()).backward()
    assert len(steps) == 3 + 5
    assert set(steps) == {1}


def test_out_is_stored_as_a_projection_leaves_q() -> None:
    q = torch.randn(2, 5, 3, 4).transpose(1, 2)
    out = tw.attention(q, q, q)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("change", "said", "message"),
    [
        ({0: torch.randn(3, 4)}, {}, r"q: expected \(batch, heads, n, d\)"),
        ({0: torch.randn(1, 3, 4, 4)}, {}, "k: its heads must divide"),
        ({2: torch.randn(1, 2, 9, 4)}, {}, "v: expected 4 keys"),
        ({4: torch.randn(3)}, {}, "sinks: expected shape"),
        ({}, {"mask": "load(a0, Q, K)"}, "unknown name 'a0'"),
        ({}, {"kernel": "cpp"}, "kernel: expected one of"),
        ({3: [torch.ones(2)]}, {"mask": "load(a0, K) > 0", "mask arrays": [0]}, "expected 4 along axis 0"),
        ({3: [torch.ones(4, device="meta")]}, {"mask": "load(a0, K) > 0", "mask arrays": [0]}, "must be on cpu"),
        ({3: [torch.tensor([0, 9]), torch.tensor([0, 4])]}, {"packed": True}, "lengths_q: expected cumulative lengths"),
    ],
)  # fmt: skip
def test_the_operator_checks_its_operands(change: dict[int, object], said: dict[str, object], message: str) -> None:
    """Who calls torch.ops.tilewise.attention himself is told what is wrong, and nothing outside an array is read."""
    good = [torch.randn(1, 2, 4, 4)] * 3 + [[], None, json.dumps({"kernel": "auto", "scale": 1.0})]
    attention(*good)
    change = {5: json.dumps({"kernel": "auto", "scale": 1.0, **said}), **change}
    with pytest.raises(ValueError, match=message):
        attention(*(change.get(i, x) for i, x in enumerate(good)))


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_differences(name: str) -> None:
    """Every variant that has a case, and every variant has one: a new one is checked here without a word."""
    case = example(name)
    assert torch.autograd.gradcheck(case.results, (*case.operands, *case.learned))


@pytest.mark.parametrize("name", NAMES)
def test_every_learned_tensor_gets_a_gradient(name: str) -> None:
    case = example(name)
    out, _ = case.results()
    (out * torch.randn_like(out)).sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (*case.operands, *case.learned))


def test_a_float_array_that_a_mask_reads_has_no_gradient() -> None:
    limit = torch.tensor([1.5, 2.5], requires_grad=True)
    q = torch.randn(1, 2, 4, 3, requires_grad=True)
    tw.attention(q, q, q, mask=abs(tw.Q - tw.K) < tw.load(limit, tw.H)).sum().backward()
    assert q.grad is not None
    assert limit.grad is None


def test_an_array_read_twice_has_one_gradient() -> None:
    table = torch.randn(3, dtype=torch.float64, requires_grad=True)
    q = torch.randn(1, 1, 5, 2, dtype=torch.float64)
    twice = tw.relative(table) >> tw.relative(table, signed=True)
    assert torch.autograd.gradcheck(lambda _: tw.attention(q, q, q, score=twice), table)


def test_one_tensor_at_two_places_has_a_gradient_at_each() -> None:
    """As operands of the operator; expressions never name an array twice."""
    bias = torch.randn(4, 4, dtype=torch.float64)
    q = torch.randn(1, 1, 4, 2, dtype=torch.float64)
    line = json.dumps(
        {"kernel": "auto", "scale": 1.0, "score": "S + load(a0, Q, K) * load(a1, K, Q)", "score arrays": [0, 1]}
    )
    first, second = (bias.clone().requires_grad_() for _ in range(2))
    attention(q, q, q, [first, second], None, line)[0][0, 0, 1].sum().backward()
    out, lse = attention(q, q, q, [bias, bias], None, line)
    d_out = torch.zeros_like(out)
    d_out[0, 0, 1] = 1
    *_, (d_first, d_second) = attention_backward(q, q, q, [bias, bias], None, line, out, lse, d_out, None, [0, 1])
    assert_close(d_first, first.grad)
    assert_close(d_second, second.grad)
    assert not torch.allclose(d_first, d_second)


def test_a_second_derivative_is_refused() -> None:
    q, k, v = (torch.randn(1, 2, 4, 3, requires_grad=True) for _ in range(3))
    (first,) = torch.autograd.grad(tw.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives alone"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match="first derivatives alone"):
        torch.func.grad(lambda x: torch.func.grad(lambda y: tw.attention(y, k, v).sum())(x).sum())(q.detach())


# PyTorch's own warnings, of what it imports for it.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_forward_mode_is_refused_and_not_dropped() -> None:
    """The derivative of an operator's result would be 0 otherwise, whatever is a derivative's own: q, or a bias."""
    q, bias = torch.randn(1, 2, 4, 3), torch.randn(4, 4)
    tw.attention(q, q, q, score=tw.bias(bias))  # a call like the next ones
    with forward_ad.dual_level():
        tw.attention(q, q, q, score=tw.bias(bias))  # without one
        for of_q, of_bias in ((torch.ones_like(q), None), (None, torch.ones_like(bias))):
            x = q if of_q is None else forward_ad.make_dual(q, of_q)
            y = bias if of_bias is None else forward_ad.make_dual(bias, of_bias)
            with pytest.raises(tw.Unsupported, match="forward mode"):
                tw.attention(x, q, q, score=tw.bias(y))
    with pytest.raises(tw.Unsupported, match="forward mode"):
        torch.func.jvp(lambda x: tw.attention(x, q, q), (q,), (q,))


# -- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [c for c in conformance() if c.shape in ("ragged", "packed", "grouped")], ids=lambda case: case.name
)
def test_tensors_give_the_bits_that_arrays_give(case: tw.cases.Case) -> None:
    """Nothing is lost on the way through text and back: forward, backward, every variant, every type."""
    inputs = case.inputs()
    call = inputs.call()
    options = {**inputs.options, **dict(zip(("lengths_q", "lengths_k"), inputs.lengths or (), strict=False))}
    want, pull = tw.attention_vjp(inputs.q, inputs.k, inputs.v, **options)
    tensors = [tw.arrays.as_tensor(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    options = {name: torch.from_numpy(x) if name == "sinks" else x for name, x in inputs.options.items()}
    if inputs.lengths is None:
        out = tw.attention(*tensors, **options)
    else:
        out = tw.attention_varlen(*tensors, *inputs.lengths, **options)
    d_out = tw.arrays.narrow(np.random.default_rng(0).standard_normal(out.shape), call.shape.dtype)
    out.backward(tw.arrays.as_tensor(d_out))
    grads = pull(d_out)
    for tensor, array in zip((out, *(x.grad for x in tensors)), (want, grads.q, grads.k, grads.v), strict=True):
        assert np.array_equal(tw.arrays.as_numpy(tensor), tw.arrays.as_numpy(array))


def _read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x,
        _read_only,
        lambda x: x[::-1, ::-1],
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: tw.arrays.narrow(x, "bfloat16"),
        lambda x: _read_only(tw.arrays.narrow(x, "bfloat16")),
        lambda x: x.astype(np.float16),
    ],
    ids=["plain", "read-only", "backwards", "broadcast", "bfloat16", "read-only bfloat16", "float16"],
)
def test_numpy_arrays_go_with_tensors(change: object) -> None:
    """A variant may read NumPy arrays of any kind; nothing is written to them and no warning is heard."""
    values = change(np.random.default_rng(0).standard_normal((5, 6)))  # type: ignore[operator]
    before = np.array(values)
    arrays = [np.random.default_rng(i).standard_normal((1, 2, n, 4)) for i, n in enumerate((5, 6, 6))]
    got = tw.attention(*(torch.from_numpy(x) for x in arrays), score=tw.bias(values))
    assert np.array_equal(got.numpy(), tw.attention(*arrays, score=tw.bias(values)))
    assert np.array_equal(before, values)


def test_expressions_of_any_length_pass() -> None:
    """Longer than the text that the parser takes from a stranger."""
    score = tw.S
    for i in range(9000):
        score = score + (0.001 * i)
    assert len(repr(score)) > tw.text.MAX_LENGTH
    q = torch.randn(1, 1, 3, 2, dtype=torch.float64)
    assert torch.equal(
        tw.attention(q, q, q, score=score), torch.from_numpy(tw.attention(*[q.numpy()] * 3, score=score))
    )


# -- what is kept between calls ---------------------------------------------------------------------------------------


def test_a_new_array_of_the_same_kind_reads_nothing_again() -> None:
    q = torch.randn(1, 2, 6, 4)
    tw.attention(q, q, q, score=tw.relative(torch.randn(3)))
    read = wire._template.cache_info().misses
    for _ in range(3):
        tw.attention(q, q, q, score=tw.relative(torch.randn(3)))
    assert wire._template.cache_info().misses == read
    tw.attention(q, q, q, score=tw.relative(torch.randn(4)))
    assert wire._template.cache_info().misses == read + 1


def test_lengths_may_be_on_another_device() -> None:
    """The host reads them; a loaded array, which a kernel reads, may not."""
    q, lengths = torch.empty(1, 2, 12, 4, device="meta"), torch.tensor([0, 5, 12])
    packed = {"kernel": "auto", "scale": 1.0, "packed": True}
    out, _ = attention(q, q, q, [lengths, lengths], None, json.dumps(packed))
    assert out.device == q.device
    line = json.dumps({**packed, "score": "S + load(a0, B)", "score arrays": [0]})
    with pytest.raises(ValueError, match="must be on meta, as q is, got cpu"):
        attention(q, q, q, [torch.ones(2), lengths, lengths], None, line)


def test_lengths_are_not_part_of_what_is_kept() -> None:
    q = torch.randn(12, 2, 4)
    for lengths in ([0, 12], [0, 5, 12], [0, 0, 7, 12]):
        out = tw.attention_varlen(q, q, q, torch.tensor(lengths), torch.tensor(lengths), causal=True)
        want = tw.attention_varlen(*[q.numpy()] * 3, lengths, lengths, causal=True)
        assert np.array_equal(out.numpy(), want)
    with pytest.raises(ValueError, match="lengths_k: expected cumulative lengths that rise from 0 to 12"):
        tw.attention_varlen(q, q, q, torch.tensor([0, 5, 12]), torch.tensor([0, 13, 12]), causal=True)


def test_no_array_is_kept_alive() -> None:
    import gc
    import weakref

    bias = torch.randn(6, 6)
    gone = weakref.ref(bias)
    q = torch.randn(1, 1, 6, 2)
    tw.attention(q, q, q, score=tw.bias(bias))
    del bias
    gc.collect()
    assert gone() is None


# -- vmap and torch.func ----------------------------------------------------------------------------------------------


def _examples(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def test_vmap_joins_examples_to_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.kernels.numpy import NumpyKernel

    calls: list[int] = []
    forward = NumpyKernel.forward
    monkeypatch.setattr(NumpyKernel, "forward", lambda self, *a, **o: calls.append(1) or forward(self, *a, **o))
    q, k, v = _examples(3, 2, 2, 5, 4)
    got = torch.vmap(
        lambda *x: tw.attention(*x, causal=True, score=tw.alibi(2), kernel="numpy"), in_dims=(0, 0, 0), out_dims=1
    )(q, k, v)
    assert len(calls) == 1
    want = torch.stack(
        [tw.attention(*x, causal=True, score=tw.alibi(2), kernel="numpy") for x in zip(q, k, v, strict=True)], 1
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("in_dims", "function"),
    [
        ((0, 0, 0, 0), lambda q, k, v, m: tw.attention(q, k, v, mask=m)),
        ((0, None, None, None), lambda q, k, v, m: tw.attention(q, k[0], v[0], mask=m[0])),
        ((0, 0, 0, None), lambda q, k, v, m: tw.attention(q, k, v, score=tw.S + tw.load(m[0, 0, :2], tw.B))),
        ((4, 1, 2, 0), lambda q, k, v, m: tw.attention(q, k, v, mask=m)),
        ((0, 0, 0, 0), lambda q, k, v, m: tw.attention(q, k, v, sinks=m[0, :2])),
        ((0, 0, 0, 0), lambda q, k, v, m: tw.attention(q[0, 0], k[0, 0], v[0, 0], mask=m)),
        ((0, 0, 0, 0), lambda q, k, v, m: tw.attention_varlen(q[0], k[0], v[0], [0, 1, 2], [0, 2, 2], sinks=m[0])),
    ],
    ids=["masks", "one of the operands", "by batch", "any dimension", "sinks", "matrices", "packed"],
)
def test_vmap_is_a_loop(in_dims: tuple[int | None, ...], function: object) -> None:
    q, k, v = _examples(3, 2, 2, 5, 4)
    given = [q, k, v, _examples(3, 5, 5)[0]]
    mapped = [x if dim is None else x.movedim(0, dim) for x, dim in zip(given, in_dims, strict=True)]
    got = torch.vmap(function, in_dims=in_dims)(*mapped)  # type: ignore[arg-type]
    want = [
        function(*(x if dim is None else x[i] for x, dim in zip(given, in_dims, strict=True)))  # type: ignore[operator]
        for i in range(3)
    ]
    assert_close(got, torch.stack(want), rtol=1e-12, atol=1e-12)


def test_vmap_within_vmap() -> None:
    q, k, v = _examples(3, 2, 2, 5, 4)
    got = torch.vmap(torch.vmap(lambda *x: tw.attention(*x, causal=True)))(q, k, v)
    assert_close(got, torch.stack([tw.attention(*x, causal=True) for x in zip(q, k, v, strict=True)]))


def test_vmap_over_nothing() -> None:
    q = torch.randn(0, 2, 2, 5, 4)
    assert torch.vmap(lambda x: tw.attention(x, x, x))(q).shape == q.shape
    with pytest.raises(ValueError, match="expected at least one example"):
        torch.vmap(lambda x, m: tw.attention(x, x, x, mask=m))(q, torch.randn(0, 5, 5))


def test_gradients_of_each_example() -> None:
    """torch.vmap(torch.func.grad(...)): a table that all examples share has a gradient for each."""
    q, k, v = _examples(3, 2, 2, 5, 4)
    table, sinks = torch.randn(3, dtype=torch.float64), torch.randn(2, dtype=torch.float64)

    def loss(*x: torch.Tensor) -> torch.Tensor:
        out, lse = tw.attention(*x[:3], causal=True, score=tw.relative(x[3]), sinks=x[4], return_lse=True)
        return out.pow(2).sum() + lse.sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2, 3, 4))
    got = torch.vmap(gradient, in_dims=(0, 0, 0, None, None))(q, k, v, table, sinks)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, table, sinks)]
    for i in range(3):
        example = [*(x[i] for x in leaves[:3]), *leaves[3:]]
        for have, want in zip(got, torch.autograd.grad(loss(*example), leaves), strict=True):
            assert_close(have[i], want[i] if want.shape[0] == 3 and want.ndim > 1 else want)


# -- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_as_in_sdpa(dtype: torch.dtype) -> None:
    q, k, v = (x.float().requires_grad_() for x in _examples(1, 2, 5, 4))
    with torch.autocast("cpu", dtype=dtype):
        ours, theirs = tw.attention(q, k, v), scaled_dot_product_attention(q, k, v)
        mixed = tw.attention(q.to(dtype), k, v.to(dtype))
        packed = tw.attention_varlen(q[0], k[0].to(dtype), v[0], [0, 2], [0, 2])
        doubles = tw.attention(q.double(), k.double(), v.double())
    assert ours.dtype == theirs.dtype == mixed.dtype == packed.dtype == dtype
    assert doubles.dtype == torch.float64
    assert torch.equal(ours, tw.attention(q.to(dtype), k.to(dtype), v.to(dtype)))
    assert torch.equal(ours, mixed)
    assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    ours.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    with pytest.raises(TypeError, match="k: expected bfloat16 as q is"):
        tw.attention(q.bfloat16(), k, v)
