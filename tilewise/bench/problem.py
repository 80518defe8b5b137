"""What is timed: a cell (a variant at a size), and the problem it becomes once its arrays are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tilewise import arrays, schedule, validate
from tilewise.arrays import Array
from tilewise.expr import Expr
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.schedule import Kind, itemsize
from tilewise.spec import Attention, Shape, Tile
from tilewise.variants.alibi import alibi
from tilewise.variants.bias import bias
from tilewise.variants.causal import causal
from tilewise.variants.document import document
from tilewise.variants.prefix import prefix
from tilewise.variants.softcap import softcap
from tilewise.variants.window import window
from tilewise.walking import evaluate, variables

DTYPES = ("float32", "float16", "bfloat16", "float64")
WINDOW = 256
DOCUMENTS = 8
CAP = 5.0  # low enough that a kernel which forgets it is visibly wrong on normal scores
BACKWARD_FLOPS = 2.5  # of the forward pass: five products instead of two
_CHUNK = 1 << 22  # scores of a dense mask that are evaluated at a time
_ALIGNMENT = 64  # bytes: a cache line

Rng = np.random.Generator
Options = dict[str, Any]
Put = Callable[[Array], Any]  # an array of ours in the library and on the device that a contestant wants


@dataclass(frozen=True)
class Cell:
    """One line of the sweep."""

    variant: str
    n_q: int  # queries
    n_k: int  # keys
    d: int
    dtype: str = "float32"
    batch: int = 1
    heads: int = 4
    heads_k: int = 4
    backward: bool = False
    device: str = "cpu"

    @property
    def pairs(self) -> int:
        """(query, key) pairs, visible or not, over batches and heads."""
        return self.batch * self.heads * self.n_q * self.n_k

    @property
    def matrix_bytes(self) -> int:
        """The full score matrix, in the type of the inputs."""
        return self.pairs * itemsize(self.dtype)

    @property
    def key_bytes(self) -> int:
        """k and v: what a single query has to read."""
        return 2 * self.batch * self.heads_k * self.n_k * self.d * itemsize(self.dtype)

    @property
    def input_bytes(self) -> int:
        """q, k, v, the gradient of out, and a dense array that the variant reads."""
        queries = 2 * self.batch * self.heads * self.n_q * self.d
        dense = self.heads * self.n_q * self.n_k if VARIANTS[self.variant].dense_input else 0
        return self.key_bytes + (queries + dense) * itemsize(self.dtype)

    def describe(self) -> dict[str, Any]:
        """The cell's part of a record."""
        cell = asdict(self)
        what = "forward+backward" if cell.pop("backward") else "forward"
        return {**cell, "pass": what, "matrix_bytes": self.matrix_bytes, "flops": None}


@dataclass(frozen=True)
class Variant:
    """A variant as tilewise writes it, and what a peer must know to say the same without expressions."""

    about: str
    options: Callable[[Rng, Cell, Put], Options]
    only_causal: bool = False  # causal and nothing else
    cap: float | None = None  # the score is a soft cap; any other score only adds to S
    dense_input: bool = False  # reads a (heads, n_q, n_k) array, which is an input of every contestant


def _document(rng: Rng, cell: Cell, put: Put) -> Expr:
    """The last query is in the document of the last key, as causal() has it."""
    ids = np.sort(rng.integers(0, DOCUMENTS, max(cell.n_q, cell.n_k))).astype(np.int32)
    return document(put(ids[-cell.n_q :]), put(ids[-cell.n_k :]))


def _bias(rng: Rng, cell: Cell) -> Array:
    # In the type of q, because PyTorch's SDPA takes no other.
    return arrays.narrow(rng.standard_normal((cell.heads, cell.n_q, cell.n_k), dtype=np.float32), cell.dtype)


