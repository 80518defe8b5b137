"""What `auto` takes on every architecture, told by GPUs that need not be there."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import tilewise as tw
from tilewise import choosing, cli, dispatch
from tilewise.choosing import TABLE, Purpose
from tilewise.generations import AMD, GENERATIONS
from tilewise.kernels import gpus
from tilewise.spec import Attention, Shape

PLAIN = Attention(0.1, tw.causal())
HEADS = ("64", "72", "100", "320")
LYING = ("aligned", "unaligned")  # whether TMA can load q, k and v

# Architectures, types, head dimensions, how arrays lie: forward, backward, decode. Half is float16 and bfloat16.
TAKEN = """
sm_90                        half     64,72          aligned            cuda/forward_sm90  cuda/forward_sm90  triton
sm_90                        half     64,72          unaligned          triton             cuda/forward_sm90  triton
sm_90                        half     100,320        aligned,unaligned  triton             triton             triton
sm_90                        float32  64,72,100,320  aligned,unaligned  cuda/tiled         cuda/tiled         triton

sm_80,sm_86,sm_87,sm_89      half     64,72,100,320  aligned,unaligned  triton             triton             triton
sm_80,sm_86,sm_87,sm_89      float32  64,72,100,320  aligned,unaligned  cuda/tiled         cuda/tiled         triton

sm_100,sm_103,sm_120,sm_121  half     64,72,100,320  aligned,unaligned  triton             triton             triton
sm_100,sm_103,sm_120,sm_121  float32  64,72,100,320  aligned,unaligned  cuda/tiled         cuda/tiled         triton

sm_70                        half     64,72,100,320  aligned,unaligned  cuda/tiled         cuda/tiled         triton
sm_70                        float32  64,72,100      aligned,unaligned  cuda/tiled         cuda/tiled         triton
sm_70                        float32  320            aligned,unaligned  cuda/tiled         cuda/tiled         cuda
sm_75                        half     64,320         aligned,unaligned  cuda/tiled         cuda/tiled         triton
sm_75                        half     72,100         aligned,unaligned  cuda/tiled         triton             triton
sm_75                        float32  64             aligned,unaligned  cuda/tiled         cuda/tiled         triton
sm_75                        float32  72,100         aligned,unaligned  cuda/tiled         triton             triton
sm_75                        float32  320            aligned,unaligned  cuda/tiled         cuda/tiled         cuda

