"""Results files as runs: one reader for each schema that `tilewise bench` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewise.bench import machine, suite
from tilewise.bench.gpu import run as gpu_run
from tilewise.bench.gpu import suite as gpu_suite
from tilewise.bench.page import trials
from tilewise.bench.page.measurement import Measurement, Run, Unit
from tilewise.bench.run import SCHEMA
from tilewise.explanation import size
from tilewise.linear import bench as linear
from tilewise.linear import bench_gpu as linear_gpu
from tilewise.referee.results import SCHEMA as TRIAL

Record = Mapping[str, Any]
Results = Mapping[str, Any]
MILLISECONDS = Unit("ms", higher_is_better=False)
_PEERS = "the best peer"


class BadResultsError(ValueError):
    """A file that `tilewise bench` did not write so: what is wrong with it."""


class TrialError(BadResultsError):
    """A file of `tilewise judge`, which has no times: see trials.py."""


def read(path: Path, name: str = "") -> Run:
    """name: what the page calls the file."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise BadResultsError(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise BadResultsError("is not JSON") from None
    schema = results.get("schema") if isinstance(results, dict) else None
    if schema == TRIAL:
        if not trials.is_whole(results):
            raise BadResultsError(f"is not as schema {schema!r} has it")
        raise TrialError("is of `tilewise judge --json`, which measures nothing")
    reader = READERS.get(schema) if isinstance(schema, int | str) else None
    if reader is None:
        known = ", ".join(map(repr, READERS))
        raise BadResultsError(f"is not of `tilewise bench --json`: its schema is {schema!r}, none of {known}")
    if not isinstance(results.get("records"), list) or not results["records"]:
        raise BadResultsError("has no records")
    try:
        return replace(reader(path, results), path=name or path.name)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise BadResultsError(f"is not as schema {schema!r} has it: {what}") from None


def _no_number(name: str) -> None:
    raise ValueError(name)


def _number(r: Record, name: str) -> float | None:
    value = r.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadResultsError(f"has {name} {value!r}, expected a number")
    return float(value)


