"""What the GPU kernels must reach, and whether the results of the suite show it. Nothing here is a measured number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tilewise.bench.gpu.contestants import (
    CUDNN,
    DENSE,
    EFFICIENT,
    FLASH,
    FLASH_ORDERED,
    FLEX,
    PAGED,
    SDPA,
    SDPA_MODULE,
)
from tilewise.bench.gpu.suite import AHEAD, LENGTHS
from tilewise.bench.gpu.suite import TRITON as TRITON_NAME
from tilewise.bench.table import geometric_mean
from tilewise.bench.targets import Check, valued
from tilewise.kernels.cute import projected
from tilewise.spec import Shape

Record = dict[str, Any]
Results = dict[str, Any]

FORWARD = {64: (1.10, 1.02), 128: (1.10, 1.02), 256: (1.00, 0.95)}  # to the best peer: the mean, and no case below
STRESS = 0.95
OVER_FLEX = 1.2
OF_FLASH = 1 / 1.15
GQA = 1.0
PACKING = 1.05  # times the time of the same sequences as a batch
TRITON = (1.10, 1.00)  # to FlexAttention: the mean, and no case below
BIAS_GRADIENT = 3.0
GRADIENTS = (1.00, 0.93)  # to the best peer: the mean, and no case below
ORDER = 0.85  # of the speed that gradients have in any order
CUTE, CUTE_BIAS = (0.97, 0.90), 1.5  # to FlashAttention-4: the mean, and no case below; with a bias to FlexAttention
CUTE_GRADIENTS = 0.85
PROJECTION = 1.0  # to attention and a product behind it
# TFLOP/s: 1.05 times those of the example that comes with TileLang 0.1.15, by mask, d and n.
TILELANG = {
    ("full", 64, 4096): 443.0,
    ("causal", 64, 4096): 366.0,
    ("full", 128, 4096): 611.0,
    ("causal", 128, 16384): 573.0,
}
STEP = 1.00
READING = 0.85  # of the rate at which memory is read
LAUNCH = 1.5  # times that of PyTorch's own attention
TRITON_SPEED = {"triton": 560.0, "backward": 470.0}  # TFLOP/s at d 128 and the longest n, of every mask
# Milliseconds of a first call: of kernels that were compiled ahead, of others, of either in later processes; Triton's.
AHEAD_MS, COMPILED_MS, LATER_MS, TRITON_MS = 100.0, 4000.0, 100.0, 5000.0


def checks(sections: dict[str, Results]) -> list[Check]:
    """Every check of the sections that there are results of."""
    return [check for name, of in _CHECKS.items() if name in sections for check in of(_ours(sections[name]))]


def _ours(results: Results) -> list[Record]:
    """Our records; each says who was not there to be compared with."""
    return [{**r, "missing": results["missing"]} for r in results["records"] if r["ours"]]


def _forward(records: list[Record]) -> Iterator[Check]:
    for d, (mean, least) in FORWARD.items():
        chosen = [r for r in records if r["d"] == d]
        if chosen:
            yield _to_best(f"forward, d {d}: geometric mean to the best peer", chosen, mean, geometric_mean)
            yield _to_best(f"forward, d {d}: slowest case to the best peer", chosen, least, min)


def _stress(records: list[Record]) -> Iterator[Check]:
    yield _to_best("hard inputs: slowest case to the best peer", records, STRESS, min)


def _variants(records: list[Record]) -> Iterator[Check]:
    for variant in dict.fromkeys(r["variant"] for r in records):
        chosen = [r for r in records if r["variant"] == variant]
        yield _to_peer(f"{variant}: slowest case to FlexAttention", chosen, FLEX, OVER_FLEX)
        if any(FLASH in (r["ratios"] or {}) for r in chosen):
            yield _to_peer(f"{variant}: slowest case to FlashAttention-4", chosen, FLASH, OF_FLASH)


def _gqa(records: list[Record]) -> Iterator[Check]:
    yield _to_peer("grouped heads: slowest case to cuDNN", records, CUDNN, GQA)
    yield _to_peer("grouped heads: slowest case to FlashAttention-4", records, FLASH, None)


def _varlen(records: list[Record]) -> Iterator[Check]:
    equal = [r for r in records if r["packed"] == "equal"]
    times = Check("packed sequences: most time over the same as a batch", PACKING, at_most=True)
    yield valued(times, equal, _over(DENSE), max, "the batch has no number")


def _projection(records: list[Record]) -> Iterator[Check]:
    taken = [r for r in records if projected.pays(shape_of(r), r["model"])]
    if taken:
        check = Check("output projection, where `auto` takes it: slowest case to two kernels", PROJECTION)
        yield valued(check, taken, lambda r: r["ratio"], min, "no peer ran")


def shape_of(r: Record) -> Shape:
    """Of queries over keys."""
    return Shape(r["batch"], r["heads"], r["heads_k"], r["queries"] or r["n"], r["n"], r["d"], r["d"], r["dtype"])


def _triton(records: list[Record]) -> Iterator[Check]:
    yield from _beside_flex("triton, forward", records)
    yield from _triton_speed("triton, forward", records, TRITON_SPEED["triton"])


def _backward(records: list[Record]) -> Iterator[Check]:
    yield from _beside_flex("triton, backward", [r for r in records if r["variant"] != "bias"])
    yield from _triton_speed("triton, backward", records, TRITON_SPEED["backward"])
    yield from _of_a_bias("triton", [r for r in records if r["variant"] == "bias"])


def _learned(records: list[Record]) -> Iterator[Check]:
    yield from _of_a_bias("cuda", records)


def _of_a_bias(system: str, records: list[Record]) -> Iterator[Check]:
    for peer in (FLEX, EFFICIENT):
        yield _to_peer(f"{system}, gradient of a bias: slowest case to {peer}", records, peer, BIAS_GRADIENT)


def _gradients(records: list[Record]) -> Iterator[Check]:
    """Each of ours beside the best peer; the one that has an order beside FlashAttention-4's that has one, too."""
    mean, least = GRADIENTS
    for name in dict.fromkeys(r["contestant"] for r in records):
        chosen, what = [r for r in records if r["contestant"] == name], f"gradients, {name}"
        yield _to_best(f"{what}: geometric mean to the best peer", chosen, mean, geometric_mean)
        yield _to_best(f"{what}: slowest case to the best peer", chosen, least, min)
        if not name.endswith("unordered"):
            ordered = f"{what}: geometric mean to deterministic FlashAttention-4"
            yield _to_peer(ordered, chosen, FLASH_ORDERED, 1.0, geometric_mean)
            yield _in_order(f"{what}: least of the speed in any order", records, name)


