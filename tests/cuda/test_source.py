"""Sources as they are assembled, what Python and C++ must agree on, and the texts that only a GPU's compiler reads."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.cuda import pipelines
from tests.cuda.test_ops import needs_compiler
from tilewise.cases import Case, conformance
from tilewise.expr import H, K, Q, S, load
from tilewise.kernels.cuda import compiler, marshal, marshal_backward, simulator, structs, wgmma
from tilewise.kernels.cuda.backward_rungs import BackwardProducts
from tilewise.kernels.cuda.ops import variant
from tilewise.kernels.cuda.rungs import RUNGS, SOURCES, ForwardSm90
from tilewise.kernels.cuda.source import assembled, source, spliced
from tilewise.kernels.cuda.support import unsupported
from tilewise.kernels.cuda.tensor_map import SimulatedMap, TensorMap
from tilewise.schedule import Kind, plan
from tilewise.spec import Attention, Shape, Tile

SHAPE = Shape(1, 4, 2, 100, 100, 64, 64, dtype="float16")
LABELS = ("1 load q", "2 s = q @ k.T", "3 score", "4 mask", "5 row_max, rescale, p, row_sum", "6 acc = ", "7 finish")


# -- assembling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", RUNGS)
def test_every_kernel_has_the_steps_in_order(rung: str) -> None:
    text = (SOURCES / f"{rung}.cu").read_text()
    found = [text.index(f"// {label}") for label in LABELS]
    assert found == sorted(found)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_source_is_whole(rung: str) -> None:
    """Nothing is left to include, and each header is there once."""
    text = source(RUNGS[rung], variant(tw.causal(), None), SHAPE, Tile(64, 64)).text
    assert "#include" not in text
    assert text.count("struct Params {") == text.count("struct Finished {") == 1
    assert "typedef Half Element;" in text


def test_lines_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "kernel.cu").write_text('int a;\n#include "one.h"\nint b;\n#include "one.h"\nint c;\n')
    text = spliced("kernel.cu", {"one.h": "#pragma once\nint one;\n"}, tmp_path)
    places = {}
    for line in text.splitlines():
        if told := re.fullmatch(r'#line (\d+) "(.*)"', line):
            number, file = int(told[1]), told[2]
        else:
            places[line] = f"{file}:{number}"
            number += 1
    assert {name: places[f"int {name};"] for name in ("a", "one", "b", "c")} == {
        "a": "kernel.cu:1", "one": "one.h:2", "b": "kernel.cu:3", "c": "kernel.cu:5",
    }  # fmt: skip


def test_calls_of_a_kind_share_a_source() -> None:
    def made(score: Any, mask: Any = None, **sizes: int) -> str:
        shape = Shape(**{**SHAPE.__dict__, "total_q": -1, "total_k": -1, **sizes})
        return assembled(RUNGS["tiled"], Attention(1.0, mask, score), shape, Tile(64, 64))[0].text

    a, b = np.zeros(4, np.float32), np.ones(4, np.float32)
    assert made(S + load(a, H)) is made(S + load(b, H), n_q=7, batch=9)
    assert made(S + load(a, H)) != made(S + load(a, H), d=32)
    assert made(S + load(a, H)) != made(S + load(a.astype(np.float16), H))
    # One array in both places, or two: the slots are not the same.
    assert made(S + load(a, H), load(a, H) > 0) != made(S + load(a, H), load(b, H) > 0)


# -- agreeing ---------------------------------------------------------------------------------------------------------


@needs_compiler
def test_structures_are_the_same_in_python_and_in_cpp() -> None:
    """Sizes and places of every field, as the C++ compiler has them."""
    fields = [name for name, _ in structs.params_type(2)._fields_]
    measured = ", ".join(f"int(__builtin_offsetof(Params, {name}))" for name in fields)
    text = spliced(
        "probe.cu",
        {
            **simulator.headers(),
            "config.h": "constexpr int MAX_RANK = 8, MAX_CONSTANTS = 7, N_ARRAYS = 2, TILE_Q = 1;",
            "probe.cu": f"""#include "device.h"
