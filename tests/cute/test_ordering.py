"""What a persistent kernel is told: every query tile is an item, once, and none is without keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw

torch = pytest.importorskip("torch")
from tilewise.kernels.cute import launch, ordering  # noqa: E402 - only with PyTorch
from tilewise.kernels.cute.near import Table, table_of  # noqa: E402
from tilewise.kernels.cute.rungs import RUNGS  # noqa: E402
from tilewise.kernels.cute.wanted import kernel_of  # noqa: E402
from tilewise.kernels.tables import FIRST_RUN, N_RUNS, tables  # noqa: E402
from tilewise.kernels.uploads import brought  # noqa: E402
from tilewise.spec import Attention, Shape, Tile  # noqa: E402

CPU, SHAPE = torch.device("cpu"), Shape(2, 4, 2, 200, 50, 64, 64, "bfloat16")


def _plan(spec: Attention, shape: Shape) -> Any:
    return brought(CPU, ordering.never_without_keys(tables(spec, shape, Tile(128, 128))))


def test_rows_without_keys_get_a_tile_that_is_masked() -> None:
    spec = Attention(0.1, tw.causal())
    before, plan = tables(spec, SHAPE, Tile(128, 128)), _plan(spec, SHAPE)
    assert (before.records[..., N_RUNS] == 0).any(), "the first 150 queries see no key"
    assert (plan.records[..., N_RUNS] > 0).all()
    without = before.records[..., N_RUNS] == 0
    runs = plan.runs[plan.records[..., FIRST_RUN].long()][torch.from_numpy(without)]
    assert (runs == torch.tensor([0, 1, 1])).all()


@pytest.mark.parametrize("blocks", [1, 132])
@pytest.mark.parametrize("heads", [1, 3, 40])
@pytest.mark.parametrize(("n", "causal"), [(100, False), (5000, True), (20000, True)])
def test_every_tile_is_an_item(n: int, causal: bool, heads: int, blocks: int) -> None:
    pytest.importorskip("cutlass")
    from cutlass.cute.runtime import from_dlpack

    from tests.cute import layouts

    shape = Shape(1, heads, heads, n, n, 128, 128, "bfloat16")
    plan = _plan(Attention(0.1, tw.causal() if causal else None), shape)
    section, sections = ordering.sections(shape, plan, blocks)
    items = np.full((heads * plan.records.shape[2], 2), -1, np.int32)
    layouts.turns(from_dlpack(items), heads, section, sections)
    assert len(np.unique(items, axis=0)) == len(items)
    assert items.min() == 0 and items[:, 0].max() == heads - 1
    if not causal:
        assert (section, sections) == (1, heads), "alike: one head after the other"


def test_which_arrays_come_by_tiles() -> None:
    def table(values: Any) -> Table | None:
        return table_of(Attention(0.1, None, tw.bias(values)))

    assert table(np.zeros((96, 96), np.float32)) == Table(0, "float32", ())
    assert table(torch.zeros(2, 4, 96, 96).bfloat16()) == Table(0, "bfloat16", ("B", "H"))
    assert table(np.zeros((1, 4, 96, 96), np.float32)) == Table(0, "float32", (0, "H"))
    assert table(np.zeros((96, 97), np.float32)) is None, "rows begin at no multiple of 16 bytes"
    assert table(torch.zeros(96, 96).T) is None, "keys do not lie side by side"
    assert table(np.zeros((1, 96), np.float32)) is None, "all queries read one row"
    assert table_of(Attention(0.1, None, tw.alibi(4))) is None


def test_what_the_forward_pass_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the compiler was told: four arrays, lse, the plan, sinks, arrays and a table's view, the scale, items, and
    where the remainder of out would go: nothing but its steps is asked of a kernel that keeps none."""
    calls: list[tuple[Any, ...]] = []
    count = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(launch.library, "kernel", lambda kernel, arch: lambda *given: calls.append(given))
    monkeypatch.setattr(ordering, "_count_on", lambda device: count)
    monkeypatch.setattr(ordering, "_multiprocessors", lambda device: 132)
    q, k = torch.zeros(2, 4, 200, 64).bfloat16(), torch.zeros(2, 2, 56, 64).bfloat16()
    spec = Attention(0.1, None, tw.bias(torch.zeros(4, 200, 56)))
    launch.forward(RUNGS["forward_sm90"], spec, q, k, k, "sm_90a")
    ((*rows, lse, records, runs, _, arrays, scale, next_item, blocks, section, sections, remainder),) = calls
    assert [tuple(x.shape) for x in (*rows, lse)] == [tuple(x.shape) for x in (q, k, k, q)] + [(2, 4, 200)]
    assert records.shape == (2, 4, 2, 14) and runs.shape[1] == 3
    assert [tuple(x.shape) for x in arrays] == [(4, 200, 56), (1, 4, 200, 56)]
    assert arrays[1].stride() == (4, 200 * 56, 56, 1), "of a dimension of size 1 any step will do that is copied"
    assert (scale, blocks, section, sections) == (0.1, 2 * 4 * 2, 1, 8) and next_item is count
    assert remainder.shape == q.shape


def test_counts_are_0_before_any_stream_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream has one of its own, and each captured launch has."""
    waited: list[int] = []

    class Stream:
        def __init__(self, number: int) -> None:
            self.cuda_stream = number

        def synchronize(self) -> None:
            waited.append(self.cuda_stream)

    def count(stream: int, capturing: bool = False) -> int:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(stream))
        monkeypatch.setattr(ordering.graphs, "is_capturing", lambda: capturing)
        made = ordering._count_on(CPU)
        assert made.shape == (1,) and made.dtype == torch.int32 and int(made) == 0
        return int(made.data_ptr())

    monkeypatch.setattr(ordering, "_counts", {})
    monkeypatch.setattr(ordering, "_ROOM", 4)
    monkeypatch.setattr(ordering.graphs, "held", {})
    first, other = count(7), count(8)
    assert first == count(7) and waited == [7], "those of the other stream were written with the first's"
    assert len({first, other, count(7, capturing=True), count(7, capturing=True)}) == 4
    assert len(ordering.graphs.held) == 1, "their memory is nobody else's while the process runs"
    count(9)
    assert waited == [7, 9]


def test_tiles_of_a_long_call() -> None:
    def tile(n: int, **given: Any) -> Tile:
        spec = Attention(0.1, **given)
        return kernel_of(RUNGS["forward_sm90"], spec, Shape(1, 4, 4, n, n, 64, 64, "bfloat16")).tile

    assert tile(512) == Tile(128, 128) and tile(2048) == Tile(192, 96)
    assert tile(2048, batch_invariant=True) == Tile(128, 128), "a row's bits do not depend on how many there are"
    assert tile(2048, score=tw.softcap(30.0)) == Tile(128, 128)
    assert tile(2048, score=tw.bias(torch.zeros(2048, 2048).bfloat16())) == Tile(192, 96)