def _in_order(what: str, records: list[Record], name: str) -> Check:
    """The same case by both of ours."""

    def case(r: Record) -> tuple[Any, ...]:
        return r["variant"], r["d"], r["n"]

    right = [r for r in records if r["status"] == "ok"]
    loose = {case(r): r["median_ms"] for r in right if r["contestant"].endswith("unordered")}
    both = [r for r in right if r["contestant"] == name and case(r) in loose]
    return valued(Check(what, ORDER), both, lambda r: loose[case(r)] / r["median_ms"], min, "no case has both")


def _cute(records: list[Record]) -> Iterator[Check]:
    mean, least = CUTE
    plain, biased = ([r for r in records if (r["variant"] == "bias") is told] for told in (False, True))
    yield _to_peer(f"cute, forward: geometric mean to {FLASH}", plain, FLASH, mean, geometric_mean)
    yield _to_peer(f"cute, forward: slowest case to {FLASH}", plain, FLASH, least)
    yield _to_peer(f"cute, with a bias: slowest case to {FLEX}", biased, FLEX, CUTE_BIAS)


def _cute_gradients(records: list[Record]) -> Iterator[Check]:
    yield _to_peer(f"cute, backward: geometric mean to {FLASH}", records, FLASH, CUTE_GRADIENTS, geometric_mean)


def _tilelang(records: list[Record]) -> Iterator[Check]:
    """Beside numbers of the same method: the example is TileLang's own, and no package."""
    for (variant, d, n), limit in TILELANG.items():
        chosen = [r for r in records if (r["variant"], r["d"], r["n"]) == (variant, d, n)]
        speed = Check(f"tilelang, forward: {variant}, d {d}, n {n}", limit, unit="TFLOP/s")
        yield valued(speed, chosen, lambda r: r["tflops"], min)


def _tilelang_gradients(records: list[Record]) -> Iterator[Check]:
    yield _to_peer(f"tilelang, backward: geometric mean to {FLEX}", records, FLEX, None, geometric_mean)


def _step(records: list[Record]) -> Iterator[Check]:
    yield _to_peer("a training step of a module: slowest case to cuDNN's", records, SDPA_MODULE, STEP)