#include "config.h"
#include "params.h"
extern "C" void attention(int* const to) {{
    const int found[] = {{int(sizeof(Params)), int(sizeof(Sequence)), int(sizeof(Run)), {measured}}};
    for (int i = 0; i < int(sizeof found / 4); i++) to[i] = found[i];
}}
""",
        },
    )
    found = np.zeros(3 + len(fields), np.int32)
    pointer = type("Pointer", (ctypes.Structure,), {"_fields_": [("to", ctypes.c_void_p)]})(found.ctypes.data)
    simulator.compile_source(text).launch(pointer, grid=1, threads=1)
    made = structs.params_type(2)
    assert found[:3].tolist() == [ctypes.sizeof(made), 4 * len(structs.SEQUENCE_FIELDS), 12]
    assert found[3:].tolist() == [getattr(made, name).offset for name in fields]
    declared = re.search(r"struct Sequence \{(.*?)\};", (SOURCES / "params.h").read_text(), re.DOTALL)
    assert declared is not None
    names = re.findall(r"\w+(?=[,;])", re.sub(r"//.*", "", declared[1]))
    assert tuple(names) == structs.SEQUENCE_FIELDS


@needs_compiler
def test_launch_and_item_are_the_same_in_python_and_in_cpp(tmp_path: Path) -> None:
    launch = [name for name, _ in structs.launch_type(1)._fields_]
    item = {**{name: f"work.sequence.{name}" for name in structs.SEQUENCE_FIELDS}, **{
        name: name if name in ("n_runs", "first_run", "runs") else f"work.{name}" for name in structs.ITEM_PLACES
    }}  # fmt: skip
    places = [f"Launch, {name}" for name in launch] + [f"Item, {name}" for name in item.values()]
    measured = ", ".join(f"int(__builtin_offsetof({place}))" for place in places)
    headers = ("device.h", "config.h", "params.h", "element.h", "operations.h", "variant.h", "hopper.h", "sm90.h")
    (tmp_path / "probe.cu").write_text(
        "\n".join(f'#include "{name}"' for name in headers)
        + f"""
