"""Calls like ones before: only launched, and the same as those that are looked at anew. By Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest

import tilewise as tw
from tilewise.linear import dispatch

torch = pytest.importorskip("torch")
TRITON = dispatch.kernel("triton")
pytestmark = pytest.mark.skipif(TRITON.unavailable() is not None, reason=str(TRITON.unavailable()))


@pytest.fixture(params=["one segment", "segments"])
def repeated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls on a CPU are repeated as those on a GPU are; how many there were."""
    from tilewise.linear.kernels.triton import call
    from tilewise.linear.kernels.triton.tape import Tape
    from tilewise.linear.pytorch import repeat
    from tilewise.sharing import Kept

    monkeypatch.setattr(repeat.ready, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(repeat, "_known", Kept(8))
    if request.param == "segments":
        monkeypatch.setattr(call, "segment_rows", lambda n, chunk, programs, slots: 2 * chunk)
    again, calls = Tape.again, []
    monkeypatch.setattr(Tape, "again", lambda self, *given: calls.append(len(given)) or again(self, *given))
    return calls


def _tensors(seed: int, heads_k: int = 2) -> list[Any]:
    made = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, heads, 40, 16, generator=made).requires_grad_() for heads in (2, heads_k, heads_k)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"normalize": False, "feature_map": "identity", "scale": 0.5}, {"causal": False}]
)
def test_other_tensors_that_lie_the_same(repeated: list[int], options: dict[str, Any]) -> None:
    for seed in range(2):
        q, k, v = _tensors(seed, heads_k=2 - seed if options else 2)
        d_out = torch.randn(1, 2, 40, 16)
        out = tw.linear_attention(q, k, v, kernel="triton", **options)
        grads = torch.autograd.grad(out, (q, k, v), d_out)
        before = len(repeated)
        want, _ = tw.linear_attention(q, k, v, kernel="triton", return_state=True, **options)
        wanted = torch.autograd.grad(want, (q, k, v), d_out)
        assert before == len(repeated) == 2 * (seed + 1)  # the operator repeats nothing
        assert torch.equal(out, want)
        for grad, expected in zip(grads, wanted, strict=True):
            assert torch.equal(grad, expected)


