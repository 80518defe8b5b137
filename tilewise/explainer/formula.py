"""The latex and mathml op tables: expressions as formulas, for papers and for browsers, which show MathML as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilewise.expr import Expr, Loaded
from tilewise.walking import OpTable, evaluate, loads, nodes

MOST_SYMBOLS = 400  # as printed, where each use of a part is written out; a longer formula is read by no one

# How tightly an operation binds, and what it asks of its operands; 9 is what needs no parentheses anywhere.
_ATOM = 9
_BINDING: dict[str, tuple[int, ...]] = {
    "or": (1, 1, 1), "and": (2, 2, 2), "lt": (4, 5, 5), "le": (4, 5, 5), "gt": (4, 5, 5), "ge": (4, 5, 5),
    "eq": (4, 5, 5), "ne": (4, 5, 5), "add": (5, 5, 6), "sub": (5, 5, 6), "mul": (6, 6, 7), "mod": (6, 6, 7),
    "neg": (6, 7), "not": (7, 7), "div": (_ATOM, 0, 0), "floordiv": (_ATOM, 0, 0), "abs": (_ATOM, 0),
    "minimum": (_ATOM, 0, 0), "maximum": (_ATOM, 0, 0), "exp": (_ATOM, 0), "log": (_ATOM, 0), "tanh": (_ATOM, 0),
    "where": (_ATOM, 0, 0, 0),
}  # fmt: skip


class _Piece(NamedTuple):
    text: str
    binding: int


@dataclass(frozen=True)
class Notation:
    """A language of formulas: a template an operation, and how names, numbers and parentheses are written."""

    operations: Mapping[str, str]
    variable: Callable[[str], str]
    number: Callable[[Any], str]
    cell: Callable[[str, list[str]], str]
    parentheses: str

    def write(self, expr: Expr, slots: Sequence[Loaded] | None = None) -> str | None:
        """The expression as a formula, or None if it is too long for one. slots: arrays in their order, if known."""
        if _printed(expr) > MOST_SYMBOLS:
            return None
        names = {id(slot.array): f"a{i}" for i, slot in enumerate(loads(expr) if slots is None else slots)}
        piece: _Piece = evaluate(expr, _Variables(self), self._ops(names))
        return piece.text

    def _ops(self, names: dict[int, str]) -> OpTable:
        def load(slot: Loaded, *index: _Piece) -> _Piece:
            return _Piece(self.cell(names[id(slot.array)], [i.text for i in index]), _ATOM)

        def const(value: Any) -> _Piece:
            return _Piece(self.number(value), 6 if not isinstance(value, bool) and value < 0 else _ATOM)

        written = {op: self._operation(op) for op in _BINDING}
        return {**written, "const": const, "load": load, "float": lambda a: a}

    def _operation(self, op: str) -> Callable[..., _Piece]:
        binding, *asked = _BINDING[op]

        def write(*args: _Piece) -> _Piece:
            texts = (self._inside(a, least) for a, least in zip(args, asked, strict=True))
            return _Piece(self.operations[op].format(*texts), binding)

        return write

    def _inside(self, piece: _Piece, least: int) -> str:
        return piece.text if piece.binding >= least else self.parentheses.format(piece.text)


class _Variables(dict[str, _Piece]):
    def __init__(self, notation: Notation) -> None:
        self.notation = notation

    def __missing__(self, name: str) -> _Piece:
        return _Piece(self.notation.variable(name), _ATOM)


def _printed(expr: Expr) -> int:
    """Symbols of the formula, counted without writing it: parts that are shared may double it again and again."""
    counts: dict[Expr, int] = {}
    for node in nodes(expr):
        counts[node] = 1 + sum(counts[a] for a in node.args)
    return counts[expr]


def _infinite(value: Any, infinity: str, finite: Callable[[Any], str]) -> str:
    if value in (float("inf"), float("-inf")):
        return infinity if value > 0 else f"-{infinity}"
    return finite(value)


# -- LaTeX ------------------------------------------------------------------------------------------------------------


def _latex_number(value: Any) -> str:
    return rf"\text{{{value}}}" if isinstance(value, bool) else _infinite(value, r"\infty", "{:.6g}".format)


LATEX = Notation(
    {
        "add": "{0} + {1}", "sub": "{0} - {1}", "mul": r"{0} \cdot {1}", "div": r"\frac{{{0}}}{{{1}}}", "neg": "-{0}",
        "floordiv": r"\left\lfloor \frac{{{0}}}{{{1}}} \right\rfloor", "mod": r"{0} \bmod {1}",
        "abs": r"\left| {0} \right|", "minimum": r"\min\left({0}, {1}\right)", "maximum": r"\max\left({0}, {1}\right)",
        "exp": r"\exp\left({0}\right)", "log": r"\log\left({0}\right)", "tanh": r"\tanh\left({0}\right)",
        "where": r"\begin{{cases}} {1} & {0} \\ {2} & \text{{otherwise}} \end{{cases}}",
        "lt": "{0} < {1}", "le": r"{0} \le {1}", "gt": "{0} > {1}", "ge": r"{0} \ge {1}", "eq": "{0} = {1}",
        "ne": r"{0} \ne {1}", "and": r"{0} \land {1}", "or": r"{0} \lor {1}", "not": r"\lnot {0}",
    },
    variable=lambda name: name if len(name) == 1 else f"{name[0]}_{{{name[1:]}}}",
    number=_latex_number,
    cell=lambda name, index: f"{name[0]}_{{{name[1:]}}}[{', '.join(index)}]",
    parentheses=r"\left({0}\right)",
)  # fmt: skip


# -- MathML -----------------------------------------------------------------------------------------------------------


def _between(symbol: str) -> str:
    return f"<mrow>{{0}}<mo>{symbol}</mo>{{1}}</mrow>"


def _function(name: str, arguments: str = "{0}") -> str:
    return f"<mrow><mi>{name}</mi><mo>(</mo>{arguments}<mo>)</mo></mrow>"


def _mathml_name(name: str) -> str:
    return f"<mi>{name}</mi>" if len(name) == 1 else f"<msub><mi>{name[0]}</mi><mi>{name[1:]}</mi></msub>"


def _mathml_number(value: Any) -> str:
    if isinstance(value, bool):
        return f"<mtext>{value}</mtext>"
    return f"<mn>{_infinite(value, '∞', '{:.6g}'.format)}</mn>".replace("<mn>-", "<mo>−</mo><mn>")


MATHML = Notation(
    {
        "add": _between("+"), "sub": _between("−"), "mul": _between("·"), "div": "<mfrac>{0}{1}</mfrac>",
        "neg": "<mrow><mo>−</mo>{0}</mrow>", "mod": _between("mod"),
        "floordiv": "<mrow><mo>⌊</mo><mfrac>{0}{1}</mfrac><mo>⌋</mo></mrow>",
        "abs": "<mrow><mo>|</mo>{0}<mo>|</mo></mrow>",
        "minimum": _function("min", "{0}<mo>,</mo>{1}"), "maximum": _function("max", "{0}<mo>,</mo>{1}"),
        "exp": _function("exp"), "log": _function("log"), "tanh": _function("tanh"),
        "where": "<mrow><mo>{{</mo><mtable><mtr><mtd>{1}</mtd><mtd>{0}</mtd></mtr>"
        "<mtr><mtd>{2}</mtd><mtd><mtext>otherwise</mtext></mtd></mtr></mtable></mrow>",
        "lt": _between("&lt;"), "le": _between("≤"), "gt": _between("&gt;"), "ge": _between("≥"), "eq": _between("="),
        "ne": _between("≠"), "and": _between("∧"), "or": _between("∨"), "not": "<mrow><mo>¬</mo>{0}</mrow>",
    },
    variable=_mathml_name,
    number=lambda value: f"<mrow>{_mathml_number(value)}</mrow>",
    cell=lambda name, index: f"<mrow>{_mathml_name(name)}<mo>[</mo>{'<mo>,</mo>'.join(index)}<mo>]</mo></mrow>",
    parentheses="<mrow><mo>(</mo>{0}<mo>)</mo></mrow>",
)  # fmt: skip
