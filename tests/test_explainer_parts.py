"""What the explainer shows beside the steps: formulas, generated code, sources by step, places in a GPU's memory."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import tilewise as tw
from tests.cuda.test_ops import needs_compiler
from tests.expressions import Expressions
from tilewise import dispatch
from tilewise.explainer import generated, places, sources, timeline
from tilewise.explainer.formula import LATEX, MATHML, Notation
from tilewise.expr import ARITHMETIC, COMPARISONS, Loaded
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.spec import Attention, Shape, Tile
from tilewise.walking import evaluate, loads, nodes

SPEC = Attention(1.0, tw.causal() & tw.window(5), tw.softcap(30.0) >> tw.alibi(2))


def test_formulas() -> None:
    p = "Q + \\left(N_{K} - N_{Q}\\right)"
    assert LATEX.write(tw.causal()) == f"K \\le {p}"
    assert LATEX.write(tw.softcap(30.0)) == "30 \\cdot \\tanh\\left(\\frac{S}{30}\\right)"
    assert LATEX.write((tw.S + 1.0) * -2.0) == "\\left(S + 1\\right) \\cdot \\left(-2\\right)"
    assert LATEX.write(tw.where(tw.K < 3, tw.S, -tw.S)).startswith("\\begin{cases} S & K < 3")
    assert "a_{0}[H]" in str(LATEX.write(tw.alibi(4)))
    assert "¬" in str(MATHML.write(~tw.causal()))


def test_every_operation_has_a_formula_and_mathml_is_well_formed() -> None:
    arrays = {"int": np.arange(3), "float": np.ones(3), "bool": np.ones(3, bool)}
    written = set()
    for seed in range(300):
        draw = Expressions(random.Random(seed).randrange, lambda kind: Loaded(arrays[kind]))
        expr = draw.condition(3) if seed % 2 else draw.number(3, scores=True)
        mathml = MATHML.write(expr)
        if mathml is not None:
            written |= {node.op for node in nodes(expr)}
            ElementTree.fromstring(mathml)
            assert str(LATEX.write(expr)).count("{") == str(LATEX.write(expr)).count("}")
    assert written >= set(numpy_ops(np.float64))


# Formulas in Python's notation, whose operators bind as those of formulas do.
PYTHON = Notation(
    {
        **{op: f"{{0}} {symbol} {{1}}" for op, symbol in {**ARITHMETIC, **COMPARISONS}.items()},
        **{op: f"{{0}} {op} {{1}}" for op in ("and", "or")},
        **{op: f"ops['{op}']({{0}}, {{1}})" for op in ("div", "floordiv", "minimum", "maximum")},
        **{op: f"ops['{op}']({{0}})" for op in ("abs", "exp", "log", "tanh")},
        "where": "({1} if {0} else {2})", "neg": "-{0}", "not": "(not {0})",
    },
    variable=str, number=lambda value: f"ops['const']({value!r})".replace("inf", "np.inf"),
    cell=lambda name, index: f"arrays[int({name[1:]})][ops['minimum'](ops['maximum']({index[0]}, 0), 2)]",
    parentheses="({0})",
)  # fmt: skip


def test_parentheses_are_where_they_must_be() -> None:
    """A formula that is read by the rules of formulas means what the expression does."""
    rng, ops = random.Random(0), numpy_ops(np.float64)
    pools = {"int": np.arange(3), "float": np.array([0.5, -2.0, 3.0]), "bool": np.array([True, False, True])}
    compared = 0
    for seed in range(600):
        draw = Expressions(random.Random(seed).randrange, lambda kind: Loaded(pools[kind]), (0.5, 2.0, -3.0))
        expr = draw.condition(4) if seed % 2 else draw.number(4, scores=True)
        text = PYTHON.write(expr)
        arrays = [slot.array for slot in loads(expr)]
        env = {name: rng.randrange(1, 9) for name in ("B", "H", "HK", "Q", "K", "NQ", "NK", "QP", "KP")} | {"S": 0.75}
        wanted = float(evaluate(expr, env, ops))
        if text is not None and np.isfinite(wanted):
            with np.errstate(all="ignore"), suppress(ZeroDivisionError):  # % of Python's whole numbers; ours is 0
                meant = float(eval(text, {"ops": ops, "np": np, "arrays": arrays, **env}))
                assert meant == pytest.approx(wanted, rel=1e-6, abs=1e-9), text
                compared += 1
    assert compared > 300


def test_a_formula_that_no_one_would_read_is_left_out() -> None:
    long = tw.S
    for _ in range(9):
        long = long * long
    assert MATHML.write(long) is None


def test_the_gradient_is_among_the_formulas() -> None:
    names = [part["name"] for part in generated.formulas(SPEC)]
    assert names == ["mask", "score", "d score / d S", "d score / d a0[H]"]


def test_arrays_have_one_number_in_all_formulas() -> None:
    of_head, of_key = np.ones(4, np.float32), np.ones(6, np.float32)
    spec = Attention(1.0, tw.load(np.arange(6), tw.K) < 3, tw.S + tw.load(of_head, tw.H) * tw.load(of_key, tw.K))
    made = {part["name"]: part["latex"] for part in generated.formulas(spec)}
    assert made["d score / d a0[H]"] == "a_{1}[K]"
    assert made["d score / d a1[K]"] == "a_{0}[H]"
    assert made["mask"] == "a_{2}[K] < 3"


def test_every_kernel_system_has_its_code() -> None:
    made = generated.code(SPEC)
    real = [system.name for system in dispatch.SYSTEMS if system.name not in ("cuda-sim", "tilelang-c")]
    assert sorted(made) == sorted(real)
    assert "tanh(S / 30.0)" in made["numpy"]
    assert re.search(r"r\d+ +tanh +r\d+ +; everywhere", made["cpu"])
    assert "hyperbolic_tangent" in made["cuda"] and "float slope(" in made["cuda"]
    assert "@triton.jit\ndef slope(" in made["triton"]
    assert "def score(" in made["cute"] and "def slope(" in made["cute"]
    assert "no text" in made["tilelang"]
    assert len(set(generated.code(Attention(1.0)).values())) == 1


@pytest.mark.parametrize("name", sources.FILES)
def test_sources_are_the_files_whole_and_in_order(name: str) -> None:
    made = sources.sections(name)
    kernels = Path(tw.__file__).with_name("kernels")
    for file in sources.FILES[name]:
        path = kernels / file
        lines = path.read_text().splitlines()
        seen: list[str] = []
        for section in (x for x in made if x.file == path.name):
            text = section.text.splitlines()
            assert lines[section.line - 1 : section.line - 1 + len(text)] == text
            seen += [line for line in text if line.strip()]
        assert seen == [line for line in lines if line.strip()]
    assert {"1", "2", "3", "4", "5", "6", "7"} <= {section.step for section in made}


def test_every_rung_has_its_source() -> None:
    """But for those that are another's source with other constants."""
    same = {"cute": "cute/forward_sm90", "cuda": "cuda/forward_sm90"}
    rungs = {name for name in dispatch.NAMED if not name.startswith(("cuda-sim", "tilelang-c"))}
    others = {"cuda/unordered", "cute/scaled_q", "cute/scaled_k"}
    assert {same.get(name, name) for name in rungs} - others == set(sources.FILES)


