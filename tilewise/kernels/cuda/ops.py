"""The cuda op table: expressions as C++, spliced into the kernels as `variant.h`.

A value is computed where it varies: once a head, a query row or a key, and for each score only what depends on both.
Conditions that bound K by a sum of other variables (causal, window, prefix) become bounds of a column within the tile,
held in registers for each row: a comparison with a constant for each score, which is what one would write by hand.

What a tile makes of a row's value is another value with another name, in the frame of that tile (terms.py); the row
keeps its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.derivative import ONE
from tilewise.expr import COMPARISONS, Expr, Loaded, S
from tilewise.kernels.cuda.structs import MAX_CONSTANTS
from tilewise.kernels.cuda.sums import (
    OF_ROWS,
    Linear,
    Range,
    bound_text,
    combined,
    is_short,
    range_of,
    start_text,
    tightest,
    times,
)
from tilewise.kernels.cuda.tables import TABLE_BYTES, Table, layout
from tilewise.kernels.cuda.terms import (
    STRUCTS,
    Frame,
    Place,
    Term,
    all_absolute,
    compared_with_column,
    joined_to_column,
)
from tilewise.walking import OpTable, evaluate

STORED = {
    "float32": "float", "float64": "double", "float16": "Half", "bfloat16": "BFloat", "int8": "signed char",
    "int16": "short", "int32": "int", "int64": "long long", "uint8": "unsigned char", "bool": "Truth",
}  # fmt: skip


_NAMES = {Place.HEAD: "h", Place.ROW: "r", Place.KEY: "k", Place.SCORE: "x"}  # how the values of each place are named
_IN_TILE = "t"  # begins the names of what a tile makes of a row's values
_PLACES = {"S": Place.SCORE, **dict.fromkeys(OF_ROWS, Place.ROW), "K": Place.KEY, "KP": Place.KEY}


@dataclass(frozen=True)
class Statement:
    """A value that gets a name: its type, its text, and the terms that the text speaks of."""

    name: str
    type: str
    text: str
    uses: tuple[Term, ...]


@dataclass(frozen=True, eq=False)
class Variant:
    """The C++ of an attention's mask and score, the arrays it loads from, and constants that it is told at run time: so
    one kernel serves windows of all sizes. Both in their order in Params."""

    text: str
    slots: tuple[Loaded, ...]
    constants: tuple[int, ...] = ()
    table: Table | None = None


def variant(mask: Expr | None, score: Expr | None, slope: Expr | None = None) -> Variant:
    """What `variant.h` stands for in a kernel's source. slope: of the score, for a backward pass."""
    writer = _Writer()
    of_scores = {"score": S if score is None else score, **({} if slope is None else {"slope": slope})}
    functions = [
        writer.function("float", name, partial(writer.term, expr), parameter=", float s")
        for name, expr in of_scores.items()
    ]
    writer.takes_table = False  # masks are not looked at in every tile
    functions.append(writer.function("bool", "mask", lambda: writer.within_keys(mask)))
    flags = [f"constexpr bool HAS_SCORE = {_bool(score is not None)};"]
    if slope is not None:
        flags.append(f"constexpr bool HAS_SLOPE = {_bool(slope is not ONE)};")
    parts = [_OPENING, *flags, *writer.places(), *writer.of_table(), *functions, "}  // namespace variant\n"]
    told = tuple(form[""] for form in writer.told)
    return Variant(_numbered("\n\n".join(parts)), tuple(writer.slots), told, writer.table)


def _numbered(text: str) -> str:
    """Names by the order in which they appear: values that nothing uses in the end have none, and tell no two texts
    apart, so that a window to the left and a causal one share a kernel."""
    numbers: dict[str, int] = {}
    return re.sub(r"\b[hrkxt]#\d+", lambda name: f"{name[0][0]}{numbers.setdefault(name[0], len(numbers) + 1)}", text)


def _bool(value: bool) -> str:
    return "true" if value else "false"


