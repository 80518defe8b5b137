"""What the fuzz draws: the whole language and all that a call may be, in numbers; and texts that are read back."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fuzzing.drawing import draw as drawing
from tests.fuzzing.drawing import gallery, grammar, language, named
from tests.fuzzing.drawing.dice import Dice
from tests.fuzzing.drawing.draw import Wanted, draw
from tests.fuzzing.drawing.features import features
from tests.fuzzing.drawing.forms import FORMS, Pool
from tests.fuzzing.drawing.tables import rounded
from tests.fuzzing.question import Given, LinearQuestion, Question
from tests.strategies import SMALL, dense_env, dense_values
from tilewise import arrays, expr, validate
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.linear.features import FEATURE_MAPS
from tilewise.text import parse
from tilewise.variants import VARIANTS
from tilewise.walking import evaluate

ROOT = Path(__file__).parent.parent
DRAWS = 1500
WANTED = Wanted(half_share=0.2, linear_share=0.1, shapes=1)


def _questions() -> list[Question | LinearQuestion]:
    return [draw(seed, WANTED) for seed in range(DRAWS)]


@cache
def _drawn() -> list[Question | LinearQuestion]:
    return _questions()


def _attentions() -> list[Question]:
    return [x for x in _drawn() if isinstance(x, Question)]


def _stored(given: Given) -> Any:
    return arrays.narrow(given.values, given.dtype) if "float" in given.dtype else given.values.astype(given.dtype)


# -- a seed is its question -------------------------------------------------------------------------------------------


def _flat(x: Any) -> Any:
    """Something that == compares."""
    if isinstance(x, np.ndarray):
        return x.dtype.str, x.shape, x.tobytes()
    if is_dataclass(x) and not isinstance(x, type):
        return [_flat(getattr(x, field.name)) for field in fields(x)]
    return [_flat(y) for y in x] if isinstance(x, tuple | list) else x


def test_the_same_seed_draws_the_same_question() -> None:
    for seed in range(60):
        assert _flat(draw(seed, WANTED)) == _flat(_drawn()[seed])
    assert _flat(draw(7, WANTED, attempt=1)) != _flat(_drawn()[7])


def test_drawing_needs_nothing_of_the_package() -> None:
    names = "draw draw_linear features forms gallery grammar language layouts menu named tables texts"
    code = f"import sys\nfrom tests.fuzzing.drawing import {', '.join(names.split())}\n"
    code += "print([x for x in sys.modules if x.split('.')[0] in ('tilewise', 'torch')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- texts ------------------------------------------------------------------------------------------------------------


def test_texts_are_read_back() -> None:
    """By the language's own reader and by the package's, which print the same of what they have read."""
    for x in _attentions():
        kinds, given = [language.kind_of(a.dtype) for a in x.arrays], [_stored(a) for a in x.arrays]
        for text in (x.mask, x.score):
            if text is not None:
                tree = language.parse(text, kinds)
                assert language.text(tree) == text
                assert parse(text, given).kind == tree.kind == ("bool" if text is x.mask else "float")


def test_texts_have_values() -> None:
    """Conditions, and floats of which hardly any is NaN."""
    strange = 0
    for x in (x for x in _attentions()[:400] if all(array.values.size for array in x.arrays)):
        given = [_stored(a) for a in x.arrays]
        for text, kind in ((x.mask, "b"), (x.score, "f")):
            if text is not None:
                values = dense_values(parse(text, given))
                assert values.dtype.kind == kind
                strange += kind == "f" and bool(np.isnan(values).any())
    assert strange < 10


def test_calls_can_be_made() -> None:
    """What is drawn fits: arrays their variables, whole numbers 32 bits."""
    for x in _attentions():
        _check(x)


def _check(x: Question) -> None:
    given = [_stored(a) for a in x.arrays]
    written = (x.mask_as_written or x.mask, x.score_as_written or x.score)
    for mask_text, score_text in {written, (x.mask, x.score)}:
        mask, score = (None if text is None else parse(text, given) for text in (mask_text, score_text))
        q, k, v = (_stored(y) for y in (x.q, x.k, x.v))
        if x.lengths is not None:
            q, k, v = (y[0].swapaxes(0, 1) for y in (q, k, v))
            validate.prepare_varlen(q, k, v, *map(np.array, x.lengths), mask=mask, score=score)
        elif x.total is None:
            validate.prepare(q, k, v, mask=mask, score=score)


@pytest.mark.parametrize("what", ["mask", "score"])
def test_constructors_mean_what_their_definitions_say(what: str) -> None:
    """Of every named variant, alone and joined, at every place of a small call."""
    sizes = {
        "B": SMALL.batch, "H": SMALL.heads, "HK": SMALL.heads_k, "Q": SMALL.n_q, "K": SMALL.n_k, "QP": SMALL.n_q,
        "KP": SMALL.n_k,
    }  # fmt: skip
    names = Counter[str]()
    for seed in range(250):
        dice = Dice(seed)
        pool = Pool(dice, 20)
        made = named.mask(pool) if what == "mask" else named.score(pool)
        given = [_stored(x) for x in drawing.filled(pool.tables, sizes, dice)]
        values = [
            evaluate(parse(text, given), dense_env(), numpy_ops(np.float64))
            for text in (language.text(made.node), made.written.replace(named.HEADS, str(SMALL.heads)))
        ]
        np.testing.assert_allclose(*values, rtol=1e-12, err_msg=f"seed {seed}: {made.written}")
        names.update(pool.names)
    known = {name.removeprefix("named ") for name in names if name.startswith("named ")}
    assert known == set(named.MASKS if what == "mask" else named.SCORES)


def test_an_error_of_one_position_reaches_lse() -> None:
    """Half precision's lse is judged to 4e-4: a float that counts from the wrong key is far beyond that."""
    changed = Counter[bool]()
    for seed in range(500):
        pool = Pool(Dice(seed), 9)
        mask, score = pool.mask(), pool.score()
        if not pool.tables and "K" in language.variables(score):
            seen = dense_values(parse(language.text(mask)))
            wrong = language.substituted(score, {"K": language.K + 1})
            right, off = (dense_values(parse(language.text(x))) for x in (score, wrong))
            weights = (np.where(seen, np.exp(x - right.max()), 0).sum(-1) for x in (right, off))
            with np.errstate(all="ignore"):
                apart = np.abs(np.subtract(*map(np.log, weights)))
            changed[bool(np.nanmax(apart, initial=0) > 2e-3)] += 1
    assert changed[True] > 60 and changed[False] < changed[True] / 5


