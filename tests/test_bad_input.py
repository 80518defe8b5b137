"""Bad input: one table. Each row gets an error that names the argument, what came and what was expected; nothing is
written. Then the edges of what is allowed, which get the contract's answer."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise import reference
from tilewise.expr import NK, H, K, Q, S
from tilewise.spec import Attention


def make(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def call(q=None, k=None, v=None, **options):
    """A good call of (2, 4, 6, 8) and (2, 2, 7, 8) arrays, but for what is given."""
    q = make(2, 4, 6, 8) if q is None else q
    k = make(2, 2, 7, 8) if k is None else k
    v = make(2, 2, 7, 5) if v is None else v
    return tw.attention(q, k, v, **options)


def packed(lengths_q=(0, 4, 6), lengths_k=(0, 2, 7), q=None, **options):
    q = make(6, 4, 8) if q is None else q
    return tw.attention_varlen(q, make(7, 2, 8), make(7, 2, 5), lengths_q, lengths_k, **options)


def meta(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device="meta")


def tensors(*names: str) -> dict[str, Any]:
    shapes = {"q": (2, 4, 6, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 5)}
    return {n: torch.from_numpy(make(*shapes[n])) for n in names or shapes}


def strided(*shape: int) -> np.ndarray:
    return make(*shape[:-1], 2 * shape[-1])[..., ::2]


def pullback(d_out=None, d_lse=None, **options):
    _, pull = tw.attention_vjp(make(2, 4, 6, 8), make(2, 2, 7, 8), make(2, 2, 7, 5), **options)
    return pull(make(2, 4, 6, 5) if d_out is None else d_out, d_lse)


def done(n: int = 5, d: int = 3) -> tuple[np.ndarray, np.ndarray]:
    return make(2, 2, n, d), make(2, 2, n)


OK_OUT = (2, 4, 6, 5)
TABLE: dict[str, tuple[Any, type[Exception], list[str]]] = {
    # -- arrays
    "q of one dimension": (lambda: call(q=make(8)), ValueError, ["q:", "(n, d)", "(8,)"]),
    "q of five dimensions": (
        lambda: call(q=make(1, 2, 4, 6, 8)),
        ValueError,
        ["q:", "(batch, heads, n, d)", "(1, 2, 4, 6, 8)"],
    ),
    "q without dimensions": (lambda: call(q=np.array(1.0, np.float32)), ValueError, ["q:", "()"]),
    "k of another rank": (lambda: call(k=make(2, 7, 8)), ValueError, ["k:", "(2, 7, 8)", "as q has"]),
    "v of another rank": (lambda: call(v=make(7, 5)), ValueError, ["v:", "(7, 5)", "as q has"]),
    "k of another head dim": (
        lambda: call(k=make(2, 2, 7, 9)),
        ValueError,
        ["k:", "head dimension", "8", "9; only v's"],
    ),
    "k of another batch": (lambda: call(k=make(3, 2, 7, 8)), ValueError, ["k:", "batch of 2", "3"]),
    "v of another batch": (lambda: call(v=make(3, 2, 7, 5)), ValueError, ["v:", "batch of 2", "3"]),
    "k of one batch index": (
        lambda: call(k=make(1, 2, 7, 8)),
        ValueError,
        ["k:", "batch of 2", "got 1", "np.broadcast_to(k, (2, *k.shape[1:]))"],
    ),
    "torch v of one batch index": (
        lambda: call(**tensors("q", "k"), v=torch.zeros(1, 2, 7, 5)),
        ValueError,
        ["v:", "got 1", "v.expand(2, *v.shape[1:])"],
    ),
    "v of another length": (lambda: call(v=make(2, 2, 8, 5)), ValueError, ["v:", "7 keys as k has", "8"]),
    "v of other heads": (lambda: call(v=make(2, 4, 7, 5)), ValueError, ["v:", "2 heads as k has", "4"]),
    "heads that do not divide": (
        lambda: call(k=make(2, 3, 7, 8), v=make(2, 3, 7, 5)),
        ValueError,
        ["k:", "divide", "4", "got 3", "(batch, heads, n, d)", "swap"],
    ),
    "more key heads than query heads": (
        lambda: call(k=make(2, 8, 7, 8), v=make(2, 8, 7, 5)),
        ValueError,
        ["k:", "divide", "8"],
    ),
    "no key heads": (lambda: call(k=make(2, 0, 7, 8), v=make(2, 0, 7, 5)), ValueError, ["k:", "heads", "0"]),
    "no query heads": (lambda: call(q=make(2, 0, 6, 8)), ValueError, ["heads", "0"]),
    "integers": (lambda: call(q=np.ones((2, 4, 6, 8), int)), TypeError, ["q:", "float32", "int64"]),
    "booleans": (lambda: call(k=np.ones((2, 2, 7, 8), bool)), TypeError, ["k:", "float32", "bool"]),
    "complex": (lambda: call(q=np.ones((2, 4, 6, 8), complex)), TypeError, ["q:", "complex128"]),
    "objects": (lambda: call(q=np.ones((2, 4, 6, 8), object)), TypeError, ["q:", "object"]),
    "big-endian": (lambda: call(q=make(2, 4, 6, 8).astype(">f4")), TypeError, ["q:", ">f4"]),
    "k of another type": (
        lambda: call(k=make(2, 2, 7, 8, dtype=np.float16)),
        TypeError,
        ["k:", "float32 as q is", "float16", "k.astype(q.dtype)"],
    ),
    "v of another type": (
        lambda: call(v=make(2, 2, 7, 5, dtype=np.float64)),
        TypeError,
        ["v:", "float32 as q is", "float64", "v.astype(q.dtype)"],
    ),
    "torch k of another type": (
        lambda: call(**tensors("q", "v"), k=torch.zeros(2, 2, 7, 8).half()),
        TypeError,
        ["k:", "float32 as q is", "k.to(q.dtype)"],
    ),
    "a scale that no float holds": (
        lambda: call(scale=10**400),
        ValueError,
        ["scale: expected a finite number", "got 1000"],
    ),
    "a list": (lambda: call(q=[[1.0]]), TypeError, ["q:", "NumPy array or a PyTorch tensor", "list", "np.array(...)"]),
    "None": (lambda: tw.attention(None, None, None), TypeError, ["q:", "NoneType"]),
    "a list for v": (lambda: call(v=[[1.0]]), TypeError, ["v:", "list"]),
    "an expression for q": (lambda: call(q=Q), TypeError, ["q:", "Expr"]),
    "torch q, NumPy k": (
        lambda: call(**tensors("q")),
        TypeError,
        ["k:", "PyTorch tensor as q is", "torch.as_tensor(k)"],
    ),
    "NumPy q, torch v": (lambda: call(**tensors("v")), TypeError, ["v:", "NumPy array as q is", "np.asarray(v)"]),
    "meta k": (
        lambda: call(**tensors("q", "v"), k=meta(2, 2, 7, 8)),
        ValueError,
        ["k:", "device cpu as q is on", "meta", "k.to(q.device)"],
    ),
    "strided q": (
        lambda: call(q=strided(2, 4, 6, 8)),
        ValueError,
        ["q:", "contiguous", "stride of 2", "np.ascontiguousarray"],
    ),
    "strided v": (lambda: call(v=strided(2, 2, 7, 5)), ValueError, ["v:", "contiguous", "stride of 2"]),
    "strided torch k": (
        lambda: call(**tensors("q", "v"), k=torch.zeros(2, 2, 8, 7).transpose(2, 3)),
        ValueError,
        ["k:", "contiguous", "stride of 7", ".contiguous()"],
    ),
    "d = 0": (lambda: call(q=make(2, 4, 6, 0), k=make(2, 2, 7, 0)), ValueError, ["q:", "1 to 512", "0"]),
    "d of v = 0": (lambda: call(v=make(2, 2, 7, 0)), ValueError, ["v:", "1 to 512", "0"]),
    "d = 513": (
        lambda: call(q=make(1, 1, 2, 513), k=make(1, 1, 2, 513), v=make(1, 1, 2, 5)),
        ValueError,
        ["q:", "1 to 512", "513"],
    ),
    "d of v = 513": (lambda: call(v=make(2, 2, 7, 513)), ValueError, ["v:", "513"]),
    "sparse": (
        lambda: call(q=torch.zeros(2, 4, 6, 8).to_sparse(), **tensors("k", "v")),
        (TypeError, ValueError),
        ["q:", "sparse"],
    ),
    # -- scale and flags
    "scale NaN": (lambda: call(scale=float("nan")), ValueError, ["scale:", "finite number", "nan"]),
    "scale inf": (lambda: call(scale=float("inf")), ValueError, ["scale:", "finite number", "inf"]),
    "scale text": (lambda: call(scale="1"), ValueError, ["scale:", "finite number", "'1'"]),
    "scale bool": (lambda: call(scale=True), ValueError, ["scale:", "True"]),
    "scale array": (lambda: call(scale=np.ones(2)), ValueError, ["scale:", "finite number"]),
    "scale complex": (lambda: call(scale=1j), ValueError, ["scale:", "1j"]),
    "causal text": (lambda: call(causal="yes"), TypeError, ["causal:", "True or False", "'yes'"]),
    "causal number": (lambda: call(causal=1), TypeError, ["causal:", "1"]),
    "causal function": (lambda: call(causal=tw.causal), TypeError, ["causal:", "True or False"]),
    "batch_invariant None": (lambda: call(batch_invariant=None), TypeError, ["batch_invariant:", "None"]),
    # -- kernels and tiles
    "unknown kernel": (lambda: call(kernel="nampy"), ValueError, ["kernel:", "'nampy'", "auto", "numpy"]),
    "kernel None": (lambda: call(kernel=None), TypeError, ["kernel:", "auto", "cuda-sim/tiled", "None"]),
    "kernel list": (lambda: call(kernel=["numpy"]), (ValueError, TypeError), ["kernel:", "numpy"]),
    "numpy on meta": (
        lambda: call(meta(2, 4, 6, 8), meta(2, 2, 7, 8), meta(2, 2, 7, 5), kernel="numpy"),
        tw.Unsupported,
        ["numpy", "meta", ".cpu()"],
    ),
    "auto on meta": (
        lambda: call(meta(2, 4, 6, 8), meta(2, 2, 7, 8), meta(2, 2, 7, 5)),
        tw.Unsupported,
        ["no kernel system", "numpy", "meta"],
    ),
    **{
        f"tile {x!r}": (lambda x=x: tw.Tile(q=x), ValueError, ["Tile", "q must be a positive whole number", repr(x)])
        for x in (0, -1, True, 1.5, "8", None)
    },
    "tile too large": (lambda: tw.Tile(10**20), ValueError, ["Tile", "q must be", "of 32 bits", str(10**20)]),
    "tile k": (lambda: tw.Tile(4, 0), ValueError, ["Tile", "k must be a positive whole number", "0"]),
    # -- masks
    "mask of other queries": (
        lambda: call(mask=np.ones((5, 7), bool)),
        ValueError,
        ["mask:", "(2, 4, 6, 7)", "(5, 7)"],
    ),
    "mask of other keys": (lambda: call(mask=np.ones((6, 6), bool)), ValueError, ["mask:", "(6, 6)"]),
    "mask of other heads": (lambda: call(mask=np.ones((2, 2, 6, 7), bool)), ValueError, ["mask:", "(2, 2, 6, 7)"]),
    "mask of other batch": (lambda: call(mask=np.ones((3, 1, 6, 7))), ValueError, ["mask:", "(3, 1, 6, 7)"]),
    "mask of no dimensions": (lambda: call(mask=np.array(True)), ValueError, ["mask:", "1 to 4 dimensions", "()"]),
    "mask of five dimensions": (
        lambda: call(mask=np.ones((1, 1, 1, 6, 7), bool)),
        ValueError,
        ["mask:", "1 to 4 dimensions"],
    ),
    "mask of integers": (
        lambda: call(mask=np.ones((6, 7), int)),
        TypeError,
        ["mask:", "bool (True: may attend) or float", "int64"],
    ),
    "mask of bytes": (lambda: call(mask=np.ones((6, 7), np.uint8)), TypeError, ["mask:", "uint8"]),
    "mask complex": (lambda: call(mask=np.ones((6, 7), complex)), TypeError, ["mask:", "complex128"]),
    "mask function": (
        lambda: call(mask=lambda b, h, q, k: q >= k),
        TypeError,
        ["mask:", "function", "tw.from_mask_mod"],
    ),
    "mask variant uncalled": (lambda: call(mask=tw.causal), TypeError, ["mask:", "function"]),
    "mask text": (lambda: call(mask="causal()"), TypeError, ["mask:", "str", "tw.parse"]),
    "mask list": (lambda: call(mask=[[True]]), TypeError, ["mask:", "list", "np.array(...)"]),
    "mask True": (lambda: call(mask=True), TypeError, ["mask:", "bool"]),
    "mask number": (lambda: call(mask=Q - K), TypeError, ["mask:", "condition", "Q - K", "score"]),
    "mask score": (lambda: call(mask=tw.softcap(3.0)), TypeError, ["mask:", "pass it as score"]),
    "mask reads S": (lambda: call(mask=S > 0), ValueError, ["mask:", "S > 0.0", "tw.where"]),
    "meta mask": (
        lambda: call(**tensors(), mask=torch.ones(6, 7, dtype=torch.bool, device="meta")),
        ValueError,
        ["mask must be on cpu", "got meta"],
    ),
    # -- scores
    "score condition": (lambda: call(score=Q < K), TypeError, ["score:", "Q < K", "pass it as mask"]),
    "score function": (
        lambda: call(score=lambda s, b, h, q, k: s),
        TypeError,
        ["score:", "function", "tw.from_score_mod"],
    ),
    "score array": (lambda: call(score=make(6, 7)), TypeError, ["score:", "ndarray"]),
    "score text": (lambda: call(score="S"), TypeError, ["score:", "str"]),
    "score number": (lambda: call(score=2.0), TypeError, ["score:", "float"]),
    "alibi of other heads": (
        lambda: call(score=tw.alibi(3)),
        ValueError,
        ["alibi: slopes must be for 4 heads, as q has, got 3", "(3,)", "; pass alibi(4)"],
    ),
    "alibi slopes of other heads": (
        lambda: call(score=tw.alibi(make(2))),
        ValueError,
        ["alibi: slopes must be for 4 heads", "got 2", "(axis 0 of shape (2,))"],
    ),
    "document ids too short": (
        lambda: call(mask=tw.document(np.zeros(5, int), np.zeros(7, int))),
        ValueError,
        ["document: ids must be for 6 queries, got 5", "(5,)"],
    ),
    "document ids for q and k of different lengths": (
        lambda: call(mask=tw.document(np.zeros(6, int))),
        ValueError,
        ["document: ids", "unless k_ids are given", "must be for 7 keys, got 6"],
    ),
    "document ids of another batch": (
        lambda: call(mask=tw.document(np.zeros((3, 6), int), np.zeros(7, int))),
        ValueError,
        ["document: ids must be for 2 sequences (the batch), got 3 (axis 0 of shape (3, 6))"],
    ),
    "bias of other keys": (
        lambda: call(score=tw.bias(make(6, 8))),
        ValueError,
        ["bias: values must be for 7 keys, got 8", "(6, 8)"],
    ),
    "relative of other heads": (
        lambda: call(score=tw.relative(make(3, 5))),
        ValueError,
        ["relative: table must be for 4 heads", "got 3", "(3, 5)"],
    ),
    "t5 of other heads": (
        lambda: call(score=tw.t5(make(8, 3))),
        ValueError,
        ["t5: table must be for 4 heads", "got 3"],
    ),
    "dense too large": (
        lambda: call(mask=tw.dense(np.ones((60, 70), bool))),
        ValueError,
        ["dense: mask must be for 6 queries, got 60 (axis 0 of shape (60, 70))"],
    ),
    "dense of other heads after a copy": (
        lambda: call(mask=deepcopy(tw.dense(np.ones((3, 6, 7), bool)))),
        ValueError,
        ["dense: mask must be for 4 heads", "got 3"],
    ),
    "torch bias of other keys": (
        lambda: call(**tensors(), score=tw.bias(torch.zeros(6, 8))),
        ValueError,
        ["bias: values must be for 7 keys, got 8"],
    ),
    "a load by hand of other heads": (
        lambda: call(score=S + tw.load(make(3), H)),
        ValueError,
        ["a loaded array", "load(a0, H)", "shape (3,)", "expected 4 along axis 0, got 3", "H 4"],
    ),
    "meta ids": (
        lambda: call(
            **tensors(),
            mask=tw.document(torch.zeros(6, dtype=torch.int, device="meta"), torch.zeros(7, dtype=torch.int)),
        ),
        ValueError,
        ["document: ids must be on cpu, as q is, got meta"],
    ),
    "overflow": (lambda: call(mask=Q * 2_000_000_000 < K), ValueError, ["Q * 2000000000", "32 bits"]),
    # -- variants
    "window of text": (lambda: tw.window("3"), ValueError, ["window: left", "whole number", "'3'"]),
    "window negative": (lambda: tw.window(3, -1), ValueError, ["window: right", "-1"]),
    "window float": (lambda: tw.window(3.0), ValueError, ["window: left", "3.0"]),
    "prefix negative": (lambda: tw.prefix(-1), ValueError, ["prefix: n", "-1"]),
    "dilated 0": (lambda: tw.dilated(0), ValueError, ["dilated: step", "0"]),
    "softcap 0": (lambda: tw.softcap(0), ValueError, ["softcap: cap", "positive", "0"]),
    "softcap NaN": (lambda: tw.softcap(float("nan")), ValueError, ["softcap: cap", "nan"]),
    "softcap text": (lambda: tw.softcap("30"), ValueError, ["softcap: cap", "'30'"]),
    "alibi 0": (lambda: tw.alibi(0), ValueError, ["alibi", "number of heads", "0"]),
    "alibi True": (lambda: tw.alibi(True), ValueError, ["alibi", "True"]),
    "alibi ints": (lambda: tw.alibi(np.ones(4, int)), TypeError, ["alibi: slopes", "float", "int64"]),
    "alibi list": (lambda: tw.alibi([0.5]), TypeError, ["alibi: slopes", "list"]),
    "document floats": (lambda: tw.document(make(4)), TypeError, ["document: ids", "int", "float32"]),
    "document list": (
        lambda: tw.document([0, 0, 1]),
        TypeError,
        ["document: ids", "list", "np.array(...) or torch.tensor(...)"],
    ),
    "dense list": (lambda: tw.dense([[True]]), TypeError, ["dense: mask", "list", "np.array(...)"]),
    "document 3-D": (
        lambda: tw.document(np.zeros((1, 2, 3), int)),
        ValueError,
        ["document: ids", "1 or 2 dimensions", "(1, 2, 3)"],
    ),
    "dense floats": (lambda: tw.dense(make(4, 4)), TypeError, ["dense: mask", "bool", "float32"]),
    "bias bools": (lambda: tw.bias(np.ones((4, 4), bool)), TypeError, ["bias: values", "float", "bool"]),
    "bias 5-D": (lambda: tw.bias(make(1, 1, 1, 4, 4)), ValueError, ["bias: values", "dimensions"]),
    "signed table even": (lambda: tw.relative(make(4), signed=True), ValueError, ["relative", "odd", "4"]),
    "empty table": (lambda: tw.relative(make(0)), ValueError, ["relative: table", "at least one entry", "none"]),
    "t5 odd": (lambda: tw.t5(make(7, 4)), ValueError, ["t5", "even", "7"]),
    "t5 too far": (lambda: tw.t5(make(32, 4), max_distance=10**9), ValueError, ["t5: max_distance", "1048576"]),
    "t5 too near": (lambda: tw.t5(make(32, 4), max_distance=3), ValueError, ["t5: max_distance", "3"]),
    # -- sinks
    "sinks of other heads": (lambda: call(sinks=make(2)), ValueError, ["sinks:", "(4,)", "(2,)"]),
    "sinks 2-D": (lambda: call(sinks=make(2, 4)), ValueError, ["sinks:", "(4,)", "(2, 4)"]),
    "sinks ints": (lambda: call(sinks=np.ones(4, int)), TypeError, ["sinks:", "floats", "int64"]),
    "sinks complex": (lambda: call(sinks=np.ones(4, complex)), TypeError, ["sinks:", "floats", "complex128"]),
    "sinks list": (lambda: call(sinks=[1.0] * 4), TypeError, ["sinks:", "floats", "list", "np.array(...)"]),
    "sinks of torch for NumPy": (lambda: call(sinks=torch.ones(4)), ValueError, ["sinks:", "NumPy array"]),
    "sinks of NumPy for torch": (lambda: call(**tensors(), sinks=make(4)), ValueError, ["sinks:", "PyTorch tensor"]),
    # -- packed sequences
    "lengths not monotone": (
        lambda: packed((0, 5, 4, 6), (0, 1, 2, 7)),
        ValueError,
        ["lengths_q:", "rise from 0 to 6", "5"],
    ),
    "lengths not from 0": (lambda: packed((1, 6), (0, 7)), ValueError, ["lengths_q:", "from 0 to 6", "1"]),
    "lengths of a wrong end": (lambda: packed((0, 6), (0, 8)), ValueError, ["lengths_k:", "from 0 to 7", "8"]),
    "lengths short": (lambda: packed((0, 5), (0, 7)), ValueError, ["lengths_q:", "to 6", "5"]),
    "lengths that wrap around": (
        lambda: packed(np.array([0, 2**63 - 1, -(2**63), -1, 6]), (0, 1, 2, 3, 7)),
        ValueError,
        ["lengths_q:", "rise from 0 to 6", "9223372036854775807"],
    ),
    "lengths of keys that wrap around": (
        lambda: packed((0, 1, 2, 3, 6), np.array([0, 2**63 - 1, -(2**63), -1, 7])),
        ValueError,
        ["lengths_k:", "rise from 0 to 7"],
    ),
    "lengths of 8 bits": (
        lambda: packed(np.array([0, 127, -128, 6], np.int8), (0, 1, 2, 7)),
        ValueError,
        ["lengths_q:", "127 -128"],
    ),
    "lengths of unsigned 8 bits": (
        lambda: packed(np.array([0, 255, 6], np.uint8), (0, 1, 7)),
        ValueError,
        ["lengths_q:", "255"],
    ),
    "lengths of unsigned 64 bits": (
        lambda: packed(np.array([0, 2**64 - 1, 6], np.uint64), (0, 1, 7)),
        ValueError,
        ["lengths_q:", "int64", "uint64"],
    ),
    "lengths beyond 64 bits": (lambda: packed([0, 2**70, 6], (0, 1, 7)), ValueError, ["lengths_q:", "integers"]),
    "lengths of a tensor that wrap around": (
        lambda: packed(torch.tensor([0, 2**63 - 1, -(2**63), -1, 6]), (0, 1, 2, 3, 7)),
        ValueError,
        ["lengths_q:", "rise from 0 to 6"],
    ),
    "lengths float": (lambda: packed(np.array([0.0, 6.0]), (0, 7)), ValueError, ["lengths_q:", "integers", "float64"]),
    "lengths 2-D": (lambda: packed(np.array([[0, 6]]), (0, 7)), ValueError, ["lengths_q:", "1-D", "(1, 2)"]),
    "lengths a number": (lambda: packed(6, (0, 7)), ValueError, ["lengths_q:", "1-D"]),
    "lengths empty": (lambda: packed([], (0, 7)), ValueError, ["lengths_q:"]),
    "lengths None": (lambda: packed(None, (0, 7)), (ValueError, TypeError), ["lengths_q:"]),
    "lengths text": (lambda: packed("06", (0, 7)), (ValueError, TypeError), ["lengths_q:"]),
    "lengths ragged": (lambda: packed([[0], [1, 2]], (0, 7)), (ValueError, TypeError), ["lengths_q:"]),
    "lengths of different numbers": (lambda: packed((0, 3, 6), (0, 7)), ValueError, ["lengths_k:", "3 entries", "2"]),
    "packed of rank 4": (lambda: packed(q=make(1, 4, 6, 8)), ValueError, ["q:", "(total, heads, d)", "(1, 4, 6, 8)"]),
    "packed with a mask array": (
        lambda: packed(mask=np.ones((6, 7), bool)),
        TypeError,
        ["mask:", "expression", "tw.load"],
    ),
    "packed ids too short": (
        lambda: packed(mask=tw.load(np.zeros(5, int), tw.QP) == 0),
        ValueError,
        ["load(a0, QP)", "expected 6"],
    ),
    "packed batch too short": (
        lambda: packed(score=S + tw.load(make(1), tw.B)),
        ValueError,
        ["load(a0, B)", "expected 2"],
    ),
    "one length": (
        lambda: tw.attention_vjp(make(6, 4, 8), make(7, 2, 8), make(7, 2, 8), lengths_q=[0, 6]),
        ValueError,
        ["lengths_q, lengths_k", "both"],
    ),
    # -- pullback, merge, weights, explain
    "d_out of another shape": (
        lambda: pullback(make(2, 4, 6, 8)),
        ValueError,
        ["d_out:", "(2, 4, 6, 5)", "(2, 4, 6, 8)"],
    ),
    "d_out a list": (lambda: pullback([1.0]), (ValueError, TypeError), ["d_out:", "list"]),
    "d_out a number": (lambda: pullback(1.0), (ValueError, TypeError), ["d_out:", "float"]),
    "d_lse of another shape": (
        lambda: pullback(d_lse=make(2, 4, 6, 5)),
        ValueError,
        ["d_lse:", "(2, 4, 6)", "(2, 4, 6, 5)"],
    ),
    "d_out complex": (lambda: pullback(np.ones((2, 4, 6, 5), complex)), TypeError, ["d_out:", "float32", "complex128"]),
    "d_out of torch": (
        lambda: pullback(torch.ones(2, 4, 6, 5)),
        TypeError,
        ["d_out:", "NumPy array", "PyTorch tensor"],
    ),
    "merge nothing": (lambda: tw.merge([]), ValueError, ["merge", "at least one", "none"]),
    "merge of other lengths": (
        lambda: tw.merge([done(), done(6)]),
        ValueError,
        ["merge", "out of partial 1", "(2, 2, 6, 3)", "(2, 2, 5, 3)"],
    ),
    "merge of other dims": (lambda: tw.merge([done(), done(5, 4)]), ValueError, ["merge", "out of partial 1"]),
    "merge lse of another shape": (
        lambda: tw.merge([(done()[0], make(2, 2, 4))]),
        ValueError,
        ["merge", "lse of partial 0", "(2, 2, 4)", "(2, 2, 5)"],
    ),
    "merge of outs alone": (lambda: tw.merge([done()[0]]), TypeError, ["merge", "partial 0", "(out, lse)", "ndarray"]),
    "merge of lists": (lambda: tw.merge([([1.0], [1.0])]), TypeError, ["merge", "partial 0", "arrays", "list"]),
    "merge of both libraries": (
        lambda: tw.merge([done(), tuple(map(torch.from_numpy, done()))]),
        TypeError,
        ["merge", "partial 1", "library"],
    ),
    "merge with sinks of other heads": (
        lambda: tw.merge([done()], sinks=make(3)),
        ValueError,
        ["sinks:", "(2,)", "(3,)"],
    ),
    "rows beyond the end": (
        lambda: tw.weights(make(6, 8), make(6, 8), make(6, 8), rows=[0, 6]),
        ValueError,
        ["rows:", "-6 to 5", "6"],
    ),
    "rows below": (lambda: tw.weights(make(6, 8), make(6, 8), make(6, 8), rows=-7), ValueError, ["rows:", "-7"]),
    "rows float": (
        lambda: tw.weights(make(6, 8), make(6, 8), make(6, 8), rows=1.0),
        ValueError,
        ["rows:", "whole numbers"],
    ),
    "rows bool": (lambda: tw.weights(make(6, 8), make(6, 8), make(6, 8), rows=True), ValueError, ["rows:", "True"]),
    "rows 2-D": (lambda: tw.weights(make(6, 8), make(6, 8), make(6, 8), rows=[[1]]), ValueError, ["rows:", "[[1]]"]),
    "rows None": (lambda: tw.weights(make(6, 8), make(6, 8), make(6, 8), rows=None), ValueError, ["rows:", "None"]),
    "explain checks too": (lambda: tw.explain(make(6, 8), make(6, 9), make(6, 8)), ValueError, ["k:", "9"]),
    "positional options": (lambda: tw.attention(make(6, 8), make(6, 8), make(6, 8), True), TypeError, ["positional"]),
    "unknown option": (lambda: call(is_causal=True), TypeError, ["is_causal"]),
}


@pytest.mark.parametrize("name", TABLE)
def test_bad_input(name):
    bad, kind, parts = TABLE[name]
    with pytest.raises(kind) as error:
        bad()
    for part in parts:
        assert part in str(error.value), str(error.value)
    assert len(str(error.value)) < 600


def test_nothing_is_written():
    """Neither by calls that fail nor by calls that work, forward and backward."""
    q, k, v = make(2, 4, 6, 8), make(2, 2, 7, 8), make(2, 2, 7, 5)
    bias, ids, sinks, mask = make(4, 6, 7), np.arange(6), make(4), np.ones((6, 7), bool)
    d_out, lengths = make(2, 4, 6, 5), np.array([0, 3, 6])
    given = [q, k, v, bias, ids, sinks, mask, d_out, lengths]
    for x in given:
        x.flags.writeable = False  # writing raises
    copies = [x.copy() for x in given]
    tw.attention(q, k, v, mask=mask, score=tw.bias(bias), sinks=sinks)
    out, pull = tw.attention_vjp(
        q, k, v, mask=tw.document(ids, np.arange(7)), score=tw.bias(bias, grad=True), sinks=sinks
    )
    pull(d_out)
    tw.attention_varlen(q[0].swapaxes(0, 1), *(x[0, :, :6].swapaxes(0, 1) for x in (k, v)), lengths, lengths)
    tw.weights(q, k, v, rows=[0])
    tw.merge([tw.attention(q, k, v, return_lse=True)] * 2)
    for bad in ({"mask": np.ones((5, 5), bool)}, {"score": tw.alibi(3)}, {"sinks": make(3)}, {"kernel": "none"}):
        with pytest.raises(ValueError):
            tw.attention(q, k, v, **bad)
    assert out.shape == (2, 4, 6, 5)
    for x, copy in zip(given, copies, strict=True):
        np.testing.assert_array_equal(x, copy)


# -- the edges of what is allowed -------------------------------------------------------------------------------------

EDGES = {
    "no queries": ((2, 4, 0, 8), (2, 2, 7, 8), (2, 2, 7, 5)),
    "no keys": ((2, 4, 6, 8), (2, 2, 0, 8), (2, 2, 0, 5)),
    "nothing at all": ((2, 4, 0, 8), (2, 2, 0, 8), (2, 2, 0, 5)),
    "no batch": ((0, 4, 6, 8), (0, 2, 7, 8), (0, 2, 7, 5)),
    "one of each": ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    "d = 1": ((2, 4, 6, 1), (2, 2, 7, 1), (2, 2, 7, 1)),
    "d = 512": ((1, 2, 6, 512), (1, 1, 7, 512), (1, 1, 7, 512)),
    "n = 1": ((2, 4, 1, 8), (2, 2, 1, 8), (2, 2, 1, 5)),
    "one head": ((2, 1, 6, 8), (2, 1, 7, 8), (2, 1, 7, 5)),
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"score": tw.softcap(2.0)}], ids=["full", "causal", "softcap"]
)
def test_edges_of_shapes(name, options):
    q, k, v = (make(*shape) for shape in EDGES[name])
    spec = Attention(1 / np.sqrt(q.shape[3]), tw.causal() if "causal" in options else None, options.get("score"))
    want = reference.forward(spec, q, k, v)
    for library in (lambda x: x, torch.from_numpy):
        out, lse = tw.attention(library(q), library(k), library(v), return_lse=True, **options)
        np.testing.assert_allclose(np.asarray(out), want.out, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.asarray(lse), want.lse, rtol=1e-5, atol=1e-5)
    _, pull = tw.attention_vjp(q, k, v, **options)
    grads = pull(np.ones((*q.shape[:3], v.shape[3]), np.float32))
    assert (grads.q.shape, grads.k.shape, grads.v.shape) == (q.shape, k.shape, v.shape)
    assert all(np.isfinite(g).all() for g in (grads.q, grads.k, grads.v))
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    tw.attention(*tensors, **options).sum().backward()
    np.testing.assert_allclose(tensors[0].grad.numpy(), grads.q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 8), (2, 6, 8), (2, 4, 6, 8)])
def test_results_have_the_layout_of_the_inputs(shape):
    x = make(*shape)
    out, lse = tw.attention(x, x, x, return_lse=True)
    assert (out.shape, lse.shape) == (shape, shape[:-1])
    assert isinstance(out, np.ndarray)
    assert (out.dtype, lse.dtype) == (np.float32, np.float32)
    alone = tw.attention(x, x, x)
    assert isinstance(alone, np.ndarray)
    _, pull = tw.attention_vjp(x, x, x)
    grads = pull(out, lse)
    assert isinstance(grads, tw.Grads)
    assert grads.q.shape == grads.k.shape == grads.v.shape == shape
    assert grads.sinks is None
    assert grads.arrays == ()
    assert isinstance(tw.merge([(out, lse)]), tw.Partial)
    per_batch = make(*shape[:1], 6, 6) if len(shape) == 3 else make(6, 6)
    assert tw.attention(x, x, x, mask=per_batch).shape == shape


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_scores_of_ten_thousand(dtype):
    """exp(1e4) overflows every type: only the largest score's key has weight."""
    q, k, v = (100 * np.ones((1, 1, 4, 1))).astype(dtype), np.zeros((1, 1, 5, 1), dtype), make(1, 1, 5, 3).astype(dtype)
    k[0, 0, :, 0] = np.array([100, -100, 50, 0, 99]).astype(dtype)
    out, lse = tw.attention(q, k, v, scale=1.0, return_lse=True)
    assert np.isfinite(np.asarray(out, np.float64)).all()
    np.testing.assert_array_equal(
        np.asarray(out, np.float64)[0, 0], np.broadcast_to(np.asarray(v, np.float64)[0, 0, 0], (4, 3))
    )
    np.testing.assert_array_equal(lse, 1e4)
    _, pull = tw.attention_vjp(q, k, v, scale=1.0)
    grads = pull(np.ones((1, 1, 4, 3)).astype(dtype))
    assert all(np.isfinite(np.asarray(g, np.float64)).all() for g in (grads.q, grads.k, grads.v))


