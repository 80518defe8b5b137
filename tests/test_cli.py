"""The command line as a user meets it: what it prints, its exit codes, and no traceback for a user's mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilewise as tw
from tilewise import cli, dispatch
from tilewise.bench.problem import VARIANTS
from tilewise.cli import UserError, compare, demo, terminal, trace
from tilewise.kernels.cuda import CudaKernel, compiler
from tilewise.kernels.disk import Files
from tilewise.kernels.numpy import NumpyKernel
from tilewise.kernels.tilelang import TileLangCKernel
from tilewise.kernels.triton import TritonKernel
from tilewise.spec import Partial, Shape

# All of their values are needed at the end, so that no order of work holds few of them.
WIDE_MASK = "; ".join(f"t{i} = K * {i + 2} + Q" for i in range(400)) + "; (" + " + ".join(
    f"t{i} % {401 - i}" for i in reversed(range(400))
) + ") % 2 < 1"  # fmt: skip
WIDE_SCORE = WIDE_MASK.replace("; (", "; where((", 1) + ", S, -inf) - H"


@pytest.fixture
def short_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "LENGTHS", (64, 256))
    monkeypatch.setattr(compare, "BEYOND", 1024)
    monkeypatch.setattr(demo, "FEW_VARIANTS", ("full", "alibi"))


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_demo(capsys: pytest.CaptureFixture[str], short_demo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, name in ((TritonKernel, "triton"), (TileLangCKernel, "tilelang")):
        monkeypatch.setattr(kind, "unavailable", lambda self, name=name: f"it is away; pip install 'tilewise[{name}]'")
    monkeypatch.setattr(demo, "find_spec", lambda package: None)
    code, out, err = _run(capsys, "demo")
    assert code == 0
    assert err == "", "progress stays quiet when stderr is not a terminal"
    assert len(re.findall("✓ numpy +", out)) == len(demo.VARIANTS)
    assert "✗" not in out
    assert "[PASS] FlashAttention: Output matches reference (max error: 0.0000" in out
    assert "Output shape: [16, 64]\nSample output (first row):\n" in out
    assert "What it means" in out
    assert "every check passed" in out
    if dispatch.kernel("cuda-sim").unavailable() is None:
        for rung in dispatch.simulated_rungs():
            assert len(re.findall(f"✓ {rung} +(full|alibi) +max error", out)) == 2
        assert re.search("cuda-sim/forward_sm90 full +max error .*, float16", out)
    for name in ("triton", "tilelang", "tilelang-c"):
        extra = name.removesuffix("-c")
        assert re.search(rf"\n  {name} .*pip install '\.\[{extra}\]'\n", out), "what adds a system, from these sources"


def test_the_demo_needs_no_pytorch() -> None:
    """A bare machine has NumPy and a compiler: it shows the CUDA sources on the simulator."""
    script = """
import sys
sys.modules["torch"] = None
from tilewise import dispatch
from tilewise.cli import demo
names = [system.name for system in demo.systems(None)]
assert "numpy" in names and not {"cuda", "triton", "cute", "tilelang", "tilelang-c"} & set(names), names
if dispatch.kernel("cuda-sim").unavailable() is None:
    assert set(dispatch.simulated_rungs()) < set(names)
    shown = demo.systems("cuda-sim/forward_sm90")[0]
    assert shown.dtype == "float16" and demo._check(shown, "full")[0] == "✓" and demo._sample(shown)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize("kernel", ["tilelang-c/simple", "tilelang-c", "triton/basic", "cuda-sim/forward_sm90"])
def test_the_demo_of_a_slow_system_ends(capsys: pytest.CaptureFixture[str], short_demo: None, kernel: str) -> None:
    """It has few variants, small arrays of a type that it takes, and no race that it cannot win."""
    reason = dispatch.kernel(kernel).unavailable()
    if reason is not None:
        pytest.skip(reason)
    code, out, err = _run(capsys, "demo", "--kernel", kernel)
    assert (code, err) == (0, "")
    assert re.search(f"✓ {kernel} +full +max error", out)
    assert ("unsupported: it is a first exercise" in out) == (kernel == "tilelang-c/simple")
    assert f"Its time and memory are not compared: {kernel} stands in for a GPU, slowly." in out
    assert "Skipped" not in out