# -- writing ----------------------------------------------------------------------------------------------------------

_OPENING = "// Made from the mask and the score of a call by ops.py.\n#pragma once\n\nnamespace variant {"
_INLINE = "__device__ __forceinline__"
_INDENT = "\n    "

# Each place: what its functions are given, and the variables that begin its struct, with their values.
_FUNCTIONS = {
    Place.HEAD: "Head head(const Params& params, const Work& work)",
    Place.ROW: "Row row(const Params& params, const Head& head, int query)",
    Place.KEY: "Key key(const Params& params, const Head& head, int first_key, int column)",
}
_VARIABLES = {
    Place.HEAD: {
        "B": "work.sequence.batch + work.b", "H": "work.h", "HK": "work.hk", "NQ": "work.sequence.total_q",
        "NK": "work.sequence.total_k", "origin_q": "work.sequence.origin_q", "origin_k": "work.sequence.origin_k",
        "end_k": "work.sequence.origin_k + work.sequence.n_k",
        "packed_q": "work.sequence.packed_q", "packed_k": "work.sequence.packed_k",
    },
    Place.ROW: {"Q": "head.origin_q + query", "QP": "head.packed_q + query"},
    Place.KEY: {
        "K": "head.origin_k + first_key + column", "KP": "head.packed_k + first_key + column", "column": "column",
    },
}  # fmt: skip


