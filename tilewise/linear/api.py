"""The public operations: validate, choose a kernel system, run it, hand back what the caller's arrays were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise import arrays
from tilewise.api import like_result
from tilewise.linear import dispatch
from tilewise.linear.spec import LinearGrads
from tilewise.linear.state import LinearState
from tilewise.linear.validate import check_state, prepare


def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    feature_map: Any = "elu",
    causal: bool = True,
    normalize: bool = True,
    decay: Any = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    scale: float = 1.0,
    lengths: Any = None,
    kernel: str = "auto",
) -> Any:
    """Attention whose weights are products of features, not exponentials: linear in n, with a state of fixed size.

    The weight of key j for query i is scale * f(q_i) . f(k_j) * exp(the sum of decay over j + 1 ... i).
    Arrays are as in `attention`, with as many keys as queries.

    feature_map: f, "identity", "elu" (elu(x) + 1), "relu", "relu2" (relu(x) squared), "exp", or an expression over
    tw.S, which stands for each number of q and k.
    causal: a query sees the keys up to its own; else all of its sequence.
    normalize: rows are divided by the sum of their weights (0 where that is 0), by which any scale cancels.
    decay: logs (<= 0) of what is left of the state a token later: a number, (key heads,), or one a token and key head,
    shaped as k without its last dimension. The state before a token decays by its own.
    initial_state: a tw.LinearState, what a call on the tokens before returned with return_state=True: the results are
    those of one call on all of them, so that decoding is a call for each new token.
    lengths: cumulative lengths [0, ..., total] of packed sequences; q, k, v are then (total, heads, d).
    kernel: "auto" or the name of a kernel system, which is then never swapped for another.
    """
    options = {
        "feature_map": feature_map, "causal": causal, "normalize": normalize, "decay": decay,
        "initial_state": initial_state, "scale": scale, "lengths": lengths,
    }  # fmt: skip
    if arrays.is_torch(q):
        from tilewise.linear.pytorch.front import run

        out, state = run(q, k, v, kernel, options, return_state)
    elif arrays.is_foreign(q):
        out, state = _run_foreign(q, k, v, kernel, options)
    else:
        call = prepare(q, k, v, **options)
        done = dispatch.resolve(kernel, call.problem.shape).forward(call.problem)
        out, state = call.restore(done.out), done.state
    return (out, state) if return_state else out


def _run_foreign(q: Any, k: Any, v: Any, kernel: str, options: dict[str, Any]) -> tuple[Any, LinearState]:
    """Arrays of other libraries are computed on as tensors, in their own memory."""
    taken = arrays.from_foreign
    given = {name: taken(name, x) for name, x in options.items()}
    if isinstance(given["initial_state"], LinearState):
        given["initial_state"] = given["initial_state"].map(lambda x: taken("initial_state", x))
    out, state = linear_attention(
        taken("q", q), taken("k", k), taken("v", v), kernel=kernel, return_state=True, **given
    )  # fmt: skip
    return arrays.to_foreign(out, q), state.map(lambda x: arrays.to_foreign(x, q))


def linear_attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    feature_map: Any = "elu",
    causal: bool = True,
    normalize: bool = True,
    decay: Any = None,
    initial_state: LinearState | None = None,
    scale: float = 1.0,
    lengths: Any = None,
    kernel: str = "auto",
) -> tuple[Any, LinearState, Callable[..., LinearGrads]]:
    """Linear attention and its gradients: out, the state after the last key, and pullback(d_out, d_state=None) ->
    LinearGrads(q, k, v, decay, initial_state)."""
    call = prepare(
        q, k, v, feature_map=feature_map, causal=causal, normalize=normalize, decay=decay,
        initial_state=initial_state, scale=scale, lengths=lengths,
    )  # fmt: skip
    system = dispatch.resolve(kernel, call.problem.shape)
    done = system.forward(call.problem)
    out = call.restore(done.out)

    def pullback(d_out: Any, d_state: LinearState | None = None) -> LinearGrads:
        d_out = call.expand(like_result("d_out", d_out, out))
        d_state = check_state("d_state", d_state, call.problem)
        return call.restore_grads(system.backward(call.problem, done, d_out, d_state))

    return out, done.state, pullback