def test_the_demo_takes_arrays_that_a_system_can_compute_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(self: object, spec: object, shape: Shape) -> str | None:
        return None if (shape.device, shape.dtype) == ("cuda:0", "bfloat16") else "halves on a GPU alone"

    monkeypatch.setattr(CudaKernel, "unavailable", lambda self: None)
    monkeypatch.setattr(CudaKernel, "unsupported", unsupported)
    with pytest.raises(UserError, match=r"--kernel: the demo's arrays are not for 'cuda': halves on a GPU alone"):
        demo.systems("cuda")
    monkeypatch.setattr(demo, "_devices", lambda: ("cpu", "cuda:0"))
    (shown,) = demo.systems("cuda")
    assert (shown.device, shown.dtype, shown.slow, shown.tile) == ("cuda:0", "bfloat16", False, None)
    names = [system.name for system in demo.systems(None)]
    assert "cuda" in names and not any(name.startswith("cuda-sim") for name in names)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("it needs torch; pip install 'tilewise[cuda]'", "it needs torch; {pip} install '.[cuda]'"),
        ("there is no GPU", "there is no GPU; {pip} install '.[cuda]'"),
        ("it failed:\n lines\n more", "it failed:; {pip} install '.[cuda]' (`tilewise doctor` tells all)"),
    ],
)
def test_what_adds_a_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, told: str) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda package: None)
    assert demo._adding("cuda", reason) == told.format(pip=demo._pip())
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    assert demo._adding("cuda", reason) == told.format(pip="pip").replace("'.[", "'tilewise[")
    monkeypatch.setattr(demo, "find_spec", lambda package: "here")
    assert demo._adding("cuda", "there is no GPU") == "there is no GPU"


def test_demo_of_one_kernel(capsys: pytest.CaptureFixture[str], short_demo: None) -> None:
    assert _run(capsys, "demo", "--kernel", "numpy")[0] == 0
    code, _, err = _run(capsys, "demo", "--kernel", "abacus")
    assert code == 2
    assert f"--kernel: expected one of {', '.join(dispatch.NAMED)}, got 'abacus'" in err


def test_demo_shows_a_wrong_kernel(
    capsys: pytest.CaptureFixture[str], short_demo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(NumpyKernel):
        def forward(self, *args: object, **options: object) -> Partial:
            done = super().forward(*args, **options)  # type: ignore[arg-type]
            return Partial(done.out * np.float32(1.001), done.lse)

    monkeypatch.setattr(dispatch, "kernel", lambda name: Wrong())
    code, out, _ = _run(capsys, "demo", "--kernel", "numpy")
    assert code == 1
    assert "✗ numpy" in out
    assert "[FAIL] FlashAttention: Output does not match reference (max error: 0.0" in out
    assert "NOT all exact" in out


def test_demo_compares_what_it_says(short_demo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "LENGTHS", (64, 2048))
    used: list[str] = []
    attention = tw.attention
    monkeypatch.setattr(tw, "attention", lambda *a, **o: used.append(o["kernel"]) or attention(*a, **o))
    rows = compare.on_cpu("numpy")
    assert [row.n for row in rows] == [64, 2048, 1024]
    assert set(used) == {"numpy"}
    assert rows[1].matrix_bytes == 4 * 2048 * 2048
    standard, tiled = rows[1].both or (None, None)
    assert standard.bytes >= rows[1].matrix_bytes > 4 * tiled.bytes  # type: ignore[union-attr]
    assert rows[2].both is None, "standard attention has no window to compare with"


def test_standard_attention_is_not_tried_where_it_would_not_fit(
    capsys: pytest.CaptureFixture[str], short_demo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "available_memory", lambda: 4 * 2 * 2 * 256 * 256 - 1)
    code, out, _ = _run(capsys, "demo", "--kernel", "numpy")
    assert code == 0
    assert "standard attention at n = 256: not run: two matrices of 256 KiB do not fit comfortably" in out
    assert "standard attention at n = 1024, window(256): not run: it would store 4.0 MiB for the 513 keys" in out
    assert "At n = 1024, window(256) the full matrix would take 4.0 MiB; the tiles just run." in out


def test_the_demo_ends_on_a_slow_machine(
    capsys: pytest.CaptureFixture[str], short_demo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "PATIENCE", 1e-9)
    code, out, _ = _run(capsys, "demo", "--kernel", "numpy")
    assert code == 0
    for length in ("256", r"1024, window\(256\)"):
        assert re.search(rf"tiled attention at n = .*{length}.*: not run: judging by n = 64 it would take about", out)


def test_trace(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "demo", "--trace")
    assert code == 0
    assert "key tile 1: EMPTY, skipped" in out
    for word in ("load q[4:8]", "load k[0:4] and v[0:4]", "FULL", "PARTIAL", "row_max", "row_sum", "rescale"):
        assert word in out
    rng = np.random.default_rng(0)
    q, k, _ = (rng.standard_normal((trace.N, trace.D)) for _ in range(3))
    assert f"{(q[4:] @ k.T / 2)[0, :4].max():7.3f}" in out.split("query tile 1")[1]


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = _run(capsys, "doctor")
    assert code == 0
    assert "✓ numpy" in out
    assert "torch" in out
    for name in dispatch.NAMES:
        monkeypatch.setattr(type(dispatch.kernel(name)), "unavailable", lambda self: f"no {self.name}: get {self.name}")
    code, out, _ = _run(capsys, "doctor")
    assert code == 1
    assert "✗ numpy      no numpy: get numpy" in out


def test_doctor_shows_the_native_engine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.kernels.cpu import CpuKernel, library

    monkeypatch.setattr(CpuKernel, "unavailable", lambda self: None)
    monkeypatch.setattr(library, "isas", lambda: ["avx512", "avx2", "portable"])
    monkeypatch.setattr(library, "isa", lambda: "avx2")
    monkeypatch.setattr(library, "get_num_threads", lambda: 7)
    _, out, _ = _run(capsys, "doctor")
    assert "✓ cpu " in out
    assert "\n               instructions: avx2 (TILEWISE_CPU_ISA can name avx512, portable); threads: 7\n" in out
    monkeypatch.setattr(library, "isas", lambda: ["avx2"])
    assert "instructions: avx2; threads: 7\n" in _run(capsys, "doctor")[1]


def test_doctor_says_why_there_is_no_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewise.kernels.cpu import CpuKernel

    monkeypatch.setattr(CpuKernel, "unavailable", lambda self: "the compiler failed:\n  no such header\nInstall it")
    code, out, _ = _run(capsys, "doctor")
    assert code == 0, "NumPy is there"
    gap = "\n" + " " * 15
    assert f"✗ cpu        the compiler failed:{gap}  no such header{gap}Install it\n" in out
    assert "instructions" not in out


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "plan", "--mask", "causal() & window(512)", "--n", "8192", "--block", "128")
    assert code == 0
    assert "tiles: 64 x 64 of 128 x 128" in out
    assert "mask: (K <= Q + (NK - NQ))" in out
    rows = [line for line in out.splitlines() if line and set(line) <= set("·▒█")]
    assert len(rows) == 64
    assert rows[10] == "·" * 6 + "▒███▒" + "·" * 53


