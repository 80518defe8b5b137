"""From a caller's arguments to a Call: everything checked at once, nothing copied.

`outline` checks what can be told without looking at any numbers (torch.compile has none to look at), `settle` the
rest, `prepare` both. Every error names the argument, what came and what was expected.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise import arrays, schedule, variants
from tilewise.expr import BOOL, INT32_MAX, Expr, as_float, keep
from tilewise.rope import check as check_rope
from tilewise.sharing import lazy
from tilewise.spec import Attention, Lengths, Shape
from tilewise.walking import nodes, variables

MAX_HEAD_DIM = 512
LOADED = "a loaded array (mask, bias, table ...)"
PACKED = 0
_COUNTED = {
    "B": "sequences (the batch)", "H": "heads, as q has", "HK": "heads, as k has", "Q": "queries", "K": "keys",
    "QP": "packed queries", "KP": "packed keys",
}  # fmt: skip
_LAYOUTS = {2: "(n, d)", 3: "(batch, n, d)", 4: "(batch, heads, n, d)"}


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call: q, k, v as (batch, heads, n, d) views, and the layout that results go back to."""

    spec: Attention
    q: Any
    k: Any
    v: Any
    rank: int  # of the caller's arrays, or PACKED

    @lazy
    def shape(self) -> Shape:
        return Shape.of(self.spec, self.q, self.k, self.v)

    def restore(self, x: Any) -> Any:
        """An array of (batch, heads, n, ...) in the caller's layout."""
        return restore(x, self.rank)

    def expand(self, x: Any) -> Any:
        """The opposite of restore."""
        return expand(x, self.rank)


def restore(x: Any, rank: int) -> Any:
    """An array of (batch, heads, n, ...) as callers have it whose arrays are of this rank, or PACKED."""
    if rank == PACKED:
        return x[0].swapaxes(0, 1)
    return x[0, 0] if rank == 2 else x[:, 0] if rank == 3 else x


def expand(x: Any, rank: int) -> Any:
    """A caller's array as (batch, heads, n, ...), without a copy."""
    if rank == PACKED:
        return x.swapaxes(0, 1)[None]
    return x[None, None] if rank == 2 else x[:, None] if rank == 3 else x


def prepare(q: Any, k: Any, v: Any, **options: Any) -> Call:
    """Check a dense call; options are those of `attention` that say what to compute."""
    return _settled(outline(q, k, v, **options))


def prepare_varlen(q: Any, k: Any, v: Any, lengths_q: Any, lengths_k: Any, **options: Any) -> Call:
    """Check a call on packed sequences."""
    return _settled(outline_varlen(q, k, v, lengths_q, lengths_k, **options))


def _settled(call: Call) -> Call:
    return replace(call, spec=settle(call.spec, call.shape))


def outline(q: Any, k: Any, v: Any, **options: Any) -> Call:
    """A dense call, as far as types, sizes and devices tell that it is right."""
    q, k, v, rank = views(q, k, v)
    return _on_one_device(Call(_spec(q, k, rank, **options), q, k, v, rank))


def views(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any, int]:
    """q, k, v as (batch, heads, n, d), checked, and the rank that they came with."""
    _check_arrays(q, k, v)
    rank = len(q.shape)
    if rank not in _LAYOUTS:
        raise ValueError(f"q: expected {', '.join(_LAYOUTS.values())}, got shape {tuple(q.shape)}")
    for name, x in (("k", k), ("v", v)):
        if len(x.shape) != rank:
            raise ValueError(
                f"{name}: expected {_LAYOUTS[rank]} as q has, got shape {tuple(x.shape)}; q: {tuple(q.shape)}"
            )
    q, k, v = (expand(x, rank) for x in (q, k, v))
    _check_sizes(q, k, v)
    return q, k, v, rank


