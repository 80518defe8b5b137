"""One random call from one seed: sizes, layouts, types, magnitudes, texts, a tile, gradients to pull back."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tests.fuzzing.drawing import draw_linear
from tests.fuzzing.drawing import language as la
from tests.fuzzing.drawing.dice import Dice
from tests.fuzzing.drawing.layouts import any_layout, fitted, rows_layout
from tests.fuzzing.drawing.menu import Anything, Counts, Ends, ForTensorCores, spoil_unread
from tests.fuzzing.drawing.named import HEADS
from tests.fuzzing.drawing.spelling import by_options
from tests.fuzzing.drawing.tables import Sizes, filled, rounded
from tests.fuzzing.drawing.texts import drawn_texts
from tests.fuzzing.question import FLOATS, Cache, Given, Layout, LinearQuestion, Numbers, Question

MOST_DRAWS = 100  # attempts of one seed
OF_MANY_KEYS, WIDEST_OF_MANY_KEYS = ("cache", "one query"), 128
_OF_Q, _OF_K = {"Q", "QP"}, {"K", "KP"}
KINDS = {"dense": 6.0, "packed": 1.5, "one query": 0.7, "part": 1.5}


@dataclass(frozen=True)
class Wanted:
    """Which calls to draw.

    shapes: how many seeds in a row share what is compiled (texts, types, head dimensions, tile). pool: or about so many
    kinds of calls at all. kinds: the shares of dense, packed, part (of longer sequences) and one query. key_tile: how
    many keys a tile of the system has where none is asked for: most calls have two and more.
    """

    backward_share: float = 0.3
    half_share: float = 0.0  # of calls that tensor cores can compute
    linear_share: float = 0.0
    cache_share: float = 0.1  # of calls that decode from a cache
    pool: int | None = None
    shapes: int = 3
    key_tile: int = 64
    most_scores: int | None = None
    most_head_dim: int = 512
    dtypes: tuple[str, ...] = FLOATS
    kinds: tuple[str, ...] = tuple(KINDS)
    arrays_want_gradients: bool = True

    def menu(self, dice: Dice) -> Anything:
        menu = ForTensorCores if self.half_share and dice.chance(self.half_share) else Anything
        return menu(self.key_tile, self.most_scores)


def draw(seed: int, wanted: Wanted, attempt: int = 0) -> Question | LinearQuestion:
    """The seed's call; attempt: its next one, if another could not be judged."""
    compiled, dice = dice_of(seed, wanted, attempt)
    if compiled.chance(wanted.linear_share):
        return draw_linear.draw(compiled, dice, wanted.dtypes, wanted.backward_share)
    return _Drawing(compiled, dice, wanted).question()


def dice_of(seed: int, wanted: Wanted, attempt: int) -> tuple[Dice, Dice]:
    """Those that decide what is compiled, which some seeds share, and those that decide the rest."""
    shared = seed // wanted.shapes if wanted.pool is None else seed % wanted.pool
    return Dice(2 * (MOST_DRAWS * shared + attempt)), Dice(2 * (MOST_DRAWS * seed + attempt) + 1)


