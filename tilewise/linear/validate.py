"""From a caller's arguments to a Call: `outline` checks types, sizes and devices, `settle` the numbers in lengths and
decay, which torch.compile has not when it reads a call. Every error names the argument, what came and what was
expected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise import arrays, validate
from tilewise.expr import BOOL, Expr, as_float, keep
from tilewise.linear.features import FEATURE_MAPS
from tilewise.linear.spec import Linear, LinearGrads, Problem
from tilewise.linear.state import LinearState
from tilewise.validate import PACKED, expand, restore
from tilewise.walking import loads, variables


@dataclass(frozen=True, eq=False)
class Call:
    """A problem, and the layout that its results go back to."""

    problem: Problem
    rank: int  # of the caller's arrays, or PACKED
    per_token: bool  # whether decay came with a number for each token, rather than for each head

    def restore(self, x: Any) -> Any:
        return restore(x, self.rank)

    def expand(self, x: Any) -> Any:
        return expand(x, self.rank)

    def restore_grads(self, grads: LinearGrads) -> LinearGrads:
        d_decay = grads.decay
        if d_decay is not None:
            d_decay = self.restore(d_decay) if self.per_token else d_decay.sum((0, 2))
        return replace(grads, **{name: self.restore(getattr(grads, name)) for name in "qkv"}, decay=d_decay)


def prepare(q: Any, k: Any, v: Any, **options: Any) -> Call:
    """Check a call; options are those of `linear_attention` that say what to compute."""
    call = outline(q, k, v, **options)
    return replace(call, problem=settle(call.problem))


def outline(
    q: Any,
    k: Any,
    v: Any,
    *,
    feature_map: Any = "elu",
    causal: Any = True,
    normalize: Any = True,
    decay: Any = None,
    initial_state: Any = None,
    scale: Any = 1.0,
    lengths: Any = None,
) -> Call:
    """A call, as far as types, sizes and devices tell that it is right."""
    for name, flag in (("causal", causal), ("normalize", normalize)):
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name}: expected True or False, got {flag!r}")
    if lengths is None:
        q, k, v, rank = validate.views(q, k, v)
    else:
        q, k, v = validate.packed_views(q, k, v)
        lengths, rank = validate.as_lengths("lengths", lengths), PACKED
    if k.shape[2] != q.shape[2]:
        raise ValueError(
            f"k: expected {q.shape[2]} keys, one a query, got {k.shape[2]}; linear attention is within one sequence, "
            "and what came before it is initial_state"
        )
    if decay is not None and not causal:
        raise ValueError("decay: expected None with causal=False: a state forgets what came before, got a decay")
    spec = Linear(feature(feature_map), bool(causal), bool(normalize), validate.finite_scale(scale), lengths)
    problem = Problem(spec, q, k, v)
    logs, per_token = (None, False) if decay is None else _decay(decay, k, rank)
    problem = replace(problem, decay=logs, initial=check_state("initial_state", initial_state, problem))
    return Call(problem, rank, per_token)


def settle(problem: Problem) -> Problem:
    """Check the numbers. Those of a decay on a GPU are not waited for."""
    spec, decay = problem.spec, problem.decay
    if spec.lengths is not None:
        rows = validate.cumulative("lengths", spec.lengths, problem.q.shape[2], "q")
        problem = replace(problem, spec=replace(spec, lengths=rows))
    if decay is not None and not arrays.is_elsewhere(decay):
        values = arrays.widen(arrays.as_numpy(decay), np.float64)
        wrong = values[~(np.isfinite(values) & (values <= 0))]
        if wrong.size:
            raise ValueError(
                f"decay: expected logs of numbers above 0 and at most 1, finite and <= 0, got {wrong[0]:g}; "
                "of a gate g take log(g), of one that may be 0 log(max(g, 1e-30)), of gates before their sigmoid "
                "log_sigmoid"
            )
    return problem


def feature(given: Any) -> Expr:
    """A feature map by its name, or as a caller's expression."""
    if isinstance(given, str):
        if given not in FEATURE_MAPS:
            known = ", ".join(map(repr, FEATURE_MAPS))
            raise ValueError(f"feature_map: expected one of {known}, or an expression over tw.S, got {given!r}")
        return FEATURE_MAPS[given]
    if not isinstance(given, Expr):
        advice = "; call it with the variable: feature_map=f(tw.S)" if callable(given) else ""
        raise TypeError(
            f"feature_map: expected a name or an expression over tw.S, a number of q or k, such as tw.exp(tw.S), "
            f"got {type(given).__name__}{advice}"
        )
    if given.kind == BOOL:
        raise TypeError(f"feature_map: expected a number, got the condition {given!r}; write tw.where({given!r}, 1, 0)")
    if variables(given) != {"S"} or loads(given):
        raise ValueError(
            f"feature_map: expected an expression of tw.S alone, a number of q or k, without arrays, got {given!r}"
        )
    keep(given)
    return as_float(given)


