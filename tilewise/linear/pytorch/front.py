"""Tensors: from the arguments of `linear_attention` to the operator, run now or traced by torch.compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tilewise import arrays
from tilewise.linear import dispatch
from tilewise.linear.pytorch import operator, repeat
from tilewise.linear.state import LinearState
from tilewise.linear.validate import outline
from tilewise.pytorch import trace
from tilewise.pytorch.front import autocast, in_forward_mode, refuse_tangents


def run(
    q: Any, k: Any, v: Any, kernel: str, options: dict[str, Any], keeps_state: bool
) -> tuple[Any, LinearState | None]:
    """(out, state) in the caller's layout; differentiable in q, k, v, decay and the initial state. keeps_state: else
    there may be none."""
    if not arrays.compiling():
        q, k, v = autocast(q, k, v)
        known = None if keeps_state or in_forward_mode() else repeat.known(q, k, v, kernel, options)
        if known is not None:
            return known.run(q, k, v), None
        out, *state = _run(q, k, v, kernel, options)
        return out, LinearState(*state)
    # What the compiler cannot follow is taken apart here, and put together again where Python runs.
    options = dict(options)
    state = options.pop("initial_state")
    options["feature_map"] = trace.take_apart("feature_map", options["feature_map"], [])
    parts = [] if state is None else [state.kv, state.z, state.log_decay]
    out, *after = _run_traced(q, k, v, kernel, options, parts)
    return out, LinearState(*after)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _run_traced(q: Any, k: Any, v: Any, kernel: str, options: dict[str, Any], state: list[Any]) -> tuple[Any, ...]:
    feature_map = trace.put_together(options["feature_map"], [])
    initial = LinearState(*state) if state else None
    return _run(q, k, v, kernel, {**options, "feature_map": feature_map, "initial_state": initial})


def _run(q: Any, k: Any, v: Any, kernel: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """The call by its operator, on tensors with numbers or on fake ones: out, kv, z, log_decay."""
    q, k, v = autocast(q, k, v)
    call = outline(q, k, v, **options)
    dispatch.check_name(kernel)
    problem, spec = call.problem, call.problem.spec
    if problem.q.is_meta:  # the operator would answer with shapes; a caller asked for numbers
        dispatch.resolve(kernel, problem.shape)
    lengths = torch.from_numpy(spec.lengths) if isinstance(spec.lengths, np.ndarray) else spec.lengths
    initial = (None, None, None) if problem.initial is None else tuple(problem.initial)
    if in_forward_mode():
        refuse_tangents(problem.q, problem.k, problem.v, problem.decay, *initial)
    transformed = torch._C._are_functorch_transforms_active()
    out, _, *state = (operator.Transformed.apply if transformed else operator.linear_attention)(
        problem.q, problem.k, problem.v, problem.decay, *initial, lengths, operator.encode(spec, kernel)
    )
    return call.restore(out), *state