@dataclass(eq=False)
class _Writer:
    """Statements in the places where they belong, each written once however often its value is used."""

    slots: list[Loaded] = field(default_factory=list)
    statements: dict[Place, dict[str, Statement]] = field(default_factory=lambda: {place: {} for place in _NAMES})
    in_tile: dict[str, Statement] = field(default_factory=dict)  # what a tile makes of a row's values
    needed: set[str] = field(default_factory=set)  # names
    cells: dict[tuple[str, str], Statement] = field(default_factory=dict)  # of a row's own, by where they are read
    table: Table | None = None
    takes_table: bool = True
    table_at: list[str] = field(default_factory=list)  # the indices of its other axes
    told: list[Linear] = field(default_factory=list)  # bounds whose constants are told at run time
    _count: int = 0

    # -- the text -----------------------------------------------------------------------------------------------------
    def function(self, result: str, name: str, value: Callable[[], Term], parameter: str = "") -> str:
        """The mask or the score as a function."""
        self.statements[Place.SCORE] = {}
        term = self.written(value())
        all_absolute(term)
        self._need(term)
        seen = "const Head& head, const RowInTile& row, const Key& key, const Near& near"
        given = f"const Params& params, {seen}{parameter}"
        body = _INDENT.join([*self._declarations(Place.SCORE), f"return {term.seen_from(Place.SCORE)};"])
        return f"{_INLINE} {result} {name}({given}) {{{_INDENT}{body}\n}}"

    def term(self, expr: Expr) -> Term:
        term: Term = evaluate(expr, _Variables(), self._ops())
        return term

    def within_keys(self, mask: Expr | None) -> Term:
        """Where the mask holds and there is a key: a tile may end beyond the last one."""
        exists = Term("", "bool", Place.SCORE, within=Range(most=({"end_k": 1, "": -1},)))
        return exists if mask is None else self._and(self.term(mask), exists)

    def places(self) -> list[str]:
        """The structs of heads, rows and keys, and the functions that fill them in."""
        structs = [self._struct(place) for place in STRUCTS]
        return [*structs, *self._row_in_tile(), *self._near_cells()]

    def _row_in_tile(self) -> list[str]:
        """The struct of what scores of a tile read of a row: all that the row has, and what the tile makes of it."""
        made = [x for x in self.in_tile.values() if x.name in self.needed]
        made.sort(key=lambda x: x.type == "float")  # bounds before starts: ptxas writes less for causal ALiBi
        fields = "".join(f"{_INDENT}{x.type} {x.name};" for x in made)
        values = ", ".join(["row", *(x.text for x in made)])
        return [
            f"// A row as seen from the tile that begins at first_key.\nstruct RowInTile : Row {{{fields}\n}};",
            f"{_INLINE} RowInTile seen_from(const Row& row, int first_key) {{{_INDENT}return {{{values}}};\n}}",
        ]

    def _near_cells(self) -> list[str]:
        """The struct of cells that are read before a score is computed, and functions that read them."""
        kept = [x for x in self.cells.values() if x.uses[0].text in self.needed]
        fields = "".join(f"{_INDENT}{x.type} {x.name};" for x in kept)
        where = [tuple(term.text for term in x.uses) for x in kept]
        one = ", ".join(f"row.{cells}.read(key.{at})" for cells, at in where)
        two = "".join(
            f"{_INDENT}{'if (!USES_TABLE) ' if self.table and self.table.cell == x.name else ''}"
            f"row.{cells}.read_two(key.{at}, next.{at}, two[0].{x.name}, two[1].{x.name});"
            for x, (cells, at) in zip(kept, where, strict=True)
        )
        given = "const Row& row, const Key& key"
        return [
            f"struct Near {{{fields}\n}};",
            f"{_INLINE} Near near_cells({given}) {{ return {{{one}}}; }}",
            f"{_INLINE} void near_cells({given}, const Key& next, Near (&two)[2]) {{{two}\n}}",
        ]

    def _struct(self, place: Place) -> str:
        name, variables = STRUCTS[place], _VARIABLES[place]
        fields = [f"int {', '.join(variables)};"]
        made = self._kept(place)
        fields += [f"{statement.type} {statement.name};" for statement in made]
        filled = [f"const int {variable} = {value};" for variable, value in variables.items() if variable != value]
        filled += self._declarations(place)
        every = ", ".join([*variables, *(statement.name for statement in made)])
        struct = f"struct {name.capitalize()} {{{_INDENT}{_INDENT.join(fields)}\n}};"
        body = _INDENT.join([*filled, f"return {{{every}}};"])
        return f"{struct}\n\n{_INLINE} {_FUNCTIONS[place]} {{{_INDENT}{body}\n}}"

    def _declarations(self, place: Place) -> list[str]:
        return [f"const {x.type} {x.name} = {x.text};" for x in self._kept(place)]

    def _kept(self, place: Place) -> list[Statement]:
        """What is used in the end: sums that became bounds are not."""
        return [x for x in self.statements[place].values() if x.name in self.needed]

    def _need(self, *terms: Term) -> None:
        stack = list(terms)
        while stack:
            term = stack.pop()
            found = {x.name: x for x in self._statements(term.place, term.frame).values()}.get(term.text)
            if term.named and found is not None and found.name not in self.needed:
                self.needed.add(found.name)
                stack += found.uses

    def _statements(self, place: Place, frame: Frame) -> dict[str, Statement]:
        return self.in_tile if frame else self.statements[place]

    def statement(
        self, type_: str, text: str, place: Place, uses: tuple[Term, ...], frame: Frame = Frame.ABSOLUTE
    ) -> str:
        """The name of a value, which is computed in that place and has that frame: no other value ever has the name."""
        known = self._statements(place, frame)
        if text not in known:
            self._count += 1
            prefix = _IN_TILE if frame else _NAMES[place]
            known[text] = Statement(f"{prefix}#{self._count}", type_, text, uses)
        return known[text].name

    def moved(self, value: Term, frame: Frame, type_: str = "int") -> Term:
        """What a tile makes of a row's value: another value, in the frame of that tile."""
        all_absolute(value)
        text = f"row.{value.text} {'-' if frame > 0 else '+'} first_key"
        name = self.statement(type_, text if type_ == "int" else f"{type_}({text})", Place.ROW, (value,), frame)
        return Term(name, type_, Place.ROW, frame=frame)

    def written(self, term: Term) -> Term:
        """A term that has a text: bounds of K are written down when something other than `&` uses them."""
        if term.within is None:
            return term
        conditions: list[str] = []
        bounds: list[Term] = []
        sides = ((term.within.least, max, ">="), (term.within.most, min, "<="))
        for forms, choose, symbol in sides:
            if forms:
                function = "maximum" if choose is max else "minimum"
                texts = [bound_text(form, self._constant_of(form)) for form in tightest(forms, choose)]
                bound = texts[0]
                for text in texts[1:]:
                    bound = f"{function}({bound}, {text})"
                name = self.statement("int", bound, Place.ROW, ())
                bounds.append(self.moved(Term(name, "int", Place.ROW), Frame.FROM_FIRST_KEY))
                conditions.append(compared_with_column(symbol, bounds[-1]))
        name = self.statement("bool", " && ".join(conditions), Place.SCORE, tuple(bounds))
        return Term(name, "bool", Place.SCORE)

    def _constant_of(self, form: Linear) -> str | None:
        """A bound's constant as an entry of Params.constants; None if there is none, it is always the same, or there is
        no room for it."""
        if not form[""] or "end_k" in form or (form not in self.told and len(self.told) == MAX_CONSTANTS):
            return None
        if form not in self.told:
            self.told.append(form)
        return f"params.constants[{self.told.index(form)}]"

    # -- the operations -----------------------------------------------------------------------------------------------
    def _ops(self) -> OpTable:
        table: dict[str, Callable[..., Term]] = {op: self._call(text) for op, text in _TEMPLATES.items()}
        table |= {op: self._comparison(op) for op in COMPARISONS}
        table |= {op: self._arithmetic(op) for op in _ARITHMETIC if " " not in op}
        return {
            **table,
            "const": _constant,
            "load": self._load,
            "and": self._and,
            "neg": self._negative,
            "abs": self._absolute,
            "float": self._float,
        }

    def emit(self, template: str, args: tuple[Term, ...], type_: str, wide: bool = False, **more: Any) -> Term:
        """The operation, computed in the least place that has all its arguments; `wide`: in 64 bits."""
        args = tuple(self.written(a) for a in args)
        all_absolute(*args)
        place = Place.HEAD
        for a in args:
            place |= a.place
        texts = [a.seen_from(place) for a in args]
        if wide:
            texts = [text if a.type == "int64" else f"int64({text})" for text, a in zip(texts, args, strict=True)]
        name = self.statement(type_, template.format(*texts), place, args)
        from_array, of_score = any(a.from_array for a in args), any(a.of_score for a in args)
        return Term(name, type_, place, from_array=from_array, of_score=of_score, **more)

    def _call(self, template: str) -> Callable[..., Term]:
        def call(*args: Term) -> Term:
            type_ = _common(args)
            text = _OF_SCORE.get(template, template) if any(a.of_score for a in args) else template
            return self.emit(text.replace("T", type_), args, type_)

        return call

    def _arithmetic(self, op: str) -> Callable[[Term, Term], Term]:
        def combine(a: Term, b: Term) -> Term:
            wide = _common((a, b)) != "float" and (a.from_array or b.from_array)
            type_ = "int64" if wide else _common((a, b))
            kind = op
            if op == "div" and (a.of_score or b.of_score):
                kind = "div of score" if b.named else "div of score by constant"
            template = _ARITHMETIC[kind].replace("T", type_)
            return self.emit(template, (a, b), type_, wide, linear=combined(op, a.linear, b.linear))

        return combine

    def _negative(self, a: Term) -> Term:
        return self._sign("-{0}", a, times(a.linear, -1))

    def _absolute(self, a: Term) -> Term:
        return replace(self._sign("absolute<T>({0})", a, None), absolute_of=a.linear)

    def _float(self, a: Term) -> Term:
        """A sum with K in it, or its size, is a float of the row and columns are counted from it: none is converted."""
        form = a.linear or a.absolute_of
        if form is None or abs(form.get("K", 0)) != 1 or not is_short(form):
            return self.emit("float({0})", (a,), "float")
        sign = form["K"]
        begin = Term(self.statement("int", start_text(form), Place.ROW, ()), "int", Place.ROW)
        start = self.moved(begin, Frame(-sign), "float")
        value = joined_to_column(sign, start)
        text = f"fabsf({value})" if a.linear is None else value
        return Term(self.statement("float", text, Place.SCORE, (start,)), "float", Place.SCORE)

    def _sign(self, template: str, a: Term, linear: Linear | None) -> Term:
        wide = a.type != "float" and a.from_array
        type_ = "int64" if wide else a.type
        return self.emit(template.replace("T", type_), (a,), type_, wide, linear=linear)

    def _comparison(self, op: str) -> Callable[[Term, Term], Term]:
        def compare(a: Term, b: Term) -> Term:
            within = range_of(op, a.linear, b.linear)
            if within is not None:
                return Term("", "bool", Place.SCORE, within=within)
            return self.emit(f"{{0}} {COMPARISONS[op]} {{1}}", (a, b), "bool")

        return compare

    def _and(self, a: Term, b: Term) -> Term:
        if a.within is not None and b.within is not None:
            joined = Range(a.within.least + b.within.least, a.within.most + b.within.most)
            return Term("", "bool", Place.SCORE, within=joined)
        return self.emit("{0} && {1}", (a, b), "bool")

    def _load(self, slot: Loaded, *index: Term) -> Term:
        known = [i for i, x in enumerate(self.slots) if x.array is slot.array]
        if not known:
            self.slots.append(slot)
        number = known[0] if known else len(self.slots) - 1
        stored = arrays.dtype_name(slot.array)
        type_ = {"float": "float", "bool": "bool"}.get(arrays.value_kind(slot.array)) or (
            "int64" if stored == "int64" else "int"
        )
        read = self._read(number, STORED[stored], slot, index, type_)
        return Term(read.text, type_, read.place, from_array=True)

    def _read(self, number: int, stored: str, slot: Loaded, index: tuple[Term, ...], type_: str) -> Term:
        """Its cells are found step by step: those of a head, of a row, and among them the one of a key."""
        array = f"params.arrays[{number}]"
        axes = layout(slot.array)
        offsets: dict[bool, list[Term]] = {False: [], True: []}  # whether they vary from key to key
        for axis, i in enumerate(index):
            function, kind = ("clamped", i.type) if axes[axis].is_unit else ("along", "int64")
            offset = self.emit(f"{function}({array}, {axis}, {{0}})", (i,), "int" if kind == "bool" else kind)
            offsets[bool(offset.place & Place.KEY)].append(offset)
        cells = self.emit(f"cells_of<{stored}>({array})", (), f"Cells<{stored}>")
        for offset in sorted(offsets[False], key=lambda term: term.place):
            cells = self.emit("{0}.moved({1})", (cells, offset), f"Cells<{stored}>")
        if [(x.place, x.type) for x in offsets[True]] == [(Place.KEY, "int")] and cells.place == Place.ROW:
            near = self._near(cells, offsets[True][0], type_)
            self._find_table(number, slot, index, self.cells[cells.text, offsets[True][0].text].name)
            return near
        places = " + ".join(f"{{{i + 1}}}" for i in range(len(offsets[True]))) or "0"
        return self.emit(f"{{0}}.read({places})", (cells, *offsets[True]), type_)

    def _near(self, cells: Term, offset: Term, type_: str) -> Term:
        """A row's own cell; its neighbour is likely to be wanted next: kernels read them before, two at a time."""
        cell = (cells.text, offset.text)
        if cell not in self.cells:
            self.cells[cell] = Statement(f"n{len(self.cells)}", type_, "", (cells, offset))
        found = self.cells[cell]
        return Term(self.statement(type_, f"near.{found.name}", Place.SCORE, found.uses), type_, Place.SCORE)

    def _find_table(self, number: int, slot: Loaded, index: tuple[Term, ...], cell: str) -> None:
        """The first array that can come by tiles: floats of queries and keys, in steps that the copy engine takes."""
        dtype = arrays.dtype_name(slot.array)
        axes = {name: [i for i, x in enumerate(index) if x.linear == {name: 1}] for name in ("Q", "K")}
        taken = self.table is not None or not self.takes_table
        if taken or dtype not in TABLE_BYTES or [len(x) for x in axes.values()] != [1, 1]:
            return
        (q_axis,), (k_axis,) = axes["Q"], axes["K"]
        others = tuple(i for i in range(len(index)) if i not in (q_axis, k_axis))
        if len(others) > 2 or any(index[i].place != Place.HEAD for i in others):
            return
        if not all(layout(slot.array)[i].is_copied for i in (q_axis, *others)):
            return
        self.table = Table(cell, number, dtype, q_axis, k_axis, others)
        at = [self.emit(f"clamped(params.arrays[{number}], {i}, {{0}})", (index[i],), "int") for i in others]
        self._need(*at)
        self.table_at = [f"head.{x.text}" for x in at]

    def of_table(self) -> list[str]:
        """What a kernel needs to load tiles of the table, and to hand their cells to scores."""
        stored = STORED[self.table.dtype] if self.table else "float"
        at = ", ".join([*self.table_at, "0", "0"][:2])
        set_cell = f"near.{self.table.cell} = value;" if self.table else ""
        return [
            f"typedef {stored} TableCell;",
            f"{_INLINE} int2 table_at(const Head& head) {{ return make_int2({at}); }}",
            f"{_INLINE} void set_table_cell(Near& near, float value) {{ {set_cell} }}",
        ]


