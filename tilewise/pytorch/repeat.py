"""Calls on GPU tensors like ones before: checked, encoded and prepared once, then only launched.

What a call depends on is its key: options, sizes, strides, types and devices, the contents of lengths, whether
arrays begin at multiples of 16 bytes, and whether a backward pass may follow. Addresses are not part of it, nor what
tensors hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise import validate
from tilewise.arrays import place_of
from tilewise.expr import Expr
from tilewise.pytorch import autograd, operator, ready
from tilewise.pytorch.ready import Ready, are_aligned
from tilewise.sharing import Kept
from tilewise.validate import Call
from tilewise.walking import loads, remembered

PLAIN = (Tensor, torch.nn.Parameter)  # a subclass may mean anything
_NOTHING = type(None)
_STRIDED = torch.strided
_CACHE_SIZE = 512


@dataclass(frozen=True, eq=False)
class Known:
    """A call that was checked, as its operator takes it: a line, and arrays that are its own or given by the caller."""

    line: str
    rank: int  # of the caller's tensors
    operands: Sequence[Tensor | int]  # a tensor of its own, or the place of one among those given
    learns: bool  # whether gradients are wanted
    ready: Ready  # if so, (batch, heads, n, d) results and what backward needs; else results in the caller's layout
    held: Any  # what keys name by id: nothing else may get these ids

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Any, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        operands = [given[x] if isinstance(x, int) else x for x in self.operands]
        if len(given) < len(operands):  # some are its own: a graph that is captured now may read them at any time
            self.ready.prepared.hold_in_graphs(self)
        if not self.learns:
            out, lse = self.ready.run(q, k, v, sinks, operands)
            return out, lse
        q, k, v = (validate.expand(x, self.rank) for x in (q, k, v))
        out, lse = autograd.recorded(self._compute, self.line, q, k, v, sinks, *operands)
        return validate.restore(out, self.rank), validate.restore(lse, self.rank)

    def _compute(self, line: str, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *operands: Tensor) -> Any:
        return self.ready.run(q, k, v, sinks, operands)


known: Kept[Known | None] = Kept(_CACHE_SIZE)


def _learns(*tensors: Any) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


# -- keys -------------------------------------------------------------------------------------------------------------


def key(
    given: list[Tensor], q: Any, k: Any, v: Any, lengths: tuple[Any, Any] | None, kernel: Any, *, causal: Any,
    mask: Any, score: Any, scale: Any, sinks: Any, rope: Any, batch_invariant: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """All that a call depends on; the tensors that its variant reads are added to `given`. None if it is no call to
    repeat: PyTorch must see its operator, or its arguments need a closer look."""
    if type(q) not in PLAIN or q.device.type not in ready.DEVICES or is_watched():
        return None
    if rope is not None:  # no system that prepares calls has it
        return None
    if type(kernel) is not str or type(causal) is not bool or type(batch_invariant) is not bool:
        return None  # 1 == True, and would be found in its place
    if type(scale) not in (float, _NOTHING) or type(score) not in (Expr, _NOTHING):
        return None
    if type(mask) not in (Expr, _NOTHING, *PLAIN):
        return None
    said_mask, said_score = _said(mask, given), _said(score, given)
    counted = None if lengths is None else tuple(map(_content, lengths))
    if counted is not None and None in counted:
        return None
    made: list[Any] = [kernel, causal, batch_invariant, scale, said_mask, said_score, counted, sinks is None]
    for x in (q, k, v, *given) if sinks is None else (q, k, v, *given, sinks):
        if not are_plain(x):
            return None
        made += x.shape, x.stride(), x.dtype, x.device
    made += are_aligned(q, k, v), not given or are_aligned(*given), _learns(q, k, v, sinks, *given)
    return tuple(made)


def are_plain(*tensors: Any) -> bool:
    """Whether their numbers are at their addresses."""
    for x in tensors:
        if type(x) not in PLAIN or x.layout is not _STRIDED or x.is_neg() or x._is_zerotensor():
            return False
    return True


def is_watched() -> bool:
    """Whether PyTorch wants to know which operators are called: tracing, torch.func, a mode."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def _said(variant: Any, given: list[Tensor]) -> Any:
    """An expression, or a mask. One that reads no tensors is told by its id, which Known sees to that it stays so."""
    if variant is None:
        return None
    if not isinstance(variant, Expr):
        return "a tensor", place_of(variant, given)
    slots = remembered(variant, "slots", loads)
    if all(slot.constant for slot in slots):
        return id(variant)
    return variant.key, *(id(x.array) if x.constant else ("given", place_of(x.array, given)) for x in slots)


def _content(lengths: Any) -> tuple[Any, ...] | None:
    """What lengths hold: the plan depends on it. Those on a GPU are waited for."""
    if type(lengths) in PLAIN:
        lengths = lengths.detach().cpu().numpy()
    return (lengths.dtype, lengths.shape, lengths.tobytes()) if type(lengths) is np.ndarray else None


# -- making calls known -----------------------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """A checked call, and what its operator takes."""

    call: Call
    line: str
    named: Sequence[Any]  # the arrays of the line, as the caller has them
    tensors: list[Tensor]  # and as tensors


def make_known(encoded: Encoded, given: Sequence[Tensor], variant: Sequence[Any]) -> Known | None:
    """given: as `key` found them. variant: the caller's mask and score. None if the kernel system prepares nothing, or
    it reads a view of what was given."""
    call, line, named, tensors = encoded
    constants = [slot.array for slot in call.spec.loaded if slot.constant]
    operands: list[Tensor | int] = []
    for x, tensor in zip(named, tensors, strict=True):
        place = next((i for i, known in enumerate(given) if known is x), None)
        if place is not None:
            operands.append(place)
        elif any(x is constant for constant in constants):
            operands.append(tensor)
        elif call.spec.lengths is not None and (x is call.spec.lengths.q or x is call.spec.lengths.k):
            operands.append(tensor.detach().cpu().clone())  # the caller's may change
        else:
            return None
    learns = _learns(call.q, call.k, call.v, call.spec.sinks, *given)
    keeps = learns and autograd.keeps_remainder(line, call.q)
    made = operator.make_ready(call.q, call.k, call.v, tensors, call.spec.sinks, line, keeps)
    if made is None:
        return None
    if not learns:
        made = _for_caller(made, call.rank)
    held = [x for x in variant if isinstance(x, Expr) and all(slot.constant for slot in loads(x))]
    return Known(line, call.rank, operands, learns, made, (constants, held))


def _for_caller(made: Ready, rank: int) -> Ready:
    """The same, whose results are in the caller's layout."""
    out, lse = (_restored(sizes, steps, rank) for sizes, steps in (made.out, made.lse))
    return Ready(made.prepared, made.places, out, lse, made.dtype, made.device)


def _restored(sizes: Any, steps: Any, rank: int) -> tuple[Any, Any]:
    """Sizes and steps of a (batch, heads, n, ...) tensor in the caller's layout."""
    x = validate.restore(torch.empty_strided(sizes, steps, device="meta"), rank)
    return tuple(x.shape), x.stride()
