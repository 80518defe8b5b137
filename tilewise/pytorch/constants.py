"""Tables that variants make themselves (ALiBi's slopes, say), once on each device."""

from __future__ import annotations

from typing import Any

import torch

from tilewise import arrays
from tilewise.sharing import Lock

_MOST = 64
_made: dict[tuple[int, str], tuple[Any, Any]] = {}
_in_graphs: dict[tuple[int, str], tuple[Any, Any]] = {}
_lock = Lock()


def constant_on(x: Any, device: Any) -> Any:
    key = (id(x), str(device))
    found = _made.get(key)
    if found is None:
        found = x, arrays.as_tensor(x).to(device)  # the array stays, or its id could be another's
        with _lock:
            if len(_made) >= _MOST:
                _made.clear()
            _made[key] = found
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        _in_graphs[key] = found  # a replay may read it at any time
    return found[1]
