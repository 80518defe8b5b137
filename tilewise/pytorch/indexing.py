"""A mode of PyTorch's in which a tensor indexed by expressions is a load."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilewise.expr import Expr, load


class IndexingLoads(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Expr) for i in index):
                return load(args[0], *index)
        return func(*args, **(kwargs or {}))
