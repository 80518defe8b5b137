"""What becomes of a variant: its formulas, its gradient, and the code that each kernel system makes of it."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.derivative import derivative
from tilewise.explainer.formula import LATEX, MATHML
from tilewise.expr import Expr, Loaded, S
from tilewise.kernels.cpu import ops as cpu
from tilewise.kernels.cuda import ops as cuda
from tilewise.kernels.cute import ops as cute
from tilewise.kernels.triton import ops as triton
from tilewise.spec import Attention
from tilewise.text import to_text
from tilewise.walking import loads, nodes

SYSTEMS = ("numpy", "cpu", "cuda", "triton", "cute", "tilelang")
MOST_READS = 4  # whose slopes are shown
_NO_TEXT = "There is no text between: its op table makes expressions of TileLang's compiler, where a kernel is written."


def formulas(spec: Attention) -> list[dict[str, str | None]]:
    """The mask, the score and its slopes, as LaTeX and MathML; the first two also as text, which can be parsed again.

    Arrays are numbered as the kernels' code numbers them.
    """
    score = S if spec.score is None else spec.score
    slots = loads(*_given({"score": spec.score, "mask": spec.mask}).values())
    reads = [node for node in nodes(score) if node.op == "load" and node.kind == "float"][:MOST_READS]
    slopes = {_named(wrt, slots): derivative(score, wrt) for wrt in (S, *reads)}
    written = _given({"mask": spec.mask, "score": score}) | {f"d score / d {wrt}": x for wrt, x in slopes.items()}
    return [
        {
            "name": name, "text": to_text(expr) if name in ("mask", "score") else None,
            "latex": LATEX.write(expr, slots), "mathml": MATHML.write(expr, slots),
        }
        for name, expr in written.items()
    ]  # fmt: skip


def _named(wrt: Expr, slots: Sequence[Loaded]) -> str:
    """S, or a cell such as a0[H]."""
    if wrt is S:
        return "S"
    number = [slot.array is wrt.payload.array for slot in slots].index(True)
    return f"a{number}[{', '.join(map(to_text, wrt.args))}]"


def code(spec: Attention) -> dict[str, str]:
    """By kernel system, what its op table makes of the variant, and of the slope that a backward pass multiplies by."""
    slope = None if spec.score is None else derivative(spec.score, S)
    named = _given({"score": spec.score, "mask": spec.mask, "slope": slope})
    slots = loads(*named.values())
    if not named:
        return dict.fromkeys(SYSTEMS, "No mask and no score: kernels leave steps 3 and 4 out.")
    return {
        "numpy": "\n".join(f"{name} = {to_text(expr)}" for name, expr in named.items()),
        "cpu": "\n\n".join(f"{name}:\n{_assembly(expr)}" for name, expr in named.items()),
        "cuda": cuda.variant(spec.mask, spec.score, slope).text,
        "triton": "\n\n".join(triton.function(name, expr, slots) for name, expr in named.items()),
        "cute": "\n\n".join(cute.function(name, expr, slots) for name, expr in named.items()),
        "tilelang": _NO_TEXT,
    }


def _given(named: dict[str, Expr | None]) -> dict[str, Expr]:
    return {name: expr for name, expr in named.items() if expr is not None}


def _assembly(expr: Expr) -> str:
    """The engine's bytecode, an instruction a line: its register, the operation, and where its value varies."""
    made = cpu.bytecode(expr)
    lines = []
    for number, instruction in enumerate(made.code):
        op = cpu.OPS[instruction.op]
        operands = [f"r{instruction.args[i]}" for i in range(instruction.n_args)]
        named = {"const": f"{instruction.value:g}", "load": f"a{instruction.slot}"}
        if op == "var":
            operands = [cpu.VARIABLES[instruction.slot]]
        elif op in named:
            operands.insert(0, named[op])
        place = cpu.Place(instruction.place).name or ""
        lines.append(f"  r{number:<3} {op:8} {', '.join(operands):16} ; {place.lower().replace('_', ' ')}")
    return "\n".join(lines)