def test_every_named_variant_and_feature_map_is_drawn() -> None:
    assert named.MASKS.keys() | named.SCORES.keys() == VARIANTS.keys()
    assert drawing.draw_linear.NAMED.keys() == FEATURE_MAPS.keys()
    for name, feature in drawing.draw_linear.NAMED.items():
        assert repr(expr.as_float(parse(language.text(feature)))) == repr(FEATURE_MAPS[name])


def test_every_mask_of_the_gallery_meets_every_score() -> None:
    pairs = set()
    for seed in range(8000):
        pool = Pool(Dice(seed), 40)
        gallery.mask(pool)
        gallery.score(pool)
        pairs.add(tuple(x for x in pool.names if x.startswith("gallery")))
    assert len(pairs) == len(gallery.MASKS) * len(gallery.SCORES) == 21 * 14


# -- how much of everything -------------------------------------------------------------------------------------------

# At least so many of DRAWS calls have each; about two thirds of those that have.
FLOORS = {
    3: """
        a float part of both; decay number
    """,
    6: """
        a bound of 0; an array as mask; causal as an option; feature relu2; load by KP; load of rank 0; no keys
    """,
    10: """
        array uint8; decay head; feature elu; feature exp; feature identity; feature relu; lengths differ;
        linear dtype bfloat16; linear dtype float16; load by QP; state out pulled
    """,
    15: """
        a constant at the edge; a constant of inf; d_out of another type; form NK - Q - c; linear dtype float64;
        unread keys spoilt
    """,
    20: """
        an array of both; array int16; array int8; d_out expanded; decay token; form (Q - 50) % -c; form B; form
        c * HK; linear of all; named document; named prefix; named relative; no queries; scale of 0; sink of
        none; two views of one array; wide integers
    """,
    30: """
        a bool part of both; a bound that is a float; a bound that is an index; contiguous cache; feature of its
        own; form (Q - 50) % c; form (Q - NK) // c; form 0; form H + Q; form HK; form NK - Q; form Q // -c; form
        QP; form c; form c * B + Q; gradients of arrays; linear backward; linear packed; load by HK; named
        alibi; named bias; named causal; named dense; named dilated; negative of a floordiv; not normalized;
        several queries of a cache; state in
    """,
    40: """
        a bound of both; a bound that starts an index; decay none; form -(Q // c); form 2 * Q; layout odd
        padding; linear dtype float32; named softcap; named t5; named window; negative floordiv; op exp
    """,
    50: """
        a int part of both; an empty sequence; array int32; array int64; equal bounds; kind one query; linear
        causal; load by a load; load of rank 3; load of rank 4; negative mod; negative scale; normalized; op
        log; op maximum; op ne; paged cache; saved elsewhere; score of depth 3
    """,
    75: """
        a bound in the score; array bfloat16; array bool; array float16; array float64; kind cache; kind linear;
        layout read-only; load by B; no d_lse
    """,
    100: """
        a bound bottom right; a bound top left; a bound under ~; a row of many keys; array float32; d_lse; kind
        packed; kind part; load by K; load of rank 2; mask of depth 3; mask of depth 6; op div; op minimum;
        origin; recipe mask of named; recipe score of gallery; recipe score of named; score of depth 6; where in
        the mask
    """,
    110: """
        a bound that starts a float
    """,
    150: """
        an array by variables and by other indices; batch invariant; dtype float64; form P + c; form Q + c;
        grouped heads; layout padding; load by H; load by Q; op float; op gt; op neg; op not; op tanh; recipe
        mask of gallery; recipe mask of grammar; recipe score of grammar; sinks; where in the score
    """,
    200: """
        a bound under |; backward; batch; dtype bfloat16; dtype float16; dtype float32; layout aside; layout
        reversed; one key head; op eq; op floordiv; op lt; op mod; op or; op where
    """,
    300: """
        d_v unlike d; form P; form Q; layout expanded; load by an operation; load of rank 1; op abs; op and; op
        ge; op le; recipe mask of shared forms; recipe score of shared forms
    """,
    400: """
        a bound; kind dense; layout at begin of page; layout steps; op load; op mul; tile
    """,
    600: """
        keys no tile divides; layout turned; op add; op sub; two key tiles
    """,
    800: """
        layout at end of page; op const; op var
    """,
}

