"""The public operations: validate, choose a kernel system, run it, hand back what the caller's arrays were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tilewise import arrays, decoding, dispatch, reference
from tilewise.choosing import Purpose
from tilewise.explanation import Explanation, explain_call
from tilewise.kernels.gpus import lying
from tilewise.rope import Rope, check
from tilewise.spec import Grads
from tilewise.validate import prepare, prepare_varlen


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    rope: Rope | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """Exact attention, tile by tile: softmax(score(scale * q k^T), where the mask holds) v.

    q, k, v: (n, d), (batch, n, d) or (batch, heads, n, d), NumPy arrays or PyTorch tensors; the result is of the same
    kind. Arrays of other libraries with DLPack (CuPy, JAX) are taken and given too, if PyTorch is installed.
    k and v may have fewer heads (grouped queries) and another length; v another head dimension.

    causal: short for mask=tw.causal().  mask: an expression, or a boolean (True: may attend) or float (added) array.
    score: an expression over tw.S, the scaled score.  scale: 1 / sqrt(d) unless given.
    sinks: (heads,) floats, a logit per query head that joins each row sum.
    rope: tw.Rope(...), a rotary embedding: q and k are turned by their positions on the way.
    kernel: "auto" or the name of a kernel system, which is then never swapped for another.
    return_lse: also return the log of each row's sum of exp(score).
    batch_invariant: a sequence's result has the same bits whatever else is in the batch.
    """
    options = {
        "causal": causal, "mask": mask, "score": score, "scale": scale, "sinks": sinks, "rope": rope,
        "batch_invariant": batch_invariant,
    }  # fmt: skip
    return _run(q, k, v, None, kernel, return_lse, options)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    lengths_q: Any,
    lengths_k: Any,
    *,
    causal: bool = False,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    rope: Rope | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """Attention within each of several packed sequences: q, k, v are (total, heads, d).

    lengths_q, lengths_k: cumulative lengths [0, ..., total]; sequence i has rows lengths[i] to lengths[i + 1], possibly
    none. In expressions B is the sequence, and Q, K, NQ, NK are its own; QP and KP index packed arrays.
    The rest is as in `attention`. lse is (total, heads).
    """
    options = {
        "causal": causal, "mask": mask, "score": score, "scale": scale, "sinks": sinks, "rope": rope,
        "batch_invariant": batch_invariant,
    }  # fmt: skip
    return _run(q, k, v, (lengths_q, lengths_k), kernel, return_lse, options)


def decode(
    q: Any,
    cache: Any,
    *,
    k: Any = None,
    v: Any = None,
    causal: bool = False,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    rope: Rope | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """Attention of each sequence's last queries to the keys that a cache has of it: a step of generating text.

    q: (batch, heads, n, d), few queries, which are the last n of their sequences: causal=True, windows and ALiBi count
    from a sequence's own end. cache: a tw.KVCache or tw.PagedKVCache, whose heads divide q's.
    k, v: (batch, heads of the cache, m, d), new keys and values that are appended to the cache first, in place.
    rope: q is turned, and k as it is appended, each at its place in the sequence, or at the rope's own positions, which
    are those of q and of the new keys. Keys that the cache has were turned when they came: cache.append takes rope too.

    The rest is as in `attention`, without gradients. In expressions B is the sequence, NK its length; arrays that are
    read by K have a place for each key that there is room for (cache.capacity).
    """
    if (k is None) != (v is None):
        raise ValueError("k, v: give both, to be appended to the cache, or neither")
    call = decoding.prepare(
        q, cache, causal=causal, mask=mask, score=score, scale=scale, sinks=sinks, batch_invariant=batch_invariant
    )
    if rope is not None:
        check(rope, q.shape[0], {"positions": q.shape[2]}, q.shape[3])
    system = dispatch.resolve(kernel, call.spec, call.shape, Purpose.DECODE)
    if k is not None:
        cache.append(k, v, rope=rope, kernel=system.name)
    done = decoding.run(system, call.spec, call.q, cache, rope)
    return (done.out, done.lse) if return_lse else done.out


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    rope: Rope | None = None,
    lengths_q: Any = None,
    lengths_k: Any = None,
    kernel: str = "auto",
    batch_invariant: bool = False,
) -> tuple[Any, Callable[..., Grads]]:
    """Attention and its gradients: out, and pullback(d_out, d_lse=None) -> Grads(q, k, v, sinks, arrays).

    Grads.arrays has an entry for each array of the score that wants a gradient (tw.load(..., grad=True), tw.bias(b,
    grad=True) ...), in order of first appearance. With lengths_q and lengths_k the arrays are packed, as in
    attention_varlen.
    """
    options: dict[str, Any] = {
        "causal": causal,
        "mask": mask,
        "score": score,
        "scale": scale,
        "sinks": sinks,
        "rope": rope,
        "batch_invariant": batch_invariant,
    }
    if (lengths_q is None) != (lengths_k is None):
        raise ValueError("lengths_q, lengths_k: give both for packed sequences, or neither")
    packed = lengths_q is not None
    call = prepare_varlen(q, k, v, lengths_q, lengths_k, **options) if packed else prepare(q, k, v, **options)
    shape = lying(call.shape, q=call.q, k=call.k, v=call.v)
    spec = call.spec.before_backward(shape.dtype)
    saved = dispatch.resolve(kernel, spec, shape).forward(spec, call.q, call.k, call.v)
    out, lse = call.restore(saved.out), call.restore(saved.lse)

    def pullback(d_out: Any, d_lse: Any = None) -> Grads:
        d_out = call.expand(like_result("d_out", d_out, out))
        d_lse = None if d_lse is None else call.expand(like_result("d_lse", d_lse, lse))
        system = dispatch.resolve(kernel, call.spec, replace(shape, backward=True))
        grads = system.backward(call.spec, call.q, call.k, call.v, saved, d_out, d_lse)
        return replace(grads, **{name: call.restore(getattr(grads, name)) for name in "qkv"})

    return out, pullback


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    rope: Rope | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Explanation:
    """What `attention` would do with these arguments: the kernel system, why not the others, the plan. Print it."""
    del return_lse  # every kernel computes it
    call = prepare(
        q, k, v, causal=causal, mask=mask, score=score, scale=scale, sinks=sinks, rope=rope,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    return explain_call(call, kernel)


def weights(
    q: Any,
    k: Any,
    v: Any,
    *,
    rows: Any,
    causal: bool = False,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    rope: Rope | None = None,
) -> Any:
    """Attention weights of the chosen query rows alone: (..., len(rows), keys). Memory grows with the rows asked for.

    rows: an integer or a sequence of them; negative ones count from the end. With sinks a row sums to less than 1.
    """
    call = prepare(q, k, v, causal=causal, mask=mask, score=score, scale=scale, sinks=sinks, rope=rope)
    if call.shape.device != "cpu":
        raise dispatch.Unsupported(
            f"weights: computed in main memory, and q is on {call.shape.device}; move it with .cpu()"
        )
    chosen = np.atleast_1d(np.asarray(rows))
    chosen = chosen.astype(np.int64) if chosen.size == 0 else chosen  # [] has no type of its own
    n = call.shape.n_q
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or np.any(chosen < -n) or np.any(chosen >= n):
        raise ValueError(f"rows: expected whole numbers from {-n} to {n - 1}, got {rows!r}")
    return arrays.like(call.restore(reference.weights(call.spec, call.q, call.k, chosen % max(n, 1))), q)


def _run(
    q: Any, k: Any, v: Any, lengths: tuple[Any, Any] | None, kernel: str, return_lse: bool, options: dict[str, Any]
) -> Any:
    if arrays.is_torch(q):
        from tilewise.pytorch import front

        out, lse = front.attention(q, k, v, lengths, kernel, options)
    elif arrays.is_foreign(q):
        out, lse = _run_foreign(q, k, v, lengths, kernel, options)
    else:
        call = prepare(q, k, v, **options) if lengths is None else prepare_varlen(q, k, v, *lengths, **options)
        done = dispatch.resolve(kernel, call.spec, call.shape).forward(call.spec, call.q, call.k, call.v)
        out, lse = call.restore(done.out), call.restore(done.lse)
    return (out, lse) if return_lse else out


def _run_foreign(
    q: Any, k: Any, v: Any, lengths: tuple[Any, Any] | None, kernel: str, options: dict[str, Any]
) -> tuple[Any, Any]:
    """Arrays of other libraries are computed on as tensors, in their own memory."""
    taken = arrays.from_foreign
    options = {name: taken(name, x) for name, x in options.items()}
    if lengths is not None:
        lengths = taken("lengths_q", lengths[0]), taken("lengths_k", lengths[1])
    out, lse = _run(taken("q", q), taken("k", k), taken("v", v), lengths, kernel, True, options)
    return arrays.to_foreign(out, q), arrays.to_foreign(lse, q)


def like_result(name: str, gradient: Any, result: Any) -> Any:
    if not arrays.is_array(gradient) or tuple(gradient.shape) != tuple(result.shape):
        found = tuple(gradient.shape) if hasattr(gradient, "shape") else type(gradient).__name__
        raise ValueError(f"{name}: expected shape {tuple(result.shape)} as the result has, got {found}")
    if arrays.is_torch(gradient) != arrays.is_torch(result):
        expected, came = (("a PyTorch tensor" if arrays.is_torch(x) else "a NumPy array") for x in (result, gradient))
        raise TypeError(f"{name}: expected {expected} as the result is, got {came}")
    there, here = arrays.device_name(gradient), arrays.device_name(result)
    if there != here:
        raise ValueError(f"{name}: expected device {here} as the result is on, got {there}")
    if arrays.kind_of(gradient) != "float":
        expected = ", ".join(arrays.FLOAT_DTYPES)
        raise TypeError(f"{name}: expected {expected}, got {arrays.dtype_name(gradient)}")
    return gradient
