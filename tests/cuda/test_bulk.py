"""Bulk copies and adds, matrices stored by warps, order between blocks: bulk.cu on the simulator, sound and broken."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest

from tests.cuda import pipelines
from tests.cuda.test_ops import needs_compiler
from tilewise.arrays import Array
from tilewise.kernels.cuda import simulator
from tilewise.kernels.cuda.simulator import Order, SimulationError

pytestmark = needs_compiler

NUMBERS, PARTS, BLOCKS = 256, 2, 3
SHARED_BYTES = (PARTS + 1) * NUMBERS * 4 + 16
WRONG = "a wrong result"


class Params(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "sum", "found", "turn")]


def aligned(*shape: int) -> Array:
    """Zeros that begin at a multiple of 16 bytes."""
    size = int(np.prod(shape)) * 4
    room = np.zeros(size + 16, np.uint8)
    at = -room.ctypes.data % 16
    return room[at : at + size].view(np.float32).reshape(shape)


def run(source: str, order: Order = Order.FORWARD, seed: int = 1) -> tuple[bool, Array]:
    """Whether each block found what those before it had added, and all of it is there at the end; and the sum."""
    x, found, total = aligned(BLOCKS, PARTS, NUMBERS), aligned(BLOCKS, NUMBERS), aligned(NUMBERS)
    x[:] = np.random.default_rng(seed).standard_normal(x.shape)
    turn = np.zeros(1, np.int32)
    params = Params(*(array.ctypes.data for array in (x, total, found, turn)))
    simulator.compile_source(source).launch(
        params, grid=BLOCKS, threads=64, shared_bytes=SHARED_BYTES, order=order, seed=seed
    )
    want = np.cumsum(2 * x.reshape(-1, NUMBERS), axis=0, dtype=np.float32)  # in the order of the adds
    before = np.concatenate([np.zeros((1, NUMBERS), np.float32), want[PARTS - 1 : -1 : PARTS]])
    return np.array_equal(found, before) and np.array_equal(total, want[-1]), total


def text(old: str = "", new: str = "") -> str:
    return pipelines.text(old, new, file="bulk.cu")


@pytest.mark.parametrize("order", Order, ids=lambda order: order.name)
def test_blocks_add_up_in_their_order(order: Order) -> None:
    for seed in (1, 2, 3):
        right, _ = run(text(), order, seed)
        assert right


def test_what_nobody_waits_for_is_written_when_the_launch_ends() -> None:
    """In any order: only the bits can differ."""
    told = text("hw::bulk_wait_done<0>();", "hw::tma_store_wait<0>();")
    totals = [run(told, seed=seed)[1] for seed in range(1, 9)]
    sound = [run(text(), seed=seed)[1] for seed in range(1, 9)]
    assert np.allclose(totals, sound, atol=1e-5)
    assert not np.array_equal(totals, sound)


# -- planted mistakes -------------------------------------------------------------------------------------------------

LOAD = "hw::bulk_load(base + part * BYTES, params.x + (block * PARTS + part) * NUMBERS, BYTES, bar);"
ADD = "hw::bulk_add(params.sum, staging, BYTES);"
STORE = "hw::store_matrices(staging + warp * 512 + lane * 16, doubled);"
DONE = "hw::bulk_wait_done<0>();\n        hw::add_release(params.turn, 1);"

# What is replaced, by what, and what must be told of it.
MISTAKES: dict[str, tuple[str, str, str]] = {
    "no wait for the numbers": ("hw::mbarrier_wait(bar, 0);", "", WRONG),
    "too many bytes expected": (
        "arrive_expect(bar, PARTS * BYTES)", "arrive_expect(bar, 3 * BYTES)", "deadlock.* 1024 bytes to come",
    ),
    "too few bytes expected": (
        "arrive_expect(bar, PARTS * BYTES)", "arrive_expect(bar, BYTES)", "1024 bytes more than were expected",
    ),
    "no fence after initialisation": ("hw::fence_mbarrier_init();", "", "without fence.mbarrier_init"),
    "a barrier never initialised": ("hw::mbarrier_init(bar, 1);", "", "was never initialised"),
    "a load from a place not aligned": (
        LOAD, LOAD.replace("params.x", "params.x + 1"),
        r"bulk.cu:\d+: a bulk copy's place in global memory is not aligned to 16 bytes",
    ),
    "a load to a place not aligned": (
        LOAD, LOAD.replace("(base", "(base + 8"), "place in shared memory is not aligned to 16 bytes",
    ),
    "a load of a size there is not": (
        LOAD, LOAD.replace("BYTES, bar", "BYTES - 8, bar"), "multiple of 16 bytes, not 1016",
    ),
    "a load of nothing": (LOAD, LOAD.replace("BYTES, bar", "0, bar"), "multiple of 16 bytes, not 0"),
    "a load beyond shared memory": (LOAD, LOAD.replace("(base", "(base + STAGING_AT"), "outside shared memory"),
    "a load from shared memory": (LOAD, LOAD.replace("params.x", "numbers"), "a pointer into shared memory, where"),
    "a row of matrices not aligned": (STORE, STORE.replace("lane * 16", "lane * 8"), "row of a matrix is not aligned"),
    "a row of matrices beyond shared memory": (
        STORE, STORE.replace("(staging", "(staging + 512"), "outside shared memory",
    ),
    "lanes that store no matrices": (STORE, f"if (lane < 16) {STORE}", "deadlock|different operations"),
    "rows of matrices in another order": (STORE, STORE.replace("lane * 16", "(lane ^ 1) * 16"), WRONG),
    "no fence before the add": ("hw::fence_async();", "", "without fence.proxy.async"),
    "no meeting before the add": (
        "hw::fence_async();\n        __syncthreads();", "hw::fence_async();", f"without fence.proxy.async|{WRONG}",
    ),
    "staging overwritten before it was read": (
        "if (threadIdx.x == 0) hw::tma_store_wait<0>();", "", f"without fence.proxy.async|{WRONG}",
    ),
    "staging waited for one add too few": (
        "if (threadIdx.x == 0) hw::tma_store_wait<0>();", "if (threadIdx.x == 0) hw::tma_store_wait<1>();",
        f"without fence.proxy.async|{WRONG}",
    ),
    "staging waited for by another thread": (
        "if (threadIdx.x == 0) hw::tma_store_wait<0>();",
        "if (part && threadIdx.x == 32) hw::tma_store_commit(), hw::tma_store_wait<0>();",
        f"without fence.proxy.async|{WRONG}",
    ),
    "an add to a place not aligned": (ADD, ADD.replace("sum", "sum + 1"), "place in global memory is not aligned"),
    "an add from a place not aligned": (
        ADD, ADD.replace("staging", "staging + 4"), "place in shared memory is not aligned",
    ),
    "an add of a size there is not": (ADD, ADD.replace("BYTES", "BYTES + 4"), "multiple of 16 bytes, not 1028"),
    "an add from beyond shared memory": (ADD, ADD.replace("BYTES", "2 * BYTES"), "outside shared memory"),
    "an add never committed": ("hw::tma_store_commit();", "", "the block ends while this copy is under way"),
    "an add never waited for": ("hw::bulk_wait_done<0>();", "", "the block ends while this copy is under way"),
    "a turn given away once shared memory was read": ("hw::bulk_wait_done<0>();", "hw::tma_store_wait<0>();", WRONG),
    "a turn given away before the last add": (DONE, DONE.replace("<0>", "<1>"), f"{WRONG}|the block ends while"),
    "a turn given away before the adds": (
        DONE, "hw::add_release(params.turn, 1);\n        hw::tma_store_wait<0>();", WRONG,
    ),
    "a turn that a later block would give": (
        "(params.turn) != block", "(params.turn) != block + 1",
        r"deadlock in block 0.*bulk.cu:\d+: thread 0 waits for another block \(.* stays 0\).*threads 1-63 wait for",
    ),
    "a turn never given away": ("hw::add_release(params.turn, 1);", "", "deadlock in block 1.*waits for another block"),
}  # fmt: skip


def _told(source: str, order: Order, seed: int) -> str:
    try:
        right, _ = run(source, order, seed)
    except SimulationError as report:
        return str(report)
    return "sound" if right else WRONG


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str) -> None:
    old, new, expected = MISTAKES[mistake]
    source = text(old, new)
    told = {_told(source, order, seed) for order in Order for seed in (1, 2, 3)}
    caught = [report for report in told if re.search(expected, report, re.DOTALL)]
    assert caught, told
    for report in told - {"sound", WRONG}:  # whoever is told, is told where
        assert re.search(r"block \d+", report)
        assert re.search(r"threads? \d+", report)


# -- asking -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", Order, ids=lambda order: order.name)
def test_threads_of_a_block_answer_each_other(order: Order) -> None:
    """Those that ask leave the others their turns, and whoever finds the answer at once may ask again."""
    source = text(
        "    if (threadIdx.x == 0) {\n        hw::mbarrier_init",
        "    for (int i = 0; i < 200; i++) {\n"
        "        while (hw::load_acquire(params.turn) < 64 * i + int(threadIdx.x)) {\n        }\n"
        "        hw::add_release(params.turn, 1);\n    }\n"
        "    for (int i = 0; i < 1000; i++)\n"
        "        while (hw::load_acquire(params.turn) < i) {\n        }\n"
        "    __syncthreads();\n"
        "    if (threadIdx.x == 0) *params.turn = block;\n"
        "    if (threadIdx.x == 0) {\n        hw::mbarrier_init",
    )
    right, _ = run(source, order)
    assert right
