"""What a change of S, or of a number that is read, does to a score: backwards through the steps, a rule for each.

A step passes on to each float it works on its own slope times the step's. Where a derivative is not unique, the design
promises one side, so that every kernel has the same gradients; a learned table must not depend on the machine.

| where | slope | why |
|---|---|---|
| abs(x) at 0 | 0 | the mean of both sides, as PyTorch has it |
| minimum(a, b), maximum(a, b) at a == b | all to a | one comparison a score decides, in every kernel |
| where(c, a, b) | to the one taken; none by c | a condition is a step |
| x // y | 0 | it is constant but for its steps |
| x % y | 1 by x, -(x // y) by y | it is x - y * (x // y) |
| comparisons, whole numbers, indices | 0 | they have steps only |
| a slope of 0 times an infinite one | 0 | where(x > 0, log(x), 0.0) has no slope at 0, and not NaN |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.fuzzing.judging.walk import FLOAT, Step, Walk

# Each takes the arithmetic, the slope of the step's result, that result, and what the step worked on: a slope for each.
Rule = Callable[..., Sequence[Any]]


def _sign(how: Any, x: Any) -> Any:
    negative = how.apply("neg", FLOAT, how.one)
    below = how.apply("where", FLOAT, how.apply("lt", FLOAT, x, how.zero), negative, how.zero)
    return how.apply("where", FLOAT, how.apply("gt", FLOAT, x, how.zero), how.one, below)


def _pick(op: str) -> Rule:
    """To the first of two where it is the least, or the most; of a step with itself, to that."""
    return lambda how, g, n, a, b: (g, how.zero) if a is b else _split(how, g, how.apply(op, FLOAT, a, b))


def _split(how: Any, g: Any, condition: Any) -> Sequence[Any]:
    return how.apply("where", FLOAT, condition, g, how.zero), how.apply("where", FLOAT, condition, how.zero, g)


def _minus(how: Any, g: Any) -> Any:
    return how.apply("neg", FLOAT, g)


RULES: dict[str, Rule] = {
    "add": lambda how, g, n, a, b: (g, g),
    "sub": lambda how, g, n, a, b: (g, _minus(how, g)),
    "mul": lambda how, g, n, a, b: (how.times(g, b), how.times(g, a)),
    "div": lambda how, g, n, a, b: (how.over(g, b), _minus(how, how.over(how.times(g, n), b))),
    "mod": lambda how, g, n, a, b: (g, _minus(how, how.times(g, how.apply("floordiv", FLOAT, a, b)))),
    "neg": lambda how, g, n, a: (_minus(how, g),),
    "abs": lambda how, g, n, a: (how.times(g, _sign(how, a)),),
    "minimum": _pick("le"),
    "maximum": _pick("ge"),
    "where": lambda how, g, n, c, a, b: (None, *_split(how, g, c)),
    "exp": lambda how, g, n, a: (how.times(g, n),),
    "log": lambda how, g, n, a: (how.over(g, a),),
    "tanh": lambda how, g, n, a: (how.times(g, how.apply("sub", FLOAT, how.one, how.apply("mul", FLOAT, n, n))),),
}


def sources(walk: Walk, wanted: Sequence[int]) -> list[int]:
    """The steps whose slopes are asked for: S, if it is there, and what reads one of these arrays."""
    return [i for i, step in enumerate(walk.steps) if _is_source(step, wanted)]


def _is_source(step: Step, wanted: Sequence[int]) -> bool:
    return (step.op == "var" and step.payload == "S") or (step.op == "load" and step.payload in wanted)


def slopes(walk: Walk, found: Sequence[Any], wanted: Sequence[int], how: Any) -> dict[int, Any]:
    """The slope of the walk's value by each source. found: the value of every step, in the arithmetic `how`."""
    reach = _reaching(walk, wanted)
    slope: dict[int, Any] = {len(walk.steps) - 1: how.one}
    for at in reversed(range(len(walk.steps))):
        step = walk.steps[at]
        if at not in slope or step.op not in RULES or not reach[at]:
            continue
        parts = RULES[step.op](how, slope[at], found[at], *(found[a] for a in step.args))
        for arg, part in zip(step.args, parts, strict=True):
            if reach[arg]:
                slope[arg] = how.joined(slope[arg], part) if arg in slope else part
    return {at: slope.get(at, how.zero) if reach[at] else how.zero for at in sources(walk, wanted)}


def _reaching(walk: Walk, wanted: Sequence[int]) -> list[bool]:
    """Whether a step is a float that moves with a source."""
    reach: list[bool] = []
    for step in walk.steps:
        passes = step.op in RULES and step.kind == FLOAT and any(reach[a] for a in step.args)
        reach.append(_is_source(step, wanted) or passes)
    return reach
