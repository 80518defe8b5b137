"""The PyTorch operators tilewise::attention and tilewise::attention_backward. Imported only when a tensor is passed.

`spec` is the line of text of wire.py and `arrays` are what it names; q, k, v are (batch, heads, n, d). An operator has
numbers, shapes without numbers (for torch.compile), gradients, and a way to be called under vmap.

tilewise::attention_with_remainder is what autograd calls in attention's place, in half precision: backward takes delta
from out + remainder. It is an operator of its own, so that inference has two results, computes two and allocates two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise import dispatch, validate, wire
from tilewise.arrays import stored_as, strides_as
from tilewise.kernels.gpus import lying
from tilewise.pytorch import autograd, ready, vmap
from tilewise.pytorch.ready import Ready, ReadyBackward, are_aligned, layout
from tilewise.sharing import Kept
from tilewise.spec import Attention, Partial, Shape
from tilewise.wire import Template

_CACHE_SIZE = 256
_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor[] arrays, Tensor? sinks, str spec"
# A row of a head stays contiguous: torch.compile may not choose other strides for what goes in.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library("tilewise", "DEF")
_library.define(f"attention({_OPERANDS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
_library.define(
    f"attention_backward({_OPERANDS}, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, int[] wanted,"
    " Tensor? remainder=None)"
    " -> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor[] d_others)",
    tags=_TAGS,
)
_library.define(f"attention_with_remainder({_OPERANDS}) -> (Tensor out, Tensor lse, Tensor remainder)", tags=_TAGS)
attention = torch.ops.tilewise.attention.default
attention_with_remainder = torch.ops.tilewise.attention_with_remainder.default
attention_backward = torch.ops.tilewise.attention_backward.default


# -- numbers ----------------------------------------------------------------------------------------------------------


def _forward(
    q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], sinks: Any, spec: str, keeps: bool = False
) -> tuple[Tensor, ...]:
    """out and lse, and if it keeps it the remainder: what sort of results follows from the operator, never from the
    kernel system, as compiled code relies on it."""
    q, k, v = map(_with_rows, (q, k, v))
    repeated = _repeated(q, k, v, arrays, sinks, spec, keeps)
    if repeated is not None:
        return repeated.run(q, k, v, sinks, arrays)
    template, shape = _recognise(q, k, v, arrays, sinks, spec)
    held = _settled(template, shape, arrays, sinks, keeps=keeps)
    system = dispatch.resolve(template.kernel, held, lying(shape, q=q, k=k, v=v))
    done = system.forward(held, q, k, v)
    strides = strides_as(q, v)
    out, lse = _stored(done.out, strides), _contiguous(done.lse)
    if not keeps:
        return out, lse
    return out, lse, _stored(torch.zeros_like(out) if done.remainder is None else done.remainder, strides)


_forward_with_remainder = partial(_forward, keeps=True)
_ready: Kept[Ready | None] = Kept(_CACHE_SIZE)


def _repeated(
    q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], sinks: Any, spec: str, keeps: bool
) -> Ready | None:
    """The launch of a call like one before. Not of packed sequences, whose lengths would have to be looked at."""
    if q.device.type not in ready.DEVICES or wire.is_packed(spec):
        return None
    beside = arrays if sinks is None else [*arrays, sinks]
    key = (spec, keeps, are_aligned(q, k, v), are_aligned(*arrays), *map(layout, (q, k, v, *beside)))
    return _ready.found(key, lambda: make_ready(q, k, v, arrays, sinks, spec, keeps))


def make_ready(
    q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], sinks: Any, spec: str, keeps: bool = False
) -> Ready | None:
    """The launch of this call, once it is checked, for all tensors that lie as these; None if its kernel system has no
    such thing, or there is nothing to compute. keeps: with the remainder of out."""
    system, held, arrays = _resolved(q, k, v, arrays, sinks, spec, keeps=keeps)
    prepared = system.prepared(held, q, k, v) if isinstance(system, dispatch.Prepares) else None
    if prepared is None:
        return None
    batch, heads, n, _ = q.shape
    out = stored_as(q, v)
    lse = (batch, heads, n), (heads * n, n, 1)
    return Ready(prepared, _places(held, arrays), out, lse, _out_dtype(q, spec), q.device, keeps)


def _resolved(
    q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], sinks: Any, spec: str, wanted: Sequence[int] = (),
    backward: bool = False, keeps: bool = False,
) -> tuple[dispatch.Kernel, Attention, list[Tensor]]:  # fmt: skip
    """Who computes the call, the attention that it says, and its arrays: one object a place, even if a tensor comes
    twice."""
    template, shape = _recognise(q, k, v, arrays, sinks, spec)
    arrays = [x.detach() for x in arrays]
    held = _settled(template, shape, arrays, sinks, wanted, keeps)
    shape = replace(lying(shape, q=q, k=k, v=v), backward=backward)
    return dispatch.resolve(template.kernel, held, shape), held, arrays


def _out_dtype(q: Tensor, spec: str) -> torch.dtype:
    return _computed_with(q) if wire.has_wide_out(spec) else q.dtype


def _computed_with(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _places(held: Attention, arrays: Sequence[Tensor]) -> list[int]:
    """Where the arrays that a variant reads are among those of the call."""
    place = {id(x): i for i, x in enumerate(arrays)}
    return [place[id(slot.array)] for slot in held.loaded]


def _backward(
    q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], sinks: Any, spec: str,
    out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, wanted: list[int], remainder: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """d_others: the gradients of the wanted arrays, in that order, and then that of sinks, if there are any."""
    q, k, v, d_out = map(_with_rows, (q, k, v, d_out))
    d_lse = None if d_lse is None else d_lse.contiguous()
    saved = Partial(out, lse, remainder)
    repeated = _repeated_backward(q, k, v, arrays, sinks, spec, saved, d_out, d_lse) if not wanted else None
    if repeated is not None:
        return repeated.run(q, k, v, arrays, sinks, saved, d_out, d_lse)
    system, held, arrays = _resolved(q, k, v, arrays, sinks, spec, wanted, backward=True)
    grads = system.backward(held, q, k, v, saved, d_out, d_lse)
    by_array = {id(slot.array): grad for slot, grad in zip(held.wanted, grads.arrays, strict=True)}
    others = [by_array[id(arrays[i])] for i in wanted] + ([] if sinks is None else [grads.sinks])
    return _contiguous(grads.q), _contiguous(grads.k), _contiguous(grads.v), [_contiguous(x) for x in others]


_ready_backward: Kept[ReadyBackward | None] = Kept(_CACHE_SIZE)


def _repeated_backward(
    q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], sinks: Any, spec: str,
    saved: Partial, d_out: Tensor, d_lse: Tensor | None,
) -> ReadyBackward | None:  # fmt: skip
    """The same for gradients, if none of an array is wanted."""
    if q.device.type not in ready.DEVICES or wire.is_packed(spec):
        return None
    operands = [q, k, v, saved.out, d_out, *([] if saved.remainder is None else [saved.remainder])]
    beside = [x for x in (saved.lse, d_lse, sinks) if x is not None]
    key = (
        spec, d_lse is None, saved.remainder is None,
        *map(are_aligned, operands), are_aligned(*arrays),  # each by itself: some may be copied
        *map(layout, (*operands, *beside, *arrays)),
    )  # fmt: skip

    def make() -> ReadyBackward | None:
        system, held, own = _resolved(q, k, v, arrays, sinks, spec, backward=True)
        if not isinstance(system, dispatch.PreparesBackward):
            return None
        prepared = system.prepared_backward(held, q, k, v, saved, d_out, d_lse)
        return ReadyBackward(prepared, _places(held, own))

    return _ready_backward.found(key, make)


def _with_rows(x: Tensor) -> Tensor:
    """Kernels take any strides but the last: gradients of sums come expanded from one number."""
    return x if x.shape[-1] < 2 or x.stride(-1) == 1 else x.contiguous()


def _stored(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with these strides: compiled code relies on what the operator says about its results."""
    if x.stride() == strides:
        return x
    if all(n < 2 or have == want for n, have, want in zip(x.shape, x.stride(), strides, strict=True)):
        return x.as_strided(x.shape, strides)
    return x.new_empty_strided(x.shape, strides).copy_(x)