class _Drawing:
    """A call as it becomes one. What `compiled` decides is decided before anything that depends on sizes."""

    def __init__(self, compiled: Dice, dice: Dice, wanted: Wanted) -> None:
        self.dice, self.wanted, self.menu = dice, wanted, wanted.menu(compiled)
        kind = _kind(compiled, wanted)
        shares = {dtype: share for dtype, share in self.menu.dtypes.items() if dtype in wanted.dtypes}
        self.dtype = compiled.weighted(shares or dict.fromkeys(wanted.dtypes, 1.0))
        self.tile = self.menu.tile(compiled)
        self.d = min(self.menu.head_dim(compiled), wanted.most_head_dim)
        self.d_v = self.d if compiled.chance(0.6) else min(self.menu.head_dim(compiled), wanted.most_head_dim)
        if kind in OF_MANY_KEYS:
            self.d, self.d_v = min(self.d, WIDEST_OF_MANY_KEYS), min(self.d_v, WIDEST_OF_MANY_KEYS)
        # Most kernels serve calls of all kinds: some of those that share what is compiled are of another.
        other = _kind(dice, wanted) if dice.chance(0.25) else kind
        fits = other not in OF_MANY_KEYS or max(self.d, self.d_v) <= WIDEST_OF_MANY_KEYS
        self.kind = other if fits else kind
        self.texts = drawn_texts(compiled, self.menu.reach)
        self.has_sinks = compiled.chance(0.2)
        scale = compiled.weighted({0.3: 3, 1.0: 3, 0.05: 2, -0.5: 2, 0.0: 1}) if compiled.chance(0.35) else None
        self.scale = 1 / math.sqrt(self.d) if scale is None else scale
        self.batch_invariant = compiled.chance(0.2)
        self.page = compiled.one_of((None, None, 16, 32, 128))

    def question(self) -> Question:
        texts, arrays = self.texts, filled(self.texts.tables, self.sizes, self.dice)
        if not self.wanted.arrays_want_gradients:
            arrays = tuple(replace(x, wants_gradient=False) for x in arrays)
        q, k, v = self.inputs()
        origin, total = self.positions
        question = Question(
            q, k, v, self.scale, mask=_text(texts.mask), score=_text(texts.score),
            mask_as_written=self._with_heads(texts.mask_as_written),
            score_as_written=self._with_heads(texts.score_as_written),
            arrays=arrays, sinks=self.sinks() if self.has_sinks else None, lengths=self.lengths, origin=origin,
            total=total, cache=self.cache, batch_invariant=self.batch_invariant, tile=self.tile,
            threads=self.dice.between(2, 4), saved_elsewhere=self.dice.chance(0.2), names=(self.kind, *texts.names),
        )  # fmt: skip
        has_backward = self.cache is None and self.dice.chance(self.wanted.backward_share)
        question = self.with_gradients(question) if has_backward else question
        if self.dice.chance(0.15):
            return question
        return by_options(question, takes_arrays=self.kind not in ("packed", "part"))  # as the public functions do

    def _with_heads(self, written: str | None) -> str | None:
        return None if written is None else written.replace(HEADS, str(self.counts.heads))

    # -- sizes ---------------------------------------------------------------------------------------------------------
    @cached_property
    def counts(self) -> Counts:
        """How much there is; of packed sequences, of all together."""
        found = self._with_places(self.menu.counts(self.dice, self.tile))
        if self.kind == "one query":
            found = replace(found, group=self.dice.between(1, 16), n_q=1, n_k=self.dice.between(100, 4000))
        if self.kind == "cache":
            n_k = self.dice.between(2, 4) * (self.page or 40) + self.dice.between(-1, 17)
            found = replace(
                found, group=self.dice.between(1, 9), n_q=self.dice.weighted({1: 4, 2: 1, 3: 1, 5: 1}), n_k=n_k
            )
        if self.lengths is not None:
            found = replace(found, batch=1, n_q=self.lengths[0][-1], n_k=self.lengths[1][-1])
            while found.heads > 1 and self.menu.fitting(found, self.tile) != found:
                found = replace(found, heads_k=max(found.heads_k - 1, 1), group=max(found.group // 2, 1))
            return found
        return self.menu.fitting(found, self.tile)

    def _with_places(self, counts: Counts) -> Counts:
        """Not without queries or keys where an array of so many is read."""
        n_q, n_k = (
            max(n, 1) if names & self.texts.needs else n for n, names in ((counts.n_q, _OF_Q), (counts.n_k, _OF_K))
        )
        return replace(counts, n_q=n_q, n_k=n_k)

    @cached_property
    def lengths(self) -> tuple[Ends, Ends] | None:
        if self.kind != "packed":
            return None
        queries, keys = self.menu.packed(self.dice, self.tile)
        least = self._with_places(Counts(1, 1, 1, queries[-1], keys[-1]))
        return (*queries[:-1], least.n_q), (*keys[:-1], least.n_k)

    @cached_property
    def positions(self) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """Where rows and keys of longer sequences begin, and how long those are."""
        if self.kind != "part":
            return (0, 0), None
        origin = self.dice.between(0, 60), self.dice.between(0, 60)
        ends = origin[0] + self.counts.n_q, origin[1] + self.counts.n_k
        return origin, (ends[0] + self.dice.between(0, 40), ends[1] + self.dice.between(0, 40))

    @cached_property
    def cache(self) -> Cache | None:
        """Lengths that differ, up to the capacity; queries are the last of them."""
        if self.kind != "cache":
            return None
        few, most = min(self.counts.n_q, self.counts.n_k), self.counts.n_k
        ends = [0 if self.dice.chance(0.05) else self.dice.between(few, most) for _ in range(self.counts.batch)]
        return Cache((most,) * len(ends) if self.dice.chance(0.2) else tuple(ends), self.page)

    @cached_property
    def sizes(self) -> Sizes:
        """What a table read by a variable must have as its size."""
        counts, batch, total = self.counts, self.counts.batch, self.positions[1]
        n_q, n_k = total or (counts.n_q, counts.n_k)
        if self.lengths is not None:
            batch = len(self.lengths[0]) - 1
            longest = (int(np.diff(x).max()) for x in self.lengths)
            # A table by position may be longer than any sequence, but not just as long as all together.
            longer = self.dice.between(0, 9)
            n_q, n_k = (
                n if n + longer == packed else n + longer
                for n, packed in zip(longest, (counts.n_q, counts.n_k), strict=True)
            )
        return {
            "B": batch, "H": counts.heads, "HK": counts.heads_k, "Q": n_q, "K": n_k, "QP": counts.n_q,
            "KP": counts.n_k,
        }  # fmt: skip

    # -- arrays --------------------------------------------------------------------------------------------------------
    def inputs(self) -> tuple[Given, Given, Given]:
        counts, dice = self.counts, self.dice
        shapes = [
            (counts.batch, counts.heads, counts.n_q, self.d), (counts.batch, counts.heads_k, counts.n_k, self.d),
            (counts.batch, counts.heads_k, counts.n_k, self.d_v),
        ]  # fmt: skip
        values = [self.menu.rows_of(dice, shape) for shape in shapes]
        self.menu.spoil(dice, *values[:2])
        layouts = [rows_layout(dice, self.menu.aligned) for _ in values]
        if shapes[0] == shapes[1] == shapes[2] and dice.chance(0.3):  # out of one projection
            layouts = [
                replace(layouts[0], order=(0, 2, 1, 3), step=(1, 1, 3, 1), reversed=(), expanded=(), padding=0)
            ] * 3
        values = [fitted(x, layout) for x, layout in zip(values, layouts, strict=True)]
        if self.lengths is not None and not any(layout.expanded for layout in layouts) and dice.chance(0.5):
            spoil_unread(self.lengths, *values[1:])
        q, k, v = (Given(rounded(x, self.dtype), self.dtype, layout) for x, layout in zip(values, layouts, strict=True))
        return q, k, v

    def sinks(self) -> Given:
        """Of each head; at times one of none."""
        values = self.dice.one_of([1.0, 1.0, 10.0]) * self.dice.normal((self.counts.heads,))
        layout = any_layout(self.dice, values.shape)
        values = fitted(values, layout)
        if self.dice.chance(0.2) and not layout.expanded:
            values[self.dice.below(len(values))] = -np.inf
        dtype = self.dice.one_of(FLOATS)
        return Given(rounded(values, dtype), dtype, layout)

    def with_gradients(self, question: Question) -> Question:
        """d_out and d_lse as callers pass them: in any strides, a sum's broadcast 1 too, at times of another type."""
        dice = self.dice
        dtype = dice.one_of(FLOATS) if dice.chance(0.15) else self.dtype
        rows = question.q.values.shape[:3]
        d_out = self._pulled((*rows, self.d_v), dtype, everywhere=dice.chance(0.1))
        wide = "float64" if self.dtype == "float64" else "float32"
        d_lse = self._pulled(rows, wide, everywhere=False) if dice.chance(0.6) else None
        return replace(question, d_out=d_out, d_lse=d_lse)

    def _pulled(self, shape: tuple[int, ...], dtype: str, everywhere: bool) -> Given:
        if everywhere:
            return Given(np.ones(shape), dtype, Layout(expanded=tuple(range(len(shape)))))
        layout = any_layout(self.dice, shape)
        values: Numbers = fitted(self.dice.normal(shape), layout)
        return Given(rounded(values, dtype), dtype, layout)


def _text(node: la.Node | None) -> str | None:
    return None if node is None else la.text(node)


def _kind(dice: Dice, wanted: Wanted) -> str:
    if dice.chance(wanted.cache_share):
        return "cache"
    return dice.weighted({kind: KINDS[kind] for kind in wanted.kinds})