DEEPEST = ("mask of depth 6", "mask of depth 7", "mask of depth 8")


def _counted(drawn: list[Question | LinearQuestion]) -> Counter[str]:
    return Counter(name for x in drawn for name in features(x))


def _below(counts: Counter[str]) -> set[str]:
    """What is there too rarely."""
    floors = {" ".join(name.split()): least for least, names in FLOORS.items() for name in names.split(";")}
    return {name for name, least in floors.items() if counts[name] < least}


def test_everything_is_drawn_often() -> None:
    counts = _counted(_drawn())
    assert _below(counts) == set()
    assert {f"op {op}" for op in language.OPERATIONS} <= counts.keys()
    assert {f"form {name}" for name in FORMS} <= counts.keys()
    assert sum(counts[name] for name in DEEPEST) > DRAWS / 10
    assert all(count > 0 for name, count in counts.items() if name.startswith("gallery"))


def _of_its_own(self: Pool) -> language.Node:
    """A score of other forms than the mask's, as they are where both are drawn apart."""
    self.forms, self.made = Pool(self.dice, self.reach).forms, {kind: [] for kind in self.made}
    return language.S + self.amount()


REMOVED: dict[str, tuple[Any, str, Any, str]] = {
    "one pool of forms": (Pool, "score", _of_its_own, "a bound that starts a float"),
    "functions": (grammar.Grammar, "_function", lambda self, op, a: a, "op exp"),
    "other views": (Pool, "twin", lambda self, at: at, "two views of one array"),
}


