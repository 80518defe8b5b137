"""What CI cannot check, on a machine with an NVIDIA GPU: `make prove-gpu`, or `python tests/prove_gpu.py build/proof`.

The tests that need a GPU, four tools of compute-sanitizer on a representative set of them, and random calls. Each is a
process of its own with a log in the folder; a line tells how it ended, and proof.json there has it in numbers. `--only
tests fuzz-cuda` runs some of them, and adds to the proof.json of the same sources. Speed is not measured: they share
the GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":  # the project's folder, not the script's own, where `cuda` is something else
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tests.proof import Outcome, Record, about, commit

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# What is fuzzed, by its name as a proof, and the share of --cases that it gets: a variant takes TileLang and CuTe long.
FUZZED = {
    "fuzz-cuda": ("cuda", 1.0), "fuzz-unordered": ("cuda/unordered", 0.5), "fuzz-triton": ("triton", 1.0),
    "fuzz-tilelang": ("tilelang", 0.2), "fuzz-cute": ("cute", 0.05),
}  # fmt: skip
NAMES = ("tests", *TOOLS, *FUZZED)
# Every way in which the Hopper kernels work, and some of the others; each tool takes a minute or two.
SANITIZED = (
    "(forward_sm90 and ((several and (full or causal or document or bias)) or (head and (once or full or causal))"
    " or (packed and bfloat16 and causal))) or (unordered and (several or head) and (full or causal))"
    " or ((tiled or naive) and grouped and once)"
)
MERCY = 20.0  # seconds in which a process that was told to stop says what it found


@dataclass(frozen=True)
class Proof:
    name: str
    command: tuple[str, ...]


def tests(jobs: int) -> Proof:
    spread = ("-n", str(jobs)) if find_spec("xdist") is not None else ()
    return Proof("tests", (*_PYTEST, *spread, "--tb=short", "--show-capture=no", "--durations=20", "tests"))


def sanitizers() -> list[Proof]:
    return [_sanitizer(tool) for tool in TOOLS]


def _sanitizer(tool: str) -> Proof:
    """Two tools do not understand all that Hopper's backward pass does: tests/cuda/sanitizer_limits.cu."""
    # Its sums are stored by the copy engine, which initcheck does not see; a test on memory of NaN stands for it.
    cases = f"({SANITIZED}) and not (backward and (forward_sm90 or unordered))" if tool == "initcheck" else SANITIZED
    before = ("env", "TILEWISE_EVERY_LANE=1") if tool == "racecheck" else ()
    options = ("--report-api-errors", "no", "--error-exitcode", "1")
    command = ("compute-sanitizer", "--tool", tool, *options, *_PYTEST, "tests/conformance", "-k", cases)
    return Proof(tool, (*before, *command))


def random_calls(jobs: int, cases: int, seed: int) -> list[Proof]:
    def proof(name: str, kernel: str, share: float) -> Proof:
        counts = ("--seed", str(seed), "--cases", str(max(round(share * cases), 1)), "--jobs", str(jobs))
        return Proof(name, (sys.executable, "tests/fuzz.py", "--kernel", kernel, *counts))

    return [proof(name, *fuzzed) for name, fuzzed in FUZZED.items()]


# Another plugin of pytest may refuse to run beside others.
_PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:benchmark")


def run(proofs: Sequence[Proof], folder: Path, patience: float) -> Iterator[Outcome]:
    """All at once, and each told when it ends. What does not end in time is told to stop, and counts as failed."""
    with ThreadPoolExecutor(len(proofs) or 1) as threads:
        for ended in as_completed([threads.submit(_run, proof, folder, patience) for proof in proofs]):
            outcome = ended.result()
            print(f"{outcome.name}: {outcome.how}, {outcome.seconds:.0f} s", flush=True)
            for line in told(outcome.log):
                print(f"  {line}", flush=True)
            yield outcome


def _run(proof: Proof, folder: Path, patience: float) -> Outcome:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    began, path = time.monotonic(), folder / f"{proof.name}.txt"
    with path.open("w") as log:
        process = subprocess.Popen(proof.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        ended = _wait(process, patience)
    how = "held" if process.returncode == 0 else f"failed ({process.returncode})"
    log_text = path.read_text(errors="replace")
    return Outcome(proof.name, proof.command, how if ended else "did not end", time.monotonic() - began, log_text)


def _wait(process: subprocess.Popen[bytes], patience: float) -> bool:
    try:
        process.wait(max(patience, 0.1))
        return True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest and the fuzz then tell what they have
        try:
            process.wait(MERCY)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return False


_TELLING = re.compile(r"^(FAILED|ERROR|E   |=+ .*(passed|failed|SUMMARY)|\d+ (passed|failed)|\d+ cases in)|SUMMARY:")


def told(log: str, most: int = 20) -> list[str]:
    """The lines that count."""
    return list(dict.fromkeys(line[:200] for line in log.splitlines() if _TELLING.search(line)))[-most:]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the logs go")
    cores = max(1, (os.cpu_count() or 1) - len(TOOLS))
    parser.add_argument("--jobs", type=int, default=cores, help="processes of tests and of random calls")
    parser.add_argument("--cases", type=int, default=2000, help="random calls on each kernel system")
    parser.add_argument("--patience", type=float, default=3600, help="seconds for the tests, and for the random calls")
    parser.add_argument("--seed", type=int, default=0, help="of the first random call")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=" ".join(NAMES))
    parser.add_argument("--commit", help="which this is, where no repository tells")
    options = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None and not set(options.only).isdisjoint(TOOLS):
        print("compute-sanitizer is not installed (it comes with the CUDA toolkit): its tools are left out")
        options.only = [name for name in options.only if name not in TOOLS]
    options.folder.mkdir(parents=True, exist_ok=True)
    record = Record(options.folder, about(), commit(options.commit), NAMES)
    if record.other is not None:
        print(record.other)
    held = True
    fuzzes = random_calls(options.jobs, options.cases, options.seed)
    for group in ([tests(options.jobs), *sanitizers()], *([fuzz] for fuzz in fuzzes)):
        chosen = [proof for proof in group if proof.name in options.only]
        for outcome in run(chosen, options.folder, options.patience):
            record.add(outcome)
            held &= outcome.held
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