def _decay(decay: Any, k: Any, rank: int) -> tuple[Any, bool]:
    """Logs as (batch, key heads, n), a view of the caller's; and whether it came with one for each token."""
    batch, heads, n = (int(size) for size in k.shape[:3])
    if isinstance(decay, int | float):
        decay = _filled_like(k, (heads,), float(decay))
    if not arrays.is_array(decay) or arrays.kind_of(decay) != "float":
        found = arrays.dtype_name(decay) if arrays.is_array(decay) else type(decay).__name__ + arrays.list_advice(decay)
        raise TypeError(f"decay: expected floats, logs of what remains, <= 0, got {found}")
    _same_place("decay", decay, k)
    tokens = {2: (n,), 3: (batch, n), 4: (batch, heads, n), PACKED: (n, heads)}[rank]
    if tuple(decay.shape) == tokens:
        return expand(decay, rank), True
    if tuple(decay.shape) == (heads,):
        shape = (batch, heads, n)
        row = decay[None, :, None]
        return (row.expand(shape) if arrays.is_torch(row) else np.broadcast_to(row, shape)), False
    raise ValueError(
        f"decay: expected shape {tokens}, one a token and key head, or ({heads},), one a key head, "
        f"got {tuple(decay.shape)}"
    )


def _filled_like(k: Any, shape: tuple[int, ...], value: float) -> Any:
    dtype = arrays.compute_dtype(arrays.dtype_name(k))
    if not arrays.is_torch(k):
        return np.full(shape, value, dtype)
    return k.new_full(shape, value, dtype=getattr(arrays.library(k), str(dtype)))


def _same_place(name: str, x: Any, q: Any) -> None:
    if arrays.is_torch(x) != arrays.is_torch(q):
        wanted, came = ("a PyTorch tensor" if arrays.is_torch(y) else "a NumPy array" for y in (q, x))
        raise TypeError(f"{name}: expected {wanted} as q is, got {came}")
    if arrays.device_name(x) != arrays.device_name(q):
        raise ValueError(
            f"{name}: expected device {arrays.device_name(q)} as q is on, got {arrays.device_name(x)}; move it there"
        )


def check_state(name: str, state: Any, problem: Problem) -> LinearState | None:
    """A caller's state, or a gradient of one, if it fits the call."""
    if state is None:
        return None
    if not isinstance(state, LinearState):
        raise TypeError(
            f"{name}: expected a tw.LinearState, as linear_attention(..., return_state=True) returns, "
            f"got {type(state).__name__}"
        )
    q, heads, n = problem.q, int(problem.k.shape[1]), problem.n_states
    d, d_v = int(q.shape[3]), int(problem.v.shape[3])
    dtype = str(arrays.compute_dtype(arrays.dtype_name(q)))
    for part, shape in (("kv", (n, heads, d, d_v)), ("z", (n, heads, d)), ("log_decay", (n, heads))):
        x = getattr(state, part)
        if not arrays.is_array(x) or arrays.dtype_name(x) != dtype:
            found = arrays.dtype_name(x) if arrays.is_array(x) else type(x).__name__
            raise TypeError(f"{name}.{part}: expected {dtype}, which sums are kept in, got {found}")
        if tuple(x.shape) != shape:
            raise ValueError(f"{name}.{part}: expected shape {shape}, got {tuple(x.shape)}")
        _same_place(f"{name}.{part}", x, q)
    return state