def _count(r: Record, name: str) -> int:
    value = r[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadResultsError(f"has {name} {value!r}, expected a whole number of at least 1")
    return value


def _key_heads(r: Record) -> int | None:
    """None: as many as query heads, which needs no word."""
    return None if r["heads_k"] == r["heads"] else _count(r, "heads_k")


def _run(path: Path, results: Results, measurements: Iterable[Measurement], **fields: Any) -> Run:
    made = {"machine": results.get("machine"), "versus": _PEERS, "limit": "", **fields}
    where = [machine.one_line(made["machine"]), *machine.gpu_lines(made["machine"])]
    return Run(
        path.name, measurements=list(measurements), about=results, origin=_origin(results),
        conditions=" · ".join(where), absent=dict(results.get("missing") or {}), **made,
    )  # fmt: skip


def _origin(results: Results) -> str:
    source = results.get("source") or results.get("revision") or {}
    commit = f"commit {source['commit'][:10]}" if source.get("commit") else "commit not recorded"
    date = str(results.get("date") or "date not recorded").replace("T", " ").replace("Z", " UTC")
    version = f"tilewise {results.get('tilewise') or 'of unknown version'}"
    return " · ".join([date, commit + (", changed" if source.get("dirty") else ""), version])


def _judged(r: Record) -> dict[str, Any]:
    """What both suites' records say in the same words."""
    return {
        "contestant": str(r["contestant"]), "ours": bool(r["ours"]), "status": str(r["status"]), "reason": r["reason"],
        "ms": _number(r, "median_ms"), "ratio": _number(r, "ratio") if r["ours"] else None,
        "error": _number(r, "error"),
    }  # fmt: skip


# -- `tilewise bench`, and --cpu --------------------------------------------------------------------------------------


def _cpu(path: Path, results: Results) -> Run:
    name = results["options"].get("section", "sweep")
    about = suite.SECTIONS[name].about if name in suite.SECTIONS else f"a sweep: {path.stem}"
    reads = all(r["n_q"] == 1 for r in results["records"])
    return _run(
        path, results, [_cpu_record(r, reads, results["machine"]) for r in results["records"]], name=name, title=about,
        unit=Unit("GB/s" if reads else "GFLOP/s"),
        limit="a plain read of the same k and v" if reads else "the measured peak of float32",
    )  # fmt: skip


def _cpu_record(r: Record, reads: bool, machine: Record) -> Measurement:
    cell = {
        "work": "decode" if r["n_q"] == 1 else r["pass"], "variant": r["variant"], "dtype": r["dtype"],
        "d": _count(r, "d"), "n": _count(r, "n_k"), "heads": _count(r, "heads"), "heads_k": _key_heads(r),
        "batch": _count(r, "batch"), "queries": None if r["n_q"] == r["n_k"] else r["n_q"],
    }  # fmt: skip
    value, share, limit = ("read_gbs", "read_fraction", "plain_read_gbs") if reads else ("gflops", "fraction", None)
    fraction = _number(r, share)
    return Measurement(
        cell, **_judged(r), low_ms=_number(r, "p10_ms"), high_ms=_number(r, "p90_ms"), value=_number(r, value),
        limit=_number(r, limit) if limit else _number(machine, "peak_gflops") if fraction else None, fraction=fraction,
        extra_bytes=_number(r, "extra_bytes"), matrix_bytes=_number(r, "matrix_bytes"),
    )  # fmt: skip


# -- `tilewise bench --gpu` -------------------------------------------------------------------------------------------

_MORE: dict[str, tuple[str, Callable[[float], str]]] = {
    "tensor_busy": ("tensor cores busy", "{:.0f}%".format),
    "exp_busy": ("exponentials busy", "{:.0f}%".format),
    "issue_busy": ("instructions issued", "{:.0f}%".format),
    "plan_bytes": ("plan's bytes", size),
    "l2_bytes": ("L2 bytes", size),
    "dram_bytes": ("DRAM bytes", size),
    "warm_ms": ("later processes, ms", "{:.0f}".format),
    "compiled": ("kernels compiled", "{:.0f}".format),
}


def _gpu(path: Path, results: Results) -> Run:
    name = results["options"]["section"]
    reads = all(r.get("queries") for r in results["records"])
    timed = _timed(results["records"])
    return _run(
        path, results, [_gpu_record(r, results["machine"], timed) for r in results["records"]], name=name,
        title=gpu_suite.SECTIONS[name].about if name in gpu_suite.SECTIONS else name,
        unit=_TIMES[timed] if timed else Unit("GB/s" if reads else "TFLOP/s"),
        limit="the measured rate of reading memory" if reads else "the measured matmul of 8192",
        versus=_gpu_versus(results["records"]),
    )  # fmt: skip


_TIMES = {"call": Unit("µs", higher_is_better=False), "first call": MILLISECONDS}


def _gpu_versus(records: list[Record]) -> str:
    """Another run of ours stands in for a peer where packed sequences are beside the same as a batch."""
    peers = {str(r["contestant"]) for r in records if not r["ours"]}
    return peers.pop() if len(peers) == 1 else _PEERS


def _timed(records: list[Record]) -> str | None:
    """Where a time is told and no speed: the host's time of a call, and the first call of a process."""
    if any(r.get("warm_ms") is not None for r in records):
        return "first call"
    return "call" if any(r.get("how") == "host" for r in records) else None


def _gpu_record(r: Record, machine: Record, timed: str | None) -> Measurement:
    rounds = r.get("rounds_ms") or []
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in rounds):
        raise BadResultsError("has rounds_ms that are not numbers")
    cell = {
        "work": timed or _gpu_work(r), "variant": r["variant"], "dtype": r["dtype"], "d": _count(r, "d"),
        "n": _count(r, "n"), "inputs": None if r["inputs"] == "normal" else r["inputs"], "packed": r["packed"] or None,
        "heads": _count(r, "heads"), "heads_k": _key_heads(r), "batch": _count(r, "batch"),
        "queries": r.get("queries") or None,
    }  # fmt: skip
    judged, told = _judged(r), {name: _number(r, name) for name in _MORE}
    more = {_MORE[name][0]: _MORE[name][1](x) for name, x in told.items() if x is not None}
    noise: dict[str, Any] = {"low_ms": min(rounds, default=None), "high_ms": max(rounds, default=None)}
    if timed:
        value = judged["ms"] and judged["ms"] * (1e3 if timed == "call" else 1)
        return Measurement(cell, **judged, **noise, value=value, more=more)
    names = ("gbs", "read_fraction", "read_gbs") if r.get("queries") else ("tflops", "fraction", "matmul_tflops")
    return Measurement(
        cell, **judged, **noise, more=more, value=_number(r, names[0]), fraction=_number(r, names[1]),
        limit=_number(machine, names[2]),
    )  # fmt: skip


