"""What each kernel system supports, asked of its `unsupported`: the tables of docs/support.md, made by tables.py.

No GPU and no optional package is needed, and none changes the answer: systems for GPUs are asked about a Hopper GPU
that is imagined, as if their compilers were there.
"""

from __future__ import annotations

from dataclasses import replace

from docs.markdown import table
from tilewise import dispatch
from tilewise.cases import Case
from tilewise.choosing import TABLE, Purpose
from tilewise.kernels import gpus

SYSTEMS = ("cpu", "numpy", "cuda", "triton", "cute", "tilelang")
HOPPER = gpus.imagined("sm_90")

SHAPES = {
    "float16": Case("causal", "several tiles", "float16"),
    "bfloat16": Case("causal", "several tiles", "bfloat16"),
    "float32": Case("causal", "several tiles", "float32"),
    "float64": Case("causal", "several tiles", "float64"),
    "heads of 40, values of 24": Case("causal", "ragged", "bfloat16"),
    "heads of 1": Case("causal", "smallest head", "bfloat16"),
    "heads of 128": Case("causal", "head of 128", "bfloat16"),
    "heads of 256, values of 192": Case("causal", "head of 256", "bfloat16"),
    "heads of 512": Case("causal", "largest head", "bfloat16"),
    "heads of 128, float32": Case("causal", "head of 128", "float32"),
    "heads of 512, float32": Case("causal", "largest head", "float32"),
    "grouped heads": Case("causal", "grouped", "bfloat16"),
    "one key head": Case("causal", "multi-query", "bfloat16"),
    "stored as (batch, n, heads, d)": Case("causal", "grouped", "bfloat16", strided=True),
    "one query": Case("causal", "one query", "bfloat16"),
    "no keys": Case("causal", "no keys", "bfloat16"),
    "packed sequences": Case("causal", "packed", "bfloat16"),
}
VARIANTS = {
    "no mask": "full", "`causal()`": "causal", "`window(left, right)`": "window", "`causal() \\| prefix(n)`": "prefix",
    "`document(ids)`": "document per batch", "`dilated(step)`": "dilated", "`dense(mask)`": "dense per head",
    "an array added as a mask": "added mask", "an expression of your own": "heads differ",
    "`softcap(c)`": "softcap", "`alibi(heads)`": "alibi", "`alibi(slopes, grad=True)`": "alibi slopes",
    "`relative(table, grad=True)`": "relative signed", "`t5(table, grad=True)`": "t5",
    "`bias(array, grad=True)`": "bias", "`sinks=`": "sinks", "`rope=`": "rope", "several at once": "all at once",
}  # fmt: skip
# What tells the kernels of a system apart, in the type that each of them takes.
TOLD_APART = {
    "float16": Case("causal", "several tiles", "float16"),
    "bfloat16": Case("causal", "several tiles", "bfloat16"),
    "float32": Case("causal", "several tiles", "float32"),
    "heads of 256": Case("causal", "head of 256", "float16"),
    "heads of 1": Case("causal", "smallest head", "float16"),
    "packed": Case("causal", "packed", "float16"),
    "any variant": Case("softcap, alibi", "several tiles", "float16"),
    "a learned bias": Case("bias", "several tiles", "float16"),
}


def by_shape() -> str:
    return _with_reasons(SHAPES)


def by_variant() -> str:
    return _with_reasons({name: Case(variant, "several tiles", "bfloat16") for name, variant in VARIANTS.items()})


def by_rung() -> str:
    """The kernels that can be named one by one, and those that stand in for others: a row each, without reasons."""
    names = [name for name in dispatch.NAMED if name not in SYSTEMS]
    rows = [(f"`{name}`", *(_mark(*_reasons(name, case)) for case in TOLD_APART.values())) for name in names]
    return table(("kernel", *TOLD_APART), rows)


def _with_reasons(cases: dict[str, Case]) -> str:
    """A row a case, a column a system; below it, in the systems' own words, why they refuse."""
    refusing: dict[str, list[str]] = {}  # by reason, who says so

    def cell(name: str, case: Case) -> str:
        forward, backward = _reasons(name, case)
        reason = forward or backward
        if reason is None:
            return _mark(forward, backward)
        who = refusing.setdefault(reason, [])
        who += [] if name in who else [name]
        return f"{_mark(forward, backward)} <sup>{list(refusing).index(reason) + 1}</sup>"

    rows = [(what, *(cell(name, case) for name in SYSTEMS)) for what, case in cases.items()]
    notes = [f"{', '.join(f'`{name}`' for name in who)}: {reason}" for reason, who in refusing.items()]
    told = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))
    return f"{table(('', *(f'`{name}`' for name in SYSTEMS)), rows)}\n\n{told}"


def _mark(forward: str | None, backward: str | None) -> str:
    return "–" if forward else "forward" if backward else "✓"


def _reasons(name: str, case: Case) -> tuple[str | None, str | None]:
    """Why not its forward pass, and why not its gradients."""
    call, kernel = case.inputs().call(), dispatch.kernel(name)
    device = HOPPER if name.split("/")[0] in ("cuda", "triton", "cute", "tilelang") else "cpu"
    forward, backward = (
        kernel.unsupported(call.spec, replace(call.shape, device=device, backward=b)) for b in (False, True)
    )
    return forward, backward


def taken_by_auto() -> str:
    """The table of choosing.py: a row a group of architectures and a type, a column a purpose."""
    rows = [
        (
            row.group,
            ", ".join(row.types),
            *(", ".join(f"`{x}`" for x in row.order(purpose)) for purpose in Purpose),
            row.origin,
        )
        for row in TABLE
    ]
    return table(("", "type", *(purpose.value for purpose in Purpose), "how the order is known"), rows)