def outline_varlen(q: Any, k: Any, v: Any, lengths_q: Any, lengths_k: Any, **options: Any) -> Call:
    """The same for packed sequences; their lengths are as the caller gave them."""
    q, k, v = packed_views(q, k, v)
    lengths = Lengths(as_lengths("lengths_q", lengths_q), as_lengths("lengths_k", lengths_k))
    if lengths.q.shape != lengths.k.shape:
        raise ValueError(f"lengths_k: expected {len(lengths.q)} entries as lengths_q has, got {len(lengths.k)}")
    return _on_one_device(Call(_spec(q, k, PACKED, lengths, **options), q, k, v, PACKED))


def packed_views(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Packed (total, heads, d) arrays as a batch of one, checked."""
    _check_arrays(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 3:
            raise ValueError(f"{name}: packed sequences are (total, heads, d), got shape {tuple(x.shape)}")
    q, k, v = (expand(x, PACKED) for x in (q, k, v))
    _check_sizes(q, k, v)
    return q, k, v


def settle(spec: Attention, shape: Shape) -> Attention:
    """Check the numbers: what lengths hold, and what the variant reads against the sizes of the call."""
    if spec.lengths is not None:
        lengths_q = cumulative("lengths_q", spec.lengths.q, shape.n_q, "q")
        lengths_k = cumulative("lengths_k", spec.lengths.k, shape.n_k, "k")
        spec = replace(spec, lengths=Lengths(lengths_q, lengths_k))
    check_variant(spec, shape)
    return spec


def check_operands(q: Any, k: Any, v: Any, sinks: Any, loaded: Sequence[Any]) -> None:
    """Check the (batch, heads, n, d) arrays, and those beside them, of a call that comes as an operator's operands."""
    _check_arrays(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            raise ValueError(f"{name}: expected (batch, heads, n, d), got shape {tuple(x.shape)}")
    _check_sizes(q, k, v)
    _sinks(sinks, q)
    for array in loaded:
        _check_device(array, q)


def _check_arrays(q: Any, k: Any, v: Any) -> None:
    first: tuple[bool, str, str] | None = None
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not arrays.is_array(x):
            advice = arrays.list_advice(x)
            raise TypeError(f"{name}: expected a NumPy array or a PyTorch tensor, got {type(x).__name__}{advice}")
        tensor, dtype, device = found = arrays.is_torch(x), arrays.dtype_name(x), arrays.device_name(x)
        first = first or found
        if tensor != first[0]:
            advice = f"{'torch.as_tensor' if first[0] else 'np.asarray'}({name})"
            raise TypeError(f"{name}: expected {_library(q)} as q is, got {_library(x)}; convert it: {advice}")
        if dtype not in arrays.FLOAT_DTYPES:
            raise TypeError(f"{name}: expected {', '.join(arrays.FLOAT_DTYPES)}, got {dtype}")
        if dtype != first[1]:
            advice = f"{name}.to(q.dtype)" if tensor else f"{name}.astype(q.dtype)"
            raise TypeError(f"{name}: expected {first[1]} as q is, got {dtype}; convert it: {advice}")
        if tensor and str(x.layout) != "torch.strided":
            raise TypeError(
                f"{name}: expected a dense tensor, got one of layout {x.layout}; convert it with .to_dense()"
            )
        if device != first[2]:
            raise ValueError(
                f"{name}: expected device {first[2]} as q is on, got {device}; move it: {name}.to(q.device)"
            )


def _library(x: Any) -> str:
    return "a PyTorch tensor" if arrays.is_torch(x) else "a NumPy array"


def _check_sizes(q: Any, k: Any, v: Any) -> None:
    """Sizes of (batch, heads, n, d) arrays that must agree."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        step = x.stride(3) if arrays.is_torch(x) else x.strides[3] // x.itemsize
        if step != 1 and x.shape[3] > 1 and 0 not in x.shape:
            copy = ".contiguous()" if arrays.is_torch(x) else "np.ascontiguousarray(...)"
            raise ValueError(
                f"{name}: the last dimension must be contiguous, got a stride of {step}; copy it with {copy}"
            )
        check_head_dim(name, x)
        if x.shape[0] != q.shape[0]:
            advice = _to_share(name, q, x)
            raise ValueError(f"{name}: expected a batch of {q.shape[0]} as q has, got {x.shape[0]}{advice}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k: expected a head dimension (the last) of {q.shape[3]} as q has, got {k.shape[3]}; only v's may differ"
        )
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v: expected {k.shape[2]} keys as k has, got {v.shape[2]}")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v: expected {k.shape[1]} heads as k has, got {v.shape[1]}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"k: its heads must divide q's {q.shape[1]} heads (grouped queries), got {k.shape[1]}; arrays are "
            "(batch, heads, n, d), packed ones (total, heads, d): swap axes if yours are others"
        )


def check_head_dim(name: str, x: Any) -> None:
    """Refuse an array whose last dimension no kernel system takes."""
    if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"{name}: expected a head dimension (the last) of 1 to {MAX_HEAD_DIM}, got {x.shape[-1]}")


def _to_share(name: str, q: Any, x: Any) -> str:
    """What to do with keys or values whose batch is not q's: one for all is shared without a copy."""
    if x.shape[0] != 1:
        return ""
    if arrays.is_torch(x):
        return f"; to share it: {name}.expand({q.shape[0]}, *{name}.shape[1:])"
    return f"; to share it: np.broadcast_to({name}, ({q.shape[0]}, *{name}.shape[1:]))"


def _scale(scale: Any, q: Any) -> float:
    return 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else finite_scale(scale)


def finite_scale(scale: Any) -> float:
    try:
        value = math.nan if isinstance(scale, bool) or not isinstance(scale, numbers.Real) else float(scale)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"scale: expected a finite number, got {reprlib.repr(scale)}")
    return value


def _spec(
    q: Any,
    k: Any,
    rank: int,
    lengths: Lengths | None = None,
    *,
    causal: Any = False,
    mask: Any = None,
    score: Any = None,
    scale: Any = None,
    sinks: Any = None,
    rope: Any = None,
    batch_invariant: Any = False,
) -> Attention:
    for name, flag in (("causal", causal), ("batch_invariant", batch_invariant)):
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name}: expected True or False, got {flag!r}")
    score_expr = score_expression(score)
    mask_expr: Expr | None = None
    if isinstance(mask, Expr):
        mask_expr = mask_expression(mask)
    elif mask is not None:
        aligned = _aligned_mask(mask, rank, (*q.shape[:3], k.shape[2]))
        _check_device(mask, q, "mask")
        if arrays.value_kind(mask) == "bool":
            mask_expr = variants.dense(aligned)
        else:
            added = variants.bias(aligned)
            score_expr = added if score_expr is None else score_expr >> added
    if causal:
        mask_expr = variants.causal() if mask_expr is None else variants.causal() & mask_expr
    if rope is not None:
        _check_rope(rope, q.shape[0], q.shape[2], k.shape[2], q.shape[3])
    spec = Attention(
        _scale(scale, q), mask_expr, score_expr, _sinks(sinks, q), lengths, batch_invariant=bool(batch_invariant),
        rope=rope,
    )  # fmt: skip
    for expr in spec.expressions:
        keep(expr)
    return spec


