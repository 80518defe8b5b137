"""The named variants: one small file each, each with a picture of itself (queries down, keys across).

A picture shows a small case: ■ a key the query sees, · one it does not; for scores, what becomes of a score of 0 (a
darker cell is a larger number). tw.picture draws them, and the tests run them as doctests.
"""

from collections.abc import Callable

from tilewise.expr import Expr
from tilewise.variants.alibi import alibi
from tilewise.variants.bias import bias
from tilewise.variants.causal import causal
from tilewise.variants.dense import dense
from tilewise.variants.dilated import dilated
from tilewise.variants.document import document
from tilewise.variants.prefix import prefix
from tilewise.variants.relative import relative
from tilewise.variants.softcap import softcap
from tilewise.variants.t5 import t5
from tilewise.variants.window import window

__all__ = [
    "VARIANTS",
    "alibi",
    "bias",
    "causal",
    "dense",
    "dilated",
    "document",
    "prefix",
    "relative",
    "softcap",
    "t5",
    "window",
]

VARIANTS: dict[str, Callable[..., Expr]] = {
    f.__name__: f
    for f in (causal, window, prefix, document, dilated, dense, alibi, relative, t5, softcap, bias)
}  # fmt: skip