def _decode(records: list[Record]) -> Iterator[Check]:
    for name in dict.fromkeys(r["contestant"] for r in records):
        share = Check(f"decode, {name}: least share of the read rate", READING, percent=True)
        chosen = [r for r in records if r["contestant"] == name]
        yield valued(share, chosen, lambda r: r["read_fraction"], min, "no number")
        single = [r for r in chosen if r["batch"] == 1]  # cuDNN's own cache is in no pages
        yield _to_peer(f"decode, {name}, one sequence: to cuDNN", single, CUDNN, None if name.endswith(PAGED) else 1.0)


def _beside_flex(what: str, records: list[Record]) -> Iterator[Check]:
    mean, least = TRITON
    yield _to_peer(f"{what}: geometric mean to {FLEX}", records, FLEX, mean, geometric_mean)
    yield _to_peer(f"{what}: slowest case to {FLEX}", records, FLEX, least)


def _triton_speed(what: str, records: list[Record], limit: float) -> Iterator[Check]:
    for r in records:
        if r["d"] == 128 and r["n"] == LENGTHS[-1]:
            speed = Check(f"{what}: {r['variant']}, d 128, n {r['n']}", limit, unit="TFLOP/s")
            yield valued(speed, [r], lambda r: r["tflops"], min)


def _launch(records: list[Record]) -> Iterator[Check]:
    for name in dict.fromkeys(r["contestant"] for r in records):
        times = Check(f"launch, {name}: host time over PyTorch's SDPA", LAUNCH, at_most=True)
        chosen = [r for r in records if r["contestant"] == name]
        yield valued(times, chosen, _over(SDPA), max, f"{SDPA} has no number")


def _first(records: list[Record]) -> Iterator[Check]:
    """The slowest of each kind."""
    triton, cuda = ([r for r in records if r["contestant"].endswith(TRITON_NAME) is told] for told in (True, False))
    ahead, other = ([r for r in cuda if (r["variant"] in AHEAD) is told] for told in (True, False))
    check = _slowest("compiled ahead", ahead, "median_ms", AHEAD_MS)
    lacking = sum(bool(r["compiled"]) for r in ahead)
    yield replace(check, note=f"{lacking} of {len(ahead)} were not; `make kernels` does it") if lacking else check
    yield _slowest("compiled when called", other, "median_ms", COMPILED_MS)
    yield _slowest("in later processes", cuda, "warm_ms", LATER_MS)
    for what, backward in (("forward", False), ("forward and backward", True)):
        chosen = [r for r in triton if r["backward"] is backward]
        yield _slowest(f"triton, {what}", chosen, "median_ms", TRITON_MS)
        yield _slowest(f"triton, {what}, in later processes", chosen, "warm_ms", None)


def _slowest(what: str, records: list[Record], field: str, limit: float | None) -> Check:
    return valued(Check(f"first call, {what}", limit, at_most=True, unit="ms"), records, lambda r: r[field], max)


def _over(peer: str) -> Callable[[Record], float | None]:
    """Our time over that of the peer whose name is this, or ends so."""

    def time(r: Record) -> float | None:
        return next((1 / x for name, x in (r["ratios"] or {}).items() if name in (peer, r["contestant"] + peer)), None)

    return time


def _to_best(what: str, records: list[Record], limit: float, of: Callable[[list[float]], float]) -> Check:
    """Judged only beside the strongest peer: without it the number is told, and proves nothing."""
    check = valued(Check(what, limit), records, lambda r: r["ratio"], of, "no peer ran")
    if records and FLASH in records[0]["missing"]:
        return replace(check, limit=None, note=f"not judged: {FLASH} was not there")
    without = sum(FLASH not in (r["ratios"] or {}) for r in records)
    return (
        replace(check, note=f"{without} of {len(records)} cases without {FLASH}") if without and check.value else check
    )


def _to_peer(
    what: str, records: list[Record], peer: str, limit: float | None, of: Callable[[list[float]], float] = min
) -> Check:
    check = Check(what, limit)
    return valued(check, records, lambda r: (r["ratios"] or {}).get(peer), of, f"{peer} has no number")


_CHECKS: dict[str, Callable[[list[Record]], Iterator[Check]]] = {
    "forward": _forward, "stress": _stress, "variants": _variants, "gqa": _gqa, "varlen": _varlen, "triton": _triton,
    "backward": _backward, "gradients": _gradients, "learned": _learned, "cute": _cute,
    "cute_gradients": _cute_gradients, "tilelang": _tilelang, "tilelang_gradients": _tilelang_gradients,
    "projection": _projection, "step": _step, "decode": _decode, "launch": _launch, "first": _first,
}  # fmt: skip