def score_expression(score: Any) -> Expr | None:
    if score is None:
        return None
    if not isinstance(score, Expr):
        advice = _function_advice(score, "tw.from_score_mod(fn)")
        if hasattr(score, "shape"):
            advice = "; write tw.bias(array) to add it to the scores"
        raise TypeError(f"score: expected an expression such as tw.softcap(30.0), got {type(score).__name__}{advice}")
    if score.kind == BOOL:
        raise TypeError(f"score: expected a number for each score, got the condition {score!r}; pass it as mask")
    return as_float(score)


def _function_advice(given: Any, wrapper: str) -> str:
    if any(given is variant for variant in variants.VARIANTS.values()):
        return f"; call it: tw.{given.__name__}(...)"
    return f"; wrap a FlexAttention function in {wrapper}" if callable(given) else ""


def mask_expression(mask: Expr) -> Expr:
    if mask.kind != BOOL:
        raise TypeError(f"mask: expected a condition such as tw.causal(), got the number {mask!r}; pass it as score")
    if "S" in variables(mask):
        raise ValueError(f"mask: {mask!r} reads the score S; write score=tw.where(condition, tw.S, -inf) instead")
    return mask


def _aligned_mask(mask: Any, rank: int, scores: tuple[int, ...]) -> Any:
    """A caller's mask array, with the axis for heads that three-dimensional inputs do not have."""
    if rank == PACKED:
        raise TypeError("mask: packed sequences take an expression; read an array with tw.load(array, tw.QP, ...)")
    if not arrays.is_array(mask):
        advice = _function_advice(mask, "tw.from_mask_mod(fn)")
        advice = "; parse text with tw.parse(text)" if isinstance(mask, str) else advice + arrays.list_advice(mask)
        raise TypeError(f"mask: expected an expression or an array of bool or float, got {type(mask).__name__}{advice}")
    if arrays.kind_of(mask) not in ("bool", "float"):
        raise TypeError(
            f"mask: expected bool (True: may attend) or float (added to scores), got {arrays.dtype_name(mask)}"
        )
    if not 1 <= len(mask.shape) <= rank:
        raise ValueError(
            f"mask: expected 1 to {rank} dimensions for {_LAYOUTS[rank]} inputs, got shape {tuple(mask.shape)}"
        )
    aligned = mask[:, None] if rank == 3 and len(mask.shape) == 3 else mask
    if any(have not in (1, want) for have, want in zip(aligned.shape[::-1], scores[::-1], strict=False)):
        layout = scores[2:] if rank == 2 else (scores[0], *scores[2:]) if rank == 3 else scores
        raise ValueError(f"mask: expected a shape that broadcasts to the scores' {layout}, got {tuple(mask.shape)}")
    return aligned