VARIANTS: dict[str, Variant] = {
    "full": Variant("every key", lambda rng, c, put: {}),
    "causal": Variant("keys up to the query", lambda rng, c, put: {"causal": True}, only_causal=True),
    "window": Variant(f"causal, the last {WINDOW} keys", lambda rng, c, put: {"mask": causal() & window(WINDOW)}),
    "prefix": Variant("causal, a quarter of keys for all", lambda rng, c, put: {"mask": causal() | prefix(c.n_k // 4)}),
    "document": Variant(
        f"causal within {DOCUMENTS} packed documents",
        lambda rng, c, put: {"mask": causal() & _document(rng, c, put)},
    ),
    "alibi": Variant("causal with ALiBi", lambda rng, c, put: {"mask": causal(), "score": alibi(c.heads)}),
    "softcap": Variant("causal, soft cap", lambda rng, c, put: {"mask": causal(), "score": softcap(CAP)}, cap=CAP),
    "bias": Variant("a dense bias", lambda rng, c, put: {"score": bias(put(_bias(rng, c)))}, dense_input=True),
}  # fmt: skip


def _aligned(x: Array) -> Array:
    """Where PyTorch would have put it, for everyone alike: NumPy lets every vector straddle two cache lines."""
    room = np.empty(x.nbytes + _ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % _ALIGNMENT
    y = room[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


@dataclass(frozen=True, eq=False)
class Problem:
    """A cell made real, as NumPy arrays in main memory: fresh normal numbers, the same for all contestants."""

    cell: Cell
    q: Array
    k: Array
    v: Array
    d_out: Array
    seed: int

    @classmethod
    def make(cls, cell: Cell, seed: int = 0) -> Problem:
        rng = np.random.default_rng(seed)
        queries, keys = (cell.heads, cell.n_q), (cell.heads_k, cell.n_k)
        q, k, v, d_out = (
            _aligned(arrays.narrow(rng.standard_normal((cell.batch, *rows, cell.d), dtype=np.float32), cell.dtype))
            for rows in (queries, keys, keys, queries)
        )
        return cls(cell, q, k, v, d_out, seed)

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.cell.variant]

    @property
    def is_causal(self) -> bool:
        """What PyTorch's SDPA means by it, whose first query sees the first key alone."""
        return self.variant.only_causal and self.cell.n_q == self.cell.n_k

    def options(self, put: Put = lambda x: x) -> Options:
        """The arguments of tw.attention that make the variant; the same numbers at every call."""
        return self.variant.options(np.random.default_rng([self.seed, 1]), self.cell, put)

    @cached_property
    def spec(self) -> Attention:
        return validate.prepare(self.q, self.k, self.v, **self.options()).spec

    @cached_property
    def shape(self) -> Shape:
        return Shape.of(self.spec, self.q, self.k, self.v)

    @cached_property
    def visible(self) -> int:
        """(query, key) pairs that count, over batches and heads. Only PARTIAL tiles are looked into."""
        one_head = schedule.plan(Attention(self.spec.scale, self.spec.mask), self.shape, Tile(256, 256))
        lead = one_head.by_query.offsets.shape[:2]
        stored = sum(_visible(one_head, b, h) for b, h in np.ndindex(*lead))
        return int(stored * self.cell.batch * self.cell.heads // (lead[0] * lead[1]))

    @property
    def flops(self) -> float:
        """Useful operations: both products over the visible pairs, the same count for every contestant."""
        return 4 * self.visible * self.cell.d * (1 + BACKWARD_FLOPS * self.cell.backward)

    # -- the variant without expressions, for peers --------------------------------------------------------------------
    @property
    def dense_bytes(self) -> int:
        """What the arrays below take beyond the inputs."""
        added = self.spec.score is not None and self.variant.cap is None and not self.variant.dense_input
        return self.cell.n_q * self.cell.n_k * ((self.spec.mask is not None) + 4 * self.cell.heads * added)

    @cached_property
    def mask(self) -> Array | None:
        """Booleans that broadcast to (batch, heads, n_q, n_k)."""
        return None if self.spec.mask is None else self._dense(self.spec.mask, np.dtype(bool))

    @cached_property
    def added(self) -> Array | None:
        """What the score adds to S: broadcasts to (batch, heads, n_q, n_k), float32 or the type of q."""
        if self.spec.score is None or self.variant.cap is not None:
            return None
        if self.variant.dense_input:
            return arrays.as_numpy(self.spec.loaded[0].array)
        return self._dense(self.spec.score, np.dtype(np.float32))

    def _dense(self, expr: Expr, dtype: np.dtype[Any]) -> Array:
        used, n_q, n_k = variables(expr), self.cell.n_q, self.cell.n_k
        b = np.arange(self.cell.batch if "B" in used else 1)[:, None, None, None]
        h = np.arange(self.cell.heads if {"H", "HK"} & used else 1)[:, None, None]
        filled = np.empty((len(b), len(h), n_q, n_k), dtype)
        step = max(1, _CHUNK // (len(b) * len(h) * n_k))
        for start in range(0, n_q, step):
            rows = np.arange(start, min(start + step, n_q))
            env = self.shape.env(b, h, rows[:, None], np.arange(n_k))
            filled[:, :, rows] = evaluate(expr, {**env, "S": np.float32(0)}, numpy_ops(np.float32))
        return filled

    def describe(self) -> dict[str, Any]:
        return {**self.cell.describe(), "flops": self.flops}


def _visible(p: schedule.Plan, b: int, h: int) -> int:
    total = 0
    for i in range(p.grid[0]):
        rows = np.arange(*p.queries(i).indices(p.shape.n_q))
        for j, kind in p.by_query.tiles(b, h, i):
            cols = np.arange(*p.keys(j).indices(p.shape.n_k))
            if kind == Kind.FULL or p.live is None:
                total += rows.size * cols.size
            else:
                env = p.shape.env(b, h, rows[:, None], cols)
                seen = evaluate(p.live, env, numpy_ops(np.float64))
                total += int(np.broadcast_to(seen, (rows.size, cols.size)).sum())
    return total