extern "C" void attention(int* const to) {{
    const int found[] = {{int(sizeof(Launch)), int(sizeof(Item)), RUNS_AT_HAND, {measured}}};
    for (int i = 0; i < int(sizeof found / 4); i++) to[i] = found[i];
}}
"""
    )

    class Probe(ForwardSm90):
        name, folder = "probe", tmp_path

    text = source(Probe(), variant(None, None), SHAPE, Tile(128, 64), headers=simulator.headers()).text
    found = np.zeros(3 + len(places), np.int32)
    pointer = type("Pointer", (ctypes.Structure,), {"_fields_": [("to", ctypes.c_void_p)]})(found.ctypes.data)
    simulator.compile_source(text).launch(pointer, grid=1, threads=1)
    made = structs.launch_type(1)
    size, *others = found[:3].tolist()
    assert size == -(-ctypes.sizeof(made) // 64) * 64  # C++ rounds it up, for the tensor maps' sake
    assert others == [4 * marshal.RECORD, structs.RUNS_AT_HAND]
    assert found[3 : 3 + len(launch)].tolist() == [getattr(made, name).offset for name in launch]
    numbers = [*range(len(structs.SEQUENCE_FIELDS)), *structs.ITEM_PLACES.values()]
    assert found[3 + len(launch) :].tolist() == [4 * at for at in numbers]


def test_parameters_fit_every_driver() -> None:
    for kind in (structs.launch_type, structs.backward_launch_type, structs.sums_launch_type):
        assert ctypes.sizeof(kind(structs.MAX_ARRAYS)) <= 4096
    many = [load(np.zeros(4, np.float32), H) for _ in range(structs.MAX_ARRAYS + 1)]
    told = unsupported(Attention(1.0, score=sum(many, S)), SHAPE)
    assert told is not None
    assert f"{structs.MAX_ARRAYS + 1} arrays" in told


@pytest.mark.parametrize("d", [1, 64, 128, 200, 256, 512])
def test_shared_memory_fits_every_gpu(d: int) -> None:
    """64 KiB is what the least of them (Turing) gives a block."""
    rung, shape = RUNGS["tiled"], Shape(1, 1, 1, 100, 100, d, d)
    assert rung.constants(rung.default_tile(Attention(1.0), shape), shape)["SHARED_BYTES"] <= 64 << 10


@pytest.mark.parametrize("d", [8, 64, 72, 128, 192, 256])
@pytest.mark.parametrize("d_v", [8, 64, 128, 256])
@pytest.mark.parametrize("n", [100, 10_000])
def test_shared_memory_fits_hopper(d: int, d_v: int, n: int) -> None:
    """227 KiB are what a block has, and a pipeline needs two stages."""
    rung, shape = RUNGS["forward_sm90"], Shape(1, 1, 1, n, n, d, d_v, dtype="float16")
    tile = rung.default_tile(Attention(1.0), shape)
    assert rung.fitting(tile, shape) == tile
    constants = rung.constants(tile, shape)
    assert constants["SHARED_BYTES"] <= 227 << 10
    assert constants["STAGES"] >= 2


def test_tables_of_packed_sequences() -> None:
    call = Case("causal", "packed").inputs().call()
    made = marshal.tables(call.spec, call.shape, Tile(16, 16), RUNGS["tiled"])
    rows = made.numbers[: made.offsets_at].reshape(made.n_sequences, -1)
    named = [dict(zip(structs.SEQUENCE_FIELDS, row, strict=True)) for row in rows.tolist()]
    assert [row["n_q"] for row in named] == [40, 0, 65, 1]
    assert [row["first_tile"] for row in named] == [0, 3, 3, 8]
    assert [row["q_begin"] for row in named] == [0, 40, 40, 105]
    assert made.tiles == 9
    offsets = made.numbers[made.offsets_at : made.runs_at]
    assert 3 * offsets.max() == len(made.numbers) - made.runs_at


def _records(made: marshal.Tables) -> list[dict[str, Any]]:
    """By their names, with all the runs of each."""
    runs = made.numbers[made.runs_at :].reshape(-1, 3).tolist()
    places = {**{name: i for i, name in enumerate(structs.SEQUENCE_FIELDS)}, **structs.ITEM_PLACES}
    named = []
    for row in made.numbers[: made.runs_at].reshape(-1, marshal.RECORD).tolist():
        record = {name: row[at] for name, at in places.items()}
        record["runs"] = runs[record["first_run"] : record["first_run"] + record["n_runs"]]
        at_hand = [row[at : at + 3] for at in range(places["runs"], places["runs"] + 3 * structs.RUNS_AT_HAND, 3)]
        assert at_hand[: record["n_runs"]] == record["runs"][: structs.RUNS_AT_HAND]
        record["size"] = sum(last - first for first, last, _ in record["runs"])
        named.append(record)
    return named


def test_records_of_packed_sequences() -> None:
    call = Case("causal", "packed").inputs().call()
    tile = Tile(128, 16)
    made = marshal.tables(call.spec, call.shape, tile, RUNGS["forward_sm90"])
    records = _records(made)
    assert made.n_sequences == 4
    assert made.tiles == len(records) == 3  # a sequence without queries has none
    assert sorted((x["q_begin"], x["n_q"], x["tile"], x["first_query"]) for x in records) == [
        (0, 40, 0, 0), (40, 65, 0, 0), (105, 1, 0, 0),
    ]  # fmt: skip
    sizes = [x["size"] for x in records]
    assert sizes == sorted(sizes, reverse=True)
    assert made.sizes is not None
    assert sizes == sorted(made.sizes, reverse=True)
    assert all(x["n_runs"] > 0 for x in records)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("n", [512, 2048, 8192, 16384])
def test_sections_fit_the_cache_and_the_last_hides_its_largest_tile(d: int, n: int) -> None:
    """Causal, of as many tokens in all; 132 blocks at a time."""
    shape = Shape(16384 // n, 2048 // d, 2048 // d, n, n, d, d, "bfloat16")
    heads, blocks = shape.batch * shape.heads, 132
    made = marshal.tables(Attention(1.0, tw.causal()), shape, Tile(128, 128), RUNGS["forward_sm90"])
    section, sections = marshal._sections(shape, made, blocks)
    last = heads - section * (sections - 1)
    assert last > 0
    assert section * n * 4 * d <= marshal.L2_SHARE
    assert made.sizes is not None
    assert last * made.sizes.sum() / blocks >= 1.5 * made.sizes.max()
    full = marshal.tables(Attention(1.0), shape, Tile(128, 128), RUNGS["forward_sm90"])
    assert marshal._sections(shape, full, blocks) == (1, heads)


@pytest.mark.parametrize("n", [512, 2048, 8192, 16384])
def test_the_last_heads_take_turns_if_their_key_tiles_differ(n: int) -> None:
    """In any order: half of a largest tile's time has work for all 132 blocks when the last heads begin."""
    shape = Shape(16384 // n, 16, 16, n, n, 128, 128, "bfloat16")
    heads, blocks, tile, rung = shape.batch * shape.heads, 132, Tile(64, 128), BackwardProducts(ordered=False)
    causal = marshal.tables(Attention(1.0, tw.causal()), shape, tile, rung)
    full = marshal.tables(Attention(1.0), shape, tile, rung)
    section, sections = marshal_backward._sections(shape, causal, blocks, ordered=False)
    last = heads - section * (sections - 1)
    assert section == 1
    assert 1 < last < heads / 2
    assert last * causal.mean_visits * causal.tiles / blocks >= 0.5 * causal.most_tiles
    assert marshal_backward._sections(shape, full, blocks, ordered=False) == (1, heads)


@pytest.mark.parametrize("n", [2048, 8192])
def test_in_order_heads_take_turns_more_of_them_if_their_key_tiles_differ(n: int) -> None:
    """Each key tile begins a step after the one before it: so many heads are busy, and some are there to spare."""
    shape = Shape(16384 // n, 8, 8, n, n, 256, 256, "bfloat16")
    tile, rung = Tile(64, 64), BackwardProducts(ordered=True)
    full, causal = (marshal.tables(Attention(1.0, mask), shape, tile, rung) for mask in (None, tw.causal()))
    together = [marshal_backward._sections(shape, made, 132, ordered=True)[0] for made in (full, causal)]
    assert together == [2 - -132 // full.mean_visits, 6 - -132 // causal.mean_visits]


def test_records_follow_the_plan() -> None:
    """More query tiles and runs than are at hand, and a plan for each head."""
    mask = ((K // 40) % 2 == 0) & (K <= Q + 64 * H)
    spec, shape, tile = Attention(1.0, mask), replace(SHAPE, n_q=300, n_k=400, total_q=300, total_k=400), Tile(128, 16)
    made = marshal.tables(spec, shape, tile, RUNGS["forward_sm90"])
    assert (made.record_batch, made.record_head) == (0, made.tiles)
    records = _records(made)
    joined = plan(spec, replace(shape, n_q=320), Tile(64, 16)).joined(2, most_skipped=1)
    assert max(x["n_runs"] for x in records) > structs.RUNS_AT_HAND
    for h in range(shape.heads):
        of_head = records[h * made.tiles : (h + 1) * made.tiles]
        assert sorted(x["tile"] for x in of_head) == [0, 1, 2]
        for x in of_head:
            assert x["first_query"] == 128 * x["tile"]
            start, end = joined.offsets[0, h, x["tile"] : x["tile"] + 2]
            assert x["runs"] == joined.table[start:end].tolist()


# -- what only a GPU's compiler reads ---------------------------------------------------------------------------------


def test_architectures() -> None:
    assert compiler.architecture((9, 0)) == "sm_90a"
    assert compiler.architecture((8, 6)) == "sm_86"


def test_products_are_written_for_the_shapes_asked_for() -> None:
    text = wgmma.header("bfloat16", [64, 128])
    assert set(re.findall(r"m64n(\d+)k16\.f32\.bf16\.bf16", text)) == {"64", "128"}
    assert len(re.findall("template <>", text)) == 2 * (8 + 4)


nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here")


def _compiles(text: str, arch: str, folder: Path) -> None:
    (folder / "kernel.cu").write_text(text)
    command = ["nvcc", "-std=c++17", f"-arch={arch}", "-cubin", "-o", "kernel.cubin", "kernel.cu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    # Where registers were written since the last fence of wgmma, the compiler adds one; that it serialises products
    # would be told as well.
    told = [line for line in done.stderr.splitlines() if "(C7519) warpgroup.arrive is injected" not in line]
    assert (done.returncode, told) == (0, [])


@nvcc
@pytest.mark.slow
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(
    "case", [case for case in conformance() if case.dtype != "float64"], ids=lambda case: case.name
)
def test_every_case_compiles_for_a_gpu(case: Case, rung: str, tmp_path: Path) -> None:
    call = case.inputs().call()
    made = RUNGS[rung]
    if made.unsupported(call.shape) is not None:  # it is never compiled
        return
    text, _ = assembled(made, call.spec, call.shape, made.default_tile(call.spec, call.shape))
    _compiles(text.text, "sm_90a" if made.persistent else "sm_80", tmp_path)


@nvcc
@pytest.mark.parametrize("file", ["pipeline.cu", "bulk.cu"])
def test_the_simulators_own_kernels_compile_for_hopper(file: str, tmp_path: Path) -> None:
    """So hopper.h and the simulator's version of it say the same."""
    _compiles(pipelines.text(headers={"wgmma.h": wgmma.header("bfloat16", [64])}, file=file), "sm_90a", tmp_path)


# -- tensor maps ------------------------------------------------------------------------------------------------------


def test_a_tensor_map_has_the_drivers_size() -> None:
    assert ctypes.sizeof(SimulatedMap) == 128


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"address": 8}, "address: expected a multiple of 16 bytes, got 0x8"),
        ({"dtype": "int8"}, "dtype: expected one of"),
        ({"steps": (100, 12800)}, "steps: expected multiples of 16"),
        ({"box": (64, 300, 1)}, "box: expected 1 to 256"),
        ({"box": (128, 64, 1)}, "at most the 128 bytes of the swizzle"),
        ({"swizzle": 100}, "swizzle: expected one of"),
        ({"steps": (128,)}, "as many of box and one step less"),
        ({"sizes": (64, 0, 1)}, "sizes: expected 1 to"),
    ],
)
def test_a_wrong_tensor_map_is_refused(wrong: dict[str, Any], told: str) -> None:
    right: dict[str, Any] = {
        "address": 1024, "dtype": "float16", "sizes": (64, 100, 2), "steps": (128, 12800), "box": (64, 64, 1),
    }  # fmt: skip
    assert TensorMap(**right).box_bytes == 64 * 64 * 2
    with pytest.raises(ValueError, match=re.escape(told)):
        TensorMap(**{**right, **wrong})


def test_masks_on_another_device_are_not_looked_at() -> None:
    """Their tiles are all PARTIAL: to know better would be to wait for the device."""
    torch = pytest.importorskip("torch")
    ids = torch.zeros(64, dtype=torch.int32, device="meta")
    for mask in (load(ids, Q) == 3, load(torch.ones(64, dtype=torch.bool, device="meta"), Q)):
        kinds = plan(Attention(1.0, mask), Shape(1, 1, 1, 64, 64, 8, 8), Tile(16, 16)).kinds()
        assert np.all(kinds == Kind.PARTIAL)


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_arrays_that_begin_anywhere(dtype: str) -> None:
    """At an odd address, as a field of records may lie: a kernel would read it wrong, so it is copied."""
    from tilewise import arrays
    from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel

    call = Case("causal", "grouped", dtype).inputs().call()
    want = CudaSimKernel("tiled").forward(call.spec, call.q, call.k, call.v)
    room = np.zeros(call.q.nbytes + 1, np.uint8)
    odd = room[1:].view(call.q.dtype).reshape(call.q.shape)
    odd[...] = call.q
    got = CudaSimKernel("tiled").forward(call.spec, odd, call.k, call.v)
    assert np.array_equal(arrays.widen(got.out, np.float32), arrays.widen(want.out, np.float32))
