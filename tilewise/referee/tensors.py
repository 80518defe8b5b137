"""A call's arrays as PyTorch tensors, and what contenders of PyTorch's autograd share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewise import arrays
from tilewise.referee import layouts
from tilewise.referee.calls import Call, Inputs
from tilewise.referee.contender import Answer, Contender, absent, results_of

INSTALL = "pip install torch"


@dataclass(frozen=True, eq=False)
class Tensors:
    q: Any
    k: Any
    v: Any
    d_out: Any
    mask: Any
    bias: Any
    slopes: Any
    ids: Any


def tensors(call: Call, given: Inputs, device: str) -> Tensors:
    """In the call's layout; what learns requires a gradient."""
    laid = layouts.as_tensors((given.q, given.k, given.v, given.d_out), call.layout, device)
    plain = [
        None if x is None else arrays.as_tensor(x).to(device) for x in (given.mask, given.bias, given.slopes, given.ids)
    ]
    made = Tensors(*laid, *plain)
    for x in learned(call, made):
        x.requires_grad_()
    return made


def learned(call: Call, x: Tensors) -> list[Any]:
    if not call.backward:
        return []
    return [x.q, x.k, x.v, *([x.bias] if call.bias_gradient else [])]


class TorchContender(Contender):
    """Attention on PyTorch tensors; gradients come from autograd."""

    _kept: tuple[tuple[str, Any, Any], ...] = ()  # each input of the call, as it is and as it was

    def missing(self, device: str) -> str | None:
        reason = absent("torch", INSTALL)
        if reason is None and device != "cpu":
            import torch

            if not torch.cuda.is_available():
                return "PyTorch sees no GPU here; --device cpu judges on the processor"
        return reason

    def packages(self) -> tuple[str, ...]:
        return ("torch",)

    def versions(self) -> dict[str, str]:
        import torch

        found = super().versions()
        if torch.cuda.is_available():
            found |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
        return found

    def attend(self, call: Call, x: Tensors) -> Callable[[], Any]:
        """The call made ready: it returns out, or (out, lse)."""
        raise NotImplementedError

    def prepare(self, call: Call, given: Inputs, device: str) -> Callable[[], Answer]:
        import torch

        x = tensors(call, given, device)
        small = call.layout not in (layouts.FAR, layouts.LARGE)
        named = {name: y for name, y in vars(x).items() if y is not None and small}
        self._kept = tuple((name, y, y.detach().clone()) for name, y in named.items())
        run = self.attend(call, x)

        def answered() -> Answer:
            out, lse = results_of(run(), torch.Tensor)
            found = {"out": out} if lse is None else {"out": out, "lse": lse}
            if call.backward:
                if not out.requires_grad:
                    raise TypeError("out requires no gradient: autograd does not flow through it")
                grads = torch.autograd.grad(out, learned(call, x), x.d_out)
                found |= dict(zip(("d_q", "d_k", "d_v", "d_bias"), grads, strict=False))
            if call.layout == layouts.LARGE:
                places = layouts.large_heads(call.n_q, call.d)[1]
                found = {what: y[:, places] for what, y in found.items()}
            return {what: _on_host(y) for what, y in found.items()}

        return answered

    def inputs_changed(self) -> str:
        return next((name for name, now, before in self._kept if not now.detach().equal(before)), "")


def _on_host(x: Any) -> Any:
    return arrays.as_numpy(x.detach().contiguous().cpu())
