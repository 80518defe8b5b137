"""Tensors: from the arguments of `attention` to the operator, run now or traced by torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from tilewise import arrays, dispatch, validate, wire
from tilewise.pytorch import autograd, operator, repeat
from tilewise.pytorch.constants import constant_on
from tilewise.pytorch.repeat import Encoded
from tilewise.spec import Attention


def attention(q: Any, k: Any, v: Any, lengths: tuple[Any, Any] | None, kernel: str, options: dict[str, Any]) -> Any:
    """(out, lse) in the caller's layout; differentiable in q, k, v, sinks and every float tensor the score reads."""
    if arrays.compiling():
        from tilewise.pytorch import trace

        return trace.attention(q, k, v, lengths, kernel, options)
    q, k, v = autocast(q, k, v)
    given: list[Any] = []
    key = None if in_forward_mode() else repeat.key(given, q, k, v, lengths, kernel, **options)
    if key is not None:
        variant = options["mask"], options["score"]
        known = repeat.known.found(
            key, lambda: repeat.make_known(_encoded(q, k, v, lengths, kernel, options), given, variant)
        )
        if known is not None:
            return known.run(q, k, v, options["sinks"], given)
    return run(q, k, v, lengths, kernel, options)


def run(q: Any, k: Any, v: Any, lengths: tuple[Any, Any] | None, kernel: str, options: dict[str, Any]) -> Any:
    """The call by its operator, on tensors with numbers or on fake ones."""
    q, k, v = autocast(q, k, v)
    call, line, _, tensors = _encoded(q, k, v, lengths, kernel, options)
    if in_forward_mode():
        refuse_tangents(call.q, call.k, call.v, call.spec.sinks, *tensors)
    if torch._C._are_functorch_transforms_active():
        out, lse = autograd.transformed(line, call.q, call.k, call.v, call.spec.sinks, *tensors)
    else:
        out, lse = operator.attention(call.q, call.k, call.v, tensors, call.spec.sinks, line)
    return call.restore(out), call.restore(lse)


def in_forward_mode() -> bool:
    """Whether PyTorch carries derivatives along with numbers (torch.func.jvp, forward_ad.dual_level)."""
    return bool(forward_ad._current_level >= 0)


def refuse_tangents(*given: Any) -> None:
    """An operator would drop them, and what depends on them would seem to be constant."""
    if any(arrays.is_torch(x) and forward_ad.unpack_dual(x).tangent is not None for x in given):
        raise dispatch.Unsupported(
            "derivatives in forward mode (torch.func.jvp, forward_ad) are not computed; those in reverse mode are: "
            "backward(), torch.autograd.grad, torch.func.vjp, torch.func.grad"
        )


def _encoded(q: Any, k: Any, v: Any, lengths: Any, kernel: str, options: dict[str, Any]) -> Encoded:
    if lengths is None:
        call = validate.outline(q, k, v, **options)
    else:
        call = validate.outline_varlen(q, k, v, *lengths, **options)
    dispatch.check_name(kernel)
    if call.q.is_meta:  # the operator would answer with shapes; a caller asked for numbers
        dispatch.resolve(kernel, call.spec, call.shape)
    line, named = wire.encode(call.spec, kernel)
    return Encoded(call, line, named, operands(call.spec, named, call.q.device))


def operands(spec: Attention, named: list[Any], device: Any) -> list[Any]:
    """The arrays that a line names, as the operator takes them."""
    constants = {id(slot.array) for slot in spec.loaded if slot.constant}
    return [x if arrays.is_torch(x) else _tensor(x, device, id(x) in constants) for x in named]


def _tensor(x: Any, device: Any, is_constant: bool) -> Any:
    """A NumPy array as a tensor: lengths where they are, for the host reads them; what a variant made on the tensors'
    device, moved once."""
    if device.type == "cpu" or not is_constant or arrays.compiling():
        return arrays.as_tensor(x)
    return constant_on(x, device)


def autocast(*given: Any) -> tuple[Any, ...]:
    """Under torch.autocast, floats but float64 in its type: as PyTorch's own attention."""
    if not torch._C._is_any_autocast_enabled():
        return given
    device = given[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if arrays.is_torch(x) and x.is_floating_point() and x.dtype != torch.float64 else x for x in given
    )