def test_plan_of_a_large_grid_shows_blocks_of_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = _run(capsys, "plan", "--mask", "causal()", "--n", "100000")
    rows = [line for line in out.splitlines() if line and set(line) <= set("·▒█")]
    assert rows[1].startswith("█▒·")
    assert "(a cell is 13 x 13 tiles)" in out


def test_plan_of_shared_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """64 rows of q and two pairs of 64 rows of k and v, of 64 numbers of two bytes each."""
    _, out, _ = _run(capsys, "plan", "--arch", "sm_80", "--block", "64", "--json")
    assert json.loads(out) == [{
        "arch": "sm_80", "limit": 163 << 10, "tile": "64x64", "q": 8 << 10, "pair": 16 << 10,
        "stages": 9, "bytes": 40 << 10, "blocks": 4,
    }]  # fmt: skip
    _, out, _ = _run(capsys, "plan", "--arch", "sm_90a", "--d", "256")
    assert "a block may take 227 KiB" in out and "128x256" in out
    _, out, _ = _run(capsys, "plan", "--arch", "all", "--d", "128", "--dtype", "float32")
    rows = {line.split(",")[0]: line.split()[-4:] for line in out.splitlines() if line.startswith("sm_")}
    assert rows["sm_75"] == ["-", "-", "-", "-"] and rows["sm_80"] == ["2", "1", "-", "-"]
    code, _, told = _run(capsys, "plan", "--arch", "all", "--mask", "causal()")
    assert code == 2 and "--arch: what tiles take is the same for every --mask" in told


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = _run(capsys, "plan", "--mask", "causal()", "--n", "256", "--block", "64x128", "--json")
    numbers = json.loads(out)
    assert numbers["grid"] == [4, 2]
    assert numbers["tiles"] == {"EMPTY": 2, "PARTIAL": 4, "FULL": 2}
    assert numbers["bytes_kept"] == {"out": 256 * 64 * 2, "lse": 256 * 4, "remainder": 256 * 64 * 2}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan", "--mask", "__import__('os').system('true')"], "--mask: in"),
        (["plan", "--mask", "causal() and window(3)"], "use & and |"),
        (["plan", "--mask", "window(-1)"], "window: left must be a whole number of at least 0, got -1"),
        (["plan", "--mask", "S > 0"], "reads the score S"),
        (["plan", "--mask", "Q + K"], "mask: expected a condition"),
        (["plan", "--score", "causal()"], "score: expected a number"),
        (
            ["plan", "--score", "alibi(8)", "--heads", "4"],
            "--score: alibi: slopes must be for 4 heads, as q has, got 8",
        ),
        (["plan", "--block", "0"], "--block: expected a size such as 128 or 64x128, got '0'"),
        (["plan", "--block", "1x2x3"], "--block"),
        (["plan", "--block", "1x99999999999999999999"], "--block: expected a size such as 128 or 64x128, got '1x9999"),
        (["plan", "--n", "99999999999999999999"], "--n: expected at most 2147483647, got 99999999999999999999"),
        (["plan", "--n-k", "99999999999999999999"], "--n: expected at most 2147483647, got 99999999999999999999"),
        (["plan", "--batch", "99999999999999999999"], "--batch: expected at most 2147483647"),
        (["plan", "--d", "99999999999999999999"], "--d: expected at most 2147483647"),
        (
            ["plan", "--mask", "H < 5", "--heads", "100000000"],
            "--block: 128 x 128 makes 8 x 8 tiles for each of 100000000 (sequence, head) pairs, which the expression",
        ),
        (["plan", "--mask", "B < K", "--batch", "100000000"], "for each of 100000000 (sequence, head) pairs"),
        (["plan", "--n-q", "50000000", "--n-k", "1", "--block", "1"], "1,000,000 rows are the most: take larger tiles"),
        (["plan", "--mask", WIDE_MASK, "--n", "600000"], "too many for an expression of"),
        (["plan", "--score", "t5([1, 2, 3, 4], 1000000000)"], "--score: in 't5(["),
        (["explain", "--score", WIDE_SCORE, "--n", "4096", "--block", "128", "--heads", "64"], "too many for an expr"),
        (["plan", "--arch", "sm_12"], "--arch: expected one of sm_70, sm_75"),
        (["plan", "--n", "-1"], "--n: expected at least 0, got -1"),
        (["plan", "--heads", "6", "--heads-k", "4"], "--heads-k: expected a divisor of --heads 6, got 4"),
        (["plan", "--n", "1000000", "--block", "1"], "--block: 1 x 1 makes 1000000 x 1000000 tiles"),
        (["plan", "--head", "1"], "--head: expected 0 to 0, got 1"),
        (["plan", "--mask", "Q * Q * Q < K", "--n", "100000"], "--mask: the expression's integer"),
    ],
)
def test_mistakes_of_the_user(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    code, out, err = _run(capsys, *argv)
    assert code == 2
    assert message in err
    assert err.startswith("tilewise: ")
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize("command", ["", "demo", "doctor", "plan", "explain", "bench", "judge"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command.split(), "--help"])
    assert stopped.value.code == 0
    assert "usage: tilewise" in capsys.readouterr().out


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys)
    assert code == 2
    assert "Start with `tilewise demo`" in out


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "tilewise", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tilewise ")


