"""What linear attention remembers of the keys and values so far: as much after a million as after one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tilewise import arrays


@dataclass(frozen=True, eq=False)
class LinearState:
    """kv (batch, key heads, d, d_v): the sum of feature(k)^T v, what came earlier decayed; z (batch, key heads, d): the
    same of feature(k), which rows are normalized by; log_decay (batch, key heads): the decay from end to end.

    Of packed sequences the batch is the sequences. All are float32, or float64 for float64 inputs.
    """

    kv: Any
    z: Any
    log_decay: Any

    def __iter__(self) -> Iterator[Any]:
        """kv, z, log_decay = state"""
        return iter((self.kv, self.z, self.log_decay))

    def then(self, later: LinearState) -> LinearState:
        """The state after both: what `self` has decays on the way through `later`. Associative."""
        if not isinstance(later, LinearState):
            raise TypeError(f"later: expected a LinearState, got {type(later).__name__}")
        sizes = [tuple(map(int, state.kv.shape)) for state in (self, later)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"later: expected a state of kv {sizes[0]}, as this one's, got {sizes[1]}")
        kept = arrays.library(later.log_decay).exp(later.log_decay)
        return LinearState(
            self.kv * kept[..., None, None] + later.kv,
            self.z * kept[..., None] + later.z,
            self.log_decay + later.log_decay,
        )

    def map(self, change: Callable[[Any], Any]) -> LinearState:
        return LinearState(change(self.kv), change(self.z), change(self.log_decay))
