"""Mistakes in code generators, interval tables and the marshalling of hosts: tests/test_fuzz_mistakes.py plants them.

TRITON_INTERPRET=1 python -m tests.fuzzing.running.mistakes [PART OF A NAME]    # how many calls each takes to be found
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.fuzzing.running.planting import Mistake, edit, entry, found

# -- interval tables and plans ----------------------------------------------------------------------------------------

_OPS = "intervals:INTERVAL_OPS"
INTERVALS = {
    "a divisor is its largest": edit(
        "intervals:_floordiv",
        "positive = _hull(*(x // np.maximum(y, 1) for x in a for y in b))",
        "positive = _hull(*(x // np.maximum(b[1], 1) for x in a))",
    ),
    "negative divisors are taken for positive": edit(
        "intervals:_floordiv", "negative = _hull(*(x // np.minimum(y, -1)", "negative = _hull(*(x // np.maximum(y, 1)"
    ),
    "remainders of several periods are of one": edit("intervals:_mod", " & (a[0] // divisor == a[1] // divisor)", ""),
    "a remainder is never negative": edit("intervals:_mod", "np.minimum(b[0] + 1, 0)", "np.maximum(b[0], 0)"),
    "an absolute value is never 0": edit("intervals:_abs", "np.where(inside, np.zeros_like(lo), lo)", "lo"),
    "a negative keeps its bounds' order": edit("intervals:_negated", "-a[1], -a[0]", "-a[0], -a[1]"),
    "products of two signs": edit(
        "intervals:_mul", "_hull(*(x * y for x in a for y in b))", "(a[0] * b[0], a[1] * b[1])"
    ),
    "less is less or equal": edit("intervals:_lt", "a[1] < b[0]", "a[1] <= b[0]"),
    "an order of two tiles that touch": edit("intervals:_le", "~(a[0] > b[1])", "~(a[0] >= b[1])"),
    "equal where bounds meet": edit(
        "intervals:_eq", "(a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])", "a[0] == b[0]"
    ),
    "not of somewhere is everywhere": edit(
        "intervals:_not",
        "~np.asarray(a[1], bool), ~np.asarray(a[0], bool)",
        "~np.asarray(a[0], bool), ~np.asarray(a[1], bool)",
    ),
    "a choice is its first": edit(
        "intervals:_where", "lo, hi = np.minimum(a[0], b[0]), np.maximum(a[1], b[1])", "lo, hi = a"
    ),
    "or of everywhere": entry(_OPS, "or", "and"),
    "a minimum is its first": entry(_OPS, "minimum", lambda _: lambda a, b: (a[0], np.minimum(a[1], b[1]))),
    "a range's last entry is left out": edit("intervals:_over_ranges", "last[at] - 2**i + 1", "last[at] - 2**i"),
    "an index is clamped one short": edit(
        "intervals:_within", "(0, size - 1), strict=True)", "(0, max(size - 2, 0)), strict=True)"
    ),
    "key heads do not vary": edit("schedule:Plan.told_apart", '{"H", "HK"} & used', '{"H"} & used'),
    "a ragged tile is full": edit("schedule:_classify", "| (k_hi > shape.n_k)", "| (k_hi < 0)"),
    "a score's -inf is forgotten by position": edit(
        "schedule:live_expression", "spec.mask & finite", "spec.mask | finite"
    ),
    "mixed blocks are as they are, by keys": edit(
        "schedule:_bands", "fine[:, :, first:last, :] = _classify(plan, inner, outer)", "pass"
    ),
    "plans of another part of a sequence": edit(
        "schedule:plan", "shape, backward=False,", "shape, backward=False, origin_k=0, origin_q=0,"
    ),
}


# -- code generators --------------------------------------------------------------------------------------------------

_CPU = "kernels.cpu.ops:"
BYTECODE = {
    "two arrays read at one index are one": edit(
        _CPU + "Assembler.emit", "operands, slot, repr(value)", "operands, repr(value)"
    ),
    "a value varies as its first argument does": edit(
        _CPU + "Assembler.emit", "for x in args:\n", "for x in args[:1]:\n"
    ),
    "the last array is read again": edit(
        _CPU + "Assembler._load", "slot=known[0] if known else len(self.slots) - 1", "slot=len(self.slots) - 1"
    ),
    "choices are swapped": edit(_CPU + "Assembler._where", "(condition, *choices)", "(condition, *choices[::-1])"),
    "positions in the pack are a head's": entry(_CPU + "_PLACES", "QP", lambda place: type(place)(0)),
    "key heads are heads": edit(
        _CPU + "_Variables.__missing__", "VARIABLES.index(name)", 'VARIABLES.index("H" if name == "HK" else name)'
    ),
    "less or equal is less": edit(_CPU + "Assembler.emit", "OPS.index(op)", 'OPS.index("lt" if op == "le" else op)'),
    "integers of arrays are narrow": edit(
        "kernels.cpu.marshal:Marshal.is_wide",
        "return reads_integers and beyond",
        "return not reads_integers and beyond",
    ),
}
VALUES = {
    "an index beyond an array wraps around": edit(
        "kernels.numpy.ops:clamp", "np.minimum(np.maximum(index, 0), size - 1)", "index % size"
    ),
    "where is the other way round": edit(
        "kernels.numpy.ops:numpy_ops", '"where": np.where', '"where": lambda c, a, b: np.where(c, b, a)'
    ),
    "quotients of floats are not floored": edit("kernels.numpy.ops:numpy_ops", "else np.floor(a / b))", "else a / b)"),
    "remainders have the dividend's sign": edit(
        "kernels.numpy.ops:numpy_ops", "np.remainder(a, b) if", "np.fmod(a, b) if"
    ),
}
_RULES = "derivative:_RULES"
DERIVATIVES = {
    "tanh has another slope": entry(_RULES, "tanh", lambda _: _tanh_slope),
    "a divisor has no slope": entry(_RULES, "div", lambda _: _div_slope),
    "the smaller one's slope is the larger one's": entry(_RULES, "minimum", "maximum"),
    "an absolute value's slope is 1": entry(_RULES, "abs", lambda _: lambda n, da: da),
}


def _tanh_slope(n: Any, da: Any) -> Any:
    from tilewise.derivative import ONE, _mul

    return _mul(ONE - n, da)


def _div_slope(n: Any, da: Any, db: Any) -> Any:
    from tilewise.derivative import _div

    return _div(da, n.args[1])


_TRITON = "kernels.triton.ops:"
TRITON = {
    "sizes of another axis": edit(_TRITON + "_Writer._offset", "sizes[{number}][{axis}] - 1", "sizes[{number}][0] - 1"),
    "remainders of floats keep their sign": edit(
        _TRITON + "_Writer._of_floats", "{a.text} - {b.text} * {floor.text}", "{b.text} * {floor.text} - {a.text}"
    ),
    "or of a literal": edit(_TRITON + "_Writer._or", "{a.text} | {b.text}", "{a.text} & {b.text}"),
    "a condition of a row alone": edit(_TRITON + "_Writer._not", "{a.text} == 0", "{a.text} != 0"),
    "wide integers are cut": edit(_TRITON + "_Writer._load", '"tl.int64" if wide else "tl.int32"', '"tl.int16"'),
}

_CUDA = "kernels.cuda.ops:"
CUDA = {
    # A bound of the mask that starts a float of the score was moved to its tile in place: the float twice.
    "a bound and a start are one value": edit(
        _CUDA + "_Writer._row_in_tile",
        'values = ", ".join(["row", *(x.text for x in made)])',
        'bounds = {x.text for x in made if x.type == "int"}\n'
        '    twice = (x.text.replace("first_key", "first_key - first_key") if x.text[6:-1] in bounds else x.text\n'
        "             for x in made)\n"
        '    values = ", ".join(["row", *twice])',
    ),
    "bounds of one side join the other": edit("kernels.cuda.sums:range_of", 'op in ("lt", "le")', 'op in ("lt", "ge")'),
    "a strict bound is not": edit(
        "kernels.cuda.sums:range_of", '{"lt": -1, "gt": 1}.get(op, 0)', '{"gt": 1}.get(op, 0)'
    ),
    "the looser bound is kept": edit(
        "kernels.cuda.sums:tightest",
        'choose(form[""], constants.get(variables, form[""]))',
        'constants.get(variables, form[""])',
    ),
    "a bound forgets where keys begin": edit(
        "kernels.cuda.sums:bound_text", '(-1, "head.origin_k")', '(0, "head.origin_k")'
    ),
    "a start is of the mirrored sum": edit(
        "kernels.cuda.terms:joined_to_column", "'+' if sign > 0 else '-'", "'-' if sign > 0 else '+'"
    ),
    "an absolute value is a sum": edit(_CUDA + "_Writer._absolute", "absolute_of=a.linear", "linear=a.linear"),
    "cells of one axis": edit(_CUDA + "_Writer._read", "{axis}, {{0}})", "0, {{0}})"),
    "constants told at run time are another's": edit(
        _CUDA + "_Writer._constant_of", "{self.told.index(form)}]", "{len(self.told) - 1}]"
    ),
}


def _tilelang_quotients() -> None:
    """By TileLang's own operations, whose simplifier (0.1.15) is wrong on negative ones. Divided by 0 they give 0."""
    from tilelang import language as tl
    from tvm import tirx
    from tvm.script.ir_builder.tirx import bind

    from tilewise.kernels.tilelang import ops

    def of_whole_numbers(name: str, a: Any, b: Any) -> Any:
        zero = tirx.const(0, b.dtype)
        divisor = bind(b | tl.cast(tirx.EQ(b, zero), b.dtype))
        made = tl.floordiv(a, divisor) if name == "quotient" else tl.floormod(a, divisor)
        return made * tl.cast(tirx.NE(b, zero), b.dtype)

    ops._of_whole_numbers = of_whole_numbers


