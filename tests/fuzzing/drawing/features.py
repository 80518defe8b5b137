"""What a question has in it, found by looking at it rather than by how it was drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.fuzzing.drawing import language as la
from tests.fuzzing.drawing.language import FLOAT, INT, Node
from tests.fuzzing.question import Layout, LinearQuestion, Question

Sum = dict[str, int]  # how often each variable is in a sum, and the constant under ""
_BY_K = ("lt", "le", "gt", "ge")
_SHIFT = {"lt": -1, "le": 0, "gt": 1, "ge": 0}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_EDGES = (2**24, 2**24 + 1, 2**31 - 1, 2**31 - 2, -(2**31), -(2**31) + 1)


def features(question: Question | LinearQuestion) -> set[str]:
    if isinstance(question, LinearQuestion):
        return set(_of_linear(question))
    mask, score = texts(question)
    given = [question.q, question.k, question.v, *question.arrays]
    found = {*_of_call(question), *(x for array in given for x in of_layout(array.layout))}
    found |= {*_of_texts(mask, score), *_of_arrays(question, mask, score), *_of_gallery(question.names)}
    return found | {f"recipe {name}" for name in question.names[1:] if name.startswith(("mask of", "score of"))}


def texts(question: Question) -> tuple[Node | None, Node | None]:
    kinds = [la.kind_of(x.dtype) for x in question.arrays]
    mask, score = (None if x is None else la.parse(x, kinds) for x in (question.mask, question.score))
    return mask, score


def _of_gallery(names: Sequence[str]) -> Iterator[str]:
    yield from (x for x in names if x.startswith(("gallery", "named", "form", "wide")))
    masks, scores = ([x for x in names if x.startswith(f"gallery {what}")] for what in ("mask", "score"))
    yield from (f"pair {mask}, {score}" for mask in masks for score in scores)


# -- calls ------------------------------------------------------------------------------------------------------------


def _of_call(x: Question) -> Iterator[str]:
    (batch, heads, n_q, d), (_, heads_k, n_k, d_v) = x.q.values.shape, x.v.values.shape
    yield f"kind {x.names[0]}"
    yield f"dtype {x.dtype}"
    tile = 64 if x.tile is None else x.tile[1]
    told = {
        "tile": x.tile is not None, "two key tiles": n_k > tile, "keys no tile divides": n_k % tile != 0,
        "grouped heads": heads > heads_k > 1, "one key head": heads > heads_k == 1, "batch": batch > 1,
        "no queries": n_q == 0, "no keys": n_k == 0, "d_v unlike d": d != d_v, "sinks": x.sinks is not None,
        "sink of none": x.sinks is not None and bool(np.isinf(x.sinks.values).any()),
        "batch invariant": x.batch_invariant, "causal as an option": x.causal,
        "causal as an option beside a mask": x.causal and bool(x.mask_as_written),
        "an array as mask": x.array_as_mask is not None, "backward": x.d_out is not None,
        "a row of many keys": n_q == 1 and n_k > 99, "scale of 0": x.scale == 0, "negative scale": x.scale < 0,
    }  # fmt: skip
    yield from (name for name, holds in told.items() if holds)
    if x.d_out is not None:
        yield "d_lse" if x.d_lse is not None else "no d_lse"
        yield from ["d_out of another type"] * (x.d_out.dtype != x.dtype)
        yield from ["d_out expanded"] * (len(x.d_out.layout.expanded) == 4)
        yield from ["saved elsewhere"] * x.saved_elsewhere
        yield from ["gradients of arrays"] * any(array.wants_gradient for array in x.arrays)
    if x.lengths is not None:
        counts = [np.diff(side) for side in x.lengths]
        yield from ["an empty sequence"] * bool((counts[1] == 0).any())
        yield from ["unread keys spoilt"] * bool(np.isnan(x.k.values).any())
    if x.cache is not None:
        yield "contiguous cache" if x.cache.page is None else "paged cache"
        yield from ["several queries of a cache"] * (n_q > 1)
        yield from ["lengths differ"] * (len(set(x.cache.lengths)) > 1)
    yield from ["origin"] * (x.origin[0] > 0 and x.origin[1] > 0)


def _of_linear(x: LinearQuestion) -> Iterator[str]:
    yield "kind linear"
    yield f"linear dtype {x.dtype}"
    yield f"feature {x.feature_as_written or 'of its own'}"
    yield "linear causal" if x.causal else "linear of all"
    yield "normalized" if x.normalize else "not normalized"
    form = "none" if x.decay is None else ("number", "head", "", "token")[x.decay.values.ndim]
    yield f"decay {form}"
    told = {"linear packed": x.lengths, "state in": x.state, "linear backward": x.d_out, "state out pulled": x.d_state}
    yield from (name for name, there in told.items() if there is not None)


def of_layout(layout: Layout) -> Iterator[str]:
    told = {
        "turned": layout.order, "steps": any(x > 1 for x in layout.step), "reversed": layout.reversed,
        "expanded": layout.expanded, "padding": layout.padding % 16 == 0 and layout.padding,
        "odd padding": layout.padding % 16, "aside": layout.aside, "at end of page": layout.at_page == "end",
        "at begin of page": layout.at_page == "begin", "read-only": not layout.writeable,
    }  # fmt: skip
    yield from (f"layout {name}" for name, holds in told.items() if holds)


def _of_arrays(question: Question, mask: Node | None, score: Node | None) -> Iterator[str]:
    arrays = question.arrays
    yield from (f"array {x.dtype}" for x in arrays)
    if any(a.values is b.values for i, a in enumerate(arrays) for b in arrays[:i]):
        yield "two views of one array"
    if mask is not None and score is not None and la.arrays(mask) & la.arrays(score):
        yield "an array of both"
    reads = [x for x in _nodes(mask, score) if x.op == "load"]
    ways: dict[str, set[bool]] = {}
    for read in reads:
        ways.setdefault(read.value, set()).update(la.settled(index).op == "var" for index in read.args)
    if any(len(found) == 2 for found in ways.values()):
        yield "an array by variables and by other indices"
    for read in reads:
        yield f"load of rank {len(read.args)}"
        yield from (f"load by {i.value}" for i in map(la.settled, read.args) if i.op == "var")
        yield from ["load by a load"] * any(x.op == "load" for index in read.args for x in la.nodes(index))
        yield from ["load by an operation"] * any(la.settled(index).args for index in read.args)


# -- texts ------------------------------------------------------------------------------------------------------------


def _nodes(*roots: Node | None) -> Iterator[Node]:
    for root in roots:
        if root is not None:
            yield from la.nodes(root)


def _of_texts(mask: Node | None, score: Node | None) -> Iterator[str]:
    yield from (f"op {x.op}" for x in _nodes(mask, score))
    for name, root in (("mask", mask), ("score", score)):
        if root is not None:
            yield f"{name} of depth {min(la.depth(root), 8)}"
            yield from ["where in the " + name] * any(x.op == "where" for x in la.nodes(root))
    yield from _of_constants(mask, score)
    bounds = Counter(map(_key, _bounds(mask)))
    starts, floats, indices = _starts(mask, score), _floats(mask, score), _indices(mask, score)
    told = {
        "a bound": bounds, "a bound top left": {_key({"Q": 1})} & bounds.keys(),
        "a bound bottom right": {_key({"Q": 1, "NK": 1, "NQ": -1})} & bounds.keys(),
        "a bound that starts a float": bounds.keys() & starts, "a bound that is a float": bounds.keys() & floats,
        "a bound that is an index": bounds.keys() & indices[False],
        "a bound that starts an index": bounds.keys() & indices[True],
        "equal bounds": max(bounds.values(), default=0) > 1,
        "a bound in the score": any(True for _ in _bounds(score)), "a bound under |": _under(mask, "or"),
        "a bound under ~": _under(mask, "not"), "a bound of 0": {()} & bounds.keys(),
        "a bound of both": bounds.keys() & set(map(_key, _bounds(score))),
    }  # fmt: skip
    yield from (name for name, holds in told.items() if holds)
    if mask is not None and score is not None:
        both = {x for x in la.nodes(mask) if x.args} & {x for x in la.nodes(score) if x.args}
        yield from (f"a {x.kind} part of both" for x in both if "K" in la.variables(x))


def _of_constants(mask: Node | None, score: Node | None) -> Iterator[str]:
    for x in _nodes(mask, score):
        if x.op == "const" and x.kind == INT and x.value in _EDGES:
            yield "a constant at the edge"
        if x.op in ("floordiv", "mod") and x.kind == INT and x.args[1].op == "const" and x.args[1].value < 0:
            yield f"negative {x.op}"
        if x.op == "neg" and x.args[0].op == "floordiv":
            yield "negative of a floordiv"
        if x.op == "const" and x.kind == FLOAT and np.isinf(x.value):
            yield "a constant of inf"


def meet(mask: Node, score: Node) -> bool:
    """Whether a float of the score counts K from a bound of the mask."""
    return bool(set(map(_key, _bounds(mask))) & _starts(score))


def _under(root: Node | None, op: str) -> bool:
    return any(any(True for _ in _bounds(x)) for x in _nodes(root) if x.op == op)


def linear(node: Node) -> Sum | None:
    """A whole number as a sum of variables, if it is one."""
    if node.kind != INT:
        return None
    if node.op in ("const", "var"):
        return {"": node.value} if node.op == "const" else {node.value: 1}
    args = [linear(x) for x in node.args]
    a, b = (args[0], args[-1]) if args else (None, None)
    if node.op not in ("add", "sub", "neg", "mul") or a is None or b is None:
        return None
    if node.op == "mul":
        factor, other = (a, b) if a.keys() <= {""} else (b, a)
        return {name: n * factor.get("", 0) for name, n in other.items()} if factor.keys() <= {""} else None
    if node.op == "neg":
        return {name: -n for name, n in a.items()}
    sign = 1 if node.op == "add" else -1
    return {name: a.get(name, 0) + sign * b.get(name, 0) for name in {**a, **b}}


def _key(form: Sum) -> Any:
    return tuple(sorted((name, n) for name, n in form.items() if n))


def _bounds(root: Node | None) -> Iterator[Sum]:
    """What K is compared with: K <= or >= each of these."""
    for x in _nodes(root):
        form = linear(x.args[0] - x.args[1]) if x.op in _BY_K and x.args[0].kind == x.args[1].kind == INT else None
        if form is not None and abs(form.get("K", 0)) == 1:
            op = x.op if form["K"] > 0 else _MIRRORED[x.op]
            rest = {name: -form["K"] * n for name, n in form.items() if name != "K"}
            yield {**rest, "": rest.get("", 0) + _SHIFT[op]}


def _converted(*roots: Node | None) -> Iterator[Node]:
    """Whole numbers that are made floats."""
    for x in _nodes(*roots):
        floats = x.op in ("float", "div", "exp", "log", "tanh") or any(a.kind == FLOAT for a in x.args)
        if floats and x.op != "load":
            for a in x.args:
                if a.kind == INT:
                    yield a.args[0] if a.op == "abs" else a


def _starts(*roots: Node | None) -> set[Any]:
    """What a float counts K from."""
    return {_key(_without_k(form)) for x in _converted(*roots) if (form := linear(x)) and abs(form.get("K", 0)) == 1}


def _floats(*roots: Node | None) -> set[Any]:
    """Sums without K that are floats."""
    return {_key(form) for x in _converted(*roots) if (form := linear(x)) and not form.get("K")}


def _indices(*roots: Node | None) -> dict[bool, set[Any]]:
    """What indices are without K (False), and what others count K from (True)."""
    found: dict[bool, set[Any]] = {False: set(), True: set()}
    for x in _nodes(*roots):
        for index in x.args if x.op == "load" else ():
            form = linear(index.args[0] if index.op == "abs" else index)
            if form is not None and abs(form.get("K", 0)) <= 1:
                found["K" in form and form["K"] != 0].add(_key(_without_k(form) if form.get("K") else form))
    return found


def _without_k(form: Sum) -> Sum:
    return {name: -form["K"] * n for name, n in form.items() if name != "K"}
