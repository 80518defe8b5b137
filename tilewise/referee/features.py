"""What contenders are asked about, a feature at a time, and how its calls are drawn from a seed and a size."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import FLOAT_DTYPES
from tilewise.referee.calls import BOTTOM_RIGHT, PASSES, TOP_LEFT, Call
from tilewise.referee.layouts import FAR, LARGE

HALF = FLOAT_DTYPES[:2]
Rng = np.random.Generator
Fields = dict[str, Any]
SIZES = (8, 48, 200)  # the longest sequence of a call; small first, so that the first failure is a small one
_LONGEST = 4096  # that an id may ask for


@dataclass(frozen=True)
class Feature:
    name: str
    about: str
    draw: Callable[[Rng, int], Fields]
    dtypes: tuple[str, ...] = arrays.FLOAT_DTYPES
    passes: tuple[str, ...] = PASSES
    sizes: tuple[int, ...] = SIZES
    repeats: int = 2
    large: bool = False  # asked only by `--large`
    on_gpu: bool = False  # and only there

    @property
    def slug(self) -> str:
        """Its name in the id of a call."""
        return re.sub(r"[^a-z0-9_]+", "-", self.name.lower()).strip("-")


def draw(feature: str, dtype: str, what: str, size: int, seed: int) -> Call:
    """The call of these: what its id says."""
    name = f"{feature}/{dtype}/{what}/{size}/{seed}"
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    known = FEATURES[feature]
    backward = what == PASSES[1]
    fields = {**_sizes(rng, size), **known.draw(rng, size)}
    fields.setdefault("heads_k", fields["heads"])
    fields.setdefault("d_v", fields["d"])
    if not backward:
        fields.pop("bias_gradient", None)
    return Call(id=name, dtype=dtype, backward=backward, seed=seed, **fields)


def parse(name: str) -> Call:
    """The call of an id; ValueError says what an id looks like."""
    parts = name.split("/")
    known = len(parts) == 5 and parts[0] in FEATURES and parts[1] in arrays.FLOAT_DTYPES and parts[2] in PASSES
    numbers = [int(x) for x in parts[3:] if x.isascii() and x.isdecimal() and len(x) < 10]
    if not known or len(numbers) != 2 or not 0 < numbers[0] <= _LONGEST:
        raise ValueError(
            "expected the id of a call, FEATURE/DTYPE/PASS/SIZE/SEED, such as causal/float32/gradients/48/0, "
            f"got {name!r}"
        )
    return draw(parts[0], parts[1], parts[2], *numbers)


# -- sizes ------------------------------------------------------------------------------------------------------------


def _sizes(rng: Rng, size: int) -> Fields:
    n_q, n_k = (int(x) for x in rng.integers(max(1, size // 2), size + 1, 2))
    dims = (8, 16) if size <= 8 else (16, 32, 64, 128)
    return {
        "batch": int(rng.integers(1, 2 if size <= 8 else 3)), "heads": int(rng.integers(1, 3 if size <= 8 else 4)),
        "n_q": n_q, "n_k": n_k, "d": int(rng.choice(dims)),
    }  # fmt: skip


def _length(rng: Rng, size: int) -> int:
    return int(rng.integers(max(2, size // 2), size + 1))


def _square(rng: Rng, size: int) -> Fields:
    n = _length(rng, size)
    return {"n_q": n, "n_k": n}


def _unequal(rng: Rng, size: int, longer: str) -> Fields:
    """Lengths that differ by a few at least."""
    less = int(rng.integers(1, max(2, size // 2)))
    more = less + int(rng.integers(1, max(2, size - less + 1)))
    return {"n_q": less, "n_k": more} if longer == "keys" else {"n_q": more, "n_k": less}


def _tiny(rng: Rng, size: int) -> Fields:
    kind = rng.integers(3)
    return [{"n_q": 1}, {"n_k": 1}, {"n_q": 1, "n_k": 1}][kind]


def _none(rng: Rng, size: int) -> Fields:
    return [{"n_k": 0}, {"n_q": 0}, {"n_q": 0, "n_k": 0}][rng.integers(3)]


def _prime(rng: Rng, size: int) -> Fields:
    odd = [n for n in (1, 3, 5, 7, 13, 31, 47, 97, 127, 131, 193, 199) if n <= size]
    return {"n_q": int(rng.choice(odd)), "n_k": int(rng.choice(odd))}


def _many(rng: Rng, size: int) -> Fields:
    batch, heads = [(70_001, 1), (1, 70_001), (300, 300)][rng.integers(3)]
    return {"batch": batch, "heads": heads, "n_q": 3, "n_k": 5, "d": 8}


# -- masks and biases -------------------------------------------------------------------------------------------------

_AXES = ("qk", "bhqk", "bk", "hqk", "bqk", "hk")


def _axes(rng: Rng) -> str:
    return str(rng.choice(_AXES))


def _masked_rows(rng: Rng, size: int) -> Fields:
    return {"mask": str(rng.choice(("qk", "bhqk", "bqk"))), "hidden": "rows", "n_k": int(rng.integers(2, size + 1))}


def _biased_rows(rng: Rng, size: int) -> Fields:
    return {"bias": str(rng.choice(("qk", "bhqk", "hqk"))), "hidden": "rows", "n_k": int(rng.integers(2, size + 1))}


def _mask_and_causal(rng: Rng, size: int) -> Fields:
    return {**_square(rng, size), "causal": TOP_LEFT, "mask": _axes(rng), "hidden": "keys"}


def _window(rng: Rng, size: int) -> Fields:
    left = int(rng.integers(0, max(2, size // 2)))
    causal = bool(rng.integers(2))
    right = 0 if causal else int(rng.integers(0, max(2, size // 2)))
    return {**_square(rng, size), "window": (left, right), "causal": BOTTOM_RIGHT if causal else ""}


def _softcap(rng: Rng, size: int) -> Fields:
    causal = BOTTOM_RIGHT if rng.integers(2) else ""
    return {**_square(rng, size), "softcap": float(rng.choice((2.0, 5.0, 30.0))), "causal": causal}


def _with_causal(field: str) -> Callable[[Rng, int], Fields]:
    return lambda rng, size: {
        **_square(rng, size), field: True, "causal": BOTTOM_RIGHT if rng.integers(2) else "",
    }  # fmt: skip


# -- numbers ----------------------------------------------------------------------------------------------------------


def _huge(rng: Rng, size: int) -> Fields:
    return {"magnified": float(rng.choice((12.0, 40.0, 1000.0))), **_maybe_causal(rng, size)}


def _saturated(rng: Rng, size: int) -> Fields:
    return {"inputs": "saturated"}


def _maybe_causal(rng: Rng, size: int) -> Fields:
    return {**_square(rng, size), "causal": BOTTOM_RIGHT} if rng.integers(2) else {}


def _scale(rng: Rng, size: int) -> Fields:
    return {"scale": float(rng.choice((0.0, -0.2, 0.05, 1.0)))}


def _strided(layout: str) -> Callable[[Rng, int], Fields]:
    def made(rng: Rng, size: int) -> Fields:
        more = {"batch": 2, "heads": 2} if "expanded" in layout or layout == FAR else {}
        if layout == FAR:
            more["batch"] = 1
        return {"layout": layout, **more, **_maybe_causal(rng, size)}

    return made


def _grouped(rng: Rng, size: int) -> Fields:
    heads, heads_k = [(2, 1), (4, 2), (6, 2), (8, 1), (3, 1)][rng.integers(5)]
    return {"heads": heads, "heads_k": heads_k, **_maybe_causal(rng, size)}


def _d(*dims: int) -> Callable[[Rng, int], Fields]:
    return lambda rng, size: {"d": int(rng.choice(dims)), **_maybe_causal(rng, size)}


def _d_v(rng: Rng, size: int) -> Fields:
    d, d_v = [(16, 8), (8, 16), (64, 32), (32, 64), (128, 64), (64, 128)][rng.integers(2 if size <= 8 else 6)]
    return {"d": d, "d_v": d_v}


def _long(rng: Rng, size: int) -> Fields:
    return {"batch": 1, "heads": 4, "heads_k": 2, "n_q": size, "n_k": size, "d": 64, **_diagonal(rng)}


def _large(size: int) -> Fields:
    """As many heads as hold numbers; and not so many in all that their number is the difficulty."""
    return {"batch": 1, "heads": 3, "n_q": size, "n_k": size, "d": 128, "layout": LARGE}


def _diagonal(rng: Rng) -> Fields:
    return {"causal": BOTTOM_RIGHT if rng.integers(2) else ""}


def _only(**fields: Any) -> Callable[[Rng, int], Fields]:
    return lambda rng, size: fields


_ALL = (
    Feature("plain", "every key, no argument beyond q, k, v", _only()),
    Feature("odd lengths", "lengths that no tile divides", _prime),
    Feature("one row or key", "one query, one key, or both", _tiny, sizes=(8, 48)),
    Feature("n = 0", "no query, no key, or neither", _none, sizes=(8, 48)),
    Feature("causal", "causal, as many queries as keys", lambda r, n: {**_square(r, n), "causal": BOTTOM_RIGHT}),
    Feature("causal, top left", "fewer queries than keys; query i sees keys 0 to i",
            lambda r, n: {**_unequal(r, n, "keys"), "causal": TOP_LEFT}),
    Feature("causal, bottom right", "fewer queries than keys; the last query sees the last key",
            lambda r, n: {**_unequal(r, n, "keys"), "causal": BOTTOM_RIGHT}),
    Feature("causal, rows without keys", "bottom right with more queries than keys",
            lambda r, n: {**_unequal(r, n, "queries"), "causal": BOTTOM_RIGHT}),
    Feature("mask", "a boolean mask that broadcasts; each row keeps a key",
            lambda r, n: {"mask": _axes(r), "hidden": "keys"}),
    Feature("mask, rows without keys", "a boolean mask that hides all keys of some rows", _masked_rows),
    Feature("mask beside causal", "both at once", _mask_and_causal),
    Feature("bias", "floats added to the scores, which broadcast", lambda r, n: {"bias": _axes(r)}),
    Feature("bias with -inf", "some keys hidden by -inf", lambda r, n: {"bias": _axes(r), "hidden": "keys"}),
    Feature("bias, rows without keys", "rows that are -inf throughout", _biased_rows),
    Feature("gradients of the bias", "beside those of q, k and v",
            lambda r, n: {"bias": _axes(r), "bias_gradient": True}, passes=PASSES[1:]),
    Feature("scale", "0, negative, small and 1", _scale),
    Feature("huge scores", "q times 12, 40 or 1000", _huge),
    Feature("saturated rows", "one key takes nearly all of each row's weight", _saturated),
    Feature("shifted keys", "keys that share a large offset", _only(inputs="shifted")),
    Feature("heads inside", "(batch, n, heads, d), transposed", _strided("heads inside")),
    Feature("slices", "of a longer and wider array", _strided("sliced")),
    Feature("unaligned", "a storage offset of one element", _strided("one element in")),
    Feature("columns first", "the last dimension is not contiguous", _strided("columns first")),
    Feature("expanded batch", "stride 0 along the batch, of gradients too", _strided("one batch entry, expanded")),
    Feature("expanded heads", "stride 0 along heads, of gradients too", _strided("one head, expanded")),
    Feature("grouped heads", "fewer key heads than query heads", _grouped),
    Feature("d_v unlike d", "values wider or narrower than keys", _d_v),
    Feature("odd head dimensions", "1, 3, 17, 33, 65, 100", _d(1, 3, 17, 33, 65, 100)),
    Feature("large head dimensions", "160, 192, 256, 512", _d(160, 192, 256, 512), sizes=(8, 48)),
    Feature("many heads", "more than 65,535 batches times heads", _many, sizes=(8,)),
    Feature("window", "a sliding window, causal or not", _window),
    Feature("softcap", "c tanh(s / c), causal or not", _softcap),
    Feature("alibi", "ALiBi, causal or not", _with_causal("alibi")),
    Feature("documents", "several documents in a row, causal or not", _with_causal("documents")),
    *(Feature(f"type {dtype}", "q, k and v of this type", _only(), dtypes=(dtype,), sizes=(48, 200))
      for dtype in arrays.FLOAT_DTYPES),
    Feature("long rows", "512 to 1,024 keys, run five times", _long, sizes=(512, 1024), repeats=5),
    Feature("far heads", FAR, _strided(FAR), dtypes=FLOAT_DTYPES[:3], sizes=(48,), large=True),
    Feature("large arrays", LARGE, lambda r, n: _large(n), dtypes=HALF, sizes=(512,), large=True, on_gpu=True),
)  # fmt: skip
FEATURES = {feature.slug: feature for feature in _ALL}
