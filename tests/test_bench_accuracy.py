"""`tilewise bench --accuracy`: what is exact, who takes part, the targets, and the command; nothing is compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from docs import tables  # noqa: E402
from tilewise import arrays, reference, validate  # noqa: E402
from tilewise.bench.accuracy import cells, contestants, exact, report, run, stage, targets  # noqa: E402
from tilewise.bench.accuracy.cells import Cell  # noqa: E402
from tilewise.bench.accuracy.contestants import FORMAT, Contestant  # noqa: E402
from tilewise.bench.gpu import contestants as gpu  # noqa: E402
from tilewise.bench.refusal import RefusedError  # noqa: E402
from tilewise.bench.stamp import stamp  # noqa: E402
from tilewise.cli import main  # noqa: E402
from tilewise.contract import backward_results, forward_results  # noqa: E402
from tilewise.variants.alibi import alibi  # noqa: E402

MACHINE = {
    "cpu": "abacus", "cores": 2, "os": "Linux 6", "python": "3.12", "numpy": "2", "blas": "none", "torch": "2.11",
    "torch_threads": 1, "gpu": None,
}  # fmt: skip
SMALL = Cell("x12", "causal", "bfloat16", 48, 16, heads=2)


def small(**changes: Any) -> Cell:
    return Cell(**{**SMALL.describe(), **changes})


def measure(cell: Cell, name: str) -> dict[str, Any]:
    return stage.Stage("cpu").measure(cell, name)


# -- cells and what is exact ------------------------------------------------------------------------------------------


def test_the_cells_are_those_of_the_page() -> None:
    for device in ("cuda", "cpu"):
        found = cells.cells(device)
        assert len(found) == len(set(found)) == 6 * 2 * 2 * 2 * 2 + 4
        assert {x.dtype for x in found} == {"bfloat16", "float16"} and {x.d for x in found} == {64, 128}
        assert {x.n for x in found} == set(cells.LENGTHS[device])
        quick = cells.cells(device, quick=True)
        assert len(quick) == 12 and set(quick) < set(found) and all(map(cells.is_common, quick))
        shapes = [(x.dtype, x.mask, x.n, x.d) for x in found if not x.learned]
        assert all(len(set(shapes[i : i + 6])) == 1 for i in range(0, len(shapes), 6))  # beside each other


@pytest.mark.parametrize("learned", ["", "slopes", "sinks"])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_what_is_exact_is_what_the_reference_says(mask: str, learned: str) -> None:
    """Neither of the two reads the other."""
    cell = small(mask=mask, learned=learned)
    x = cells.draw(cell, "cpu")
    q, k, v, d_out = (y.double().numpy() for y in (x.q, x.k, x.v, x.d_out))
    options: dict[str, Any] = {"causal": mask == "causal"}
    if learned == "slopes":
        options["score"] = alibi(x.learned.numpy(), grad=True)
    if learned == "sinks":
        options["sinks"] = x.learned.numpy()
    call = validate.prepare(q, k, v, **options)
    inputs = call.spec, q, k, v
    want = {**forward_results(reference.forward(*inputs)), **backward_results(reference.backward(*inputs, d_out))}
    if learned == "slopes":
        want["d_slopes"] = want.pop("d_array 0")
    got = exact.exact(cell, x).results
    assert got.keys() == want.keys()
    for what, y in got.items():
        np.testing.assert_allclose(y.numpy(), want[what], rtol=1e-9, atol=1e-12, err_msg=what)


def test_everyone_draws_the_same() -> None:
    first, again = (cells.draw(SMALL, "cpu") for _ in range(2))
    assert all(torch.equal(getattr(first, x), getattr(again, x)) for x in ("q", "k", "v", "d_out"))
    once = cells.draw(small(inputs="x1"), "cpu")
    assert torch.equal(first.k, once.k) and torch.allclose(first.q.float(), 12 * once.q.float(), rtol=0.02)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_one_hot_rows_are_of_one_key(place: str, mask: str) -> None:
    cell = small(inputs=place, mask=mask, d=64)
    x = cells.draw(cell, "cpu")
    keys = torch.from_numpy(cells.dominant(place, cell.n, cell.n, mask == "causal"))
    out = exact.exact(cell, x).results["out"]
    assert torch.allclose(out, x.v.double()[:, :, keys], atol=1e-6)


def test_saturated_rows_see_more_than_one_key() -> None:
    found = exact.exact(small(inputs="x40"), cells.draw(small(inputs="x40"), "cpu"))
    assert not found.saturated[:, 0].any() and found.saturated[:, 1:].float().mean() > 0.3
    assert exact.exact(small(inputs="x1"), cells.draw(small(inputs="x1"), "cpu")).saturated.sum() < 5


def test_errors_are_shares_of_what_is_exact() -> None:
    want = exact.exact(SMALL, cells.draw(SMALL, "cpu"))
    off = {what: 1.01 * x for what, x in want.results.items()}
    found = exact.errors(want, off)
    assert {what for what in found if found[what][0] == pytest.approx(0.01)} == {*want.results, "d_q saturated"}
    assert found["out"][1] == pytest.approx(0.01 * float(want.results["out"].abs().max()))


# -- contestants ------------------------------------------------------------------------------------------------------


def test_ours_and_peers_are_as_exact_as_their_format() -> None:
    best = measure(SMALL, FORMAT)["errors"]
    assert 1e-3 < best["out"][0] < 2e-3 and 1e-3 < best["d_q"][0] < 2e-3
    for name in ("tilewise cpu", "tilewise numpy", gpu.SDPA_FLASH, gpu.SDPA_MATH):
        r = measure(SMALL, name)
        assert (r["status"], r["ours"]) == ("ok", name.startswith("tilewise")), r
        assert r["errors"]["out"][0] < 1.2 * best["out"][0] and r["errors"]["d_q"][0] < 1e-2
        assert ("lse" in r["errors"]) == r["ours"] and (not r["ours"] or r["errors"]["lse"][0] < 1e-6)


@pytest.mark.parametrize("learned", ["slopes", "sinks"])
def test_gradients_of_slopes_and_sinks_are_ours_alone(learned: str) -> None:
    cell = small(learned=learned, inputs="x1")
    assert measure(cell, "tilewise cpu")["errors"][f"d_{learned}"][0] < 0.05
    assert measure(cell, gpu.SDPA_FLASH)["status"] == "cannot express"


def _rounded_away(cell: Cell, x: Any) -> dict[str, Any]:
    return {"out": torch.zeros_like(x.q)}


def _broken(cell: Cell, x: Any) -> dict[str, Any]:
    raise RuntimeError("it broke at /home/someone/x.py")


wrong, broken = (Contestant(f"{__name__}:{name}", f) for name, f in (("wrong", _rounded_away), ("broken", _broken)))


def test_a_failure_is_a_result() -> None:
    r = measure(SMALL, broken.name)
    assert (r["status"], r["reason"], r["errors"]) == ("failed", "RuntimeError: it broke at <path>", {})
    r = measure(SMALL, wrong.name)
    assert (r["status"], r["reason"]) == ("wrong", "out is off by 1, 0.02 is rounding")


def test_a_gpu_that_can_no_longer_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    broke = stage.Stage("cpu")
    broke._device = "cuda"
    with pytest.raises(RefusedError, match="x left the GPU unusable: why"):
        broke._check_device("x", RefusedError("failed", "why"))


def test_flex_attention_is_compiled_once_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    def enter(case: Any, sets: Any) -> gpu.Entry:
        entered.append(case)
        (x,) = sets
        return gpu.Entry([lambda: torch.nn.functional.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)])

    monkeypatch.setattr(gpu, "find", lambda name: gpu.Contestant(name, enter))
    flex = contestants.find(gpu.FLEX)
    for inputs in ("x1", "x12", "x4"):
        cell = small(inputs=inputs)
        x = cells.draw(cell, "cpu")
        assert exact.errors(exact.exact(cell, x), flex.run(cell, x))["out"][0] < 3e-3
    assert len(entered) == 1
    flex.run(small(d=32), cells.draw(small(d=32), "cpu"))
    assert [case.d for case in entered] == [16, 32]


def test_gradients_in_a_layout_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention's: (batch, n, heads, d)."""

    def flash_attn_func(q: Any, k: Any, v: Any, causal: bool) -> Any:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=causal).transpose(1, 2)

    module = type(json)("flash_attn_interface")
    vars(module)["flash_attn_func"] = flash_attn_func
    monkeypatch.setitem(__import__("sys").modules, "flash_attn_interface", module)
    assert contestants.find(gpu.FLASH_3).missing() is None
    x = cells.draw(SMALL, "cpu")
    found = exact.errors(exact.exact(SMALL, x), contestants.find(gpu.FLASH_3).run(SMALL, x))
    assert all(found[what][0] < 1e-2 for what in ("out", "d_q", "d_k", "d_v"))