@pytest.mark.parametrize("tensor", [False, True])
def test_rows_that_see_nothing(tensor):
    q, k, v = ((torch.from_numpy(x) if tensor else x) for x in (make(1, 2, 6, 4), make(1, 2, 3, 4), make(1, 2, 3, 4)))
    for options, rows in (
        ({"causal": True}, slice(0, 3)),
        ({"mask": K < 0}, slice(None)),
        ({"mask": np.zeros((6, 3), bool)}, slice(None)),
        ({"mask": np.full((6, 3), -np.inf, np.float32)}, slice(None)),
        ({"score": tw.where(Q < 2, -np.inf, S)}, slice(0, 2)),
    ):
        out, lse = tw.attention(q, k, v, return_lse=True, **options)
        assert (np.asarray(out)[:, :, rows] == 0).all()
        assert (np.asarray(lse)[:, :, rows] == -np.inf).all()
        assert np.isfinite(np.asarray(out)).all()


def test_what_is_allowed_is_allowed():
    """Near misses of the table above."""
    assert call().shape == OK_OUT
    assert call(mask=np.ones((6, 7), bool)).shape == OK_OUT
    assert call(mask=np.ones((1, 1, 1, 7), bool)).shape == OK_OUT
    assert call(mask=np.ones(7, bool)).shape == OK_OUT
    assert call(mask=np.ones((2, 4, 6, 7), np.float16)).shape == OK_OUT
    assert call(scale=np.float32(0.5), causal=np.True_).shape == OK_OUT
    assert call(scale=0).shape == OK_OUT
    assert call(scale=-1).shape == OK_OUT
    assert call(kernel="numpy", score=Q * 1).shape == OK_OUT
    assert call(mask=tw.load(np.zeros(3, int), H % 3) <= NK).shape == OK_OUT
    assert call(**tensors(), mask=np.ones((6, 7), bool)).shape == OK_OUT
    assert packed().shape == (6, 4, 5)
    assert packed([0, 0, 6, 6], [0, 7, 7, 7]).shape == (6, 4, 5)
    assert packed(torch.tensor([0, 4, 6]), np.array([0, 2, 7], np.int32)).shape == (6, 4, 5)
    assert packed(score=S + tw.load(make(9), K)).shape == (6, 4, 5)
    assert tw.attention_varlen(make(0, 4, 8), make(0, 2, 8), make(0, 2, 5), [0], [0]).shape == (0, 4, 5)
    assert tw.Tile(1, 1).q == 1
    uniform = call(scale=0.0)
    mean = np.repeat(make(2, 2, 7, 5), 2, axis=1).mean(axis=2, keepdims=True)
    np.testing.assert_allclose(uniform, mean.repeat(6, axis=2), rtol=1e-5, atol=1e-6)
