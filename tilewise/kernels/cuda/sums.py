"""Whole numbers as sums of variables: bounds of K that join, and how they are written for a row of queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

OF_ROWS = ("Q", "QP")  # variables that a row has; a head has the others, but for those of keys

# Bounds are sums of a few variables and a constant, and must fit 32 bits: positions may not be beyond MOST_POSITIONS.
MOST_POSITIONS = 2**27
_MOST_TERMS, _MOST_CONSTANT = 4, 2**28

Linear = Mapping[str, int]  # a whole number as a sum: how often each variable is in it, and the constant under ""


@dataclass(frozen=True)
class Range:
    """A condition on K: no less than each of `least`, no more than each of `most`."""

    least: tuple[Linear, ...] = ()
    most: tuple[Linear, ...] = ()


def times(a: Linear | None, factor: int) -> Linear | None:
    return None if a is None else {name: factor * count for name, count in a.items()}


def combined(op: str, a: Linear | None, b: Linear | None) -> Linear | None:
    if a is None or b is None or op not in ("add", "sub"):
        return None
    sign = 1 if op == "add" else -1
    return {name: a.get(name, 0) + sign * b.get(name, 0) for name in {**a, **b}}


_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def range_of(op: str, a: Linear | None, b: Linear | None) -> Range | None:
    """`a op b` as a bound of K, if it is one: K stands alone on one side, and the rest is a short sum without it."""
    difference = combined("sub", a, b)
    if difference is None or op not in _MIRRORED or abs(difference.get("K", 0)) != 1:
        return None
    if difference["K"] < 0:
        op, difference = _MIRRORED[op], times(difference, -1) or {}
    # K + rest op 0; K is counted from the beginning of these keys, as columns are.
    rest = {name: -count for name, count in difference.items() if name != "K" and count}
    constant = rest.pop("", 0) + {"lt": -1, "gt": 1}.get(op, 0)
    bound = {**rest, "": constant}
    if not is_short(bound):
        return None
    return Range(most=(bound,)) if op in ("lt", "le") else Range(least=(bound,))


def is_short(form: Linear) -> bool:
    """Whether it fits 32 bits at all positions, and is known once a row is, but for K."""
    terms = sum(abs(count) for name, count in form.items() if name not in ("", "K"))
    return terms <= _MOST_TERMS and abs(form.get("", 0)) <= _MOST_CONSTANT and not form.get("KP")


def tightest(forms: tuple[Linear, ...], choose: Callable[[int, int], int]) -> list[Linear]:
    """Bounds that differ by a constant are one bound."""
    constants: dict[tuple[tuple[str, int], ...], int] = {}
    for form in forms:
        variables = tuple(sorted((name, count) for name, count in form.items() if name))
        constants[variables] = choose(form[""], constants.get(variables, form[""]))
    return [{**dict(variables), "": constant} for variables, constant in constants.items()]


def bound_text(form: Linear, constant: str | None) -> str:
    """A bound in the place of rows, counted from the first key of the call or sequence; constant: how it is called."""
    told = (1, constant) if constant else (form.get("", 0), "1")
    return _sum_text([*_named(form), told, (-1, "head.origin_k")])


def start_text(form: Linear) -> str:
    """A sum with K in it, in the place of rows, at the first key of the call or sequence."""
    return _sum_text([*_named({**form, "K": 0}), (form.get("", 0), "1"), (form["K"], "head.origin_k")])


def _named(form: Linear) -> list[tuple[int, str]]:
    named = [(n, name if name in OF_ROWS else f"head.{name}") for name, n in sorted(form.items()) if name]
    return sorted(named, key=lambda term: term[0] < 0)


def _sum_text(terms: list[tuple[int, str]]) -> str:
    text = ""
    for count, name in terms:
        if count:
            size = str(abs(count)) if name == "1" else name if abs(count) == 1 else f"{abs(count)} * {name}"
            text += (" - " if count < 0 else " + ") + size if text else ("-" if count < 0 else "") + size
    return text