def test_who_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn_interface", "flash_attn"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    found = stage.Stage("cpu").missing([gpu.FLASH_2, gpu.FLASH_3, "tilewise cpu", gpu.SDPA_FLASH])
    assert found.keys() == {gpu.FLASH_2, gpu.FLASH_3}
    assert (
        found[gpu.FLASH_2].startswith("flash_attn does not load (") and "pip install flash-attn" in found[gpu.FLASH_2]
    )
    assert found[gpu.FLASH_3].startswith("flash_attn_interface does not load (")


# -- the measurement --------------------------------------------------------------------------------------------------


class _Here(nullcontext[Any]):
    """A process that is none; `breaking` breaks it in its second cell."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, stage: str, device: str) -> None:
        super().__init__(self)

    def ask(self, method: str, *args: Any) -> Any:
        if method == "machine":
            return MACHINE
        if method == "missing":
            return {name: "it is at /home/someone/else" for name in args[0] if name == "absent"}
        cell, name = args
        self.asked.append((name, cell.inputs))
        if name == "breaking" and cell.inputs == "x4":
            raise RefusedError("failed", "its process ended")
        return record(name, cell)


def record(name: str, cell: Cell = SMALL, error: float = 2e-3, **further: float) -> dict[str, Any]:
    found = {what: (further.get(what, error), 0.1) for what in ("out", "d_q", "d_k", "d_v")}
    if "saturated" in further:
        found["d_q saturated"] = (further["saturated"], 0.1)
    return stage._record(cell, name, found)


def test_everyone_is_asked_in_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_Process", _Here)
    monkeypatch.setattr(_Here, "asked", [])
    chosen = [small(inputs=x, n=n) for n in (256, 512) for x in ("x1", "x4", "x12")]
    names, said = ["steady", "breaking", "absent", gpu.FLEX], list[str]()
    found = run.Measurement("cpu", chosen, names, said.append).results({"quick": False})
    assert found["schema"] == run.SCHEMA and found["missing"] == {"absent": "it is at <path>"}
    told = [(r["contestant"], r["n"], r["inputs"], r["status"]) for r in found["records"]]
    assert told[:4] == [(x, 256, "x1", "ok") for x in (FORMAT, "steady", "breaking", gpu.FLEX)]
    assert [x for x in _Here.asked if x[0] == "breaking"] == [("breaking", "x1"), ("breaking", "x4")]
    assert [status for name, *_, status in told if name == "breaking"] == ["ok"] + ["failed"] * 5
    assert {n for name, n, *_ in told if name == gpu.FLEX} == {256}  # who compiles for each shape: a part
    assert said[-1] == f"accuracy: {gpu.FLEX}, 3/3"
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        **found,
        "records": json.loads(json.dumps(found["records"])),
    }


def test_a_stopped_run_asks_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(_Here):
        def ask(self, method: str, *args: Any) -> Any:
            if method == "measure":
                raise KeyboardInterrupt
            return super().ask(method, *args)

    monkeypatch.setattr(run, "_Process", Stopped)
    with pytest.raises(KeyboardInterrupt):
        run.Measurement("cpu", [SMALL], ["steady"]).results({"quick": False})


# -- targets and tables -----------------------------------------------------------------------------------------------


def results(*records: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": run.SCHEMA, **stamp(MACHINE), "options": {"device": "cpu", "quick": False, "kernel": None},
        "missing": {"FlashAttention-2": "not installed"}, "records": list(records), "seconds": 1.0,
    }  # fmt: skip


def _met(found: dict[str, Any]) -> dict[str, bool | None]:
    return {check.what.removeprefix("tilewise x: "): check.met for check in targets.checks(found)}


OUT, GRADIENTS = "out, worst error over the best peer's", "gradients, worst error over the best peer's"


def test_ours_is_held_to_the_best_peer() -> None:
    theirs = [record("good", error=2e-3), record("bad", error=4e-3)]
    aside = [record(FORMAT, error=1e-4), record(gpu.SDPA_MATH, error=1e-4), record("late", error=1e-5)]
    aside[-1]["status"] = "failed"
    for error, right in ((2.1e-3, True), (2.3e-3, False)):
        found = _met(results(*theirs, *aside, record("tilewise x", error=error, saturated=0.01)))
        assert (found[OUT], found[GRADIENTS]) == (right, right)
    found = _met(results(*theirs, record("tilewise x", error=2e-3, d_k=2.3e-3)))
    assert (found[OUT], found[GRADIENTS]) == (True, False)
    assert _met(results(record("tilewise x")))[OUT] is False  # no peer ran: nothing is shown


def test_what_is_nearly_exact_is_compared_with_a_share_of_a_rounding() -> None:
    cell = small(inputs="first")
    for error, right in ((1e-6, True), (2e-3, False)):
        found = results(record("good", cell, error=1e-9), record("tilewise x", cell, out=error, d_q=20.0))
        assert _met(found)[OUT] is right


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 3e-3), ("float16", 3e-3 / 8)])
def test_what_the_contract_promises_is_judged_in_every_cell(dtype: str, least: float) -> None:
    cell = small(dtype=dtype)
    for factor, right in ((0.99, True), (1.01, False)):
        mine = record("tilewise x", cell, error=least * factor, saturated=least / 3e-3 * 2e-2 * factor)
        found = _met(results(record("tilewise x", cell, error=least / 2, saturated=1e-4), mine))
        assert found[f"d_q at q x12, {dtype}"] is right and found[f"saturated rows, {dtype}"] is right


def test_tables_show_medians_and_worst_cells() -> None:
    mine = [record("tilewise x", small(n=n), error=e, saturated=0.02) for n, e in ((1, 1e-3), (2, 2e-3), (3, 4e-3))]
    head, rows = report.table_of(results(record("good"), *mine), "d_q", "bfloat16")
    assert head == ("", "q x1", "q x4", "q x12", "q x40")
    assert rows == [("good", "-", "-", "2.0e-3", "-"), ("tilewise x", "-", "-", "2.0e-3 (4.0e-3)", "-")]


def test_the_command_shows_what_was_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learned = record("tilewise x", small(learned="slopes"))
    learned["errors"]["d_slopes"] = [0.5, 1.0]
    failed = stage.blank(SMALL, "weak", RefusedError("out of memory", "it asked for much"))
    stored = results(record("good"), record("tilewise x", saturated=0.01), learned, failed)
    (tmp_path / "accuracy.json").write_text(json.dumps(stored))
    for place in (tmp_path, tmp_path / "accuracy.json"):
        assert main(["bench", "--accuracy", "--from", str(place)]) == 0
        told = capsys.readouterr().out
        assert "not here: FlashAttention-2: not installed" in told and "weak: out of memory: it asked for much" in told
        assert "d_slopes, q x12" in told and "5.0e-1" in told and "4 of 4 met." in told
    assert main(["bench", "--accuracy", "--from", str(tmp_path), "--json", str(tmp_path / "other.json")]) == 0
    assert json.loads((tmp_path / "other.json").read_text()) == stored


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--n", "512"], "--n: --accuracy has its own cells; leave it out"),
        (["--kernel", "nonsense"], "--kernel: expected one of"),
        (["--device", "cuda"], "--device cuda needs PyTorch with CUDA"),
        (["--json", "nowhere/x.json"], "--json: there is no folder"),
        (["--from", "nowhere.json"], "--from: cannot read"),
    ],
)
def test_the_command_refuses(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    if argv[0] == "--device" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["bench", "--accuracy", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"tilewise: {told}")


def test_the_command_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_Process", _Here)
    assert main(["bench", "--accuracy", "--quick", "--kernel", "cpu", "--json", str(tmp_path)]) == 0
    assert "wrote " in capsys.readouterr().out
    found = json.loads((tmp_path / "accuracy.json").read_text())
    assert found["options"] == {"device": "cpu", "quick": True, "kernel": "cpu"}
    names = {r["contestant"] for r in found["records"]}
    assert names == {FORMAT, gpu.SDPA_FLASH, gpu.SDPA_MATH, "tilewise cpu"} and len(found["records"]) == 48


@pytest.mark.parametrize("of", ["cpu", "gpu"])
def test_the_page_shows_what_was_measured(of: str, tmp_path: Path) -> None:
    make: Callable[..., str] = tables.MAKERS[f"{of}-accuracy"]
    page = tables.ROOT / "docs" / "accuracy.md"
    assert make(tmp_path, page).startswith("Not measured yet: `tilewise bench --accuracy")
    (tmp_path / of).mkdir()
    stored = results(record("good"), record("tilewise x", saturated=0.01))
    (tmp_path / of / "accuracy.json").write_text(json.dumps(stored))
    shown = make(tmp_path, page)
    assert "| tilewise x | - | - | 2.0e-3 | - |" in shown and "`out`, bfloat16" in shown and "abacus" in shown
    assert "✓" in tables.MAKERS[f"{of}-accuracy-targets"](tmp_path, page)


def test_bfloat16_is_narrowed_as_tensors_are() -> None:
    """The exact result, rounded once, by PyTorch and by ours."""
    x = cells.draw(SMALL, "cpu")
    want = exact.exact(SMALL, x).results
    ours = arrays.widen(arrays.narrow(want["out"].numpy(), "bfloat16"), np.float64)
    assert np.array_equal(ours, exact.rounded(SMALL, want)["out"].double().numpy())