@pytest.mark.parametrize("options", [{}, {"feature_map": "identity", "normalize": False}, {"causal": False}], ids=str)
def test_rows_that_are_made_ready_belong_to_a_call(
    repeated: list[int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewise.linear.kernels.triton import call
    from tilewise.linear.kernels.triton.tape import Tape

    tapes, finished = [], Tape.finished
    monkeypatch.setattr(call, "LARGE", 0)
    monkeypatch.setattr(Tape, "finished", lambda self, *made: tapes.append(self) or finished(self, *made))
    for seed in range(2):
        given = [x.detach().bfloat16().requires_grad_() for x in _tensors(seed)]
        out = tw.linear_attention(*given, kernel="triton", **options)
        want, _ = tw.linear_attention(*given, kernel="triton", return_state=True, **options)
        found, wanted = (torch.autograd.grad(x, given, out.detach()) for x in (out, want))
        assert all(torch.equal(x, y) for x, y in zip((out, *found), (want, *wanted), strict=True))
    kept = [x for tape in tapes for launch in tape._launches for x in launch.args if isinstance(x, torch.Tensor)]
    assert len(repeated) == 4 and {x.dtype for x in kept} == {torch.int32}  # tables of segments


@pytest.mark.usefixtures("repeated")
def test_gradients_that_are_expanded_and_no_second_ones() -> None:
    q, k, v = _tensors(0)
    (d_q,) = torch.autograd.grad(tw.linear_attention(q, k, v, kernel="triton").sum(), q, create_graph=True)
    want, _ = tw.linear_attention(q, k, v, kernel="triton", return_state=True)
    assert torch.equal(d_q, torch.autograd.grad(want.sum(), q)[0])
    with pytest.raises(NotImplementedError, match="first derivatives alone"):
        d_q.sum().backward()


def test_one_tensor_three_times_and_then_three(repeated: list[int]) -> None:
    q, k, v = _tensors(0)
    tw.linear_attention(q, q, q, kernel="triton").sum().backward()
    out = tw.linear_attention(q, k, v, kernel="triton")
    grads = torch.autograd.grad(out, (q, k, v), out.detach())
    want, _ = tw.linear_attention(q, k, v, kernel="triton", return_state=True)
    assert len(repeated) == 4 and torch.equal(out, want)
    for grad, expected in zip(grads, torch.autograd.grad(want, (q, k, v), out.detach()), strict=True):
        assert torch.equal(grad, expected)


def _grads(qkv: Any, d_out: Any, return_state: bool = False) -> Any:
    """Of tensors with gaps between their rows. The operator keeps states, and is not repeated."""
    out = tw.linear_attention(*qkv.split(16, -1), kernel="triton", return_state=return_state)
    return torch.autograd.grad(out[0] if return_state else out, qkv, d_out)[0]


def test_saved_tensors_that_come_back_otherwise(repeated: list[int]) -> None:
    """As from main memory, to which torch.autograd.graph.save_on_cpu takes them without the gaps."""
    qkv, d_out = torch.randn(1, 2, 40, 48, requires_grad=True), torch.randn(1, 2, 40, 16)
    want = _grads(qkv, d_out, return_state=True)
    assert torch.equal(_grads(qkv, d_out), want)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        assert torch.equal(_grads(qkv, d_out), want)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.mT.contiguous(), lambda x: x.mT):
        assert torch.equal(_grads(qkv, d_out), want)
    assert len(repeated) == 6


def test_gradients_of_several_at_once_and_of_negated_ones(repeated: list[int]) -> None:
    q, k, v = _tensors(0)
    d_out = torch.randn(2, 1, 2, 40, 16)
    out = tw.linear_attention(q, k, v, kernel="triton")
    want = [torch.autograd.grad(out, (q, k, v), each, retain_graph=True) for each in d_out]
    got = torch.autograd.grad(out, (q, k, v), d_out, is_grads_batched=True, retain_graph=True)
    negated = torch.autograd.grad(out, (q, k, v), torch._neg_view(d_out[0]))
    assert len(repeated) == 3  # these two go by the operator
    for i in range(3):
        assert torch.equal(got[i], torch.stack([want[0][i], want[1][i]]))
        assert torch.equal(negated[i], -want[0][i])


@pytest.mark.usefixtures("repeated")
def test_calls_differ_by_which_tensor_is_not_aligned() -> None:
    from tilewise.linear.pytorch import repeat

    memory = torch.zeros(1 * 2 * 40 * 16 + 1)
    aligned, other = memory[:-1].view(1, 2, 40, 16), memory[1:].view(1, 2, 40, 16)
    options = dict.fromkeys(("decay", "initial_state", "lengths"), None)
    options |= {"feature_map": "elu", "causal": True, "normalize": True, "scale": 1.0}
    given = [(aligned, aligned, aligned), (other, aligned, aligned), (aligned, other, aligned)]
    assert len({repeat._key(*each, "triton", **options) for each in given}) == 3


def test_what_is_not_repeated(repeated: list[int]) -> None:
    q, k, v = _tensors(0)
    with torch.no_grad():
        tw.linear_attention(q, k, v, kernel="triton", decay=-0.1)
        tw.linear_attention(q, k, v, kernel="numpy")
        tw.linear_attention(q[0], k[0], v[0], kernel="triton")
        assert not repeated
        tw.linear_attention(q, k, v, kernel="triton", feature_map=tw.exp(tw.S))
        assert repeated == [3]
    with pytest.raises(ValueError, match="k: expected 40 keys"):
        tw.linear_attention(q, k[:, :, 1:], v[:, :, 1:], kernel="triton")


def test_a_tape_holds_no_tensors(repeated: list[int]) -> None:
    import gc
    import weakref

    q, k, v = (x.detach() for x in _tensors(0))
    out = tw.linear_attention(q, k, v, kernel="triton")
    gone = [weakref.ref(x) for x in (q, k, v, out)]
    del q, k, v, out
    gc.collect()
    assert [x() for x in gone] == [None] * 4 and repeated