def _gpu_work(r: Record) -> str:
    if r.get("queries"):
        return "decode"
    return "training step" if r.get("step") else "backward" if r["backward"] else "forward"


# -- linear attention, and several processes --------------------------------------------------------------------------


def _linear(path: Path, results: Results) -> Run:
    shape = {"work": "linear", "variant": "causal", "d": _count(results, "d"), "heads": _count(results, "heads")}
    made = []
    for r in results["records"]:
        cell, taken = {**shape, "n": _count(r, "n")}, {name: _number(r, name) for name in ("linear", "softmax")}
        if not taken["linear"] or not taken["softmax"]:
            raise BadResultsError(f"has no time at n {r['n']}")
        for name, seconds in taken.items():
            ratio = taken["softmax"] / taken["linear"] if name == "linear" else None
            ms = 1e3 * (seconds or 0.0)
            made.append(Measurement(cell, f"tilewise {name}", name == "linear", ms=ms, value=ms, ratio=ratio))
    title = "linear attention beside causal softmax attention"
    return _run(path, results, made, name="linear", title=title, unit=MILLISECONDS, versus="softmax attention")


def _linear_gpu(path: Path, results: Results) -> Run:
    copy, made = _number(results, "copy"), []
    for r in results["records"]:
        for work, name in (("linear", "forward"), ("linear backward", "backward")):
            cell = {"work": work, "variant": "causal", **{x: _count(r, x) for x in ("d", "n", "heads", "batch")}}
            rate, ms = _number(r, f"{name}_rate"), _number(r, f"{name}_ms")
            share = rate / copy if rate and copy else None
            who, ours = r.get("contestant", "tilewise triton"), r.get("ours", True)
            ratio = _number(r, f"{name}_ratio") if f"{name}_ratio" in r else None
            made.append(Measurement(
                cell, who, ours, r.get("status", "ok"), r.get("reason"), ms=ms, value=rate, ratio=ratio, limit=copy,
                fraction=share,
            ))  # fmt: skip
    where = results.get("machine") or {"gpu": results["gpu"]}
    limit, title = "the measured rate of a copy", "linear attention, bfloat16"
    return _run(path, results, made, name="linear", title=title, unit=Unit("GB/s"), limit=limit, machine=where)


def _parallel(path: Path, results: Results) -> Run:
    made = []
    for r in results["records"]:
        for work, name, sent in (("forward", "forward", "forward"), ("forward+backward", "both", "backward")):
            cell = {
                "work": f"{work}, several processes", "variant": r["mask"], "layout": r["layout"],
                "ranks": _count(r, "ranks"), "heads_k": _key_heads(results["sizes"]),
                **{x: _count(results["sizes"], x) for x in ("d", "n", "heads")},
            }  # fmt: skip
            ms, told = _number(r, f"{name}_ms"), _number(r, f"{sent}_bytes")
            more = {} if told is None else {f"sent, {sent}": size(told)}
            made.append(Measurement(cell, f"tilewise {r['method']}", True, ms=ms, value=ms, more=more))
    return _run(path, results, made, name="parallel", title="attention over several processes", unit=MILLISECONDS)


READERS: dict[Any, Callable[[Path, Results], Run]] = {
    SCHEMA: _cpu,
    gpu_run.SCHEMA: _gpu,
    linear.SCHEMA: _linear,
    "linear gpu 1": _linear_gpu,  # ours alone, a call's time
    linear_gpu.SCHEMA: _linear_gpu,
    "tilewise bench --parallel 1": _parallel,
}


# -- files and folders ------------------------------------------------------------------------------------------------


def found(places: Iterable[Path]) -> tuple[list[Run], dict[str, str]]:
    """Every run in these files and folders, trials aside; and what was left out of the folders, and why."""
    runs, left_out = [], {}
    for place in places:
        if not place.is_dir():
            with suppress(TrialError):
                runs.append(read(place, place.name if place.is_absolute() else str(place)))
            continue
        for path in sorted(place.rglob("*.json")):
            name = str(Path(place.resolve().name, path.relative_to(place)))  # no page tells where a folder lies
            try:
                runs.append(read(path, name))
            except TrialError:
                continue
            except BadResultsError as error:
                left_out[name] = str(error)
    return runs, left_out