def _contiguous(x: Tensor) -> Tensor:
    return x.contiguous() if x.numel() else x.new_empty(x.shape)  # NumPy has other strides where there is nothing


_recognised: dict[tuple[Any, ...], tuple[Template, Shape]] = {}


def _recognise(q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], sinks: Any, spec: str) -> tuple[Template, Shape]:
    """Read the spec, and check it against the operands, once for all operands of the same types and sizes."""
    template = wire.decode(spec, arrays)
    described = [(x.shape, x.dtype, x.device) for x in (q, k, v, sinks) if x is not None]
    key = (template, *described, *(x.device for x in arrays))
    found = _recognised.get(key)
    if found is None:
        # Lengths, the last two, may be anywhere: the host reads them.
        validate.check_operands(q, k, v, sinks, arrays[:-2] if template.packed else arrays)
        held = template.fill(arrays, sinks)
        shape = Shape.of(held, q, k, v)
        if not template.packed:
            validate.check_variant(held, shape)
        if len(_recognised) >= _CACHE_SIZE:
            _recognised.clear()
        found = _recognised[key] = template, shape
    return found


def _settled(
    template: Template, shape: Shape, arrays: list[Tensor], sinks: Any, wanted: Sequence[int] = (), keeps: bool = False
) -> Attention:
    """The attention that the operands say; lengths are looked at anew in each call."""
    held = template.fill(arrays, sinks, wanted, keeps)
    return validate.settle(held, shape) if template.packed else held


# -- shapes without numbers -------------------------------------------------------------------------------------------


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], sinks: Any, spec: str, keeps: bool = False
) -> tuple[Tensor, ...]:
    if all(type(n) is int for x in (q, k, v, *arrays) for n in x.shape):  # if sizes are known, mistakes show now
        _recognise(q, k, v, arrays, sinks, spec)
    out, *remainder = (q.new_empty_strided(*stored_as(q, v), dtype=_out_dtype(q, spec)) for _ in range(1 + keeps))
    return out, q.new_empty(q.shape[:3], dtype=_computed_with(q)), *remainder


def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], sinks: Any, spec: str,
    out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, wanted: list[int], remainder: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    others = [arrays[i] for i in wanted] + ([] if sinks is None else [sinks])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), [x.new_empty(x.shape) for x in others]


_library.impl("attention", _forward, "CompositeExplicitAutograd")
_library.impl("attention_with_remainder", _forward_with_remainder, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::attention", _fake_forward, lib=_library)
torch.library.register_fake("tilewise::attention_with_remainder", partial(_fake_forward, keeps=True), lib=_library)
torch.library.register_fake("tilewise::attention_backward", _fake_backward, lib=_library)
autograd.register(_library)
vmap.register(_library, attention, attention_with_remainder, attention_backward)