# -- marshalling ------------------------------------------------------------------------------------------------------

_MARSHAL = "kernels.cpu.marshal:Marshal."
MARSHALLING = {
    "arrays lie as their shapes say": edit(
        _MARSHAL + "slot",
        "[step // x.itemsize for step in x.strides]",
        "[int(np.prod(x.shape[i + 1:])) for i in range(x.ndim)]",
    ),
    "heads lie as batches do": edit(_MARSHAL + "_where", "head // size", "batch // size"),
    "parts begin at 0": edit(_MARSHAL + "_sequence", "part.origin_q, part.origin_k,", "0, part.origin_k,"),
    "keys of the pack are queries": edit(
        _MARSHAL + "_sequence", "part.packed_q, part.packed_k,", "part.packed_q, part.packed_q,"
    ),
    "sequences have no number": edit(_MARSHAL + "_sequence", "part.first_batch,", "0,"),
    "a plan of one head for all": edit(_MARSHAL + "_runs", "if size > 1 else 0", "if size > 9 else 0"),
    "sinks lie side by side": edit(
        _MARSHAL + "forward",
        'np.require(arrays.widen(arrays.as_numpy(spec.sinks), lse.dtype), None, ["C", "A"])',
        "arrays.widen(arrays.as_numpy(spec.sinks), lse.dtype)",
    ),
    "misaligned arrays are taken where they are": edit(
        "kernels.cpu.marshal:_has_whole_steps", "not any(step % x.itemsize for step in x.strides)", "True"
    ),
}
CALLS = {
    "key heads go round": edit("spec:Shape.env", "h // max(self.group, 1)", "h % max(self.heads_k, 1)"),
    "packed keys begin with the queries": edit("spec:Shape.sequences", "packed_k=cols.start", "packed_k=rows.start"),
    "decoding forgets which sequence it is": edit("decoding:by_sequences", "Positions(first_batch=b)", "Positions()"),
    "sequences are as long as the first": edit(
        "cache.contiguous:KVCache.together", "np.all(lengths == lengths[0])", "len(lengths)"
    ),
    "pages are taken in their own order": edit("cache.paged:PagedKVCache._gathered", "x[pages]", "x[sorted(pages)]"),
    "a page's keys begin anew": edit(
        "cache.paged:PagedKVCache._place", "key % self.page_size", "(key + 1) % self.page_size"
    ),
}
LINEAR = {
    # A state in Fortran's order was taken for one in C's.
    "states lie as they come": edit("linear.reference:extended_state", "np.ascontiguousarray(", "("),
    "decays of packed sequences go on": edit(
        "linear.kernels.host:decay_gradient",
        "for _, rows in problem.sequences():",
        "for _, rows in [(0, slice(0, None))]:",
    ),
    "a state's own decay is forgotten": edit(
        "linear.kernels.host:last_log_decay", "log_decay[...] = problem.initial.log_decay", "pass"
    ),
}
SIMULATOR = {
    # A table that is copied lies otherwise than the one that the source was made for.
    "copies lie as what they are of": edit(
        "kernels.cuda.simulator.kernel:_with_walkable", "return replace(spec, mask=mask, score=score)", "return spec"
    ),
    "sinks are a step apart": edit("kernels.cuda.marshal:params", "sinks.steps[0]", "1"),
    "queries of the pack begin at the keys": edit(
        "kernels.cuda.marshal:_fields", "queries.start or 0, keys.start or 0", "keys.start or 0, keys.start or 0"
    ),
    "sequences have no number": edit("kernels.cuda.marshal:_fields", "part.first_batch,", "0,"),
    "steps of arrays as their sizes say": edit(
        "kernels.cuda.marshal:params",
        "= view.steps\n",
        "= tuple(\n            math.prod(view.shape[n + 1:]) for n in range(len(view.shape)))\n",
    ),
}
# What shows in calls of a kind alone is looked for in those.
_PACKED, _PARTS, _CACHES = {"kinds": ("packed",), "cache_share": 0.0}, {"kinds": ("part",)}, {"cache_share": 0.9}
_WANTED: dict[str, dict[str, Any]] = {
    "bytecode: positions in the pack are a head's": _PACKED,
    "marshalling: keys of the pack are queries": _PACKED,
    "calls: packed keys begin with the queries": _PACKED,
    "linear: decays of packed sequences go on": {},
    "marshalling: parts begin at 0": _PARTS,
    "cuda: a bound forgets where keys begin": _PARTS,
    "intervals: plans of another part of a sequence": _PARTS,
    **{f"calls: {name}": _CACHES for name in CALLS if "heads" not in name and "packed" not in name},
}
# Found after hundreds of calls, or on systems that take a second or more for one.
_SLOW = {
    "intervals: a choice is its first",
    "intervals: products of two signs",
    "derivatives: a divisor has no slope",
    "derivatives: an absolute value's slope is 1",
    "marshalling: sinks lie side by side",
    "intervals: negative divisors are taken for positive",
    "intervals: a divisor is its largest",
    "intervals: a range's last entry is left out",
    "intervals: an index is clamped one short",
    "intervals: key heads do not vary",
}
# Where a call takes seconds: the seed to begin at, of those that the mistake gives another source.
_FIRST = {
    "cuda: a bound and a start are one value": 66,
    "cuda: the looser bound is kept": 85,
    "cuda: constants told at run time are another's": 15,
}
_QUICK = {"cuda: a bound and a start are one value", "triton: or of a literal"}  # stand for the others of theirs
_SMALL = {"most_scores": 10_000}
_COMPILED = {"most_scores": 3000, "linear_share": 0.0}


