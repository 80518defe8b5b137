"""Attention over several processes of this machine: time, and bytes sent beside those that theory tells."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from tilewise import variants
from tilewise._version import __version__
from tilewise.bench import machine
from tilewise.bench.revision import revision
from tilewise.bench.table import columns
from tilewise.explanation import size

SCHEMA = "tilewise bench --parallel 1"
MASKS: dict[str, Callable[[], Any]] = {
    "full": lambda: None, "causal": variants.causal, "window": lambda: variants.causal() & variants.window(512),
}  # fmt: skip
METHODS = ("ring", "gather", "heads")
_ITEM = 4  # bytes of a float32
_WARM = 2

Record = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    n: int = 4096
    heads: int = 8
    heads_k: int = 8
    d: int = 64
    repeat: int = 5


def results(ranks: list[int], sizes: Sizes, tell: Callable[[str], None]) -> dict[str, Any]:
    """Everything that was measured, and where."""
    records: list[Record] = []
    for count in ranks:
        tell(f"{count} {'process' if count == 1 else 'processes'}")
        records += measured(count, sizes)
    return {
        "schema": SCHEMA, "tilewise": __version__, "date": date.today().isoformat(), "revision": revision(),
        "machine": machine.describe(threads=1), "sizes": asdict(sizes), "records": records,
    }  # fmt: skip


def measured(ranks: int, sizes: Sizes) -> list[Record]:
    """Each mask and method on so many processes, a thread each."""
    import torch.multiprocessing as multiprocessing

    kind = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(kind)
    if kind == "forkserver":
        context.set_forkserver_preload(["tilewise.parallel"])  # imported once, not by each process
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = ranks, sizes, str(Path(folder) / "store"), answers
        multiprocessing.start_processes(_rank, given, ranks, start_method=kind)
    records: list[Record] = answers.get()
    return records


def _rank(rank: int, ranks: int, sizes: Sizes, store: str, answers: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from tilewise import dispatch, set_num_threads

    torch.set_num_threads(1)
    if dispatch.kernel("cpu").unavailable() is None:
        set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    records = [_record(mesh, mask, method, sizes) for mask in MASKS for method in _methods(ranks, sizes)]
    if rank == 0:
        answers.put(records)
    dist.destroy_process_group()


def _methods(ranks: int, sizes: Sizes) -> tuple[str, ...]:
    able = METHODS if sizes.heads % ranks == sizes.heads_k % ranks == 0 else METHODS[:-1]
    return able if ranks > 1 else ("one process",)


def _record(mesh: Any, mask: str, method: str, sizes: Sizes) -> Record:
    """Of the rank that takes longest, and of the one that sends most."""
    import torch
    import torch.distributed as dist

    from tilewise import attention, parallel

    ranks, variant = mesh.size(), MASKS[mask]()
    layout = "zigzag" if mask == "causal" else "contiguous"
    torch.manual_seed(0)
    whole = (torch.randn(1, heads, sizes.n, sizes.d) for heads in (sizes.heads, sizes.heads_k, sizes.heads_k))
    q, k, v = (parallel.shard(x, mesh, dim=2, layout=layout).clone().requires_grad_() for x in whole)

    def call() -> Any:
        if ranks == 1:
            return attention(q, k, v, mask=variant)
        return parallel.attention(q, k, v, mesh=mesh, mask=variant, layout=layout, method=method)

    times, sent = [], []
    for _ in range(_WARM + sizes.repeat):
        dist.barrier()
        began = time.perf_counter()
        with parallel.count_traffic() as forward:
            out = call()
        middle = time.perf_counter()
        with parallel.count_traffic() as backward:
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        times.append((middle - began, time.perf_counter() - began))
        sent.append((forward.bytes, backward.bytes))
    own = [*(median(each) for each in zip(*times[_WARM:], strict=True)), *sent[-1]]
    most = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {
        "ranks": ranks, "mask": mask, "method": method, "layout": layout,
        "forward_ms": 1e3 * float(most[0]), "both_ms": 1e3 * float(most[1]),
        "forward_bytes": int(most[2]), "backward_bytes": int(most[3]), **theory(ranks, method, sizes),
    }  # fmt: skip


def theory(ranks: int, method: str, sizes: Sizes) -> dict[str, int]:
    """What a rank sends where nothing is masked. Keys and values come to a rank from all others, and their gradients go
    back; or of a rank's q, k, v and out the share of the others' heads, and of lse, which comes back alone."""
    away, n = ranks - 1, sizes.n
    if method == "heads":
        row = (sizes.heads + sizes.heads_k) * sizes.d * 2
        given = n * away * row * _ITEM // ranks**2
        lse = n * away * sizes.heads * _ITEM // ranks**2
        return {"forward_theory": given + lse, "backward_theory": given}
    keys = 0 if ranks == 1 else n * sizes.heads_k * 2 * sizes.d * _ITEM * away // ranks
    return {"forward_theory": keys, "backward_theory": 2 * keys}


# -- as text ----------------------------------------------------------------------------------------------------------

HEADS = ("mask, ranks, method", "forward ms", "with backward ms", "speed", "sent forward", "sent backward")
NOTES = (
    "speed: of forward and backward, beside one process with one thread. sent: by the busiest rank, and as a share of "
    "what theory tells where nothing is masked.",
    "A causal mask's sequence lies in zig-zag; the window is a query's own key and 512 before it.",
)


def text(found: dict[str, Any]) -> str:
    s = found["sizes"]
    what = f"n {s['n']}, heads {s['heads']} (keys: {s['heads_k']}), d {s['d']}, float32, one thread a process"
    lines = [f"tilewise {found['tilewise']}, {found['date']}", machine.one_line(found["machine"]), what]
    alone = {r["mask"]: r["both_ms"] for r in found["records"] if r["ranks"] == 1}
    rows = [_row(r, alone) for r in sorted(found["records"], key=lambda r: (list(MASKS).index(r["mask"]), r["ranks"]))]
    return "\n".join([*lines, "", *columns([HEADS, *rows]), "", *NOTES])


def _row(r: Record, alone: dict[str, float]) -> tuple[str, ...]:
    speed = f"{alone[r['mask']] / r['both_ms']:.2f}x" if r["mask"] in alone else "-"
    sent = (_sent(r[f"{each}_bytes"], r[f"{each}_theory"]) for each in ("forward", "backward"))
    name = f"{r['mask']}, {r['ranks']}, {r['method']}"
    return name, f"{r['forward_ms']:.1f}", f"{r['both_ms']:.1f}", speed, *sent


def _sent(found: int, told: int) -> str:
    return f"{size(found)} ({found / told:.0%})" if told else "-"