def test_a_closed_pipe_is_no_error() -> None:
    script = f"{sys.executable} -m tilewise plan --n 4096 | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_table_and_bars() -> None:
    assert terminal.table(["a", "b"], [["x", "10"], ["long", "2"]]).splitlines() == [
        "a      b",
        "----  --",
        "x     10",
        "long   2",
    ]
    bars = terminal.log_bars([("one", 1.0, "1"), ("many", 1000.0, "1000")], width=10).splitlines()
    assert bars == ["one   █ 1", "many  ██████████ 1000"]


# -- warmup -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What a compiler, which is not there, was asked for. Nothing is shipped."""
    asked: list[str] = []
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "PREBUILT", Files(tmp_path / "shipped"))
    monkeypatch.setattr(compiler, "version", lambda: "nvrtc 13.0")
    monkeypatch.setattr(compiler, "without_nvrtc", lambda: None)
    monkeypatch.setattr(compiler, "by_nvrtc", lambda source, arch: asked.append(f"{source.rung} {arch}") or b"code")
    return asked


def test_warmup_compiles_once(capsys: pytest.CaptureFixture[str], compiled: list[str]) -> None:
    asked = ("warmup", "--variants", "full,window", "--d", "64", "--n", "512,4096", "--arch", "sm_90a,sm_80")
    code, out, _ = _run(capsys, *asked)
    assert code == 0
    assert sorted(compiled) == ["forward_sm90 sm_90a"] * 4 + ["tiled sm_80"] * 2
    assert "full, bfloat16, d 64, n 512, sm_90a: forward_sm90, 0.0 s" in out
    assert "sm_80, bfloat16: auto takes triton" in out and "sm_90a, bfloat16: auto" not in out
    assert "kernels that are ready: 6 (6 compiled now, 0 shipped with Tilewise)" in out
    _, out, _ = _run(capsys, *asked)
    assert len(compiled) == 6
    assert "kernels that are ready: 6 (0 compiled now" in out


