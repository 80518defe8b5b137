"""Calls on GPU tensors like ones before: checked and compiled once, then only launched. See tilewise/pytorch/repeat.py.

For calls whose state nobody asks for, without decay and without an initial state; all others go by the operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from tilewise.expr import Expr
from tilewise.kernels.tensors import device_of
from tilewise.linear import dispatch
from tilewise.linear.kernels.triton import lies_well
from tilewise.linear.pytorch.operator import encode, linear_attention_backward
from tilewise.linear.spec import Done, Linear, Problem
from tilewise.linear.state import LinearState
from tilewise.linear.validate import outline
from tilewise.pytorch import ready
from tilewise.pytorch.ready import are_aligned, layout
from tilewise.pytorch.repeat import PLAIN, are_plain, is_watched
from tilewise.sharing import Kept

_CACHE_SIZE = 512


class Known:
    """A call that was checked, and its kernels' launches."""

    def __init__(self, problem: Problem, feature_map: Any) -> None:
        from tilewise.linear.kernels.triton import launch

        spec = problem.spec
        # Without tensors: what is kept lasts longer than a call.
        self._spec = Linear(spec.feature, spec.causal, spec.normalize, spec.scale, keeps_state=False)
        self.line = encode(self._spec, "triton")
        self._launch = launch
        self._held = feature_map  # which keys may name by its id: nothing else may get that
        with device_of(problem.q):
            self._tape = launch.forward_tape(Problem(self._spec, problem.q, problem.k, problem.v))
        self._backward: Kept[Any] = Kept(_CACHE_SIZE)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _Recorded.apply(self, q, k, v)
        return self.forward(q, k, v)[0]

    def forward(self, *given: Tensor) -> list[Any]:
        """out, norm, and the states before segments, if there are several."""
        with device_of(given[0]):
            return self._tape.again(*given)

    def backward(self, *given: Any) -> list[Tensor]:
        """d_q, d_k, d_v of q, k, v, out, norm, states, d_out. All are looked at: hooks that put saved tensors elsewhere
        meanwhile may bring them back so that they lie otherwise."""
        key = tuple(None if x is None else _place(x) for x in given)
        with device_of(given[0]):
            return self._backward.found(key, lambda: self._backward_tape(*given)).again(*given)  # type: ignore[no-any-return]

    def _backward_tape(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor, states: Any, d_out: Tensor
    ) -> Any:
        done = Done(out, norm, LinearState(None, None, None))
        return self._launch.backward_tape(Problem(self._spec, q, k, v), done, states, d_out)


class _Recorded(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, known: Known, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, norm, states = known.forward(q, k, v)
        ctx.known = known
        ctx.save_for_backward(q, k, v, out, norm, states)  # raises in backward if one was changed in place since
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        by_operator = torch.is_grad_enabled() or is_watched() or not are_plain(d_out) or is_legacy_batchedtensor(d_out)
        run: Any = _by_operator if by_operator else _backward
        return None, *run(ctx.known, *ctx.saved_tensors, d_out)


def _by_operator(
    known: Known, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor, states: Any, d_out: Tensor
) -> tuple[Tensor, ...]:
    """Where PyTorch has more to do than to compute: to refuse second derivatives, to go through several of d_out."""
    nothing, after = (None,) * 5, (q.new_empty(0),) * 3  # no gradient that is asked for depends on the state after all
    grads = linear_attention_backward(q, k, v, *nothing, known.line, out, norm, *after, d_out, None, None, None)
    return tuple(grads[:3])


def _backward(
    known: Known, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor, states: Any, d_out: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of sums come expanded from one number."""
    *rows, d_out = (x if lies_well(x) else x.contiguous() for x in (q, k, v, out, d_out))
    states = None if states is None else states.contiguous()
    return tuple(known.backward(*rows, norm.contiguous(), states, d_out))


# -- keys -------------------------------------------------------------------------------------------------------------

_known: Kept[Known | None] = Kept(_CACHE_SIZE)


def known(q: Any, k: Any, v: Any, kernel: Any, options: dict[str, Any]) -> Known | None:
    """What a call like this was found to be; None if it is no call to repeat, or no kernel system prepares it."""
    key = _key(q, k, v, kernel, **options)
    return None if key is None else _known.found(key, lambda: _make_known(q, k, v, kernel, options))


def _key(
    q: Any, k: Any, v: Any, kernel: Any, *, feature_map: Any, causal: Any, normalize: Any, decay: Any,
    initial_state: Any, scale: Any, lengths: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """All that a call depends on."""
    if not decay is initial_state is lengths is None:
        return None
    if type(q) not in PLAIN or q.device.type not in ready.DEVICES or is_watched():
        return None
    if type(kernel) is not str or type(causal) is not bool or type(normalize) is not bool or type(scale) is not float:
        return None  # 1 == True, and would be found in its place
    if not (are_plain(q, k, v) and q.dim() == k.dim() == v.dim() == 4):
        return None
    feature = id(feature_map) if type(feature_map) is Expr else feature_map if type(feature_map) is str else None
    if feature is None:
        return None
    return kernel, feature, causal, normalize, scale, _place(q), _place(k), _place(v)


def _place(x: Tensor) -> tuple[Any, ...]:
    """How a tensor lies. Triton's kernels differ by which of their arguments are aligned."""
    return are_aligned(x), *layout(x)


def _make_known(q: Tensor, k: Tensor, v: Tensor, kernel: str, options: dict[str, Any]) -> Known | None:
    problem = outline(q, k, v, **options).problem
    system = dispatch.resolve(kernel, problem.shape)
    is_empty = 0 in (q.numel(), v.numel())
    if system.name != "triton" or is_empty or not all(map(lies_well, (q, k, v))):
        return None
    return Known(problem, options["feature_map"])