class _Variables(dict[str, Term]):
    """The variables of expressions."""

    def __missing__(self, name: str) -> Term:
        if name == "S":
            return Term("s", "float", Place.SCORE, of_score=True)
        return Term(name, "int", _PLACES.get(name, Place.HEAD), linear={name: 1})


# T is the type that the arguments have in common.
_TEMPLATES = {
    "exp": "expf({0})", "log": "logf({0})", "tanh": "tanhf({0})",
    "minimum": "minimum<T>({0}, {1})", "maximum": "maximum<T>({0}, {1})", "where": "{0} ? T({1}) : T({2})",
    "or": "{0} || {1}", "not": "!{0}",
}  # fmt: skip
_OF_SCORE = {"tanhf({0})": "hyperbolic_tangent({0})"}
_ARITHMETIC = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "div of score": "quotient({0}, {1})", "div of score by constant": "quotient({0}, {1}, 1 / float({1}))",
    "floordiv": "floordiv<T>({0}, {1})", "mod": "floormod<T>({0}, {1})",
}  # fmt: skip


def _common(args: tuple[Term, ...]) -> str:
    """The widest type among the last two arguments: the first of three is a condition."""
    types = {a.type for a in args[-2:]}
    return next(type_ for type_ in ("float", "int64", "int", "bool") if type_ in types)


def _constant(value: bool | int | float) -> Term:
    if isinstance(value, bool):
        return Term(_bool(value), "bool", Place.HEAD, named=False)
    if isinstance(value, int):
        # C++ has no negative literals: the smallest integer would be the negative of one that does not fit.
        text = str(value) if value >= 0 else f"(-{-value - 1} - 1)" if value == -(2**31) else f"({value})"
        return Term(text, "int", Place.HEAD, named=False, linear={"": value})
    with np.errstate(over="ignore"):
        single = np.float32(value)
    if np.isinf(single):
        text = "INFINITY" if single > 0 else "(-INFINITY)"
    else:
        digits = f"{float(single):.9g}"
        text = f"{digits if '.' in digits or 'e' in digits else digits + '.0'}f"
        text = f"({text})" if text.startswith("-") else text
    return Term(text, "float", Place.HEAD, named=False)