@pytest.mark.parametrize("variant", VARIANTS)
def test_warmup_knows_every_variant_of_the_benchmarks(
    capsys: pytest.CaptureFixture[str], compiled: list[str], variant: str
) -> None:
    code, _, _ = _run(
        capsys, "warmup", "--variants", variant, "--n", "256", "--d", "96", "--d-v", "80", "--arch", "sm_89"
    )
    assert code == 0
    assert compiled == ["tiled sm_89"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_warmup_compiles_what_looks_at_arrays_of_a_mask(
    capsys: pytest.CaptureFixture[str], compiled: list[str], variant: str
) -> None:
    """Documents are numbered by an array, which may be on the GPU: what its first call would wait for is there."""
    code, _, _ = _run(capsys, "warmup", "--variants", variant, "--n", "1024", "--arch", "sm_90a")
    assert code == 0
    assert compiled == ["forward_sm90 sm_90a", *(["refine sm_90a"] if variant == "document" else [])]


@pytest.mark.parametrize(
    ("arch", "names"),
    [
        (
            "sm_90a",
            [
                "forward_sm90",
                "refine",
                "forward_sm90",
                "backward_sm90_rows",
                "backward_sm90",
                "refine_backward",
            ],
        ),
        ("sm_80", ["tiled", "tiled", "tiled_d_query", "tiled_d_keys"]),
    ],
)
def test_warmup_compiles_gradients(
    capsys: pytest.CaptureFixture[str], compiled: list[str], arch: str, names: list[str]
) -> None:
    """Of training: its forward pass keeps what rounding takes from out."""
    assert _run(capsys, "warmup", "--variants", "document", "--n", "1024", "--arch", arch, "--backward")[0] == 0
    assert compiled == [f"{name} {arch}" for name in names]


def test_warmup_without_a_gpu_is_for_hopper(
    capsys: pytest.CaptureFixture[str], compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewise.cli.warmup.import_torch", lambda: None)
    _, out, _ = _run(capsys, "warmup", "--variants", "full")
    assert compiled == ["forward_sm90 sm_90a"]
    assert "no GPU here: compiling for sm_90a" in out


def test_warmup_needs_a_compiler_only_for_what_is_not_shipped(
    capsys: pytest.CaptureFixture[str], compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "without_nvrtc", lambda: "NVRTC cannot be used (it is away); install it")
    code, _, told = _run(capsys, "warmup", "--arch", "sm_90a")
    assert code == 2
    assert "kernels to compile: 2 of 2, but NVRTC cannot be used (it is away); install it" in told
    monkeypatch.setattr(compiler, "prebuilt", lambda source, arch: b"code")
    code, out, _ = _run(capsys, "warmup", "--arch", "sm_90a")
    assert code == 0
    assert "2 shipped" in out


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--arch", "hopper", "--arch: expected an architecture such as sm_90a, sm_70 or newer, got 'hopper'"),
        ("--arch", "sm_61", "got 'sm_61'"),
        ("--variants", "sparse", "--variants: there is no 'sparse'; expected some of full, causal"),
        ("--dtype", "float64", "--dtype: there is no 'float64'; expected some of float32, float16, bfloat16"),
        ("--d", "0", "--d: expected a whole number from 1 to 512, got '0'"),
        ("--n", "many", "--n: expected a whole number"),
    ],
)
def test_warmup_says_what_it_expects(
    capsys: pytest.CaptureFixture[str], compiled: list[str], option: str, value: str, told: str
) -> None:
    code, _, error = _run(capsys, "warmup", option, value)
    assert code == 2
    assert told in error
    assert compiled == []
