"""The PyTorch operators tilewise::linear_attention and tilewise::linear_attention_backward.

`spec` is a line of text that says everything but the tensors; q, k, v are (batch, heads, n, d), decay (batch, key
heads, n). What a call has not (a decay, an initial state) has a gradient without numbers.
"""

from __future__ import annotations

import json
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from tilewise import text, validate
from tilewise.arrays import stored_as
from tilewise.expr import Expr
from tilewise.linear import dispatch
from tilewise.linear.spec import Done, Linear, LinearGrads, Problem
from tilewise.linear.state import LinearState
from tilewise.linear.validate import check_state, settle
from tilewise.pytorch.vmap import one_by_one

_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? kv, Tensor? z, Tensor? log_decay, Tensor? lengths, str spec"
)
_RESULTS = "Tensor out, Tensor norm, Tensor kv_after, Tensor z_after, Tensor log_decay_after"
_D_RESULTS = "Tensor d_out, Tensor? d_kv_after, Tensor? d_z_after, Tensor? d_log_decay_after"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define(f"linear_attention({_OPERANDS}) -> ({_RESULTS})", tags=_TAGS)
_library.define(
    f"linear_attention_backward({_OPERANDS}, {_RESULTS}, {_D_RESULTS})"
    " -> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_decay, Tensor d_kv, Tensor d_z, Tensor d_log_decay)",
    tags=_TAGS,
)
linear_attention = torch.ops.tilewise.linear_attention.default
linear_attention_backward = torch.ops.tilewise.linear_attention_backward.default


def encode(spec: Linear, kernel: str) -> str:
    """All of it but lengths, which are a tensor."""
    return json.dumps({
        "kernel": kernel, "feature": repr(spec.feature), "causal": spec.causal, "normalize": spec.normalize,
        "scale": spec.scale,
    })  # fmt: skip


@lru_cache(maxsize=256)
def _decode(line: str) -> tuple[str, Linear]:
    said = json.loads(line)
    feature: Expr = text.read(said.pop("feature"), [])
    return said.pop("kernel"), Linear(feature, **said)


# -- numbers ----------------------------------------------------------------------------------------------------------


def _problem(
    q: Tensor, k: Tensor, v: Tensor, decay: Any, kv: Any, z: Any, log_decay: Any, lengths: Any, line: str
) -> tuple[dispatch.Kernel, Problem]:
    """Who computes the call, and what it is; checked, since an operator may be called by anyone."""
    kernel, spec = _decode(line)
    q, k, v = (_rows(x) for x in (q, k, v))
    validate.check_operands(q, k, v, None, [])
    state = None if kv is None else LinearState(kv, z, log_decay)
    spec = Linear(spec.feature, spec.causal, spec.normalize, spec.scale, lengths)
    problem = Problem(spec, q, k, v, decay, None)
    problem = settle(Problem(spec, q, k, v, decay, check_state("initial_state", state, problem)))
    return dispatch.resolve(kernel, problem.shape), problem


def _forward(*operands: Any) -> tuple[Tensor, ...]:
    system, problem = _problem(*operands)
    done = system.forward(problem)
    out = _stored(done.out, *stored_as(problem.q, problem.v))
    return out, *(_contiguous(x) for x in (done.norm, *done.state))


def _backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Any, kv: Any, z: Any, log_decay: Any, lengths: Any, spec: str,
    out: Tensor, norm: Tensor, kv_after: Tensor, z_after: Tensor, log_decay_after: Tensor,
    d_out: Tensor, d_kv: Any, d_z: Any, d_log_decay: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    system, problem = _problem(q, k, v, decay, kv, z, log_decay, lengths, spec)
    after = LinearState(kv_after, z_after, log_decay_after)
    d_state = None
    if not d_kv is d_z is d_log_decay is None:
        given = zip((d_kv, d_z, d_log_decay), after, strict=True)
        d_state = LinearState(*(torch.zeros_like(x) if d is None else d.contiguous() for d, x in given))
    grads = system.backward(problem, Done(out, norm, after), _rows(d_out), d_state)
    return tuple(_contiguous(x) for x in _side_by_side(grads, q))


