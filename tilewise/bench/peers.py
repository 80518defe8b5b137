"""The peers: what a user would call instead. Each is given only the variants it can express, in its own best way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.bench.contestants import Contestant, Entry, Outputs, as_tensor, with_autograd
from tilewise.bench.problem import Problem
from tilewise.bench.refusal import RefusedError

NO_TORCH = "PyTorch is not installed; pip install torch"
MATRICES = {False: 3, True: 6}  # full matrices that naive attention is allowed for, without and with backward


def installed() -> tuple[list[Contestant], dict[str, str]]:
    """SDPA first. Those who are missing, with the reason."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: installed, but its libraries do not load
        reason = NO_TORCH if isinstance(error, ModuleNotFoundError) else f"PyTorch does not load: {error}"
        return [*FROM_NUMPY], {c.name: reason for c in FROM_TORCH}
    return [*FROM_TORCH, *FROM_NUMPY], {}


def _needs_dense(problem: Problem) -> int:
    return 0 if problem.is_causal else problem.dense_bytes


def _needs_matrices(problem: Problem) -> int:
    """Scores and weights at once, and what is saved for the backward pass; a GPU's memory is found out by trying."""
    if problem.cell.device != "cpu":
        return problem.dense_bytes
    return problem.dense_bytes + MATRICES[problem.cell.backward] * problem.cell.matrix_bytes


# -- PyTorch ----------------------------------------------------------------------------------------------------------


def _enter_sdpa(problem: Problem) -> Entry:
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    if problem.variant.cap is not None:
        raise RefusedError("cannot express", "SDPA has no soft cap")
    extra = {"enable_gqa": True} if problem.cell.heads != problem.cell.heads_k else {}
    q, k, v, put = _tensors(problem)
    mask, held = (None, 0) if problem.is_causal else _sdpa_mask(problem, put)

    def forward(d_out: Any) -> Outputs:
        return (sdpa(q, k, v, attn_mask=mask, is_causal=problem.is_causal, **extra),)

    return Entry(with_autograd(forward, q, k, v) if problem.cell.backward else forward, put, held)


def _sdpa_mask(problem: Problem, put: Callable[[Array], Any]) -> tuple[Any, int]:
    """attn_mask: booleans, or floats with -inf where masked; and the bytes it takes, if it is not an input."""
    mask, added = _dense(problem, put)
    if added is None:
        return mask, 0 if mask is None else mask.nbytes
    added = added if mask is None else added.masked_fill(~mask, -math.inf)
    return added, 0 if problem.variant.dense_input else added.nbytes


def _enter_torch_naive(problem: Problem) -> Entry:
    """matmul, softmax, matmul."""
    import torch

    q, k, v, put = _tensors(problem)
    mask, added = _dense(problem, put)
    hidden = None if mask is None else ~mask
    group, cap, scale = problem.shape.group, problem.variant.cap, problem.spec.scale

    def forward(d_out: Any) -> Outputs:
        keys, values = (x if group == 1 else x.repeat_interleave(group, dim=1) for x in (k, v))
        s = torch.matmul(q * scale, keys.transpose(-1, -2))
        if cap is not None:
            s = cap * torch.tanh(s / cap)
        if added is not None:
            s = s + added
        if hidden is not None:
            s = s.masked_fill(hidden, -math.inf)
        return (torch.matmul(torch.softmax(s, dim=-1), values),)

    held = _held(problem, hidden, added)
    return Entry(with_autograd(forward, q, k, v) if problem.cell.backward else forward, put, held)


def _tensors(problem: Problem) -> tuple[Any, Any, Any, Callable[[Array], Any]]:
    put = as_tensor(problem.cell.device)
    return put(problem.q), put(problem.k), put(problem.v), put


def _dense(problem: Problem, put: Callable[[Array], Any]) -> tuple[Any, Any]:
    """The mask and what is added to the scores, as tensors, the latter in the type of q."""
    import torch

    mask = None if problem.mask is None else put(problem.mask)
    added = None if problem.added is None else put(problem.added).to(getattr(torch, problem.cell.dtype))
    return mask, added


def _held(problem: Problem, mask: Any, added: Any) -> int:
    own = (mask, None if problem.variant.dense_input else added)
    return sum(x.nbytes for x in own if x is not None)


# -- NumPy ------------------------------------------------------------------------------------------------------------


def _enter_numpy_naive(problem: Problem) -> Entry:
    """Standard dense attention, in place where it can be; halves are widened, as NumPy has no fast half products."""
    if problem.cell.device != "cpu":
        raise RefusedError("unsupported", "NumPy works in main memory")
    hidden = None if problem.mask is None else ~problem.mask
    held = _held(problem, hidden, problem.added)

    def run(d_out: Any) -> Outputs:
        q, k, v = (arrays.widen(x, _wide(problem)) for x in (problem.q, problem.k, problem.v))
        k, v = (np.repeat(x, problem.shape.group, axis=1) if problem.shape.group > 1 else x for x in (k, v))
        p, slope = _weights(problem, q, k, hidden)
        out = p @ v
        if not problem.cell.backward:
            return (arrays.narrow(out, problem.cell.dtype),)
        grads = _gradients(problem, q, k, v, p, slope, out, arrays.widen(d_out, out.dtype))
        return tuple(arrays.narrow(x, problem.cell.dtype) for x in (out, *grads))

    return Entry(run, lambda x: x, held)


def _wide(problem: Problem) -> np.dtype[Any]:
    return arrays.compute_dtype(problem.cell.dtype)


def _weights(problem: Problem, q: Array, k: Array, hidden: Array | None) -> tuple[Array, Array | None]:
    """softmax of the scores; and the soft cap's derivative, if the backward pass will need it."""
    s = (q * q.dtype.type(problem.spec.scale)) @ k.swapaxes(-1, -2)
    slope = None
    if problem.variant.cap is not None:
        s /= problem.variant.cap
        np.tanh(s, out=s)
        slope = 1 - s * s if problem.cell.backward else None
        s *= problem.variant.cap
    if problem.added is not None:
        s += arrays.widen(problem.added, s.dtype)
    if hidden is not None:
        np.copyto(s, -np.inf, where=hidden)
    s -= s.max(axis=-1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(axis=-1, keepdims=True)
    return s, slope


def _gradients(
    problem: Problem, q: Array, k: Array, v: Array, p: Array, slope: Array | None, out: Array, d_out: Array
) -> tuple[Array, Array, Array]:  # fmt: skip
    d_v = p.swapaxes(-1, -2) @ d_out
    d_s = d_out @ v.swapaxes(-1, -2)
    d_s -= np.sum(d_out * out, axis=-1, keepdims=True)
    d_s *= p
    if slope is not None:
        d_s *= slope
    scale = q.dtype.type(problem.spec.scale)
    d_q, d_k = scale * (d_s @ k), scale * (d_s.swapaxes(-1, -2) @ q)
    by_key_head = (problem.cell.batch, problem.cell.heads_k, -1, problem.cell.n_k, problem.cell.d)
    return d_q, d_k.reshape(by_key_head).sum(axis=2), d_v.reshape(by_key_head).sum(axis=2)


FROM_TORCH = (
    Contestant("torch sdpa", _enter_sdpa, needs=_needs_dense),
    Contestant("torch naive", _enter_torch_naive, needs=_needs_matrices),
)
FROM_NUMPY = (Contestant("numpy naive", _enter_numpy_naive, needs=_needs_matrices),)
