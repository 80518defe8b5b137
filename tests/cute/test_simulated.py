"""The forward kernel is run without a GPU: what the compiler made of it, by a simulator of warps and barriers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from tests.cute import every_lane  # noqa: E402
from tests.cute.simulator.instructions import steps  # noqa: E402 - only with PyTorch
from tests.cute.simulator.machine import Grid, StuckError  # noqa: E402
from tests.cute.simulator.memory import Memory  # noqa: E402
from tests.cute.simulator.parse import parse  # noqa: E402
from tests.edits import edited  # noqa: E402
from tilewise.kernels.cute import compiler  # noqa: E402

ROOT = Path(__file__).parents[2]
QUICK = ["causal 64", "growing 64", "packed 128", "bias 256", "one key 64", "even 128"]
needs_compilers = pytest.mark.skipif(
    compiler.not_installed() is not None or compiler.c_compiler() is None or torch.version.cuda is not None,
    reason="it needs CuTe's compiler, a C compiler, and a PyTorch without CUDA, for which nothing can stand in",
)


def _simulated(*arguments: str, module: str = "simulated") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tests.cute.{module}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("simulated") / "libcudart.so.13"  # by its soname it is found when a kernel is loaded
    source, soname = Path(__file__).with_name("stand_in.c"), f"-Wl,-soname,{made.name}"
    linker = str(compiler.c_compiler())
    subprocess.run([linker, "-shared", "-fPIC", "-w", soname, "-o", str(made), str(source)], check=True)
    return made


def _check(stand_in: Path, names: list[str], folder: Path | None = None) -> None:
    """By the contract, as on a GPU. folder: of other kernels than the stand-in's."""
    kernels = str(folder or stand_in.parent)
    built = _simulated("build", kernels, *names)
    assert built.returncode == 0, built.stderr
    done = _simulated("run", kernels, str(stand_in), *names)
    assert done.returncode == 0, done.stderr
    for name, off in map(json.loads, done.stdout.splitlines()):
        for what, (error, limit) in off.items():
            assert error <= limit, f"{name}: {what} is off by {error}"
    assert len(done.stdout.splitlines()) >= len(names)


@needs_compilers
def test_the_forward_kernel_computes_what_it_should(stand_in: Path) -> None:
    _check(stand_in, QUICK)


@needs_compilers
def test_the_kernel_with_the_output_projection_computes_what_it_should(stand_in: Path, tmp_path: Path) -> None:
    """Of grouped heads, padded ones, rows that are not aligned, and weights that lie the other way round."""
    built = _simulated("build", str(tmp_path), module="simulated_projection")
    assert built.returncode == 0, built.stderr
    done = _simulated("run", str(tmp_path), str(stand_in), module="simulated_projection")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, *_ in found] == ["grouped", "padded", "not aligned", "rows"]
    for name, error, largest in found:
        assert error < 4e-3 * largest, f"{name} is off by {error}"


@needs_compilers
def test_so_it_does_where_every_lane_frees_places(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As racecheck has it: as many arrive at barriers as they were made for, or it would wait for ever."""
    assert _simulated("build", str(stand_in.parent), QUICK[0]).returncode == 0
    monkeypatch.setenv("TILEWISE_EVERY_LANE", "1")
    _check(stand_in, QUICK[:1], tmp_path)
    (every,) = tmp_path.glob("forward_sm90*.ptx")
    one = stand_in.parent / every.name
    assert every.read_text().count("elect.sync") < one.read_text().count("elect.sync")


@pytest.mark.parametrize("name", every_lane.EDITS)
def test_what_racechecks_version_edits_is_there(name: str) -> None:
    text = (ROOT / "tilewise" / "kernels" / "cute" / "source" / name).read_text()
    assert edited(every_lane.EDITS, name, text) != text


@pytest.mark.slow
@needs_compilers
def test_so_it_does_with_every_variant(stand_in: Path) -> None:
    _check(stand_in, ["all"])


@needs_compilers
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("wgmma.wait_group.sync.aligned \t1;", ""),  # scores are read while their product is under way
        ("mbarrier.arrive.shared.b64", "// none: "),  # nobody tells that a place is free
    ],
    ids=["a wait is left out", "an arrival is left out"],
)
def test_a_wrong_kernel_is_found(stand_in: Path, tmp_path: Path, right: str, wrong: str) -> None:
    assert _simulated("build", str(stand_in.parent), QUICK[0]).returncode == 0
    for path in stand_in.parent.glob("forward_sm90*"):
        text = path.read_text().replace(right, wrong).encode() if path.suffix == ".ptx" else path.read_bytes()
        (tmp_path / path.name).write_bytes(text)
    done = _simulated("run", str(tmp_path), str(stand_in), QUICK[0])
    assert done.returncode != 0


# -- the simulator itself ---------------------------------------------------------------------------------------------

PROGRAM = """
.visible .entry meeting(
    .param .u64 meeting_param_0
)
.reqntid 64, 1, 1
{{
    .reg .pred %p<4>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<4>;
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, __dynamic_shmem__0;
    ld.param.b64 %rd1, [meeting_param_0];
    setp.ne.b32 %p1, %r1, 0;
    @%p1 bra $L__READY;
    mov.b32 %r3, {count};
    mbarrier.init.shared.b64 [%r2], %r3;
$L__READY:
    bar.sync 0;
    shr.u32 %r4, %r1, 5;
    setp.eq.b32 %p2, %r4, 1;
    @%p2 bra $L__WAIT;
    shl.b32 %r5, %r1, 2;
    add.s32 %r6, %r5, %r2;
    mul.lo.s32 %r7, %r1, -3;
    st.shared.b32 [%r6+64], %r7;
    mov.b32 %r8, 1;
    mbarrier.arrive.shared.b64 %rd2, [%r2], %r8;
    ret;
$L__WAIT:
    mov.b32 %r8, 0;
    {{
    .reg .pred P1;
    LAB_WAIT:
    mbarrier.try_wait.parity.shared.b64 P1, [%r2], %r8, 10000000;
    @P1 bra.uni DONE;
    bra.uni LAB_WAIT;
    DONE:
    }}
    sub.s32 %r3, 63, %r1;
    shl.b32 %r5, %r3, 2;
    add.s32 %r6, %r5, %r2;
    ld.shared.b32 %r7, [%r6+64];
    cvt.u64.u32 %rd2, %r5;
    add.s64 %rd3, %rd1, %rd2;
    st.global.b32 [%rd3], %r7;
    ret;
}}
"""


def _run(count: int, out: torch.Tensor, size: int | None = None) -> None:
    program, begin = parse(PROGRAM.format(count=count)), out.data_ptr()
    arrays = [(begin, begin + 4 * (len(out) if size is None else size))]
    parameters = begin.to_bytes(8, "little").ljust(64, b"\0")
    Grid(steps(program), program.threads, 1, Memory(arrays, parameters), random.Random(0)).run()


def test_a_warp_waits_for_another() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    _run(32, out)
    assert out.tolist() == [-3 * i for i in range(32)]


def test_who_waits_for_ever_is_told() -> None:
    with pytest.raises(StuckError, match=r"warp 1 waits at mbarrier\.try_wait"):
        _run(33, torch.zeros(32, dtype=torch.int32))


def test_nothing_is_written_outside() -> None:
    with pytest.raises(IndexError, match=r"4 bytes at .* are of no array"):
        _run(32, torch.zeros(32, dtype=torch.int32), size=20)
