"""The simulator runs sound kernels right in every order of threads, and tells mistakes by what, where and who."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cuda import pipelines
from tests.cuda.test_ops import needs_compiler
from tilewise.cases import Case
from tilewise.contract import ContractError, check_backward, check_forward
from tilewise.kernels.cuda import simulator, source
from tilewise.kernels.cuda.simulator import Did, Event, Order, SimulationError
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel
from tilewise.sharing import Kept

pytestmark = needs_compiler

SOUND = 0.01  # a few roundings of bfloat16


# -- sound kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", Order, ids=lambda order: order.name)
@pytest.mark.parametrize("rung", ["naive", "tiled"])
def test_the_order_of_threads_makes_no_difference(rung: str, order: Order) -> None:
    case = Case("all at once", "ragged")
    check_forward(CudaSimKernel(rung, order, seed=3), case)
    call = case.inputs().call()
    first, second = (
        CudaSimKernel(rung, *how).forward(call.spec, call.q, call.k, call.v) for how in ((Order.FORWARD,), (order, 7))
    )
    assert np.array_equal(first.out, second.out)


@pytest.mark.parametrize("order", Order, ids=lambda order: order.name)
@pytest.mark.parametrize(("n_q", "n_k"), [(64, 64), (1, 1), (100, 150), (130, 260)])
def test_a_pipeline_runs_right(order: Order, n_q: int, n_k: int) -> None:
    for seed in (1, 2):
        assert pipelines.run(pipelines.text(), n_q, n_k, order, seed) < SOUND


# -- traces -----------------------------------------------------------------------------------------------------------


def test_a_trace_tells_what_warps_did_and_changes_nothing() -> None:
    call = Case("causal", "ragged", dtype="float16").inputs().call()
    trace: list[Event] = []
    traced, plain = (
        CudaSimKernel("forward_sm90", Order.RANDOM, 5, given).forward(call.spec, call.q, call.k, call.v)
        for given in (trace, None)
    )
    assert np.array_equal(traced.out, plain.out)
    for begins, ends in (
        (Did.WAITS, Did.GOES_ON), (Did.COPY_ISSUED, Did.COPY_LANDED), (Did.PRODUCT_ISSUED, Did.PRODUCT_TAKEN),
    ):  # fmt: skip
        assert sum(event.did == begins for event in trace) == sum(event.did == ends for event in trace) > 0
    assert [event.round for event in trace] == sorted(event.round for event in trace)
    products = {(event.file, event.line) for event in trace if event.did == Did.PRODUCT_ISSUED}
    lines = (source.SOURCES / "forward_sm90.cu").read_text().splitlines()
    assert {lines[line - 1].strip() for file, line in products if file == "forward_sm90.cu"} == {"hw::wgmma_commit();"}
    issued = {event.warp for event in trace if event.did == Did.COPY_ISSUED}
    assert issued == {0}, "one warp keeps the copy engine busy"


# -- planted mistakes -------------------------------------------------------------------------------------------------

WRONG = "a wrong result"  # nothing to report: the numbers show it, NaN where something was read too early

# What is replaced, by what, and what must be told of it.
PIPELINE_MISTAKES: dict[str, tuple[str, str, str]] = {
    "no wait for k and v": ("hw::mbarrier_wait(full + 8 * stage, i / STAGES & 1);", "", f"{WRONG}|more often"),
    "no wait for q": ("hw::mbarrier_wait(q_full, 0);", "", WRONG),
    "no wait for an empty stage": (
        "hw::mbarrier_wait(empty + 8 * stage, (i / STAGES & 1) ^ 1);", "", f"{WRONG}|more bytes|more often",
    ),
    "wrong parity of a full stage": ("i / STAGES & 1);", "(i / STAGES & 1) ^ 1);", f"{WRONG}|deadlock"),
    "wrong parity of an empty stage": (
        "(i / STAGES & 1) ^ 1);", "i / STAGES & 1);",
        r"deadlock.*thread 128 waits for the mbarrier at byte \d+ \(phase 0: 4 of 4 arrivals and 0 bytes to come\)",
    ),
    "a parity of 2": ("hw::mbarrier_wait(q_full, 0);", "hw::mbarrier_wait(q_full, 2);", "a parity is 0 or 1"),
    "too many bytes expected": (
        "full + 8 * stage, 2 * TILE_BYTES", "full + 8 * stage, 3 * TILE_BYTES", "deadlock.* 8192 bytes to come",
    ),
    "too few bytes expected": (
        "full + 8 * stage, 2 * TILE_BYTES", "full + 8 * stage, TILE_BYTES", "bytes more than were expected|more often",
    ),
    "one arrival too few": (
        "hw::mbarrier_init(empty + 8 * i, 4);", "hw::mbarrier_init(empty + 8 * i, 5);", "deadlock.*1 of 5 arrivals",
    ),
    "one arrival too many": (
        "if (lane == 0) hw::mbarrier_arrive(empty", "if (lane < 2) hw::mbarrier_arrive(empty",
        f"more often|deadlock|{WRONG}",
    ),
    "a barrier never initialised": ("hw::mbarrier_init(q_full, 1);", "", "was never initialised"),
    "a barrier not aligned": (
        "q_full = base + BARRIERS_AT", "q_full = base + BARRIERS_AT + 4", "not aligned to 8 bytes",
    ),
    "a barrier overwritten": (
        "hw::mbarrier_wait(q_full, 0);",
        "*reinterpret_cast<int*>(aligned + BARRIERS_AT) = 0; hw::mbarrier_wait(q_full, 0);", "was overwritten",
    ),
    "no fence after initialisation": ("hw::fence_mbarrier_init();", "", "without fence.mbarrier_init"),
    "no meeting after initialisation": ("__syncthreads();", "", "before the block has met|never initialised"),
    "wrong stride of a descriptor": ("TILE_BYTES, 1024, 16);\n        hw", "TILE_BYTES, 512, 16);\n        hw", WRONG),
    "wrong step along the depth": ("q_at + 2, k_at + 2", "q_at + 1, k_at + 1", WRONG),
    "a descriptor beyond shared memory": (
        "k_at = swizzled_128(k + stage", "k_at = swizzled_128(k + 8", "outside shared memory",
    ),
    "a tile not aligned": ("+ 1023) & ~1023u", "+ 127) & ~127u", "must be aligned to 1024 bytes"),
    "no fence before wgmma": (
        "hw::wgmma_fence();\n        hw::wgmma<KEYS, false>", "hw::wgmma<KEYS, false>", "wgmma.fence is missing",
    ),
    "no wait for wgmma": ("hw::wgmma_wait<0>();\n        // 4", "// 4", "written to before it was waited for"),
    "no commit of wgmma": (
        "hw::wgmma_commit();\n        hw::wgmma_wait<0>();\n        // 4", "hw::wgmma_wait<0>();\n        // 4",
        f"written to before|{WRONG}",
    ),
    "an operand's registers overwritten": (
        "hw::wgmma_commit();\n        hw::wgmma_wait<0>();\n        if (lane == 0)",
        "p[1][2] ^= 1;\n        hw::wgmma_commit();\n        hw::wgmma_wait<0>();\n        if (lane == 0)",
        "the registers of this wgmma's operand were written to",
    ),
    "no fence before the store": ("hw::fence_async();", "", "without fence.proxy.async"),
    "no meeting before the store": ("hw::barrier_sync(1, 128);", "", f"without fence.proxy.async|{WRONG}"),
    "no wait for the store": ("hw::tma_store_wait<0>();", "", "the block ends while this copy is under way"),
    "a named barrier of half a warp": ("hw::barrier_sync(1, 128);", "hw::barrier_sync(1, 120);", "for whole warps"),
    "a named barrier of too many": (
        "hw::barrier_sync(1, 128);", "hw::barrier_sync(1, 160);", "deadlock.*threads 0-127 wait for named barrier 1",
    ),
    "fewer registers taken than held": ("registers_take<248>", "registers_take<240>", "has 248 registers a thread"),
    "a number of registers there is not": (
        "registers_give_back<24>", "registers_give_back<30>", "registers come in eights",
    ),
    "a copy of the wrong rank": (
        "hw::tma_load_3d(q, &params.q, q_full, 0, first_row, 0);",
        "hw::tma_load_4d(q, &params.q, q_full, 0, first_row, 0, 0);", "4 dimensions by a tensor map of 3",
    ),
    "an array's end": ("acc[i] = 0;", "acc[i + 1] = 0;", "index 32 is outside the array"),
    "off by one tile": ("tiles = (params.keys + KEYS - 1) / KEYS;", "tiles = params.keys / KEYS;", WRONG),
    "the next tile of v": ("i * KEYS, 0);\n            }", "i * KEYS + KEYS, 0);\n            }", WRONG),
}  # fmt: skip


def _told(source: str, order: Order, seed: int) -> str:
    try:
        error = pipelines.run(source, order=order, seed=seed)
    except SimulationError as report:
        return str(report)
    return "sound" if error < SOUND else WRONG


@pytest.mark.parametrize("mistake", PIPELINE_MISTAKES)
def test_a_mistake_in_a_pipeline_is_caught(mistake: str) -> None:
    old, new, expected = PIPELINE_MISTAKES[mistake]
    source = pipelines.text(old, new)
    told = {_told(source, order, seed) for order in Order for seed in (1, 2, 3)}
    caught = [text for text in told if re.search(expected, text, re.DOTALL)]
    assert caught, told
    for report in told - {"sound", WRONG}:  # whoever is told, is told where
        assert re.search(r"block \d+", report)
        assert re.search(r"threads? \d+", report)


# In tiled.cu, or a header of it: what is replaced, by what, and what must be told.
TILED_MISTAKES: dict[str, tuple[str, str, str]] = {
    "k read before all have loaded it": (
        "__syncthreads();\n                multiply<", "multiply<", r"tiled.cu:\d+: race: it (reads|overwrites) what",
    ),
    "k overwritten while others read it": (
        "__syncthreads();  // the slice before is no longer read", "", "race: it overwrites what another thread read",
    ),
    "a row too many": ("kv, 0, group, lane)", "kv, 0, group + 1, lane)", "outside the tile"),
    "a vector not aligned": (
        "kv, group, lane)", "Slice(memory + QTile::BYTES + 4), group, lane)", "not aligned to (8|16) bytes",
    ),
    "too little shared memory": (
        "p(memory + QTile::BYTES + Slice::BYTES)", "p(memory + QTile::BYTES + 2 * Slice::BYTES)",
        "outside shared memory",
    ),
    "a plain pointer beyond shared memory": (
        "SHARED_MEMORY(memory);", "SHARED_MEMORY(memory); memory[SHARED_BYTES + 16 * threadIdx.x] = 1;",
        r"tiled.cu:\d+: outside shared memory, 0 bytes after its end",
    ),
    "registers beyond an array": (
        "row_sum[i] = 0;", "row_sum[i + 1] = 0;", r"tiled.cu:\d+: index 8 is outside the array",
    ),
    "a barrier that not all come to": (
        "__syncthreads();\n                fill<THREADS>(kv, v",
        "if (group) __syncthreads();\n                fill<THREADS>(kv, v", "different __syncthreads|race|deadlock",
    ),
    "lanes that have ended": (
        "const Finished done", "if (query >= sequence.n_q) return;\n        const Finished done",
        "should take part and has ended|different operations",
    ),
    "off by one key": ("first_key = tile * TILE_K", "first_key = tile * TILE_K + 1", WRONG),
    "no rescale": ("row_sum[i] *= rescale;", "", WRONG),
}  # fmt: skip


# The same in the files of its backward pass.
BACKWARD_MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "out read before all have loaded it": (
        "tiled_d_query.cu", "__syncthreads();\n#pragma unroll\n        for (int c",
        "#pragma unroll\n        for (int c", r"race: it (reads|overwrites) what",
    ),
    "p overwritten while others read it": (
        "tiled_d_keys.cu", "__syncthreads();  // p is no longer read", "", "race: it overwrites what another thread",
    ),
    "weights beyond their room": (
        "tiled_d_keys.cu", "weights(memory + KTile::BYTES", "weights(memory + 2 * KTile::BYTES",
        "outside shared memory",
    ),
    "a key too many": (
        "tiled_d_keys.cu", "slice_of, 0, v, slice * SLICE, group, lane)",
        "slice_of, 0, v, slice * SLICE, group, lane + 1)", "outside the tile",
    ),
    "not the tile's first query": (
        "tiled_d_keys.cu", "first_query = tile * TILE_Q", "first_query = tile * TILE_Q + 1", WRONG,
    ),
    "one head of those that share keys": (
        "tiled_d_keys.cu", "h < (work.hk + 1) * params.group", "h < work.hk * params.group + 1", WRONG,
    ),
    "no gradient of lse": ("tiled_d_query.cu", "if (backward.d_lse.data)", "if (false)", WRONG),
}  # fmt: skip


def _with_mistake(monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str) -> None:
    read = source._read

    def with_mistake(folder: Path, name: str) -> str:
        text = read(folder, name)
        assert name != file or text.count(old) == 1, f"{file} no longer has: {old}"
        return text.replace(old, new) if name == file else text

    monkeypatch.setattr(source, "_read", with_mistake)
    monkeypatch.setattr(source, "_sources", Kept(512))


def _told_of(check: Any, case: Case) -> set[str]:
    """What is told of a check, in every order of threads."""
    told = set()
    for order in Order:
        try:
            check(CudaSimKernel("tiled", order), case)
        except SimulationError as report:
            told.add(str(report))
        except ContractError:
            told.add(WRONG)
    return told


@pytest.mark.parametrize("mistake", TILED_MISTAKES)
def test_a_mistake_in_tiled_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, expected = TILED_MISTAKES[mistake]
    _with_mistake(monkeypatch, "tiled.cu", old, new)
    told = _told_of(check_forward, Case("full", "ragged"))
    assert any(re.search(expected, text) for text in told), told


@pytest.mark.parametrize("mistake", BACKWARD_MISTAKES)
def test_a_mistake_in_the_backward_pass_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, expected = BACKWARD_MISTAKES[mistake]
    _with_mistake(monkeypatch, file, old, new)
    told = _told_of(check_backward, Case("causal", "grouped"))
    assert any(re.search(expected, text) for text in told), told


def test_a_thread_that_spins_forever_is_found() -> None:
    """Another thread would end it, but never has its turn: on a GPU that may work, and here it is told."""
    text = pipelines.text(
        "if (threadIdx.x == 0) {\n        hw::mbarrier_init",
        "while (true) __syncwarp();\n    if (threadIdx.x == 0) {\n        hw::mbarrier_init",
    )
    with pytest.raises(SimulationError, match="spins forever"):
        pipelines.run(text)


def test_sources_that_do_not_compile_are_told() -> None:
    with pytest.raises(RuntimeError, match=r"pipeline\.cu:\d+.*nothing_of_this_name"):
        simulator.compile_source(
            pipelines.text("const int warp = threadIdx.x / 32", "const int warp = nothing_of_this_name")
        )


def test_without_a_compiler_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "apt install g++" in (CudaSimKernel().unavailable() or "")


def test_a_simulator_that_the_cache_forgot_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(simulator, "_RUNTIME_FLAGS", ["-O0", *simulator._RUNTIME_FLAGS[1:]])  # it is not run
    for turn in range(2):
        simulator.compile_source(f"{pipelines.text()}\n// another text: {turn}\n")
        for path in tmp_path.glob("simulator/*.o"):
            path.unlink()