@pytest.mark.parametrize("tile", [Tile(64, 64), Tile(16, 8), Tile(128, 128)], ids=str)
@pytest.mark.parametrize("d", [16, 64, 128])
def test_buffers_in_shared_memory_add_up_to_what_a_block_asks_for(tile: Tile, d: int) -> None:
    shape = Shape(1, 1, 1, 256, 256, d, d)
    made = places.placements(Attention(1.0), shape, tile)
    assert [x.kernel for x in made] == ["cuda/tiled", "cuda/forward_sm90"]
    for placement in made:
        assert sum(b.shared * b.count for b in placement.buffers) + placement.around == placement.shared
        assert all(len(b.places) == 7 for b in placement.buffers)


def test_numpy_is_enough() -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'triton', 'cutlass', 'tilelang', 'matplotlib')))\n"
        "from tilewise.explainer import generated, places, record, sources"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@needs_compiler
def test_the_timeline_has_every_role_and_each_product() -> None:
    made = timeline.timeline(Attention(0.25, tw.causal()), Shape(1, 1, 1, 256, 256, 16, 16), Tile(128, 64))
    roles = [
        "scheduler",
        "loader",
        "copy engine",
        *(x for i in (1, 2) for x in (f"consumer {i}", f"products of consumer {i}")),
    ]
    assert made["roles"] == roles
    spans = made["spans"]
    assert all(span.start <= span.end for span in spans)
    labels = {span.label for span in spans}
    assert {
        "2 s = q @ k.T",
        "6 acc = acc * rescale + p @ v",
        "waits for q_full",
        "copies a tile for k_full[0]",
    } <= labels
    for i in (1, 2):
        steps = [span.step for span in spans if span.role == f"products of consumer {i}"]
        assert steps.count("2") == steps.count("6") > 0, "each tile's p @ v follows its q @ k.T"


@needs_compiler
def test_consumers_of_a_short_trace_wait_for_what_the_loader_brings() -> None:
    """Every wait is for something with a name, also where a warpgroup takes turns with others."""
    made = timeline.timeline(Attention(0.1), Shape(1, 1, 1, 128, 256, 80, 80), Tile(128, 128))
    labels = {span.label for span in made["spans"] if span.kind == "waits"}
    assert "waits for its turn" in labels
    assert not [label for label in labels if "the mbarrier" in label]


@needs_compiler
def test_a_timeline_that_would_take_long_is_not_made() -> None:
    shape, tile = Shape(1, 1, 1, 256, 256, 16, 16), Tile()
    assert "262,144 scores at most" in timeline.timeline(Attention(1.0), replace(shape, n_q=2048), tile)["missing"]
    long = tw.K < 0
    for i in range(200):
        long = long | (tw.K < i)
    assert "300 operations at most" in timeline.timeline(Attention(1.0, long), shape, tile)["missing"]
