"""The gradient of sinks, of tensors: softmax.d_sinks has it for arrays."""

from __future__ import annotations

from typing import Any

import torch


def d_sinks(sinks: Any, lse: Any, delta: Any) -> Any:
    """A sink's weight is exp(sink - lse) in each row; it has no value, so its share of d_score is -weight * delta."""
    shift = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
    return -(torch.exp(sinks.double()[:, None] - shift) * delta).sum(dim=(0, 2)).to(sinks.dtype)