def _side_by_side(grads: LinearGrads, q: Tensor) -> list[Tensor]:
    nothing = q.new_empty(0)
    initial = grads.initial_state
    return [
        grads.q, grads.k, grads.v, nothing if grads.decay is None else grads.decay,
        *((nothing,) * 3 if initial is None else initial),
    ]  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    return x if x.shape[-1] < 2 or x.stride(-1) == 1 else x.contiguous()


def _contiguous(x: Tensor) -> Tensor:
    return x.contiguous() if x.numel() else x.new_empty(x.shape)


def _stored(x: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """With the strides that the operator says, on which compiled code relies."""
    return x if x.stride() == strides else x.new_empty_strided(sizes, strides).copy_(x)


# -- shapes without numbers -------------------------------------------------------------------------------------------


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Any, kv: Any, z: Any, log_decay: Any, lengths: Any, spec: str
) -> tuple[Tensor, ...]:
    (batch, heads, n, d), heads_k, d_v = q.shape, k.shape[1], v.shape[3]
    states = batch if lengths is None else lengths.shape[0] - 1
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    normalize = _decode(spec)[1].normalize
    sizes = (batch, heads, n if normalize else 0), (states, heads_k, d, d_v), (states, heads_k, d), (states, heads_k)
    return q.new_empty_strided(*stored_as(q, v)), *(q.new_empty(size, dtype=wide) for size in sizes)


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, decay: Any, kv: Any, z: Any, log_decay: Any, *_: Any) -> Any:
    others = (q.new_empty(0 if x is None else x.shape, dtype=None if x is None else x.dtype) for x in
              (decay, kv, z, log_decay))  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *others


# -- gradients --------------------------------------------------------------------------------------------------------

_TENSORS = 7  # of the operands: q, k, v, decay, kv, z, log_decay


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.spec = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_out: Any, d_norm: Any, *d_state: Any, backward: Any = linear_attention_backward) -> Any:
    """One for each operand. norm is of the operator alone: no caller sees it, and so it has no gradient."""
    *operands, out, norm, kv, z, log_decay = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    grads = backward(*operands, ctx.spec, out, norm, kv, z, log_decay, d_out, *d_state)
    given = zip(operands[:_TENSORS], grads, strict=True)
    return (*(None if x is None else grad for x, grad in given), None, None)


def no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "tilewise linear attention has first derivatives alone, and a second one was asked for (create_graph=True, a "
        "gradient penalty ...); write that part with PyTorch's own operations"
    )


# -- torch.func: its transforms take autograd functions with a setup_context, not operators ---------------------------


class Transformed(torch.autograd.Function):  # type: ignore[misc]
    """Linear attention under torch.func.grad, torch.vmap and the like."""

    generate_vmap_rule = True
    setup_context = staticmethod(_remember)

    @staticmethod
    def forward(*operands: Any) -> Any:
        return linear_attention(*operands)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _gradients(ctx, *grads, backward=_TransformedBackward.apply)


class _TransformedBackward(torch.autograd.Function):  # type: ignore[misc]
    generate_vmap_rule = True
    backward = staticmethod(no_second_derivative)

    @staticmethod
    def forward(*operands: Any) -> Any:
        return linear_attention_backward(*operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """To refuse, nothing need be remembered."""


def _mapped(operator: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """Under vmap, one example after the other."""
    results = one_by_one(operator, info.batch_size, in_dims, args)
    return results, (0,) * len(results)


_library.impl("linear_attention", _forward, "CompositeExplicitAutograd")
_library.impl("linear_attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::linear_attention", _fake_forward, lib=_library)
torch.library.register_fake("tilewise::linear_attention_backward", _fake_backward, lib=_library)
torch.library.register_autograd("tilewise::linear_attention", _gradients, setup_context=_remember, lib=_library)
torch.library.register_autograd("tilewise::linear_attention_backward", no_second_derivative, lib=_library)
for _operator in (linear_attention, linear_attention_backward):
    torch.library.register_vmap(_operator.name(), partial(_mapped, _operator), lib=_library)