def _sinks(sinks: Any, q: Any) -> Any:
    if sinks is None:
        return None
    if not arrays.is_array(sinks) or arrays.kind_of(sinks) != "float":
        given = arrays.is_array(sinks)
        found = arrays.dtype_name(sinks) if given else f"{type(sinks).__name__}{arrays.list_advice(sinks)}"
        raise TypeError(f"sinks: expected an array of floats, one a query head, got {found}")
    if tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks: expected shape ({q.shape[1]},), one a query head, got {tuple(sinks.shape)}")
    if arrays.is_torch(sinks) != arrays.is_torch(q) or arrays.device_name(sinks) != arrays.device_name(q):
        raise ValueError(f"sinks: expected {_library(q)} on {arrays.device_name(q)} as q is")
    return sinks


def _check_rope(rope: Any, batch: int, n_q: int, n_k: int, d: int) -> None:
    check_rope(rope, batch, {"positions": n_q, "positions_k": n_k}, d)


def whole(name: str, value: Any, least: int = 1, most: int = INT32_MAX) -> int:
    """A whole number as an int, of whatever type it came."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
        raise ValueError(f"{name}: expected a whole number from {least} to {most}, got {value!r}")
    return int(value)


def as_lengths(name: str, lengths: Any) -> Any:
    if not arrays.is_array(lengths):
        try:
            lengths = np.asarray(lengths)
        except ValueError:
            raise TypeError(f"{name}: expected cumulative lengths [0, ..., total], got {lengths!r}") from None
    if arrays.kind_of(lengths) != "int" or len(lengths.shape) != 1 or lengths.shape[0] < 1:
        raise ValueError(
            f"{name}: expected a 1-D array of integers [0, ..., total] ({', '.join(arrays.INT_DTYPES)}), "
            f"got {arrays.dtype_name(lengths)} of shape {tuple(lengths.shape)}"
        )
    return lengths


def cumulative(name: str, lengths: Any, rows: int, what: str) -> np.ndarray[Any, Any]:
    # Plans are made on the host, so lengths on a GPU are waited for.
    values = arrays.as_numpy(lengths.cpu() if arrays.is_torch(lengths) else lengths).astype(np.int64)
    # Neighbours are compared: a difference of two could leave 64 bits.
    if values[0] != 0 or values[-1] != rows or np.any(values[1:] < values[:-1]):
        raise ValueError(
            f"{name}: expected cumulative lengths that rise from 0 to {rows} (the rows of {what}), "
            f"got {np.array2string(values, threshold=8)}"
        )
    return values


def _on_one_device(call: Call) -> Call:
    for slot in call.spec.loaded:
        if not slot.constant:
            _check_device(slot.array, call.q, slot.label or LOADED)
    for name, array in {} if call.spec.rope is None else call.spec.rope.arrays.items():
        _check_device(array, call.q, f"rope: {name}")
    return call


def _check_device(array: Any, q: Any, label: str = LOADED) -> None:
    if arrays.device_name(array) != arrays.device_name(q):
        raise ValueError(
            f"{label} must be on {arrays.device_name(q)}, as q is, got {arrays.device_name(array)}; "
            "move it there yourself: nothing is copied between devices silently"
        )


def check_variant(spec: Attention, shape: Shape) -> None:
    """Refuse arrays that do not fit the shape, and shapes at which the variant's integers would overflow."""
    if spec.rope is not None:
        _check_rope(spec.rope, shape.batch, shape.n_q, shape.n_k, shape.d)
    batch, n_q, n_k = shape.batch, shape.total_q, shape.total_k
    if spec.lengths is not None:
        batch = len(spec.lengths.q) - 1
        n_q, n_k = (int(np.max(np.diff(x), initial=0)) for x in (spec.lengths.q, spec.lengths.k))
    sizes = {
        "B": batch, "H": shape.heads, "HK": shape.heads_k, "Q": n_q, "K": n_k,
        "QP": shape.n_q, "KP": shape.n_k,
    }  # fmt: skip
    for expr in spec.expressions:
        for node in nodes(expr):
            if node.op == "load":
                _check_load(node, sizes, packed=spec.lengths is not None)
        schedule.check_integers(expr, shape, spec.lengths)


