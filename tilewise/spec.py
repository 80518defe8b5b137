"""What to compute (Attention), on what (Shape), how (Tile), and what comes out (Partial, Grads)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.expr import INT32_MAX, Expr, Loaded
from tilewise.rope import Rope
from tilewise.walking import loads


@dataclass(frozen=True)
class Tile:
    """How many queries and how many keys are worked on at a time."""

    q: int = 128
    k: int = 128

    def __post_init__(self) -> None:
        sizes: dict[str, Any] = {"q": self.q, "k": self.k}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, Integral) or not 1 <= int(size) <= INT32_MAX:
                raise ValueError(f"Tile: {name} must be a positive whole number of 32 bits, got {size!r}")
            object.__setattr__(self, name, int(size))


@dataclass(frozen=True)
class Positions:
    """Where a call's queries and keys stand in longer sequences, so that a shard or a chunk has global positions."""

    origin_q: int = 0
    origin_k: int = 0
    total_q: int | None = None
    total_k: int | None = None
    first_batch: int = 0  # the batch index that a call on a part of a batch begins at


@dataclass(frozen=True, eq=False)
class Lengths:
    """Packed sequences: sequence i has queries q[i] to q[i + 1] and keys k[i] to k[i + 1] of the packed arrays."""

    q: Array
    k: Array


_LEAST_SCALE = 2.0**-100  # beyond which a masked score's -inf would meet a scale of 0 in float32


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention, whatever computes it: keys count where `mask` holds, `score` maps the score S to another."""

    scale: float
    mask: Expr | None = None
    score: Expr | None = None
    sinks: Any = None  # (heads,): a logit per query head that joins each row sum
    lengths: Lengths | None = None
    positions: Positions = Positions()
    batch_invariant: bool = False
    rope: Rope | None = None  # q and k are turned by their positions first
    wide_out: bool = False  # out is in the type computed with: a part of a result, which is merged before it is rounded
    keeps_remainder: bool = False  # a backward pass follows: what rounding takes from out is wanted as well

    def out_dtype(self, dtype: str) -> str:
        """What out is stored in, of operands of this type."""
        return arrays.compute_dtype(dtype).name if self.wide_out else dtype

    def before_backward(self, dtype: str) -> Attention:
        """The same for operands of this type, where a backward pass may follow: a rounded out keeps its remainder."""
        keeps = self.has_remainder(dtype)
        return self if keeps == self.keeps_remainder else replace(self, keeps_remainder=keeps)

    def has_remainder(self, dtype: str) -> bool:
        """Whether rounding takes anything from out, of operands of this type."""
        return dtype in arrays.HALF_DTYPES and not self.wide_out

    def stores_remainder(self, dtype: str) -> bool:
        """Whether a forward pass that can store what rounding takes from out is to do so."""
        return self.keeps_remainder and self.has_remainder(dtype)

    @property
    def raw_scores(self) -> bool:
        """Whether scores can stay products of q and k up to the exponent, which then has the scale in it."""
        return self.score is None and self.scale > _LEAST_SCALE

    @property
    def expressions(self) -> list[Expr]:
        return [e for e in (self.mask, self.score) if e is not None]

    @property
    def loaded(self) -> list[Loaded]:
        """Every array the variant reads."""
        return loads(*self.expressions)

    @property
    def wanted(self) -> list[Loaded]:
        """The arrays whose gradients are wanted, in order of first appearance in the score."""
        return [slot for slot in loads(*([self.score] if self.score is not None else [])) if slot.wants_grad]


@dataclass(frozen=True)
class Shape:
    """The sizes of a call and what else decides whether a kernel system can serve it."""

    batch: int
    heads: int
    heads_k: int
    n_q: int
    n_k: int
    d: int
    d_v: int
    dtype: str = "float32"
    device: str = "cpu"
    origin_q: int = 0
    origin_k: int = 0
    total_q: int = -1  # the whole sequence's length; -1: n_q
    total_k: int = -1
    first_batch: int = 0  # the batch index (or the number of the packed sequence) that this shape begins at
    packed_q: int = 0  # where the queries begin in the packed array
    packed_k: int = 0
    backward: bool = False
    not_copied: str | None = None  # why a GPU's copy engine cannot load q, k and v as they lie

    def __post_init__(self) -> None:
        object.__setattr__(self, "total_q", self.origin_q + self.n_q if self.total_q < 0 else self.total_q)
        object.__setattr__(self, "total_k", self.origin_k + self.n_k if self.total_k < 0 else self.total_k)

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.heads // self.heads_k if self.heads_k else 0

    @classmethod
    def of(cls, spec: Attention, q: Any, k: Any, v: Any, backward: bool = False) -> Shape:
        """The shape of a call on (batch, heads, n, d) arrays; packed sequences are a batch of one."""
        where = spec.positions
        return cls(
            batch=q.shape[0], heads=q.shape[1], heads_k=k.shape[1], n_q=q.shape[2], n_k=k.shape[2], d=q.shape[3],
            d_v=v.shape[3], dtype=arrays.dtype_name(q), device=arrays.device_name(q),
            origin_q=where.origin_q, origin_k=where.origin_k,
            total_q=-1 if where.total_q is None else where.total_q,
            total_k=-1 if where.total_k is None else where.total_k,
            first_batch=where.first_batch, backward=backward,
        )  # fmt: skip

    def env(self, b: Any, h: Any, q: Any, k: Any) -> dict[str, Any]:
        """The variables of an expression at batch b, query head h, query q and key k of this call, all but S."""
        return {
            "B": self.first_batch + b, "H": h, "HK": h // max(self.group, 1),
            "Q": self.origin_q + q, "K": self.origin_k + k, "NQ": self.total_q, "NK": self.total_k,
            "QP": self.packed_q + q, "KP": self.packed_k + k,
        }  # fmt: skip

    def sequences(self, lengths: Lengths | None) -> Iterator[tuple[Shape, slice, slice]]:
        """The independent problems of a call: itself, or one a packed sequence. Each with its query and key rows."""
        if lengths is None:
            yield self, slice(None), slice(None)
            return
        for i in range(len(lengths.q) - 1):
            rows, cols = (slice(int(x[i]), int(x[i + 1])) for x in (lengths.q, lengths.k))
            n_q, n_k = rows.stop - rows.start, cols.stop - cols.start
            yield (
                replace(
                    self, n_q=n_q, n_k=n_k, total_q=n_q, total_k=n_k,
                    first_batch=i, packed_q=rows.start, packed_k=cols.start,
                ),
                rows, cols,
            )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Partial:
    """Attention over some keys: out (..., n, d_v), and lse (..., n), the natural log of the sum of exp(scores).

    remainder: what rounding took from out, in out's type, if the spec keeps it and the system can; else None.
    """

    out: Any
    lse: Any
    remainder: Any = None

    def map(self, change: Callable[[Any], Any]) -> Partial:
        """The same, with every array changed."""
        return Partial(change(self.out), change(self.lse), None if self.remainder is None else change(self.remainder))

    def __iter__(self) -> Iterator[Any]:
        """out, lse = partial"""
        return iter((self.out, self.lse))


@dataclass(frozen=True, eq=False)
class Grads:
    """Gradients: of q, k, v; of sinks if there are any; of each loaded array that wants one, by first appearance."""

    q: Any
    k: Any
    v: Any
    sinks: Any = None
    arrays: tuple[Any, ...] = ()
