"""Feature maps: what q and k are mapped by before they are multiplied, each an expression over S, one of their numbers.

    >>> FEATURE_MAPS["elu"]
    where(S > 0.0, S + 1.0, exp(S))

An expression reaches every kernel system through its op table, and its gradient through derivative.py.
"""

from __future__ import annotations

from tilewise.derivative import derivative
from tilewise.expr import Expr, S, constant, exp, where

_RELU = where(S > 0.0, S, constant(0.0))  # not maximum(S, 0), whose slope at 0 is 1

FEATURE_MAPS = {
    "identity": S,
    "elu": where(S > 0.0, S + 1.0, exp(S)),  # elu(S) + 1: never negative, so that sums of weights are not
    "relu": _RELU,
    "relu2": _RELU * _RELU,
    "exp": exp(S),
}


def slope(feature: Expr) -> Expr:
    """d feature / d S."""
    return derivative(feature, S)