@pytest.mark.parametrize(
    "branch", [x if x == "one pool of forms" else pytest.param(x, marks=pytest.mark.slow) for x in REMOVED]
)
def test_a_branch_that_is_removed_is_missed(branch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead, missed = REMOVED[branch]
    monkeypatch.setattr(owner, name, instead)
    assert missed in _below(_counted(_questions()))


# -- how calls are drawn ----------------------------------------------------------------------------------------------


def test_three_shapes_share_what_is_compiled() -> None:
    """Texts, types of arrays, head dimensions and tiles; sizes differ, with a pool and without one."""
    for wanted, groups in (
        (Wanted(), [range(3 * i, 3 * i + 3) for i in range(30)]),
        (Wanted(half_share=1.0, pool=8), [range(i, 40, 8) for i in range(8)]),
    ):
        shapes = Counter[int]()
        for group in groups:
            drawn = [x for x in (draw(seed, wanted) for seed in group) if isinstance(x, Question)]
            assert len({_compiled(x) for x in drawn}) == 1
            shapes[len({(x.q.values.shape, x.k.values.shape) for x in drawn})] += 1
        assert shapes[1] == 0


def _compiled(x: Question) -> Any:
    arrays_of = tuple((a.dtype, a.values.ndim, a.wants_gradient) for a in x.arrays)
    d, d_v = x.q.values.shape[3], x.v.values.shape[3]
    return x.mask, x.score, arrays_of, x.dtype, d, d_v, x.tile, x.scale, x.batch_invariant


def test_numbers_are_what_their_types_hold() -> None:
    for x in _attentions()[:500]:
        for given in (x.q, x.k, x.v, *x.arrays):
            if "float" in given.dtype:
                stored = arrays.widen(_stored(given), np.float64)
                assert np.array_equal(stored, given.values, equal_nan=True)
                assert np.array_equal(rounded(given.values, given.dtype), given.values, equal_nan=True)
            else:
                assert np.array_equal(_stored(given), given.values)


def test_numbers_are_rounded_as_the_package_rounds_them() -> None:
    values = Dice(0).normal((4000,)) * 10.0 ** Dice(1).integers(-30, 3, (4000,))
    values[:3] = np.inf, -np.inf, 0.0
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        assert np.array_equal(rounded(values, dtype), arrays.widen(arrays.narrow(values, dtype), np.float64))


def test_arrays_are_alike_along_axes_of_no_stride() -> None:
    for x in _attentions():
        for given in (x.q, x.k, x.v, *x.arrays, *(y for y in (x.d_out, x.d_lse, x.sinks) if y is not None)):
            for axis in given.layout.expanded:
                first = given.values.take([0], axis) if given.values.shape[axis] else given.values
                assert np.array_equal(np.broadcast_to(first, given.values.shape), given.values, equal_nan=True)


def test_limits_of_a_system_are_kept() -> None:
    wanted = Wanted(
        backward_share=1.0, most_head_dim=64, dtypes=("float32",), kinds=("dense",), cache_share=0.0, most_scores=2000,
        arrays_want_gradients=False,
    )  # fmt: skip
    for seed in range(200):
        x = draw(seed, wanted)
        assert isinstance(x, Question) and x.names[0] == "dense" and x.d_out is not None
        (batch, heads, n_q, d), n_k = x.q.values.shape, x.k.values.shape[2]
        assert x.dtype == "float32" and d <= 64 and x.v.values.shape[3] <= 64
        assert batch * heads * n_q * n_k <= 2000
        assert not any(array.wants_gradient for array in x.arrays)
    assert all(isinstance(draw(seed, Wanted(linear_share=1.0)), LinearQuestion) for seed in range(20))
    halves = [draw(seed, Wanted(half_share=1.0, cache_share=0.0)) for seed in range(60)]
    assert {x.dtype for x in halves} == {"float16", "bfloat16"}
    assert all(x.q.values.shape[3] % 8 == 0 for x in halves)