def _of(group: str, system: str, plants: dict[str, Callable[[], None]], **wanted: Any) -> Iterator[tuple[str, Mistake]]:
    for name in plants:
        told = f"{group}: {name}"
        is_slow = told in _SLOW or (system not in ("cpu", "numpy") and told not in _QUICK)
        more = {**_SMALL, **wanted, **_WANTED.get(told, {})}
        yield told, Mistake(system, plants[name], more, _FIRST.get(told, 0), is_slow)


MISTAKES: dict[str, Mistake] = {
    **dict(_of("intervals", "cpu", INTERVALS, linear_share=0.0)),
    **dict(_of("bytecode", "cpu", BYTECODE, linear_share=0.0)),
    **dict(_of("values", "numpy", VALUES, linear_share=0.0, key_tile=64)),
    **dict(_of("derivatives", "cpu", DERIVATIVES, backward_share=1.0, linear_share=0.0)),
    **dict(_of("marshalling", "cpu", MARSHALLING, linear_share=0.0)),
    **dict(_of("calls", "cpu", CALLS, linear_share=0.0)),
    **dict(_of("linear", "cpu", LINEAR, linear_share=1.0, backward_share=0.7)),
    **dict(_of("triton", "triton", TRITON, **_COMPILED)),
    **dict(_of("cuda", "cuda-sim/tiled", CUDA, backward_share=0.0, **_COMPILED)),
    **dict(_of("cuda marshalling", "cuda-sim/naive", SIMULATOR, **_COMPILED)),
    "tilelang: quotients are simplified": Mistake("tilelang-c", _tilelang_quotients, _COMPILED, 131, is_slow=True),
}


def main(part: str) -> None:
    for name, mistake in MISTAKES.items():
        if part in name:
            began = time.monotonic()
            seen = found(mistake)
            told = "NOT FOUND" if seen is None else f"{seen.calls:4} calls, {seen.told.splitlines()[0][:90]}"
            print(f"{name}: {time.monotonic() - began:.1f} s, {told}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main(sys.argv[1] if len(sys.argv) > 1 else "")
