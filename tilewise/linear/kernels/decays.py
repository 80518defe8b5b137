"""What PyTorch itself computes on a GPU: sums of decays over whole sequences, and from their gradients the decays'."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.linear.spec import Problem
from tilewise.linear.state import LinearState


def log_decay(problem: Problem) -> Any:
    """What a sequence decays by from end to end, and what its initial state did before."""
    shape, initial = problem.shape, problem.initial
    sums = torch.zeros(problem.n_states, shape.heads_k, dtype=torch.float32, device=problem.q.device)
    for at, rows in problem.sequences() if problem.decay is not None else ():
        sums[at] = problem.decay[:, :, rows].float().sum(-1)
    return sums if initial is None else sums + initial.log_decay


def decay_gradient(problem: Problem, d_c: Any, state: LinearState, d_state: LinearState | None) -> Any:
    """From gradients of cumulative sums to those of what was summed; in float64, as a sequence's are added up."""
    d_c = d_c.double()
    last = torch.zeros_like(state.log_decay, dtype=torch.float64)
    if d_state is not None:
        last += (d_state.kv * state.kv).sum((2, 3)) + (d_state.z * state.z).sum(2) + d_state.log_decay
    for at, rows in problem.sequences():
        d_c[:, :, rows] = d_c[:, :, rows].flip(-1).cumsum(-1).flip(-1) + last[at][..., None]
    return d_c.to(problem.decay.dtype)