def _check_load(node: Expr, sizes: dict[str, int], packed: bool) -> None:
    """An index that is a plain variable must fit the array exactly; packed sequences may be shorter than a table."""
    slot, found = node.payload, tuple(node.payload.array.shape)
    for axis, index in enumerate(node.args):
        want = sizes.get(index.payload) if index.op == "var" else None
        if want is None or found[axis] == want:
            continue
        if packed and index.payload in ("Q", "K") and found[axis] == sizes[f"{index.payload}P"]:
            raise ValueError(
                f"{slot.label or LOADED} has a row for each packed row and is read as {node!r}, by position "
                f"in its sequence; read it with tw.load(array, tw.{index.payload}P), e.g. "
                "mask=tw.load(ids, tw.QP) == tw.load(ids, tw.KP)"
            )
        if not (packed and index.payload in ("Q", "K") and found[axis] > want):
            raise ValueError(_misfit(node, axis, want, sizes))


def _misfit(node: Expr, axis: int, want: int, sizes: dict[str, int]) -> str:
    """What is wrong with an array that is read by a variable: in a variant's words, or those of load(...)."""
    slot, found = node.payload, tuple(node.payload.array.shape)
    if slot.label:
        advice = f"; pass {slot.label.partition(':')[0]}({want})" if slot.constant else ""
        counted = f"{want} {_COUNTED[node.args[axis].payload]}"
        return f"{slot.label} must be for {counted}, got {found[axis]} (axis {axis} of shape {found}){advice}"
    told = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return (
        f"{LOADED} is read as {node!r} and has shape {found}: "
        f"expected {want} along axis {axis}, got {found[axis]} (sizes: {told})"
    )
