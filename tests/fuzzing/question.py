"""A call in plain words: numbers, texts and NumPy arrays. What draws it and what judges it both know this, and no more.

Nothing here knows the package. running/asking.py makes the call of it, judging/exact.py the exact answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Numbers = NDArray[Any]
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")


@dataclass(frozen=True)
class Layout:
    """How an array lies in memory. The default is contiguous, and begins where the allocator puts it.

    order: the axes from the slowest to the fastest; () is as they are. step: every how manieth number of each axis is
    the array's (1; 2 or 3: others lie between); () is 1 for all. reversed: axes that run backwards. expanded: axes of
    stride 0, along which all numbers are the same. padding: bytes after each row of the fastest axis, 0 for none; an
    odd number gives strides that are no multiple of a number's size. aside: bytes after an address that is a multiple
    of 16. at_page: it ends, or begins, where a page lies that nobody may touch.
    """

    order: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    reversed: tuple[int, ...] = ()
    expanded: tuple[int, ...] = ()
    padding: int = 0
    aside: int = 0
    at_page: str = ""  # "", "end" or "begin"
    writeable: bool = True


@dataclass(frozen=True, eq=False)
class Given:
    """An array. values: float64 (exactly what the type can hold), int64 or bool."""

    values: Numbers
    dtype: str
    layout: Layout = Layout()
    wants_gradient: bool = False  # of arrays that the score reads


@dataclass(frozen=True)
class Cache:
    """Of a decoding call: how many keys each sequence has in k and v, and the size of pages, if it has pages."""

    lengths: tuple[int, ...]
    page: int | None = None


@dataclass(frozen=True, eq=False)
class Question:
    """One attention.

    q, k, v: (batch, heads, n, d), also of packed sequences (a batch of one) and of a cache (n is its capacity).
    mask, score: texts in the language of `tilewise.parse`; a0, a1 ... name `arrays`, in both texts the same ones.
    mask_as_written, score_as_written: texts that say the same by constructors ("causal() & window(3, 1)"), which the
    judge need not know. If there, the call is made with them; arrays that only the definitions read are not in them.
    causal, array_as_mask: the call says causal=True, and passes that array as its mask: the texts as written say what
    is left, "" for nothing.
    """

    q: Given
    k: Given
    v: Given
    scale: float
    mask: str | None = None
    score: str | None = None
    mask_as_written: str | None = None
    score_as_written: str | None = None
    causal: bool = False
    array_as_mask: int | None = None
    arrays: tuple[Given, ...] = ()
    sinks: Given | None = None
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # packed: cumulative, of queries and of keys
    origin: tuple[int, int] = (0, 0)  # of queries and keys in longer sequences ...
    total: tuple[int, int] | None = None  # ... which are so long; None: they end with the call's
    cache: Cache | None = None
    batch_invariant: bool = False
    d_out: Given | None = None  # of a backward pass, if there is to be one
    d_lse: Given | None = None
    tile: tuple[int, int] | None = None
    threads: int = 2
    saved_elsewhere: bool = False  # the backward pass gets another system's out and lse
    names: tuple[str, ...] = ()  # what it was made of, to be counted

    @property
    def dtype(self) -> str:
        return self.q.dtype


@dataclass(frozen=True, eq=False)
class LinearQuestion:
    """One linear attention; see tilewise.linear_attention. q, k, v: (batch, heads, n, d), a batch of one if packed.

    feature: text over S; feature_as_written: the name of that feature map, if the call is to be made with it. decay:
    logs, of shape () (a number), (key heads,) or (batch, key heads, n). state, d_state: kv, z and log_decay.
    """

    q: Given
    k: Given
    v: Given
    feature: str = "S"
    feature_as_written: str | None = None
    causal: bool = True
    normalize: bool = True
    scale: float = 1.0
    decay: Given | None = None
    state: tuple[Given, ...] | None = None  # the parts of the state before the first key
    lengths: tuple[int, ...] | None = None  # packed: cumulative
    d_out: Given | None = None
    d_state: tuple[Given, ...] | None = None
    names: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        return self.q.dtype