gfx90a,gfx942,gfx1100        half     64,72,100      aligned,unaligned  triton             triton             triton
gfx90a,gfx942,gfx1100        half     320            aligned,unaligned  triton             -                  triton
gfx90a,gfx942,gfx1100        float32  64,72,100      aligned,unaligned  triton             triton             triton
gfx90a,gfx942,gfx1100        float32  320            aligned,unaligned  -                  -                  -
"""


def _rows() -> dict[tuple[str, str, str, str], tuple[str, ...]]:
    """By architecture, type, head dimension and how arrays lie; each once."""
    found: dict[tuple[str, str, str, str], tuple[str, ...]] = {}
    for line in filter(None, TAKEN.splitlines()):
        architectures, types, dims, lying, *kernels = line.split()
        types = "float16,bfloat16" if types == "half" else types
        for key in product(*(x.split(",") for x in (architectures, types, dims, lying))):
            assert key not in found, f"{key} is there twice"
            found[key] = tuple(kernels)
    return found


def _shape(architecture: str, dtype: str, d: str, lying: str) -> Shape:
    reason = None if lying == "aligned" else "q does not begin at a multiple of 16 bytes"
    sizes = Shape(2, 4, 2, 128, 128, int(d), int(d), dtype, gpus.imagined(architecture))
    return replace(sizes, not_copied=reason)


def _taken(shape: Shape, purpose: Purpose) -> str:
    made = dispatch.choice("auto", PLAIN, replace(shape, backward=purpose is Purpose.BACKWARD), purpose)
    return made.taken or "-"


def test_the_table_is_whole() -> None:
    every = product((*GENERATIONS, *AMD), ("float16", "bfloat16", "float32"), HEADS, LYING)
    assert _rows().keys() == set(every)


@pytest.mark.parametrize("architecture", [*GENERATIONS, *AMD])
def test_what_auto_takes(architecture: str) -> None:
    for key, expected in _rows().items():
        if key[0] == architecture:
            taken = tuple(_taken(_shape(*key), purpose) for purpose in Purpose)
            assert taken == expected, key


@pytest.mark.parametrize("architecture", [*GENERATIONS, *AMD])
def test_sizes_of_batches_and_lengths_do_not_decide(architecture: str) -> None:
    """So a sequence has the same bits whatever else is in a batch, and however long it is."""
    shape = _shape(architecture, "bfloat16", "64", "aligned")
    for purpose in Purpose:
        others = [replace(shape, batch=b, n_q=n, n_k=n, total_q=n, total_k=n) for b in (1, 64) for n in (1, 16, 70000)]
        assert {_taken(other, purpose) for other in others} == {_taken(shape, purpose)}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("d", HEADS)
@pytest.mark.parametrize("lying", LYING)
def test_no_kernel_without_tensor_cores_serves_half_precision_where_there_are_some(
    architecture: str, d: str, lying: str
) -> None:
    shape = _shape(architecture, "bfloat16", d, lying)
    for backward in (False, True):
        assert dispatch.choice("auto", PLAIN, replace(shape, backward=backward)).slowness is None


def test_a_slow_kernel_is_told_to_be_slow_and_what_would_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = _shape("sm_80", "float16", "64", "aligned")
    for name in ("triton", "cute/basic"):
        missing = f"it needs {name}; pip install {name}"
        monkeypatch.setattr(dispatch.kernel(name), "unsupported", lambda spec, shape, missing=missing: missing)
    made = dispatch.choice("auto", PLAIN, shape)
    assert made.taken == "cuda/tiled"
    assert made.slowness == (
        "it multiplies without tensor cores, which sm_80 has. Faster, if it could: triton: it needs triton; pip "
        "install triton; cute/basic: it needs cute/basic; pip install cute/basic"
    )
    assert dispatch.choice("auto", PLAIN, replace(shape, dtype="float32")).slowness is None
    decoding = dispatch.choice("auto", PLAIN, shape, Purpose.DECODE)
    assert decoding.taken == "cuda" and "no kernel for few queries" in (decoding.slowness or "")


def test_what_is_not_measured_says_so() -> None:
    for row in TABLE:
        assert ("measured on" in row.origin) == (row.group in (choosing.HOPPER, choosing.MAIN_MEMORY))


def test_the_table_names_what_there_is() -> None:
    names = {name for purpose in Purpose for name in choosing.everywhere(purpose)}
    assert names <= set(dispatch.NAMED)
    assert dispatch.ONLY_IF_NAMED == ("tilelang", "tilelang-c", "cuda-sim")


@pytest.mark.parametrize(
    ("architecture", "group"),
    [
        ("cpu", "main memory"), ("sm_61", "Volta and Turing"), ("sm_88", "Ampere and Ada"), ("sm_90", "Hopper"),
        ("sm_110", "Blackwell"), ("sm_200", "Blackwell"), ("gfx908", "AMD CDNA"), ("gfx950", "AMD CDNA"),
        ("gfx1201", "AMD RDNA"), ("meta", None), ("xpu:0", None), ("mps", None),
    ],
)  # fmt: skip
def test_groups(architecture: str, group: str | None) -> None:
    assert choosing.group_of(architecture) == group


def test_where_nothing_computes_every_kernel_says_why() -> None:
    with pytest.raises(tw.Unsupported, match=r"cpu, numpy.*: it works in main memory and the arrays are on mps"):
        dispatch.resolve("auto", PLAIN, Shape(1, 1, 1, 8, 8, 8, 8, device="mps"))


# -- the command line -------------------------------------------------------------------------------------------------


def _doctor(capsys: pytest.CaptureFixture[str], arch: str) -> list[list[str]]:
    assert cli.main(["doctor", "--arch", arch]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_doctor_tells_of_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _doctor(capsys, "sm_90a")
    assert lines[0][:2] == ["sm_90,", "Hopper"]
    assert ["forward", "cuda/forward_sm90", "cuda/tiled"] in lines
    assert ["backward", "cuda/forward_sm90", "cuda/tiled"] in lines
    assert ["decode", "triton", "triton"] in lines
    assert ["forward", "triton", "triton"] in _doctor(capsys, "gfx1100")
    slow = [line for line in _doctor(capsys, "sm_75") if line[:1] == ["slow:"]]
    assert len(slow) == 1 and "cuda/tiled:" in slow[0]


def test_doctor_refuses_an_architecture_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--arch", "sm_12"]) == 2
    assert "--arch: expected one of sm_70, sm_75," in capsys.readouterr().err


def test_doctor_tells_what_serves_each_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 and an H200, without Triton."""
    torch = pytest.importorskip("torch")
    missing = "it needs triton; pip install 'tilewise[triton]'"
    fakes = {
        "is_available": lambda: True, "device_count": lambda: 2,
        "get_device_name": lambda device: {"cuda:0": "NVIDIA A100", "cuda:1": "NVIDIA H200"}[device],
        "get_device_capability": lambda device: {"cuda:0": (8, 0), "cuda:1": (9, 0)}[device],
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(type(dispatch.kernel("triton")), "unavailable", lambda self: missing)
    monkeypatch.setattr(type(dispatch.kernel("cute")), "unavailable", lambda self: "it needs cutlass")
    monkeypatch.setattr(type(dispatch.kernel("cuda")), "unavailable", lambda self: None)
    assert cli.main(["doctor"]) == 0
    _, a100, h200 = (part.split("\n\n") for part in capsys.readouterr().out.split("\nGPU "))
    assert a100[0] == "cuda:0, NVIDIA A100 (sm_80): kernels at head dimension 64"
    assert [line.split() for line in a100[1].splitlines()[2:]] == [
        ["forward", "cuda/tiled", "cuda/tiled"], ["backward", "cuda/tiled", "cuda/tiled"], ["decode", "cuda", "cuda"],
    ]  # fmt: skip
    assert "slow: forward in bfloat16 by cuda/tiled: it multiplies without tensor cores" in a100[2]
    assert missing in a100[2]
    assert h200[1].splitlines()[2].split() == ["forward", "cuda/forward_sm90", "cuda/tiled"]
