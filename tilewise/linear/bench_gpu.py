"""Linear attention on a GPU, beside flash-linear-attention where it is installed: bfloat16, causal, not normalized.

Each time is told twice: the GPU's own (calls in a CUDA graph, or in a row behind a GPU that sleeps meanwhile), and that
of a call as it comes, the host included. Contestants take turns; outputs and gradients are held against float64's.
Compiling comes first (bench_ahead.py), and what a contestant chooses for itself is chosen before it is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import inf, isfinite
from operator import itemgetter
from typing import Any, NamedTuple

from tilewise.bench import machine
from tilewise.bench.contestants import OURS
from tilewise.bench.gpu.contestants import Entry
from tilewise.bench.gpu.timing import GpuClock, Settings, rounds
from tilewise.bench.report import target_lines
from tilewise.bench.stamp import stamp
from tilewise.bench.table import columns, geometric_mean
from tilewise.bench.targets import Check, valued
from tilewise.linear import dispatch
from tilewise.linear.api import linear_attention
from tilewise.spec import Shape as CallShape

SCHEMA = "linear gpu 2"
PEER = "flash-linear-attention"
TARGETS = {"forward": 2.5, "backward": 1.7}  # times the peer's speed: geometric means
WITHIN = 1e-2  # relative error of all numbers together; bfloat16 alone has 2e-3
_CHUNK = 256
DEVICE = "cuda"
Record = dict[str, Any]
Results = dict[str, Any]


class Shape(NamedTuple):
    batch: int
    n: int
    heads: int
    d: int


SHAPES = (Shape(8, 2048, 16, 128), Shape(1, 16384, 16, 128), Shape(1, 131072, 16, 128), Shape(1, 16384, 32, 64))


class Contestant(NamedTuple):
    """A way to compute out of q, k and v, which it is given as it likes them to lie (turned: batch, n, heads, d)."""

    run: Callable[..., Any]
    ours: bool = False
    turned: bool = False

    def given(self, x: Any) -> Any:
        return x.transpose(1, 2).contiguous() if self.turned else x.clone()

    def read(self, x: Any) -> Any:
        return x.transpose(1, 2) if self.turned else x


def results(settings: Settings | None = None, progress: Callable[[str], None] = lambda text: None) -> Results:
    import torch

    from tilewise.linear.bench_ahead import compile_all

    settings = settings or Settings()
    compile_all(progress)
    return {
        "schema": SCHEMA,
        **stamp(machine.describe("cuda")),
        "gpu": torch.cuda.get_device_name(),
        "copy": _copy_rate(torch),
        "peer": _peer_version(),
        "records": [record for shape in SHAPES for record in measured(torch, shape, settings, progress)],
    }


# -- contestants ------------------------------------------------------------------------------------------------------


def contestants(shape: Shape) -> dict[str, Contestant]:
    call = call_shape(shape)
    plain = partial(linear_attention, feature_map="identity", normalize=False)
    found = {
        f"{OURS}{name}": Contestant(partial(plain, kernel=name), ours=True)
        for name in dispatch.SYSTEMS
        if dispatch.reason(name, call) is None
    }
    if has_peer():
        found[PEER] = Contestant(_peer, turned=True)
    return found


def call_shape(shape: Shape) -> CallShape:
    batch, n, heads, d = shape
    return CallShape(batch, heads, heads, n, n, d, d, "bfloat16", "cuda:0")


def has_peer() -> bool:
    return find_spec("fla") is not None


def _peer(q: Any, k: Any, v: Any) -> Any:
    return import_module("fla.ops.linear_attn").chunk_linear_attn(q, k, v, scale=1.0, normalize=False)[0]


def _peer_version() -> str | None:
    return None if not has_peer() else str(getattr(import_module("fla"), "__version__", "unknown"))


# -- measuring --------------------------------------------------------------------------------------------------------


def measured(
    torch: Any, shape: Shape, settings: Settings, progress: Callable[[str], None] = lambda text: None
) -> list[Record]:
    """A record for each contestant."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    size = (shape.batch, shape.heads, shape.n, shape.d)
    inputs = [torch.randn(size, device=DEVICE, dtype=torch.bfloat16, generator=generator) for _ in range(4)]
    wanted = expected(torch, *(x[-1, -1] for x in inputs))
    records, entries = {}, {}
    for name, contestant in contestants(shape).items():
        progress(f"{_named(shape)}: {name} is checked, and tunes itself if it does")
        records[name] = {**shape._asdict(), "contestant": name, "ours": contestant.ours, "error": None, "reason": None}
        try:
            found = entered(torch, contestant, inputs)
        except Exception as error:  # a contestant's failure is a result of the benchmark
            records[name] |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
            continue
        records[name] |= _judged(found.results, wanted)
        entries[name] = found
    gigabytes = inputs[0].numel() * inputs[0].element_size() / 1e9
    # The least that must be moved: q, k, v and out; and q, k, v, d_out and three gradients.
    for what, least in (("forward", 4 * gigabytes), ("backward", 7 * gigabytes)):
        progress(f"{_named(shape)}: {what}")
        calls = {name: getattr(entry, what) for name, entry in entries.items()}
        times = _times(calls, settings)
        peer = times.get(PEER) if PEER in records and records[PEER]["status"] == "ok" else None
        for name, record in records.items():
            ms = times.get(name)
            record |= {
                f"{what}_ms": ms,
                f"{what}_rate": None if ms is None else least / ms * 1e3,
                f"{what}_call_ms": None if ms is None else _call_milliseconds(torch, calls[name].calls[0]),
                f"{what}_ratio": peer / ms if ms and peer and record["ours"] else None,
            }
    return list(records.values())


