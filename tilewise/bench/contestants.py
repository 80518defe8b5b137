"""Who takes part: our kernel systems, and the peers that are installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tilewise import api, arrays, dispatch, validate
from tilewise.arrays import Array
from tilewise.bench.problem import Problem
from tilewise.bench.process import load
from tilewise.bench.refusal import RefusedError

OURS = "tilewise "
Outputs = tuple[Any, ...]  # (out,), or (out, d_q, d_k, d_v)


@dataclass(frozen=True, eq=False)
class Entry:
    """A contestant set up for a problem: its arrays are made, only the attention is left to do."""

    run: Callable[[Any], Outputs]  # takes the gradient of out, which a forward pass ignores
    put: Callable[[Array], Any]  # NumPy arrays as this contestant takes them
    held_bytes: int = 0  # a dense mask or bias that only this contestant needs: made untimed, counted as memory


@dataclass(frozen=True, eq=False)
class Contestant:
    name: str
    enter: Callable[[Problem], Entry]  # or raises RefusedError
    ours: bool = False
    needs: Callable[[Problem], int] = lambda problem: 0  # main memory it is known to take beyond the inputs


def installed(kernel: str | None = None) -> tuple[list[Contestant], dict[str, str]]:
    """Everyone who can take part here, ours first; and who cannot, with the reason. kernel: only that one of ours."""
    from tilewise.bench import peers

    present, absent = peers.installed()  # which imports PyTorch, if there is one: it is asked for GPUs
    missing: dict[str, str] = {}
    found = []
    for name in dispatch.NAMES if kernel is None else (kernel,):
        reason = dispatch.kernel(name).unavailable()
        if reason is None:
            found.append(_ours(name))
        else:
            missing[OURS + name] = reason
    return found + present, {**missing, **absent}


def find(name: str) -> Contestant:
    """The contestant of this name: how a child process, which is told a name, gets it back."""
    from tilewise.bench import peers

    if name.startswith(OURS):
        return _ours(name.removeprefix(OURS))
    if ":" in name:  # one from elsewhere, as "module:attribute"
        found: Contestant = load(name)
        return found
    return next(peer for peer in (*peers.FROM_TORCH, *peers.FROM_NUMPY) if peer.name == name)


def _ours(name: str) -> Contestant:
    return Contestant(OURS + name, lambda problem: _enter(name, problem), ours=True)


def _enter(name: str, problem: Problem) -> Entry:
    """NumPy arrays on the CPU, tensors on a GPU."""
    put = putter(problem.cell.device)
    options = problem.options(put)
    q, k, v = map(put, (problem.q, problem.k, problem.v))
    call = validate.prepare(q, k, v, **options)
    for backward in (False, True)[: 1 + problem.cell.backward]:
        reason = dispatch.kernel(name).unsupported(call.spec, replace(call.shape, backward=backward))
        if reason is not None:
            raise RefusedError("unsupported", reason)
    return Entry(_runner(name, problem.cell.backward, q, k, v, options), put)


def _runner(kernel: str, backward: bool, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Callable[[Any], Outputs]:
    def forward(d_out: Any) -> Outputs:
        return (api.attention(q, k, v, kernel=kernel, **options),)

    def both(d_out: Any) -> Outputs:
        out, pullback = api.attention_vjp(q, k, v, kernel=kernel, **options)
        grads = pullback(d_out)
        return out, grads.q, grads.k, grads.v

    if not backward:
        return forward
    return with_autograd(forward, q, k, v) if arrays.is_torch(q) else both


def with_autograd(forward: Callable[[Any], Outputs], *inputs: Any) -> Callable[[Any], Outputs]:
    """Forward and backward of a function of these tensors."""
    import torch

    for x in inputs:
        x.requires_grad_()

    def both(d_out: Any) -> Outputs:
        (out,) = forward(d_out)
        return out, *torch.autograd.grad(out, inputs, d_out)

    return both


def putter(device: str) -> Callable[[Array], Any]:
    return (lambda x: x) if device == "cpu" else as_tensor(device)


def as_tensor(device: str) -> Callable[[Array], Any]:
    """A NumPy array as a tensor: the same memory on the CPU, a copy on a GPU."""
    import torch

    return lambda x: arrays.like(x, torch.empty(0)).to(device)
