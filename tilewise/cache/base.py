"""What both kinds of cache share.

The host decides how long sequences are and which pages they have, so that nothing waits for a GPU; kernels read the
same numbers (`lengths`, `table`) where the keys are.
"""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np

from tilewise import arrays, dispatch
from tilewise.arrays import Array
from tilewise.cache.checks import check_like, whole_numbers
from tilewise.choosing import Purpose
from tilewise.rope import Rope, check, positions_of_keys
from tilewise.rotating import turned_from
from tilewise.spec import Attention, Shape


class Cache:
    """What both kinds share: storage of keys and values, and how many of them each sequence has."""

    def __init__(self, k: Any, v: Any, batch: int, capacity: int, lengths: Any) -> None:
        self.k, self.v, self.batch, self.capacity = k, v, batch, capacity
        self.heads = int(k.shape[1])
        self._lengths = Numbers(whole_numbers("lengths", lengths, batch, capacity), k)

    @property
    def lengths(self) -> Any:
        """How many keys each sequence has: (batch,) int32, where the keys are. To be read, not written."""
        return self._lengths.array

    @property
    def page_size(self) -> int | None:
        """The keys of a page; None: there are no pages."""
        return None

    @property
    def table(self) -> Any:
        """Which pages each sequence has; None: there are no pages."""
        return None

    @property
    def shape(self) -> Shape:
        """Of a call without queries, on all keys that there is room for."""
        return Shape(
            self.batch, self.heads, self.heads, 0, self.capacity, int(self.k.shape[3]), int(self.v.shape[3]),
            arrays.dtype_name(self.k), arrays.device_name(self.k),
        )  # fmt: skip

    def append(self, k: Any, v: Any, counts: Any = None, *, rope: Rope | None = None, kernel: str = "auto") -> None:
        """Write k and v, (batch, heads, n, d), behind the keys of each sequence, in place.

        counts: how many of the n, from the first on, are the sequence's own; all of them unless given.
        rope: k is turned on the way, at its places in the sequences unless the rope has positions of its own.
        kernel: "auto", or the name of the kernel system that writes.
        """
        self.check_new(k, v)
        n = int(k.shape[2])
        if rope is not None:
            check(rope, self.batch, {"positions_k": n}, int(k.shape[3]))
        taken = whole_numbers("counts", n if counts is None else counts, self.batch, n)
        system = dispatch.resolve(kernel, Attention(1.0), self.shape, Purpose.DECODE)
        self._make_room(taken)
        writer = dispatch.decoder(system)
        if writer is not None:
            writer.append(self, k, v, taken, rope)
        elif rope is None:
            self._write(k, v, taken)
        else:
            self._write(turned_from(k, replace(rope, positions=positions_of_keys(rope)), self.lengths), v, taken)
        self._lengths.add(taken)

    def release(self, *sequences: Any) -> None:
        """Forget the keys of sequences that have ended, told by their numbers; others may begin in their place."""
        for b in sequences:
            if isinstance(b, bool) or not isinstance(b, Integral) or not 0 <= int(b) < self.batch:
                raise ValueError(f"release: expected numbers of sequences from 0 to {self.batch - 1}, got {b!r}")
        for b in sequences:
            self._lengths.put((int(b),), 0)

    def sequence(self, b: int) -> tuple[Any, Any]:
        """The keys and values of one sequence, (1, heads, length, d), in order."""
        raise NotImplementedError

    def together(self) -> tuple[Any, Any] | None:
        """Those of all sequences, (batch, heads, length, d), if that takes no copy."""
        return None

    def outline(self) -> tuple[Any, Any]:
        """Arrays of the sizes that k and v would have if every sequence were as long as can be; not to be read."""
        k, v = (_spread(x[:1, :, :1], (self.batch, self.heads, self.capacity, x.shape[3])) for x in (self.k, self.v))
        return k, v

    def check_new(self, k: Any, v: Any) -> None:
        """Refuse new keys and values that do not fit what is there."""
        for name, x, stored in (("k", k, self.k), ("v", v, self.v)):
            check_like(name, x, stored)
            want = (self.batch, self.heads, "n", int(stored.shape[3]))
            if len(x.shape) != 4 or (*x.shape[:2], "n", x.shape[3]) != want:
                told = "(" + ", ".join(map(str, want)) + ")"
                raise ValueError(f"{name}: expected {told} as the cache needs it, got shape {tuple(x.shape)}")
        if k.shape[2] != v.shape[2]:
            raise ValueError(f"v: expected {k.shape[2]} rows as k has, got {v.shape[2]}")

    def _make_room(self, counts: Array) -> None:
        after = self._lengths.host + counts
        if np.any(after > self.capacity):
            b = int(np.argmax(after > self.capacity))
            there = self._lengths.host[b]
            advice = f", or end the sequence with cache.release({b})" if there else ", or append fewer keys"
            raise ValueError(
                f"append: sequence {b} has {there} keys, and {counts[b]} more are beyond the cache's "
                f"capacity of {self.capacity} a sequence; make a larger cache{advice}"
            )

    def _write(self, k: Any, v: Any, counts: Array) -> None:
        """By the indexing of the arrays' own library."""
        b, i = np.nonzero(np.arange(k.shape[2]) < counts[:, None])
        unit, slot = self._place(b, self._lengths.host[b] + i)
        for stored, new in ((self.k, k), (self.v, v)):
            stored[unit, :, slot] = new[b, :, i]

    def _place(self, b: Array, key: Array) -> tuple[Array, Array]:
        """The first and the third index of keys in storage."""
        return b, key


class Numbers:
    """Whole numbers that the host decides on and kernels read: one array in main memory, or a second one on a GPU."""

    def __init__(self, values: Array, beside: Any) -> None:
        self.host = values
        self.is_shared = arrays.device_name(beside) == "cpu"
        self.array = arrays.like(values, beside) if self.is_shared else on_device(values.copy(), beside.device)

    def add(self, counts: Array) -> None:
        self.host += counts
        if not self.is_shared:  # a plain number needs no copy
            same = bool(np.all(counts == counts[0]))
            self.array += int(counts[0]) if same else on_device(counts, self.array.device)

    def put(self, index: tuple[Any, ...], values: Any) -> None:
        self.host[index] = values
        if not self.is_shared:
            device = self.array.device
            at = tuple(on_device(i, device) if isinstance(i, np.ndarray) else i for i in index)
            self.array[at] = on_device(values, device) if isinstance(values, np.ndarray) else values


def on_device(values: Array, device: Any) -> Any:
    """A copy there, which the host does not wait for."""
    return arrays.as_tensor(values).to(device, non_blocking=True)


def _spread(x: Any, size: tuple[int, ...]) -> Any:
    return x.expand(size) if arrays.is_torch(x) else np.broadcast_to(x, size)