def _named(shape: Shape) -> str:
    return ", ".join(f"{name} {size}" for name, size in shape._asdict().items())


class _Entered(NamedTuple):
    results: list[Any]  # out, d_q, d_k, d_v, as the inputs lie
    forward: Entry
    backward: Entry


def entered(torch: Any, contestant: Contestant, inputs: list[Any]) -> _Entered:
    *operands, d_out = map(contestant.given, inputs)
    leaves = [x.requires_grad_() for x in operands]
    out = contestant.run(*leaves)
    backward = partial(torch.autograd.grad, out, leaves, d_out, retain_graph=True)
    results = [contestant.read(x) for x in (out, *backward())]
    forward = Entry([_without_gradients(torch, partial(contestant.run, *leaves))])
    return _Entered(results, forward, Entry([backward], capturable=False))


def _judged(found: list[Any], wanted: list[Any]) -> Record:
    error = _error(found, wanted)
    if error <= WITHIN:
        return {"status": "ok", "error": error}
    return {"status": "wrong", "error": error if isfinite(error) else None, "reason": f"off by {error:.1%}"}


def _times(entries: Mapping[str, Entry], settings: Settings) -> dict[str, float]:
    """Milliseconds of a call on the GPU, medians of rounds."""
    clock = GpuClock(settings)
    loops = {name: clock.loop(entry) for name, entry in entries.items()}  # the peer chooses its kernels here
    seconds, failed = rounds({name: partial(clock.turn, loop) for name, loop in loops.items()}, settings.rounds)
    return {name: 1e3 * statistics.median(each) for name, each in seconds.items() if name not in failed}


def _without_gradients(torch: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return call()

    return run


def _call_milliseconds(torch: Any, call: Callable[[], Any], repeat: int = 20) -> float:
    """The median of calls, each between two events; the first few warm up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def _copy_rate(torch: Any) -> float:
    """Gigabytes a second, read and written, of a plain copy: what memory can do."""
    x = torch.empty(1 << 28, device="cuda", dtype=torch.float32)
    y = torch.empty_like(x)
    gigabytes = 2 * float(x.numel() * x.element_size()) / 1e9
    return gigabytes / _call_milliseconds(torch, lambda: y.copy_(x)) * 1e3


# -- right or wrong ---------------------------------------------------------------------------------------------------


def expected(torch: Any, q: Any, k: Any, v: Any, d_out: Any) -> list[Any]:
    """out, d_q, d_k and d_v of one head, in float64: some rows at a time, and a state."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    state: Any = 0.0
    parts: list[Any] = []
    for rows in zip(*(x.split(_CHUNK) for x in (q, k, v)), strict=True):
        q_rows, k_rows, v_rows = rows
        parts.append((q_rows @ k_rows.T).tril() @ v_rows + (q_rows @ state if parts else 0.0))
        state = state + k_rows.T @ v_rows
    out = torch.cat(parts)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out.double())]


def _error(found: list[Any], wanted: list[Any]) -> float:
    """The largest relative error of out and of each gradient, of the last head."""
    errors = [float((x[-1, -1].detach().double() - y).norm() / y.norm()) for x, y in zip(found, wanted, strict=True)]
    return max(error if isfinite(error) else inf for error in errors)


# -- telling ----------------------------------------------------------------------------------------------------------


def checks(found: Results) -> Iterator[Check]:
    """Our speed beside the peer's, for each kernel system of ours."""
    ours = [r for r in found["records"] if r["ours"]]
    for name in dict.fromkeys(r["contestant"] for r in ours):
        for what, limit in TARGETS.items():
            check = Check(f"linear attention, {name.removeprefix(OURS)}, {what}: geometric mean to {PEER}", limit)
            chosen = [r for r in ours if r["contestant"] == name]
            yield valued(check, chosen, itemgetter(f"{what}_ratio"), geometric_mean, f"{PEER} did not run")


def table_of(found: Results) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the rows of a table, for the terminal and for the pages."""
    each = ("ms", "GB/s", "of a copy", "ratio", "a call, ms")
    head = ("batch, n, heads, d", "", *(f"{what} {field}" for what in TARGETS for field in each))
    return head, [_row(r, found["copy"]) for r in found["records"]]


def _row(r: Record, copy: float) -> tuple[str, ...]:
    name = f"{r['batch']}, {r['n']}, {r['heads']}, {r['d']}", r["contestant"]
    if r["status"] != "ok":
        return *name, r["status"], *("-",) * 9
    return *name, *(cell for what in TARGETS for cell in _cells(r, what, copy))


def _cells(r: Record, what: str, copy: float) -> tuple[str, ...]:
    ms, rate, ratio, call = (r[f"{what}_{field}"] for field in ("ms", "rate", "ratio", "call_ms"))
    if ms is None:
        return ("-",) * 5
    return f"{ms:.3f}", f"{rate:.0f}", f"{rate / copy:.0%}", "-" if ratio is None else f"{ratio:.2f}x", f"{call:.3f}"


def notes(found: Results) -> str:
    beside = f"beside {PEER} {found['peer']}" if found["peer"] else f"{PEER} was not there"
    return (
        f"{found['gpu']}, bfloat16, causal, {beside}. Milliseconds are the GPU's own, and then those of a call, host "
        f"and all; GB/s count what must be moved at least, and a copy moves {found['copy']:.0f}."
    )


def text(found: Results) -> str:
    head, rows = table_of(found)
    return "\n".join(["linear attention", *columns([head, *rows]), notes(found), *target_lines(list(checks(found)))])
