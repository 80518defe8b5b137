"""The exercises: skeletons are the sources without their solutions, and what learners get wrong is told by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cuda.test_ops import needs_compiler
from tests.triton.test_ops import needs_triton
from tilewise.lab.exercises import NAMES, exercise, skeleton, solved
from tilewise.lab.exercises.cutting import Source
from tilewise.lab.exercises.grading import Grader, Verdict


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Path]:
    """A folder, and an interpreter that forgets what was loaded from it."""
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name in NAMES:
            del sys.modules[name]


def _graded(folder: Path, name: str, text: str) -> Verdict:
    """In this process: one of its own takes a third of a second to start."""
    file = folder / exercise(name).file
    file.write_text(text)
    return Grader(name, str(file)).grade()


class Mistake(NamedTuple):
    exercise: str
    edits: dict[str, str]  # in the project's own solution
    told: str


MISTAKES = {
    "no rescale": Mistake(
        "online_softmax", {"self.row_sum * rescale": "self.row_sum", "self.acc * rescale[..., None]": "self.acc"},
        "scores that grow .* row_sum.*expected .* came .*the contract allows.*row_sum and acc are not rescaled",
    ),
    "row_max overwritten first": Mistake(
        "online_softmax", {"        rescale = np": "        self.row_max = new_max\n        rescale = np"},
        "row_sum and acc are not rescaled.*before row_max is overwritten",
    ),
    "row_sum forgotten": Mistake(
        "online_softmax", {"self.row_sum * rescale": "self.row_sum"}, "acc is rescaled .* row_sum is not"
    ),
    "acc forgotten": Mistake(
        "online_softmax", {"self.acc * rescale[..., None]": "self.acc"}, "row_sum is rescaled .* acc is not"
    ),
    "a block at a time": Mistake(
        "online_softmax", {"self.row_sum * rescale + ": "", "self.acc * rescale[..., None] + ": "",
                           "np.maximum(self.row_max, s.max(axis=-1, initial=-np.inf))": "s.max(axis=-1)"},
        "row_max, row 0: expected .* begin anew with every block",
    ),
    "row_max never stored": Mistake(
        "online_softmax", {"        self.row_max = new_max\n": ""},
        r"one block, after key 24: row_max .*first in row 0: expected \S+, came -inf$",
    ),
    "nothing for rows without keys": Mistake(
        "online_softmax", {"shift = finite(new_max)": "shift = new_max"},
        r"rows that have seen no key yet, after key 8: .* NaN .*first in row 0.*finite\(new maximum\)",
    ),
    "no maximum": Mistake(
        "online_softmax", {"shift = finite(new_max)": "shift = 0 * new_max", "self.row_max - shift": "shift"},
        "row_sum, row 0: expected",
    ),
    "float64": Mistake(
        "online_softmax", {"p = s - ": "p = s.astype(np.float64) - "}, "row_sum has type float64, expected float32"
    ),
    "nothing returned": Mistake("online_softmax", {"return p, rescale": "pass"}, r"\(p, rescale\), came NoneType"),
    "a typing error": Mistake(
        "online_softmax", {"p.sum(axis=-1)": "p.sums(axis=-1)"},
        r"line \d+: AttributeError: .*'sums'.*\n    self.row_sum = ",
    ),
    "no name": Mistake("online_softmax", {"class State": "class Status"}, "has no State, which is called"),
    "memory": Mistake(
        "tiled_attention",
        {"    dtype, computed =": "    everything = q @ k.T\n    dtype, computed ="},
        r"held \d+ KiB at once.*O\(N\^2\) memory",
    ),
    "nothing skipped": Mistake(
        "tiled_attention", {"                continue": "                seen = np.zeros((len(q_block), 1), bool)"},
        "returned 15 as the number of blocks computed, expected 11; visible said False of 4",
    ),
    "no mask": Mistake("tiled_attention", {"dtype), seen)": "dtype), True)"}, "the mask is forgotten"),
    "begun anew": Mistake(
        "tiled_attention",
        {
            "            s = scores": "            row_max, row_sum, acc = init((len(q_block),), v.shape[-1], dtype)\n"
                                      "            s = scores"
        },
        "begin anew with every block",
    ),
    "not divided": Mistake(
        "tiled_attention", {"narrow(State(row_max, row_sum, acc).finish().out": "narrow(acc"}, "acc is not divided"
    ),
    "not filled": Mistake("tiled_attention", {"        out[rows] =": "        _ ="}, "out is NaN .*first in row 0"),
    "another shape": Mistake("tiled_attention", {"out[rows] = ": "out[rows.start] = "}, "line .*ValueError"),
    "the rule that is often printed": Mistake(
        "causal_skipping", {"rows.stop - 1 + offset < cols.start": "rows.start + offset < cols.start"},
        "queries 0 to 1, keys 1, offset 0: it skips the block, but query 1 sees key 1.*first query .* is asked",
    ),
    "no block skipped": Mistake(
        "causal_skipping", {"        return False": "        pass"}, "nobody sees anything.*no block is skipped"
    ),
    "a mask for every block": Mistake(
        "causal_skipping", {"        return True": "        pass"}, "every query sees every key, and it gives a mask"
    ),
    "no causal mask": Mistake(
        "causal_skipping", {"    return np.arange": "    return True\n    return np.arange"}, "the mask is forgotten"
    ),
    "no offset": Mistake("causal_skipping", {"[:, None] + offset": "[:, None]"}, "came.*Is offset added"),
    "no offset in the rule": Mistake(
        "causal_skipping", {"rows.stop - 1 + offset": "rows.stop - 1"}, "more keys than queries: .*it skips the block"
    ),
}  # fmt: skip
TRITON_MISTAKES = {
    "no rescale": Mistake(
        "triton_kernel", {"row_sum * rescale": "row_sum", "acc * rescale + tl": "acc + tl"},
        "several tiles.*row_sum and acc are not rescaled",
    ),
    "the wrong exponent": Mistake(
        "triton_kernel", {"tl.exp2(fused": "tl.exp(fused"}, "one tile of keys: out, row 0: .* is it exp2"
    ),
    "a name there is not": Mistake("triton_kernel", {"v_tile, 0)": "v_tiles, 0)"}, r"line \d+: .*v_tiles"),
}  # fmt: skip
CUDA_MISTAKES = {
    "no rescale": Mistake(
        "cuda_kernel", {"row_sum * rescale": "row_sum", "rescale + p * widen": "1 + p * widen"},
        "one head: out, row .*row_sum and acc are not rescaled",
    ),
    "no maximum": Mistake(
        "cuda_kernel", {"const float new_max = fmaxf(row_max, s), shift = finite(new_max);": "const float shift = 0;",
                        "expf(row_max - shift), p": "1, p", "row_max = new_max;": ""},
        "scores of some hundreds: out is NaN .*subtract the maximum",
    ),
    "row_max of the last key": Mistake(
        "cuda_kernel", {"row_max = new_max;": "row_max = new_max + (key == sequence.n_k - 1);"},
        "one head: lse, row 0: expected .*out is right, so it is row_max or row_sum",
    ),
    "no such name": Mistake(
        "cuda_kernel", {"s += q[c]": "s += query_row[c]"}, r"does not compile:\ncuda_kernel.cu:\d+:.*query_row"
    ),
    "no barrier": Mistake(
        "cuda_tiles", {"__syncthreads();\n                multiply": "multiply"},
        r"the simulator stopped it:\ncuda_tiles.cu:\d+: race: it .* at cuda_tiles.cu:\d+, and no barrier is between",
    ),
}  # fmt: skip


# -- the project's own code -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_skeletons_are_the_source_without_its_solution(name: str) -> None:
    source = exercise(name).source
    lines = source.path.read_text().splitlines()
    mine, whole = skeleton(name).splitlines(), solved(name)
    for cut in source.cuts:
        taken = lines[cut.first : cut.end]
        own = {line for line in taken if lines.count(line) == 1 and not line.strip().startswith(("# ", "// "))}
        assert own and not own & set(mine)
        assert taken[-1].strip()
        assert "\n".join(taken) in whole
        assert "\n".join(taken) in source.solution()
    marker = '"your code here"'
    assert sum(marker in line for line in mine) == len(source.cuts) + 1  # and where it is explained
    assert max(map(len, mine)) <= 120
    assert source.path.name in exercise(name).all_hints()[-1]


def test_a_source_that_lost_its_labels_is_told() -> None:
    with pytest.raises(ValueError, match=r"softmax.py has nothing more to cut that is called '2'"):
        _ = Source("softmax.py", cut=("5", "2")).cuts


# -- what learners get wrong ------------------------------------------------------------------------------------------


def _plant(mistake: Mistake) -> str:
    text = solved(mistake.exercise)
    for old, new in mistake.edits.items():
        assert text.count(old) == 1, f"not once there: {old}"
        text = text.replace(old, new)
    return text


def _check_told(learner: Path, mistake: Mistake) -> None:
    verdict = _graded(learner, mistake.exercise, _plant(mistake))
    assert re.search(mistake.told, verdict.wrong, re.DOTALL), verdict.wrong
    assert not verdict.is_right


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_by_name(learner: Path, mistake: Mistake) -> None:
    _check_told(learner, mistake)


@needs_compiler
@pytest.mark.parametrize("mistake", CUDA_MISTAKES.values(), ids=CUDA_MISTAKES)
def test_mistakes_in_cuda(learner: Path, mistake: Mistake) -> None:
    _check_told(learner, mistake)


@needs_triton
@pytest.mark.parametrize("mistake", TRITON_MISTAKES.values(), ids=TRITON_MISTAKES)
def test_mistakes_in_triton(learner: Path, mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.kernels.triton import launch

    monkeypatch.setattr(launch, "basic_kernel", launch.basic_kernel)  # as it was, afterwards
    _check_told(learner, mistake)


def test_what_is_refused_before_it_runs() -> None:
    asked = exercise("causal_skipping")
    done = solved("causal_skipping")
    assert asked.refused(done) is None
    assert asked.refused(done + 'if __name__ == "__main__":\n    import tilewise as tw\n') is None
    assert "not done yet" in (asked.refused(skeleton("causal_skipping")) or "")
    assert "line 2: invalid syntax: for i in" in (asked.refused("\nfor i in\n") or "")
    for line in ("import tilewise.lab", "    from tilewise.lab.blocks import visible_causal"):
        assert "the point is to write it yourself" in (asked.refused(f"if True:\n  {line}\n{done}") or line)
